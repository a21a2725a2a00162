"""Heatmaps on one colour scale, as a figure; pages and terminals show the same panels in the same colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from twophase.errors import UsageError
from twophase.figures.style import DIVERGED, HATCH, INK, MUTED, PAPER, headline, new_figure
from twophase.sweeps.table import Row, Setting, State, cell_text, measure_of, method_name, readable, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDEST_RANGE = 3.0
"""The colours end at this multiple of the best value; a blow-up beyond it must not flatten the rest."""
MOST_PANELS = 24
"""Panels of one figure or page."""
STATE_WORDS = {"diverged": "div.", "failed": "fail", "missing": "\N{MIDDLE DOT}"}
"""What a cell without a number says."""
# From good to bad, so that lightness alone orders the values: the ends and quarters of matplotlib's viridis, reversed.
_SHADES = np.array([(253, 231, 37), (94, 201, 98), (33, 145, 140), (59, 82, 139), (68, 1, 84)])
_ACROSS = "outer.lr"
_LETTERS = 72  # of tick labels that fit side by side into a figure


class Tile(NamedTuple):
    """What a cell shows: its state, and its value if it has finished. A `Setting` has both, too."""

    state: State
    result: float | None


@dataclass(frozen=True, slots=True)
class Panel:
    """One heatmap, with the values of its axes from left to right and from bottom to top.

    `cells` has a row for each y value, with a cell for each x value; None where the design has no run.
    """

    title: str
    x_label: str
    y_label: str
    x: Sequence[Any]
    y: Sequence[Any]
    cells: Sequence[Sequence[Setting | Tile | None]]


@dataclass(frozen=True, slots=True)
class Scale:
    """What colours mean, logarithmically: the good end, the bad end, and the bound inside of which cells stand out."""

    low: float
    high: float
    bound: float

    def colour(self, value: float) -> tuple[int, int, int]:
        """Return red, green and blue, 0 to 255, of a positive value; lighter is lower."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        red, green, blue = (
            round(float(np.interp(share, np.linspace(0, 1, len(_SHADES)), column))) for column in _SHADES.T
        )
        return red, green, blue

    def ink(self, value: float) -> str:
        """Return the ink, dark or white, that has the higher contrast (WCAG 2) on the colour of a value."""
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in np.array(self.colour(value)) / 255
        ]
        luminance = float(np.dot([0.2126, 0.7152, 0.0722], linear))
        return PAPER if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else INK


def scale_of(values: Sequence[float], within: float = 0.25) -> Scale:
    """Return the colours of positive values, from the best to the worst or to 3 times the best."""
    if not values:
        return Scale(1.0, 2.0, -math.inf)
    low, high = min(values), max(values)
    # Equal values, or nearly: a scale of no width has no colours.
    return Scale(low, max(min(high, WIDEST_RANGE * low), 1.05 * low), low * (1 + within))


def text_of(cell: Setting | Tile | None) -> str:
    """Return what stands in a cell: its number, a word for its state, or a dash where the design has no run."""
    if cell is None:
        return "\N{EN DASH}"
    return STATE_WORDS[cell.state] if cell.result is None else readable(cell.result)


def panels_of(cells: Sequence[Setting]) -> list[Panel]:
    """Return the heatmaps of a sweep's settings, but for controls that are paired with single runs.

    The outer learning rate goes across, the next axis that varies goes up, and further axes make more panels. Each
    method has its own panels, unless no more than one axis varies: then the methods go up in a single one.
    """
    cells = [cell for cell in cells if cell.rows[0].control_of is None]
    paths = dict.fromkeys(path for cell in cells for path in cell.values)
    methods = dict.fromkeys(cell.arm for cell in cells)
    varied = [
        path
        for path in sorted(paths, key=lambda path: path != _ACROSS)
        if any(len({str(cell.values.get(path)) for cell in cells if cell.arm == name}) > 1 for name in methods)
    ]
    if len(varied) < 2:
        across = varied[0] if varied else ""
        places = {(cell.values.get(across), method_name(cell.arm)): cell for cell in cells}
        return [_panel("", (across, "method"), places)] if cells else []
    across, up, *others = varied
    groups: dict[str, dict[tuple[Any, Any], Setting]] = {}
    for cell in cells:
        fixed = [f"{path} {cell_text(cell.values.get(path))}" for path in others]
        title = ", ".join([*([method_name(cell.arm)] if cell.arm else []), *fixed])
        groups.setdefault(title, {})[cell.values.get(across), cell.values.get(up)] = cell
    return [_panel(title, (across, up), places) for title, places in groups.items()]


def _panel(title: str, labels: tuple[str, str], places: dict[tuple[Any, Any], Setting]) -> Panel:
    x, y = (_ordered([place[axis] for place in places]) for axis in (0, 1))
    return Panel(title, *labels, x, y, [[places.get((across, up)) for across in x] for up in y])


def _ordered(values: Sequence[Any]) -> list[Any]:
    """Sort numbers; texts keep their order, behind them."""
    distinct = list(dict.fromkeys(values))
    numbers = [value for value in distinct if isinstance(value, int | float)]
    return [*sorted(numbers), *(value for value in distinct if value not in numbers)]


def sweep_figure(rows: Sequence[Row], *, title: str | None = None, limits: tuple[float, float] | None = None) -> Figure:
    """Draw the heatmaps of a sweep, within `styled`; of very many the first 24. `limits` are the colours' ends."""
    is_pair = isinstance(limits, Sequence) and len(limits) == 2
    if limits is not None and not (is_pair and 0 < limits[0] < limits[1] < math.inf):
        raise UsageError(f"limits: must be two numbers, 0 < lowest < highest, got {limits!r:.80}")
    cells = settings(rows)
    panels = panels_of(cells)
    shown = panels[:MOST_PANELS]
    width = min(3, len(shown)) or 1
    scale = scale_of([cell.result for cell in cells if cell.result is not None])
    return heatmaps(
        [shown[start : start + width] for start in range(0, len(shown), width)],
        Scale(*limits, scale.bound) if limits else scale,
        title=f"Validation {measure_of(rows).removeprefix('validation ')} of each setting" if title is None else title,
        reading="lower is better and lighter; outlined: within 25 % of the best of all" if title is None else "",
        note=f"the first {len(shown)} of {len(panels)} heatmaps" if len(shown) < len(panels) else "",
    )


def heatmaps(
    panels: Sequence[Sequence[Panel]], scale: Scale, *, title: str, reading: str = "", note: str = ""
) -> Figure:
    """Draw rows of heatmaps, within `styled`: title and reading are those of `headline`, the note stands below."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra, see style.py

    heights = [max([len(panel.y) for panel in row] + [3]) for row in panels] or [3]
    columns = max(map(len, panels), default=1)
    width, longest = 1, 0
    for panel in (panel for row in panels for panel in row):
        width, longest = max(width, columns * len(panel.x)), max([longest, *(len(cell_text(x)) for x in panel.x)])
    is_upright = width * longest > _LETTERS  # names, which would run into one another
    # Values may hold dollar signs, as in patterns of names; two of them would be a formula.
    with mpl.rc_context({"text.parse_math": False}):
        ratios = {"height_ratios": heights}
        height = 1.0 + sum(0.55 + 0.26 * rows + 0.07 * is_upright * longest for rows in heights)
        figure, grid = new_figure(height, len(heights), columns, gridspec_kw=ratios)
        for axes in grid.flat:
            axes.set_axis_off()
        for row, places in zip(panels, grid, strict=False):
            for number, (panel, axes) in enumerate(zip(row, places, strict=False)):
                draw_panel(axes, panel, scale, size=min(7.5, 130 / width))
                axes.tick_params(axis="x", rotation=90 if is_upright else 0)
                axes.set(title=panel.title, xlabel=panel.x_label, ylabel="" if number else panel.y_label)
        headline(figure, title, reading)
        figure.supxlabel(note, fontsize=7.5, color=MUTED)
    return figure


def draw_panel(axes: Axes, panel: Panel, scale: Scale, *, size: float = 7.5) -> None:
    """Draw a heatmap with its numbers, `size` points high: diverged cells hatched, cells near the best outlined."""
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    axes.set_axis_on()
    near = set()
    for j, row in enumerate(panel.cells):
        for i, cell in enumerate(row):
            face, ink = PAPER if cell is None else DIVERGED, MUTED
            is_diverged = cell is not None and cell.state == "diverged"
            if cell is not None and cell.result is not None:
                face, ink = "#{:02x}{:02x}{:02x}".format(*scale.colour(cell.result)), scale.ink(cell.result)
                near |= {(i, j)} if cell.result <= scale.bound else set()
            looks: dict[str, Any] = {"facecolor": face, "edgecolor": HATCH, "hatch": "//////" if is_diverged else None}
            axes.add_patch(Rectangle((i - 0.49, j - 0.49), 0.98, 0.98, linewidth=0, **looks))
            label = axes.text(i, j, text_of(cell), color=ink, ha="center", va="center_baseline", fontsize=size)
            label.set(in_layout=False)
            if is_diverged:
                label.set_bbox({"facecolor": DIVERGED, "edgecolor": "none", "pad": 1})
    axes.set(xlim=(-0.5, len(panel.x) - 0.5), ylim=(-0.5, len(panel.y) - 0.5))
    axes.set_xticks(range(len(panel.x)), [cell_text(value) for value in panel.x])
    axes.set_yticks(range(len(panel.y)), [cell_text(value) for value in panel.y])
    for i, j in near:  # a line between what is near the best and what is not
        for di, dj in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            if (i + di, j + dj) not in near:
                x, y = [i + (di - dj) / 2, i + (di + dj) / 2], [j + (dj - di) / 2, j + (dj + di) / 2]
                axes.plot(x, y, color=INK, linewidth=1.6, solid_capstyle="projecting", clip_on=False, zorder=5)
    axes.tick_params(length=0, pad=3)
    axes.spines[:].set_visible(False)
