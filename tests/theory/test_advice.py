"""`theory.advice`: the advice is what the theory's own functions say, and each warning comes when it is due."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest

import oracle
from amount import amount
from twophase.restart import Never, Periodic, mean_outer_gain
from twophase.rule import FORMS, OuterRule
from twophase.theory.advice import Advice, advise, controls
from twophase.theory.benefit import hurt_share, restart_can_help
from twophase.theory.contraction import restart_rate, restart_table
from twophase.theory.modes import REGIMES, asymptotic_rate, effective_step, regime, stable_limit
from twophase.theory.periods import (
    OBJECTIVES,
    best_period,
    cancellation_periods,
    heuristic_period,
    log_final_loss,
)

HB = OuterRule(1.0, 0.9, False, "ema")
NAG = OuterRule(1.0, 0.9, True, "ema")
SIX = [0.95, 0.85, 0.75, 0.60, 0.45, 0.30]

LEFT_OUT = "modes with sigma 0 are left out"
ONE = "period 1 is no momentum at all"
UNSTABLE = "no restart schedule can stabilise what diverges"
REAL = "no mode oscillates"
PARTLY_REAL = "of the weight is in modes that do not oscillate"
SHORT = "rounds is too short"
NEVER_BEST = "no restart is best"
GROWING = "would make stable modes grow"
NO_MOMENTUM = "the rule has no momentum"
WARNINGS = (LEFT_OUT, ONE, UNSTABLE, REAL, PARTLY_REAL, SHORT, NEVER_BEST, GROWING, NO_MOMENTUM)


def said(advice: Advice) -> set[str]:
    """Which of the warnings are in the advice; every one of them is known here."""
    found = {text for text in WARNINGS for warning in advice.warnings if text in warning}
    assert len(found) == len(advice.warnings)
    return found


def draw(rng: random.Random) -> tuple[OuterRule, list[float], list[float] | None, int | None]:
    """A rule of any kind and form (some unstable, some without momentum), a spectrum, a horizon or none."""
    form, momentum = rng.choice(FORMS), rng.choice([0.0, rng.uniform(0.05, 0.97), rng.uniform(0.5, 0.97)])
    step = rng.choice([rng.uniform(0.01, 1.1), rng.uniform(0.01, 1.1), rng.uniform(1, 4)])
    rule = OuterRule(step / (1 - momentum if form == "ema" else 1), momentum, rng.random() < 0.5, form)
    sigma = [rng.choice([rng.uniform(0.01, 1), rng.uniform(0.2, 1), 0.0]) for _ in range(rng.randint(1, 6))] + [0.7]
    weights = None if rng.random() < 0.5 else [rng.choice([0.0, 1.0, rng.random()]) for _ in sigma[1:]] + [0.5]
    return rule, sigma, weights, rng.choice([None, rng.randint(1, 9), rng.randint(10, 120)])


@cache
def cases(seed: int, count: int) -> list[Any]:
    """Advice for random questions, with the question."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        rule, sigma, weights, rounds = draw(rng)
        advice = advise(rule, sigma, weights=weights, rounds=rounds)
        found.append((advice, rule, np.array(sigma), weights, rounds))
    return found


# --- what it recommends -------------------------------------------------------------------------------------------


def test_recommendation_is_the_best_period() -> None:
    """With a horizon the exact loss decides, without one the slowest rate; None stands for no restart."""
    for advice, rule, _, _, rounds in cases(1, amount(60, 150)):
        options: dict[str, Any] = {"weights": advice.weights, "max_period": advice.max_period, "rounds": rounds}
        best = best_period(rule, advice.sigma, **options)
        if rounds is not None:
            expected = None if best >= rounds else best
        else:
            gains = np.min(restart_rate(rule, advice.sigma, best)) > np.min(asymptotic_rate(rule, advice.sigma))
            expected = best if gains else None
        assert advice.recommended.period == expected
        assert advice.policy == (Never() if expected is None else Periodic(expected))
        assert advice.recommended is advice.criteria[0]


def test_each_criterion_and_its_numbers() -> None:
    """Every objective with the period, slowest rate and loss that the functions of the theory give for it."""
    for advice, rule, _, _, rounds in cases(1, amount(60, 150)):
        names = [c.objective for c in advice.criteria]
        assert names == [name for name in OBJECTIVES if name != "loss" or rounds is not None]
        for criterion in (*advice.criteria, advice.without):
            period = criterion.period
            if criterion.objective == "none" or period is None:
                assert period is None
                rate = np.min(asymptotic_rate(rule, advice.sigma))
            else:
                rate = np.min(restart_rate(rule, advice.sigma, period))
            assert criterion.rate == rate
            if rounds is None:
                assert criterion.log_loss is None
            else:
                loss = log_final_loss(rule, advice.sigma, rounds, period or rounds, advice.weights)
                assert criterion.log_loss == pytest.approx(float(loss), rel=1e-13)
                if criterion.objective != "none" and (period is not None or criterion.objective != "minimax"):
                    chosen = best_period(
                        rule,
                        advice.sigma,
                        weights=advice.weights,
                        max_period=advice.max_period,
                        rounds=rounds,
                        objective=criterion.objective,
                    )
                    assert period == (None if chosen >= rounds else chosen)
        if rounds is not None:
            assert all(advice.recommended.log_loss <= c.log_loss + 1e-9 * abs(c.log_loss) for c in advice.criteria)
            assert advice.recommended.log_loss <= advice.without.log_loss + 1e-12


def test_spectrum_in_the_advice() -> None:
    """Modes of weight 0 or sigma 0 are left out; weights sum to 1; regimes share all of it."""
    for advice, rule, sigma, weights, rounds in cases(1, amount(60, 150)):
        shares = np.ones(sigma.size) if weights is None else np.array(weights)
        kept = (sigma > 0) & (shares > 0)
        np.testing.assert_array_equal(advice.sigma, sigma[kept])
        np.testing.assert_allclose(advice.weights, shares[kept] / shares[kept].sum(), rtol=1e-14)
        assert sum(advice.regimes.values()) == pytest.approx(1, rel=1e-14)
        assert list(advice.regimes) == [name for name in REGIMES if name in advice.regimes]
        names = regime(rule, advice.sigma)
        for name, share in advice.regimes.items():
            assert share == pytest.approx(float(advice.weights[names == name].sum()), rel=1e-14)
        assert (advice.rule, advice.rounds) == (rule, rounds)


def test_numbers_beside_the_recommendation() -> None:
    """Hurt share, first cancellations, closed forms at the mean sigma, and the range of periods."""
    for advice, rule, _, _, rounds in cases(1, amount(60, 150)):
        chosen = advice.recommended.period
        hurt = 0 if chosen is None else hurt_share(rule, advice.sigma, chosen, advice.weights)
        assert advice.hurt == hurt
        first = cancellation_periods(rule, advice.sigma, 1)[:, 0]
        if np.isnan(first).all():
            assert advice.first_cancellation is None
        else:
            assert advice.first_cancellation == (np.nanmin(first), np.nanmax(first))
        mean = float(advice.sigma @ advice.weights)
        assert advice.heuristics == pytest.approx(
            [float(heuristic_period(rule, mean, corrected=c)) for c in (False, True)], rel=1e-12
        )
        reach = 0 if np.isnan(first).all() else math.ceil(3 * np.nanmax(first)) + 5
        assert advice.max_period == (max(60, reach) if rounds is None else rounds)


@pytest.mark.parametrize("rounds", [None, 7, 60])
def test_both_forms_give_the_same_advice(rounds: int | None) -> None:
    """The same rule in EMA and in sum form: equal periods, rates, losses, shares, controls and warnings."""
    for rule, sigma in itertools.product(
        (
            HB,
            NAG,
            OuterRule(7.0, 0.9, True, "ema"),
            OuterRule(15.6, 0.95, False, "ema"),
            OuterRule(60.0, 0.9, False, "ema"),
        ),
        (SIX, [0.01, 0.5, 1.0], [0.002, 0.01]),
    ):
        ema, total = advise(rule, sigma, rounds=rounds), advise(rule.to("sum"), sigma, rounds=rounds)
        assert [c.period for c in ema.criteria] == [c.period for c in total.criteria]
        for one, other in zip((*ema.criteria, ema.without), (*total.criteria, total.without), strict=True):
            assert one.rate == pytest.approx(other.rate, rel=1e-9, abs=1e-12)
            if rounds is not None:
                assert one.log_loss == pytest.approx(other.log_loss, rel=1e-9)
        assert ema.hurt == total.hurt
        assert ema.regimes == total.regimes
        assert list(ema.controls.values()) == pytest.approx(list(total.controls.values()), rel=1e-9)
        assert list(ema.controls) == list(total.controls)
        assert ema.max_period == total.max_period
        assert said(ema) == said(total)
        unchanged = [w for w in ema.warnings if "lower lr below" not in w]
        assert unchanged == [w for w in total.warnings if "lower lr below" not in w]


def test_anchors() -> None:
    """A1 and A2: K = 5 for sigma .95, K = 7 for the six modes, with their losses; the paper's criterion beside them."""
    one = advise(HB, 0.95, rounds=80)
    assert one.recommended.period == 5
    assert one.recommended.log_loss is not None
    assert one.recommended.log_loss / math.log(10) == pytest.approx(-64.54, abs=0.005)
    six = advise(HB, SIX, rounds=120)
    assert six.recommended.period == 7
    assert {c.objective: c.period for c in six.criteria} == {"loss": 7, "minimax": 7, "rate": 8, "factor": None} | {
        "rate": best_period(HB, SIX, max_period=120, objective="rate")
    }
    assert advise(HB, SIX, max_period=20).criteria[-1].period == 17
    assert said(six) == set()


# --- warnings -----------------------------------------------------------------------------------------------------


def test_warnings_come_when_they_are_due() -> None:
    """Each warning is there if and only if what it says is so, decided anew from the matrices in 50 digits."""
    counts: dict[str, int] = dict.fromkeys(WARNINGS, 0)
    for advice, rule, sigma, _, rounds in cases(1, amount(60, 150)):
        found = said(advice)
        for text in found:
            counts[text] += 1
        eigenvalues = [oracle.eigenvalues(rule, s)[0] for s in advice.sigma]
        turning = np.array([mpmath.im(e) != 0 for e in eigenvalues])
        growing = np.array([abs(e) >= 1 for e in eigenvalues])
        assert (LEFT_OUT in found) == bool((sigma == 0).any())
        assert (ONE in found) == (advice.recommended.period == 1 and rule.momentum > 0)
        assert (UNSTABLE in found) == bool(growing.any())
        assert (NO_MOMENTUM in found) == (rule.momentum == 0)
        assert (REAL in found) == (not turning.any() and rule.momentum > 0)
        assert (PARTLY_REAL in found) == (turning.any() and not turning.all())
        first = cancellation_periods(rule, advice.sigma, 1)
        soon = rounds is not None and turning.any() and rounds <= np.nanmin(first)
        assert (SHORT in found) == bool(soon)
        never = rounds is not None and rounds > 1 and advice.recommended.period is None and turning.any()
        assert (NEVER_BEST in found) == bool(never and not soon)
        stable = advice.sigma[~growing]
        bad = stable.size and any(
            abs(factor) > 1 for s in stable for factor in oracle.factors(rule, s, min(advice.max_period, 40))
        )
        assert GROWING in found or not bad
        if GROWING in found:
            assert (restart_table(rule, stable, advice.max_period)[1] > 0).any()
    assert min(counts.values()) >= 3, counts


def test_no_restart_is_recommended_where_it_could_only_harm() -> None:
    """Theorem 1 in the advice: only real modes (and momentum) means no restart, in every draw, whatever the horizon."""
    seen = 0
    for advice, rule, _, _, rounds in [*cases(1, amount(60, 150)), *cases(2, amount(80, 200))]:
        if rule.momentum > 0 and not restart_can_help(rule, advice.sigma).any():
            seen += 1
            assert advice.recommended.period is None or rounds == 1
            assert advice.hurt == 0
    assert seen > amount(10, 25)


def text_with(advice: Advice, part: str) -> str:
    """The one warning that contains a text."""
    (found,) = [warning for warning in advice.warnings if part in warning]
    return found


def test_what_warnings_name() -> None:
    """The modes, limits, periods and remedies in them are the right ones."""
    unstable = advise(OuterRule(5.0, 0.9), [1.0, 0.1], rounds=50)
    assert text_with(unstable, UNSTABLE).startswith("1 mode (sigma 1) diverges without restarts")
    assert "lower lr below 3.8 (sum form)" in text_with(unstable, UNSTABLE)
    assert text_with(unstable, PARTLY_REAL).startswith("50 % of the weight")
    assert "down to sigma 1;" in text_with(unstable, PARTLY_REAL)  # the slow one is the one that oscillates
    assert "every period up to 49 ends" in text_with(unstable, NEVER_BEST)
    two = advise(OuterRule(500.0, 0.9, form="ema"), [1.0, 0.8, 0.05])
    assert text_with(two, UNSTABLE).startswith("2 modes (sigma 0.8 to 1) diverge without restarts")
    assert "lower lr below 38 (ema form)" in text_with(two, UNSTABLE)
    limit = float(stable_limit(OuterRule(1.0, 0.9)))
    assert said(advise(OuterRule(limit * 0.999, 0.9), [1.0])) >= {GROWING}
    assert UNSTABLE not in said(advise(OuterRule(limit * 0.999, 0.9), [1.0]))
    slow = advise(HB, [0.5, 0.01, 0.02], weights=[2, 1, 1])
    assert "50 % of the weight is in modes that do not oscillate, down to sigma 0.01;" in text_with(slow, PARTLY_REAL)
    growing = text_with(advise(OuterRule(0.78, 0.95), [1.0, 0.1], rounds=50), GROWING)
    assert growing.startswith("restarting every 3 rounds would")
    assert "(by 1.019 a cycle at 3)" in growing
    many = text_with(advise(OuterRule(3.7, 0.9), [1.0], max_period=200), GROWING)
    assert ", ... (" in many
    short = text_with(advise(HB, 0.95, rounds=5), SHORT)
    assert "the horizon of 5 rounds" in short
    assert "after 5.0 rounds" in short
    for rule, lr in ((OuterRule(0.78, 0.95), 0.78), (OuterRule(0.5, 0.9, True), 0.95)):
        one = advise(rule, 0.4 if rule.nesterov else [1.0, 0.1], max_period=1)
        assert one.recommended.period == 1
        assert f"momentum 0 with lr {lr:.4g} (sum form)" in text_with(one, ONE)
        plain = OuterRule(lr, 0.0)
        assert restart_rate(rule, one.sigma, 1) == pytest.approx(restart_rate(plain, one.sigma, 1), rel=1e-12)


def test_modes_that_do_not_count() -> None:
    """A mode of weight 0 changes nothing, and is not said to have sigma 0; one of sigma 0 is said to be left out."""
    plain = advise(HB, [0.9, 0.5], rounds=40)
    weighed = advise(HB, [0.9, 0.5, 0.001], weights=[1, 1, 0], rounds=40)
    zero = advise(HB, [0.9, 0.0, 0.5], rounds=40)
    assert weighed.criteria == plain.criteria == zero.criteria
    assert weighed.warnings == plain.warnings
    assert said(zero) == said(plain) | {LEFT_OUT}


@pytest.mark.parametrize("rounds", [None, 1, 2, 20])
def test_modes_that_vanish(rounds: int | None) -> None:
    """Nilpotent modes and zero factors: infinite rates and losses of 0 are numbers like others."""
    gone = advise(OuterRule(2.0, 0.5, True, "ema"), 1.0, rounds=rounds)
    assert gone.without.rate == math.inf
    assert gone.recommended.period is None or rounds == 20
    if rounds == 20:
        assert gone.recommended.period == 2
        assert gone.recommended.log_loss == -math.inf
    once = advise(OuterRule(1.0, 0.5), 1.0, rounds=rounds)
    assert once.recommended.period == (None if rounds == 1 else 1)
    if rounds != 1:
        assert once.recommended.rate == math.inf
        assert said(once) >= {ONE}


# --- what a gain must be held against -----------------------------------------------------------------------------


def test_controls() -> None:
    """R31 and E11: no momentum at the same step and at the same mean gain, and the momentum tuned on a grid."""
    rules = HB, NAG, OuterRule(0.3, 0.5, True)
    tuned_rates = {  # by momentum, whatever period and rounds
        rule: {
            b: float(np.min(asymptotic_rate(OuterRule(rule.to("ema").lr, b, rule.nesterov, "ema"), SIX)))
            for b in np.linspace(0, 0.995, 200)
        }
        for rule in rules
    }
    for rule, period, rounds in itertools.product(rules, (None, 1, 3, 7), (None, 2, 24, 25)):
        same, matched, tuned = controls(rule, SIX, period, rounds).items()
        lr = rule.to("sum").lr
        assert same == (
            f"no momentum, the same step (lr {lr:.4g})",
            float(np.min(asymptotic_rate(OuterRule(lr, 0.0), SIX))),
        )
        if period is None and rounds is None:
            gain = rule.to("ema").lr
        else:
            gain = mean_outer_gain(rule, Never() if period is None else Periodic(period), rounds or period or 1)
        assert matched[0] == f"no momentum, the same mean gain (lr {gain:.4g})"
        assert matched[1] == pytest.approx(float(np.min(asymptotic_rate(OuterRule(gain, 0.0), SIX))), rel=1e-9)
        rates = tuned_rates[rule]
        best = max(rates, key=lambda b: rates[b])
        assert tuned == (
            f"momentum tuned to {best:.3g} at EMA lr {rule.to('ema').lr:.4g}, no restart",
            pytest.approx(rates[best], rel=1e-12),
        )


def gain_of(rule: OuterRule, period: int | None, rounds: int | None) -> float:
    """The learning rate in the name of the second control, which has four digits."""
    name = list(controls(rule, 0.5, period, rounds))[1]
    return float(name.removeprefix("no momentum, the same mean gain (lr ").removesuffix(")"))


def test_gain_of_long_runs() -> None:
    """R31: nu mean (1 - b^j) over a cycle (Nesterov: b^(j+1)); 1e12 rounds cost nothing, and b next to 1 no digits."""
    assert gain_of(HB, 3, None) == pytest.approx(0.187, abs=5e-4)
    assert gain_of(HB, None, 10**12) == pytest.approx(1, rel=1e-3)
    assert gain_of(HB, 10**6, 10**12) == pytest.approx(1, rel=1e-3)
    for rule in (OuterRule(1.0, 1 - 1e-12, False, "ema"), OuterRule(1.0, 1 - 1e-12, True, "ema")):
        b, rounds = mpmath.mpf(rule.momentum), 10**9
        with mpmath.workdps(50):
            lost = b * (b if rule.nesterov else 1) * (1 - b**rounds) / (1 - b) / rounds
        assert gain_of(rule, None, rounds) == pytest.approx(float(1 - lost), rel=1e-3)
    advice = advise(HB, SIX, rounds=10**9)
    assert advice.recommended.period == 7
    assert advice.max_period == 10_000


def test_range_of_periods() -> None:
    """As asked; otherwise the horizon, or three times the longest first cancellation, at most 10000."""
    assert advise(HB, SIX, max_period=11).max_period == 11
    assert advise(HB, SIX, max_period=500, rounds=20).max_period == 500
    assert advise(HB, SIX, rounds=20).max_period == 20
    assert advise(HB, SIX).max_period == 60
    assert advise(HB, [0.03]).max_period == math.ceil(3 * cancellation_periods(HB, 0.03, 1)[0]) + 5 > 60
    assert advise(OuterRule(1.0, 1 - 1e-9, form="ema"), [0.5]).max_period == 10_000
    assert effective_step(HB, 0.5) == pytest.approx(0.05)
