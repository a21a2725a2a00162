"""Drawing of the language-model studies: many small heatmaps on one page and one colour scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm import first
from twophase.figures.heatmaps import Scale, colours_of, draw_colour_bar, draw_tiles, scale_of
from twophase.figures.matplotlib_types import Axes, Figure, ScalarMappable
from twophase.figures.style import headline, new_page
from twophase.sweeps.table import readable

LineAt = Callable[[Any, Any], Mapping[str, Any] | None]
"""From the values of the horizontal and the vertical axis to the line there, None where the design has no run."""
NEVER_FIRES = "\N{WHITE CIRCLE}"
"""Marks a restart whose period the run is too short for."""
PageRow = tuple[str, float, Sequence[LineAt]]
"""A row of heatmaps: its label, the perplexity at or below which cells are outlined, and the cells of each."""


def heatmap_page(
    rows: Sequence[PageRow],
    lines: Sequence[Mapping[str, Any]],
    *,
    columns: Sequence[str],
    x: Sequence[float],
    y: Sequence[float],
    x_label: str,
    measure: str,
    finding: str,
    reading: str,
    words: str,
) -> Figure:
    """Draw rows of heatmaps over the same axes, with a title for each column.

    One logarithmic colour scale holds for all `lines`: from the best to the worst, at most 3 times that. `measure` says
    what the numbers are. `finding` and `reading` are those of `headline`, and `words` follow on a separate line.
    """
    figure = new_page(1.5 + len(rows) * (0.25 + 0.27 * max(len(y), 3)))  # a row's label is three cells long
    panels = figure.subplots(len(rows), len(rows[0][2]), squeeze=False)
    values = [line["perplexity"] for line in lines if line["perplexity"] is not None]
    colours = colours_of(scale_of(values))
    characters = len(x) * len(columns) * max((len(readable(value)) for value in values), default=1)
    size = min(7.5, 540 / characters)  # a small loss is a longer word than a perplexity
    for row, (label, bound, cells) in zip(panels, rows, strict=True):
        for axes, line_at in zip(row, cells, strict=True):
            _draw_heatmap(axes, line_at, x=x, y=y, colours=colours, bound=bound, size=size)
        row[0].set_ylabel(label)
        for axes in row[1:]:
            axes.set_yticklabels([])
    for axes, title in zip(panels[0], columns, strict=True):
        axes.set_title(title)
    for axes in panels[:-1].ravel():
        axes.set_xticklabels([])
    figure.supxlabel(x_label, fontsize=8)
    low, high = colours.get_clim()
    scale = Scale(low, high, bound=low)  # what is outlined differs from panel to panel: no mark on the bar
    draw_colour_bar(figure, colours, scale, measure, max(values, default=low))
    headline(figure, finding, f"{measure}, lower is better and lighter; {reading}\n{words}")
    return figure


def _draw_heatmap(
    axes: Axes,
    line_at: LineAt,
    *,
    x: Sequence[float],
    y: Sequence[float],
    colours: ScalarMappable,
    bound: float,
    size: float,
) -> None:
    """Draw one small heatmap with its numbers; a restart that never fires gets a circle behind its number."""
    lines = {(i, j): line_at(across, up) for i, across in enumerate(x) for j, up in enumerate(y)}
    cells = [
        (*place, None, None) if line is None else (*place, line["state"], line["perplexity"])
        for place, line in lines.items()
    ]

    def mark(i: int, j: int) -> str:
        line = lines[i, j]
        return NEVER_FIRES if line is not None and never_fires(line) else ""

    draw_tiles(axes, cells, colours=colours, bound=bound, size=size, mark=mark)
    axes.set_xticks(range(len(x)), [f"{value:g}" for value in x])
    axes.set_yticks(range(len(y)), [f"{value:g}" for value in y])
    axes.tick_params(pad=2)


def line_at(lines: Sequence[Mapping[str, Any]], across: str, up: str) -> LineAt:
    """Find a line by the values that are drawn across and up."""
    return lambda x, y: first(lines, **{across: x, up: y})


def never_fires(line: Mapping[str, Any]) -> bool:
    """Return whether a setting names a restart that no run of its length feels."""
    return line["restart"] != "never" and line["restarts"] == 0
