"""Line charts of a page: data as JSON in the page, which uPlot (MIT, in `uplot/`) and `charts.js` draw in its colours.

A template shows a `Chart` by `parts.figure(chart)` of `parts.html`. The chart shows its values under the pointer and by
arrow keys, follows light and dark and the width, and prints; some of its numbers stand in a folded table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
    """Content of a chart; without a finite number it shows nothing.

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

    @cached_property
    def data(self) -> dict[str, Any]:
        """What `charts.js` draws, ready for JSON: finite numbers in five digits, None for a gap."""
        most = max(40, min(MOST_POINTS, _ALL_POINTS // max(len(self._points), 1)))
        series = []
        for curve, points in self._points:
            thin = _thinned(points, most)
            places, values = [_short(x) for x in thin[:, 0].tolist()], [_short(y) for y in thin[:, 1].tolist()]
            series.append({"name": clean(curve.name), "x": places, "y": values})
        if not any(np.isfinite(points[:, 1]).any() for _, points in self._points):
            series = []
        data: dict[str, Any] = {"x": self.x_label, "y": self.y_label, "series": series, "log": self.log}
        data["restarts"] = [_short(x) for x in self.restarts[:: math.ceil(len(self.restarts) / _MOST_MARKS) or 1]]
        if self._bulk is not None:
            data["bulk"] = [_short(end) for end in self._bulk]
        return data if self.shown is None else data | {"shown": list(self.shown)}

    @property
    def summary(self) -> str:
        """The drawn curves in words, for readers without the picture."""
        parts = []
        for curve, points in self._drawn:
            (start, first), (end, last) = points[np.isfinite(points[:, 1])][[0, -1]].tolist()
            low, high = np.nanmin(points[:, 1]), np.nanmax(points[:, 1])
            ends = f"from {number(first)} at {number(start)} to {number(last)} at {number(end)}"
            parts.append(f"{curve.name}: {ends}, lowest {number(low)}, highest {number(high)}")
        return f"{self.y_label} against {self.x_label}. {'; '.join(parts)}."

    @property
    def remarks(self) -> str:
        """The note, and what the picture leaves out."""
        longest, remarks = max((len(points) for _, points in self._points), default=0), [self.note]
        if longest > MOST_POINTS:
            remarks.append(f"Of {longest:,} points the extremes of each stretch are drawn.")
        if len(self.restarts) > _MOST_MARKS:
            remarks.append(f"Of {len(self.restarts):,} restarts some are marked.")
        if self._bulk is not None:
            low, high = self._bulk
            beyond = self._heights[(self._heights < low) | (self._heights > high)]
            farthest = beyond[np.argmax(np.abs(beyond))]
            remarks.append(f"Points beyond the axis: {len(beyond):,}, as far as {number(farthest)}.")
        return " ".join(filter(None, remarks))

    @property
    def rows(self) -> list[tuple[str, float, float]]:
        """A few points of each drawn curve, evenly spread: its name, x and y."""
        rows = []
        for curve, points in self._drawn:
            few = np.linspace(0, len(points) - 1, min(len(points), _MOST_ROWS)).round().astype(int)
            rows += [(curve.name, x, y) for x, y in points[few].tolist()]
        return rows

    @cached_property
    def _points(self) -> list[tuple[Curve, _Floats]]:
        """The curves with rows of x and y, nan where the picture has no place for y."""
        curves = []
        for curve in self.curves:
            x, y = np.asarray(curve.x, dtype=np.float64), np.array(curve.y, dtype=np.float64)
            # no quantity of a run is beyond these; differences and powers of ten of such numbers would overflow
            y[~(np.abs(y) <= LARGEST)] = np.nan
            y[np.abs(y) < 1 / LARGEST] = 0
            if self.log:
                y[~(y > 0)] = np.nan
            if self.shown is not None or np.isfinite(y).any():
                curves.append((curve, np.stack([x, y], axis=1)[np.abs(x) <= LARGEST]))
        return curves

    @property
    def _drawn(self) -> list[tuple[Curve, _Floats]]:
        chosen = self._points if self.shown is None else [self._points[place] for place in self.shown]
        return [(curve, points) for curve, points in chosen if np.isfinite(points[:, 1]).any()]

    @cached_property
    def _heights(self) -> _Floats:
        heights = np.concatenate([points[:, 1] for _, points in self._points])
        return heights[np.isfinite(heights)]

    @cached_property
    def _bulk(self) -> tuple[float, float] | None:
        """The lowest and highest point but for a few outliers that would flatten the curves; None without such."""
        if not self.bulk or not self._points:
            return None
        low, middle, high = np.quantile(self._heights, (0.05, 0.5, 0.95))
        room = max(high - low, abs(middle))
        inside = self._heights[(self._heights >= low - room) & (self._heights <= high + room)]
        return (inside.min(), inside.max()) if len(inside) < len(self._heights) else None


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
