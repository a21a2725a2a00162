"""`theory.periods`: cancellations, heuristics and the best period, against 50 digits and exhaustive search."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, NamedTuple

import mpmath
import numpy as np
import pytest

import oracle
from amount import amount
from oracle import BLOCKS, HB, KINDS, NAG, SIX
from twophase.rule import FORMS, Form, OuterRule
from twophase.theory.contraction import restart_factor
from twophase.theory.inputs import rule_grid
from twophase.theory.modes import oscillatory_interval
from twophase.theory.periods import (
    OBJECTIVES,
    Objective,
    best_period,
    block_periods,
    cancellation_periods,
    heuristic_period,
    log_final_loss,
    rounded_period,
)

LOG_10 = math.log(10)
NEVER_SKIPPED = 0.03  # share of the comparisons with exhaustive search that may be too close to call


def interval(momentum: float, nesterov: bool) -> tuple[float, float]:
    """Steps between which a mode oscillates."""
    low, high = (float(oracle.edge(name, momentum, nesterov)) for name in ("lower", "upper"))
    return low, high


def oscillating(count: int, seed: int, largest: float = 0.99) -> list[oracle.Point]:
    """Modes that oscillate, of both kinds and forms, uniform in the logarithm of the step and in it."""
    rng, points = random.Random(seed), []
    for number in range(count):
        momentum, nesterov, form = rng.uniform(0.05, largest), bool(number & 1), FORMS[number >> 1 & 1]
        low, high = interval(momentum, nesterov)
        step = low * (high / low) ** rng.uniform(0.01, 0.99) if number & 4 else rng.uniform(low, high)
        points.append(oracle.at(step, momentum, nesterov, form, rng.uniform(0.01, 1)))
    return points


def cancellation_of(rule: OuterRule, sigma: float, number: int = 0) -> Any:
    """R13 to 50 digits."""
    with mpmath.workdps(oracle.digits_for(rule, sigma)):
        phi, theta, _, _ = oracle.oscillation(rule, sigma)
        return (theta + mpmath.pi / 2 + number * mpmath.pi) / phi


# --- cancellations ------------------------------------------------------------------------------------------------


def test_cancellations_are_the_zeros_of_the_bracket() -> None:
    """R13: `cos t phi + C sin t phi = 0` at every cancellation to 15 digits; none is missed, none invented."""
    for rule, sigma in oscillating(amount(60, 200), seed=1):
        times = cancellation_periods(rule, sigma, 40)
        with mpmath.workdps(oracle.DIGITS):
            phi, theta, _, _ = oracle.oscillation(rule, sigma)
            c = mpmath.tan(theta)
            for number, time in enumerate(times[:3]):
                assert abs(float(time / cancellation_of(rule, sigma, number) - 1)) < 1e-15
                bracket = mpmath.cos(mpmath.mpf(time) * phi) + c * mpmath.sin(mpmath.mpf(time) * phi)
                assert abs(bracket) <= 2e-15 * mpmath.sqrt(1 + c * c) * (1 + phi * time)
        assert 0 < times[0] < float(mpmath.pi / phi)  # no earlier one
        for period, factor in enumerate(oracle.factors(rule, sigma, 20), start=1):
            if np.abs(times - period).min() > 1e-9:
                assert mpmath.sign(factor) == (-1) ** int(np.sum(times < period))


@pytest.mark.parametrize("edge", ["lower", "upper"])
@KINDS
def test_cancellations_next_to_the_edges(nesterov: bool, edge: str) -> None:
    """Down to a relative distance of 1e-14 from either edge of the oscillatory interval the times keep their digits."""
    inward = 1 if edge == "lower" else -1
    for momentum, form, power in itertools.product((0.3, 0.9, 0.999), FORMS, (2, 5, 8, 11, 14)):
        with mpmath.workdps(oracle.DIGITS):
            step = oracle.edge(edge, momentum, nesterov) * (1 + inward * mpmath.mpf(10) ** -power)
        point = oracle.at(step, momentum, nesterov, form, 0.7)
        for number, time in enumerate(cancellation_periods(*point, 3)):
            assert abs(float(time / cancellation_of(*point, number) - 1)) < 2e-15


def test_no_cancellations_outside_the_interval() -> None:
    """Below, at and above the oscillatory interval, without momentum, and at sigma 0, there are none: nan."""
    low, _ = oscillatory_interval(HB)
    assert np.isnan(cancellation_periods(HB, [0.0, 1e-300, low / 2, low * (1 - 1e-12)], 2)).all()
    assert not np.isnan(cancellation_periods(HB, low * (1 + 1e-12), 2)).any()
    outside = [
        OuterRule(0.25, 0.25),  # critical: s = (1 - sqrt b)^2
        OuterRule(2.25, 0.25),  # critical, upper edge
        OuterRule(3.0, 0.25),  # above
        oracle.NILPOTENT[0],
        OuterRule(1.1, 0.5, True),  # negative determinant
        OuterRule(0.5, 0.0),
        OuterRule(0.0, 0.9),
    ]
    assert np.isnan(cancellation_periods(outside, 1.0, 3)).all()
    assert not rounded_period(outside, 1.0).any()


def test_rounded_period_is_the_nearest_whole_one() -> None:
    """R13: `K_0 = max(1, floor(K_c + 1/2))`."""
    for rule, sigma in oscillating(amount(60, 200), seed=3):
        exact = cancellation_of(rule, sigma)
        if abs(exact - mpmath.nint(exact)) < 0.4999:
            assert rounded_period(rule, sigma) == max(1, int(mpmath.nint(exact)))
    assert rounded_period(HB, SIX).tolist() == [5, 5, 6, 7, 8, 10]  # A2


# --- rounding -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rounded_period_is_a_good_guess() -> None:
    """R13: it has the largest rate in about 92 % of random modes, and is within 1 of it in about 99 %."""
    rng = np.random.default_rng(0)
    off = []
    for _ in range(240):
        rule = OuterRule(rng.uniform(0.1, 1.5), rng.uniform(0.3, 0.99), bool(rng.integers(2)), "ema")
        sigma = rng.uniform(0.02, 1)
        first = cancellation_periods(rule, sigma, 1)[0]
        if first <= 100:
            best = best_period(rule, sigma, max_period=math.ceil(3 * first) + 5)
            off.append(abs(best - rounded_period(rule, sigma)))
    assert len(off) > 160
    assert 0.86 < np.mean(np.array(off) == 0) < 0.97
    assert np.mean(np.array(off) <= 1) > 0.97


def test_what_rounding_costs() -> None:
    """R14: at most sqrt(1+C^2) sin(phase/2) of the envelope if K_c >= 1/2; beyond, K = 1 does not even beat it."""
    rng, outcomes = random.Random(4), {True: 0, False: 0}
    for number in range(amount(120, 400)):
        momentum, nesterov, form = rng.uniform(0.02, 0.99), bool(number & 1), FORMS[number >> 1 & 1]
        low, high = interval(momentum, nesterov)
        # half of them around the limit, where the equivalence is decided
        around = 1 - 0.25 * momentum if nesterov else 1 + math.sqrt(momentum)
        step = rng.uniform(low, high) if number & 4 else min(max(around * rng.uniform(0.9, 1.1), low), high * 0.999)
        rule, sigma = oracle.at(step, momentum, nesterov, form, 0.8)
        period = int(rounded_period(rule, sigma))
        with mpmath.workdps(oracle.DIGITS):
            phi, _, amplitude, log_rho = oracle.oscillation(rule, sigma)
            bound, rho = amplitude * mpmath.sin(phi / 2), mpmath.exp(log_rho)
            holds = bool(cancellation_of(rule, sigma) >= mpmath.mpf(1) / 2)
            residue = abs(oracle.factor(rule, sigma, period)) / rho**period
            assert residue <= bound * (1 + 1e-12) if holds else (period == 1 and residue > 1)
        outcomes[holds] += 1
    assert outcomes[True] > 30
    assert outcomes[False] > 15


# --- closed forms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("momentum", "sigma", "exact", "paper", "corrected"),
    [(0.99, 0.22, 35.38, 33.49, 35.26), (0.99, 0.10, 54.77, 49.67, 54.17), (0.9, 0.22, 12.95, 10.59, 12.36)],
)
def test_heuristic_table(momentum: float, sigma: float, exact: float, paper: float, corrected: float) -> None:
    """R16's table for heavy ball at EMA lr 1; at s = 0 a mode turns infinitely late."""
    rule = OuterRule(1.0, momentum, form="ema")
    assert cancellation_periods(rule, sigma, 1)[0] == pytest.approx(exact, abs=0.005)
    assert heuristic_period(rule, sigma, corrected=False) == pytest.approx(paper, abs=0.005)
    assert heuristic_period(rule, sigma) == pytest.approx(corrected, abs=0.005)
    assert heuristic_period(rule.to("sum"), sigma) == pytest.approx(float(heuristic_period(rule, sigma)), rel=1e-14)
    assert heuristic_period(rule, 0.0) == heuristic_period(OuterRule(0.0, 0.9), 0.5, corrected=False) == math.inf


@pytest.mark.parametrize("form", FORMS)
@KINDS
@pytest.mark.parametrize(("lr", "sigma"), [(1.0, 0.22), (0.7, 0.95), (1.6, 0.5), (0.3, 0.1)])
def test_heuristic_errors_as_momentum_grows(lr: float, sigma: float, nesterov: bool, form: Form) -> None:
    """R16: as b -> 1 the corrected form's error vanishes like sqrt(1-b); the paper's tends to a constant of order 1."""
    product = lr * sigma
    constant = 1 / (2 * product) - 1 if nesterov else (1 / product - 1) / 2
    errors = []
    for power in (4, 6, 8, 10):
        rule = OuterRule(lr, 1 - 10.0**-power, nesterov, "ema").to(form)
        exact = cancellation_of(rule, sigma)
        paper, corrected = (mpmath.mpf(float(heuristic_period(rule, sigma, corrected=c))) for c in (False, True))
        errors.append(abs(float(exact - corrected)))
        shrink = 10.0 ** (-power / 2)
        assert errors[-1] < 50 * shrink
        assert float(exact - paper) == pytest.approx(constant, abs=50 * shrink)
    assert errors[-1] < 5e-4
    assert sorted(errors, reverse=True) == errors


# --- the exact loss -----------------------------------------------------------------------------------------------


def simulated_loss(rule: OuterRule, sigma: Any, rounds: int, period: int, weights: Any = None) -> Any:
    """Log of the loss R20 of modes by the literal update with m <- 0 after every `period` rounds (R2 to R4)."""
    shares = [mpmath.mpf(w) for w in (weights if weights is not None else [1] * len(sigma))]
    with mpmath.workdps(90):
        ends = [oracle.simulated(rule, s, rounds, lambda t: t % period == 0 and (0, 0))[-1][0] for s in sigma]
        total = sum(w * x**2 for w, x in zip(shares, ends, strict=True) if w > 0) / sum(shares)
        return mpmath.log(total / 2) if total else mpmath.mpf("-inf")


def off(log: float, exact: Any) -> float:
    """Error of a logarithm, relative to it or to 1."""
    if mpmath.isinf(exact):
        return 0.0 if log == float(exact) else math.inf
    return abs(float((mpmath.mpf(float(log)) - exact) / max(1, abs(exact))))


def draw(rng: random.Random, *, modes: int) -> tuple[OuterRule, list[float], list[float] | None]:
    """A rule of any kind and form, stable or not, and a spectrum with weights of any size or none."""
    form = rng.choice(FORMS)
    momentum = rng.choice([0.0, 0.5, rng.uniform(0, 0.99), rng.uniform(0.5, 0.99)])
    step = rng.choice([rng.uniform(0.01, 1.2), rng.uniform(0.01, 1.2), rng.uniform(1, 5)])
    rule = OuterRule(step / (1 - momentum if form == "ema" else 1), momentum, rng.random() < 0.5, form)
    sigma = [rng.uniform(0.02, 1) for _ in range(modes)]
    sizes = [0.0, 1e-300, 1e300, 1.0, 3.0, rng.random()]
    weights = [rng.choice(sizes[2:]) if rng.random() < 0.6 else rng.choice(sizes) for _ in range(modes)]
    if 1e300 in weights:  # 1e-300 beside it would be 0 even as a share: doubles end at 1e-324
        weights = [max(w, 1e-10) if w else 0.0 for w in weights]
    return rule, sigma, weights if max(weights) > 0 and rng.random() < 0.8 else None


@pytest.mark.slow
def test_loss_is_that_of_a_simulation() -> None:
    """R20, tight: random rules (stable or not), spectra, weights, periods and horizons, T mod K included."""
    rng, tails = random.Random(5), 0
    for _ in range(amount(60, 250)):
        rule, sigma, weights = draw(rng, modes=rng.choice([1, 2, 5]))
        rounds = rng.randint(1, 50)
        period = rng.choice([1, rounds, rounds + rng.randint(1, 9), rng.randint(1, rounds), rng.randint(1, rounds)])
        loss = log_final_loss(rule, sigma, rounds, period, weights)
        assert off(loss, simulated_loss(rule, sigma, rounds, period, weights)) < 1e-13
        tails += rounds % period != 0 and period < rounds
    assert tails > 10


@pytest.mark.parametrize(
    ("rule", "sigma", "rounds", "period", "low", "high"),
    [
        *((rule, [0.95], 701, 5, -math.inf, -300) for rule in (HB, NAG)),
        *((rule, [0.95, 0.95], 700, 5, -math.inf, -300) for rule in (HB, NAG)),
        (HB, [0.95], 7000, 60, -math.inf, -300),
        (oracle.NILPOTENT[0], [1.0, 0.4], 10, 2, -20, 0),  # of several modes those that remain make the loss
        *((OuterRule(60.0, 0.9), [1.0, 0.3], 400, period, 600, math.inf) for period in (1, 2, 7, 400)),
    ],
)
def test_loss_beyond_all_doubles(
    rule: OuterRule, sigma: list[float], rounds: int, period: int, *, low: float, high: float
) -> None:
    """Losses of 10^-500 and less, or beyond 1e308, in which no residual is a double any more."""
    loss = log_final_loss(rule, sigma, rounds, period)
    assert low < loss / LOG_10 < high
    assert off(loss, simulated_loss(rule, sigma, rounds, period)) < 1e-13


def test_loss_at_the_ends() -> None:
    """An exact zero is -inf; T below the zero's round is finite; 1e9 rounds cost nothing."""
    once, gone = OuterRule(1.0, 0.5), oracle.NILPOTENT[0]  # s = 1: chi_1 = 0; 0 after two rounds
    assert log_final_loss(once, 1.0, 10, 1) == -math.inf
    assert log_final_loss(gone, 1.0, 10, [1, 2, 3, 9, 10]).tolist()[1:] == [-math.inf] * 4
    assert log_final_loss(gone, 1.0, 1, 5) == pytest.approx(math.log(0.125), rel=1e-15)
    huge = log_final_loss(HB, 0.95, 10**9, [5, 10**9])
    assert huge[0] == pytest.approx(2 * 2e8 * math.log(abs(restart_factor(HB, 0.95, 5))) - math.log(2), rel=1e-14)
    assert huge[1] == pytest.approx(1e9 * math.log(0.9), rel=1e-6)


def test_loss_of_arrays_is_that_of_singles() -> None:
    """Rules, leading axes of sigma and lists of periods, short or long, give the numbers of one at a time."""
    rules, sigma, weights = rule_grid([[0.05], [1.5]], [0.0, 0.5, 0.97]), np.array([0.9, 0.4, 0.1]), [1.0, 0.0, 2.0]
    for periods in ([3], [1, 2, 3, 5, 40, 41, 60]):
        losses = log_final_loss(rules, sigma, 41, periods, weights)
        single = [[[log_final_loss(r, sigma, 41, k, weights) for r in row] for row in rules] for k in periods]
        np.testing.assert_allclose(losses, np.array(single), rtol=1e-12)
    assert log_final_loss(rules, sigma, 41, 3, weights).shape == (2, 3)
    assert log_final_loss(HB, sigma, 41, 3).shape == ()
    stacked, nags = np.stack([sigma, sigma / 2]), rule_grid(0.7, [0.1, 0.8], True, "ema")
    single = [[log_final_loss(r, s, 17, k) for r, s in zip(nags, stacked, strict=True)] for k in (2, 5)]
    np.testing.assert_allclose(log_final_loss(nags, stacked, 17, [2, 5]), single, rtol=1e-12)
    assert log_final_loss(rules[..., None], stacked, 17, [2, 5]).shape == (2, 2, 3, 2)
    for periods, shape in ((range(1, 10), (9, 0)), (3, (0,))):
        assert log_final_loss(HB, np.zeros((0, 3)), 10, periods).shape == shape
    whole = log_final_loss(HB, sigma, 41.0, [3.0, 4.0])  # type: ignore[arg-type] - whole floats are whole numbers
    np.testing.assert_array_equal(whole, log_final_loss(HB, sigma, 41, [3, 4]))


# --- the best period ----------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A question to `best_period`."""

    rule: OuterRule
    sigma: list[float]
    weights: list[float] | None
    max_period: int
    rounds: int | None


def scores(objective: str, case: Case) -> dict[int, Any]:
    """The score of every period that competes, to 50 digits: the higher, the better."""
    rule, sigma, weights, max_period, rounds = case
    sizes = [mpmath.mpf(w) for w in (weights if weights is not None else [1] * len(sigma))]
    pairs = [(w, s) for w, s in zip(sizes, sigma, strict=True) if w > 0]
    periods = list(range(1, max_period + 1))
    if rounds is not None:
        periods = sorted({min(k, rounds) for k in periods} | {rounds})
    tables = [[mpmath.mpf(1), *oracle.factors(rule, s, periods[-1])] for _, s in pairs]

    def log(value: Any) -> Any:
        return mpmath.log(abs(value)) if value else mpmath.mpf("-inf")

    def score(period: int) -> Any:
        if objective == "minimax":
            return min(-log(t[period]) / period for t in tables)
        if objective == "loss":
            assert rounds is not None
            residues = [t[period] ** (rounds // period) * t[rounds % period] for t in tables]
        else:
            residues = [t[period] for t in tables]
        mean = sum(w * x * x for (w, _), x in zip(pairs, residues, strict=True)) / sum(sizes)
        return -log(mean) / (2 * period if objective == "rate" else 1)

    with mpmath.workdps(max(oracle.digits_for(rule, s) for _, s in pairs)):
        return {period: score(period) for period in periods}


def decided(objective: str, case: Case) -> int | None:
    """The best period, or None where its runner-up is within 1e-9, relative."""
    by_period = scores(objective, case)
    best = max(by_period, key=lambda k: (by_period[k], -k))
    others = [value for k, value in by_period.items() if k != best]
    if not others:
        return best
    gap, size = by_period[best] - max(others), max(abs(by_period[best]), abs(max(others)))
    if mpmath.isinf(size):
        return best if gap > 0 else None
    return best if gap > 1e-9 * size else None


def agree(cases: list[Case], objective: Any) -> int:
    """`best_period` is the exhaustive search's choice; return how many were too close to call."""
    undecided = 0
    for case in cases:
        best = decided(objective, case)
        undecided += best is None
        if best is not None:
            assert best_period(**case._asdict(), objective=objective) == best, case
    return undecided


@pytest.mark.parametrize("modes", [(1,), (2, 3, 6)], ids=["one mode", "several"])
@pytest.mark.parametrize("horizon", [False, True], ids=["long run", "horizon"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_best_period_is_that_of_an_exhaustive_search(
    objective: Objective, horizon: bool, modes: tuple[int, ...]
) -> None:
    """Every objective, both kinds and forms, weights 0, 1e-300 and 1e300, with a horizon and without."""
    if objective == "loss" and not horizon:
        return
    rng, cases = random.Random(f"{objective} {horizon} {modes}"), []
    while len(cases) < amount(20, 200):
        rule, sigma, weights = draw(rng, modes=rng.choice(modes))
        if rule.momentum > 0:  # without momentum every period ties
            rounds = rng.choice([2, rng.randint(3, 20), rng.randint(20, 60)]) if horizon else None
            cases.append(Case(rule, sigma, weights, rng.choice([1, 3, rng.randint(4, 30), 30]), rounds))
    assert agree(cases, objective) <= NEVER_SKIPPED * len(cases)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_best_period_with_slow_modes(objective: str) -> None:
    """A mode of sigma 1e-12 or less is not lost among faster ones, and is judged right by itself."""
    rng, cases = random.Random(f"slow {objective}"), []
    for tiny, rest in itertools.product((1e-12, 1e-18, 1e-200), ([], [1e-13], [0.9, 0.5], [0.95, 0.3, 1e-6])):
        rule = OuterRule(rng.uniform(0.3, 1.5), rng.uniform(0.3, 0.95), rng.random() < 0.5, rng.choice(FORMS))
        weights = None if rng.random() < 0.5 else [rng.uniform(0.1, 1) for _ in [tiny, *rest]]
        cases.append(Case(rule, [tiny, *rest], weights, 30, rng.randint(20, 60) if objective == "loss" else None))
    # the others see almost only the slow mode's weight, which all periods share
    assert agree(cases, objective) <= (6 if objective in ("minimax", "rate") else 12)
    assert best_period(HB, [1e-12, 0.5], max_period=40) == 40
    assert best_period(HB, 1e-12, max_period=40, rounds=40) == 40


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_best_period_of_arrays(objective: Any) -> None:
    """An array of rules, with leading axes of sigma, gives the choice of each by itself, as integers of that shape."""
    rules = rule_grid([[0.1], [0.7], [1.5]], [0.0, 0.3, 0.9, 0.97], [[[False]], [[True]]])
    options: dict[str, Any] = {"max_period": 25, "objective": objective, "weights": [1, 2, 0, 1e-3]}
    if objective == "loss":
        options["rounds"] = 37
    sigma = [0.9, 0.5, 0.1, 0.3]
    periods = best_period(rules, sigma, **options)
    assert periods.tolist() == [[[best_period(r, sigma, **options) for r in row] for row in part] for part in rules]
    assert np.issubdtype(periods.dtype, np.integer)
    assert best_period(rules[0, 1], [sigma], **options).tolist() == periods[0, 1].tolist()
    assert best_period(rules[0, 1][:, None], np.array([sigma, sigma]), **options).shape == (4, 2)
    assert best_period(HB, np.zeros((0, 4)), **{**options, "max_period": 40}).shape == (0,)


def test_ties_go_to_the_smaller_period() -> None:
    """Without momentum every period is the same; a nilpotent mode is gone from two rounds on; zeros repeat."""
    plain = rule_grid([0.3, 0.9, 1.4, 1.999], 0.0)
    questions: list[dict[str, Any]] = [{}, {"rounds": 50}, {"objective": "rate"}, {"objective": "rate", "rounds": 31}]
    for question in questions:
        periods = best_period(plain[:, None], np.array([[0.8], [0.3], [1e-9]]), max_period=40, **question)
        assert periods.tolist() == [[1, 1, 1]] * 4
    assert best_period(OuterRule(1.0, 0.0), 1.0, max_period=9, objective="factor") == 1  # chi = 0 in one round
    gone, zeros = oracle.NILPOTENT[0], OuterRule(0.5, 0.5)  # phase pi/4 and chi_2 = 0: zeros at K = 2, 6, 10, ...
    for rule, objective in itertools.product((gone, zeros), ("minimax", "rate", "factor")):
        assert best_period(rule, 1.0, max_period=30, objective=objective) == 2  # type: ignore[arg-type]
        assert best_period(rule, 1.0, max_period=30, rounds=60, objective=objective) == 2  # type: ignore[arg-type]
    assert best_period(HB, 0.0, max_period=30) == best_period(HB, [0.0, 0.5], max_period=30) == 1  # R22: all tie
    assert best_period(OuterRule(0.0, 0.9), 0.5, max_period=30, rounds=20) == 1


def test_block_periods() -> None:
    """Each block by itself, with its own rule and weights."""
    rules, weights = [HB, NAG, OuterRule(0.3, 0.5)], [[1.0] * 9, [1.0] * 8 + [0.0], [2.0] * 9]
    each = tuple(
        best_period(r, s, weights=w, max_period=30, rounds=80) for r, s, w in zip(rules, BLOCKS, weights, strict=True)
    )
    assert block_periods(rules, BLOCKS, weights=weights, max_period=30, rounds=80) == each
    assert block_periods(HB, [[0.95, 0.3]] * 2, weights=[[1, 0], [0, 1]], max_period=40) == (5, 10)


# --- the theory note's numbers ------------------------------------------------------------------------------------


def log10_loss(rule: OuterRule, sigma: Any, rounds: int, period: int) -> float:
    return float(log_final_loss(rule, sigma, rounds, period)) / LOG_10


def test_anchor_six_modes() -> None:
    """A2: T 120: best K = 7 with -14.45, per-mode oracle [5, 5, 6, 7, 8, 10] with -32.04; the paper's criterion."""
    rounds = 120
    assert best_period(HB, SIX, max_period=120, rounds=rounds) == best_period(HB, SIX, max_period=60) == 7
    assert log10_loss(HB, SIX, rounds, 7) == pytest.approx(-14.45, abs=0.05)
    oracles = block_periods(HB, [[s] for s in SIX], max_period=120, rounds=rounds)
    assert oracles == (5, 5, 6, 7, 8, 10)
    losses = [10 ** log10_loss(HB, s, rounds, period) for s, period in zip(SIX, oracles, strict=True)]
    assert math.log10(np.mean(losses)) == pytest.approx(-32.04, abs=0.005)
    assert [best_period(HB, SIX, max_period=k, objective="factor") for k in (11, 20, 120)] == [6, 17, 120]
    plain = [OuterRule(1.0, 0.41, True, "ema"), OuterRule(1.0, 0.30, False, "ema")]
    assert [log10_loss(rule, SIX, rounds, rounds) for rule in plain] == pytest.approx([-57.1, -63.0], abs=0.1)


def test_smallest_factor_is_not_the_largest_rate() -> None:
    """E1 and E2: argmin |chi_K| moves as its range grows, argmax r_K stays; of random modes most differ at last."""
    for largest, period in ((10, 5), (20, 15), (40, 35), (80, 75)):
        assert best_period(HB, 0.95, max_period=largest, objective="factor") == period
        assert best_period(HB, 0.95, max_period=largest, objective="rate") == 5
    rng = np.random.default_rng(1)
    rules, sigma = [], []
    while len(rules) < 600:
        rule, share = OuterRule(rng.uniform(0.1, 1.5), rng.uniform(0.3, 0.99), False, "ema"), rng.uniform(0.02, 1)
        low, high = oscillatory_interval(rule)
        if low < share < high:
            rules.append(rule)
            sigma.append([share])
    for largest, share in ((11, 0.33), (20, 0.60), (60, 0.89)):
        factor, rate = (best_period(rules, sigma, max_period=largest, objective=o) for o in ("factor", "rate"))  # type: ignore[arg-type]
        assert np.mean(factor != rate) == pytest.approx(share, abs=0.06)
