"""Drawing of the language-model studies: many small heatmaps on one page and one colour scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twophase.figures.heatmaps import Scale, colours_of, draw_colour_bar, draw_tiles, scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

LineAt = Callable[[Any, Any], Mapping[str, Any] | None]
"""From the values of the horizontal and the vertical axis to the line there, None where the design has no run."""
NEVER_FIRES = "\N{WHITE CIRCLE}"
"""Marks a restart whose period the run is too short for."""


def colours_for(lines: Sequence[Mapping[str, Any]]) -> ScalarMappable:
    """Return one logarithmic colour scale for all lines of a page: from the best to the worst, at most 3 times that."""
    return colours_of(scale_of([line["perplexity"] for line in lines if line["perplexity"] is not None]))


def draw_heatmap(
    axes: Axes,
    x: Sequence[Any],
    y: Sequence[Any],
    line_at: LineAt,
    *,
    colours: ScalarMappable,
    bound: float,
    size: float = 6.0,
) -> None:
    """Draw one small heatmap with its numbers.

    Args:
        axes: where.
        x: values of the horizontal axis, from left to right.
        y: values of the vertical axis, from bottom to top.
        line_at: the line at (x, y); a restart that never fires gets a circle behind its number.
        colours: of the page.
        bound: cells at or below it are outlined.
        size: of the numbers, in points.
    """
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
    axes.tick_params(pad=2, labelsize=6.5)


def never_fires(line: Mapping[str, Any]) -> bool:
    """Return whether a setting names a restart that no run of its length feels."""
    return line["restart"] != "never" and line["restarts"] == 0


def colour_bar(
    figure: Figure, axes: Iterable[Axes], colours: ScalarMappable, lines: Sequence[Mapping[str, Any]]
) -> None:
    """Draw the page's colour bar."""
    low, high = colours.get_clim()
    scale = Scale(low, high, bound=low)  # what is outlined differs from panel to panel: no mark on the bar
    worst = max((line["perplexity"] for line in lines if line["perplexity"] is not None), default=low)
    label = "validation perplexity a token"
    draw_colour_bar(figure, colours, scale, label, worst, ax=list(axes), aspect=45, fraction=0.03, pad=0.01)


def note(figure: Figure, text: str) -> None:
    """Write below everything what a reader must know to read the page."""
    figure.supxlabel(text, fontsize=6.5, color="#444444")
