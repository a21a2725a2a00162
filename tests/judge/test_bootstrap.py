"""Intervals of a few differences: exact enumeration, symmetries, and the coverage that they really have."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twophase.judge.bootstrap import EXACT_SEEDS, largest_coverage, percentile_interval, t_interval

FEW = st.lists(st.floats(-3, 3), min_size=2, max_size=5)
MANY = st.lists(st.floats(-3, 3), min_size=2, max_size=11)


def brute_force(differences: list[float]) -> tuple[float, float]:
    """Both ends from all n^n ordered resamples, by counting them."""
    n = len(differences)
    means = sorted(math.fsum(drawn) / n for drawn in itertools.product(differences, repeat=n))
    tail = 0.025 * len(means)
    low = next(mean for index, mean in enumerate(means, start=1) if index >= tail - 1e-9)
    high = next(mean for index, mean in enumerate(reversed(means), start=1) if index >= tail - 1e-9)
    return low, high


@settings(deadline=None)
@given(FEW)
def test_exact_against_all_resamples(differences: list[float]) -> None:
    """Multisets with their weights give the interval of all n^n ordered resamples."""
    assert percentile_interval(differences) == pytest.approx(brute_force(differences), abs=1e-12)


@settings(deadline=None)
@given(MANY, st.randoms(use_true_random=False))
def test_order_and_sign(differences: list[float], random: object) -> None:
    """The order of the seeds does not matter, and exchanging the two arms turns the interval round; any count."""
    shuffled = list(differences)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for interval in (percentile_interval, t_interval):
        ends = interval(differences)
        assert ends is not None
        assert interval(shuffled) == ends
        negated = interval([-value for value in differences])
        assert negated == pytest.approx((-ends.high, -ends.low), abs=1e-12)


@settings(deadline=None)
@given(MANY)
def test_stays_between_the_extremes(differences: list[float]) -> None:
    """A percentile interval never leaves [min, max]; for 3 differences at 95 % it is just that."""
    ends = percentile_interval(differences)
    assert ends is not None
    assert min(differences) <= ends.low <= ends.high <= max(differences)
    if len(differences) <= 3:
        assert ends == pytest.approx((min(differences), max(differences)), abs=1e-12)


def test_students_interval_against_its_table() -> None:
    """The half width is the tabulated quantile times the standard error: 12.706, 4.303 and 2.365 for 2, 3, 8."""
    for count, quantile in ((2, 12.7062), (3, 4.30265), (8, 2.36462)):
        differences = [float(k) for k in range(count)]
        ends = t_interval(differences)
        assert ends is not None
        error = float(np.std(differences, ddof=1)) / math.sqrt(count)
        assert (ends.high - ends.low) / 2 == pytest.approx(quantile * error, rel=1e-5)
        assert (ends.high + ends.low) / 2 == pytest.approx((count - 1) / 2, rel=1e-12)


@pytest.mark.parametrize(("seeds", "measured"), [(2, 0.502), (3, 0.749), (4, 0.797), (5, 0.838)])
def test_coverage_is_what_the_text_says(seeds: int, measured: float) -> None:
    """For normal differences the percentile interval covers as measured, below its bound; Student's covers 95 %."""
    draws = np.random.default_rng(2).standard_normal((4000, seeds)).tolist()
    share = {}
    for interval in (percentile_interval, t_interval):
        every = [interval(draw) for draw in draws]
        share[interval] = sum(ends is not None and ends.low <= 0 <= ends.high for ends in every) / len(draws)
    error = 4 * math.sqrt(measured * (1 - measured) / len(draws))
    assert share[percentile_interval] == pytest.approx(measured, abs=error)
    assert share[percentile_interval] < largest_coverage(seeds) + error
    assert share[t_interval] == pytest.approx(0.95, abs=0.014)


def test_beyond_enumeration() -> None:
    """Drawn resamples come from a fixed generator and agree with the normal approximation for many differences."""
    differences = np.random.default_rng(3).standard_normal(40).tolist()
    assert len(differences) > EXACT_SEEDS
    ends, again, student = percentile_interval(differences), percentile_interval(differences), t_interval(differences)
    assert ends is not None
    assert ends == again
    assert ends == pytest.approx(student, abs=0.05)


def test_too_few_or_impossible() -> None:
    """One difference has no interval; what is not finite is refused."""
    for interval in (percentile_interval, t_interval):
        assert interval([0.5]) is None
        assert interval([]) is None
        with pytest.raises(ValueError, match=f"{interval.__name__}.*finite"):
            interval([0.5, math.inf])
