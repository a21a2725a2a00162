"""The bench's search: double or halve, then take midpoints; the next settings follow from the results so far.

It takes one scale after the other, by factors of 2 up or down as long as that is better. Once no neighbour on any
scale is better, the steps are halved, to factors of the square root of 2. Where the start diverges, all numbers become
smaller together until a run survives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from twophase.tuning.search import Point, Results, Scale

_UNIT = 2
"""Steps in a factor of 2, after the last halving."""
_Steps = tuple[int, ...]


def bracket(scales: Mapping[str, Scale], results: Results, count: int) -> list[Point]:
    """Return the next settings, at most so many; none once the search has ended (`tuning.tune.Search`)."""
    search = _Search([*scales.values()], results)
    return [search.point(steps) for steps in search.pending()[:count]]


class _Search:
    def __init__(self, scales: list[Scale], results: Results) -> None:
        self.scales, self.results = scales, results

    def point(self, steps: _Steps) -> Point:
        """Return the place so many steps from the start on each scale."""
        places = (scale.start * 2.0 ** (k / _UNIT) for scale, k in zip(self.scales, steps, strict=True))
        return tuple(float(round(x)) if s.is_whole else x for x, s in zip(places, self.scales, strict=True))

    def pending(self) -> list[_Steps]:
        """Return what is not measured yet of what the search looks at next."""
        best: _Steps = (0,) * len(self.scales)
        while not math.isfinite(value := self.results.get(self.point(best), math.nan)):
            if math.isnan(value):
                return [best]
            lower = tuple(
                k if scale.is_whole and x <= 1 else k - _UNIT
                for k, x, scale in zip(best, self.point(best), self.scales, strict=True)
            )
            if lower == best:
                return []
            best = lower
        step = _UNIT
        while step:
            has_moved = False
            for index in range(len(best)):
                while True:
                    around = [best, *self._neighbours(best, index, step)]
                    if missing := [steps for steps in around if self.point(steps) not in self.results]:
                        return missing
                    lowest = min(around, key=lambda steps: self.results[self.point(steps)])  # of equals the first
                    if lowest == best:
                        break
                    best, has_moved = lowest, True
            if not has_moved:
                step //= 2
        return []

    def _neighbours(self, best: _Steps, index: int, step: int) -> list[_Steps]:
        """Return the next places either way with another value: whole numbers round to the same, and end at 1."""
        found = []
        for sign in (-1, 1):
            for number in range(1, 2 * _UNIT + 1):  # two factors lead from 1 to 2
                moved = (*best[:index], best[index] + sign * number * step, *best[index + 1 :])
                if self.point(moved) != self.point(best):
                    if not self.scales[index].is_whole or self.point(moved)[index] >= 1:
                        found.append(moved)
                    break
        return found
