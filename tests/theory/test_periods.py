"""Cancellations, heuristics, the exact loss and the best period, against mpmath and exhaustive search."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import mpmath
import numpy as np
import pytest

import oracle
from amount import amount
from oracle import BLOCKS, HB, KINDS, NAG, SIX
from twophase.rule import FORMS, Form, OuterRule
from twophase.theory import (
    best_period,
    block_periods,
    cancellation_periods,
    heuristic_period,
    log_final_loss,
    oscillatory_interval,
    restart_factor,
    rounded_period,
    rule_grid,
)
from twophase.theory.periods import OBJECTIVES, Objective


def oscillating(count: int, seed: int) -> list[oracle.Point]:
    """Modes that oscillate, of both kinds and forms, uniform in the logarithm of the step and in it."""
    rng, points = random.Random(seed), []
    for number in range(count):
        momentum, nesterov, form = rng.uniform(0.05, 0.99), bool(number & 1), FORMS[number >> 1 & 1]
        low, high = (float(oracle.edge(name, momentum, nesterov)) for name in ("lower", "upper"))
        step = low * (high / low) ** rng.uniform(0.01, 0.99) if number & 4 else rng.uniform(low, high)
        points.append(oracle.at(step, momentum, nesterov, form, rng.uniform(0.01, 1)))
    return points


def cancellation_of(rule: OuterRule, sigma: float, number: int = 0) -> Any:
    """R13 to 50 digits."""
    with mpmath.workdps(oracle.digits_for(rule, sigma)):
        phi, theta, _, _ = oracle.oscillation(rule, sigma)
        return (theta + mpmath.pi / 2 + number * mpmath.pi) / phi


# --- cancellations and heuristics ---------------------------------------------------------------------------------


def test_cancellations_are_the_zeros_of_the_bracket() -> None:
    """R13: the times, to twelve digits; between them chi keeps its sign; the rounded one is the nearest whole one."""
    for rule, sigma in oscillating(amount(60, 200), seed=1):
        times = cancellation_periods(rule, sigma, 40)
        for number, time in enumerate(times[:3]):
            assert abs(float(time / cancellation_of(rule, sigma, number) - 1)) < 1e-12
        for period, factor in enumerate(oracle.factors(rule, sigma, 20), start=1):
            if np.abs(times - period).min() > 1e-9:
                assert mpmath.sign(factor) == (-1) ** int(np.sum(times < period))
        if abs(times[0] - round(times[0])) < 0.4999:
            assert rounded_period(rule, sigma) == max(1, round(times[0]))
    assert rounded_period(HB, SIX).tolist() == [5, 5, 6, 7, 8, 10]  # A2


def test_no_cancellations_outside_the_interval() -> None:
    """Below, at and above the oscillatory interval, without momentum, and at sigma 0, there are none: nan."""
    low, _ = oscillatory_interval(HB)
    assert np.isnan(cancellation_periods(HB, [0.0, 1e-300, low / 2, low * (1 - 1e-12)], 2)).all()
    assert not np.isnan(cancellation_periods(HB, low * (1 + 1e-12), 2)).any()
    steps = [(0.25, 0.25), (2.25, 0.25), (3.0, 0.25), (0.5, 0.0), (0.0, 0.9), (1.1, 0.5, True)]
    outside = [oracle.NILPOTENT[0], *(OuterRule(*step) for step in steps)]
    assert np.isnan(cancellation_periods(outside, 1.0, 3)).all()
    assert not rounded_period(outside, 1.0).any()


@pytest.mark.parametrize("form", FORMS)
@KINDS
@pytest.mark.parametrize(("lr", "sigma"), [(1.0, 0.22), (1.6, 0.5), (0.3, 0.1)])
def test_heuristic_errors_as_momentum_grows(lr: float, sigma: float, nesterov: bool, form: Form) -> None:
    """R16: as b -> 1 the corrected form's error vanishes like sqrt(1-b); the paper's tends to a constant of order 1."""
    product = lr * sigma
    constant = 1 / (2 * product) - 1 if nesterov else (1 / product - 1) / 2
    for power in (4, 6, 8, 10):
        rule = OuterRule(lr, 1 - 10.0**-power, nesterov, "ema").to(form)
        exact = float(cancellation_of(rule, sigma))
        assert abs(exact - heuristic_period(rule, sigma)) < 50 * 10 ** (-power / 2)
        assert exact - heuristic_period(rule, sigma, corrected=False) == pytest.approx(
            constant, abs=50 * 10 ** (-power / 2)
        )


# --- the exact loss -----------------------------------------------------------------------------------------------


def simulated_loss(rule: OuterRule, sigma: Any, rounds: int, period: int, weights: Any = None) -> Any:
    """Log of the loss R20 of modes by the literal update with m <- 0 after every `period` rounds (R2 to R4)."""
    shares = [mpmath.mpf(w) for w in (weights if weights is not None else [1] * len(sigma))]
    with mpmath.workdps(90):
        ends = [oracle.simulated(rule, s, rounds, lambda t: t % period == 0 and (0, 0))[-1][0] for s in sigma]
        total = sum(w * x**2 for w, x in zip(shares, ends, strict=True) if w > 0) / sum(shares)
        return mpmath.log(total / 2) if total else mpmath.mpf("-inf")


def draw(rng: random.Random, modes: int) -> tuple[OuterRule, list[float], list[float] | None]:
    """A rule of any kind and form, stable or not, and a spectrum with weights of any size or none."""
    rule = oracle.random_rule(rng, rng.choice([1.2, 1.2, 5.0]), (0.01, 0.99))
    sigma = [rng.uniform(0.02, 1) for _ in range(modes)]
    weights = [rng.choice([0.0, 1e-10, 1e300, 1.0, 3.0]) for _ in range(modes)]
    return rule, sigma, weights if max(weights) > 0 and rng.random() < 0.8 else None


def test_loss_is_that_of_a_simulation() -> None:
    """R20, tight: random rules (stable or not), spectra, weights, periods and horizons, T mod K included."""
    rng = random.Random(5)
    for _ in range(amount(60, 250)):
        rule, sigma, weights = draw(rng, rng.choice([1, 2, 5]))
        rounds = rng.randint(1, 50)
        periods = [1, rounds, rounds + 3, *(rng.randint(1, rounds) for _ in range(3))]
        losses = log_final_loss(rule, sigma, rounds, periods, weights)
        single = [log_final_loss(rule, sigma, rounds, period, weights) for period in periods]
        exact = [float(simulated_loss(rule, sigma, rounds, period, weights)) for period in periods]
        # An exact loss that is nearly 0 is next to a zero of a factor, in one mode.
        within = 1e-6 if len(sigma) == 1 else 1e-9
        np.testing.assert_allclose(losses, exact, rtol=within, atol=within)
        np.testing.assert_allclose(single, exact, rtol=within, atol=within)


def test_loss_at_the_ends() -> None:
    """Losses beyond all doubles; an exact zero is -inf; T below the zero's round is finite; 1e9 rounds cost nothing."""
    for rule, sigma, period in ((HB, 0.95, 5), (NAG, 0.95, 60), (OuterRule(60.0, 0.9), 1.0, 7)):
        exact = float(simulated_loss(rule, [sigma], 2001, period))
        assert abs(exact) > 400
        assert log_final_loss(rule, sigma, 2001, period) == pytest.approx(exact, rel=1e-11)
    once, gone = OuterRule(1.0, 0.5), oracle.NILPOTENT[0]  # s = 1: chi_1 = 0; 0 after two rounds
    assert log_final_loss(once, 1.0, 10, 1) == -math.inf
    assert log_final_loss(gone, 1.0, 10, [1, 2, 3, 9, 10]).tolist()[1:] == [-math.inf] * 4
    assert log_final_loss(gone, 1.0, 1, 5) == pytest.approx(math.log(0.125), rel=1e-15)
    huge = log_final_loss(HB, 0.95, 10**9, [5, 10**9])
    assert huge[0] == pytest.approx(2 * 2e8 * math.log(abs(restart_factor(HB, 0.95, 5))) - math.log(2), rel=1e-11)
    assert huge[1] == pytest.approx(1e9 * math.log(0.9), rel=1e-6)


def test_loss_of_arrays_is_that_of_singles() -> None:
    """Rules, leading axes of sigma and lists of periods, short or long, give the numbers of one at a time."""
    rules, sigma, weights = rule_grid([[0.05], [1.5]], [0.0, 0.5, 0.97]), np.array([0.9, 0.4, 0.1]), [1.0, 0.0, 2.0]
    for periods in ([3], [1, 2, 3, 5, 40, 41, 60]):
        losses = log_final_loss(rules, sigma, 41, periods, weights)
        single = [[[log_final_loss(r, sigma, 41, k, weights) for r in row] for row in rules] for k in periods]
        np.testing.assert_allclose(losses, np.array(single), rtol=1e-11)
    assert log_final_loss(rules, sigma, 41, 3, weights).shape == (2, 3)
    stacked = np.stack([sigma, sigma / 2])
    assert log_final_loss(rules[..., None], stacked, 17, [2, 5]).shape == (2, 2, 3, 2)
    assert log_final_loss(HB, np.zeros((0, 3)), 10, range(1, 10)).shape == (9, 0)


# --- the best period ----------------------------------------------------------------------------------------------


def scores(objective: str, case: tuple[OuterRule, list[float], Any], periods: list[int], rounds: Any) -> Any:
    """The score of every period that competes, to 50 digits: the higher, the better."""
    rule, sigma, weights = case
    sizes = [mpmath.mpf(w) for w in (weights if weights is not None else [1] * len(sigma))]
    pairs = [(w, s) for w, s in zip(sizes, sigma, strict=True) if w > 0]

    def score(period: int) -> Any:
        if objective == "minimax":
            return min(-mpmath.log(abs(t[period])) / period for t in tables)
        residues = [
            t[period] ** (rounds // period) * t[rounds % period] if objective == "loss" else t[period] for t in tables
        ]
        mean = sum(w * x * x for (w, _), x in zip(pairs, residues, strict=True)) / sum(sizes)
        return -mpmath.log(mean) / (2 * period if objective == "rate" else 1)

    with mpmath.workdps(max(oracle.digits_for(rule, s) for _, s in pairs)):
        tables = [[mpmath.mpf(1), *oracle.factors(rule, s, periods[-1])] for _, s in pairs]
        return {period: score(period) for period in periods}


@pytest.mark.parametrize("tiny", [None, 1e-12, 1e-200])
@pytest.mark.parametrize("horizon", [False, True], ids=["long run", "horizon"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_best_period_is_that_of_an_exhaustive_search(objective: Objective, horizon: bool, tiny: float | None) -> None:
    """Every objective, both kinds and forms, weights 0 and 1e300, with a horizon and without, with a slow mode too."""
    if objective == "loss" and not horizon:
        return
    rng, clear, total = random.Random(f"{objective} {horizon} {tiny}"), 0, amount(15, 200)
    for _ in range(total):
        rule, sigma, weights = draw(rng, rng.choice([1, 2, 6]))
        sigma[0] = tiny or sigma[0]
        rounds, largest = rng.randint(2, 60) if horizon else None, rng.choice([1, 3, rng.randint(4, 30), 30])
        periods = list(range(1, largest + 1))
        if rounds is not None:
            periods = sorted({min(k, rounds) for k in periods} | {rounds})
        each = scores(objective, (rule, sigma, weights), periods, rounds)
        best = max(each, key=lambda k: (each[k], -k))
        others = [value for k, value in each.items() if k != best]
        if not others or each[best] - max(others) > 1e-9 * max(abs(each[best]), abs(max(others))):
            clear += 1
            found = best_period(rule, sigma, weights=weights, max_period=largest, rounds=rounds, objective=objective)
            assert found == best
    assert clear > total / 3


def test_ties_go_to_the_smaller_period() -> None:
    """Without momentum every period is the same; a nilpotent mode is gone from two rounds on; zeros repeat."""
    plain = rule_grid([0.3, 0.9, 1.4, 1.999], 0.0)
    questions: list[dict[str, Any]] = [{}, {"rounds": 50}, {"objective": "rate"}, {"objective": "rate", "rounds": 31}]
    for question in questions:
        periods = best_period(plain[:, None], np.array([[0.8], [0.3], [1e-9]]), max_period=40, **question)
        assert periods.tolist() == [[1, 1, 1]] * 4
    gone, zeros = oracle.NILPOTENT[0], OuterRule(0.5, 0.5)  # phase pi/4 and chi_2 = 0: zeros at K = 2, 6, 10, ...
    for rule, objective in itertools.product((gone, zeros), ("minimax", "rate", "factor")):
        assert best_period(rule, 1.0, max_period=30, rounds=60, objective=objective) == 2  # type: ignore[arg-type]
    assert best_period(HB, 0.0, max_period=30) == best_period(HB, [0.0, 0.5], max_period=30) == 1  # R22: all tie
    assert best_period(OuterRule(0.0, 0.9), 0.5, max_period=30, rounds=20) == 1


def test_best_period_of_arrays() -> None:
    """An array of rules, with leading axes of sigma, gives the choice of each by itself, as integers of that shape."""
    rules = rule_grid([[0.1], [0.7], [1.5]], [0.0, 0.3, 0.9, 0.97], [[[False]], [[True]]])
    periods = best_period(rules, [0.9, 0.5, 0.1], max_period=25, rounds=37)
    each = [
        [[best_period(r, [0.9, 0.5, 0.1], max_period=25, rounds=37) for r in row] for row in part] for part in rules
    ]
    assert periods.tolist() == each
    assert best_period(rules[0, 1][:, None], np.array([[0.9, 0.5], [0.1, 0.2]]), max_period=25).shape == (4, 2)
    assert best_period(HB, np.zeros((0, 4)), max_period=40).shape == (0,)


def test_block_periods() -> None:
    """Each block by itself, with its own rule and weights."""
    rules, weights = [HB, NAG, OuterRule(0.3, 0.5)], [[1.0] * 9, [1.0] * 8 + [0.0], [2.0] * 9]
    each = tuple(
        best_period(r, s, weights=w, max_period=30, rounds=80) for r, s, w in zip(rules, BLOCKS, weights, strict=True)
    )
    assert block_periods(rules, BLOCKS, weights=weights, max_period=30, rounds=80) == each
    assert block_periods(HB, [[0.95, 0.3]] * 2, weights=[[1, 0], [0, 1]], max_period=40) == (5, 10)
    assert block_periods(HB, [[0.92, 1.0], [0.55, 0.65], [0.18, 0.26]], max_period=40, rounds=120) == (5, 7, 13)
