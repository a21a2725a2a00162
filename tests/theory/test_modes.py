"""`theory.modes` against loops, exact fractions and mpmath: progress, regimes, intervals, rates, phases, envelopes."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import oracle
from amount import amount
from oracle import HB, columns
from twophase.rule import OuterRule
from twophase.theory.contraction import restart_table
from twophase.theory.inputs import rule_grid
from twophase.theory.modes import (
    REGIMES,
    asymptotic_rate,
    effective_progress,
    effective_step,
    envelope,
    oscillatory_interval,
    phase,
    phase_shift,
    regime,
    scheduled_progress,
    stable_limit,
    transition,
)

EXACT = 1e-12  # required relative accuracy of rates and angles
SMALLEST = 2.3e-308  # below this doubles have fewer digits
BY_NAME: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (effective_step, transition, regime, asymptotic_rate, phase, phase_shift)},
    "envelope": lambda rule, sigma: envelope(rule, sigma, 3),
}

each_set = pytest.mark.parametrize("name", oracle.DRAWS)


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers spread evenly in their logarithm."""
    return st.floats(low, high).map(lambda exponent: min(10.0**exponent, 10.0**high))


def rules(lr: st.SearchStrategy[float] | None = None) -> st.SearchStrategy[OuterRule]:
    """Rules of both kinds and forms, momentum 0 and next to 1 among them."""
    momentum = st.one_of(st.just(0.0), st.floats(1e-20, 0.999), st.integers(2, 53).map(lambda k: 1 - 2.0**-k))
    return st.builds(
        OuterRule, powers(-3, 1) if lr is None else lr, momentum, st.booleans(), st.sampled_from(["ema", "sum"])
    )


SIGMAS = st.one_of(st.floats(0, 1).map(lambda x: x if x > 1e-280 else 0.0), powers(-280, 0))
ANY_RULE = rules(st.one_of(powers(-20, 20), powers(-300, 90)))


def error(value: float, exact: Any) -> float:
    """Relative error; 0 if equal, and where both are so small that doubles have fewer digits."""
    if value == exact or (abs(exact) < SMALLEST and abs(value - float(exact)) <= 1e-323):
        return 0
    if exact == 0 or not math.isfinite(value):
        return math.inf
    with mpmath.workdps(60):
        return float(abs((mpmath.mpf(float(value)) - exact) / exact))


# --- effective progress ---------------------------------------------------------------------------------------------


@given(powers(-300, 3), st.floats(0, 1), st.integers(1, 40))
def test_progress_is_that_of_the_inner_loop(eigenvalue: float, product: float, steps: int):
    """R1: what an explicit loop of gradient descent removes, to the last digits, for the tiniest eigenvalues too."""
    inner_lr = product / eigenvalue
    assume(product == 0 or 1e-290 < inner_lr * eigenvalue <= 1)
    with mpmath.workdps(700):
        x = mpmath.mpf(1)
        for _ in range(steps):
            x -= mpmath.mpf(inner_lr) * mpmath.mpf(eigenvalue) * x
        assert error(effective_progress(eigenvalue, inner_lr, steps), 1 - x) < 1e-15


def test_progress_at_the_ends_and_of_arrays():
    """A flat mode does not move, `inner_lr * eigenvalue = 1` removes a mode at once; all three arguments broadcast."""
    assert effective_progress(4.0, 0.25, 7) == 1
    assert effective_progress(3.0, 0.0, 7) == 0
    assert math.copysign(1, effective_progress(0.0, 0.25, 7)) == 1
    assert effective_progress([[0.1], [0.5]], 1.0, [1, 2.0, 5])[1].tolist() == [0.5, 0.75, 1 - 2.0**-5]
    assert isinstance(effective_progress(0.1, 1.0, 3), np.float64)


@given(
    st.lists(powers(-4, 0), min_size=1, max_size=12),
    powers(-12, 0).map(lambda share: min(share, 1.0)),
    st.sampled_from([0.0, 1e-3, 0.1]),
)
def test_scheduled_progress_is_that_of_the_inner_loop(lrs: list[float], eigenvalue: float, decay: float):
    """One inner step after the other, with its own learning rate and decay, leaves 1 - sigma; exact in fractions."""
    lrs = [min(lr, 1 / (eigenvalue + decay)) for lr in lrs]
    lrs = [lr if lr * (eigenvalue + decay) <= 1 else math.nextafter(lr, 0) for lr in lrs]
    x = math.prod(1 - Fraction(lr) * Fraction(eigenvalue + decay) for lr in lrs)
    sigma = float(scheduled_progress(eigenvalue, lrs, weight_decay=decay))
    # Where a step nearly reaches the minimum, its product's rounding is all that remains of 1 - sigma.
    assert sigma == pytest.approx(float(1 - x), rel=1e-14, abs=0)
    constant = scheduled_progress([eigenvalue, 0.0], np.full(len(lrs), lrs[0]))
    assert constant == pytest.approx(effective_progress([eigenvalue, 0.0], lrs[0], len(lrs)), rel=1e-13)


def test_scheduled_progress_where_a_step_passes_the_minimum():
    """Clipped, a mode that is too steep for any step counts as removed, whatever the others do."""
    assert scheduled_progress([1.0, 3.0, 1e300], [0.1, 0.5, 1.0], clip=True).tolist() == [1, 1, 1]
    assert scheduled_progress(3.0, [0.1, 0.2], clip=True) == pytest.approx(1 - 0.7 * 0.4)
    assert scheduled_progress(0.5, [0.0, 0.0]) == 0


# --- one round ------------------------------------------------------------------------------------------------------


@given(ANY_RULE, SIGMAS)
def test_effective_step(rule: OuterRule, sigma: float):
    """R2, R3: s = lr sigma (sum form), lr (1 - b) sigma (EMA form), to the last digit, however small."""
    assert error(effective_step(rule, sigma), oracle.step(rule, sigma)) < 1e-15
    assert effective_step(OuterRule(1.0, 0.5), sigma) == sigma


@given(ANY_RULE, SIGMAS)
def test_transition_is_the_literal_update(rule: OuterRule, sigma: float):
    """R2, R3: the columns of T are the update of the rule's own form, applied to (1, 0) and to (0, 1)."""
    t = transition(rule, sigma)
    with mpmath.workdps(700):
        exact = oracle.matrix(rule, sigma)
        for i, j in np.ndindex(2, 2):
            scale = max(1, abs(exact[i, j])) if i == j else abs(exact[i, j])
            assert abs(t[i, j] - exact[i, j]) <= max(1e-15 * scale, 1e-323)


@given(rules(), SIGMAS)
def test_the_forms_are_one_matrix_in_two_units(rule: OuterRule, sigma: float):
    """R3: with m_ema = (1 - b) m_sum the two forms' matrices are the same, hence first entry, trace and determinant."""
    ema, total = transition(rule.to("ema"), sigma), transition(rule.to("sum"), sigma)
    weight = 1 - rule.momentum
    assert ema[0, 0] == pytest.approx(total[0, 0], abs=1e-14 * (1 + abs(total[0, 0])))
    assert ema[1, 1] == total[1, 1]
    assert ema[0, 1] * weight == pytest.approx(total[0, 1], rel=1e-14)
    assert ema[1, 0] == pytest.approx(total[1, 0] * weight, rel=1e-14, abs=1e-323)


# --- regimes and intervals of sigma ---------------------------------------------------------------------------------


@each_set
def test_regime_of_delicate_modes(name: str):
    """R6 to R12: the name that exact fractions give: to 1e-17 from an edge, slow, fast and nearly undamped."""
    drawn = oracle.points(name, amount(100, 300))
    assert regime(*columns(drawn)).tolist() == [oracle.regime(*point) for point in drawn]


@given(st.integers(1, 25), st.integers(0, 2**25), st.booleans(), st.integers(0, 4))
def test_exactly_critical(bits: int, numerator: int, upper: bool, shift: int):
    """R8: at b = q^2, s = (1 - q)^2 or (1 + q)^2 a mode is critical; one double to a side it is not."""
    q = (numerator % 2**bits) / 2**bits
    assume(q > 0)
    step, sigma = (1 + q) ** 2 if upper else (1 - q) ** 2, 2.0**-shift
    lr = step / sigma
    names = [str(regime(OuterRule(x, q * q), sigma)) for x in (np.nextafter(lr, 0), lr, np.nextafter(lr, math.inf))]
    assert names == (["oscillatory", "critical", "real_above"] if upper else ["real_below", "critical", "oscillatory"])


@pytest.mark.parametrize(
    ("rule", "sigma", "name"),
    [
        (OuterRule(0.25, 0.25), 1.0, "critical"),
        (OuterRule(2.25, 0.25), 1.0, "critical"),
        *((rule, 1.0, "nilpotent") for rule in oracle.NILPOTENT),  # R9
        (OuterRule(1.0, 0.0), 1.0, "nilpotent"),
        (OuterRule(1.0, 0.9, True), 1 - 2.0**-53, "oscillatory"),
        (OuterRule(1 + 2.0**-52, 0.9, True), 1.0, "negative_determinant"),
        (OuterRule(1.2, 5e-324, True), 1.0, "negative_determinant"),
        (OuterRule(1.5, 0.0, True), 1.0, "real_above"),
        (OuterRule(3.9, 0.5), 1.0, "real_above"),
        (HB, 0.02, "real_below"),
        (HB, 0.03, "oscillatory"),
        (OuterRule(1.0, 1 - 2.0**-53), 0.0, "real_below"),
    ],
)
def test_regime_by_hand(rule: OuterRule, sigma: float, name: str):
    """Modes whose regime a pencil decides, those at exact edges and the nilpotent ones of R9 among them."""
    assert regime(rule, sigma) == name
    assert name in REGIMES


@given(rules(powers(-3, 3)))
def test_ends_of_the_intervals(rule: OuterRule):
    """R6: the oscillatory interval's ends and the stability limit, to the last digits."""
    unit = oracle.step(rule, 1.0)
    ends = [*oscillatory_interval(rule), stable_limit(rule)]
    with mpmath.workdps(50):
        for name, end in zip(["lower", "upper" if rule.momentum else "lower", "stable"], ends, strict=True):
            assert error(end, oracle.edge(name, rule.momentum, rule.nesterov) / unit) < 2e-15


@pytest.mark.parametrize("lr", [0.0, 1e-300, 1e-308, 1e-310, 5e-324])
def test_intervals_of_tiny_rates(lr: float):
    """A tiny lr moves the ends up, to infinity where doubles end, without a warning."""
    for momentum, form in itertools.product([0.0, 0.5, 1 - 2.0**-53], ["ema", "sum"]):
        rule = OuterRule(lr, momentum, False, form)  # type: ignore[arg-type]
        ends = [*oscillatory_interval(rule), stable_limit(rule)]
        for name, end in zip(["lower", "upper" if momentum else "lower", "stable"], ends, strict=True):
            exact = oracle.edge(name, momentum, False) / oracle.step(rule, 1.0) if lr else mpmath.inf
            assert end == math.inf if exact > sys.float_info.max else error(end, exact) < EXACT


# --- rates, phases, envelopes ---------------------------------------------------------------------------------------


@each_set
def test_asymptotic_rate(name: str):
    """R7 to R12: -log of the spectral radius to 1e-12 relative, also as a difference of nearly equal numbers."""
    drawn = oracle.points(name, amount(60, 300))
    for point, rate in zip(drawn, asymptotic_rate(*columns(drawn)), strict=True):
        assert error(rate, oracle.rate(*point)) < EXACT, point


@each_set
def test_phase_shift_and_envelope(name: str):
    """R7, R15: both angles to 1e-12 relative where a mode oscillates, sqrt(1+C^2) rho^t at any t; nan elsewhere."""
    drawn, times = oracle.points(name, amount(60, 300)), [0.0, 1.0, 2.5, 40.0]
    rule, sigma = columns(drawn)
    values = phase(rule, sigma), phase_shift(rule, sigma), envelope(rule[:, None], sigma[:, None], times)
    for point, angle, shift, sizes in zip(drawn, *values, strict=True):
        if oracle.regime(*point) != "oscillatory":
            assert np.isnan([angle, shift, *sizes]).all(), point
            continue
        exact_angle, exact_shift, amplitude, log_rho = oracle.oscillation(*point)
        assert error(angle, exact_angle) < EXACT, point
        assert error(shift, exact_shift) < EXACT, point
        for time, size in zip(times, sizes, strict=True):
            exact = amplitude * mpmath.exp(log_rho * time)
            assert error(size, exact) < EXACT * (1 + abs(float(log_rho)) * time) or exact < SMALLEST, point


@pytest.mark.slow
def test_the_envelope_bounds_and_is_attained():
    """R15: no |chi_K| exceeds it, and where K phase - theta comes next to a multiple of pi it is reached."""
    rng, periods, closest = np.random.default_rng(0), np.arange(1, 201), []
    for _ in range(60):
        rule = OuterRule(rng.uniform(0.1, 3), rng.uniform(0.3, 0.99), bool(rng.integers(2)), "ema")
        sigma = rng.uniform(0.1, 1)
        if regime(rule, sigma) == "oscillatory":
            log = restart_table(rule, sigma, 200)[1]
            room = np.log(envelope(rule, sigma, 0)) - periods * asymptotic_rate(rule, sigma) - log
            assert room.min() > -1e-12 * 200
            closest.append(room.min())
            turn = periods * phase(rule, sigma) - phase_shift(rule, sigma)
            assert np.exp(-room) == pytest.approx(np.abs(np.cos(turn)), abs=1e-11)
    assert len(closest) > 30
    assert np.median(closest) < 1e-3


@pytest.mark.parametrize("name", BY_NAME)
def test_arrays_are_elementwise(name: str):
    """Rules and sigma broadcast, also object arrays of shape (3, 1), views with strides and lists; scalars stay so."""
    call, tail = BY_NAME[name], (2, 2) if name == "transition" else ()
    grid = rule_grid([[0.5], [1.0], [2.0]], 0.9, [[False], [True], [False]], "ema")
    sigma = np.linspace(0, 1, 14)[::-2]
    result = call(grid, sigma)
    assert result.shape == (3, 7, *tail)
    same = np.testing.assert_array_equal if name == "regime" else partial(np.testing.assert_allclose, rtol=1e-14)
    for i, j in np.ndindex(3, 7):
        same(result[i, j], call(grid[i, 0], sigma[j]))
    same(result, call([[rule] for rule in grid[:, 0]], sigma.tolist()))
    same(call(grid.T, sigma[:, None]), np.moveaxis(result, 0, 1))
    if name != "transition":
        assert isinstance(call(HB, np.array(0.5)), np.generic)
    assert call(HB, np.empty((0, 3))).shape == (0, 3, *tail)
    assert call(grid[:1], []).shape == (1, 0, *tail)
