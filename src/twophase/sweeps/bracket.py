"""A search whose next points follow from the results so far: double or halve, then take midpoints.

Every tuned number has a scale. A point is a tuple of whole steps, one a scale, from the start, which is all zeros:

    factor      value = start factor^(k / 2^r)                        learning rates, periods (rounded)
    odds        value / (1 - value) = start / (1 - start) factor^(k / 2^r)    momenta

The search takes one scale after the other, by whole factors up or down as long as that is better. The best is interior
once no neighbour on any scale is better. Then the steps are halved, r times. Where the start diverges, all numbers
become smaller together until a run survives. So the next points follow from the results alone. An interrupted search
resumes from its table, and every arm gets the same number of points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from twophase.base.errors import UsageError

Point = tuple[int, ...]


@dataclass(frozen=True)
class Scale:
    """Scale on which a number is tuned.

    Args:
        start: first value, > 0; of odds also < 1.
        kind: `factor`, `whole` (a factor, rounded to whole numbers), or `odds`.
        factor: factor of the first steps, > 1.
        low: least value that makes sense.
        high: greatest.
    """

    start: float
    kind: Literal["factor", "whole", "odds"] = "factor"
    factor: float = 2.0
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        if self.factor <= 1 or not 0 < self.start < (1 if self.kind == "odds" else math.inf):
            raise UsageError(
                f"a scale of kind {self.kind} starts at {self.start} with factor {self.factor}. The factor must be "
                "above 1, and the start above 0 (of odds below 1, too)"
            )

    def value(self, steps: float) -> float:
        """Return the value so many factors from the start, to six digits."""
        value = self.start * self.factor**steps
        if self.kind == "odds":
            value /= 1 - self.start + value
        return float(round(value)) if self.kind == "whole" else float(f"{value:.6g}")

    def allows(self, steps: float) -> bool:
        """Return whether the value lies in the scale's range."""
        return self.low <= self.value(steps) <= self.high


@dataclass(frozen=True)
class Search:
    """A search over some scales.

    Args:
        scales: scales of the tuned numbers, by name.
        most: points that the search may ask for, >= 1: the arm's budget.
        refinements: number of halvings of the steps once the best is interior.
    """

    scales: Mapping[str, Scale]
    most: int
    refinements: int = 1

    def values(self, point: Point) -> dict[str, float]:
        """Return the tuned numbers of a point."""
        unit = 2**self.refinements
        return {name: scale.value(k / unit) for (name, scale), k in zip(self.scales.items(), point, strict=True)}

    def pending(self, results: Mapping[Point, float]) -> list[Point]:
        """Return the points to measure next; none once the search has ended.

        Args:
            results: value to minimize, at each point so far; infinite or NaN where a run diverged.
        """
        measured = {self._key(point): math.inf if math.isnan(value) else value for point, value in results.items()}
        room, step = max(self.most - len(measured), 0), 2**self.refinements
        best: Point = (0,) * len(self.scales)
        while not math.isfinite(value := measured.get(self._key(best), math.nan)):
            if math.isnan(value):
                return [best][:room]
            lower = self._lower(best, step)  # smaller numbers of all kinds cure divergence
            if lower == best:
                return []
            best = lower
        while step:
            has_moved = False
            for index in range(len(best)):
                while True:
                    around = [best, *self._neighbours(best, index, step)]
                    if missing := [point for point in around if self._key(point) not in measured]:
                        return missing[:room]
                    lowest = min(around, key=lambda point: measured[self._key(point)])  # of equals the first: no move
                    if lowest == best:
                        break
                    best, has_moved = lowest, True
            if not has_moved:
                step //= 2
        return []

    def best(self, results: Mapping[Point, float]) -> Point | None:
        """Return the point with the lowest result; None where every one diverged."""
        finite = {point: value for point, value in results.items() if math.isfinite(value)}
        return min(finite, key=lambda point: finite[point]) if finite else None

    def is_interior(self, results: Mapping[Point, float]) -> bool:
        """Return whether the search ended by itself: with one more point it would ask for nothing."""
        return self.best(results) is not None and not replace(self, most=self.most + 1).pending(results)

    def _neighbours(self, point: Point, index: int, step: int) -> list[Point]:
        moves = (self._shifted(point, index, sign * step) for sign in (-1, 1))
        return [move for move in moves if move is not None]

    def _shifted(self, point: Point, index: int, by: int) -> Point | None:
        """Return the next point that way with another value; None where the scale ends before."""
        steps = range(1, 2 ** (self.refinements + 1) + 1)  # two factors lead from 1 to 2
        moves = (_moved(point, index, number * by) for number in steps)
        moved = next((move for move in moves if self._key(move) != self._key(point)), None)
        return moved if moved and self._is_allowed(moved) else None

    def _lower(self, point: Point, step: int) -> Point:
        """Return the point that is a step lower on every scale, but for those that end there."""
        unit = 2**self.refinements
        scales = self.scales.values()
        return tuple(k - step if scale.allows((k - step) / unit) else k for scale, k in zip(scales, point, strict=True))

    def _is_allowed(self, point: Point) -> bool:
        unit = 2**self.refinements
        return all(scale.allows(k / unit) for scale, k in zip(self.scales.values(), point, strict=True))

    def _key(self, point: Point) -> tuple[float, ...]:
        """Return what tells points apart: whole numbers round to the same value."""
        return tuple(self.values(point).values())


def _moved(point: Point, index: int, by: int) -> Point:
    return (*point[:index], point[index] + by, *point[index + 1 :])
