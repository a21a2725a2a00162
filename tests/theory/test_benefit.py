"""`theory.benefit`: what restarts can and cannot do, against 50 digits, all roots, and dense scans."""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import Any

import mpmath
import numpy as np
import pytest

import oracle
from amount import amount
from oracle import HB, NAG
from twophase.rule import FORMS, OuterRule
from twophase.theory.benefit import hurt_share, restart_can_help, restart_stable_limit, useful_share
from twophase.theory.contraction import log_restart_factor, restart_factor, restart_table
from twophase.theory.inputs import rule_grid
from twophase.theory.modes import asymptotic_rate, oscillatory_interval, phase_shift, stable_limit

KINDS = pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "Nesterov"])


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
    useful = useful_share(rule, sigma)
    assert share is None or useful == pytest.approx(share, abs=0.006)
    assert useful == pytest.approx(1 - 2 * abs(phase_shift(rule, sigma)) / math.pi, rel=1e-15)
    first, _ = oracle.eigenvalues(rule, sigma)
    beats = restart_table(rule, sigma, 20000)[1] < float(mpmath.log(abs(first))) * np.arange(1, 20001)
    assert np.mean(beats) == pytest.approx(useful, abs=8e-4)


def test_useful_share_without_oscillation() -> None:
    """No period is useful where nothing oscillates; at C = 0 every one is."""
    assert useful_share(HB, [0.0, 0.01, 1e-300]).tolist() == [0.0, 0.0, 0.0]
    assert useful_share(oracle.NILPOTENT[0], 1.0) == 0
    assert useful_share(OuterRule(1.0, 0.5, form="ema"), 1.0) == 1  # lr sigma = 1: a pure cosine
    assert useful_share(rule_grid([[0.1], [0.2]], 0.9), [0.5, 0.6, 0.7]).shape == (2, 3)


# --- R17, R18: the two theorems -----------------------------------------------------------------------------------


def test_restart_never_helps_a_real_mode() -> None:
    """R17: where `restart_can_help` is False, `|chi_K| >= radius^K` for every K, strictly (momentum and s positive)."""
    real = 0
    for rule, sigma in modes(2, amount(60, 200)):
        first, second = oracle.eigenvalues(rule, sigma)
        assert bool(restart_can_help(rule, sigma)) == (mpmath.im(first) != 0)
        if mpmath.im(first) == 0:
            real += 1
            for period, factor in enumerate(oracle.factors(rule, sigma, 15), start=1):
                assert abs(factor) > abs(first) ** period
            assert hurt_share(rule, sigma, 3) == 1
            assert abs(second) <= abs(first)
    assert real > 20
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


@pytest.mark.parametrize(("period", "sigma"), [(3, 0.267), (5, 0.184), (7, 0.143)])
def test_anchor_lowest_sigma_that_gains(period: int, sigma: float) -> None:
    """A4: heavy ball b .9, EMA lr 1: from .267, .184, .143 up K = 3, 5, 7 beat no restart; slower modes always lose."""
    grid = np.linspace(oscillatory_interval(HB)[0] * 1.0001, sigma - 0.0006, 300)
    assert hurt_share(HB, grid, period) == pytest.approx(1)
    assert hurt_share(HB, sigma + 0.0006, period) == 0


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
    """R19's tables; the limit lies below the one without restarts, scales with 1/lr, and is that of both forms."""
    rule = OuterRule(1.0, momentum, nesterov)
    limit = restart_stable_limit(rule, period)
    assert limit == pytest.approx(step, abs=0.0051)
    assert limit < stable_limit(rule)
    assert restart_stable_limit(OuterRule(0.4, momentum, nesterov), period) == pytest.approx(limit / 0.4, rel=1e-12)
    assert restart_stable_limit(rule.to("ema"), period) == pytest.approx(limit, rel=1e-12)
    if period == 1:
        assert limit == pytest.approx(2 / 1.9 if nesterov else 2.0, rel=1e-12)


@pytest.mark.parametrize(("momentum", "factor"), [(0.95, -1.019342), (0.99, -1.093598)])
def test_exact_examples_of_destabilising(momentum: float, factor: float) -> None:
    """R19: s = .78, K = 3: chi_3 = -1.019342 (b .95) and -1.093598 (b .99), though both modes are stable."""
    rule = OuterRule(0.78, momentum)
    assert restart_factor(rule, 1.0, 3) == pytest.approx(factor, abs=5e-7)
    assert asymptotic_rate(rule, 1.0) > 0
    assert restart_stable_limit(rule, 3) < 1 < stable_limit(rule)


def times(p: list[Any], q: list[Any]) -> list[Any]:
    """The product of two polynomials, lowest power first."""
    product = [mpmath.mpf(0)] * (len(p) + len(q) - 1)
    for (i, u), (j, v) in itertools.product(enumerate(p), enumerate(q)):
        product[i + j] += u * v
    return product


@functools.cache
def exact_limit(momentum: float, nesterov: bool, period: int) -> Any:
    """The smallest s > 0 at which |chi_K| goes beyond 1, from all roots of the polynomials chi_K - 1 and chi_K + 1.

    R6: chi_K = tr chi_{K-1} - D chi_{K-2}, polynomials in s.
    """
    with mpmath.workdps(60):
        b = mpmath.mpf(momentum)
        trace, determinant = ([1 + b, -1 - b], [b, -b]) if nesterov else ([1 + b, mpmath.mpf(-1)], [b, mpmath.mpf(0)])
        before, chi = [mpmath.mpf(1)], [mpmath.mpf(1), -1 - b if nesterov else mpmath.mpf(-1)]
        for _ in range(period - 1):
            pairs = itertools.zip_longest(times(trace, chi), times(determinant, before), fillvalue=mpmath.mpf(0))
            before, chi = chi, [u - v for u, v in pairs]
        chi.reverse()
        crossings = []
        for level in (1, -1):
            roots = mpmath.polyroots([*chi[:-1], chi[-1] - level], maxsteps=400, extraprec=600)
            crossings += [mpmath.re(r) for r in roots if abs(mpmath.im(r)) < 1e-25 and mpmath.re(r) > 1e-25]
        ends = sorted(crossings)
        inside = itertools.pairwise([*ends, ends[-1] * 2])
        return next(left for left, right in inside if abs(mpmath.polyval(chi, (left + right) / 2)) > 1)


@pytest.mark.slow
def test_stable_limit_against_all_roots() -> None:
    """For random momenta and K <= 10 it is the first root of |chi_K| = 1 after which |chi_K| > 1; R18: never later."""
    rng, earlier = random.Random(6), 0
    for number in range(amount(24, 72)):
        momentum = rng.choice([0.0, rng.random(), rng.uniform(0.8, 0.995)])
        nesterov, form, period = bool(number & 1), FORMS[number >> 1 & 1], rng.randint(1, 10)
        rule = OuterRule(rng.uniform(0.1, 5), momentum, nesterov, form)
        limit = restart_stable_limit(rule, period)
        size = mpmath.mpf(rule.lr) * (1 - mpmath.mpf(momentum) if form == "ema" else 1)
        assert abs(float(mpmath.mpf(limit) * size / exact_limit(momentum, nesterov, period) - 1)) < 1e-9
        assert limit <= stable_limit(rule) * (1 + 1e-14)
        earlier += limit < 0.99 * stable_limit(rule)
    assert earlier > 6


@pytest.mark.slow
@pytest.mark.parametrize(("period", "low", "high"), [(2, 0.82, 0.83), (3, 0.7335, 0.7502), (5, 0.983, 0.998)])
def test_stable_limit_at_a_peak_that_just_reaches_1(period: int, low: float, high: float) -> None:
    """Where a peak of |chi_K(s)| rises to 1 as b grows, the limit jumps: it is right on both sides, 1e-8 away too."""
    before, after = (restart_stable_limit(OuterRule(1.0, b), period) for b in (low, high))
    assert before > 1.2 * after
    while high - low > 2e-9:
        middle = (low + high) / 2
        if restart_stable_limit(OuterRule(1.0, middle), period) > (before + after) / 2:
            low = middle
        else:
            high = middle
    for momentum in (low - 1e-8, high + 1e-8, high + 1e-5):
        exact = float(exact_limit(momentum, False, period))
        assert restart_stable_limit(OuterRule(1.0, momentum), period) == pytest.approx(exact, rel=1e-9)


@pytest.mark.slow
def test_stable_limit_against_a_dense_scan() -> None:
    """For longer periods: no |chi_K| > 1 on a dense grid below the limit, and growth just above it."""
    rng = random.Random(7)
    for number, period in enumerate((13, 20, 37, 64, 20, 37)):
        momentum, nesterov = rng.uniform(0.3, 0.995), bool(number & 1)
        limit = restart_stable_limit(OuterRule(0.2, momentum, nesterov), period)
        wide = OuterRule(0.2 * limit, momentum, nesterov)  # in units of the limit: sigma in [0, 1]
        below = np.sin(np.linspace(0, np.pi / 2, 60 * period)) ** 2
        below = below[(below > 0) & (below < 1 - 1e-10)]
        assert log_restart_factor(wide, below, period)[1].max() < 0
        assert log_restart_factor(OuterRule(0.2 * limit * (1 + 1e-7), momentum, nesterov), 1.0, period)[1] > 0


@KINDS
def test_no_destabilising_in_the_papers_grid(nesterov: bool) -> None:
    """R19: for b <= .9 and s <= 1.1 every K of 2 ... 60 keeps |chi_K| < 1; K = 1 too, but for Nesterov s > 2/(1+b)."""
    steps = np.linspace(0, 1, 56)[1:]
    for momentum in (0.0, 0.3, 0.7, 0.9):
        logs = restart_table(OuterRule(1.1, momentum, nesterov), steps, 60)[1]
        assert logs[1:].max() < 0
        grows = 1.1 * steps > 2 / (1 + momentum) if nesterov else np.zeros(55, bool)
        np.testing.assert_array_equal(logs[0] > 0, grows)
    assert min(restart_stable_limit(OuterRule(1.0, 0.9, nesterov), period) for period in (2, 3, 4, 24)) > 1.1


@KINDS
def test_stable_limit_at_the_ends(nesterov: bool) -> None:
    """Infinite at lr 0 or nearly; 2 without momentum, whatever the period."""
    for lr in (0.0, 5e-324):
        assert restart_stable_limit(OuterRule(lr, 0.9, nesterov), 3) == math.inf
    for period in (1, 2, 10):
        assert restart_stable_limit(OuterRule(0.5, 0.0, nesterov), period) == pytest.approx(4, rel=1e-12)
