"""Line charts as SVG that follow the page's light or dark colours and its width, each with its numbers as csv.

They are drawn here rather than by matplotlib, so that every report has them and text stays text. Colours and strokes
are those of all figures (`twophase.figures.style.look`). A picture is 1000 units wide and high and stretched to its
place by the browser; `page.css` keeps strokes and texts from being stretched with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.base.files import table_text
from twophase.figures.style import log_ticks, look
from twophase.report.page import Html, counted, download, join, minus, tag
from twophase.runs.record import LARGEST

MOST_POINTS = 600
"""Points of a curve that are drawn; of more, the lowest and highest of each stretch."""
_MOST_MARKS = 60
"""Syncs or restarts of a chart that are marked; more would run into each other."""
_MOST_ROWS = 5_000
_DASHES = {"-": "", "--": "7 4", "-.": "8 3 2 3", ":": "2 3"}
_Floats = NDArray[np.float64]


class Curve(NamedTuple):
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
        x_label, y_label: with units; the horizontal axis counts rounds or steps.
        curves: at most eight.
        log: a logarithmic vertical axis; numbers that are not positive are then left out.
        restarts: places of restarts on the horizontal axis.
        syncs: places of the outer steps on the horizontal axis.
        level: a horizontal line, by its name; not on a logarithmic axis.
        note: a sentence for the caption.
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
    level: tuple[str, float] | None = None
    note: str = ""
    bulk: bool = False


def figure(chart: Chart) -> Html | None:
    """Return the chart as a figure with caption, legend and its csv; None where it has no number to show."""
    curves = [(curve.name, _points(curve, log=chart.log)) for curve in chart.curves]
    curves = [(name, points) for name, points in curves if np.isfinite(points[:, 1]).any()]
    if not curves:
        return None
    heights = np.concatenate([points[:, 1] for _, points in curves])
    heights = heights[np.isfinite(heights)]
    shown = _bulk(heights) if chart.bulk else heights
    longest = max(len(points) for _, points in curves)
    remarks = [chart.note] if chart.note else []
    if longest > MOST_POINTS:
        remarks.append(f"Of {longest:,} points the extremes of each stretch are drawn.")
    if beyond := len(heights) - len(shown):
        farthest = heights[np.argmax(np.abs(heights - np.median(heights)))]
        remarks.append(
            f"Beyond the axis: {beyond:,} of {counted(len(heights), 'point')}, as far as {_tick_text(farthest)}; the "
            "csv has them."
        )
    if max(len(chart.syncs), len(chart.restarts)) > _MOST_MARKS:
        remarks.append("Only so many marks are drawn that they do not touch.")
    if longest > _MOST_ROWS:
        remarks.append(f"The csv has one point in {math.ceil(longest / _MOST_ROWS)}.")
    return tag(
        "figure",
        _picture(chart, curves, shown),
        _legend(chart, [name for name, _ in curves]),
        tag(
            "figcaption",
            tag("strong", f"{chart.title}. "),
            *(f"{remark} " for remark in remarks),
            download("Numbers (csv)", f"{chart.name}.csv", _numbers(chart, curves)),
        ),
    )


# ----------------------------------------------------------------------------------------------------------- numbers


def _points(curve: Curve, *, log: bool) -> _Floats:
    """Return the points of a curve as rows of x and y; nan where the picture has no place for y."""
    x, y = np.asarray(curve.x, dtype=np.float64), np.array(curve.y, dtype=np.float64)
    # No quantity of a run is beyond these; differences and powers of ten of such numbers would overflow.
    y[~(np.abs(y) <= LARGEST)] = np.nan
    y[np.abs(y) < 1 / LARGEST] = 0
    if log:
        y[~(y > 0)] = np.nan
    return np.stack([x, y], axis=1)[np.abs(x) <= LARGEST]


def _thinned(points: _Floats) -> _Floats:
    """Return at most about `MOST_POINTS` points: of each stretch the lowest and the highest, in their order."""
    if len(points) <= MOST_POINTS:
        return points
    places: list[int] = []
    for stretch in np.array_split(np.arange(len(points)), MOST_POINTS // 2):
        y = points[stretch, 1]
        if np.isfinite(y).any():
            places += sorted({int(stretch[np.nanargmin(y)]), int(stretch[np.nanargmax(y)])})
    return points[places]


def _bulk(heights: _Floats) -> _Floats:
    """Return all heights, or most of them if a few lie so far away that the others would be a flat line."""
    low, middle, high = np.quantile(heights, (0.25, 0.5, 0.75))
    reach = max(3 * (high - low), 0.5 * abs(middle))
    if np.ptp(heights) > 2 * (high - low + 2 * reach) > 0:
        return heights[(heights >= low - reach) & (heights <= high + reach)]
    return heights


def _vertical_ends(chart: Chart, heights: _Floats, *, least_room: float) -> tuple[float, float]:
    """Return the ends of the vertical axis, with some room; of a logarithmic one the exponents."""
    level = chart.level[1] if chart.level else heights[0]
    low, high = float(min(heights.min(), level)), float(max(heights.max(), level))
    if chart.log:
        low, high, least_room = math.log10(low), math.log10(high), 0.0
    room = max(0.06 * (high - low) or 0.05 * abs(high) or 0.5, least_room)
    return low - room, high + room


def _summary(chart: Chart, curves: Sequence[tuple[str, _Floats]]) -> str:
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


def _numbers(chart: Chart, curves: Sequence[tuple[str, _Floats]]) -> str:
    rows: list[dict[str, object]] = []
    for name, points in curves:
        # A spreadsheet takes a text that begins like this for a formula, and the name may be from a file.
        text = f"'{name}" if name.startswith(("=", "+", "-", "@", "\t")) else name
        step = math.ceil(len(points) / _MOST_ROWS)
        rows += [{"series": text, chart.x_label: x, chart.y_label: y} for x, y in points[::step].tolist()]
    rows += [{"series": "restart", chart.x_label: float(x)} for x in chart.restarts[:_MOST_ROWS]]
    return table_text(rows)


# ----------------------------------------------------------------------------------------------------------- drawing


def _picture(chart: Chart, curves: Sequence[tuple[str, _Floats]], heights: _Floats) -> Html:
    """Return the curves with their axes, of which the vertical one shows the heights."""
    every = [points for _, points in curves]
    x = np.concatenate(every)[:, 0]
    alone = float(x.min() == x.max())  # a single place is put in the middle
    start, stop = float(x.min()) - alone, float(x.max()) + alone
    is_count = bool((heights % 1 == 0).all())
    low, high = _vertical_ends(chart, heights, least_room=1.0 if is_count else 0.0)

    def x_of(values: ArrayLike) -> _Floats:
        return 1000 * np.clip((np.asarray(values) - start) / (stop - start), 0, 1)

    def y_of(values: ArrayLike) -> _Floats:
        shares = ((np.log10(values) if chart.log else np.asarray(values)) - low) / (high - low)
        # What is cut off needs no exact place, and a large one breaks drawings.
        return 1000 - 1000 * np.clip(shares, -9, 10)

    def strokes(kind: str, template: str, places: _Floats) -> Html:
        some = places[:: max(1, math.ceil(len(places) / _MOST_MARKS))]
        return Html(f'<path class="{kind}" d="{"".join(map(template.format, some))}"/>')

    def texts(kind: str, side: str, ticks: Sequence[float], places: _Floats) -> list[Html]:
        styles = (f"{side}:{place / 10:.1f}%" for place in places)
        return [
            tag("span", _tick_text(tick), class_=kind, style=style) for tick, style in zip(ticks, styles, strict=True)
        ]

    x_ticks = _ticks(start, stop, whole=True)
    y_ticks = _log_ticks(low, high) if chart.log else _ticks(low, high, whole=is_count)
    lines = [np.stack([x_of(points[:, 0]), y_of(points[:, 1])]) for points in map(_thinned, every)]
    if chart.level:
        lines.append(np.stack([x_of([start, stop]), y_of([chart.level[1]] * 2)]))
    picture = tag(
        "svg",
        strokes("g", "M0,{:.1f}H1000", y_of(y_ticks)),
        strokes("a", "M{:.1f},1000v-25", x_of(chart.syncs)),
        strokes("r", "M{:.1f},0V1000", x_of(chart.restarts)),
        *(_line(number, *line) for number, line in enumerate(lines)),
        viewBox="0 0 1000 1000",
        preserveAspectRatio="none",
    )
    return tag(
        "div",
        picture,
        *texts("x", "left", x_ticks, x_of(x_ticks)),
        *texts("y", "top", y_ticks, y_of(y_ticks)),
        tag("span", chart.x_label, class_="across"),
        tag("span", chart.y_label, class_="up"),
        class_="chart",
        role="img",
        aria_label=f"{chart.title}. {_summary(chart, curves)}",
    )


def _line(number: int, x: _Floats, y: _Floats) -> Html:
    """Return a curve, interrupted where y is nan; a point between two gaps is a dot."""
    shown = np.isfinite(y)
    before, after = np.append(False, shown[:-1]), np.append(shown[1:], False)
    steps = zip(np.where(before, "L", "M")[shown], x[shown], y[shown], strict=True)
    line = "".join(f"{start}{across:.1f},{up:.1f}" for start, across, up in steps)
    alone = shown & ~before & ~after
    dots = "".join(f"M{across:.1f},{up:.1f}h0" for across, up in zip(x[alone], y[alone], strict=True))
    path = Html(f'<path {_stroke(number)} d="{line}"/>')
    return join([path, Html(f'<path class="d k{number % 8}" d="{dots}"/>')]) if dots else path


def _stroke(number: int) -> str:
    style = look(number)["linestyle"]
    dash = _DASHES[style] if isinstance(style, str) else " ".join(f"{1.6 * part:g}" for part in style[1])
    return f'class="l k{number % 8}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _legend(chart: Chart, names: Sequence[str]) -> Html:
    """Return the names of curves, level and marks, each beside its stroke."""
    lines = [*names, *(chart.level or ())[:1]]
    swatches = [(f'{_stroke(number)} d="M1,6H37"', name) for number, name in enumerate(lines)]
    if len(chart.syncs):
        swatches.append(('class="a" d="M5,11v-6M19,11v-6M33,11v-6M1,11H37"', "sync (outer step)"))
    if len(chart.restarts):
        swatches.append(('class="r" d="M19,0V12"', "restart"))
    entries = (
        tag("li", Html(f'<svg viewBox="0 0 38 12" aria-hidden="true"><path {path}/></svg>'), name)
        for path, name in swatches
    )
    return tag("ul", *entries, class_="legend")


def _ticks(low: float, high: float, *, whole: bool) -> list[float]:
    """Return at most about five round numbers between two ends; whole ones where things are counted."""
    rough = max((high - low) / 5, 1.0 if whole else 0.0)
    size = 10 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next((size * factor for factor in factors if size * factor >= rough), 10 * size)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return at most seven round numbers between two powers of ten, given by their exponents."""
    ticks = log_ticks(10**low, 10**high)
    return ticks[:: math.ceil(len(ticks) / 7)]


def _tick_text(value: float) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.2e}".split("e")
        return minus(f"{float(mantissa):g}e{int(exponent)}")
    return minus(f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}")
