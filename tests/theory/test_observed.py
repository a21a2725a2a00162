"""Sigma from norms and angles alone: exact without noise, honest with it."""

from __future__ import annotations

import numpy as np
import pytest

from runmaker import EMA, NESTEROV, SUM, observed
from twophase.rule import OuterRule
from twophase.theory.observed import LEAST, Observed, observe
from twophase.theory.rollout import rollout

RULES = {"ema": EMA, "sum": SUM, "nesterov": NESTEROV, "nesterov ema": NESTEROV.to("ema"), "light": OuterRule(1.1, 0.3)}


def seen(rule: OuterRule, sigma: list[float], rounds: int = 60, restart: str = "never", **options: object) -> Observed:
    run = observed(rule, sigma, rounds, restart, **options)
    return observe(rule, run["g"], run["m"], run["cosine"], run["restarted"])


@pytest.mark.parametrize("restart", ["never", "5", "soft:5:0.3:0.1"])
@pytest.mark.parametrize("sigma", [1e-3, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_exact_without_noise(rule: OuterRule, sigma: float, restart: str) -> None:
    """One sigma without noise is found to rounding, under every rule, form and restart; no round is left out."""
    found = seen(rule, [sigma, sigma], restart=restart)
    assert found.ceiling == pytest.approx(sigma, rel=1e-6)
    assert found.sigma == pytest.approx(sigma, rel=1e-6)
    assert found.foreign == 0
    assert found.pairs == (59 if restart == "never" else 48)


@pytest.mark.parametrize("restart", ["never", "5"])
@pytest.mark.parametrize("rule", [EMA, SUM, NESTEROV], ids=["ema", "sum", "nesterov"])
def test_the_interval_covers(rule: OuterRule, restart: str) -> None:
    """Two standard errors hold the true sigma in at least four of five noisy runs; the plain ratio is too large.

    Noise looks like progress.
    """
    runs = [_one_seed(rule, restart, seed) for seed in range(30)]
    covered = [one.interval[0] <= 0.3 <= one.interval[1] for one in runs]
    assert np.mean(covered) >= 0.8
    assert np.mean([one.ceiling > 0.3 for one in runs]) >= 0.95


def _one_seed(rule: OuterRule, restart: str, seed: int) -> Observed:
    run = observed(rule, [0.3] * 100, 60, restart, noise=0.1, seeds=[seed])
    columns = {name: np.asarray(values)[:, 0] for name, values in run.items()}
    return observe(rule, columns["g"], columns["m"], columns["cosine"], columns["restarted"])


def _shown(rule: OuterRule, sigma: list[float], restart: str, size: tuple[int, int, float]) -> list[Observed]:
    """Of 300 noisy runs, what the last rounds of those show whose interval may be shown."""
    rounds, last, noise = size
    run = observed(rule, sigma, rounds, restart, noise=noise, seeds=list(range(300)))
    columns = [np.asarray(run[name])[-last:] for name in ("g", "m", "cosine", "restarted")]
    found = [observe(rule, *(column[:, seed] for column in columns)) for seed in range(300)]
    return [one for one in found if one.shown_interval]


def test_what_is_shown_holds() -> None:
    """Where restarts are frequent and the data noisy hardly an interval is shown, and of those that are few miss.

    An interval that is shown only where it is significant is mostly one that chance has made so, unless more is asked.
    """
    rule, sigma = OuterRule(0.35, 0.9, nesterov=True), np.linspace(0.01, 0.1, 40).tolist()
    found = [
        one
        for size in ((20, 20, 0.05), (60, 60, 0.05), (60, 30, 0.05), (150, 150, 0.05), (60, 60, 0.2))
        for one in _shown(rule, sigma, "3", size)
    ]
    missed = [one for one in found if one.interval[0] > sigma[-1] or one.interval[1] < sigma[0]]
    assert len(found) <= 3
    assert len(missed) <= len(found) / 4
    known = _shown(SUM, [0.3] * 100, "5", (60, 60, 0.1))
    assert len(known) > 200  # where the record does tell, it is shown
    assert np.mean([one.interval[0] <= 0.3 <= one.interval[1] for one in known]) > 0.9


def test_cycles_are_counted() -> None:
    """Below ten restart cycles nothing noisy is shown, and the interval is Student's with a degree less than cycles."""
    run = observed(SUM, [0.3] * 100, 45, "5", noise=0.01, seeds=[0])
    found = observe(SUM, *(np.asarray(run[name])[:, 0] for name in ("g", "m", "cosine", "restarted")))
    assert found.cycles == 9
    assert found.shown_interval is None
    assert "9 restart cycles" in found.why_not
    assert found.interval[1] - found.sigma == pytest.approx(2.306 * found.standard_error, rel=1e-3)


def test_pure_noise_is_no_progress() -> None:
    """Where there is only noise, the interval reaches zero, though the plain ratio would promise a good deal."""
    for restart in ("never", "3"):
        found = seen(SUM, [1e-9] * 100, restart=restart, noise=1.0, initial=0.0)
        assert found.interval[0] <= 0
        assert found.ceiling > 0.2
        assert found.noise_share > 0.5


def test_several_modes_give_their_mean() -> None:
    """Of several modes, sigma lies between the smallest and the largest."""
    found = seen(SUM, [0.2, 0.4, 0.6])
    assert 0.2 < found.sigma < 0.6


def test_a_decaying_inner_rate_is_divided_out() -> None:
    """Pseudo-gradients that shrink with the inner learning rate look like progress unless the rate is given."""
    rates = 0.98 ** np.arange(60)
    x, m, columns = np.ones(3), np.zeros(3), []
    for rate in rates:  # sigma is proportional to the inner rate
        g = 0.01 * rate * x
        norms = np.linalg.norm(g), np.linalg.norm(m)
        columns.append((*norms, g @ m / (norms[0] * norms[1]) if norms[1] else 0.0))
        m = 0.9 * m + g
        x = x - 0.1 * m
    g_norm, m_norm, cosine = np.array(columns).T
    rule, none = OuterRule(0.1, 0.9), np.zeros(60, dtype=bool)
    without = observe(rule, g_norm, m_norm, cosine, none)
    given = observe(rule, g_norm, m_norm, cosine, none, inner_lr=rates)
    assert given.ceiling == pytest.approx(0.01 * rates.mean(), rel=0.5)
    assert without.ceiling > 3 * given.ceiling


def test_nothing_to_see() -> None:
    """No estimate without momentum, with a restart every round, from too few rounds, or from numbers that are none."""
    run = observed(SUM, [0.3], 30)
    columns = [run[name] for name in ("g", "m", "cosine", "restarted")]
    assert np.isnan(observe(OuterRule(0.7, 0.0), *columns).sigma)
    assert observe(SUM, columns[0], columns[1], columns[2], np.ones(30, dtype=bool)).pairs == 0
    few = observe(SUM, *(column[:LEAST] for column in columns))
    assert few.pairs == LEAST - 1
    assert np.isnan(few.sigma)
    assert np.isnan(observe(SUM, np.full(30, np.nan), columns[1], columns[2], columns[3]).sigma)
    assert observe(SUM, [], [], [], []).pairs == 0
    assert np.isnan(observe(SUM, np.zeros(30), np.zeros(30), np.zeros(30), np.zeros(30, dtype=bool)).sigma)


def test_another_rules_record_is_refused() -> None:
    """Rounds whose buffer the rule would not have made are counted and left out; so are gaps in the record."""
    run = observed(SUM, [0.3, 0.3], 30)
    columns = [run[name] for name in ("g", "m", "cosine", "restarted")]
    wrong = observe(OuterRule(0.7, 0.5), *columns)
    assert wrong.pairs < LEAST
    assert wrong.foreign > 20
    follows = np.arange(30) != 15
    assert observe(SUM, *columns, follows=follows).pairs == 28


def test_steps_of_a_policy_are_left_out() -> None:
    """Rounds whose gain is not the rule's tell nothing of it; with the rule's own gains nothing is lost.

    Under the gate the buffer is the rule's, so that without the gains a wrong sigma would come out.
    """
    rule, sigma, half = OuterRule(0.7, 0.9, nesterov=True), 0.3, "lookahead:0:0.5"
    for restart, foreign in (("never", 0), (half, 29), ("auto", 59)):
        run = rollout(rule, [sigma, sigma], 60, restart)
        g, m = run.pseudo_gradient, run.buffer[:-1]
        length, buffer = np.linalg.norm(g, axis=1), np.linalg.norm(m, axis=1)
        cosine = np.divide((g * m).sum(axis=1), length * buffer, out=np.zeros(60), where=buffer > 0)
        gain = ((run.residual[:-1] - run.residual[1:]) * g).sum(axis=1) / (g * g).sum(axis=1)
        found = observe(rule, length, buffer, cosine, run.restarts, gain=gain)
        assert found.foreign == pytest.approx(foreign, abs=3)
        if restart != "auto":
            assert found.sigma == pytest.approx(sigma, rel=1e-6)
        if restart == half:
            assert observe(rule, length, buffer, cosine, run.restarts).sigma != pytest.approx(sigma, rel=0.01)


def test_scale_does_not_matter() -> None:
    """Norms at the ends of the floating-point range give the same sigma."""
    run = observed(SUM, [0.3, 0.3], 30)
    for scale in (1e-290, 1e280):
        found = observe(SUM, run["g"] * scale, run["m"] * scale, run["cosine"], run["restarted"])
        assert found.sigma == pytest.approx(0.3, rel=1e-6)
