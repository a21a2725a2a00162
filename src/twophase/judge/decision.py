"""Words for a comparison that was planned: better, equivalent, worse or undecided, corrected for how many there are.

d_s is the difference of seed s, positive where the arm is better (natural logarithm of a ratio of results). There are n
>= 2 held-out seeds; m is the margin, c the registered number of comparisons. Student's t throughout:

    equivalent   two one-sided tests: the 1 - 2 alpha / c interval of the mean lies within (-m, m)
    better       else, the 1 - alpha / c interval lies above 0
    worse        else, it lies below 0
    undecided    else

Dividing alpha by c (Bonferroni) keeps the chance of any wrong word among all comparisons at most alpha. A seed in which
one side alone diverged has no number, and the mean is None. `better` or `worse` then need every seed to be for the
other side. A seed in which both diverged agrees with neither side: the word is `undecided`.

Source: Schuirmann, "A comparison of the two one-sided tests procedure" (1987).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from twophase.judge.bootstrap import t_interval
from twophase.judge.cells import Paired, ratio_of

Word = Literal["better", "equivalent", "worse", "undecided"]
MARGIN = math.log(1.01)
"""A difference below 1 % makes no choice: m."""
ALPHA = 0.05
"""Chance of a wrong word among all comparisons."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a comparison says.

    Args:
        word: verdict by the module's definitions.
        mean: mean difference; None with fewer than two, or where a run diverged.
        low, high: ends of the interval at level `1 - alpha / comparisons`.
        seeds: number of differences.
        diverged: seeds in which the arm alone diverged, less those in which the control alone did.
    """

    word: Word
    mean: float | None
    low: float | None
    high: float | None
    seeds: int
    diverged: int = 0

    def ratios(self) -> tuple[float | None, ...]:
        """Return the control's result over the arm's, above 1 where the arm is better, and its interval's two ends."""
        return tuple(None if log is None else ratio_of(log) for log in (self.mean, self.low, self.high))


def decide(differences: Sequence[float], *, comparisons: int = 1) -> Decision:
    """Decide a comparison.

    Args:
        differences: one a seed; `-inf` if the arm alone diverged, `inf` if its control alone did, NaN if both did.
        comparisons: number of comparisons that the registration names, >= 1.

    >>> decide([0.05, 0.06, 0.04, 0.05, 0.055]).word
    'better'
    >>> decide([0.001, -0.002, 0.0005, 0.001, -0.001]).word
    'equivalent'
    """
    pairs, count, level = Paired(tuple(differences)), len(differences), ALPHA / comparisons
    if len(pairs.finite) < count:
        # A sign test: all seeds on one side, none of them equal, and enough of them.
        signs = {(d > 0) - (d < 0) for d in differences} if 2.0 ** (1 - count) <= level else set()
        word: Word = "better" if signs == {1} else "worse" if signs == {-1} else "undecided"
        diverged = pairs.by_seed.count(-math.inf) - pairs.by_seed.count(math.inf)
        return Decision(word, None, None, None, count, diverged)
    interval, narrow = (t_interval(differences, 1 - share) for share in (level, 2 * level))
    if interval is None or narrow is None:
        return Decision("undecided", None, None, None, count)
    if narrow.low > -MARGIN and narrow.high < MARGIN:
        word = "equivalent"
    else:
        word = "better" if interval.low > 0 else "worse" if interval.high < 0 else "undecided"
    return Decision(word, pairs.mean, *interval, count)
