"""`theory.periods`: cancellations, heuristics and the best period, against 50 digits and exhaustive search."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import mpmath
import numpy as np
import pytest

import oracle
from twophase.rule import FORMS, Form, OuterRule
from twophase.theory.contraction import restart_factor, restart_table
from twophase.theory.inputs import rule_grid
from twophase.theory.modes import asymptotic_rate, oscillatory_interval
from twophase.theory.periods import (
    OBJECTIVES,
    Objective,
    best_period,
    block_periods,
    cancellation_periods,
    heuristic_period,
    log_final_loss,
    rounded_period,
    rounding_bound,
)

HB = OuterRule(1.0, 0.9, False, "ema")
NAG = OuterRule(1.0, 0.9, True, "ema")
SIX = [0.95, 0.85, 0.75, 0.60, 0.45, 0.30]  # A2
BLOCKS = [np.linspace(low, high, 9) for low, high in [(0.92, 1), (0.55, 0.65), (0.18, 0.26)]]  # A3
THREE = np.concatenate(BLOCKS)
LOG_10 = math.log(10)
NEVER_SKIPPED = 0.02  # share of the comparisons with exhaustive search that may be too close to call


def rule_of(step: Any, sigma: float, momentum: float, nesterov: bool, form: Form) -> OuterRule:
    """The rule that gives a mode of that sigma (about) the effective step."""
    return OuterRule(float(step / sigma / (1 - momentum if form == "ema" else 1)), momentum, nesterov, form)


def interval(momentum: float, nesterov: bool) -> tuple[float, float]:
    """Steps between which a mode oscillates."""
    root = math.sqrt(momentum)
    return (((1 - momentum) / (1 + momentum)) ** 2, 1.0) if nesterov else ((1 - root) ** 2, (1 + root) ** 2)


def oscillating(count: int, seed: int, largest: float = 0.99) -> list[tuple[OuterRule, float]]:
    """Modes that oscillate, of both kinds and forms, uniform in the logarithm of the step and in it."""
    rng, found = random.Random(seed), []
    for number in range(count):
        momentum, nesterov, form = rng.uniform(0.05, largest), bool(number & 1), FORMS[number >> 1 & 1]
        low, high = interval(momentum, nesterov)
        step = low * (high / low) ** rng.uniform(0.01, 0.99) if number & 4 else rng.uniform(low, high)
        sigma = rng.uniform(0.01, 1)
        found.append((rule_of(step, sigma, momentum, nesterov, form), sigma))
    return found


def phase_of(rule: OuterRule, sigma: float) -> tuple[Any, Any, Any]:
    """The angle phi, the constant C and rho of R7, from the matrix's eigenvalues."""
    (first, _), t = oracle.eigenvalues(rule, sigma), oracle.matrix(rule, sigma)
    rise = abs(mpmath.im(first))
    return mpmath.atan2(rise, mpmath.re(first)), (t[0, 0] - t[1, 1]) / (2 * rise), abs(first)


def cancellation_of(rule: OuterRule, sigma: float, number: int = 0) -> Any:
    """R13 to 50 digits."""
    with mpmath.workdps(oracle.digits_for(rule, sigma)):
        phi, c, _ = phase_of(rule, sigma)
        return (mpmath.atan(c) + mpmath.pi / 2 + number * mpmath.pi) / phi


# --- cancellations ------------------------------------------------------------------------------------------------


def test_cancellations_are_the_zeros_of_the_bracket() -> None:
    """R13: `cos t phi + C sin t phi = 0` at every cancellation, the first at l = 0; 15 digits are right."""
    worst = 0.0
    for rule, sigma in oscillating(200, seed=1):
        times = cancellation_periods(rule, sigma, 5)
        assert times.shape == (5,)
        with mpmath.workdps(oracle.DIGITS):
            phi, c, _ = phase_of(rule, sigma)
            for number, time in enumerate(times):
                exact = cancellation_of(rule, sigma, number)
                worst = max(worst, abs(float(time / exact - 1)))
                bracket = mpmath.cos(mpmath.mpf(time) * phi) + c * mpmath.sin(mpmath.mpf(time) * phi)
                assert abs(bracket) <= 2e-15 * mpmath.sqrt(1 + c * c) * (1 + phi * time)
        assert 0 < times[0] < float(mpmath.pi / phi)  # no earlier one
    assert worst < 1e-15


def test_factors_change_sign_at_cancellations() -> None:
    """The sign of chi_K is -1 to the number of cancellations before K: none is missed, none invented."""
    checked = 0
    for rule, sigma in oscillating(120, seed=2):
        factors = oracle.factors(rule, sigma, 30)
        times = cancellation_periods(rule, sigma, 40)
        for period, factor in enumerate(factors, start=1):
            if np.abs(times - period).min() > 1e-9:
                assert mpmath.sign(factor) == (-1) ** int(np.sum(times < period))
                checked += 1
    assert checked > 3500


@pytest.mark.parametrize("edge", [0, 1], ids=["lower", "upper"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "Nesterov"])
def test_cancellations_next_to_the_edges(nesterov: bool, edge: int) -> None:
    """Down to a relative distance of 1e-14 from either edge of the oscillatory interval the times keep their digits."""
    worst, seen = 0.0, 0
    for momentum, form, power in itertools.product((0.3, 0.9, 0.999), FORMS, range(2, 15)):
        with mpmath.workdps(oracle.DIGITS):
            root = mpmath.sqrt(momentum)
            ends = [((1 - root**2) / (1 + root**2)) ** 2, 1] if nesterov else [(1 - root) ** 2, (1 + root) ** 2]
            step = ends[edge] * (1 + (1 - 2 * edge) * mpmath.mpf(10) ** -power)
            rule = rule_of(step, 0.7, momentum, nesterov, form)
        times = cancellation_periods(rule, 0.7, 3)
        exact = [cancellation_of(rule, 0.7, number) for number in range(3)]
        seen += 1
        worst = max(worst, *(abs(float(t / e - 1)) for t, e in zip(times, exact, strict=True)))
    assert seen == 78
    assert worst < 2e-15


def test_no_cancellations_outside_the_interval() -> None:
    """Below, at and above the oscillatory interval, without momentum, and at sigma 0, there are none: nan."""
    low, high = oscillatory_interval(HB)
    assert high > 1
    outside = np.array([0.0, 1e-300, low / 2, low * (1 - 1e-12)])
    assert np.isnan(cancellation_periods(HB, outside, 2)).all()
    assert not np.isnan(cancellation_periods(HB, low * (1 + 1e-12), 2)).any()
    for rule in (
        OuterRule(0.25, 0.25),  # critical: s = (1 - sqrt b)^2
        OuterRule(2.25, 0.25),  # critical, upper edge
        OuterRule(3.0, 0.25),  # above
        OuterRule(2.0, 0.5, True, "ema"),  # nilpotent
        OuterRule(1.1, 0.5, True),  # negative determinant
        OuterRule(0.5, 0.0),
        OuterRule(0.0, 0.9),
    ):
        assert np.isnan(cancellation_periods(rule, 1.0, 3)).all()
        assert rounded_period(rule, 1.0) == 0
        holds, bound = rounding_bound(rule, 1.0)
        assert not holds
        assert np.isnan(bound)


def test_cancellation_shapes() -> None:
    """Rules and sigma broadcast; the count is the last axis; no modes give no times."""
    rules = rule_grid([[0.1], [0.2], [0.3]], 0.9)
    assert cancellation_periods(rules, np.full(4, 0.5), 2).shape == (3, 4, 2)
    assert cancellation_periods(HB, [], 2).shape == (0, 2)
    assert rounded_period(HB, np.zeros((0, 3))).shape == (0, 3)
    assert type(rounded_period(HB, 0.95)) is np.int64


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "Nesterov"])
@pytest.mark.parametrize("momentum", [0.05, 0.5, 0.9, 0.99])
def test_first_cancellation_falls_with_sigma(momentum: float, nesterov: bool) -> None:
    """R13: the larger the effective progress, the sooner the first cancellation."""
    low, high = interval(momentum, nesterov)
    rule = OuterRule(high, momentum, nesterov)
    sigma = np.linspace(low / high, 1, 2002)[1:-1]
    times = cancellation_periods(rule, sigma, 1)[:, 0]
    assert np.all(np.diff(times) < 0)
    assert times[0] > 20 * times[-1]


# --- rounding -----------------------------------------------------------------------------------------------------


def test_rounded_period_is_the_nearest_whole_one() -> None:
    """R13: `K_0 = max(1, floor(K_c + 1/2))`."""
    for rule, sigma in oscillating(200, seed=3):
        exact = cancellation_of(rule, sigma)
        if abs(exact - mpmath.nint(exact)) < 0.4999:
            assert rounded_period(rule, sigma) == max(1, int(mpmath.nint(exact)))
    assert rounded_period(HB, SIX).tolist() == [5, 5, 6, 7, 8, 10]  # A2


def test_rounded_period_is_a_good_guess() -> None:
    """R13: it has the largest rate in about 92 % of random modes, and is within 1 of it in about 99 %."""
    rng = np.random.default_rng(0)
    exact = close = total = 0
    for _ in range(500):
        rule = OuterRule(rng.uniform(0.1, 1.5), rng.uniform(0.3, 0.99), bool(rng.integers(2)), "ema")
        sigma = rng.uniform(0.02, 1)
        first = cancellation_periods(rule, sigma, 1)[0]
        if np.isnan(first) or first > 300:
            continue
        best = best_period(rule, sigma, max_period=math.ceil(3 * first) + 5)
        off = abs(best - rounded_period(rule, sigma))
        exact, close, total = exact + (off == 0), close + (off <= 1), total + 1
    assert total > 350
    assert 0.88 < exact / total < 0.96
    assert close / total > 0.97


def test_rounding_bound_and_its_conditions() -> None:
    """R14: the bound's value; it holds if and only if K_c >= 1/2, a >= -rho, bound <= 1; beyond, K = 1 is no help."""
    rng = random.Random(4)
    held = failed = 0
    for number in range(400):
        momentum, nesterov, form = rng.uniform(0.02, 0.99), bool(number & 1), FORMS[number >> 1 & 1]
        low, high = interval(momentum, nesterov)
        # half of them around the limit, where the equivalence is decided
        around = 1 - 0.25 * momentum if nesterov else 1 + math.sqrt(momentum)
        step = rng.uniform(low, high) if number & 4 else min(max(around * rng.uniform(0.9, 1.1), low), high * 0.999)
        rule, sigma = rule_of(step, 0.8, momentum, nesterov, form), 0.8
        holds, bound = rounding_bound(rule, sigma)
        with mpmath.workdps(oracle.DIGITS):
            phi, c, rho = phase_of(rule, sigma)
            exact = mpmath.sqrt(1 + c * c) * mpmath.sin(phi / 2)
            assert abs(bound / exact - 1) < 1e-14
            s, b = oracle.step(rule, sigma), mpmath.mpf(momentum)
            if not nesterov:
                assert abs(exact**2 / (s * mpmath.sqrt(b) / ((1 + mpmath.sqrt(b)) ** 2 - s)) - 1) < 1e-40
            if abs(exact - 1) < 1e-12:
                continue
            assert bool(holds) == (cancellation_of(rule, sigma) >= mpmath.mpf(1) / 2)
            assert bool(holds) == (oracle.matrix(rule, sigma)[0, 0] >= -rho) == (exact <= 1)
            period = int(rounded_period(rule, sigma))
            left = abs(oracle.factor(rule, sigma, period)) / rho**period
            assert left <= exact * (1 + 1e-12) if holds else (period == 1 and left > 1)
        held, failed = held + bool(holds), failed + (not holds)
    assert held > 100
    assert failed > 60


# --- closed forms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("momentum", "sigma", "exact", "paper", "corrected"),
    [(0.99, 0.22, 35.38, 33.49, 35.26), (0.99, 0.10, 54.77, 49.67, 54.17), (0.9, 0.22, 12.95, 10.59, 12.36)],
)
def test_heuristic_table(momentum: float, sigma: float, exact: float, paper: float, corrected: float) -> None:
    """R16's table for heavy ball at EMA lr 1."""
    rule = OuterRule(1.0, momentum, form="ema")
    assert cancellation_periods(rule, sigma, 1)[0] == pytest.approx(exact, abs=0.005)
    assert heuristic_period(rule, sigma, corrected=False) == pytest.approx(paper, abs=0.005)
    assert heuristic_period(rule, sigma) == pytest.approx(corrected, abs=0.005)
    assert heuristic_period(rule.to("sum"), sigma) == pytest.approx(float(heuristic_period(rule, sigma)), rel=1e-14)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "Nesterov"])
@pytest.mark.parametrize(("lr", "sigma"), [(1.0, 0.22), (0.7, 0.95), (1.6, 0.5), (0.3, 0.1)])
def test_heuristic_errors_as_momentum_grows(lr: float, sigma: float, nesterov: bool, form: Form) -> None:
    """R16: as b -> 1 the corrected form's error vanishes like sqrt(1-b); the paper's tends to a constant of order 1."""
    product = lr * sigma
    constant = 1 / (2 * product) - 1 if nesterov else (1 / product - 1) / 2
    errors = []
    for power in (4, 6, 8, 10):
        rule = OuterRule(lr, 1 - 10.0**-power, nesterov, "ema").to(form)
        exact = cancellation_of(rule, sigma)
        paper, corrected = (heuristic_period(rule, sigma, corrected=c) for c in (False, True))
        errors.append(abs(float(exact - mpmath.mpf(float(corrected)))))
        shrink = 10.0 ** (-power / 2)
        assert errors[-1] < 50 * shrink
        assert float(exact - mpmath.mpf(float(paper))) == pytest.approx(constant, abs=50 * shrink)
    assert errors[-1] < 5e-4
    assert errors[0] > errors[1] > errors[2] > errors[3]


def test_heuristic_at_the_ends() -> None:
    """Nothing moves at s = 0: infinitely late. Rules and sigma broadcast."""
    assert heuristic_period(HB, 0.0) == math.inf
    assert heuristic_period(OuterRule(0.0, 0.9), 0.5, corrected=False) == math.inf
    assert heuristic_period([HB, NAG], [[0.1], [0.2], [0.3]]).shape == (3, 2)


# --- the exact loss -----------------------------------------------------------------------------------------------


def simulated(rule: OuterRule, sigma: float, rounds: int, period: int) -> Any:
    """x_T of one mode, by the literal update with m <- 0 after every `period` rounds (R2 to R4)."""
    b, lr, share = mpmath.mpf(rule.momentum), mpmath.mpf(rule.lr), mpmath.mpf(sigma)
    weight = 1 - b if rule.form == "ema" else mpmath.mpf(1)
    x, m = mpmath.mpf(1), mpmath.mpf(0)
    for number in range(1, rounds + 1):
        g = share * x
        m = b * m + weight * g
        x -= lr * (b * m + weight * g if rule.nesterov else m)
        if number % period == 0:
            m = mpmath.mpf(0)
    return x


def simulated_loss(rule: OuterRule, sigma: Any, rounds: int, period: int, weights: Any = None) -> Any:
    """Log of the loss R20 of modes by simulation."""
    shares = [mpmath.mpf(w) for w in (weights if weights is not None else [1] * len(sigma))]
    with mpmath.workdps(90):
        total = sum(
            w * simulated(rule, s, rounds, period) ** 2 for w, s in zip(shares, sigma, strict=True) if w > 0
        ) / sum(shares)
        return mpmath.log(total / 2) if total else mpmath.mpf("-inf")


def off(found: float, exact: Any) -> float:
    """Error of a logarithm, relative to it or to 1."""
    if mpmath.isinf(exact):
        return 0.0 if found == float(exact) else math.inf
    return abs(float((mpmath.mpf(float(found)) - exact) / max(1, abs(exact))))


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


def test_loss_is_that_of_a_simulation() -> None:
    """R20, tight: random rules (stable or not), spectra, weights, periods and horizons, T mod K included."""
    rng, worst, tails = random.Random(5), 0.0, 0
    for _ in range(250):
        rule, sigma, weights = draw(rng, modes=rng.choice([1, 2, 5]))
        rounds = rng.randint(1, 60)
        period = rng.choice([1, rounds, rounds + rng.randint(1, 9), rng.randint(1, rounds), rng.randint(1, rounds)])
        found = log_final_loss(rule, sigma, rounds, period, weights)
        worst = max(worst, off(found, simulated_loss(rule, sigma, rounds, period, weights)))
        tails += rounds % period != 0 and period < rounds
    assert tails > 50
    assert worst < 1e-13


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "Nesterov"])
def test_loss_far_below_the_smallest_double(nesterov: bool) -> None:
    """Losses of 10^-500 and less, in which no residual is a double any more."""
    rule = OuterRule(1.0, 0.9, nesterov, "ema")
    for rounds, period in ((700, 5), (701, 5), (7000, 60)):
        found = log_final_loss(rule, [0.95], rounds, period)
        assert found / LOG_10 < -300
        assert off(found, simulated_loss(rule, [0.95], rounds, period)) < 1e-13
    both = [log_final_loss(rule, [0.95, s], 700, 5) for s in (0.95, 1e-6)]
    assert both[0] / LOG_10 < -300 < -2 < both[1] / LOG_10


def test_loss_of_modes_that_vanish() -> None:
    """An exact zero is -inf; of several modes those that are left make the loss; T below the zero's round is finite."""
    once = OuterRule(1.0, 0.5)  # s = 1: chi_1 = 0
    gone = OuterRule(2.0, 0.5, True, "ema")  # nilpotent: 0 after two rounds
    assert log_final_loss(once, 1.0, 10, 1) == -math.inf
    assert log_final_loss(once, [1.0, 1.0], 10, [1, 2]).tolist() == [-math.inf, off_free(once, 10, 2)]
    assert log_final_loss(gone, 1.0, 10, [1, 2, 3, 9, 10]).tolist()[1:] == [-math.inf] * 4
    assert log_final_loss(gone, 1.0, 1, 5) == pytest.approx(math.log(0.125), rel=1e-15)
    assert log_final_loss(gone, [1.0, 0.4], 10, 2) == pytest.approx(
        float(simulated_loss(gone, [1.0, 0.4], 10, 2)), rel=1e-13
    )


def off_free(rule: OuterRule, rounds: int, period: int) -> Any:
    """The loss of one mode of sigma 1, to pytest's tolerance."""
    return pytest.approx(float(simulated_loss(rule, [1.0], rounds, period)), rel=1e-13)


def test_loss_beyond_the_largest_double() -> None:
    """Modes that grow beyond 1e308, in some periods only or in all; 1e9 rounds cost nothing."""
    rule = OuterRule(60.0, 0.9)
    for period in (1, 2, 7, 400):
        found = log_final_loss(rule, [1.0, 0.3], 400, period)
        assert found > 1400
        assert off(found, simulated_loss(rule, [1.0, 0.3], 400, period)) < 1e-13
    huge = log_final_loss(HB, 0.95, 10**9, [5, 10**9])
    assert huge[0] == pytest.approx(2 * 2e8 * math.log(abs(restart_factor(HB, 0.95, 5))) - math.log(2), rel=1e-14)
    assert huge[1] == pytest.approx(1e9 * math.log(0.9), rel=1e-6)


def test_loss_of_arrays_is_that_of_singles() -> None:
    """Rules, leading axes of sigma and lists of periods, short or long, give the numbers of one at a time."""
    rules = rule_grid([[0.05], [0.3], [1.5]], [0.0, 0.5, 0.9, 0.97])
    nags = rule_grid(0.7, [0.1, 0.8], True, "ema")
    sigma = np.array([0.9, 0.4, 0.1])
    weights = [1.0, 0.0, 2.0]
    for periods in ([3], [1, 4], [1, 2, 3, 5, 8, 13, 40, 41, 60], [*range(1, 45, 4), 41]):
        found = log_final_loss(rules, sigma, 41, periods, weights)
        assert found.shape == (len(periods), 3, 4)
        single = [[[log_final_loss(r, sigma, 41, k, weights) for r in row] for row in rules] for k in periods]
        np.testing.assert_allclose(found, np.array(single), rtol=1e-12)
    assert log_final_loss(rules, sigma, 41, 3, weights).shape == (3, 4)
    assert log_final_loss(HB, sigma, 41, 3).shape == ()
    stacked = np.stack([sigma, sigma / 2])
    found = log_final_loss(nags, stacked, 17, [2, 5])
    np.testing.assert_allclose(
        found, [[log_final_loss(r, s, 17, k) for r, s in zip(nags, stacked, strict=True)] for k in (2, 5)], rtol=1e-12
    )
    assert log_final_loss(rules[..., None], stacked, 17, [2, 5]).shape == (2, 3, 4, 2)
    assert log_final_loss(HB, np.zeros((0, 3)), 10, range(1, 10)).shape == (9, 0)
    whole = log_final_loss(HB, sigma, 41.0, [3.0, 4.0])  # type: ignore[arg-type] - whole floats are whole numbers
    np.testing.assert_array_equal(whole, log_final_loss(HB, sigma, 41, [3, 4]))


def test_loss_of_no_spectra() -> None:
    """A leading axis without entries gives a result without entries, by single factors as by a table."""
    assert log_final_loss(HB, np.zeros((0, 3)), 10, 3).shape == (0,)
    assert best_period(HB, np.zeros((0, 3)), max_period=5, rounds=10).shape == (0,)


# --- the best period ----------------------------------------------------------------------------------------------


Case = tuple[OuterRule, Any, Any, int, int | None]
"""Rule, sigma, weights, max_period, rounds."""


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
            left = [t[period] ** (rounds // period) * t[rounds % period] for t in tables]
        else:
            left = [t[period] for t in tables]
        mean = sum(w * x * x for (w, _), x in zip(pairs, left, strict=True)) / sum(sizes)
        return -log(mean) / (2 * period if objective == "rate" else 1)

    with mpmath.workdps(max(oracle.digits_for(rule, s) for _, s in pairs)):
        return {period: score(period) for period in periods}


def is_decided(found: dict[int, Any]) -> int | None:
    """The best period, or None where its runner-up is within 1e-9, relative."""
    best = max(found, key=lambda k: (found[k], -k))
    others = [value for k, value in found.items() if k != best]
    if not others:
        return best
    gap, size = found[best] - max(others), max(abs(found[best]), abs(max(others)))
    if mpmath.isinf(size):
        return best if gap > 0 else None
    return best if gap > 1e-9 * size else None


def agree(cases: list[Case], objective: Any) -> None:
    """`best_period` is the exhaustive search's choice wherever that is not too close to call."""
    skipped = 0
    for case in cases:
        rule, sigma, weights, max_period, rounds = case
        best = is_decided(scores(objective, case))
        skipped += best is None
        if best is not None:
            found = best_period(rule, sigma, weights=weights, max_period=max_period, rounds=rounds, objective=objective)
            assert type(found) is int
            assert found == best, (rule, sigma, weights, max_period, rounds)
    assert skipped <= NEVER_SKIPPED * len(cases)


def cases(seed: int, count: int, horizon: bool, modes: tuple[int, ...]) -> list[Case]:
    """Random questions; without momentum every period ties, so that those are left out here."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        rule, sigma, weights = draw(rng, modes=rng.choice(modes))
        if rule.momentum > 0:
            rounds = rng.choice([2, rng.randint(3, 20), rng.randint(20, 90)]) if horizon else None
            found.append((rule, sigma, weights, rng.choice([1, 3, rng.randint(4, 40), 40]), rounds))
    return found


@pytest.mark.parametrize("modes", [(1,), (2, 3, 6)], ids=["one mode", "several"])
@pytest.mark.parametrize("horizon", [False, True], ids=["long run", "horizon"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_best_period_is_that_of_an_exhaustive_search(
    objective: Objective, horizon: bool, modes: tuple[int, ...]
) -> None:
    """Every objective, both kinds and forms, weights 0, 1e-300 and 1e300, with a horizon and without."""
    if objective == "loss" and not horizon:
        with pytest.raises(ValueError, match="needs rounds"):
            best_period(HB, 0.5, max_period=3, objective="loss")
        return
    seed = OBJECTIVES.index(objective) * 4 + horizon * 2 + (1 if modes == (1,) else 0)
    agree(cases(seed, 200 if modes == (1,) else 100, horizon, modes), objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_best_period_with_slow_modes(objective: str) -> None:
    """A mode of sigma 1e-12 or less is not lost among faster ones, and is judged right by itself."""
    rng, found = random.Random(f"slow {objective}"), []
    for tiny in (1e-12, 1e-14, 1e-18, 1e-30, 1e-200):
        for rest in ([], [tiny / 3], [0.9, 0.5], [0.95, 0.3, 1e-6]):
            rule = OuterRule(rng.uniform(0.3, 1.5), rng.uniform(0.3, 0.95), rng.random() < 0.5, rng.choice(FORMS))
            weights = None if rng.random() < 0.5 else [rng.uniform(0.1, 1) for _ in [tiny, *rest]]
            found.append((rule, [tiny, *rest], weights, 30, rng.randint(20, 60) if objective == "loss" else None))
    undecided = [case for case in found if is_decided(scores(objective, case)) is None]
    if objective in ("minimax", "rate"):  # the others see almost only the slow mode's weight, which all periods share
        assert len(undecided) <= 8
    agree([case for case in found if case not in undecided], objective)
    assert len(undecided) <= 15


def test_slow_modes_decide_the_minimax_rate() -> None:
    """With sigma 1e-12 present the slowest rate is a few 1e-13; the longest cycle has five times the shortest's."""
    rates = asymptotic_rate(HB, 1e-12)
    assert rates == pytest.approx(1e-12, rel=1e-9)
    assert best_period(HB, [1e-12, 0.5], max_period=40) == 40
    assert best_period(HB, 1e-12, max_period=40) == 40
    assert best_period(HB, 1e-12, max_period=40, rounds=40) == 40


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_best_period_of_arrays(objective: Any) -> None:
    """An array of rules, with leading axes of sigma, gives the choice of each by itself, as integers of that shape."""
    rules = rule_grid([[0.1], [0.7], [1.5]], [0.0, 0.3, 0.9, 0.97], [[[False]], [[True]]])
    options: dict[str, Any] = {"max_period": 25, "objective": objective, "weights": [1, 2, 0, 1e-3]}
    if objective == "loss":
        options["rounds"] = 37
    found = best_period(rules, [0.9, 0.5, 0.1, 0.3], **options)
    assert found.shape == (2, 3, 4)
    assert np.issubdtype(found.dtype, np.integer)
    for place in np.ndindex(found.shape):
        assert found[place] == best_period(rules[place], [0.9, 0.5, 0.1, 0.3], **options)
    each = best_period(rules[0, 1], [[0.9, 0.5, 0.1, 0.3]], **options)
    assert each.tolist() == found[0, 1].tolist()
    stacked = np.array([[0.9, 0.5, 0.1, 0.3], [0.2, 0.2, 0.2, 0.2]])
    assert best_period(rules[0, 1][:, None], stacked, **options).shape == (4, 2)
    assert best_period(HB, np.zeros((0, 4)), **{**options, "max_period": 40}).shape == (0,)


def test_ties_go_to_the_smaller_period() -> None:
    """Without momentum every period is the same; a nilpotent mode is gone from two rounds on; zeros repeat."""
    plain = rule_grid([0.3, 0.9, 1.4, 1.999], 0.0)
    questions: list[dict[str, Any]] = [{}, {"rounds": 50}, {"objective": "rate"}, {"objective": "rate", "rounds": 31}]
    for question in questions:
        found = best_period(plain[:, None], np.array([[0.8], [0.3], [1e-9]]), max_period=40, **question)
        assert found.tolist() == [[1, 1, 1]] * 4
    assert best_period(plain, [0.8, 0.3], max_period=40, rounds=40).tolist() == [1] * 4
    assert best_period(OuterRule(1.0, 0.0), 1.0, max_period=9, objective="factor") == 1  # chi = 0 in one round
    gone = OuterRule(2.0, 0.5, True, "ema")
    zeros = OuterRule(0.5, 0.5)  # phase pi/4 and chi_2 = 0: zeros at K = 2, 6, 10, ...
    assert [bool(restart_factor(zeros, 1.0, k) == 0) for k in range(1, 11)] == [k % 4 == 2 for k in range(1, 11)]
    objectives: list[Objective] = ["minimax", "rate", "factor"]
    for rule, objective in itertools.product((gone, zeros), objectives):
        assert best_period(rule, 1.0, max_period=30, objective=objective) == 2
        assert best_period(rule, 1.0, max_period=30, rounds=60, objective=objective) == 2
    assert best_period(gone, [1.0, 1.0], max_period=30, rounds=60) == 2
    assert best_period(HB, 0.0, max_period=30) == best_period(HB, [0.0, 0.5], max_period=30) == 1  # R22: all tie
    assert best_period(OuterRule(0.0, 0.9), 0.5, max_period=30, rounds=20) == 1


def test_no_restart_always_competes() -> None:
    """With a horizon, "never" is a candidate whatever max_period is, and every period at or above T is written T."""
    slow = [0.02, 0.01]  # real modes: every restart loses (R17)
    assert best_period(HB, slow, max_period=5, rounds=60) == 60
    assert best_period(HB, slow, max_period=500, rounds=60) == 60
    assert best_period(HB, slow, max_period=60, rounds=60) == 60
    assert best_period(HB, slow, max_period=1, rounds=1) == 1
    assert best_period(HB, slow, max_period=9, rounds=1) == 1
    for objective in OBJECTIVES:
        assert best_period(HB, slow, max_period=3, rounds=10, objective=objective) == 10
    assert best_period(HB, slow, max_period=5) == 5  # without a horizon the range is all there is
    assert best_period(HB, 0.95, max_period=3, rounds=10**9) in (3, 10**9)
    assert best_period(HB, 0.95, max_period=40, rounds=10**9) == 5


def test_weights_are_shares() -> None:
    """Only their ratios count; modes of weight 0 not at all, whatever their sigma; equal when None."""
    sigma = [0.95, 0.3, 0.0]
    for rounds in (None, 50):
        options: dict[str, Any] = {"max_period": 40, "rounds": rounds}
        one = best_period(HB, 0.95, **options)
        assert best_period(HB, sigma, weights=[1e-300, 0, 0], **options) == one == 5
        assert best_period(HB, sigma, weights=[1e300, 0.0, 0.0], **options) == one
        assert best_period(HB, sigma[:2], weights=[7, 7], **options) == best_period(HB, sigma[:2], **options)
    shares = [log_final_loss(HB, sigma, 30, 4, [scale * w for w in (1, 2, 3)]) for scale in (1, 1e-300, 1e300)]
    assert shares == pytest.approx([shares[0]] * 3, rel=1e-15)


def test_block_periods() -> None:
    """Each block by itself, with its own rule and weights."""
    rules = [HB, NAG, OuterRule(0.3, 0.5)]
    weights = [[1.0] * 9, [1.0] * 8 + [0.0], [2.0] * 9]
    each = tuple(
        best_period(r, s, weights=w, max_period=30, rounds=80) for r, s, w in zip(rules, BLOCKS, weights, strict=True)
    )
    assert block_periods(rules, BLOCKS, weights=weights, max_period=30, rounds=80) == each
    assert block_periods(HB, [[0.95, 0.3]] * 2, weights=[[1, 0], [0, 1]], max_period=40) == (5, 10)
    assert block_periods(HB, [0.95, 0.3], max_period=40) == (5, 10)


# --- the theory note's numbers ------------------------------------------------------------------------------------


def log10_loss(rule: OuterRule, sigma: Any, rounds: int, period: int) -> float:
    return float(log_final_loss(rule, sigma, rounds, period)) / LOG_10


def log10_mean(rule: OuterRule, blocks: Any, rounds: int, periods: Any) -> float:
    """Log10 of the mean of the blocks' losses, each under its own period."""
    losses = [10 ** log10_loss(rule, block, rounds, period) for block, period in zip(blocks, periods, strict=True)]
    return math.log10(sum(losses) / len(losses))


def test_anchor_one_mode() -> None:
    """A1: sigma .95, T 80: no restart -3.96, K = 5 best with -64.54; NAG -7.45 and -36.8; tuned NAG, outer SGD."""
    rounds = 80
    assert best_period(HB, 0.95, max_period=80, rounds=rounds) == 5
    found = {k: log10_loss(HB, 0.95, rounds, k) for k in (5, 15, 4, 6, 75, 80)}
    assert found[80] == pytest.approx(-3.96, abs=0.005)
    assert found[5] == pytest.approx(-64.54, abs=0.005)
    assert [found[k] for k in (15, 4, 6, 75)] == pytest.approx([-24.5, -23.7, -17.9, -10.0], abs=0.05)
    assert log10_loss(NAG, 0.95, rounds, rounds) == pytest.approx(-7.45, abs=0.005)
    best = best_period(NAG, 0.95, max_period=80, rounds=rounds)
    assert log10_loss(NAG, 0.95, rounds, best) == pytest.approx(-36.8, abs=0.05)
    for momenta, loss in (((0.5, 0.6, 0.7, 0.8, 0.9), -47.0), ((0.1, 0.3, 0.5, 0.7, 0.9), -148.0)):
        tuned = log_final_loss(rule_grid(1.0, momenta, True, "ema"), [0.95], rounds, rounds) / LOG_10
        assert tuned.min() == pytest.approx(loss, abs=0.5)
    assert log10_loss(OuterRule(1.0, 0.0), 0.95, rounds, rounds) == pytest.approx(-208, abs=0.5)
    # E18: which momenta beat HB with K = 5 without any restart; between the two numbers it comes and goes.
    for nesterov, below, above in ((True, 0.385, 0.397), (False, 0.157, 0.179)):
        momenta = np.concatenate([np.linspace(0.0, below, 60), np.linspace(above, 0.99, 60)])
        alone = log_final_loss(rule_grid(1.0, momenta, nesterov, "ema"), [0.95], rounds, rounds) / LOG_10
        np.testing.assert_array_equal(alone < found[5], momenta <= below)


def test_anchor_six_modes() -> None:
    """A2: T 120: none -6.16, best K = 7 with -14.45, per-mode oracle [5, 5, 6, 7, 8, 10] with -32.04."""
    rounds = 120
    assert best_period(HB, SIX, max_period=120, rounds=rounds) == 7
    values = {7: -14.45, 6: -12.5, 5: -10.6, 3: -7.3, 120: -6.16}
    for period, loss in values.items():
        assert log10_loss(HB, SIX, rounds, period) == pytest.approx(loss, abs=0.05)
    oracles = block_periods(HB, [[s] for s in SIX], max_period=120, rounds=rounds)
    assert oracles == (5, 5, 6, 7, 8, 10)
    assert log10_mean(HB, [[s] for s in SIX], rounds, oracles) == pytest.approx(-32.04, abs=0.005)
    paper = [best_period(HB, SIX, max_period=k, objective="factor") for k in (11, 20, 120)]
    assert paper == [6, 17, 120]
    assert log10_loss(HB, SIX, rounds, 17) == pytest.approx(-6.64, abs=0.005)
    assert best_period(HB, SIX, max_period=60) == 7
    plain = [OuterRule(1.0, 0.0), OuterRule(1.0, 0.41, True, "ema"), OuterRule(1.0, 0.30, False, "ema")]
    assert [log10_loss(rule, SIX, rounds, rounds) for rule in plain] == pytest.approx([-38.3, -57.1, -63.0], abs=0.1)


def test_anchor_three_blocks() -> None:
    """A3: T 120: none -6.01, best global K = 8 with -8.85, blockwise [5, 7, 13] with -17.81, the heuristics' worse."""
    rounds = 120
    assert best_period(HB, THREE, max_period=120, rounds=rounds) == 8
    assert log10_loss(HB, THREE, rounds, 8) == pytest.approx(-8.85, abs=0.005)
    assert log10_loss(HB, THREE, rounds, rounds) == pytest.approx(-6.01, abs=0.005)
    assert block_periods(HB, BLOCKS, max_period=120, rounds=rounds) == (5, 7, 13)
    means = [float(block.mean()) for block in BLOCKS]
    paper, corrected = (
        [round(float(heuristic_period(HB, mean, corrected=c))) for mean in means] for c in (False, True)
    )
    assert (paper, corrected) == ([5, 6, 11], [5, 7, 12])
    for periods, loss in (((5, 7, 13), -17.81), (paper, -13.55), (corrected, -15.56)):
        assert log10_mean(HB, BLOCKS, rounds, periods) == pytest.approx(loss, abs=0.005)
    # the minimax rate is asymptotic: at T = 24 it loses to the exact loss (R22)
    assert best_period(HB, THREE, max_period=24) == 8
    assert best_period(HB, THREE, max_period=24, rounds=24) == 9
    assert [log10_loss(HB, THREE, 24, k) for k in (8, 9)] == pytest.approx([-2.27, -2.62], abs=0.005)
    for count, period in ((3, 16), (5, 16), (21, 8)):
        modes = np.concatenate([np.linspace(block[0], block[-1], count) for block in BLOCKS])
        assert best_period(HB, modes, max_period=120, rounds=rounds) == period


def test_smallest_factor_is_not_the_largest_rate() -> None:
    """E1 and E2: argmin |chi_K| is 5, 15, 35, 75 as its range grows; argmax r_K stays at 5."""
    for largest, period in ((10, 5), (20, 15), (40, 35), (80, 75)):
        assert best_period(HB, 0.95, max_period=largest, objective="factor") == period
        assert best_period(HB, 0.95, max_period=largest, objective="rate") == 5
        assert best_period(HB, 0.95, max_period=largest) == 5


def test_disagreement_of_factor_and_rate() -> None:
    """E1: for random oscillating modes the two differ in about 33, 60 and 89 % of cases for ranges 11, 20 and 60."""
    rng = np.random.default_rng(1)
    rules, sigma = [], []
    while len(rules) < 600:
        rule, share = OuterRule(rng.uniform(0.1, 1.5), rng.uniform(0.3, 0.99), False, "ema"), rng.uniform(0.02, 1)
        low, high = oscillatory_interval(rule)
        if low < share < high:
            rules.append(rule)
            sigma.append([share])
    for largest, share in ((11, 0.33), (20, 0.60), (60, 0.89)):
        chosen = [
            best_period(rules, sigma, max_period=largest, objective=objective) for objective in ("factor", "rate")
        ]
        assert np.mean(chosen[0] != chosen[1]) == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize(
    ("form", "nesterov", "shares"),
    [
        ("ema", False, (0.66, 0.79, 0.70)),
        ("ema", True, (0.59, 0.65, 0.60)),
        ("sum", False, (0.75, 0.93, 0.75)),
        ("sum", True, (0.68, 0.71, 0.67)),
    ],
)
def test_anchor_grid(form: Form, nesterov: bool, shares: tuple[float, ...]) -> None:
    """A5: share of a grid of rules below a loss of 1e-6 (six modes, T 60): none, best K <= 20 or none, K = 3."""
    top = (0.1, 4) if form == "ema" else (0.05, 2)
    rules = rule_grid(np.linspace(*top, 27), np.linspace(0, 0.99, 34)[:, None], nesterov, form)
    losses = log_final_loss(rules, SIX, 60, [*range(1, 21), 60]) / LOG_10
    chosen = best_period(rules, SIX, max_period=20, rounds=60)
    best = np.take_along_axis(losses, np.where(chosen == 60, 20, chosen - 1)[None], axis=0)[0]
    np.testing.assert_allclose(best, losses.min(axis=0), rtol=1e-9)
    found = [np.mean(values <= -6) for values in (losses[20], best, losses[2])]
    assert found == pytest.approx(shares, abs=0.006)


def test_table_and_search_use_the_same_factors() -> None:
    """The choice by rate is the argmax of the table's rates, for many modes at once."""
    sigma = np.linspace(0.05, 1, 400)
    table = -restart_table(HB, sigma, 60)[1] / np.arange(1, 61)[:, None]
    chosen = best_period(HB, sigma[:, None], max_period=60)
    np.testing.assert_array_equal(table[chosen - 1, np.arange(400)], table.max(axis=0))
