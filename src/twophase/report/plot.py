"""Line charts of a page: data as JSON in the page, which uPlot (MIT, in `uplot/`) and `plot.js` draw in its colours.

    loss = figure(Chart("loss", "Loss", "step", "loss (nats)", [Curve("run", steps, losses)]))
    page(title, subtitle, loss, scripts=[script()])

A page needs `script` once, for any number of charts; `page.page` has their style. A chart shows its values under the
pointer and by arrow keys, follows light and dark and the width, and prints. Some of its numbers are also in a folded
table, which needs no script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.report.page import Html, asset, clean, counted, details, minus, table, tag, written
from twophase.runs.record import LARGEST

MOST_POINTS = 600
"""Points of a curve that are drawn; of more, the lowest and highest of each stretch."""
_MOST_ROWS = 12
_Floats = NDArray[np.float64]


class Curve(NamedTuple):
    """One line of a chart: its name with the unit, and its points; nan interrupts it. With `dots`, points alone."""

    name: str
    x: ArrayLike
    y: ArrayLike
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Content of a chart.

    Args:
        name: name of the csv file that a reader can save, without ending.
        title: title, for the caption.
        x_label, y_label: labels with units; the horizontal axis counts rounds or steps.
        curves: curves; at most eight looks differ.
        log: a logarithmic vertical axis; numbers that are not positive are then left out.
        restarts: places of restarts on the horizontal axis.
        syncs: places of the outer steps on the horizontal axis.
        level: a horizontal line, by its name; not on a logarithmic axis.
        note: a sentence for the caption.
        bulk: end the vertical axis where most points do, if a few lie far beyond.
        names: words for the places 0, 1, ... of the horizontal axis, in place of numbers.
        shown: the numbers of the curves that are drawn at first; the page's buttons with `data-curve` choose among all.
            None draws all.
        points: most points of a curve that are drawn.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    log: bool = False
    restarts: Sequence[float] = ()
    syncs: Sequence[float] = ()
    level: tuple[str, float] | None = None
    note: str = ""
    bulk: bool = False
    names: Sequence[str] = ()
    shown: Sequence[int] | None = None
    points: int = MOST_POINTS


def script() -> str:
    """Return the script that draws every chart above it; `plots.draw(figure, data)` draws one again."""
    return asset("uplot/uPlot.iife.min.js") + asset("plot.js")


def figure(chart: Chart) -> Html | None:
    """Return the chart as a figure with its data, caption and table; None where it has no number to show."""
    curves = [(curve, _points(curve, log=chart.log)) for curve in chart.curves]
    numbered = [bool(np.isfinite(points[:, 1]).any()) for _, points in curves]
    if not any(numbered):
        return None
    drawn = [curves[k] for k in (range(len(curves)) if chart.shown is None else chart.shown) if numbered[k]]
    if chart.shown is None:  # else the page's buttons count all curves
        curves = drawn
    longest = max(len(points) for _, points in curves)
    remarks = [chart.note] if chart.note else []
    if longest > chart.points:
        remarks.append(f"Of {longest:,} points the extremes of each stretch are drawn.")
    data: dict[str, object] = {"x": chart.x_label, "y": chart.y_label, "series": _series(chart, curves)}
    data |= {"shown": list(chart.shown)} if chart.shown is not None else {}
    data |= {"log": True} if chart.log else {}
    data |= {"restarts": [_short(x) for x in chart.restarts]} if len(chart.restarts) else {}
    some = chart.syncs[:: math.ceil(len(chart.syncs) / MOST_POINTS) or 1]
    data |= {"syncs": [_short(x) for x in some]} if len(some) else {}
    data |= {"level": chart.level} if chart.level else {}
    data |= {"names": list(chart.names)} if chart.names else {}
    heights = np.concatenate([points[:, 1] for _, points in curves])
    heights = heights[np.isfinite(heights)]
    if chart.bulk and len(inside := _bulk(heights)) < len(heights):
        data["bulk"] = [_short(inside.min()), _short(inside.max())]
        farthest = heights[np.argmax(np.abs(heights - np.median(heights)))]
        remarks.append(
            f"Beyond the axis: {len(heights) - len(inside):,} of {counted(len(heights), 'point')}, as far as "
            f"{written(float(farthest), '.4g')}."
        )
    label = f"{chart.title}. {_summary(chart, drawn)}"
    return tag(
        "figure",
        # A data block is not run; no text in it can end it.
        tag("script", Html(json.dumps(data).replace("<", "\\u003c")), type="application/json"),
        tag("div", aria_label=label),
        tag("ul", class_="legend"),
        tag(
            "figcaption",
            tag("strong", f"{chart.title}. "),
            *(f"{remark} " for remark in remarks),
            tag("a", "Numbers (csv)", download=f"{chart.name}.csv", hidden=True),
        ),
        details("The chart as a table", _table(chart, drawn)),
        class_="plot",
    )


def _series(chart: Chart, curves: Sequence[tuple[Curve, _Floats]]) -> list[dict[str, object]]:
    """Return the curves as JSON values; places that are those of the curve before are left out."""
    series: list[dict[str, object]] = []
    before: list[float | int] | None = None  # the first curve has its places, even an empty list
    for curve, points in curves:
        thin = _thinned(points, chart.points)
        x = [_short(position) for position in thin[:, 0].tolist()]
        y = [_short(value) if math.isfinite(value) else None for value in thin[:, 1].tolist()]
        series.append({"name": clean(curve.name), "y": y})
        series[-1] |= ({"x": x} if x != before else {}) | ({"dots": 1} if curve.dots else {})
        before = x
    return series


def _short(value: float) -> float | int:
    """Return a number in five digits, whole numbers as they are: pages have many."""
    return int(value) if value % 1 == 0 else float(f"{value:.5g}")


def _points(curve: Curve, *, log: bool) -> _Floats:
    """Return the points of a curve as rows of x and y; nan where the picture has no place for y."""
    x, y = np.asarray(curve.x, dtype=np.float64), np.array(curve.y, dtype=np.float64)
    # No quantity of a run is beyond these; differences and powers of ten of such numbers would overflow.
    y[~(np.abs(y) <= LARGEST)] = np.nan
    y[np.abs(y) < 1 / LARGEST] = 0
    if log:
        y[~(y > 0)] = np.nan
    return np.stack([x, y], axis=1)[np.abs(x) <= LARGEST]


def _thinned(points: _Floats, most: int) -> _Floats:
    """Return at most about so many points: of each stretch the lowest and the highest, in their order, or its gap."""
    if len(points) <= most:
        return points
    indices: list[int] = []
    for stretch in np.array_split(np.arange(len(points)), most // 2):
        y = points[stretch, 1]
        # Without a number in it, any place of a stretch interrupts the curve.
        extremes = (np.nanargmin(y), np.nanargmax(y)) if np.isfinite(y).any() else (0,)
        indices += sorted({int(stretch[index]) for index in extremes})
    return points[indices]


def _bulk(heights: _Floats) -> _Floats:
    """Return all heights, or most of them if a few outliers would flatten the curve."""
    low, middle, high = np.quantile(heights, (0.25, 0.5, 0.75))
    reach = max(3 * (high - low), 0.5 * abs(middle))
    if np.ptp(heights) > 2 * (high - low + 2 * reach) > 0:
        return heights[(heights >= low - reach) & (heights <= high + reach)]
    return heights


def _summary(chart: Chart, curves: Sequence[tuple[Curve, _Floats]]) -> str:
    """Describe the chart in words, for readers without the picture."""
    parts = []
    for curve, points in curves:
        finite = points[np.isfinite(points[:, 1])]
        (start, first), (end, last) = finite[[0, -1]]
        low, high = finite[:, 1].min(), finite[:, 1].max()
        text = f"from {first:.4g} at {start:g} to {last:.4g} at {end:g}, lowest {low:.4g}, highest {high:.4g}"
        parts.append(f"{curve.name}: {minus(text)}")
    marks = f" Marked: {counted(len(chart.restarts), 'restart')}." if len(chart.restarts) else ""
    return f"{chart.y_label} against {chart.x_label}. {'; '.join(parts)}.{marks}"


def _table(chart: Chart, curves: Sequence[tuple[Curve, _Floats]]) -> Html:
    """Return a few rows of each curve, evenly spread; all rows where the places have names."""
    rows = []
    for curve, points in curves:
        count = len(points) if chart.names else min(len(points), _MOST_ROWS)
        for x, y in points[np.linspace(0, len(points) - 1, count).round().astype(int)].tolist():
            rows.append([curve.name, chart.names[round(x)] if chart.names else f"{x:g}", written(y, ".4g")])
    return table(["curve", chart.x_label, chart.y_label], rows, caption=f"{chart.title}: some of its points.")
