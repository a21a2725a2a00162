"""`theory.contraction`: what restarts can and cannot do, against 50 digits and dense scans."""

from __future__ import annotations

import itertools
import math
import random

import mpmath
import numpy as np
import pytest

import oracle
from amount import amount
from oracle import HB, KINDS, NAG
from twophase.rule import FORMS, OuterRule
from twophase.theory.contraction import hurt_share, log_restart_factor, restart_can_help, restart_factor, restart_table
from twophase.theory.modes import asymptotic_rate, oscillatory_interval, phase_shift, stable_limit


def modes(seed: int, count: int) -> list[oracle.Point]:
    """Modes of both kinds and forms and every regime."""
    rng, points = random.Random(seed), []
    for number in range(count):
        step = rng.choice([10 ** rng.uniform(-5, 0), rng.uniform(0, 1.2), rng.uniform(1, 5)])
        form, nesterov = FORMS[number & 1], bool(number & 2)
        points.append(oracle.at(step, rng.uniform(0.01, 0.99), nesterov, form, rng.uniform(0.05, 1)))
    return points


# --- R15: the envelope --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "sigma", "share"),
    [
        (HB, 0.95, 0.995),
        (HB, 0.1, 0.69),
        (HB, 0.05, 0.50),
        (NAG, 0.3, None),
        (NAG, 0.05, None),
        (OuterRule(7.0, 0.9, form="ema"), 0.95, None),  # theta < 0
    ],
)
def test_useful_share_is_what_counting_finds(rule: OuterRule, sigma: float, share: float | None) -> None:
    """R15: of 20000 periods the share `1 - 2 |theta| / pi` beats the envelope, to 8e-4."""
    useful = 1 - 2 * abs(phase_shift(rule, sigma)) / math.pi
    assert share is None or useful == pytest.approx(share, abs=0.006)
    first, _ = oracle.eigenvalues(rule, sigma)
    beats = restart_table(rule, sigma, 20000)[1] < float(mpmath.log(abs(first))) * np.arange(1, 20001)
    assert np.mean(beats) == pytest.approx(useful, abs=8e-4)


# --- R17, R18: the two theorems -----------------------------------------------------------------------------------


def test_restarts_can_help_where_a_mode_oscillates() -> None:
    """R17: exactly where T's eigenvalues are complex; elsewhere every period slows the mode down."""
    for rule, sigma in modes(2, amount(60, 200)):
        turning = mpmath.im(oracle.eigenvalues(rule, sigma)[0]) != 0
        assert bool(restart_can_help(rule, sigma)) == turning
        assert turning or hurt_share(rule, sigma, 3) == 1
    low, _ = oscillatory_interval(HB)
    assert restart_can_help(HB, [0.0, low * (1 - 1e-12), low * (1 + 1e-12), 1.0]).tolist() == [False, False, True, True]
    assert not restart_can_help([OuterRule(0.25, 0.25), oracle.NILPOTENT[0]], 1.0).any()  # critical, nilpotent


def test_no_schedule_stabilises() -> None:
    """R18: with spectral radius >= 1 every factor is >= 1, hence what any schedule leaves: nothing helps."""
    unstable = 0
    for rule, sigma in modes(4, amount(150, 500)):
        if asymptotic_rate(rule, sigma) <= 0:
            unstable += 1
            assert not restart_can_help(rule, sigma)
            assert log_restart_factor(rule, sigma, np.arange(1, 40))[1].min() > 0
    assert unstable > 15


# --- shares of a spectrum that are hurt ---------------------------------------------------------------------------


def test_hurt_share_against_50_digits() -> None:
    """The weight of the modes with `r_K < r_infinity`, each decided in 50 digits."""
    rng = random.Random(5)
    for _ in range(amount(25, 60)):
        rule = oracle.random_rule(rng, 2.0, (0.05, 0.97))
        sigma = [rng.uniform(0, 1) for _ in range(6)]
        weights = [rng.choice([0.0, 1e-3, 1.0, rng.random()]) for _ in range(5)] + [1.0]
        period = rng.randint(1, 25)
        hurt = mpmath.mpf(0)
        for weight, share in zip(weights, sigma, strict=True):
            first, _ = oracle.eigenvalues(rule, share)
            if abs(oracle.factor(rule, share, period)) > abs(first) ** period:
                hurt += weight
        assert hurt_share(rule, sigma, period, weights) == pytest.approx(float(hurt / sum(weights)), abs=1e-12)


def test_hurt_share_at_the_ends() -> None:
    """All of a slow spectrum; none of a momentum-free one; a mode of infinite rate is hurt by a finite one."""
    assert hurt_share(HB, [0.001, 0.01, 0.02], 5) == 1
    assert hurt_share(HB, [0.95, 0.5], 5) == 0
    for sigma, period in itertools.product(([0.3, 0.6], [1.0, 1e-9], [1.0]), (1, 2, 7)):
        assert hurt_share(OuterRule(1.0, 0.0), sigma, period) == 0
    assert [hurt_share(oracle.NILPOTENT[0], 1.0, period) for period in (1, 2, 3)] == [1, 0, 0]


# --- R19: what restarts make unstable -----------------------------------------------------------------------------

FIRST_STEPS = [  # nesterov, momentum, period, first step at which a mode grows
    *((False, 0.9, period, step) for period, step in {1: 2.00, 2: 1.13, 3: 2.01, 4: 1.51, 5: 2.03, 11: 2.93}.items()),
    *((True, 0.9, period, step) for period, step in {1: 1.05, 2: 1.28, 3: 1.30, 4: 1.31, 5: 1.32, 11: 1.34}.items()),
    (False, 0.95, 3, 0.69),
    (False, 0.99, 3, 0.60),
    (False, 0.99, 5, 0.29),
]


@pytest.mark.parametrize(("nesterov", "momentum", "period", "step"), FIRST_STEPS)
def test_destabilising_table(nesterov: bool, momentum: float, period: int, step: float) -> None:
    """R19's tables, below the limit without restarts."""
    rule = OuterRule(float(stable_limit(OuterRule(1.0, momentum, nesterov))), momentum, nesterov)
    steps = np.linspace(0, 1, 20_001)[1:-1]  # in units of the limit without restarts
    logs = log_restart_factor(rule, steps, period)[1]
    assert rule.lr * steps[np.argmax(logs > 0)] == pytest.approx(step, abs=0.0051)


@pytest.mark.parametrize(("momentum", "factor"), [(0.95, -1.019342), (0.99, -1.093598)])
def test_exact_examples_of_destabilising(momentum: float, factor: float) -> None:
    """R19: s = .78, K = 3: chi_3 = -1.019342 (b .95) and -1.093598 (b .99), though both modes are stable."""
    rule = OuterRule(0.78, momentum)
    assert restart_factor(rule, 1.0, 3) == pytest.approx(factor, abs=5e-7)
    assert asymptotic_rate(rule, 1.0) > 0
    assert stable_limit(rule) > 1


@KINDS
def test_no_destabilising_in_the_papers_grid(nesterov: bool) -> None:
    """R19: for b <= .9 and s <= 1.1 every K of 2 ... 60 keeps |chi_K| < 1; K = 1 too, but for Nesterov s > 2/(1+b)."""
    steps = np.linspace(0, 1, 56)[1:]
    for momentum in (0.0, 0.3, 0.7, 0.9):
        logs = restart_table(OuterRule(1.1, momentum, nesterov), steps, 60)[1]
        assert logs[1:].max() < 0
        grows = 1.1 * steps > 2 / (1 + momentum) if nesterov else np.zeros(55, bool)
        np.testing.assert_array_equal(logs[0] > 0, grows)
