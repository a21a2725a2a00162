"""Drawing of the language-model studies: many small heatmaps on one page and one colour scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from twophase.experiment.figure import DIVERGED, HATCH, INK, MUTED, PAPER
from twophase.experiment.plot import scale_of
from twophase.experiment.table import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

_MISSING = "#d4d4d4"
Found = Callable[[Any, Any], Mapping[str, Any] | None]
"""From the values of the horizontal and the vertical axis to the line there, None where the design has no run."""


def colours_for(lines: Sequence[Mapping[str, Any]]) -> ScalarMappable:
    """One logarithmic colour scale for all lines of a page: from the best to the worst, or to 3 times the best."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415 - an extra, see figure.py
    from matplotlib.colors import LogNorm  # noqa: PLC0415

    scale = scale_of([line["perplexity"] for line in lines if line["perplexity"] is not None])
    # Reversed viridis as in all our heatmaps: light is good, and lightness alone orders the values.
    return ScalarMappable(LogNorm(scale.low, scale.high), "viridis_r")


def draw_heatmap(
    axes: Axes,
    x: Sequence[Any],
    y: Sequence[Any],
    found: Found,
    *,
    colours: ScalarMappable,
    bound: float,
    size: float = 6.0,
) -> None:
    """One small heatmap with its numbers: diverged cells hatched, missing ones grey, those within a bound outlined.

    Args:
        axes: where.
        x: values of the horizontal axis, from left to right.
        y: values of the vertical axis, from bottom to top.
        found: the line at (x, y); a restart that never fires gets a circle behind its number.
        colours: of the page.
        bound: cells at or below it are outlined.
        size: of the numbers, in points.
    """
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    inside = set()
    for i, across in enumerate(x):
        for j, up in enumerate(y):
            line = found(across, up)
            face, ink, hatch, text = PAPER, MUTED, None, "\N{EN DASH}"
            if line is not None and line["perplexity"] is not None:
                face = colours.to_rgba(line["perplexity"])  # type: ignore[arg-type] - it takes a number too
                ink = _ink_on(face)
                text = readable(line["perplexity"]) + (NEVER_FIRES if never_fires(line) else "")
                inside |= {(i, j)} if line["perplexity"] <= bound else set()
            elif line is not None and line["state"] == "diverged":
                face, ink, hatch, text = DIVERGED, INK, "//////", "div."
            elif line is not None:
                face, text = _MISSING, "miss."
            tile = Rectangle((i - 0.5, j - 0.5), 1, 1, facecolor=face, hatch=hatch, edgecolor=HATCH, linewidth=0)
            axes.add_patch(tile)
            label = axes.text(i, j, text, color=ink, ha="center", va="center_baseline", fontsize=size)
            if hatch:
                label.set_bbox({"facecolor": DIVERGED, "edgecolor": "none", "pad": 0.8})
    for i in range(1, len(x)):
        axes.axvline(i - 0.5, color=PAPER, linewidth=0.6)
    for j in range(1, len(y)):
        axes.axhline(j - 0.5, color=PAPER, linewidth=0.6)
    _outline(axes, inside)
    axes.set(xlim=(-0.5, len(x) - 0.5), ylim=(-0.5, len(y) - 0.5))
    axes.set_xticks(range(len(x)), [f"{value:g}" for value in x])
    axes.set_yticks(range(len(y)), [f"{value:g}" for value in y])
    axes.tick_params(length=0, pad=2, labelsize=6.5)
    axes.spines[:].set_visible(False)


NEVER_FIRES = "\N{WHITE CIRCLE}"
"""Marks a restart whose period the run is too short for."""


def never_fires(line: Mapping[str, Any]) -> bool:
    """Whether a setting names a restart that no run of its length feels."""
    return line["restart"] != "never" and line["restarts"] == 0


def colour_bar(
    figure: Figure, axes: Iterable[Axes], colours: ScalarMappable, lines: Sequence[Mapping[str, Any]]
) -> None:
    """The page's colour bar; its tip says that something that is shown lies beyond its end."""
    low, high = colours.get_clim()
    worst = max((line["perplexity"] for line in lines if line["perplexity"] is not None), default=low)
    clipped = worst > high * (1 + 1e-9)
    bar = figure.colorbar(
        colours, ax=list(axes), aspect=45, fraction=0.03, pad=0.01, extend="max" if clipped else "neither"
    )
    ticks = sorted({float(f"{tick:.2g}") for tick in np.geomspace(low, high, 8)})
    ticks = [tick for tick in ticks if low <= tick <= high]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.minorticks_off()
    bar.outline.set_visible(False)  # type: ignore[operator] - a spine, which the stubs take for a callable
    bar.ax.tick_params(length=2, width=0.6, labelsize=6.5)
    end = f"; colours end at {readable(high)}" if clipped else ""
    bar.set_label(f"validation perplexity a token (log scale{end})", fontsize=7)


def note(figure: Figure, text: str) -> None:
    """A note below everything: what a reader must know to read the page."""
    figure.supxlabel(text, fontsize=6.5, color="#444444")


def _outline(axes: Axes, inside: set[tuple[int, int]]) -> None:
    for i, j in inside:
        for di, dj in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            if (i + di, j + dj) not in inside:
                x, y = i + di / 2, j + dj / 2
                ends = ([x - abs(dj) / 2, x + abs(dj) / 2], [y - abs(di) / 2, y + abs(di) / 2])
                axes.plot(*ends, color=INK, linewidth=1.2, solid_capstyle="projecting", clip_on=False, zorder=5)


def _ink_on(face: Any) -> str:
    """White on dark grounds: where the relative luminance (Rec. 709, linear light) is below about 0.18."""
    red, green, blue = (part**2.2 for part in face[:3])
    return PAPER if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.18 else INK
