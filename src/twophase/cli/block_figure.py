"""The figure of `twophase spectrum`, and the rows of what it shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twophase.advice.evidence import within
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import INK, MUTED, headline, look, name_panels, new_page
from twophase.spectrum import PLACES, Forecast, Seen, Setting, loss_curve

Rows = list[dict[str, Any]]

_MOST_PERIODS = 400  # that are drawn
LEAST_SHARE = 1e-3
"""Of a block's loss, at which the axis of eigenvalues begins."""


def draw(
    title: str, setting: Setting, forecasts: Sequence[Forecast], rounds: Mapping[str, Seen]
) -> tuple[Figure, Rows]:
    """Return the figure, and the rows of what it shows; `rounds` is by fragment."""
    figure = new_page(5.8)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1))
    panels = [figure.add_subplot(grid[place]) for place in ((0, 0), (0, 1), (1, slice(None)))]
    rows = [
        *_draw_spectrum(panels[0], setting, forecasts),
        *_draw_progress(panels[1], forecasts, rounds),
        *_draw_losses(panels[2], setting, forecasts),
    ]
    titles = "Preconditioned curvature", "Effective progress of a round", "What each period leaves of a block's loss"
    name_panels(panels, titles)
    figure.legend(*panels[2].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    headline(figure, _finding(forecasts), f"{title}\nloss: lower is better")
    return figure, rows


def _finding(forecasts: Sequence[Forecast]) -> str:
    """Say which blocks a separate period is predicted to help, and by how much."""
    gains = [
        f"{'block ' * block.curvature.name.isdigit()}{block.curvature.name} every {block.chosen.period} rounds "
        f"({math.exp(block.chosen.log_gain):.2g} of the loss)"
        for block in forecasts
        if block.chosen.period is not None
    ]
    none = len(forecasts) - len(gains)
    words = [f"no restart is best in {none} of {len(forecasts)} blocks"] if none else []
    return f"By the linear theory {'; '.join([*words, *gains])}"


def _draw_spectrum(axes: Axes, setting: Setting, forecasts: Sequence[Forecast]) -> Rows:
    """Draw the share of each block's directions with an eigenvalue above x, and where a step ends at the minimum."""
    rows: Rows = []
    blocks = [block.curvature for block in forecasts]
    curved = [block for block in blocks if block.loss_weights.any()]
    ends = [block.nodes[np.searchsorted(np.cumsum(block.loss_weights), LEAST_SHARE)] for block in curved]
    least = max(min(ends, default=1e-3) / 3, 1e-12)
    for number, block in enumerate(blocks):
        share = np.cumsum(block.weights[::-1])[::-1] / block.weights.sum()
        shown = block.nodes >= least
        x, y = block.nodes[shown], share[shown]
        axes.step(x, y, where="pre", **{**look(number), "linewidth": 1.1})
        rows += [{"panel": "spectrum", "block": block.name, "x": a, "y": b} for a, b in zip(x, y, strict=True)]
    end = 1 / max(setting.inner_lrs["mid"])
    axes.axvline(end, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.annotate(
        "1 / inner lr", (end, 1.0), xytext=(-3, -3), textcoords="offset points", ha="right", va="top",
        rotation=90, fontsize=6.5, color=MUTED,
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", ylim=(None, 1.6), xlabel="eigenvalue", ylabel="share of directions above it")
    axes.set_xlim(left=least)
    return [*rows, {"panel": "spectrum", "block": "1 / inner lr", "x": end}]


def _draw_progress(axes: Axes, forecasts: Sequence[Forecast], rounds: Mapping[str, Seen]) -> Rows:
    """Draw a row for each block: the mean of each third of the run, and the interval from the rounds below it."""
    rows: Rows = []
    markers = {"early": "<", "mid": "o", "late": ">"}
    for row, block in enumerate(forecasts):
        name, colour = block.curvature.name, look(row)["color"]
        means = {place: block.progress[place].mean for place in PLACES}
        low, high = block.spread(0.05), block.spread(0.95)
        axes.plot([low, high], [row - 0.12] * 2, color=colour, linewidth=5, alpha=0.2, solid_capstyle="butt")
        rows.append({"panel": "spread", "block": name, "place": "mid", "low": low, "high": high})
        axes.plot(list(means.values()), [row - 0.12] * len(means), color=colour, linewidth=0.8, alpha=0.6)
        for place, mean in means.items():
            axes.plot([mean], [row - 0.12], marker=markers[place], color=colour, markersize=4.5, linestyle="none")
            rows.append({"panel": "progress", "block": name, "place": place, "y": mean})
        thirds = {place: within(third) for place, third in rounds[name].thirds.items()} if name in rounds else {}
        for place, shift in zip(PLACES, (-0.16, 0.0, 0.16), strict=True):
            if shown := thirds.get(place):
                low, middle, high = shown
                height = row + 0.24 + shift / 3
                axes.plot([low, high], [height] * 2, color=INK, linewidth=1.0)
                axes.plot([middle], [height], marker="|", color=INK, markersize=4)
                rows.append({"panel": "rounds", "block": name, "place": place, "y": middle, "low": low, "high": high})
    for place, marker in markers.items():
        axes.plot([], [], marker=marker, color=MUTED, linestyle="none", markersize=4.5, label=place)
    axes.plot([], [], color=MUTED, linewidth=5, alpha=0.3, label="modes, mid: 90 % of the loss")
    if any(row["panel"] == "rounds" for row in rows):
        axes.plot([], [], color=INK, linewidth=1.0, label="from the rounds, 95 %")
    axes.set_yticks(range(len(forecasts)), [block.curvature.name for block in forecasts])
    axes.set(xlim=(-0.03, 1.03), ylim=(len(forecasts) - 0.5, -0.5), xlabel="share of a mode that a round removes")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.24), ncols=2, fontsize=6.5)
    return rows


def _draw_losses(axes: Axes, setting: Setting, forecasts: Sequence[Forecast]) -> Rows:
    """Draw the loss at the end over that without restarts, against the period, by block; the best period is ringed."""
    rows: Rows = []
    last = min(setting.rounds, _MOST_PERIODS)
    periods = list(range(1, last + 1))
    for number, block in enumerate(forecasts):
        name, style = block.curvature.name, look(number)
        if not np.any(block.sigma * block.curvature.loss_weights > 0):
            axes.plot([], [], **style, label=f"{name}: no curvature")
            continue
        curve = loss_curve(setting, block, periods) / np.log(10)
        period = block.chosen.period
        axes.plot(periods, curve, **style, label=f"{name}: {'no restart' if period is None else f'K = {period}'}")
        if block.at_mean is not None and block.at_mean <= last:
            place = block.at_mean, float(curve[block.at_mean - 1])
            axes.plot(*place, marker=look(number, every=1)["marker"], color=style["color"], markersize=4.5)
            rows.append({"panel": "at mean", "block": name, "x": place[0], "y": place[1]})
        if period is not None and period <= last:
            axes.plot(
                [period], [curve[period - 1]], marker="o", markersize=6, markerfacecolor="none",
                markeredgecolor=style["color"], linestyle="none",
            )  # fmt: skip
        rows += [{"panel": "loss", "block": name, "x": k, "y": y} for k, y in zip(periods, curve, strict=True)]
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.plot([], [], marker="o", color=MUTED, markersize=4.5, linestyle="none", label="a single mode's period")
    axes.annotate("no restart", (1, 0), xytext=(2, 2), textcoords="offset points", fontsize=6.5, color=MUTED)
    axes.set(xlabel="restart period K in rounds", ylabel="log10 loss against no restart")
    axes.locator_params(axis="x", integer=True)
    if last > 30:
        axes.set_xscale("log")
        ticks = [k for k in (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 400) if k <= last]
        axes.set_xticks(ticks, [str(k) for k in ticks])
        axes.minorticks_off()
    return rows
