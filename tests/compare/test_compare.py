"""`compare`: SciPy's paired t tests decide alike, scale and order do not matter, divergence is data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from twophase.compare.compare import ALPHA, MARGIN, compare

INF = math.inf
SWAPPED = {"better": "worse", "worse": "better", "equal": "equal", "undecided": "undecided"}


def drawn(case: int) -> tuple[dict[int, float], dict[int, float], int]:
    """Draw results of a method and its control over seeds, and a number of comparisons."""
    draw = np.random.default_rng(case)
    seeds, spread = int(draw.integers(2, 8)), 10 ** draw.uniform(-4, -0.5)
    noise = draw.normal(0, spread, seeds) + draw.choice([0, 0.003, 0.02, -0.02])
    control = np.exp(draw.normal(2, 0.5, seeds))
    numbers = range(100, 100 + seeds)
    return (
        dict(zip(numbers, control * np.exp(-noise), strict=True)),
        dict(zip(numbers, control, strict=True)),
        int(draw.choice([1, 3])),
    )


@pytest.mark.parametrize("case", range(60))
def test_scipys_tests_of_the_log_ratios_say_the_same(case: int) -> None:
    """The interval is that of SciPy's one-sample t test, and the words are those of its p-values."""
    method, control, comparisons = drawn(case)
    gaps = np.log([control[seed] / method[seed] for seed in method])
    alpha, margin = ALPHA / comparisons, math.log(1 + MARGIN)
    test: Any = stats.ttest_1samp(gaps, 0)
    above: Any = stats.ttest_1samp(gaps, -margin, alternative="greater")
    below: Any = stats.ttest_1samp(gaps, margin, alternative="less")
    side = "better" if gaps.mean() > 0 else "worse"
    word = "equal" if max(above.pvalue, below.pvalue) < alpha else side if test.pvalue < alpha else "undecided"

    found = compare(method, control, comparisons=comparisons)

    assert (found.word, found.seeds, found.diverged) == (word, len(gaps), 0)
    assert found.ratio == pytest.approx(stats.gmean(list(control.values())) / stats.gmean(list(method.values())))
    ends = test.confidence_interval(1 - alpha)
    assert (math.log(found.low or 0), math.log(found.high or 0)) == pytest.approx((ends.low, ends.high), rel=1e-9)


@pytest.mark.parametrize("case", range(20))
def test_unit_order_and_unpaired_seeds_do_not_matter_and_sides_swap(case: int) -> None:
    """Only the ratios of the seeds that both have count."""
    method, control, _ = drawn(case)
    found, swapped = compare(method, control), compare(control, method)
    assert compare(dict(reversed(method.items())), control) == found
    assert compare({**method, 1: 5.0}, {2: INF, **control}) == found
    scaled = compare({seed: 8 * x for seed, x in method.items()}, {seed: 8 * x for seed, x in control.items()})
    assert (scaled.word, scaled.ratio) == (found.word, pytest.approx(found.ratio))
    assert (swapped.word, swapped.ratio) == (SWAPPED[found.word], pytest.approx(1 / (found.ratio or 0)))


@pytest.mark.parametrize(
    ("method", "control", "comparisons", "word", "diverged"),
    [
        ([2.0] * 6, [3.0] * 5 + [INF], 1, "better", 1),
        ([INF] * 6, [3.0] * 6, 1, "worse", 6),
        ([2.0] * 6, [3.0] * 5 + [INF], 3, "undecided", 1),  # 2^-5 > 0.05 / 3
        ([2.0] * 5, [INF] * 5, 1, "undecided", 5),  # 2^-4 > 0.05
        ([2.0] * 6, [1.0] + [INF] * 5, 1, "undecided", 5),  # a seed for the other side
        ([2.0] * 6, [2.0] + [INF] * 5, 1, "undecided", 5),  # a seed for neither
        ([INF] + [2.0] * 6, [INF] + [3.0] * 6, 1, "undecided", 1),
        ([INF] * 8, [INF] * 8, 1, "undecided", 8),
    ],
)
def test_a_diverged_run_takes_the_sign_test(
    method: list[float], control: list[float], comparisons: int, word: str, diverged: int
) -> None:
    """It needs every seed on one side and enough of them; there is no ratio."""
    found = compare(dict(enumerate(method)), dict(enumerate(control)), comparisons=comparisons)
    assert (found.word, found.diverged, found.ratio, found.low, found.high) == (word, diverged, None, None, None)


def test_few_seeds_and_seeds_without_spread() -> None:
    """No seed has no ratio and one has no interval; equal ratios have an interval without width."""
    nothing, one = compare({0: 1.0}, {1: 1.0}), compare({0: 2.0}, {0: 3.0})
    assert (nothing.word, nothing.ratio, nothing.seeds) == ("undecided", None, 0)
    assert (one.word, one.ratio, one.low, one.seeds) == ("undecided", pytest.approx(1.5), None, 1)
    level = compare({0: 2.0, 1: 4.0}, {0: 4.0, 1: 8.0})
    assert (level.word, level.low, level.high) == ("better", pytest.approx(2.0), pytest.approx(2.0))
    assert compare({0: 2.0, 1: 4.0}, {0: 2.0, 1: 4.0}).word == "equal"
    assert compare({0: 1e-200, 1: 1e200}, {0: 1e200, 1: 1e-200}).high is not None  # within the range of a float


def test_the_margin_decides_what_is_equal() -> None:
    """The same results under two margins."""
    method, control = {0: 1.0, 1: 1.0, 2: 1.0}, {0: 1.02, 1: 1.021, 2: 1.019}
    assert compare(method, control).word == "better"
    assert compare(method, control, margin=0.05).word == "equal"


@pytest.mark.parametrize("result", [0.0, -1.0, math.nan])
def test_a_result_without_a_ratio_is_refused(result: float) -> None:
    """Zero, negative, not a number."""
    with pytest.raises(ValueError, match="results"):
        compare({0: result}, {0: 1.0})
