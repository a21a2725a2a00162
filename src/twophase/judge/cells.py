"""The outcomes of a sweep as a table of settings by seeds, and two arms compared seed by seed.

A seed sets the initial weights and the data order of both arms. The difference of one seed is therefore less noisy than
the difference of two means. `outcomes` makes the table; subtracting the logarithms of two tables pairs them, because
pandas aligns equal settings and equal seeds. `Paired` then summarizes one difference a seed. Every comparison rests on
this.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from twophase.errors import UsageError
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
    cells = list(settings)
    keys = [tuple(cell.values[name] for name in place) for cell in cells]
    lines = [dict(zip(cell.seeds, map(outcome, cell.states, cell.results), strict=True)) for cell in cells]
    return seed_table(lines, keys, place)


def pandas() -> Any:
    """Import pandas.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError:
        raise UsageError("comparing arms needs pandas, which is not installed; pip install 'twophase[sweep]'") from None
    return pd


def seed_table(lines: Sequence[Mapping[Any, float]], keys: Sequence[Any] = (), names: Sequence[str] = ()) -> DataFrame:
    """Arrange lines of numbers by seed, NaN where a line lacks a seed; indexed by `keys`, whose parts have `names`."""
    pd = pandas()
    return pd.DataFrame(lines, pd.MultiIndex.from_tuples(keys, names=names) if names else None, dtype=float)


def means(table: DataFrame) -> dict[Any, float]:
    """Average each line over the seeds that it has, infinite numbers included; a line without any is left out."""
    return {key: statistics.fmean(line.dropna()) for key, line in table.dropna(how="all").iterrows()}


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


def comparable(arm: DataFrame, control: DataFrame) -> tuple[list[Remark], DataFrame, DataFrame]:
    """Return the fate of each line of two tables, and both tables without the lines that cannot be compared."""
    fates: list[Remark] = [fate(*sides) for sides in zip(worst(arm), worst(control), strict=True)]
    ended = [not remark for remark in fates]
    return fates, arm[ended], control[ended]


@dataclass(frozen=True, slots=True)
class Paired:
    """Differences of two sides, one a seed, and what they come to.

    Args:
        by_seed: log ratios or other differences; infinite where one side alone diverged, NaN where both did.
    """

    by_seed: tuple[float, ...]

    @classmethod
    def of(cls, arm: Mapping[Any, float], control: Mapping[Any, float]) -> Paired:
        """Subtract an arm's numbers by seed, such as logarithms, from a control's on the seeds that both have."""
        sides = seed_table([dict(arm), dict(control)]).dropna(axis="columns")
        return cls(tuple(sides.loc[1] - sides.loc[0]))

    @classmethod
    def over(cls, gaps: DataFrame) -> Paired:
        """Average differences of settings (lines) for each seed (column)."""
        return cls(tuple(means(gaps.T).values()))

    @property
    def finite(self) -> list[float]:
        """The differences of the seeds in which both sides have a number."""
        return [gap for gap in self.by_seed if math.isfinite(gap)]

    @property
    def mean(self) -> float | None:
        """The mean of the finite differences; None without any."""
        return statistics.fmean(self.finite) if self.finite else None

    @property
    def spread(self) -> dict[str, float | None]:
        """The mean, the smallest and the largest of the finite differences."""
        return {"mean": self.mean, "min": min(self.finite, default=None), "max": max(self.finite, default=None)}

    @property
    def ratio(self) -> float | None:
        """The geometric mean ratio, where the differences are of logarithms."""
        return None if self.mean is None else ratio_of(self.mean)

    @property
    def ratios(self) -> list[float]:
        """The ratio of each seed, where the differences are of logarithms."""
        return [math.exp(gap) for gap in self.by_seed]

    @property
    def error(self) -> float | None:
        """The standard error of the mean, s / sqrt(n); None for one seed."""
        seeds = len(self.finite)
        return statistics.stdev(self.finite) / math.sqrt(seeds) if seeds > 1 else None

    def ends(self, errors: float) -> tuple[float, float] | tuple[None, None]:
        """Return the mean less and plus so many standard errors; None for one seed."""
        mean, error = self.mean, self.error
        return (None, None) if mean is None or error is None else (mean - errors * error, mean + errors * error)


def ratio_of(log_ratio: float) -> float:
    """Return exp(log_ratio), clipped to the range of a float: two-seed t intervals can overflow."""
    return math.exp(max(-700.0, min(log_ratio, 700.0)))
