"""The figure of `twophase spectrum`: each block's curvature, what a round removes of it, and what periods leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from twophase.figures.style import INK, MUTED, look, name_panels, new_page
from twophase.spectrum.blocks import PLACES, Forecast, Seen, Setting, loss_curve, within

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PERIODS = 400
_LEAST_SHARE = 1e-3


def draw(
    title: str, setting: Setting, forecasts: Sequence[Forecast], rounds: Mapping[str, Seen]
) -> tuple[Figure, list[dict[str, Any]]]:
    """The figure, and the rows of what it shows.

    Args:
        title: of the page.
        setting: what the run does with the curvature.
        forecasts: of the blocks, in order.
        rounds: what the run's rounds show, by name of its fragments.
    """
    rows: list[dict[str, Any]] = []
    figure = new_page(5.4)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1))
    spectrum = figure.add_subplot(grid[0, 0])
    progress = figure.add_subplot(grid[0, 1])
    losses = figure.add_subplot(grid[1, :])
    _spectrum(spectrum, setting, forecasts, rows)
    _progress(progress, forecasts, rounds, rows)
    _losses(losses, setting, forecasts, rows)
    name_panels(
        [spectrum, progress, losses],
        ["Preconditioned curvature", "Effective progress of a round", "What each period leaves of a block's loss"],
    )
    figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(title, fontsize=9)
    return figure, rows


def _spectrum(axes: Axes, setting: Setting, forecasts: Sequence[Forecast], rows: list[dict[str, Any]]) -> None:
    """The share of each block's directions whose eigenvalue is at least x, and where a step reaches the minimum."""
    least = _least(forecasts)
    for number, found in enumerate(forecasts):
        block = found.curvature
        share = np.cumsum(block.weights[::-1])[::-1] / block.weights.sum()
        shown = block.nodes >= least
        x, y = block.nodes[shown], share[shown]
        axes.step(x, y, where="pre", **{**look(number), "linewidth": 1.1})
        rows += [
            {"panel": "spectrum", "block": block.name, "x": a, "y": b} for a, b in zip(x, y, strict=True)
        ]  # fmt: skip
    rate = max(setting.inner_lrs["mid"])
    axes.axvline(1 / rate, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.annotate(
        "1 / inner lr", (1 / rate, 1.0), xytext=(-3, -3), textcoords="offset points", ha="right", va="top",
        rotation=90, fontsize=6.5, color=MUTED,
    )  # fmt: skip
    rows.append({"panel": "spectrum", "block": "1 / inner lr", "x": 1 / rate})
    axes.set(xscale="log", yscale="log", ylim=(None, 1.6), xlabel="eigenvalue", ylabel="share of directions above it")
    axes.set_xlim(left=least)


def _least(forecasts: Sequence[Forecast]) -> float:
    """Where the axis of eigenvalues begins: below it no block has a thousandth of its loss."""
    ends = []
    for found in forecasts:
        reached = np.cumsum(found.curvature.loss_weights)
        if reached[-1] > 0:
            ends.append(found.curvature.nodes[np.searchsorted(reached, _LEAST_SHARE)])
    return max(min(ends, default=1e-3) / 3, 1e-12)


def _progress(
    axes: Axes, forecasts: Sequence[Forecast], rounds: Mapping[str, Seen], rows: list[dict[str, Any]]
) -> None:
    """Rows: the blocks; the mean of each third of the run by curvature, and the interval from the rounds below it."""
    markers, shifts = ("<", "o", ">"), (-0.16, 0.0, 0.16)
    for row, found in enumerate(forecasts):
        colour = look(row)["color"]
        means = [found.progress[place].mean for place in PLACES]
        ends = [found.spread(0.05), found.spread(0.95)]
        axes.plot(ends, [row - 0.12] * 2, color=colour, linewidth=5, alpha=0.2, solid_capstyle="butt")
        rows.append({"panel": "spread", "block": found.curvature.name, "place": "mid", "low": ends[0], "high": ends[1]})
        axes.plot(means, [row - 0.12] * len(means), color=colour, linewidth=0.8, alpha=0.6)
        for place, marker, mean in zip(PLACES, markers, means, strict=True):
            axes.plot([mean], [row - 0.12], marker=marker, color=colour, markersize=4.5, linestyle="none")
            rows.append({"panel": "progress", "block": found.curvature.name, "place": place, "y": mean})
        seen = rounds.get(found.curvature.name)
        for place, shift in zip(PLACES, shifts, strict=True):
            shown = None if seen is None else within(seen.thirds[place])
            if shown is None:
                continue
            height = row + 0.24 + shift / 3
            axes.plot(shown[::2], [height] * 2, color=INK, linewidth=1.0)
            axes.plot(shown[1:2], [height], marker="|", color=INK, markersize=4)
            rows.append(
                {"panel": "rounds", "block": found.curvature.name, "place": place, "y": shown[1]}
                | {"low": shown[0], "high": shown[2]}
            )
    for place, marker in zip(PLACES, markers, strict=True):
        axes.plot([], [], marker=marker, color=MUTED, linestyle="none", markersize=4.5, label=place)
    axes.plot([], [], color=MUTED, linewidth=5, alpha=0.3, label="modes, mid: 90 % of the loss")
    if any(row["panel"] == "rounds" for row in rows):
        axes.plot([], [], color=INK, linewidth=1.0, label="from the rounds, 95 %")
    axes.set_yticks(range(len(forecasts)), [found.curvature.name for found in forecasts])
    axes.set_ylim(len(forecasts) - 0.5, -0.5)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("share of a mode that a round removes")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2 if len(axes.lines) else 1, fontsize=6.5)


def _losses(axes: Axes, setting: Setting, forecasts: Sequence[Forecast], rows: list[dict[str, Any]]) -> None:
    """Loss at the end over that without restarts, against the period, by block; the best one ringed."""
    last = min(setting.rounds, _MOST_PERIODS)
    periods = list(range(1, last + 1))
    for number, found in enumerate(forecasts):
        block = found.curvature
        style = look(number)
        if not np.any(found.sigma * block.loss_weights > 0):
            axes.plot([], [], **style, label=f"{block.name}: no curvature")
            continue
        curve = loss_curve(setting, found, periods) / np.log(10)
        period = found.chosen.period
        axes.plot(periods, curve, **style, label=f"{block.name}: {'never' if period is None else f'K = {period}'}")
        if found.at_mean is not None and found.at_mean <= last:
            place = found.at_mean, float(curve[found.at_mean - 1])
            axes.plot(*place, marker=look(number, every=1)["marker"], color=style["color"], markersize=4.5)
            rows.append({"panel": "at mean", "block": block.name, "x": place[0], "y": place[1]})
        if period is not None and period <= last:
            axes.plot(
                [period], [curve[period - 1]], marker="o", markersize=6, markerfacecolor="none",
                markeredgecolor=style["color"], linestyle="none",
            )  # fmt: skip
        rows += [
            {"panel": "loss", "block": block.name, "x": k, "y": y} for k, y in zip(periods, curve, strict=True)
        ]  # fmt: skip
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.plot([], [], marker="o", color=MUTED, markersize=4.5, linestyle="none", label="a single mode's period")
    axes.annotate("no restart", (1, 0), xytext=(2, 2), textcoords="offset points", fontsize=6.5, color=MUTED)
    axes.set(xlabel="restart period K in rounds", ylabel="log10 loss against no restart")
    if last > 30:
        axes.set_xscale("log")
        ticks = [k for k in (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 400) if k <= last]
        axes.set_xticks(ticks, [str(k) for k in ticks])
        axes.minorticks_off()
