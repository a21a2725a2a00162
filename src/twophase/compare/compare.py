"""One comparison of a method with its control: paired by seed, with Student's t, corrected for how many there are.

A seed sets the initial weights and the data order of both sides, so that the difference of one seed is less noisy than
the difference of two means. Of each seed that both sides have, d = log(control / method) is taken, which is positive
where the method is better, for lower results are better. With n seeds, c comparisons and the margin m:

    equal       two one-sided tests: the interval of the mean of d at level 1 - 2 * 0.05 / c lies within +-log(1 + m)
    better      else, the interval at level 1 - 0.05 / c lies above 0, that of the ratio exp(d) above 1
    worse       else, it lies below 0
    undecided   else

Dividing by c (Bonferroni) keeps the chance of any wrong word among all comparisons at 5 % or less. The intervals
suppose independent, normal d. They know of nothing but the seeds: other data, models and grids are not in them.

A diverged run is data, not missing: it is worse than any number. Where a side diverged there is no mean, and a sign
test decides: `better` or `worse` needs every seed for one side, and 2^(1 - n) <= 0.05 / c. A seed in which both
diverged is for neither.

Source: Schuirmann, "A comparison of the two one-sided tests procedure" (1987).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Word = Literal["better", "worse", "equal", "undecided"]
ALPHA = 0.05
"""Chance of a wrong word among all comparisons."""
MARGIN = 0.01
"""Relative difference that makes no choice."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison says.

    Args:
        word: by the module's definitions.
        ratio: geometric mean over the seeds of control / method, above 1 where the method is better; None where a run
            diverged or no seed is shared.
        low, high: interval of the ratio at level 1 - 0.05 / comparisons; None for fewer than two seeds, too.
        seeds: number of seeds that both sides have.
        diverged: of these, seeds in which the method or the control diverged.
    """

    word: Word
    ratio: float | None
    low: float | None
    high: float | None
    seeds: int
    diverged: int

    def texts(self) -> tuple[str | None, str | None]:
        """Return the ratio and its interval as tables have them."""
        ratio = None if self.ratio is None else f"{self.ratio:.4g}"
        return ratio, None if self.low is None else f"{self.low:.4g} to {self.high:.4g}"


def compare(
    method: Mapping[Any, float], control: Mapping[Any, float], *, comparisons: int = 1, margin: float = MARGIN
) -> Comparison:
    """Compare a method with its control on the seeds that both have.

    Args:
        method: its result by seed, above 0, lower is better; infinite for a diverged run. Leave out what is missing.
        control: likewise.
        comparisons: number of comparisons that are made together, >= 1.
        margin: relative difference that makes no choice, > 0.

    Raises:
        ValueError: a result that is not above 0.

    >>> compare({1: 2.0, 2: 2.1, 3: 1.9}, {1: 3.0, 2: 3.1, 3: 2.9}).word
    'better'
    >>> compare({1: 2.0, 2: math.inf}, {1: 2.0, 2: 3.0})
    Comparison(word='undecided', ratio=None, low=None, high=None, seeds=2, diverged=1)
    """
    pairs = [(method[seed], control[seed]) for seed in method if seed in control]
    if not all(mine > 0 and other > 0 for mine, other in pairs):
        raise ValueError(f"compare: results must be above 0, got {pairs} as (method, control)")
    level, diverged = ALPHA / comparisons, sum(math.inf in pair for pair in pairs)
    if diverged:
        sides = {(mine < other) - (mine > other) for mine, other in pairs}
        is_certain = len(sides) == 1 and 2.0 ** (1 - len(pairs)) <= level
        word: Word = "undecided" if not is_certain or sides == {0} else "better" if sides == {1} else "worse"
        return Comparison(word, None, None, None, len(pairs), diverged)
    gaps = [math.log(other) - math.log(mine) for mine, other in pairs]
    if len(gaps) < 2:
        return Comparison("undecided", math.exp(gaps[0]) if gaps else None, None, None, len(gaps), 0)
    (low, high), (narrow_low, narrow_high) = t_interval(gaps, 1 - level), t_interval(gaps, 1 - 2 * level)
    if -math.log1p(margin) < narrow_low and narrow_high < math.log1p(margin):
        word = "equal"
    else:
        word = "better" if low > 0 else "worse" if high < 0 else "undecided"
    return Comparison(word, _ratio(statistics.fmean(gaps)), _ratio(low), _ratio(high), len(gaps), 0)


def t_interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """Return Student's interval of a mean: mean -+ t s / sqrt(n), of at least two finite values.

    Args:
        values: any unit.
        level: coverage, 0 < level < 1.

    >>> [round(end, 3) for end in t_interval([0.1, 0.2, 0.4], 0.95)]
    [-0.146, 0.613]
    """
    from scipy.special import stdtrit  # noqa: PLC0415 - a third of a second, for which --help must not wait

    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * error
    return mean - half, mean + half


def _ratio(gap: float) -> float:
    """Return exp(gap), within the range of a float: the interval of two seeds can be beyond it."""
    return math.exp(max(-700.0, min(gap, 700.0)))
