"""Line charts as SVG that follow the page's light or dark colours, in two widths, each with its numbers as csv.

They are drawn here rather than by matplotlib, so that every report has them, text stays text, and a phone gets a chart
of its own width. Colours, strokes and markers are those of all figures (`twophase.figures.style.look`).
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.base.files import DIGITS
from twophase.figures.style import look
from twophase.report.page import Html, clean, counted, download, join, minus, tag
from twophase.runs.record import LARGEST

MOST_POINTS = 600
"""Points of a curve that are drawn; of more, the lowest and highest of each stretch."""
_MARK_ROOM = 6
"""Units of a picture's width that a mark needs, so that marks do not run into each other."""
_MOST_ROWS = 5_000
_WIDE, _NARROW = 720, 340
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


_Points = NDArray[np.float64]


def figure(chart: Chart) -> Html | None:
    """Return the chart as a figure with caption, legend and its csv; None where it has no number to show."""
    curves = [(curve, _points(curve, log=chart.log)) for curve in chart.curves]
    curves = [(curve, points) for curve, points in curves if np.isfinite(points[:, 1]).any()]
    if not curves:
        return None
    drawn = [(curve.name, _thinned(points)) for curve, points in curves]
    heights = np.concatenate([points[np.isfinite(points[:, 1]), 1] for _, points in curves])
    ends = _bulk(heights) if chart.bulk else None
    thinned = [(len(points), len(fewer)) for (_, points), (_, fewer) in zip(curves, drawn, strict=True)]
    said = [chart.note] if chart.note else []
    if any(before > after for before, after in thinned):
        said.append(f"Of {max(before for before, _ in thinned):,} points the extremes of each stretch are drawn.")
    if ends is not None:
        beyond = int(((heights < ends[0]) | (heights > ends[1])).sum())
        said.append(
            f"Beyond the axis: {beyond:,} of {counted(len(heights), 'point')}, as far as "
            f"{_tick_text(_farthest(heights))}; the csv has them."
        )
    if max(len(chart.syncs), len(chart.restarts)) > _marks(_WIDE):
        said.append("Only so many marks are drawn that they do not touch.")
    summary = _summary(chart, curves)
    pictures = [
        _picture(chart, drawn, summary, ends, width=width, height=height, class_=name)
        for width, height, name in ((_WIDE, 300, "broad"), (_NARROW, 270, "narrow"))
    ]
    longest = max(len(points) for _, points in curves)
    if longest > _MOST_ROWS:
        said.append(f"The csv has one point in {math.ceil(longest / _MOST_ROWS)}.")
    caption = tag(
        "figcaption",
        tag("strong", f"{chart.title}. "),
        " ".join(said),
        " " if said else None,
        download("Numbers (csv)", f"{chart.name}.csv", _numbers(chart, curves)),
    )
    return tag("figure", *pictures, _legend(chart, [curve.name for curve, _ in curves]), caption)


def _points(curve: Curve, *, log: bool) -> _Points:
    x, y = np.asarray(curve.x, dtype=np.float64), np.array(curve.y, dtype=np.float64)
    # No quantity of a run is beyond these; differences and powers of ten of such numbers would overflow.
    y[np.abs(y) > LARGEST] = np.nan
    y[np.abs(y) < 1 / LARGEST] = 0
    if log:
        y[~(y > 0)] = np.nan
    plotted = np.abs(x) <= LARGEST
    points = np.stack([x[plotted], y[plotted]], axis=1)
    points[~np.isfinite(points[:, 1]), 1] = np.nan
    return points


def _thinned(points: _Points) -> _Points:
    """Return at most about `MOST_POINTS` points: of each stretch the lowest and the highest, in their order."""
    if len(points) <= MOST_POINTS:
        return points
    places: list[int] = []
    for part in np.array_split(np.arange(len(points)), MOST_POINTS // 2):
        y = points[part, 1]
        if np.isfinite(y).any():
            places += sorted({int(part[np.nanargmin(y)]), int(part[np.nanargmax(y)])})
    return points[places]


def _bulk(heights: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the ends of an axis that shows most of some numbers; None where all of them fit well enough."""
    quarter, three = np.quantile(heights, (0.25, 0.75))
    reach = max(3 * (three - quarter), 0.5 * abs(float(np.median(heights))))
    inside = heights[(heights >= quarter - reach) & (heights <= three + reach)]
    low, high = float(inside.min()), float(inside.max())
    span = three - quarter + 2 * reach
    return (low, high) if heights.max() - heights.min() > 2 * span > 0 else None


def _farthest(heights: NDArray[np.float64]) -> float:
    return float(heights[np.argmax(np.abs(heights - np.median(heights)))])


def _summary(chart: Chart, curves: Sequence[tuple[Curve, _Points]]) -> str:
    """Describe the chart in words, for readers without the picture."""
    parts = []
    for curve, points in curves:
        shown = points[np.isfinite(points[:, 1])]
        low, high = shown[:, 1].min(), shown[:, 1].max()
        parts.append(
            f"{curve.name}: "
            + minus(
                f"from {shown[0, 1]:.4g} at {shown[0, 0]:g} to {shown[-1, 1]:.4g} at {shown[-1, 0]:g}, "
                f"lowest {low:.4g}, highest {high:.4g}"
            )
        )
    marks = f" Marked: {counted(len(chart.restarts), 'restart')}." if len(chart.restarts) else ""
    return f"{chart.y_label} against {chart.x_label}. {'; '.join(parts)}.{marks}"


def _numbers(chart: Chart, curves: Sequence[tuple[Curve, _Points]]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["series", chart.x_label, chart.y_label])
    for curve, points in curves:
        step = max(1, math.ceil(len(points) / _MOST_ROWS))
        # A spreadsheet takes a text that begins like this for a formula, and the name may be from a file.
        name = f"'{curve.name}" if curve.name.startswith(("=", "+", "-", "@", "\t")) else curve.name
        rows.writerows((name, _digits(x), _digits(y)) for x, y in points[::step].tolist())
    rows.writerows(("restart", _digits(float(x)), "") for x in chart.restarts[:_MOST_ROWS])
    return text.getvalue()


def _digits(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.{DIGITS}g}"


# ------------------------------------------------------------------------------------------------------------ drawing


def _picture(
    chart: Chart,
    curves: Sequence[tuple[str, _Points]],
    summary: str,
    ends: tuple[float, float] | None,
    *,
    width: int,
    height: int,
    class_: str,
) -> Html:
    frame = _Frame.around(chart, [points for _, points in curves], ends, width, height)
    identity = f"{chart.name}-{class_}"
    parts: list[Html] = [
        tag("title", chart.title, id=f"{identity}-t"),
        tag("desc", summary, id=f"{identity}-d"),
        *_axes(chart, frame),
    ]
    bottom = height - _BOTTOM
    parts += [Html(f'<path class="a" d="M{frame.x(x):.1f},{bottom}v-5"/>') for x in _some(chart.syncs, width)]
    for x in _some(chart.restarts, width):
        parts.append(Html(f'<path class="r" d="M{frame.x(x):.1f},{_TOP}V{bottom}"/>'))
        parts.append(Html(f'<path class="tri" d="M{frame.x(x):.1f},{bottom - 9}l4,8h-8z"/>'))
    lines = [
        part for number, (_, points) in enumerate(curves) for part in _line(number, points, frame, len(curves) > 1)
    ]
    if ends is not None:
        shape = tag("rect", x=_LEFT, y=_TOP, width=width - _LEFT - _RIGHT, height=bottom - _TOP)
        parts.append(tag("clipPath", shape, id=f"{identity}-c"))
        lines = [tag("g", *lines, clip_path=f"url(#{identity}-c)")]
    parts += lines
    for offset, value in enumerate(chart.levels.values(), start=len(curves)):
        if chart.log and not value > 0:
            continue
        style = f'stroke-dasharray="{_dash(offset)}"' if _dash(offset) else ""
        parts.append(
            Html(f'<path class="l k{offset % 8}" {style} d="M{_LEFT},{frame.y(value):.1f}H{width - _RIGHT}"/>')
        )
    return tag(
        "svg",
        *parts,
        class_=class_,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_labelledby=f"{identity}-t {identity}-d",
    )


def _marks(width: int) -> int:
    """Return how many marks there is room for."""
    return (width - _LEFT - _RIGHT) // _MARK_ROOM


def _some(places: Sequence[float], width: int) -> Sequence[float]:
    return places[:: max(1, math.ceil(len(places) / _marks(width)))]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where numbers lie on the picture."""

    width: int
    height: int
    low: tuple[float, float]
    high: tuple[float, float]
    log: bool

    @classmethod
    def around(
        cls, chart: Chart, curves: Sequence[_Points], ends: tuple[float, float] | None, width: int, height: int
    ) -> _Frame:
        points = np.concatenate(curves)
        x, y = points[:, 0], points[np.isfinite(points[:, 1]), 1]
        levels = [value for value in chart.levels.values() if math.isfinite(value) and (value > 0 or not chart.log)]
        low, high = ends or (float(y.min()), float(y.max()))
        low, high = min([low, *levels]), max([high, *levels])
        if chart.log:
            low, high = math.log10(low), math.log10(high)
        room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
        if chart.counts:
            room = max(room, 1.0)
        start, stop = float(x.min()), float(x.max())
        if start == stop:
            start, stop = start - 1, stop + 1
        return cls(width, height, (start, low - room), (stop, high + room), chart.log)

    def x(self, value: float) -> float:
        share = (value - self.low[0]) / (self.high[0] - self.low[0])
        return _LEFT + min(max(share, 0.0), 1.0) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        height = math.log10(value) if self.log else value
        share = (height - self.low[1]) / (self.high[1] - self.low[1])
        share = min(max(share, -9.0), 10.0)  # what is cut off needs no exact place, and a large one breaks drawings
        return self.height - _BOTTOM - share * (self.height - _BOTTOM - _TOP)


def _axes(chart: Chart, frame: _Frame) -> Iterator[Html]:
    width, height = frame.width, frame.height
    bottom = height - _BOTTOM
    low, high = frame.low[1], frame.high[1]
    for value in _log_ticks(low, high) if chart.log else _ticks(low, high, 5, whole=chart.counts):
        y = frame.y(value)
        yield Html(f'<path class="g" d="M{_LEFT},{y:.1f}H{width - _RIGHT}"/>')
        yield _text(_LEFT - 6, y + 4, _tick_text(value), "end")
    for value in _ticks(frame.low[0], frame.high[0], 7 if width > 500 else 4, whole=True):
        x = frame.x(value)
        yield Html(f'<path class="a" d="M{x:.1f},{bottom}v4"/>')
        yield _text(x, bottom + 18, _tick_text(value), "middle")
    yield Html(f'<path class="a" d="M{_LEFT},{_TOP}V{bottom}H{width - _RIGHT}"/>')
    yield _text((width + _LEFT) / 2, height - 18, chart.x_label, "middle")
    middle = (_TOP + bottom) / 2
    yield _text(14, middle, chart.y_label, "middle", f' transform="rotate(-90 14 {middle:.0f})"')


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> Html:
    return Html(
        f'<text class="t" x="{x:.1f}" y="{y:.1f}" font-size="13" text-anchor="{anchor}"{more}>{join([text])}</text>'
    )


def _line(number: int, points: _Points, frame: _Frame, markers: bool) -> Iterator[Html]:
    words, pen = [], "M"
    places = []
    for x, y in points.tolist():
        if math.isnan(y):
            pen = "M"
            continue
        place = (frame.x(x), frame.y(y))
        words.append(f"{pen}{place[0]:.1f},{place[1]:.1f}")
        places.append(place)
        pen = "L"
    dash = _dash(number)
    style = f' stroke-dasharray="{dash}"' if dash else ""
    yield Html(f'<path class="l k{number % 8}"{style} d="{"".join(words)}"/>')
    if markers or len(places) == 1:
        shape = _SHAPES[look(number, every=1)["marker"]]
        every = max(1, len(places) // 9)
        for x, y in itertools.islice(places, (number * every // 8) % every, None, every):
            yield Html(f'<path class="f{number % 8}" transform="translate({x:.1f} {y:.1f})" d="{shape}"/>')


def _dash(number: int) -> str:
    stroke = look(number)["linestyle"]
    return _DASHES[stroke] if isinstance(stroke, str) else " ".join(f"{1.6 * part:g}" for part in stroke[1])


def _legend(chart: Chart, names: Sequence[str]) -> Html:
    entries = []
    for number, name in enumerate([*names, *chart.levels]):
        dash = _dash(number)
        style = f' stroke-dasharray="{dash}"' if dash else ""
        shape = _SHAPES[look(number, every=1)["marker"]] if number < len(names) and len(names) > 1 else ""
        picture = Html(
            f'<svg viewBox="0 0 38 12" aria-hidden="true"><path class="l k{number % 8}"{style} d="M1,6H37"/>'
            f'<path class="f{number % 8}" transform="translate(19 6)" d="{shape}"/></svg>'
        )
        entries.append(tag("li", picture, name))
    if len(chart.syncs):
        swatch = (
            '<svg viewBox="0 0 38 12" aria-hidden="true"><path class="a" d="M5,11v-6M19,11v-6M33,11v-6M1,11H37"/></svg>'
        )
        entries.append(tag("li", Html(swatch), "sync (outer step)"))
    if len(chart.restarts):
        swatch = '<svg viewBox="0 0 38 12" aria-hidden="true"><path class="tri" d="M19,1l5,10h-10z"/></svg>'
        entries.append(tag("li", Html(swatch), "restart"))
    return tag("ul", *entries, class_="legend")


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return round numbers between two ends; whole ones where things are counted."""
    rough = max((high - low) / max(most, 1), 1.0 if whole else 0.0)
    size = 10 ** math.floor(math.log10(rough))
    step = next(
        (size * factor for factor in ((1, 2, 5) if whole else (1, 2, 2.5, 5)) if size * factor >= rough), 10 * size
    )
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two powers of ten, given by their exponents."""
    for mantissas in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        exponents = range(math.floor(low), math.ceil(high) + 1)
        inside = [m * 10.0**k for k in exponents for m in mantissas if low <= math.log10(m * 10.0**k) <= high]
        if len(inside) >= 4:
            break
    if len(inside) < 2:
        return [10**height for height in _ticks(low, high, 4)]
    return inside[:: max(1, math.ceil(len(inside) / 7))]


def _tick_text(value: float) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.2e}".split("e")
        return clean(f"{float(mantissa):g}e{int(exponent)}").replace("-", "\N{MINUS SIGN}")
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}") if abs(value) < 1e4 else f"{value:,.0f}"
