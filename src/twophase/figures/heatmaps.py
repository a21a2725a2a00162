"""Grids of heatmaps on one colour scale, as `.png`, `.pdf` and the `.csv` of what they show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twophase.figures.matplotlib_types import Axes, Figure, ScalarMappable
from twophase.figures.style import (
    DIVERGED,
    HATCH,
    INK,
    PAPER,
    headline,
    literal,
    log_ticks,
    new_figure,
    rendered,
    styled,
    write_files,
)
from twophase.files import csv_text
from twophase.sweeps.table import Setting, State, readable

WIDEST_RANGE = 3.0
"""The colour scale ends at this multiple of the best value; a blow-up beyond it must not flatten the rest."""
_MISSING = "#d4d4d4"
_MOST_LETTERS = 72
"""Of the ticks of a panel, side by side."""
_WIDE = 12
"""Columns in which a whole word has room."""
# From good to bad, by lightness alone in order: the ends and quarters of matplotlib's viridis, reversed.
_SHADES = ((253, 231, 37), (94, 201, 98), (33, 145, 140), (59, 82, 139), (68, 1, 84))


@dataclass(frozen=True, slots=True)
class Panel:
    """One heatmap, with the values of its axes from left to right and from bottom to top."""

    title: str
    x: Sequence[Any]
    y: Sequence[Any]
    cells: Sequence[Sequence[tuple[State, float | None]]]
    """One row a y value, one cell an x value: its state, and its value if it has finished, else None."""

    def tiles(self) -> list[tuple[int, int, State, float | None]]:
        """Return column, row, state and value of every cell."""
        return [(i, j, *cell) for j, row in enumerate(self.cells) for i, cell in enumerate(row)]


def tile(setting: Setting | None) -> tuple[State, float | None]:
    """Return a setting as a cell of a panel; one that is not there is missing."""
    return (setting.state, setting.result) if setting else ("missing", None)


@dataclass(frozen=True, slots=True)
class Scale:
    """What colours mean, so that several figures can share it: the good end, the bad end, and what is outlined."""

    low: float
    high: float
    bound: float


def scale_of(values: Sequence[float], within: float = 0.25) -> Scale:
    """Return the logarithmic colour scale of positive values, from the best to the worst or to 3 times the best."""
    if not values:
        return Scale(1.0, 2.0, -math.inf)
    low, high = min(values), max(values)
    # Equal values, or nearly: a scale of no width has no colours.
    return Scale(low, max(min(high, WIDEST_RANGE * low), 1.05 * low), low * (1 + within))


@dataclass(frozen=True, slots=True)
class Heatmaps:
    """Rows of heatmaps on one logarithmic colour scale; lower is better.

    Every finished cell shows its number; diverged cells are hatched, cells without a result grey, and the region within
    the scale's bound is outlined. Title and reading are those of `headline`; the note stands below the panels.
    """

    panels: Sequence[Sequence[Panel]]
    """Rows of one length, at least one."""
    x_label: str
    y_label: str
    colour_label: str
    title: str
    reading: str = ""
    note: str = ""
    scale: Scale | None = None
    """That of everything that the panels show when None."""

    def draw(self) -> Figure:
        """Draw them, in the present style."""
        scale = self._scale()
        figure, colours = _draw(self.panels, scale, self.x_label, self.y_label)
        draw_colour_bar(figure, colours, scale, self.colour_label, max(self._values(), default=0.0))
        reading = f"{self.reading and '; '}{self.reading}"
        headline(figure, self.title, f"{self.colour_label}, lower is better and lighter{reading}")
        figure.supxlabel(self.note, fontsize=7.5, color="#444444")
        return figure

    def write(self, path_stem: Path) -> list[Path]:
        """Write `.png`, `.pdf` and the `.csv` of what they show, the same bytes for the same panels and words."""
        with styled():
            pictures = rendered(self.draw())
        bound = self._scale().bound
        rows = [
            {
                "panel": panel.title,
                self.x_label: _setting_text(panel.x[i]),
                self.y_label: _setting_text(panel.y[j]),
                "value": None if value is None else repr(value),
                "state": state,
                "outlined": value is not None and value <= bound,
            }
            for panel in itertools.chain(*self.panels)
            for i, j, state, value in panel.tiles()
        ]
        return write_files(path_stem, pictures | {".csv": csv_text(rows)})

    def _scale(self) -> Scale:
        return self.scale or scale_of(self._values())

    def _values(self) -> list[float]:
        return [value for row in self.panels for panel in row for *_, value in panel.tiles() if value is not None]


def _draw(panels: Sequence[Sequence[Panel]], scale: Scale, x_label: str, y_label: str) -> tuple[Figure, ScalarMappable]:
    heights = [max(len(panel.y) for panel in row) for row in panels]
    labels = [_setting_text(value) for row in panels for panel in row for value in panel.x]
    # Names, such as those of methods, stand upright where they would run into one another.
    upright = max(sum(map(len, map(_setting_text, panel.x))) for row in panels for panel in row) > _MOST_LETTERS
    height = 1.2 + sum(0.35 + 0.26 * max(n, 3) for n in heights) + upright * 0.07 * max(map(len, labels))
    figure, grid = new_figure(height, len(panels), len(panels[0]), gridspec_kw={"height_ratios": heights})
    colours = colours_of(scale)
    for j, row in enumerate(panels):
        for i, panel in enumerate(row):
            axes: Axes = grid[j, i]
            draw_tiles(axes, panel.tiles(), colours=colours, bound=scale.bound)
            axes.set(title=literal(panel.title))
            below = panels[j + 1][i].x if j + 1 < len(panels) else None
            axes.set_xticks(range(len(panel.x)), _ticks(panel.x, below))
            if upright:
                axes.tick_params(axis="x", rotation=90)
            before = row[i - 1].y if i else None
            axes.set_yticks(range(len(panel.y)), _ticks(panel.y, before))
    for axes in grid[-1]:
        axes.set_xlabel(x_label)
    for axes in grid[:, 0]:
        axes.set_ylabel(y_label)
    return figure, colours


def colours_of(scale: Scale) -> ScalarMappable:
    """Return the colours of all heatmaps: light is good; lightness alone orders the values, also in grey."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415 - an extra, see style.py
    from matplotlib.colors import LogNorm  # noqa: PLC0415

    return ScalarMappable(LogNorm(scale.low, scale.high), "viridis_r")


def draw_tiles(
    axes: Axes,
    cells: Sequence[tuple[int, int, State | None, float | None]],
    *,
    colours: ScalarMappable,
    bound: float,
    size: float = 7.5,
    mark: Callable[[int, int], str] = lambda _i, _j: "",
) -> None:
    """Draw a heatmap with its numbers: diverged cells hatched, missing cells grey, cells within a bound outlined.

    Cells are column, row, state and value; a state of None is a place where the design has no run. `size` is that of
    the numbers, in points, and `mark` is put behind them. Limits are set to the cells; ticks are left to the caller.
    """
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    inside: set[tuple[int, int]] = set()
    columns, rows = 1 + max(cell[0] for cell in cells), 1 + max(cell[1] for cell in cells)
    for i, j, state, value in cells:
        face, ink, hatch, text = _MISSING, INK, None, str(state) if columns <= _WIDE else "miss."
        if value is not None:
            face = colours.to_rgba(value)  # type: ignore[arg-type] - it takes a number too, which its stub does not say
            ink, text = readable_on([*face]), readable(value) + mark(i, j)
            inside |= {(i, j)} if value <= bound else set()
        elif state == "diverged":
            face, hatch, text = DIVERGED, "//////", "div."
        elif state is None:
            face, text = PAPER, "\N{EN DASH}"
        axes.add_patch(Rectangle((i - 0.5, j - 0.5), 1, 1, facecolor=face, hatch=hatch, edgecolor=HATCH, linewidth=0))
        label = axes.text(i, j, text, color=ink, ha="center", va="center_baseline", fontsize=size, in_layout=False)
        if hatch:
            label.set_bbox({"facecolor": DIVERGED, "edgecolor": "none", "pad": size / 6})
        elif value is None:
            label.set(fontsize=size - 1, fontstyle="italic", color="#555555")
    for i in range(1, columns):
        axes.axvline(i - 0.5, color=PAPER, linewidth=size / 9)
    for j in range(1, rows):
        axes.axhline(j - 0.5, color=PAPER, linewidth=size / 9)
    for i, j in inside:
        for di, dj in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            if (i + di, j + dj) not in inside:
                x, y = i + di / 2, j + dj / 2
                ends = ([x - abs(dj) / 2, x + abs(dj) / 2], [y - abs(di) / 2, y + abs(di) / 2])
                axes.plot(*ends, color=INK, linewidth=size / 4.7, solid_capstyle="projecting", clip_on=False, zorder=5)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(-0.5, rows - 0.5))
    axes.tick_params(length=0, pad=3)
    axes.spines[:].set_visible(False)


def draw_colour_bar(figure: Figure, colours: ScalarMappable, scale: Scale, label: str, worst: float) -> None:
    """Draw a page's colour bar, with the scale's bound if it lies inside; its tip says that `worst` lies beyond."""
    clipped = worst > scale.high * (1 + 1e-9)
    layout: dict[str, Any] = {"ax": figure.axes, "aspect": 32, "fraction": 0.05, "pad": 0.02}
    bar = figure.colorbar(colours, extend="max" if clipped else "neither", **layout)
    ticks = log_ticks(scale.low, scale.high)
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.minorticks_off()
    bar.outline.set_visible(False)  # type: ignore[operator] - a spine, which the stubs take for a callable
    bar.ax.tick_params(length=2, width=0.6)
    if scale.low < scale.bound < scale.high:
        bar.ax.axhline(scale.bound, color=INK, linewidth=1.6)
    end = f"; colours end at {readable(scale.high)}" if clipped else ""
    bar.set_label(f"{label}\nlower is better (log scale{end})")  # a figure of one row is lower than one line is long


def shade(value: float, scale: Scale) -> tuple[tuple[int, int, int], str]:
    """Return ground (red, green and blue, 0 to 255) and ink of a cell where nothing is plotted, near `colours_of`'s."""
    share = math.log(value / scale.low) / math.log(scale.high / scale.low)
    stops = np.linspace(0, 1, len(_SHADES))
    red, green, blue = (round(float(np.interp(share, stops, channel))) for channel in zip(*_SHADES, strict=True))
    return (red, green, blue), readable_on([red / 255, green / 255, blue / 255])


def readable_on(colour: Sequence[float]) -> str:
    """Choose dark or white ink by the higher contrast ratio (WCAG 2) with red, green and blue in [0, 1]."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return PAPER if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else INK


def _ticks(values: Sequence[Any], neighbours: Sequence[Any] | None) -> list[str]:
    """Return the texts at a panel's ticks; none where a neighbour has the same values and shows them."""
    return [] if values == neighbours else [literal(_setting_text(value)) for value in values]


def _setting_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)
