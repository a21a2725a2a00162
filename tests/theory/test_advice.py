"""`theory.advice`: the advice is what the theory's own functions say, and each warning comes when it is due."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache
from typing import Any, NamedTuple, cast

import mpmath
import numpy as np
import pytest

import oracle
from amount import amount
from oracle import HB, NAG, SIX
from twophase.restart import Never, Periodic, mean_outer_gain
from twophase.rule import FORMS, OuterRule
from twophase.theory.advice import Advice, advise, controls
from twophase.theory.contraction import hurt_share, restart_can_help, restart_rate, restart_table
from twophase.theory.modes import REGIMES, asymptotic_rate, regime, stable_limit
from twophase.theory.periods import OBJECTIVES, best_period, cancellation_periods, heuristic_period, log_final_loss

LEFT_OUT = "modes with sigma 0 are left out"
PERIOD_1 = "period 1 is no momentum at all"
UNSTABLE = "no restart schedule can stabilise what diverges"
REAL = "no mode oscillates"
PARTLY_REAL = "of the weight is in modes that do not oscillate"
SHORT = "rounds is too short"
NEVER_BEST = "no restart is best"
GROWING = "would make stable modes grow"
NO_MOMENTUM = "the rule has no momentum"
WARNINGS = (LEFT_OUT, PERIOD_1, UNSTABLE, REAL, PARTLY_REAL, SHORT, NEVER_BEST, GROWING, NO_MOMENTUM)


class Case(NamedTuple):
    """A question and its answer."""

    advice: Advice
    rule: OuterRule
    sigma: Any
    weights: list[float] | None
    rounds: int | None


def warned(advice: Advice) -> set[str]:
    """Which of the warnings are in the advice; each is in the list."""
    texts = {text for text in WARNINGS for warning in advice.warnings if text in warning}
    assert len(texts) == len(advice.warnings)
    return texts


@cache
def cases() -> list[Case]:
    """Random questions: rules of any kind and form (some unstable, some without momentum), horizons or none."""
    rng, answered = random.Random(1), []
    for _ in range(amount(40, 300)):
        form, momentum = rng.choice(FORMS), rng.choice([0.0, rng.uniform(0.05, 0.97), rng.uniform(0.5, 0.97)])
        step = rng.choice([rng.uniform(0.01, 1.1), rng.uniform(0.01, 1.1), rng.uniform(1, 4)])
        rule = OuterRule(step / (1 - momentum if form == "ema" else 1), momentum, rng.random() < 0.5, form)
        sigma = [rng.choice([rng.uniform(0.01, 1), rng.uniform(0.2, 1), 0.0]) for _ in range(rng.randint(1, 6))] + [0.7]
        weights = None if rng.random() < 0.5 else [rng.choice([0.0, 1.0, rng.random()]) for _ in sigma[1:]] + [0.5]
        rounds = rng.choice([None, rng.randint(1, 9), rng.randint(10, 120)])
        advice = advise(rule, sigma, weights=weights, rounds=rounds)
        answered.append(Case(advice, rule, np.array(sigma), weights, rounds))
    return answered


# --- what it recommends -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_criterion_and_its_numbers() -> None:
    """Every objective has the theory's own period, slowest rate and loss; the first is recommended; None is never."""
    for advice, rule, _, _, rounds in cases():
        slowest = float(np.min(asymptotic_rate(rule, advice.sigma)))
        can_help = bool(restart_can_help(rule, advice.sigma).any())  # Theorem 1
        options: dict[str, Any] = {"weights": advice.weights, "max_period": advice.max_period, "rounds": rounds}
        assert [c.objective for c in advice.criteria] == [name for name in OBJECTIVES if name != "loss" or rounds]
        for criterion in (*advice.criteria, advice.without):
            period = None
            if criterion.objective != "none":
                period = best_period(rule, advice.sigma, objective=cast(Any, criterion.objective), **options)
                rate = np.min(restart_rate(rule, advice.sigma, period))
                is_slower = rounds is None and criterion.objective == "minimax" and rate <= slowest
                is_idle = is_slower or (criterion is advice.criteria[0] and not can_help)
                period = None if is_idle or (rounds and period >= rounds) else period
            assert criterion.period == period
            rates = restart_rate(rule, advice.sigma, period) if period else slowest
            assert criterion.rate == np.min(rates)
            if rounds is None:
                assert criterion.log_loss is None
            else:
                loss = log_final_loss(rule, advice.sigma, rounds, period or rounds, advice.weights)
                assert criterion.log_loss == pytest.approx(float(loss), rel=1e-13)
        chosen = advice.recommended.period
        assert advice.recommended is advice.criteria[0]
        assert advice.policy == (Never() if chosen is None else Periodic(chosen))
        assert can_help or chosen is None


@pytest.mark.parametrize("rounds", [None, 20])
@pytest.mark.parametrize(
    ("rule", "sigma"),
    [
        (OuterRule(0.7, 0.0), [0.5, 0.2]),
        (OuterRule(0.7, 1e-13), [0.5, 0.2]),
        (OuterRule(2.0, 0.5, nesterov=True, form="ema"), [1.0]),
    ],
    ids=["no-momentum", "tiny-momentum", "nilpotent"],
)
def test_no_restart_where_none_can_help(rule: OuterRule, sigma: list[float], rounds: int | None) -> None:
    """Where no mode oscillates the advice is never to restart, though all periods may do the same (Theorem 1)."""
    advice = advise(rule, sigma, rounds=rounds)
    assert not restart_can_help(rule, sigma).any()
    assert (advice.policy, advice.hurt) == (Never(), 0.0)


@pytest.mark.slow
def test_numbers_beside_the_recommendation() -> None:
    """Modes of weight 0 or sigma 0 are left out; weights and regimes' shares sum to 1; all else is the theory's own."""
    for advice, rule, sigma, weights, rounds in cases():
        shares = np.ones(sigma.size) if weights is None else np.array(weights)
        moving = (sigma > 0) & (shares > 0)
        np.testing.assert_array_equal(advice.sigma, sigma[moving])
        np.testing.assert_allclose(advice.weights, shares[moving] / shares[moving].sum(), rtol=1e-14)
        names = regime(rule, advice.sigma)
        by_name = {name: float(advice.weights[names == name].sum()) for name in REGIMES if name in names}
        assert advice.regimes == pytest.approx(by_name, rel=1e-14)
        assert list(advice.regimes) == list(by_name)
        assert (advice.rule, advice.rounds) == (rule, rounds)
        chosen = advice.recommended.period
        assert advice.hurt == (0 if chosen is None else hurt_share(rule, advice.sigma, chosen, advice.weights))
        first = cancellation_periods(rule, advice.sigma, 1)[:, 0]
        oscillates = not np.isnan(first).all()
        assert advice.first_cancellation == ((np.nanmin(first), np.nanmax(first)) if oscillates else None)
        mean = float(advice.sigma @ advice.weights)
        heuristics = [float(heuristic_period(rule, mean, corrected=c)) for c in (False, True)]
        assert advice.heuristics == pytest.approx(heuristics, rel=1e-12)
        reach = math.ceil(3 * np.nanmax(first)) + 5 if oscillates else 0
        assert advice.max_period == (max(60, reach) if rounds is None else rounds)


# --- warnings -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_warnings_come_when_they_are_due() -> None:
    """Each warning is there if and only if what it says is so, decided anew from the matrices in 50 digits."""
    counts: dict[str, int] = dict.fromkeys(WARNINGS, 0)
    for advice, rule, sigma, _, rounds in cases():
        texts = warned(advice)
        for text in texts:
            counts[text] += 1
        eigenvalues = [oracle.eigenvalues(rule, s)[0] for s in advice.sigma]
        turning = np.array([mpmath.im(e) != 0 for e in eigenvalues])
        growing = np.array([abs(e) >= 1 for e in eigenvalues])
        chosen, first = advice.recommended.period, cancellation_periods(rule, advice.sigma, 1)
        soon = bool(rounds is not None and turning.any() and rounds <= np.nanmin(first))
        due = {
            LEFT_OUT: bool((sigma == 0).any()),
            PERIOD_1: chosen == 1 and rule.momentum > 0,
            UNSTABLE: bool(growing.any()),
            NO_MOMENTUM: rule.momentum == 0,
            REAL: not turning.any() and rule.momentum > 0,
            PARTLY_REAL: bool(turning.any() and not turning.all()),
            SHORT: soon,
            NEVER_BEST: bool(rounds is not None and rounds > 1 and chosen is None and turning.any()) and not soon,
        }
        assert texts - {GROWING} == {text for text, is_due in due.items() if is_due}
        stable = advice.sigma[~growing]
        most = min(advice.max_period, 30) if rounds is None else min(advice.max_period, 30, rounds - 1)
        factors = [factor for s in stable for factor in oracle.factors(rule, s, most)] if most else []
        assert GROWING in texts or not any(abs(factor) > 1 for factor in factors)
        assert GROWING not in texts or (restart_table(rule, stable, advice.max_period)[1] > 0).any()
    assert min(counts.values()) >= 1, counts


@pytest.mark.parametrize(
    ("rule", "sigma", "options", "parts"),
    [
        (
            OuterRule(5.0, 0.9),
            [1.0, 0.1],
            {"rounds": 50},
            [
                "1 mode (sigma 1) diverges without restarts",
                "lower lr below 3.8 (sum form)",
                "50 % of the weight",
                "down to sigma 1;",  # the slow one is the one that oscillates
                "every period up to 49 ends",
            ],
        ),
        (
            OuterRule(500.0, 0.9, form="ema"),
            [1.0, 0.8, 0.05],
            {},
            ["2 modes (sigma 0.8 to 1) diverge", "lower lr below 38 (ema form)"],
        ),
        (HB, [0.5, 0.01, 0.02], {"weights": [2, 1, 1]}, ["50 % of the weight is in modes", "down to sigma 0.01;"]),
        (
            OuterRule(0.78, 0.95),
            [1.0, 0.1],
            {"rounds": 50},
            ["restarting every 3 rounds would", "(by 1.019 a cycle at 3)"],
        ),
        (OuterRule(3.7, 0.9), [1.0], {"max_period": 200}, [", ... ("]),
        (HB, [0.95], {"rounds": 5}, ["the horizon of 5 rounds", "after 5.0 rounds"]),
        (OuterRule(0.78, 0.95), [1.0, 0.1], {"max_period": 1}, ["momentum 0 with lr 0.78 (sum form)"]),
        (OuterRule(0.5, 0.9, True), [0.4], {"max_period": 1}, ["momentum 0 with lr 0.95 (sum form)"]),
    ],
)
def test_what_warnings_name(rule: OuterRule, sigma: list[float], options: dict[str, Any], parts: list[str]) -> None:
    """The modes, limits, periods and remedies in them are the right ones."""
    text = "\n".join(advise(rule, sigma, **options).warnings)
    for part in parts:
        assert part in text


def test_periods_beyond_the_horizon_are_no_restart_to_warn_of() -> None:
    """Within two rounds no restart every third round happens."""
    assert not any(
        "every 3" in words for words in advise(OuterRule(0.78, 0.95), [1.0], rounds=2, max_period=9).warnings
    )


def test_modes_that_do_not_count() -> None:
    """A mode of weight 0 changes nothing and is not named; one of sigma 0 is; below the limit nothing is unstable."""
    plain = advise(HB, [0.9, 0.5], rounds=40)
    weighed = advise(HB, [0.9, 0.5, 0.001], weights=[1, 1, 0], rounds=40)
    zero = advise(HB, [0.9, 0.0, 0.5], rounds=40)
    assert weighed.criteria == plain.criteria == zero.criteria
    assert weighed.warnings == plain.warnings
    assert warned(zero) == warned(plain) | {LEFT_OUT}
    below = warned(advise(OuterRule(float(stable_limit(OuterRule(1.0, 0.9))) * 0.999, 0.9), [1.0]))
    assert GROWING in below
    assert UNSTABLE not in below


@pytest.mark.parametrize("rounds", [None, 1, 2, 20])
def test_modes_that_vanish(rounds: int | None) -> None:
    """Nilpotent modes and zero factors: infinite rates and losses of 0 are numbers like others."""
    gone = advise(oracle.NILPOTENT[0], 1.0, rounds=rounds)
    assert gone.without.rate == math.inf
    assert gone.recommended.period is None  # no restart can help there
    assert rounds != 20 or gone.recommended.log_loss == -math.inf
    once = advise(OuterRule(1.0, 0.5), 1.0, rounds=rounds)
    assert once.recommended.period == (None if rounds == 1 else 1)
    assert rounds == 1 or once.recommended.rate == math.inf


# --- what a gain must be held against -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [HB, NAG, OuterRule(0.3, 0.5, True)])
def test_controls(rule: OuterRule) -> None:
    """R31 and E11: no momentum at the same step and at the same mean gain, and the momentum tuned on a grid."""

    def slowest(other: OuterRule) -> Any:
        return pytest.approx(float(np.min(asymptotic_rate(other, SIX))), rel=1e-9)

    lr, ema_lr = rule.to("sum").lr, rule.to("ema").lr
    grid = [OuterRule(ema_lr, float(b), rule.nesterov, "ema") for b in np.linspace(0, 0.995, 200)]
    grid.append(rule.to("ema"))
    best = grid[int(asymptotic_rate(np.array(grid, object)[:, None], SIX).min(axis=1).argmax())]
    for period, rounds in itertools.product((None, 1, 3, 7), (None, 2, 25)):
        gain = ema_lr
        if period or rounds:
            gain = mean_outer_gain(rule, Never() if period is None else Periodic(period), rounds or period or 1)
        assert controls(rule, SIX, period, rounds) == {
            f"no momentum, the same step (lr {lr:.4g})": slowest(OuterRule(lr, 0.0)),
            f"no momentum, the same mean gain (lr {gain:.4g})": slowest(OuterRule(gain, 0.0)),
            f"momentum tuned to {best.momentum:.6g} at EMA lr {ema_lr:.4g}, no restart": slowest(best),
        }


def test_a_tuned_momentum_is_not_worse_than_the_rules_own() -> None:
    """Above 0.995, too, where the best momentum of a rule with a large EMA lr lies, and where a mode is nilpotent."""
    slow = [1.0, 0.95, 0.3]
    for rule, values in (
        (OuterRule(1.0, 0.999), slow),
        (OuterRule(0.7, 0.999, True), slow),
        (oracle.NILPOTENT[2], [1.0]),
    ):
        (tuned,) = [rate for name, rate in controls(rule, values, 3).items() if name.startswith("momentum tuned")]
        assert tuned >= float(np.min(asymptotic_rate(rule, values)))
        assert tuned > 0


def gain_of(rule: OuterRule, period: int | None, rounds: int | None) -> float:
    """The learning rate in the name of the second control, which has four digits."""
    name = list(controls(rule, 0.5, period, rounds))[1]
    return float(name.removeprefix("no momentum, the same mean gain (lr ").removesuffix(")"))


def test_gain_of_long_runs() -> None:
    """R31: nu mean (1 - b^j) over a cycle (Nesterov: b^(j+1)); 1e12 rounds cost nothing, and b next to 1 no digits."""
    assert gain_of(HB, 3, None) == pytest.approx(0.187, abs=5e-4)
    assert gain_of(HB, None, 10**12) == pytest.approx(1, rel=1e-3)
    assert gain_of(HB, 10**6, 10**12) == pytest.approx(1, rel=1e-3)
    for nesterov in (False, True):
        rule, rounds = OuterRule(1.0, 1 - 1e-12, nesterov, "ema"), 10**9
        with mpmath.workdps(50):
            b = mpmath.mpf(rule.momentum)
            lost = b * (b if nesterov else 1) * (1 - b**rounds) / (1 - b) / rounds
        assert gain_of(rule, None, rounds) == pytest.approx(float(1 - lost), rel=1e-3)


@pytest.mark.slow
def test_range_of_periods() -> None:
    """As asked; otherwise the horizon, or three times the longest first cancellation, at most 10000."""
    assert advise(HB, SIX, max_period=11).max_period == 11
    assert advise(HB, SIX, max_period=500, rounds=20).max_period == 500
    long = advise(HB, SIX, rounds=10**9)
    assert (long.max_period, long.recommended.period) == (10_000, 7)
    assert advise(HB, [0.03]).max_period == math.ceil(3 * cancellation_periods(HB, 0.03, 1)[0]) + 5 > 60
    assert advise(OuterRule(1.0, 1 - 1e-9, form="ema"), [0.5]).max_period == 10_000
