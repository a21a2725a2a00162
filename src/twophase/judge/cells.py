"""The outcomes of a sweep as a table of settings by seeds, and two arms compared seed by seed.

A seed sets the initial weights and the data order of both arms. The difference of one seed is therefore less noisy than
the difference of two means. `outcomes` makes the table; subtracting the logarithms of two tables pairs them, because
pandas aligns equal settings and equal seeds. `Paired` then summarizes one difference a seed. Every figure rests on
this.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from twophase.base.errors import UsageError
from twophase.sweeps.table import Setting, State

DataFrame: TypeAlias = Any
Series: TypeAlias = Any
"""The types of pandas as Any: its stubs do not say what indexing or NumPy's functions return."""
Remark = Literal["", "same run", "arm diverged", "control diverged", "both diverged", "missing"]
SAME: Remark = "same run"
ARM: Remark = "arm diverged"
CONTROL: Remark = "control diverged"
BOTH: Remark = "both diverged"
MISSING: Remark = "missing"


def outcome(state: State, perplexity: float | None) -> float:
    """Return a perplexity as a number that can be compared: inf, worse than any, after divergence; NaN for none yet."""
    return math.inf if state == "diverged" else math.nan if perplexity is None else perplexity


def outcomes(settings: Iterable[Setting], *place: str) -> DataFrame:
    """Arrange the outcomes of settings by seed.

    Args:
        settings: settings of a sweep, by `sweep.table.settings`.
        place: dotted paths of the axes that name a setting; without any, settings are numbered.

    Returns:
        A line a setting, indexed by `place`, and a column a seed: perplexity, inf for a diverged run, NaN for a missing
        one.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError:
        raise UsageError("comparing arms needs pandas, which is not installed; pip install 'twophase[sweep]'") from None
    cells = list(settings)
    keys = [tuple(cell.values[name] for name in place) for cell in cells]
    index = pd.MultiIndex.from_tuples(keys, names=place) if place else None
    lines = [dict(zip(cell.seeds, map(outcome, cell.states, cell.results), strict=True)) for cell in cells]
    return pd.DataFrame(lines, index, dtype=float)


def worst(table: DataFrame) -> Series:
    """Return the largest outcome of each setting: inf when a seed diverged, else NaN when one is missing."""
    largest = table.max(axis=1)
    return largest.where(table.notna().all(axis=1) | (largest == math.inf))


def fate(arm: float, control: float) -> Remark:
    """Say what keeps an outcome of an arm from being compared with a control's; empty when nothing does.

    >>> fate(math.inf, 8.0), fate(9.0, 8.0), fate(math.inf, math.nan)
    ('arm diverged', '', 'missing')
    """
    if math.isnan(arm) or math.isnan(control):
        return MISSING
    if math.inf not in {arm, control}:
        return ""
    return BOTH if arm == control else ARM if arm == math.inf else CONTROL


@dataclass(frozen=True, slots=True)
class Paired:
    """Differences of an arm from a control, one a seed, and what they come to.

    Args:
        by_seed: log ratios of perplexities, or other differences; at least one.
    """

    by_seed: tuple[float, ...]

    @classmethod
    def over(cls, gaps: DataFrame) -> Paired:
        """Average differences of settings (lines) for each seed (column)."""
        return cls(tuple(statistics.fmean(gaps[seed].dropna()) for seed in gaps))

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.by_seed)

    @property
    def ratio(self) -> float:
        """The geometric mean ratio, where the differences are of logarithms."""
        return math.exp(self.mean)

    @property
    def ratios(self) -> list[float]:
        """The ratio of each seed, where the differences are of logarithms."""
        return [math.exp(gap) for gap in self.by_seed]

    @property
    def error(self) -> float | None:
        """The standard error of the mean, s / sqrt(n); None for one seed."""
        seeds = len(self.by_seed)
        return statistics.stdev(self.by_seed) / math.sqrt(seeds) if seeds > 1 else None

    def ends(self, errors: float) -> tuple[float, float] | tuple[None, None]:
        """Return the mean less and plus so many standard errors; None for one seed."""
        error = self.error
        return (None, None) if error is None else (self.mean - errors * error, self.mean + errors * error)
