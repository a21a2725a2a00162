"""The figure of the study `blockwise`: for each width and communication period every arm against one K for all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twophase.figures.style import MUTED, look, name_panels, new_figure
from twophase.studies._lm_figures import note
from twophase.sweep.table import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from twophase.studies.study import Result

_COLOURS = {"one K": 0, "averaging": 7, "K_b, curvature": 2, "K_b, rounds": 1, "K_b, oracle": 3, "shuffled": 4}
"""From how an arm's name begins to its look."""
_FARTHEST = 60.0
"""Per cent beyond which a point is put at the edge, with its number."""


def draw(result: Result) -> Figure:
    """Rows: the arms with their periods; across: perplexity against the chosen K for all, in per cent."""
    places = result.numbers["places"]
    columns = min(len(places), 2)
    rows = -(-len(places) // columns)
    count = max(len(facts["arms"]) for facts in places.values())
    figure, grid = new_figure(0.7 + rows * (0.7 + 0.19 * count), rows, columns)
    panels = list(grid.flat)
    for panel, facts in zip(panels, places.values(), strict=False):
        _panel(panel, facts)
    for panel in panels[len(places) :]:
        panel.set_axis_off()
    name_panels(panels[: len(places)], [f"{name}, {facts['rounds']} rounds" for name, facts in places.items()])
    settings = result.settings
    several = len(settings["seeds"]) > 1
    bars = f"Bars: {settings['clear']:g} standard errors; strokes: the seeds. " if several else "One seed. "
    note(
        figure,
        f"{bars}Left of 0 is better than the one K for all that is best on another seed (ringed).\nPeriods of "
        f"{', '.join(settings['blocks'])}; \N{EN DASH} is no restart. Nesterov lr {settings['lr']:g}, momentum "
        f"{settings['momentum']:g}, {settings['form']} form.",
    )
    return figure


def _panel(panel: Axes, facts: Mapping[str, Any]) -> None:
    names = []
    for row, (arm, line) in enumerate(facts["arms"].items()):
        number = next(look_ for start, look_ in _COLOURS.items() if arm.startswith(start))
        style = look(number, every=1)
        names.append(_name(arm, line))
        if line["ratio"] is None:
            panel.text(0, row, line["state"], color=style["color"], fontsize=6, ha="center", va="center")
            continue
        percent = 100 * (line["ratio"] - 1)
        if percent > _FARTHEST:  # at the edge of the panel, wherever that will be
            words = f"+{percent:.0f} % \N{RIGHTWARDS ARROW}"
            panel.text(0.98, row, words, transform=panel.get_yaxis_transform(), fontsize=6, ha="right", va="center")
            continue
        if line["low"] is not None:
            ends = [100 * (line[end] - 1) for end in ("low", "high")]
            panel.plot(ends, [row, row], color=style["color"], linewidth=1.0)
        panel.plot(
            [100 * (ratio - 1) for ratio in line["ratios"]], [row] * len(line["ratios"]), "|", color=style["color"],
            markersize=4.5, markeredgewidth=0.7,
        )  # fmt: skip
        panel.plot([percent], [row], marker=style["marker"], color=style["color"], markersize=3.5)
        if arm == f"one K for all: {facts['chosen']}":
            panel.plot([percent], [row], marker="o", markersize=7, markerfacecolor="none", color=style["color"])
    panel.axvline(0, color=MUTED, linewidth=0.7, zorder=0)
    panel.set_yticks(range(len(names)), names, fontsize=5.8)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlabel("against the chosen K, %", fontsize=7)
    low, high = panel.get_xlim()
    panel.set_xlim(low, min(high, _FARTHEST * 1.02) if math.isfinite(high) else _FARTHEST)


def _name(arm: str, line: Mapping[str, Any]) -> str:
    """`K_b, rounds: 2 5 – 3  14.2`: the arm, its periods if they are one set, and its perplexity."""
    short = (
        arm.replace("curvature, ", "").replace("one K for all: never", "no restart").replace("one K for all:", "K =")
    )
    periods = ""
    if arm.startswith("K_b"):
        periods = ": " + " ".join("\N{EN DASH}" if word == "never" else word for word in line["periods"][0])
    return f"{short}{periods}  ({readable(line['perplexity']) or line['state']})"
