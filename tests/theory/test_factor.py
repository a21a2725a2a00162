"""The restart factor against mpmath, over all regimes, both rules and both forms; the two theorems."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from amount import amount
from oracle import HB, NAG, columns
from twophase.rule import FORMS, OuterRule
from twophase.theory import (
    asymptotic_rate,
    effective_step,
    hurt_share,
    log_restart_factor,
    oscillatory_interval,
    regime,
    restart_can_help,
    restart_factor,
    restart_rate,
    restart_table,
    rule_grid,
)

BOUND = 1e-13  # times K, of the envelope: what the module promises of chi
AT_EDGES = 1e-13  # times K^2: the same next to a double eigenvalue
OF_LOG = 1e-11  # what it promises of log|chi| while less than half of the mode is gone


def assert_right(rule: OuterRule, sigma: float, period: int, bound: float, *, sign: Any, log: Any) -> None:
    """The error of chi is within a share of the envelope, and that of a slow mode's log|chi| within `OF_LOG` of it."""
    exact_sign, exact = oracle.log_factor(rule, sigma, period)
    assert (sign == 0) == (log == -math.inf)
    with mpmath.workdps(60):
        unit = max(oracle.log_envelope(rule, sigma, period), exact if exact_sign else -mpmath.inf)
        chi = sign * mpmath.exp(mpmath.mpf(float(log)) - unit) if sign else 0
        exact_chi = exact_sign * mpmath.exp(exact - unit) if exact_sign else 0
        # The logarithm itself is a double, however large: hence the last term.
        assert abs(chi - exact_chi) <= bound + 4e-16 * abs(exact if exact_sign else 0), (rule, sigma, period)
        if rule.lr < 0.5 and exact_sign > 0 and -0.6 < exact < -1e-300:
            assert abs(mpmath.mpf(float(log)) - exact) <= OF_LOG * abs(exact), (rule, sigma, period)


@pytest.mark.parametrize("name", oracle.DRAWS)
def test_restart_factors(name: str) -> None:
    """One period up to 1e5 rounds, and tables up to 3000: chi to a small share of its envelope, slow modes' logs."""
    rng = random.Random(name)
    for rule, sigma in oracle.points(name, amount(15, 300)):
        for period in (1, 2, *(int(10 ** rng.uniform(*ends)) for ends in ((0.5, 2), (2, 3.4), (4, 5)))):
            bound = max(BOUND * period, AT_EDGES * period**2 if "edge" in name else 0)
            sign, log = log_restart_factor(rule, sigma, period)
            assert_right(rule, sigma, period, bound, sign=sign, log=log)
            if period < 10_000:
                signs, logs = restart_table(rule, sigma, period)
                assert_right(rule, sigma, period, bound, sign=signs[-1], log=logs[-1])


@given(st.floats(1e-6, 4), st.floats(0, 0.99), st.floats(0, 1), st.booleans(), st.integers(0, 300))
def test_only_step_and_momentum_count(lr: float, momentum: float, sigma: float, nesterov: bool, period: int) -> None:
    """R3: whatever the form, lr and sigma are, the factor is that of the step s, to the last bit."""
    for form in FORMS:
        rule = OuterRule(lr, momentum, nesterov, form)
        one = OuterRule(float(effective_step(rule, sigma)), momentum, nesterov)
        assert log_restart_factor(rule, sigma, period) == log_restart_factor(one, 1.0, period)


# --- exact values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "sigma", "period"),
    [
        (OuterRule(2.0, 0.5, False, "ema"), 1.0, 1),
        (OuterRule(0.5, 0.5), 1.0, 2),
        (OuterRule(1.0, 0.0), 1.0, 5),
        (OuterRule(4.0, 0.0, True, "ema"), 0.25, 1),
        *[(rule, 1.0, period) for rule in oracle.NILPOTENT for period in (2, 3, 1000)],
    ],
)
def test_exact_zeros(rule: OuterRule, sigma: float, period: int) -> None:
    """F3, R9, R12: an exact zero is sign 0, log -inf, rate +inf, factor 0, both ways, without a warning."""
    assert log_restart_factor(rule, sigma, period) == (0, -math.inf)
    assert restart_rate(rule, sigma, period) == math.inf
    assert restart_factor(rule, sigma, period) == 0
    signs, logs = restart_table(rule, sigma, period)
    assert (signs[-1], logs[-1]) == (0, -math.inf)


def test_anchors() -> None:
    """A0: chi_7 of the mode s = .095 at b .9 to the digits printed; r_5 = .92442; F3: log chi_8000 = -421.58."""
    assert restart_factor(HB, 0.95, [1, 5, 7]) == pytest.approx([0.905, 0.0098321, -0.39837], abs=6e-6)
    for rule in oracle.NILPOTENT:  # R9
        assert log_restart_factor(rule, 1.0, 1) == (-1, pytest.approx(math.log(rule.momentum), rel=1e-14))
    assert restart_rate(HB, 0.95, 5) == pytest.approx(0.92442, abs=5e-6)
    assert log_restart_factor(HB, 0.95, 8000) == (1, pytest.approx(-421.58, abs=5e-3))
    assert restart_factor(HB, 0.95, 10**6) == 0  # underflows; its logarithm does not
    assert -60_000 < log_restart_factor(HB, 0.95, 10**6)[1] < -50_000
    assert restart_factor(OuterRule(1e90, 0.9), 1.0, 10) == math.inf


# --- the two theorems ---------------------------------------------------------------------------------------------


def test_restarts_help_no_real_mode_and_stabilise_none() -> None:
    """R17, R18: with real eigenvalues |chi_K| >= radius^K for every K, with a radius above 1 |chi_K| > 1."""
    rng, count = np.random.default_rng(17), 3000
    momentum = np.where(rng.random(count) < 0.5, rng.uniform(0, 0.99, count), 10.0 ** -rng.uniform(0, 3, count) * 0.9)
    rule = rule_grid(10.0 ** rng.uniform(-6, 0.8, count), momentum, rng.random(count) < 0.5)
    names, rate, logs = regime(rule, 1.0), asymptotic_rate(rule, 1.0), restart_table(rule, np.ones(count), 40)[1]
    assert {"real_below", "real_above", "negative_determinant"} <= set(names)
    real, wild = names != "oscillatory", rate < -1e-9
    assert wild.sum() > 100
    radius = -rate * np.arange(1, 41)[:, None]
    assert np.all((logs - radius)[:, real] >= -1e-13 * (np.abs(radius[:, real]) + 1))
    assert np.all(logs[:, wild] > 0)
    assert not restart_can_help(rule[real | wild], 1.0).any()


def test_the_first_period_that_helps() -> None:
    """R15, R17: it is the first of all K with r_K > r_infinity, in the whole oscillatory interval, up to its edges."""
    rng, found = random.Random(1), 0
    for _ in range(amount(300, 4000)):
        momentum, nesterov = rng.uniform(0.01, 0.995), rng.random() < 0.5
        low, high = (float(oracle.edge(name, momentum, nesterov)) for name in ("lower", "upper"))
        share = rng.choice([rng.random(), 10 ** -rng.uniform(0, 5), 1 - 10 ** -rng.uniform(0, 5)])
        rule = OuterRule(low + (high - low) * share, momentum, nesterov)
        first = int(restart_can_help(rule, 1.0))
        assert (first > 0) == (regime(rule, 1.0) == "oscillatory")
        if first:
            rates = -restart_table(rule, 1.0, first + 5)[1] / np.arange(1, first + 6)
            better = np.flatnonzero(rates > asymptotic_rate(rule, 1.0) + 1e-13)
            assert better[0] + 1 == first
            found += 1
    assert found > 200
    nearly = [int(restart_can_help(OuterRule(s, 0.9, True), 1.0)) for s in (0.99, 0.999, 0.9999, 0.99999)]
    assert nearly == [15, 49, 155, 495]  # where the mode itself is gone after 15 to 6 rounds
    low, _ = oscillatory_interval(HB)
    assert (restart_can_help(HB, [0.0, low * (1 - 1e-12), low * (1 + 1e-12), 1.0]) > 0).tolist() == [0, 0, 1, 1]
    assert not restart_can_help([OuterRule(0.25, 0.25), *oracle.NILPOTENT], 1.0).any()  # critical, nilpotent


def test_hurt_share() -> None:
    """The weight of the modes with `r_K < r_infinity`, each decided in 50 digits; and at the ends."""
    rng = random.Random(5)
    for _ in range(amount(20, 60)):
        rule, period = oracle.random_rule(rng, 2.0, (0.05, 0.97)), rng.randint(1, 25)
        sigma = [rng.uniform(0, 1) for _ in range(6)]
        weights = [rng.choice([0.0, 1e-3, 1.0]) for _ in range(5)] + [1.0]
        hurt = sum(
            weight
            for weight, each in zip(weights, sigma, strict=True)
            if abs(oracle.factor(rule, each, period)) > abs(oracle.eigenvalues(rule, each)[0]) ** period
        )
        assert hurt_share(rule, sigma, period, weights) == pytest.approx(hurt / sum(weights), abs=1e-12)
    assert hurt_share(HB, [0.001, 0.01, 0.02], 5) == 1
    assert hurt_share(HB, [0.95, 0.5], 5) == 0
    assert hurt_share(OuterRule(1.0, 0.0), [0.3, 1e-9, 1.0], 7) == 0
    assert [hurt_share(oracle.NILPOTENT[0], 1.0, period) for period in (1, 2, 3)] == [1, 0, 0]


# --- arrays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("modes", "rounds"), [(1, 500), (33, 193), (9000, 20)])
def test_table_of_mixed_rules(modes: int, rounds: int) -> None:
    """Of all rules and regimes in one array each entry is that of the rule by itself."""
    points = [point for name in oracle.DRAWS for point in oracle.points(name, 4)]
    pick = np.random.default_rng(modes).integers(0, len(points), modes)
    rule, sigma = columns(points)
    signs, logs = restart_table(rule[pick], sigma[pick], rounds)
    assert signs.dtype == np.int8
    for index in set(pick.tolist()):
        alone = restart_table(rule[index], sigma[index], rounds)
        for column in np.flatnonzero(pick == index)[:3]:
            np.testing.assert_array_equal(signs[:, column], alone[0])
            np.testing.assert_allclose(logs[:, column], alone[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", [log_restart_factor, restart_factor, restart_rate])
def test_broadcasting(call: Callable[..., Any]) -> None:
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
