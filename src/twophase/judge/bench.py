"""What a bench says: arms held against one another at each place, seed by seed, and how often each is near the best."""

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
            by_seed[int(row["seed"])] = float(row.get(column) or math.inf)
    return seed_table(list(lines.values()), list(lines), names)


def beside(theirs: DataFrame, mine: DataFrame, control: str, seeds: Collection[int]) -> DataFrame:
    """Return another bench's results on this one's scale: over its control, times this one's.

    What another processor, text or budget does to both arms of a bench alike drops out. A seed in which either control
    diverged or was not run says nothing, and an arm without any other seed is left out.

    Args:
        theirs: results of the other bench.
        mine: results of this one.
        control: the arm that both have.
        seeds: those that are compared.
    """
    here, there = (
        results.where(results < math.inf)[results.index.get_level_values("arm") == control].droplevel("arm")
        for results in (mine, theirs)
    )
    scales = (here / there).reindex(columns=list(seeds)).reindex(theirs.index, level="place")
    placed = theirs * scales
    is_lost = theirs.isna().all(axis=1) & scales.notna().any(axis=1)
    return placed[placed.notna().any(axis=1) | is_lost]


@dataclass(frozen=True, slots=True)
class Against:
    """An arm held against another at a place.

    Args:
        word: verdict of `decide`; `all diverged` if every setting of a side diverged.
        ratio: the other's result over the arm's, geometric means, above 1 where the arm is better; None without one.
        low, high: ends of its interval.
    """

    other: str
    word: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, results: DataFrame, place: str, arm: str, other: str, comparisons: int) -> Against | None:
        """Hold an arm against another on the seeds that both have; None where either has not been run."""
        sides = [(place, arm), (place, other)]
        if not all(side in results.index for side in sides):
            return None
        mine, theirs = (results.loc[side, :].map(math.log) for side in sides)
        if mine.isna().all() or theirs.isna().all():
            return cls(other, "all diverged")
        decision = decide(Paired.of(mine, theirs).by_seed, comparisons=comparisons)
        return cls(other, decision.word, *decision.ratios())


@dataclass(frozen=True, slots=True)
class PlaceCard:
    """How an arm did at a place.

    Args:
        setting: its tuned numbers; empty where every setting diverged.
        result: geometric mean over the held-out seeds; None where one diverged.
        settings: number of settings that its search tried.
        interior: True if no neighbour of the best was better.
        seconds: mean duration of one run.
        seconds_of_control: mean duration of one run of averaging in the same bench.
        control: comparison with averaging, tuned with the same budget in the same bench.
        stored: comparisons with the stored arms, each over the averaging of its bench.
        note: reason for no stored arms, or differences of their runs; may be empty.
    """

    place: str
    title: str
    setting: Mapping[str, float]
    result: float | None
    settings: int
    interior: bool
    seconds: float
    seconds_of_control: float
    control: Against | None
    stored: tuple[Against, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """What a bench says of an arm.

    Args:
        size: size of the bench, `quick` or `full`.
        places: one for each place that could be run.
        refused: why others could not, by name.
        comparisons: number of words against averaging, and against the `stored` arms. Each of the two families may err
            with probability 0.05.
        behind: distance of each arm from the best of each place, see `behind`.
    """

    arm: str
    size: str
    places: tuple[PlaceCard, ...]
    refused: Mapping[str, str]
    comparisons: Mapping[str, int]
    behind: Mapping[str, Sequence[float]]

    def counts(self) -> dict[str, int]:
        """Return how often each word was said against averaging."""
        words = [place.control.word if place.control else "no control" for place in self.places]
        return {
            word: words.count(word) for word in dict.fromkeys(["better", "equivalent", "undecided", "worse", *words])
        }

    def line(self) -> str:
        """Return what came out in one sentence."""
        counts = self.counts()
        ratios = [place.control.ratio for place in self.places if place.control and place.control.ratio is not None]
        words = ", ".join(f"{word} in {count}" for word, count in counts.items() if count)
        where = f"{len(self.places)} place{'s' * (len(self.places) != 1)}"
        if len(ratios) < len(self.places) or not ratios:
            return f"{self.arm} against averaging at {where}: {words}."
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        return (
            f"{self.arm} against averaging at {where}: {words}; ratio {mean:.3f} in the mean, "
            f"{min(ratios):.3f} to {max(ratios):.3f}."
        )


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
