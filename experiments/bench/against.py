"""What the bench says: arms held against one another at each place, seed by seed, and how near each is to the best."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twophase.judge.cells import DataFrame, Paired, means, seed_table
from twophase.judge.decision import decide


def results_of(
    rows: Iterable[Mapping[str, Any]], place: Sequence[str] = ("place",), column: str = "result"
) -> DataFrame:
    """Arrange a column by seed, a line for each place and arm: infinite where a run diverged, NaN where there is none.

    An arm without a setting that survived has a line of NaN. `place` are the columns that name a place.
    """
    names = (*place, "arm")
    lines: dict[tuple[str, ...], dict[int, float]] = {}
    for row in rows:
        by_seed = lines.setdefault(tuple(row[name] for name in names), {})
        if row["seed"] not in ("", None):
            by_seed[int(row["seed"])] = math.inf if row.get(column) in ("", None) else float(row[column])
    return seed_table(list(lines.values()), list(lines), names)


@dataclass(frozen=True, slots=True)
class Against:
    """An arm held against another at a place.

    Args:
        word: verdict of `decide`; `all diverged` if every setting of a side diverged.
        ratio: the other's result over the arm's, geometric means, above 1 where the arm is better; None without one.
        low, high: ends of its interval.
    """

    word: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, results: DataFrame, place: str, arm: str, other: str, comparisons: int) -> Against:
        """Hold an arm against another on the seeds that both have, one of so many comparisons.

        Raises:
            KeyError: either has not been run.
        """
        mine, theirs = (results.loc[(place, name), :].map(math.log) for name in (arm, other))
        if mine.isna().all() or theirs.isna().all():
            return cls("all diverged")
        decision = decide(Paired.of(mine, theirs).by_seed, comparisons=comparisons)
        return cls(decision.word, *decision.ratios())


def behind(results: DataFrame, places: Collection[str], arms: Iterable[str]) -> dict[str, list[float]]:
    """Return for each arm how far it is behind the best of each place, in per cent, the nearest first.

    The share of them that are at most x, over all x, is the arm's performance profile. An arm is infinitely far behind
    where one of its seeds diverged, or where it has not been run.

    Source: Dolan and More, "Benchmarking optimization software with performance profiles" (2002).
    """
    logs = means(results.map(math.log))
    best = {place: min((mean for (at, _), mean in logs.items() if at == place), default=math.inf) for place in places}
    distances = {}
    for arm in arms:
        gaps = [logs.get((place, arm), math.inf) - best[place] for place in places]
        distances[arm] = sorted(100 * math.expm1(gap) if gap < math.inf else math.inf for gap in gaps)
    return distances
