"""Progress, regimes, intervals, rates, phases and envelopes against loops, exact fractions and mpmath."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import oracle
from amount import amount
from oracle import HB, columns
from twophase.rule import FORMS, Form, OuterRule
from twophase.theory import (
    asymptotic_rate,
    effective_progress,
    effective_step,
    envelope,
    oscillatory_interval,
    phase,
    phase_shift,
    regime,
    rule_grid,
    scheduled_progress,
    stable_limit,
    transition,
)

BY_NAME: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (effective_step, transition, regime, asymptotic_rate, phase, phase_shift)},
    "envelope": lambda rule, sigma: envelope(rule, sigma, 3),
}
CLEAR = 1e-13  # of tr^2 + 4 |D|: a discriminant that doubles can tell from 0

each_set = pytest.mark.parametrize("name", oracle.DRAWS)


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers spread evenly in their logarithm."""
    return st.floats(low, high).map(lambda exponent: min(10.0**exponent, 10.0**high))


MOMENTA = st.one_of(st.just(0.0), st.floats(1e-20, 0.999), st.integers(2, 53).map(lambda k: 1 - 2.0**-k))
RULES = st.builds(OuterRule, powers(-20, 20), MOMENTA, st.booleans(), st.sampled_from(FORMS))
SIGMAS = st.one_of(st.floats(0, 1).map(lambda x: x if x > 1e-200 else 0.0), powers(-200, 0))


def close(value: Any, exact: Any, relative: float = 1e-12) -> bool:
    """Whether a number is the exact one to a relative error."""
    with mpmath.workdps(60):
        return bool(value == exact or abs(mpmath.mpf(float(value)) - exact) <= relative * abs(exact))


# --- effective progress -------------------------------------------------------------------------------------------


@given(powers(-300, 3), st.floats(0, 1), st.integers(1, 40))
def test_progress_is_that_of_the_inner_loop(eigenvalue: float, product: float, steps: int) -> None:
    """R1: what an explicit loop of gradient descent removes, to the last digits, for the tiniest eigenvalues too."""
    inner_lr = product / eigenvalue
    assume(math.isfinite(inner_lr) and inner_lr * eigenvalue <= 1)
    with mpmath.workdps(700):
        x = mpmath.mpf(1)
        for _ in range(steps):
            x -= mpmath.mpf(inner_lr) * mpmath.mpf(eigenvalue) * x
        assert close(effective_progress(eigenvalue, inner_lr, steps), 1 - x, 1e-14) or 1 - x < 1e-300


def test_progress_of_arrays() -> None:
    """All three arguments broadcast; a flat mode does not move, and `inner_lr * eigenvalue = 1` removes one at once."""
    assert effective_progress([[0.0], [0.5], [1.0]], 1.0, [1, 2.0]).tolist() == [[0, 0], [0.5, 0.75], [1, 1]]


@given(
    st.lists(powers(-4, 0), min_size=1, max_size=12),
    powers(-12, 0).map(lambda share: min(share, 1.0)),
    st.sampled_from([0.0, 1e-3, 0.1]),
)
def test_scheduled_progress_is_that_of_the_inner_loop(lrs: list[float], eigenvalue: float, decay: float) -> None:
    """One inner step after the other, with its own learning rate and decay, leaves 1 - sigma; exact in fractions."""
    lrs = [min(lr, 1 / (eigenvalue + decay)) for lr in lrs]
    lrs = [lr if lr * (eigenvalue + decay) <= 1 else math.nextafter(lr, 0) for lr in lrs]
    x = math.prod(1 - Fraction(lr) * Fraction(eigenvalue + decay) for lr in lrs)
    sigma = float(scheduled_progress(eigenvalue, lrs, weight_decay=decay))
    assert sigma == pytest.approx(float(1 - x), rel=1e-14, abs=0)
    constant = scheduled_progress([eigenvalue, 0.0], np.full(len(lrs), lrs[0]))
    assert constant == pytest.approx(effective_progress([eigenvalue, 0.0], lrs[0], len(lrs)), rel=1e-13)


def test_scheduled_progress_where_a_step_passes_the_minimum() -> None:
    """Clipped, a mode that is too steep for any step counts as removed, whatever the others do."""
    assert scheduled_progress([1.0, 3.0, 1e300], [0.1, 0.5, 1.0], clip=True).tolist() == [1, 1, 1]
    assert scheduled_progress(3.0, [0.1, 0.2], clip=True) == pytest.approx(1 - 0.7 * 0.4)
    assert scheduled_progress(0.5, [0.0, 0.0]) == 0


# --- one round ----------------------------------------------------------------------------------------------------


@given(RULES, SIGMAS)
def test_transition_is_the_literal_update(rule: OuterRule, sigma: float) -> None:
    """R2, R3: the columns of T are the update of the rule's own form, applied to (1, 0) and to (0, 1); s to a digit."""
    t = transition(rule, sigma)
    with mpmath.workdps(300):
        exact = oracle.matrix(rule, sigma)
        for i, j in np.ndindex(2, 2):
            scale = max(1, abs(exact[i, j])) if i == j else abs(exact[i, j])
            assert abs(t[i, j] - exact[i, j]) <= 1e-15 * scale
    assert close(effective_step(rule, sigma), oracle.step(rule, sigma), 1e-15)


# --- regimes and intervals of sigma -------------------------------------------------------------------------------


EXACT = [
    *((rule, 1.0) for rule in (*oracle.NILPOTENT, OuterRule(1.0, 0.0), OuterRule(1.5, 0.0, True))),
    (OuterRule(1.0, 0.9, True), 1 - 2.0**-53),
    (OuterRule(1 + 2.0**-52, 0.9, True), 1.0),
    (OuterRule(1.0, 1 - 2.0**-53), 0.0),
]
"""Modes at and next to the edges, nilpotent ones among them."""


@each_set
def test_regime_of_delicate_modes(name: str) -> None:
    """R6 to R12: the name that exact fractions give, unless the discriminant is within rounding of 0 and not 0."""
    drawn, decided = [*oracle.points(name, amount(100, 300)), *EXACT], 0
    for point, found in zip(drawn, regime(*columns(drawn)).tolist(), strict=True):
        trace, determinant, disc = oracle.exact(*point)
        if abs(disc) > CLEAR * (trace**2 + 4 * abs(determinant)) or disc == 0:
            decided += 1
            assert found == oracle.regime(*point), point
    assert decided > 40


@given(st.one_of(powers(-3, 3), st.sampled_from([0.0, 1e-300, 5e-324])), MOMENTA, st.booleans(), st.sampled_from(FORMS))
def test_ends_of_the_intervals(lr: float, momentum: float, nesterov: bool, form: Form) -> None:
    """R6: the oscillatory interval's ends and the stability limit, to the last digits; infinite beyond doubles."""
    rule = OuterRule(lr, momentum, nesterov, form)
    with mpmath.workdps(50):
        unit = oracle.step(rule, 1.0)
        ends = [*oscillatory_interval(rule), stable_limit(rule)]
        for name, end in zip(["lower", "upper" if momentum else "lower", "stable"], ends, strict=True):
            exact = oracle.edge(name, momentum, nesterov) / unit if unit else mpmath.inf
            assert end == math.inf if exact > 1.79e308 else close(end, exact, 3e-15)


# --- rates, phases, envelopes -------------------------------------------------------------------------------------


@each_set
def test_rates_and_angles(name: str) -> None:
    """R7 to R12, R15: -log of the spectral radius, both angles, and sqrt(1+C^2) rho^t, as far as s determines them."""
    drawn, times = oracle.points(name, amount(60, 300)), [0.0, 1.0, 2.5, 40.0]
    rule, sigma = columns(drawn)
    found = asymptotic_rate(rule, sigma), phase(rule, sigma), phase_shift(rule, sigma)
    for index, point in enumerate(drawn):
        trace, determinant, disc = oracle.exact(*point)  # digits are lost by the distances of s from an edge and from 1
        within = 1e-15 * (1 + float(min((trace**2 + 4 * abs(determinant)) / abs(disc), 1e16))) if disc else math.inf
        if within > 1e-3:
            continue
        rate, angle, shift = (float(values[index]) for values in found)
        exact = oracle.rate(*point)
        relative = 1e-12 if 0 < exact < 1e-9 and point[0].lr < 0.5 else within  # slow modes keep their digits
        assert close(rate, exact, relative) or abs(rate - exact) <= 10 * within, point
        sizes = envelope(*point, times)
        if oracle.regime(*point) != "oscillatory":
            assert np.isnan([angle, shift, *sizes]).all(), point
            continue
        exact_angle, exact_shift, amplitude, log_rho = oracle.oscillation(*point)
        assert close(angle, exact_angle, within)
        assert abs(shift - exact_shift) <= within
        for time, size in zip(times, sizes, strict=True):
            assert close(size, amplitude * mpmath.exp(log_rho * time), within + 1e-15 * abs(log_rho) * time)


# --- arrays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_NAME)
def test_arrays_are_elementwise(name: str) -> None:
    """Rules and sigma broadcast: what `rule_grid` returns, object arrays, nested lists, views; scalars stay so."""
    call, tail = BY_NAME[name], (2, 2) if name == "transition" else ()
    grid = rule_grid([[0.5], [1.0], [2.0]], 0.9, [[False], [True], [False]], "ema")
    sigma = np.linspace(0, 1, 14)[::-2]
    result = call(grid, sigma)
    assert result.shape == (3, 7, *tail)
    for i, j in np.ndindex(3, 7):
        np.testing.assert_array_equal(result[i, j], call(grid[i, 0], sigma[j]))
    np.testing.assert_array_equal(result, call([[rule] for rule in grid[:, 0]], sigma.tolist()))
    np.testing.assert_array_equal(result, call(np.array([[rule] for rule in grid[:, 0]], object), sigma))
    if name != "transition":
        assert isinstance(call(HB, np.array(0.5)), np.generic)
    assert call(HB, np.empty((0, 3))).shape == (0, 3, *tail)
    assert call(grid[:1], []).shape == (1, 0, *tail)


def test_rule_grid() -> None:
    """It holds the rules that `OuterRule` makes of each entry, and gives them back by index, length and iteration."""
    grid = rule_grid([[0.5], [0.7]], [0.0, 0.9, 0.99], [[True], [False]], "ema")
    assert grid.shape == (2, 3)
    for i, j in itertools.product(range(2), range(3)):
        assert grid[i, j] == OuterRule([0.5, 0.7][i], [0.0, 0.9, 0.99][j], i == 0, "ema")
    assert [len(grid), list(grid[1])] == [2, [grid[1, 0], grid[1, 1], grid[1, 2]]]
    assert grid[:, grid.momentum[0] > 0.5].shape == (2, 2)
