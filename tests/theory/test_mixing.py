"""Mixed periods: the linear program and the Chebyshev limit."""

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
from oracle import HB, random_rule
from twophase.rule import FORMS, OuterRule
from twophase.theory import asymptotic_rate, best_period, chebyshev_rate, mixed_periods, restart_table

ANCHORS = [  # interval, rule, no restart, best fixed rate and period, rate of the mix
    ((0.3, 0.95), HB, 0.0527, 0.1315, 7, 0.1946),
    ((0.3, 0.95), OuterRule(7.0, 0.9, False, "ema"), 0.0527, 0.3605, 2, 0.5051),
    ((0.3, 0.95), OuterRule(7.0, 0.9, True, "ema"), 0.1705, 0.5092, 1, 0.7152),
]


@pytest.mark.parametrize(("ends", "rule", "none", "fixed", "period", "mix"), ANCHORS, ids=["HB 1", "HB 7", "NAG 7"])
def test_anchors_of_mixes(
    ends: tuple[float, float], rule: OuterRule, none: float, fixed: float, period: int, *, mix: float
) -> None:
    """R24's table, 241 modes, K <= 40; the same rule in the other form gives the same."""
    sigma = np.linspace(*ends, 241)
    for form in FORMS:
        mixture = mixed_periods(rule.to(form), sigma, max_period=40)
        assert (mixture.rate, mixture.fixed_rate) == pytest.approx((mix, fixed), abs=0.00006)
        assert mixture.fixed_period == period
    assert np.min(asymptotic_rate(rule, sigma)) == pytest.approx(none, abs=0.00006)


def test_mixes_are_between_the_best_period_and_chebyshev() -> None:
    """R24 and R25: fixed <= mix <= Chebyshev on random spectra and rules; a mix has the rates of its parts."""
    rng, gains = random.Random(2), 0
    for _ in range(amount(20, 80)):
        rule = random_rule(rng, rng.choice([1.0, 1.0, 4.0]))
        low = rng.choice([rng.uniform(0.05, 0.5), 10 ** rng.uniform(-4, -1)])
        sigma = np.sort([low, rng.uniform(low, 1), *(rng.uniform(low, 1) for _ in range(rng.randint(0, 30)))])
        periods = np.arange(1, rng.choice([1, 2, 8, 30]) + 1)
        mix = mixed_periods(rule, sigma, max_period=len(periods))
        assert sum(mix.shares) == pytest.approx(1, rel=1e-14)
        assert min(mix.shares) > 0
        assert list(mix.periods) == sorted(set(mix.periods) & set(periods))
        rates = -restart_table(rule, sigma, len(periods))[1] / periods[:, None]
        assert mix.fixed_period == best_period(rule, sigma, max_period=len(periods))
        assert mix.rate >= mix.fixed_rate == pytest.approx(rates.min(axis=1).max(), rel=1e-11)
        parts = rates[np.array(mix.periods) - 1]
        assert mix.rate == pytest.approx((np.array(mix.shares) @ parts).min(), rel=1e-12, abs=1e-300)
        whole = mixed_periods(rule, np.linspace(sigma[0], sigma[-1], 150), max_period=12)
        assert whole.fixed_rate <= whole.rate <= chebyshev_rate(sigma[0], sigma[-1]) * (1 + 1e-9)
        gains += mix.rate > 1.01 * mix.fixed_rate > 0
    assert gains >= 3


def best_of_pairs(rates: Any) -> Any:
    """The best mix for two modes, exactly: some pair of periods attains it; `rates` is (K, 2)."""
    best = max(min(row) for row in rates)
    for (a, b), (c, d) in itertools.combinations(rates, 2):
        if (a - b) * (c - d) < 0:  # one is better for the one mode, one for the other
            share = (d - c) / ((a - b) + (d - c))
            best = max(best, min(share * a + (1 - share) * c, share * b + (1 - share) * d))
    return best


def test_mixes_of_two_modes_are_optimal() -> None:
    """For two modes the optimum is a mix of two periods at most: all pairs, in 50 digits, give the same rate."""
    rng, pairs = random.Random(3), 0
    for _ in range(amount(25, 60)):
        rule, sigma = random_rule(rng, rng.choice([1.0, 3.0])), [rng.uniform(0.02, 1), rng.uniform(0.02, 1)]
        with mpmath.workdps(oracle.DIGITS):
            tables = [oracle.factors(rule, s, 16) for s in sigma]
            best = best_of_pairs([tuple(-mpmath.log(abs(t[k])) / (k + 1) for t in tables) for k in range(16)])
        mix = mixed_periods(rule, sigma, max_period=16)
        assert mix.rate == pytest.approx(float(best), rel=1e-7)
        assert len(mix.periods) <= 2
        pairs += len(mix.periods) == 2
    assert pairs > 5


def test_mixes_where_a_factor_is_zero() -> None:
    """A zero factor has an infinite rate; two modes that two periods remove are both gone; what never moves has 0."""
    once = mixed_periods(oracle.NILPOTENT[0], [1.0], max_period=9)
    assert (once.periods, once.rate, once.fixed_period, once.fixed_rate) == ((2,), math.inf, 2, math.inf)
    both = mixed_periods(OuterRule(2.0, 0.5, form="ema"), [1.0, 0.5], max_period=9)  # chi_1 = 0 and chi_2 = 0
    assert (both.rate, both.fixed_rate) == (math.inf, pytest.approx(math.log(2), rel=1e-12))
    for rule, sigma in ((HB, [0.0, 0.5]), (OuterRule(0.0, 0.9), [0.5])):
        mix = mixed_periods(rule, sigma, max_period=10)
        assert (mix.rate, mix.fixed_rate, mix.fixed_period) == (0, 0, 1)
        assert math.copysign(1, mix.rate) == math.copysign(1, mix.fixed_rate) == 1


def test_chebyshev_numbers() -> None:
    """R25: 1.271, .655, .285 in the limit and 1.2425, .6260, .2559 at T = 24 for k = 3.17, 10, 50."""
    low, high = np.array([0.3, 0.1, 0.02]), np.array([0.95, 1.0, 1.0])
    assert chebyshev_rate(low, high) == pytest.approx([1.271, 0.655, 0.285], abs=0.0005)
    assert chebyshev_rate(low, high, 24) == pytest.approx([1.2425, 0.6260, 0.2559], abs=0.00005)
    with mpmath.workdps(700):  # a wide interval, whose rate is a difference of nearly equal numbers by the formula
        exact = float(2 * mpmath.atanh(mpmath.sqrt(mpmath.mpf(1e-300))))
    assert chebyshev_rate(1e-300, 1.0) == pytest.approx(exact, rel=1e-15, abs=0)
    assert (chebyshev_rate(0.0, 0.5), chebyshev_rate(0.5, 0.5)) == (0, math.inf)
