"""Line charts of a page: data as JSON in the page, which uPlot (MIT, in `uplot/`) and `charts.js` draw in its colours.

A template shows a `Chart` by `parts.figure(chart)` of `parts.html`. The chart shows its values under the pointer and by
arrow keys, follows light and dark and the width, and prints; some of its numbers stand in a folded table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.report.page import clean, number
from twophase.runs.record import LARGEST

MOST_POINTS = 600
"""Points of a curve that are drawn; of more, the lowest and highest of each stretch."""
_ALL_POINTS = 20_000
"""Points of all curves of a chart together, which keep a page below 600 kB."""
_MOST_MARKS, _MOST_ROWS = 60, 12
_Floats = NDArray[np.float64]


class Curve(NamedTuple):
    """One line of a chart: its name with the unit, and its points; nan interrupts it."""

    name: str
    x: ArrayLike
    y: ArrayLike


@dataclass(frozen=True)
class Chart:
    """Content of a chart.

    Args:
        name: name of the csv file that a reader can save, without ending.
        title: title, for the caption.
        x_label, y_label: labels with units; the horizontal axis counts rounds or steps.
        curves: curves; at most eight looks differ. Those without a number are left out, unless `shown` counts them.
        log: a logarithmic vertical axis; numbers that are not positive are then left out.
        restarts: places of restarts on the horizontal axis.
        note: a sentence for the caption.
        bulk: end the vertical axis where most points do, if a few lie far beyond.
        shown: the numbers of the curves that are drawn at first; the page's buttons with `data-curve` choose among all.
            None draws all.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    log: bool = False
    restarts: Sequence[float] = ()
    note: str = ""
    bulk: bool = False
    shown: Sequence[int] | None = None

    def drawn(self) -> dict[str, Any] | None:
        """Return what the template shows: data of charts.js, label, remarks and rows; None without a finite number."""
        curves = []
        for name, *columns in self.curves:
            x, y = (np.array(column, dtype=np.float64) for column in columns)
            # no quantity of a run is beyond these; differences and powers of ten of such numbers would overflow
            y[~(np.abs(y) <= LARGEST)] = np.nan
            y[np.abs(y) < 1 / LARGEST] = 0
            if self.log:
                y[~(y > 0)] = np.nan
            curves.append((name, np.stack([x, y], axis=1)[np.abs(x) <= LARGEST]))
        has_number = [bool(np.isfinite(points[:, 1]).any()) for _, points in curves]
        if not any(has_number):
            return None
        visible = [curves[k] for k in (range(len(curves)) if self.shown is None else self.shown) if has_number[k]]
        # buttons of the page choose curves by their numbers, so that none may be left out
        kept = visible if self.shown is None else curves
        longest, most = max(len(points) for _, points in kept), max(40, min(MOST_POINTS, _ALL_POINTS // len(kept)))
        data: dict[str, Any] = {"x": self.x_label, "y": self.y_label, "log": self.log, "series": []}
        for name, points in kept:
            x, y = ([_short(value) for value in column] for column in _thinned(points, most).T.tolist())
            data["series"].append({"name": clean(name), "x": x, "y": y})
        data["restarts"] = [_short(x) for x in self.restarts[:: math.ceil(len(self.restarts) / _MOST_MARKS) or 1]]
        if self.shown is not None:
            data["shown"] = list(self.shown)
        # what the picture leaves out is said below it
        remarks = [self.note] if self.note else []
        if longest > most:
            remarks.append(f"Of {longest:,} points the extremes of each stretch are drawn.")
        if len(self.restarts) > _MOST_MARKS:
            remarks.append(f"Of {len(self.restarts):,} restarts some are marked.")
        heights = np.concatenate([points[:, 1] for _, points in kept])
        if self.bulk:  # without the few that lie so far out that they would flatten the curves
            low, middle, high = np.nanquantile(heights, (0.05, 0.5, 0.95))
            room = max(high - low, abs(middle))
            is_inside = (heights >= low - room) & (heights <= high + room)
            if (beyond := heights[np.isfinite(heights) & ~is_inside]).size:
                data["bulk"] = [_short(heights[is_inside].min()), _short(heights[is_inside].max())]
                farthest = number(beyond[np.argmax(np.abs(beyond))])
                remarks.append(f"Points beyond the axis: {len(beyond):,}, as far as {farthest}.")
        # readers without the picture have the ends of each curve, and some of its points in a table
        rows, words = [], []
        for name, points in visible:
            few = np.linspace(0, len(points) - 1, min(len(points), _MOST_ROWS)).round().astype(int)
            rows += [(name, x, y) for x, y in points[few].tolist()]
            ends = points[np.isfinite(points[:, 1]), 1][[0, -1]]
            words.append(f"{name}: from {number(ends[0])} to {number(ends[1])}")
        label = f"{self.title}. {self.y_label} against {self.x_label}. {'; '.join(words)}."
        return {"data": data, "label": label, "remarks": " ".join(remarks), "rows": rows}


def _short(value: float) -> float | int | None:
    """Return a number in five digits, whole numbers as they are, for pages have many; None for nan."""
    return None if math.isnan(value) else int(value) if value % 1 == 0 else float(f"{value:.5g}")


def _thinned(points: _Floats, most: int) -> _Floats:
    """Return at most about so many points: of each stretch the lowest and the highest, in their order, or its gap."""
    if len(points) <= most:
        return points
    indices: list[int] = []
    for stretch in np.array_split(np.arange(len(points)), most // 2):
        y = points[stretch, 1]
        # without a number in it, any place of a stretch interrupts the curve
        extremes = (np.nanargmin(y), np.nanargmax(y)) if np.isfinite(y).any() else (0,)
        indices += sorted({int(stretch[index]) for index in extremes})
    return points[indices]
