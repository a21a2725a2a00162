"""Line charts as SVG that follow the page's light or dark colours, in two widths, each with its numbers as csv.

They are drawn here rather than by matplotlib, so that every report has them, text stays text, and a phone gets a chart
of its own width. Colours, strokes and markers are those of all figures (`twophase.figures.style.look`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.base.files import table_text
from twophase.figures.style import look
from twophase.report.page import Html, counted, download, join, minus, tag
from twophase.runs.record import LARGEST

MOST_POINTS = 600
"""Points of a curve that are drawn; of more, the lowest and highest of each stretch."""
_MARK_ROOM = 6
"""Units of a picture's width that a mark needs, so that marks do not run into each other."""
_MOST_ROWS = 5_000
_SIZES = {"broad": (720, 300), "narrow": (340, 270)}
"""Width and height of each picture, by the class that `page.css` shows on screens of some width."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 10, 10, 58
_SHAPES = {
    "o": "M-3.2,0a3.2,3.2 0 1,0 6.4,0a3.2,3.2 0 1,0 -6.4,0z",
    "s": "M-3,-3h6v6h-6z",
    "^": "M0,-3.8L3.5,2.6H-3.5z",
    "D": "M0,-4L4,0L0,4L-4,0z",
    "v": "M0,3.8L3.5,-2.6H-3.5z",
    "P": "M-1.2,-3.6h2.4v2.4h2.4v2.4h-2.4v2.4h-2.4v-2.4h-2.4v-2.4h2.4z",
    "X": "M-3.4,-2L-2,-3.4L0,-1.4L2,-3.4L3.4,-2L1.4,0L3.4,2L2,3.4L0,1.4L-2,3.4L-3.4,2L-1.4,0z",
    "*": "M0,-4L1.2,-1.2H4L1.8,.6L2.6,3.6L0,1.8L-2.6,3.6L-1.8,.6L-4,-1.2H-1.2z",
}
_DASHES = {"-": "", "--": "7 4", "-.": "8 3 2 3", ":": "2 3"}

_Points = NDArray[np.float64]
_Named = tuple[str, _Points]
_Axes = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart: its name with the unit, and its points; nan interrupts it."""

    name: str
    x: ArrayLike
    y: ArrayLike


@dataclass(frozen=True, slots=True)
class Chart:
    """What a chart shows.

    Args:
        name: of its csv file, without ending.
        title: what it shows, for the caption.
        x_label, y_label: with units.
        curves: at most eight.
        log: a logarithmic vertical axis; numbers that are not positive are then left out.
        restarts: places of restarts on the horizontal axis.
        syncs: places of the outer steps on the horizontal axis.
        levels: horizontal lines, by their names.
        note: a sentence for the caption.
        counts: the vertical axis counts things; the horizontal one always does.
        bulk: end the vertical axis where most points do, if a few lie far beyond.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    log: bool = False
    restarts: Sequence[float] = ()
    syncs: Sequence[float] = ()
    levels: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    counts: bool = False
    bulk: bool = False


def figure(chart: Chart) -> Html | None:
    """Return the chart as a figure with caption, legend and its csv; None where it has no number to show."""
    curves = [(curve.name, _points(curve, log=chart.log)) for curve in chart.curves]
    curves = [(name, points) for name, points in curves if np.isfinite(points[:, 1]).any()]
    if not curves:
        return None
    heights = np.concatenate([points[np.isfinite(points[:, 1]), 1] for _, points in curves])
    ends = _bulk(heights) if chart.bulk else None
    longest = max(len(points) for _, points in curves)
    remarks = [chart.note] if chart.note else []
    if longest > MOST_POINTS:
        remarks.append(f"Of {longest:,} points the extremes of each stretch are drawn.")
    if ends is not None:
        beyond = int(((heights < ends[0]) | (heights > ends[1])).sum())
        farthest = heights[np.argmax(np.abs(heights - np.median(heights)))]
        remarks.append(
            f"Beyond the axis: {beyond:,} of {counted(len(heights), 'point')}, as far as {_tick_text(farthest)}; the "
            "csv has them."
        )
    if max(len(chart.syncs), len(chart.restarts)) > _room(_SIZES["broad"][0]):
        remarks.append("Only so many marks are drawn that they do not touch.")
    if longest > _MOST_ROWS:
        remarks.append(f"The csv has one point in {math.ceil(longest / _MOST_ROWS)}.")
    axes = _axes(chart, curves, ends or (heights.min(), heights.max()))
    drawn = [_thinned(points) for _, points in curves]
    summary = _summary(chart, curves)
    caption = tag(
        "figcaption",
        tag("strong", f"{chart.title}. "),
        *(f"{remark} " for remark in remarks),
        download("Numbers (csv)", f"{chart.name}.csv", _numbers(chart, curves)),
    )
    return tag(
        "figure",
        *(_picture(chart, drawn, axes, name, summary=summary, cut=ends is not None) for name in _SIZES),
        _legend(chart, [name for name, _ in curves]),
        caption,
    )


# ----------------------------------------------------------------------------------------------------------- numbers


def _points(curve: Curve, *, log: bool) -> _Points:
    """Return the points of a curve as rows of x and y; nan where the picture has no place for y."""
    x, y = np.asarray(curve.x, dtype=np.float64), np.array(curve.y, dtype=np.float64)
    # No quantity of a run is beyond these; differences and powers of ten of such numbers would overflow.
    y[~(np.abs(y) <= LARGEST)] = np.nan
    y[np.abs(y) < 1 / LARGEST] = 0
    if log:
        y[~(y > 0)] = np.nan
    return np.stack([x, y], axis=1)[np.abs(x) <= LARGEST]


def _thinned(points: _Points) -> _Points:
    """Return at most about `MOST_POINTS` points: of each stretch the lowest and the highest, in their order."""
    if len(points) <= MOST_POINTS:
        return points
    places: list[int] = []
    for stretch in np.array_split(np.arange(len(points)), MOST_POINTS // 2):
        y = points[stretch, 1]
        if np.isfinite(y).any():
            places += sorted({int(stretch[np.nanargmin(y)]), int(stretch[np.nanargmax(y)])})
    return points[places]


def _bulk(heights: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the ends of an axis that shows most of some numbers; None where all of them fit well enough."""
    quarter, three = np.quantile(heights, (0.25, 0.75))
    reach = max(3 * (three - quarter), 0.5 * abs(float(np.median(heights))))
    inside = heights[(heights >= quarter - reach) & (heights <= three + reach)]
    span = three - quarter + 2 * reach
    return (inside.min(), inside.max()) if heights.max() - heights.min() > 2 * span > 0 else None


def _axes(chart: Chart, curves: Sequence[_Named], ends: tuple[float, float]) -> _Axes:
    """Return the ends of both axes, with some room; of a logarithmic one the exponents."""
    levels = [value for value in chart.levels.values() if value > 0 or not chart.log]
    low, high = min([*ends, *levels]), max([*ends, *levels])
    if chart.log:
        low, high = math.log10(low), math.log10(high)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    if chart.counts:
        room = max(room, 1.0)
    x = np.concatenate([points[:, 0] for _, points in curves])
    alone = float(x.min() == x.max())  # a single place is put in the middle
    return (float(x.min()) - alone, float(x.max()) + alone), (low - room, high + room)


def _summary(chart: Chart, curves: Sequence[_Named]) -> str:
    """Describe the chart in words, for readers without the picture."""
    parts = []
    for name, points in curves:
        shown = points[np.isfinite(points[:, 1])]
        (start, first), (end, last) = shown[[0, -1]]
        low, high = shown[:, 1].min(), shown[:, 1].max()
        words = f"from {first:.4g} at {start:g} to {last:.4g} at {end:g}, lowest {low:.4g}, highest {high:.4g}"
        parts.append(f"{name}: {minus(words)}")
    marks = f" Marked: {counted(len(chart.restarts), 'restart')}." if len(chart.restarts) else ""
    return f"{chart.y_label} against {chart.x_label}. {'; '.join(parts)}.{marks}"


def _numbers(chart: Chart, curves: Sequence[_Named]) -> str:
    rows: list[dict[str, object]] = []
    for name, points in curves:
        # A spreadsheet takes a text that begins like this for a formula, and the name may be from a file.
        text = f"'{name}" if name.startswith(("=", "+", "-", "@", "\t")) else name
        step = math.ceil(len(points) / _MOST_ROWS)
        rows += [{"series": text, chart.x_label: x, chart.y_label: y} for x, y in points[::step].tolist()]
    rows += [{"series": "restart", chart.x_label: float(x)} for x in chart.restarts[:_MOST_ROWS]]
    return table_text(rows)


# ----------------------------------------------------------------------------------------------------------- drawing


def _picture(chart: Chart, curves: Sequence[_Points], axes: _Axes, name: str, *, summary: str, cut: bool) -> Html:
    width, height = _SIZES[name]
    right, bottom = width - _RIGHT, height - _BOTTOM
    (start, stop), (low, high) = axes

    def x_of(value: float) -> float:
        return _LEFT + min(max((value - start) / (stop - start), 0.0), 1.0) * (right - _LEFT)

    def y_of(value: float) -> float:
        share = ((math.log10(value) if chart.log else value) - low) / (high - low)
        # What is cut off needs no exact place, and a large one breaks drawings.
        return bottom - min(max(share, -9.0), 10.0) * (bottom - _TOP)

    grid = []
    for value in _log_ticks(low, high) if chart.log else _ticks(low, high, 5, whole=chart.counts):
        grid.append(f'<path class="g" d="M{_LEFT},{y_of(value):.1f}H{right}"/>')
        grid.append(_text(_LEFT - 6, y_of(value) + 4, _tick_text(value), "end"))
    for value in _ticks(start, stop, 7 if width > 500 else 4, whole=True):
        grid.append(f'<path class="a" d="M{x_of(value):.1f},{bottom}v4"/>')
        grid.append(_text(x_of(value), bottom + 18, _tick_text(value), "middle"))
    middle = (_TOP + bottom) / 2
    grid.append(f'<path class="a" d="M{_LEFT},{_TOP}V{bottom}H{right}"/>')
    grid.append(_text((width + _LEFT) / 2, height - 18, chart.x_label, "middle"))
    grid.append(_text(14, middle, chart.y_label, "middle", f' transform="rotate(-90 14 {middle:.0f})"'))
    grid += [f'<path class="a" d="M{x_of(x):.1f},{bottom}v-5"/>' for x in _spread(chart.syncs, width)]
    for place in (f"{x_of(x):.1f}" for x in _spread(chart.restarts, width)):
        grid.append(f'<path class="r" d="M{place},{_TOP}V{bottom}"/>')
        grid.append(f'<path class="tri" d="M{place},{bottom - 9}l4,8h-8z"/>')

    identity = f"{chart.name}-{name}"
    lines = []
    for number, points in enumerate(curves):
        places = [None if math.isnan(y) else (x_of(x), y_of(y)) for x, y in points.tolist()]
        lines.append(Html(_line(number, places, markers=len(curves) > 1)))
    if cut:
        shape = tag("rect", x=_LEFT, y=_TOP, width=right - _LEFT, height=bottom - _TOP)
        clip = tag("clipPath", shape, id=f"{identity}-c")
        lines = [clip, tag("g", *lines, clip_path=f"url(#{identity}-c)")]
    levels = [
        f'<path {_stroke(number)} d="M{_LEFT},{y_of(value):.1f}H{right}"/>'
        for number, value in enumerate(chart.levels.values(), start=len(curves))
        if value > 0 or not chart.log
    ]
    return tag(
        "svg",
        tag("title", chart.title, id=f"{identity}-t"),
        tag("desc", summary, id=f"{identity}-d"),
        Html("".join(grid)),
        *lines,
        Html("".join(levels)),
        class_=name,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_labelledby=f"{identity}-t {identity}-d",
    )


def _room(width: int) -> int:
    """Return how many marks a picture of this width has room for."""
    return (width - _LEFT - _RIGHT) // _MARK_ROOM


def _spread(places: Sequence[float], width: int) -> Sequence[float]:
    """Return as many places of marks, evenly spread, as have room."""
    return places[:: max(1, math.ceil(len(places) / _room(width)))]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    words = join([text])
    return f'<text class="t" x="{x:.1f}" y="{y:.1f}" font-size="13" text-anchor="{anchor}"{more}>{words}</text>'


def _line(number: int, places: Sequence[tuple[float, float] | None], *, markers: bool) -> str:
    """Return a curve, interrupted where a place is None, with markers on about nine of its points."""
    steps = [
        f"{'L' if before else 'M'}{place[0]:.1f},{place[1]:.1f}"
        for before, place in itertools.pairwise([None, *places])
        if place
    ]
    shown = [place for place in places if place]
    every = max(1, len(shown) // 9)
    marked = shown[(number * every // 8) % every :: every] if markers or len(shown) == 1 else []
    marks = [_marker(number, f"{x:.1f} {y:.1f}") for x, y in marked]
    return "".join([f'<path {_stroke(number)} d="{"".join(steps)}"/>', *marks])


def _stroke(number: int) -> str:
    style = look(number)["linestyle"]
    dash = _DASHES[style] if isinstance(style, str) else " ".join(f"{1.6 * part:g}" for part in style[1])
    return f'class="l k{number % 8}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _marker(number: int, place: str) -> str:
    shape = _SHAPES[look(number, every=1)["marker"]]
    return f'<path class="f{number % 8}" transform="translate({place})" d="{shape}"/>'


def _legend(chart: Chart, names: Sequence[str]) -> Html:
    swatches = []
    for number, name in enumerate([*names, *chart.levels]):
        marker = _marker(number, "19 6") if number < len(names) and len(names) > 1 else ""
        swatches.append((f'<path {_stroke(number)} d="M1,6H37"/>{marker}', name))
    if len(chart.syncs):
        swatches.append(('<path class="a" d="M5,11v-6M19,11v-6M33,11v-6M1,11H37"/>', "sync (outer step)"))
    if len(chart.restarts):
        swatches.append(('<path class="tri" d="M19,1l5,10h-10z"/>', "restart"))
    entries = (
        tag("li", Html(f'<svg viewBox="0 0 38 12" aria-hidden="true">{picture}</svg>'), name)
        for picture, name in swatches
    )
    return tag("ul", *entries, class_="legend")


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return round numbers between two ends; whole ones where things are counted."""
    rough = max((high - low) / most, 1.0 if whole else 0.0)
    size = 10 ** math.floor(math.log10(rough))
    factors = (1, 2, 5) if whole else (1, 2, 2.5, 5)
    step = next((size * factor for factor in factors if size * factor >= rough), 10 * size)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two powers of ten, given by their exponents."""
    exponents = range(math.floor(low), math.ceil(high) + 1)
    inside: list[float] = []
    for mantissas in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        if len(inside) < 4:
            numbers = [mantissa * 10.0**exponent for exponent in exponents for mantissa in mantissas]
            inside = [number for number in numbers if low <= math.log10(number) <= high]
    if len(inside) < 2:
        return [10**exponent for exponent in _ticks(low, high, 4)]
    return inside[:: math.ceil(len(inside) / 7)]


def _tick_text(value: float) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.2e}".split("e")
        return minus(f"{float(mantissa):g}e{int(exponent)}")
    return minus(f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}")
