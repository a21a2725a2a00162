"""Sigma from norms and angles alone: exact without noise, honest with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runmaker import EMA, NESTEROV, SUM, observed
from twophase.diagnose.observe import LEAST, Observed, observe
from twophase.rule import OuterRule

RULES = {"ema": EMA, "sum": SUM, "nesterov": NESTEROV, "nesterov ema": NESTEROV.to("ema"), "light": OuterRule(1.1, 0.3)}
COLUMNS = ("g", "m", "cosine", "restarted")


def columns_of(rule: OuterRule, sigma: Any, rounds: int = 60, restart: str = "never", **options: Any) -> list[Any]:
    """The record of a simulated run."""
    run = observed(rule, sigma, rounds, restart, **options)
    return [np.asarray(run[name]) for name in COLUMNS]


def seeds_of(
    rule: OuterRule, sigma: Any, restart: str, *, seeds: int, noise: float, rounds: int = 60
) -> list[Observed]:
    """What each of some noisy runs shows."""
    columns = columns_of(rule, sigma, rounds, restart, noise=noise, seeds=list(range(seeds)))
    return [observe(rule, *(column[:, seed] for column in columns)) for seed in range(seeds)]


@pytest.mark.parametrize("restart", ["never", "5", "soft:5:0.3:0.1"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_exact_without_noise(rule: OuterRule, restart: str) -> None:
    """R29: one sigma without noise is seen to rounding, for every rule, form, restart and scale; no round is lost."""
    for sigma, scale in ((1e-3, 1.0), (0.1, 1e-290), (0.5, 1e280), (0.95, 1.0)):
        g, m, cosine, restarted = columns_of(rule, [sigma, sigma], restart=restart)
        seen = observe(rule, g * scale, m * scale, cosine, restarted)
        assert seen.sigma == pytest.approx(sigma, rel=1e-6)
        assert seen.pairs == (59 if restart == "never" else 48)
    assert 0.2 < observe(rule, *columns_of(rule, [0.2, 0.4, 0.6], restart=restart)).sigma < 0.6


@pytest.mark.parametrize("restart", ["never", "5"])
@pytest.mark.parametrize("rule", [EMA, SUM, NESTEROV], ids=["ema", "sum", "nesterov"])
def test_the_interval_covers(rule: OuterRule, restart: str) -> None:
    """It holds the true sigma in nine of ten noisy runs, and 0 where there is only noise."""
    seen = seeds_of(rule, [0.3] * 100, restart, seeds=30, noise=0.1)
    assert np.mean([run.interval[0] <= 0.3 <= run.interval[1] for run in seen]) >= 0.9
    nothing = observe(rule, *columns_of(rule, [1e-9] * 100, restart=restart, noise=1.0, initial=0.0))
    assert nothing.interval[0] <= 0
    assert nothing.noise_share > 0.5
    assert nothing.shown_interval is None


@pytest.mark.slow
def test_what_is_shown_holds() -> None:
    """Where restarts are frequent and the data noisy hardly an interval is shown; where the record tells, it is."""
    rule, sigma = OuterRule(0.35, 0.9, nesterov=True), np.linspace(0.01, 0.1, 40).tolist()
    runs = [run for rounds, noise in ((20, 0.05), (60, 0.05), (150, 0.05), (60, 0.2))
            for run in seeds_of(rule, sigma, "3", seeds=200, noise=noise, rounds=rounds)]  # fmt: skip
    assert sum(run.shown_interval is not None for run in runs) <= 3
    shown = [run.shown_interval for run in seeds_of(SUM, [0.3] * 100, "5", seeds=200, noise=0.1) if run.shown_interval]
    assert len(shown) > 130
    assert np.mean([low <= 0.3 <= high for low, high in shown]) > 0.9


def test_a_decaying_inner_rate_is_divided_out() -> None:
    """Under a cosine sigma falls with the rate: the estimate is that of the mean rate, and the intervals hold it."""
    rates, rule = 0.5 * (1 + np.cos(np.pi * np.arange(150) / 150)), OuterRule(0.7, 0.9)
    usable = np.append(rates[1:] / rates[:-1] >= 0.8, False)
    truth, seen = 0.3 * rates[usable].mean(), []
    for seed in range(20):
        generator, x, m, rows = np.random.default_rng(seed), np.ones(100), np.zeros(100), []
        for rate in rates:
            g = 0.3 * rate * x + 0.003 * rate * generator.standard_normal(100)
            norms = np.linalg.norm(g), np.linalg.norm(m)
            rows.append((*norms, g @ m / (norms[0] * norms[1]) if norms[1] else 0.0))
            m = rule.momentum * m + g
            x = x - rule.lr * m
        g, m, cosine = np.array(rows).T
        seen.append(observe(rule, g, m, cosine, np.zeros(len(rates), dtype=bool), inner_lr=rates))
    assert np.median([run.sigma for run in seen]) == pytest.approx(truth, rel=0.05)
    assert np.mean([run.interval[0] <= truth <= run.interval[1] for run in seen]) >= 0.9


def test_nothing_to_see() -> None:
    """No estimate without momentum, of a restart every round, of too few rounds, or of none that tells."""
    columns = columns_of(SUM, [0.3], 30)
    assert np.isnan(observe(OuterRule(0.7, 0.0), *columns).sigma)
    for g, m, cosine, restarted in (
        (*columns[:3], np.ones(30, dtype=bool)),
        (np.full(30, np.nan), *columns[1:]),
        ([], [], [], []),
        (np.zeros(30), np.zeros(30), np.zeros(30), columns[3]),
        [column[:LEAST] for column in columns],
        (np.ones(30), np.full(30, 2.0), np.ones(30), columns[3]),  # a buffer that keeps its length
        columns,  # a buffer that the rule would not have made
    ):
        assert np.isnan(observe(OuterRule(0.7, 0.5), g, m, cosine, restarted).sigma)
