"""`theory.contraction` against 50 digits: restart factors of one period and of all, rates, and the two theorems.

What is required of log|chi|, and nowhere loosened: relative error at most 1e-12; next to a zero of chi (log|chi| more
than 3 below the log of the mode's envelope) instead an error of chi of at most 1e-12 of the envelope. A single period
keeps 1e-13 of the logarithm even there. Where log|chi| itself is below 2.3e-308, a double has fewer digits.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from typing import Any, Literal

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

import oracle
from amount import amount
from oracle import HB, NAG, columns
from twophase.rule import OuterRule
from twophase.theory.contraction import log_restart_factor, restart_factor, restart_rate, restart_table
from twophase.theory.inputs import rule_grid
from twophase.theory.modes import asymptotic_rate, regime

REQUIRED = 1e-12
SHARP = 1e-13  # what log_restart_factor keeps, next to zeros too
SMALLEST = 2.3e-308  # below this doubles have fewer digits
NEAR_ZERO = 3  # log of envelope over |chi| from which the error counts relative to the envelope
Case = tuple[OuterRule, float, int]
factor = functools.lru_cache(maxsize=20_000)(oracle.log_factor)


class Exact:
    """One restart factor to 50 digits, and how wrong another is."""

    def __init__(self, rule: OuterRule, sigma: float, period: int) -> None:
        self.case = rule, sigma, period
        self.sign, self.log = factor(rule, sigma, period)

    def error(self, sign: int, log: float) -> float:
        """Relative error of the logarithm; 0 if equal, or as far as doubles have digits; inf if the sign is wrong."""
        if self.sign == 0 or sign == 0 or not math.isfinite(log):
            return 0 if self.sign == sign == 0 and log == -math.inf else math.inf
        if abs(self.log) < SMALLEST:
            return 0 if sign == self.sign and abs(log - float(self.log)) <= 1e-323 else math.inf
        with mpmath.workdps(60):
            return float(abs((mpmath.mpf(log) - self.log) / self.log)) if sign == self.sign else math.inf

    def error_required(self, sign: int, log: float) -> float:
        """The same, but next to a zero the error of chi relative to the envelope."""
        error = self.error(sign, log)
        if error > REQUIRED and log < math.inf:
            with mpmath.workdps(60):
                envelope = oracle.log_envelope(*self.case)
                if self.sign == 0 or self.log < envelope - NEAR_ZERO:
                    value = sign * mpmath.exp(mpmath.mpf(log) - envelope) if sign else 0
                    return float(abs(value - (self.sign * mpmath.exp(self.log - envelope) if self.sign else 0)))
        return error


def assert_sharp(cases: list[Case]) -> None:
    """One period keeps 1e-13 of the logarithm."""
    for case, sign, log in zip(cases, *log_restart_factor(*columns(cases)), strict=True):
        assert Exact(*case).error(int(sign), float(log)) <= SHARP, case


def assert_table(rule: OuterRule, sigma: float, rounds: int, periods: Any) -> None:
    """A table keeps what is required in these periods."""
    signs, logs = restart_table(rule, sigma, rounds)
    assert signs.shape == logs.shape == (rounds,)
    for period in {int(period) for period in periods if 1 <= period <= rounds}:
        exact = Exact(rule, sigma, period)
        assert exact.error_required(int(signs[period - 1]), float(logs[period - 1])) <= REQUIRED, exact.case


@functools.cache
def meeting(target: int, count: int) -> list[Case]:
    """Modes whose chi_K is, but for the rounding of lr and sigma, 0 or 1 or -1."""
    rng, cases = random.Random(target), []
    while len(cases) < count:
        b, nesterov = rng.choice([rng.uniform(0.05, 0.99), 1 - 10 ** -rng.uniform(1, 6)]), rng.random() < 0.5
        period = int(10 ** rng.uniform(0.31, 2))

        def distance(step: Any, b: float = b, nesterov: bool = nesterov, period: int = period) -> Any:
            return restart_factor(rule_grid(step, b, nesterov), 1.0, period) - target

        low, high = (float(oracle.edge(name, b, nesterov)) for name in ("lower", "upper"))
        grid = low + (high - low) * (np.arange(1, 24) / 24) ** 2
        values = distance(grid)
        for i in np.flatnonzero(values[:-1] * values[1:] < 0)[:3]:
            step: Any = brentq(distance, grid[i], grid[i + 1], xtol=1e-15)
            rule, sigma = oracle.at(mpmath.mpf(step), b, nesterov, rng.choice(["sum", "ema"]), rng.uniform(0.1, 1))
            closest = float(step / oracle.step(rule, 1.0))  # a sigma for the rounded lr, or a neighbour
            cases.append((rule, min(1.0, rng.choice([sigma, closest, math.nextafter(closest, 0)])), period))
    return cases[:count]


def lasting(name: str, low: float, high: float, count: int) -> Callable[[], list[Case]]:
    """Points of one kind, with periods from 10^low to 10^high."""

    @functools.cache
    def draw() -> list[Case]:
        rng = random.Random(f"{name} {low} {high}")
        return [(*point, int(10 ** rng.uniform(low, high))) for point in oracle.points(name, amount(count, 100))]

    return draw


SETS: dict[str, Callable[[], list[Case]]] = {
    **{name: lasting(name, 0, 2.5, 12) for name in oracle.DRAWS},
    **{f"{name}, to 1e4": lasting(name, 2.5, 4, 4) for name in oracle.DRAWS},
    "next to zeros": lambda: meeting(0, amount(15, 100)),
    "|chi| next to 1": lambda: meeting(1, amount(10, 60)) + meeting(-1, amount(10, 60)),
}


def rules() -> st.SearchStrategy[OuterRule]:
    """Rules of both kinds and forms, momentum 0 and next to 1 among them."""
    # Below 1e-10 it is left to the sets: with lr sigma = 2 Nesterov's chi is then 1 to 2 b^2, nothing to 32 digits.
    momentum = st.one_of(
        st.floats(1e-9, 0.999), st.integers(2, 53).map(lambda k: 1 - 2.0**-k), st.sampled_from([0.0, 0.25, 0.5])
    )
    lr = st.one_of(st.floats(-3, 1.5).map(lambda x: 10.0**x), st.sampled_from([0.25, 0.5, 1.0, 2.0, 2.25, 4.0]))
    return st.builds(OuterRule, lr, momentum, st.booleans(), st.sampled_from(["ema", "sum"]))


SIGMAS = st.one_of(
    st.floats(0, 1).map(lambda x: x if x > 1e-280 else 0.0),
    st.floats(-280, 0).map(lambda x: 10.0**x),
    st.sampled_from([0.0, 0.25, 1.0, 1 - 2.0**-53]),
)
PERIODS = st.one_of(st.integers(0, 100), st.floats(0, 6).map(lambda x: int(10**x)))


# --- one period, all periods, rates: against 50 digits ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_restart_factors(name: str):
    """One period keeps 1e-13 of log|chi|; a table what is required of it, in its last entry and on the way there."""
    cases = SETS[name]()
    assert_sharp(cases)
    for rule, sigma, last in cases:
        assert_table(rule, sigma, last, {last, 1 + last // 3})


@pytest.mark.parametrize("name", oracle.DRAWS)
def test_long_periods(name: str):
    """One period of up to 1e6 rounds: relative error of log|chi| at most 1e-13, also where chi underflows by far."""
    assert_sharp(lasting(name, 4, 6, 12)())


def test_long_periods_of_nearly_nilpotent_modes():
    """The same where a round leaves 1e-8 of a mode (s a double or two from 1, R9), or 1 - s is the momentum itself."""
    gaps = itertools.product([-(2.0**-52), -(2.0**-53), 2.0**-52], np.linspace(0.05, 0.999, 8))
    nearly = [OuterRule(1 + gap, float(momentum), True) for gap, momentum in gaps]
    assert_sharp([(rule, 1.0, period) for rule in nearly for period in (10**5, 10**6 - 1)])
    for momentum, period in itertools.product([1e-12, 1e-17, 1e-20], (1, 2, 3, 64, 1000, 10**6)):
        rule = OuterRule(1.0, momentum, True, "ema")
        sign, log = log_restart_factor(rule, 1.0, period)
        assert Exact(rule, 1.0, period).error_required(int(sign), float(log)) <= REQUIRED, period


@pytest.mark.slow
@given(rules(), SIGMAS, PERIODS)
@settings(max_examples=amount(60, 2000))
def test_any_factor(rule: OuterRule, sigma: float, period: int):
    """Sign and log|chi| of one period for any rule, sigma and period up to 1e6; factor and rate follow from them."""
    sign, log = log_restart_factor(rule, sigma, period)
    assert Exact(rule, sigma, period).error_required(int(sign), float(log)) <= REQUIRED
    with np.errstate(over="ignore"):
        assert restart_factor(rule, sigma, period) == sign * np.exp(log)
    if period:
        assert restart_rate(rule, sigma, period) == -log / period


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [(HB, 0.95), (OuterRule(1.0, 1 - 1e-9, False, "ema"), 1e-7), (OuterRule(0.3, 0.99, True, "ema"), 1e-30)],
    ids=lambda point: point[0].describe(),
)
def test_a_table_of_a_million_rounds(point: oracle.Point):
    """A table of one mode over 1e6 rounds, at 30 entries from the first to the last, next to stretch ends too."""
    places = {*np.geomspace(1, 10**6, 24).astype(int), 63, 64, 65, 64 * 4096, 64 * 4096 + 1, 10**6 - 1}
    assert_table(*point, 10**6, places)


def test_an_underflowed_factor_keeps_its_logarithm():
    """F3's number: log chi_8000 = -421.58 (heavy ball, b .9, lr 1, sigma .95), and far beyond where chi is 0."""
    assert log_restart_factor(HB, 0.95, 8000) == (1, pytest.approx(-421.58, abs=5e-3))
    assert restart_factor(HB, 0.95, 8000) > 0
    assert log_restart_factor(HB, 0.95, 10**6)[1] < -50_000
    assert restart_factor(HB, 0.95, 10**6) == 0
    assert log_restart_factor(OuterRule(1e90, 0.9), 1.0, 10**6)[1] > 1e8
    assert restart_factor(OuterRule(1e90, 0.9), 1.0, 10) == math.inf


# --- exact values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [HB, NAG, OuterRule(0.0, 0.9), OuterRule(1.0, 0.0), OuterRule(9.0, 1 - 2.0**-53, True)]
)
def test_what_stands_still_or_has_not_begun(rule: OuterRule):
    """At sigma 0, at lr 0 and for K = 0 (F3), chi = 1: log and rate are 0, never -0.0, in a table too."""
    for sigma in (0.0, -0.0, 1.0 if rule.lr == 0 else 0.0):
        signs, logs = restart_table(rule, sigma, 200)
        values = [*logs, log_restart_factor(rule, sigma, 10**6)[1], restart_rate(rule, sigma, 7)]
        values.append(log_restart_factor(rule, 0.7, 0)[1])
        assert signs.tolist() == [1] * 200
        assert {(float(value), math.copysign(1, value)) for value in values} == {(0.0, 1.0)}
    assert restart_factor(rule, 0.7, 0) == 1


@pytest.mark.parametrize(
    ("rule", "sigma", "period"),
    [
        (OuterRule(2.0, 0.5, False, "ema"), 1.0, 1),
        (OuterRule(0.5, 0.5), 1.0, 2),
        (OuterRule(2.0, 0.5), 1.0, 2),
        (OuterRule(1.0, 0.0), 1.0, 5),
        (OuterRule(4.0, 0.0, True, "ema"), 0.25, 1),
        *[(rule, 1.0, period) for rule in oracle.NILPOTENT for period in (2, 3, 1000, 10**6)],
    ],
)
def test_exact_zeros(rule: OuterRule, sigma: float, period: int):
    """F3, R9, R12: an exact zero is sign 0, log -inf, rate +inf, factor 0, in both ways, without a warning."""
    assert log_restart_factor(rule, sigma, period) == (0, -math.inf)
    assert restart_rate(rule, sigma, period) == math.inf
    assert restart_factor(rule, sigma, period) == 0
    if period <= 1000:
        signs, logs = restart_table(rule, sigma, period)
        assert (signs[-1], logs[-1]) == (0, -math.inf)


@pytest.mark.parametrize(("momentum", "first"), [(0.75, 3), (0.5, 2)])
def test_zeros_of_a_turn_that_divides_the_circle(momentum: float, first: int):
    """R7 at lr sigma = 1 (EMA), phi = pi/6 or pi/4: 0 every 6th or 4th K, exactly while T^K has digits."""
    rule = OuterRule(1.0, momentum, False, "ema")
    periods = np.arange(first, 1000, 2 * first)
    signs, logs = restart_table(rule, 1.0, 1000)
    for sign, log in [(signs[periods - 1], logs[periods - 1]), log_restart_factor(rule, 1.0, periods)]:
        assert not sign[periods < 100].any()
        assert np.all(log[periods < 100] == -np.inf)
        assert np.all(log < periods * math.log(momentum) / 2 - 69)


@pytest.mark.parametrize("rule", oracle.NILPOTENT)
def test_nilpotent(rule: OuterRule):
    """R9: T^2 = 0, so chi_1 = -b and nothing is left from the second round on."""
    signs, logs = restart_table(rule, 1.0, 70)
    assert signs.tolist() == [-1] + [0] * 69
    assert logs[0] == pytest.approx(math.log(rule.momentum), rel=REQUIRED)
    assert np.all(logs[1:] == -np.inf)


@pytest.mark.parametrize(
    ("rule", "factors"),
    [
        (HB, [0.905, 0.73352, 0.50951, 0.25950, 0.0098321, -0.21580, -0.39837]),
        (NAG, [0.8195, 0.59463, 0.35498, 0.12607, -0.07236]),
    ],
)
def test_anchors(rule: OuterRule, factors: list[float]):
    """A0: chi_1 ... of the mode s = .095 at b .9 to the digits printed, both ways; r_5 = .92442."""
    periods = np.arange(1, len(factors) + 1)
    signs, logs = restart_table(rule, 0.95, len(factors))
    for values in (signs * np.exp(logs), restart_factor(rule, 0.95, periods)):
        assert values == pytest.approx(factors, abs=6e-6)
    assert restart_factor(HB, 0.95, 5) == pytest.approx(0.0098321, abs=6e-8)
    assert restart_rate(HB, 0.95, 5) == pytest.approx(0.92442, abs=5e-6)


# --- formulas of the note ---------------------------------------------------------------------------------------------


def note(rule: OuterRule, sigma: float) -> tuple[Any, Any, Any, Any]:
    """R6's a, trace and determinant in closed form, and b, at the working precision."""
    b, s = mpmath.mpf(rule.momentum), oracle.step(rule, sigma)
    if rule.nesterov:
        return 1 - (1 + b) * s, (1 + b) * (1 - s), b * (1 - s), b
    return 1 - s, 1 + b - s, b, b


def formula(rule: OuterRule, sigma: float, period: int) -> Any:
    """R7, R10, R11 and R12, each as the note writes it."""
    a, trace, determinant, b = note(rule, sigma)
    if determinant == 0:  # R12
        return a * trace ** (period - 1) if period else mpmath.mpf(1)
    rho = mpmath.sqrt(abs(determinant))
    if oracle.regime(rule, sigma) == "oscillatory":  # R7
        angle = mpmath.acos(trace / (2 * rho))
        c = (a - b) / (2 * rho * mpmath.sin(angle))
        return rho**period * (mpmath.cos(period * angle) + c * mpmath.sin(period * angle))
    if determinant > 0:  # R10
        sign, psi = mpmath.sign(trace), mpmath.acosh(abs(trace) / (2 * rho))
        c = sign * (a - b) / (2 * rho * mpmath.sinh(psi))
        return (sign * rho) ** period * (mpmath.cosh(period * psi) + c * mpmath.sinh(period * psi))
    psi = mpmath.asinh(trace / (2 * rho))  # R11
    c = (a - b) / (2 * rho * mpmath.cosh(psi))
    even, odd = mpmath.cosh(period * psi), mpmath.sinh(period * psi)
    return rho**period * ((even + c * odd) if period % 2 == 0 else (odd + c * even))


FORMULA_CASES: dict[str, tuple[str, Callable[[random.Random], oracle.Point]]] = {
    "R7": (
        "oscillatory",
        lambda rng: oracle.at(rng.uniform(0.2, 0.9), rng.uniform(0.5, 0.99), rng.random() < 0.5, "sum", 1.0),
    ),
    "R10 below": (
        "real_below",
        lambda rng: oracle.at(rng.uniform(0.001, 0.02), rng.uniform(0.2, 0.7), rng.random() < 0.5, "ema", 0.7),
    ),
    "R10 above": ("real_above", lambda rng: oracle.at(rng.uniform(3.2, 5), rng.uniform(0.05, 0.5), False, "sum", 0.9)),
    "R11": (
        "negative_determinant",
        lambda rng: oracle.at(rng.uniform(1.05, 2), rng.uniform(0.05, 0.99), True, "ema", 0.5),
    ),
    "R12": ("real_", lambda rng: oracle.at(rng.uniform(0.1, 3), 0.0, rng.random() < 0.5, "sum", 0.8)),
}


@pytest.mark.parametrize("name", FORMULA_CASES)
def test_the_notes_formula_of_each_regime(name: str):
    """R7, R10, R11, R12: the formula equals T^K to 40 digits, and both functions equal it, away from the edges."""
    rng, (kind, draw) = random.Random(name), FORMULA_CASES[name]
    for _ in range(25):
        point, period = draw(rng), rng.randrange(0, 60)
        assert str(regime(*point)).startswith(kind)
        with mpmath.workdps(oracle.digits_for(*point)):
            exact, value = oracle.factor(*point, period), formula(*point, period)
            size = mpmath.exp(oracle.log_envelope(*point, period))
            assert abs(value - exact) <= mpmath.mpf(10) ** -40 * max(size, abs(exact))
            sign, log = log_restart_factor(*point, period)
            assert sign == mpmath.sign(value)
            if value != 0:
                assert abs(mpmath.mpf(float(log)) - mpmath.log(abs(value))) <= SHARP * max(abs(float(log)), SHARP)


@pytest.mark.slow
@given(
    st.integers(1, 25).flatmap(lambda bits: st.integers(1, 2**bits - 1).map(lambda n: n / 2**bits)),
    st.booleans(),
    st.one_of(st.integers(1, 60), st.integers(1, 10**6)),
)
def test_explicit_formulas_at_critical_damping(q: float, upper: bool, period: int):
    """R8: at b = q^2 and s = (1 -+ q)^2 chi_K is q^K (1 + K(1-q)) below and (-q)^K (1 + K(1+q)) above, at any K."""
    rule = OuterRule((1 + q) ** 2 if upper else (1 - q) ** 2, q * q)
    assert regime(rule, 1.0) == "critical"
    sign, log = log_restart_factor(rule, 1.0, period)
    with mpmath.workdps(60):
        exact = period * mpmath.log(mpmath.mpf(q)) + mpmath.log(1 + period * (1 + mpmath.mpf(q if upper else -q)))
        assert abs(mpmath.mpf(float(log)) - exact) <= SHARP * max(abs(exact), 1e-15)
    assert sign == (-1 if upper and period % 2 else 1)
    for b in (0.25, 0.9, 0.99):  # Nesterov's lower edge, to the rounding of lr that keeps it from the edge
        point = oracle.at(oracle.edge("lower", b, True), b, True, "sum", 1.0)
        for rounds in (1, 7, 30):
            exact = (2 * b / (1 + b)) ** rounds * (1 + rounds * (1 - b) / 2)
            assert restart_factor(*point, rounds) == pytest.approx(exact, rel=1e-11)


@given(st.floats(0.01, 0.999), st.booleans(), st.integers(0, 200))
def test_a_pure_cosine(momentum: float, nesterov: bool, period: int):
    """R7: at lr sigma = 1 (EMA; Nesterov lr sigma (1+b) = 1) chi_K = rho^K cos(K phi), with cos phi = tr / (2 rho)."""
    rule = OuterRule(1 / (1 + momentum) if nesterov else 1.0, momentum, nesterov, "ema")
    with mpmath.workdps(50):
        _, trace, determinant, _ = note(rule, 1.0)
        rho = mpmath.sqrt(determinant)
        exact = float(rho**period * mpmath.cos(period * mpmath.acos(trace / (2 * rho))))
    assert restart_factor(rule, 1.0, period) == pytest.approx(exact, abs=float(1e-13 * rho**period + 1e-300))


@given(rules(), st.floats(1e-6, 1), st.integers(2, 60))
@settings(max_examples=amount(25, 2000))
def test_recurrence_and_powers_of_r6(rule: OuterRule, sigma: float, period: int):
    """R6: chi_K = tr chi_(K-1) - D chi_(K-2) = p_(K+1) - b p_K, in 120 digits, and the function's to rounding."""
    with mpmath.workdps(oracle.digits_for(rule, sigma)):
        a, trace, determinant, b = note(rule, sigma)
        chi, p = [mpmath.mpf(1), a], [mpmath.mpf(0), mpmath.mpf(1)]
        for _ in range(period):
            chi.append(trace * chi[-1] - determinant * chi[-2])
            p.append(trace * p[-1] - determinant * p[-2])
        exact = oracle.factors(rule, sigma, period)[-1]
        scale = mpmath.mpf(10) ** -60 * max(*map(abs, chi[: period + 1]), 1e-200)
        assert abs(chi[period] - exact) <= scale
        assert abs(p[period + 1] - b * p[period] - exact) <= scale
        sign, log = log_restart_factor(rule, sigma, period)
        value = sign * mpmath.exp(mpmath.mpf(float(log))) if sign else mpmath.mpf(0)
        size = max(abs(exact), mpmath.exp(oracle.log_envelope(rule, sigma, period)))
        assert abs(value - chi[period]) <= REQUIRED * (1 + abs(float(log)) if sign else 1) * size


@given(rules(), st.floats(0, 1))
def test_one_round_is_plain_sgd(rule: OuterRule, sigma: float):
    """R4: K = 1 is momentum-free SGD of step nu (1-b) (heavy ball), nu (1-b^2) (Nesterov)."""
    s = float(oracle.step(rule, sigma))
    exact = 1 - (1 + rule.momentum) * s if rule.nesterov else 1 - s
    assert restart_factor(rule, sigma, 1) == pytest.approx(exact, rel=1e-12, abs=1e-14 * (1 + s))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("form", ["ema", "sum"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.999, 1 - 2.0**-50])
def test_slow_modes(nesterov: bool, form: Literal["ema", "sum"], momentum: float):
    """R31: chi_K = 1 - K nu_eff sigma + O(sigma^2), nu_eff the mean over j <= K of nu (1 - b^j) (Nesterov: b^(j+1))."""
    rule = OuterRule(0.7, momentum, nesterov, form)
    for period in (1, 3, 50):
        with mpmath.workdps(60):
            b = mpmath.mpf(momentum)
            nu = mpmath.mpf(0.7) / (1 if form == "ema" else 1 - b)
            effective = nu * sum(1 - b ** (j + nesterov) for j in range(1, period + 1)) / period
            for sigma in (1e-280, 1e-100, 1e-30, 1e-16):
                rate = mpmath.mpf(float(restart_rate(rule, sigma, period)))
                assert abs(rate - effective * sigma) <= max(REQUIRED * effective * sigma, 1e-323)
            for sigma in (1e-7, 1e-5):
                removed = 1 - float(restart_factor(rule, sigma, period))
                assert removed == pytest.approx(float(period * effective * sigma), rel=5e-9 + 100 * period * sigma)


def test_numbers_of_slow_modes():
    """R31's numbers: at b .9, K 3, lr .9, nu_eff = .187 nu, and chi_3 is within .042 of plain SGD's for every sigma."""
    rule, sigma = OuterRule(0.9, 0.9, False, "ema"), np.linspace(0, 1, 401)
    assert restart_rate(rule, 1e-12, 3) / 1e-12 == pytest.approx(0.187 * 0.9, abs=5e-4)
    for period, difference in ((3, 0.042), (5, 0.209)):
        plain = (1 - restart_rate(rule, 1e-12, period) / 1e-12 * sigma) ** period
        assert np.abs(restart_factor(rule, sigma, period) - plain).max() == pytest.approx(difference, abs=1e-3)


# --- the two theorems -------------------------------------------------------------------------------------------------


def test_restarts_never_help_a_real_mode():
    """R17 (Theorem 1): with real eigenvalues r_K <= -log(spectral radius) for every K; thousands of random modes."""
    rng = np.random.default_rng(17)
    count = 4000
    momentum = np.where(rng.random(count) < 0.5, rng.uniform(0, 0.99, count), 10.0 ** -rng.uniform(0, 3, count) * 0.9)
    lr = 10.0 ** rng.uniform(-4, 1.5, count)
    rule, sigma = rule_grid(lr, momentum, rng.random(count) < 0.5), 10.0 ** rng.uniform(-3, 0, count)
    real = regime(rule, sigma) != "oscillatory"
    rule, sigma = rule[real], sigma[real]
    assert len(sigma) > 1500
    assert {"real_below", "real_above", "negative_determinant"} <= set(regime(rule, sigma))
    logs = restart_table(rule, sigma, 40)[1]
    radius = -asymptotic_rate(rule, sigma) * np.arange(1, 41)[:, None]
    assert np.all(logs - radius >= -4e-16 * np.abs(radius))
    assert np.all(restart_rate(rule, sigma, 7) <= asymptotic_rate(rule, sigma) * (1 + 1e-15 * np.sign(-radius[0])))


@pytest.mark.parametrize("name", ["lower edge", "slow, to 1e-20", "unstable", "stability edge", "nearly nilpotent"])
def test_restarts_strictly_hurt(name: str):
    """R17: strictly, if momentum and step are positive, to 50 digits; and in doubles wherever they can tell."""
    strict = 0
    for rule, sigma in oracle.points(name, amount(40, 120)):
        if oracle.regime(rule, sigma) in ("oscillatory", "nilpotent") or rule.momentum == 0:
            continue
        for period in (1, 9):
            with mpmath.workdps(oracle.digits_for(rule, sigma)):
                gap = oracle.log_factor(rule, sigma, period)[1] + period * oracle.rate(rule, sigma)
                assert gap > 0
            log, radius = log_restart_factor(rule, sigma, period)[1], -period * asymptotic_rate(rule, sigma)
            if gap > 1e-14 * (abs(log) + abs(radius)):
                assert log > radius
                strict += 1
    assert strict > 5


def test_restarts_cannot_stabilise():
    """R18 (Theorem 2): radius > 1 gives |chi_K| > 1 for every K; radius 1 gives |chi_K| >= 1, > 1 with momentum."""
    rng = np.random.default_rng(18)
    count = 3000
    momentum = np.where(rng.random(count) < 0.3, 1 - 10.0 ** -rng.uniform(1, 8, count), rng.uniform(0, 0.99, count))
    nesterov = rng.random(count) < 0.5
    limit = 2 * (1 + momentum) / np.where(nesterov, 1 + 2 * momentum, 1)
    sigma = rng.uniform(0.1, 1, count)
    rule = rule_grid(limit * (1 + 10.0 ** rng.uniform(-12, 3, count)) / sigma, momentum, nesterov)
    assert np.all(asymptotic_rate(rule, sigma) < 0)
    assert np.all(restart_table(rule, sigma, 30)[1] > 0)
    assert np.all(log_restart_factor(rule, sigma, 1000)[1] > 0)
    for b in (0.0, 0.25, 0.5, 0.75):  # heavy ball at s = 2 (1 + b)
        logs = restart_table(OuterRule(2 * (1 + b), b), 1.0, 100)[1]
        assert asymptotic_rate(OuterRule(2 * (1 + b), b), 1.0) == 0
        assert np.all(logs > 0 if b else logs == 0)


# --- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modes", "rounds"), [(1, 500), (7, 300), (8200, 66), *itertools.product([1, 33], [1, 2, 63, 64, 65, 193])]
)
def test_table_of_mixed_rules(modes: int, rounds: int):
    """Of all rules and regimes in one array each entry is that of the single period, across stretches and chunks."""
    points = [point for name in oracle.DRAWS for point in oracle.points(name, 8)]
    random.Random(rounds).shuffle(points)
    points = points[: min(modes, 100)]
    rule, sigma = columns(points)
    pick = np.random.default_rng(modes).integers(0, 100, modes) if modes > 100 else slice(None)
    signs, logs = restart_table(rule[pick], sigma[pick], rounds)
    assert signs.dtype == np.int8
    assert not np.isnan(logs).any()
    single = log_restart_factor(rule, sigma, np.arange(1, rounds + 1)[:, None])
    single_signs, single_logs = single[0][:, pick], single[1][:, pick]
    with np.errstate(invalid="ignore"):
        near = np.abs(logs - single_logs) <= np.maximum(5e-13 * np.abs(single_logs), 1e-323)
    places = np.arange(len(points))[pick]
    for k, j in np.argwhere(~((logs == single_logs) | near) | (signs != single_signs)):
        exact = Exact(*points[places[j]][:2], int(k) + 1)
        assert exact.error_required(int(signs[k, j]), float(logs[k, j])) <= REQUIRED, exact.case


@pytest.mark.parametrize("call", [log_restart_factor, restart_factor, restart_rate])
def test_broadcasting(call: Callable[..., Any]):
    """Rules (3, 1), sigma (4) with strides and periods (2, 1, 1) give (2, 3, 4), each entry that of its scalars."""
    rule = rule_grid([[0.5], [1.0], [2.0]], 0.9, [[False], [True], [False]], "ema")
    sigma, period = np.linspace(0, 1, 8)[::-2], np.array([3, 7])[:, None, None]
    result = np.asarray(call(rule, sigma, period))
    assert result.shape[-3:] == (2, 3, 4)
    for k, i, j in np.ndindex(2, 3, 4):
        single = call(rule[i, 0], float(sigma[j]), int(period[k, 0, 0]))
        assert all(isinstance(part, np.generic) for part in (single if isinstance(single, tuple) else (single,)))
        np.testing.assert_allclose(result[..., k, i, j], np.asarray(single), rtol=1e-14)
    assert np.asarray(call([HB, NAG], 0.5, 3)).shape[-1:] == (2,)
    assert np.asarray(call(HB, np.empty((3, 0)), [[[1]], [[2]]])).shape[-3:] == (2, 3, 0)


@pytest.mark.slow
@given(
    st.builds(
        OuterRule,
        st.sampled_from([0.0, 5e-324, 1e-300, 1e-20, 0.7, 1.0, 4.0, 1e30, 1e90]),
        st.sampled_from([0.0, 5e-324, 1e-160, 1e-20, 0.25, 0.5, 0.9, 1 - 2.0**-52, 1 - 2.0**-53]),
        st.booleans(),
        st.sampled_from(["ema", "sum"]),
    ),
    st.sampled_from([0.0, 5e-324, 1e-310, 1e-160, 1e-17, 0.25, 0.5, 1 - 2.0**-53, 1.0]),
    st.sampled_from([1, 2, 3, 64, 65, 1000, 10**6, 2**53 - 1]),
)
@settings(max_examples=amount(30, 2000))
def test_the_whole_domain_is_quiet(rule: OuterRule, sigma: float, period: int):
    """No corner of the domain warns, or gives nan: lr 0 to 1e90, momentum to 1 - 2^-53, denormal sigma, huge K."""
    sign, log = log_restart_factor(rule, sigma, period)
    assert (sign == 0) == (log == -math.inf)
    values = [log, restart_factor(rule, sigma, period), restart_rate(rule, sigma, period)]
    signs, logs = restart_table(rule, sigma, min(period, 130))
    assert np.array_equal(signs == 0, np.isneginf(logs))
    assert not np.isnan([*values, *logs]).any()
