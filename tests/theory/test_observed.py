"""Sigma from norms and angles alone: exact without noise, honest with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runmaker import EMA, NESTEROV, SUM, observed
from twophase.restart import Decision, Never, RoundSignal, State, Step
from twophase.rule import OuterRule
from twophase.theory.observed import LEAST, Observed, observe

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
        assert (seen.ceiling, seen.sigma) == pytest.approx((sigma, sigma), rel=1e-6)
        assert (seen.foreign, seen.pairs) == (0, 59 if restart == "never" else 48)
    modes = observe(rule, *columns_of(rule, [0.2, 0.4, 0.6], restart=restart))
    assert 0.2 < modes.sigma < 0.6


@pytest.mark.parametrize("restart", ["never", "5"])
@pytest.mark.parametrize("rule", [EMA, SUM, NESTEROV], ids=["ema", "sum", "nesterov"])
def test_the_interval_covers(rule: OuterRule, restart: str) -> None:
    """Two standard errors hold the true sigma in four of five noisy runs, and 0 where there is only noise."""
    seen = seeds_of(rule, [0.3] * 100, restart, seeds=30, noise=0.1)
    assert np.mean([run.interval[0] <= 0.3 <= run.interval[1] for run in seen]) >= 0.8
    assert np.mean([run.ceiling > 0.3 for run in seen]) >= 0.95
    nothing = observe(rule, *columns_of(rule, [1e-9] * 100, restart=restart, noise=1.0, initial=0.0))
    assert nothing.interval[0] <= 0
    assert nothing.ceiling > 0.2 * min(1, 0.7 / rule.lr * rule.injection)
    assert nothing.noise_share > 0.5


@pytest.mark.slow
def test_what_is_shown_holds() -> None:
    """Where restarts are frequent and the data noisy hardly an interval is shown, and of those that are few miss."""
    rule, sigma = OuterRule(0.35, 0.9, nesterov=True), np.linspace(0.01, 0.1, 40).tolist()
    runs = [run for rounds, noise in ((20, 0.05), (60, 0.05), (150, 0.05), (60, 0.2))
            for run in seeds_of(rule, sigma, "3", seeds=200, noise=noise, rounds=rounds)]  # fmt: skip
    shown = [run.shown_interval for run in runs if run.shown_interval]
    assert len(shown) <= 3
    assert sum(low > sigma[-1] or high < sigma[0] for low, high in shown) <= len(shown) / 4
    shown = [run.shown_interval for run in seeds_of(SUM, [0.3] * 100, "5", seeds=200, noise=0.1) if run.shown_interval]
    assert len(shown) > 130  # where the record does tell, it is shown
    assert np.mean([low <= 0.3 <= high for low, high in shown]) > 0.9


def test_cycles_are_counted() -> None:
    """Below ten restart cycles nothing noisy is shown, and the interval is Student's with a degree less than cycles."""
    (seen,) = seeds_of(SUM, [0.3] * 100, "5", seeds=1, noise=0.01, rounds=45)
    assert seen.cycles == 9
    assert seen.shown_interval is None
    assert "9 restart cycles" in seen.why_not
    assert seen.interval[1] - seen.sigma == pytest.approx(2.306 * seen.standard_error, rel=1e-3)


@pytest.mark.parametrize("restart", ["29", "30"])
def test_a_restart_at_the_end_hides_nothing(restart: str) -> None:
    """Where all pairs lie in the cycle before it, they count as those of a run without restarts."""
    seen = observe(SUM, *columns_of(SUM, [0.3], 30, restart))
    assert (seen.cycles, seen.why_not) == (seen.pairs, "")
    assert seen.sigma == pytest.approx(0.3, rel=1e-6)


def test_a_buffer_that_keeps_its_length_determines_nothing() -> None:
    """Then progress and noise cannot be told apart, however many pairs there are; and so it is said."""
    seen = observe(OuterRule(0.7, 0.5), np.ones(30), np.full(30, 2.0), np.ones(30), np.zeros(30, dtype=bool))
    assert np.isnan(seen.sigma)
    assert seen.why_not.startswith("29 pairs of rounds")
    assert seen.why_not.endswith("but do not determine it")


def decaying(rule: OuterRule, sigma: float, rates: Any, *, noise: float = 0.0, seed: int = 0) -> list[Any]:
    """The record of 100 modes whose progress, and whose noise, is proportional to the inner rate."""
    generator, x, m, rows = np.random.default_rng(seed), np.ones(100), np.zeros(100), []
    for rate in rates:
        g = sigma * rate * x + noise * rate * generator.standard_normal(100)
        norms = np.linalg.norm(g), np.linalg.norm(m)
        rows.append((*norms, g @ m / (norms[0] * norms[1]) if norms[1] else 0.0))
        m = rule.momentum * m + g
        x = x - rule.lr * m
    return [*np.array(rows).T, np.zeros(len(rates), dtype=bool)]


def test_a_decaying_inner_rate_is_divided_out() -> None:
    """Pseudo-gradients that shrink with the inner learning rate look like progress unless the rate is given."""
    rates, rule = 0.98 ** np.arange(60), OuterRule(0.1, 0.9)
    record = decaying(rule, 0.01, rates)
    with_rates = observe(rule, *record, inner_lr=rates)
    assert with_rates.ceiling == pytest.approx(0.01 * rates.mean(), rel=0.5)
    assert observe(rule, *record).ceiling > 3 * with_rates.ceiling


def test_progress_that_falls_with_the_inner_rate_is_covered() -> None:
    """Under a cosine sigma falls with the rate: the estimate is that of the mean rate, and the intervals hold it."""
    rates, rule = 0.5 * (1 + np.cos(np.pi * np.arange(150) / 150)), OuterRule(0.7, 0.9)
    usable = np.append(rates[1:] / rates[:-1] >= 0.8, False)
    truth, ratios, covered = 0.3 * rates[usable].mean(), [], []
    for seed in range(20):
        seen = observe(rule, *decaying(rule, 0.3, rates, noise=0.003, seed=seed), inner_lr=rates)
        ratios.append(seen.sigma / truth)
        covered.append(seen.interval[0] <= truth <= seen.interval[1])
    assert np.median(ratios) == pytest.approx(1, abs=0.05)
    assert np.mean(covered) >= 0.9


def test_nothing_to_see() -> None:
    """No estimate without momentum, with a restart every round, from too few rounds, or from numbers that are none."""
    columns = columns_of(SUM, [0.3], 30)
    assert np.isnan(observe(OuterRule(0.7, 0.0), *columns).sigma)
    few = observe(SUM, *(column[:LEAST] for column in columns))
    assert few.pairs == LEAST - 1
    for g, m, cosine, restarted in (
        (*columns[:3], np.ones(30, dtype=bool)),
        (np.full(30, np.nan), *columns[1:]),
        ([], [], [], []),
        (np.zeros(30), np.zeros(30), np.zeros(30), columns[3]),
        [column[:LEAST] for column in columns],
    ):
        assert np.isnan(observe(SUM, g, m, cosine, restarted).sigma)
    clear = Observed(60, 1.5, 0.01, 1.5, 0.0, 0.01, 0, 60)
    assert "more than 1 (1.5 to 1.5), which is outside the model" in clear.why_not
    assert replace(clear, sigma=0.5).why_not == ""
    assert "up to 92 %" in replace(clear, sigma=0.5, noise_share=0.9).why_not


def test_another_rules_record_is_refused() -> None:
    """Rounds whose buffer the rule would not have made are counted and left out; so are gaps in the record."""
    columns = columns_of(SUM, [0.3, 0.3], 30)
    other = observe(OuterRule(0.7, 0.5), *columns)
    assert other.pairs < LEAST
    assert other.foreign > 20
    assert observe(SUM, *columns, follows=np.arange(30) != 15).pairs == 28


class ShortLate(Never):
    """From round 31 on steps by half of the buffer, which goes on as the rule makes it."""

    takes_steps = True

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Take a step in the second half."""
        return state, Step(0.5, 0.9) if signal.round > 30 else None


@pytest.mark.parametrize(("restart", "foreign"), [("never", 0), (ShortLate(), 29), ("auto", 59)])
def test_steps_of_a_policy_are_left_out(restart: Any, foreign: int) -> None:
    """Rounds whose gain is not the rule's tell nothing of it; with the rule's own gains nothing is lost."""
    rule, sigma = OuterRule(0.7, 0.9, nesterov=True), 0.3
    run = observed(rule, [sigma, sigma], 60, restart)
    columns = [run[name] for name in COLUMNS]
    seen = observe(rule, *columns, gain=run["gain"])
    assert seen.foreign == pytest.approx(foreign, abs=3)
    if restart != "auto":
        assert seen.sigma == pytest.approx(sigma, rel=1e-6)
    if isinstance(restart, ShortLate):  # its buffer is the rule's all along
        assert observe(rule, *columns).sigma != pytest.approx(sigma, rel=0.01)
