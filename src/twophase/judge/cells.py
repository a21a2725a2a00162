"""The cells of a sweep as a table, and the comparison of two arms seed by seed that every figure rests on.

A seed sets the initial weights and the data order of both arms, so the difference of one seed is less noisy than the
difference of two means. `cells_of` makes the table, `logs` arranges it as settings by seeds, and subtracting two such
tables pairs them: pandas aligns equal settings and equal seeds. `Paired` then summarizes one difference a seed.

In a table of logarithms a diverged run is +inf, worse than any number, and a missing one NaN.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from twophase.judge.bootstrap import Interval, percentile_interval
from twophase.sweep.table import SEED, Row, State
from twophase.sweep.table import result as result_of

DataFrame: TypeAlias = Any
Series: TypeAlias = Any
"""The types of pandas as Any: its stubs do not say what indexing or NumPy's functions return."""
LOG = "log"
"""Column of the natural logarithm of a cell's perplexity."""
Remark = Literal["", "same run", "arm diverged", "control diverged", "both diverged", "missing"]
SAME: Remark = "same run"
ARM: Remark = "arm diverged"
CONTROL: Remark = "control diverged"
BOTH: Remark = "both diverged"
MISSING: Remark = "missing"


def cells_of(rows: Iterable[Row]) -> DataFrame:
    """Arrange rows of a sweep as a table: one line a cell and seed, a column for each axis.

    Args:
        rows: of a sweep, in any order.

    Returns:
        Columns `arm`, `run`, `state`, `control_of`, `perplexity`, `log`, and the axes by their dotted paths.
    """
    import pandas as pd  # noqa: PLC0415 - an extra, and slow to import

    lines = []
    for row in rows:
        perplexity = result_of(row)
        log = math.log(perplexity) if perplexity is not None else math.inf if row.state == "diverged" else math.nan
        start = {"arm": row.arm, "run": row.run, "state": row.state, "control_of": row.control_of}
        lines.append({**start, "perplexity": perplexity, LOG: log, SEED: None, **row.values})
    return pd.DataFrame(lines)


def logs(cells: DataFrame, place: Sequence[str]) -> DataFrame:
    """Arrange log perplexities by setting and seed; settings of which no run has ended are left out.

    Args:
        cells: of `cells_of`.
        place: columns that name a setting.

    Returns:
        A line a setting, indexed by `place`, and a column a seed.
    """
    return (
        cells.groupby([*place, SEED], sort=False, dropna=False)[LOG].last().unstack(SEED, sort=False).dropna(how="all")
    )


def means(table: DataFrame) -> Series:
    """Average the logarithms of each setting over the seeds that have ended: inf when one of them diverged."""
    import pandas as pd  # noqa: PLC0415 - as above

    # fmean adds exactly: equal settings tie whatever the order of their seeds.
    ended = (line[~np.isnan(line)].tolist() for line in table.to_numpy())
    return pd.Series([statistics.fmean(line) if line else math.nan for line in ended], table.index, dtype=float)


def finished(table: DataFrame) -> Series:
    """Average the settings in which no seed has diverged."""
    each = means(table)
    return each[each < math.inf]


def states(table: DataFrame) -> list[State]:
    """Say of each setting whether all its seeds have finished, one has diverged, or one is missing."""
    lines = table.to_numpy()
    return ["diverged" if np.inf in line else "missing" if np.isnan(line).any() else "finished" for line in lines]


def fate(arm: State, control: State) -> Remark:
    """Say what keeps a setting or run of an arm from being compared with a control; empty when nothing does.

    >>> fate("diverged", "finished"), fate("finished", "finished"), fate("diverged", "missing")
    ('arm diverged', '', 'missing')
    """
    if {arm, control} & {"missing", "failed"}:
        return MISSING
    if "diverged" not in {arm, control}:
        return ""
    return BOTH if arm == control else ARM if arm == "diverged" else CONTROL


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
    def seeds(self) -> int:
        """How many seeds there are."""
        return len(self.by_seed)

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
        return statistics.stdev(self.by_seed) / math.sqrt(self.seeds) if self.seeds > 1 else None

    def ends(self, errors: float) -> tuple[float, float] | tuple[None, None]:
        """The mean less and plus so many standard errors; None for one seed."""
        error = self.error
        return (None, None) if error is None else (self.mean - errors * error, self.mean + errors * error)

    @property
    def interval(self) -> Interval | None:
        """The exact percentile bootstrap's interval of the mean; None for one seed."""
        return percentile_interval(self.by_seed)


def paired(arm: DataFrame, control: DataFrame) -> Paired | None:
    """Compare an arm with a control over equal settings: mean log ratio arm / control of each seed.

    Only seeds count for which every run that is needed has ended.

    Args:
        arm: of `logs`.
        control: of `logs`, indexed alike.

    Returns:
        The differences, or None when nothing matches, or when a run that is needed has diverged.
    """
    places = control.index.intersection(arm.index)
    arm, control = arm.loc[places].dropna(axis=1), control.loc[places].dropna(axis=1)
    seeds = [seed for seed in control if seed in arm]
    gaps = arm[seeds] - control[seeds]
    return Paired.over(gaps) if gaps.size and (gaps.abs() < math.inf).all(axis=None) else None


def alike(places: DataFrame, by_seed: Series) -> DataFrame:
    """Give every setting of a table the same logarithms, such as those of a control without hyperparameters."""
    import pandas as pd  # noqa: PLC0415 - as above

    return pd.DataFrame([by_seed.to_dict()] * len(places), index=places.index)
