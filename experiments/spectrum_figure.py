"""The figure of `spectrum.py`, and the rows of what it shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from blocks import Facts, Setting, loss_curve, loss_weights
from twophase.advice.evidence import within
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import INK, MUTED, headline, look, name_panels, new_page

Row = dict[str, Any]

_MARKERS = {"early": "<", "mid": "o", "late": ">"}
_MOST_PERIODS = 400  # that are drawn
LEAST_SHARE = 1e-3
"""Of a block's loss, at which the axis of eigenvalues begins."""


def draw(
    title: str, setting: Setting, blocks: Sequence[Facts], rounds: Mapping[str, Facts]
) -> tuple[Figure, list[Row]]:
    """Return the figure, and the rows of what it shows; `rounds` is by fragment."""
    figure = new_page(5.8)
    panels = list(figure.subplot_mosaic("ab;cc", height_ratios=(1.15, 1)).values())
    rows = [
        *_draw_spectrum(panels[0], setting, blocks),
        *_draw_progress(panels[1], blocks, rounds),
        *_draw_losses(panels[2], setting, blocks),
    ]
    titles = "Preconditioned curvature", "Effective progress of a round", "What each period leaves of a block's loss"
    name_panels(panels, titles)
    figure.legend(*panels[2].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    headline(
        figure, "What a round removes of each block, and what a period would leave", f"{title}\nloss: lower is better"
    )
    return figure, rows


def _draw_spectrum(axes: Axes, setting: Setting, blocks: Sequence[Facts]) -> Iterator[Row]:
    """Draw the share of each block's directions with an eigenvalue above x, and where a step ends at the minimum."""
    densities = [block["density"] for block in blocks if loss_weights(block["density"]).any()]
    ends = [each["eigenvalue"][np.searchsorted(np.cumsum(loss_weights(each)), LEAST_SHARE)] for each in densities]
    least = max(min(ends, default=1e-3) / 3, 1e-12)
    for number, block in enumerate(blocks):
        nodes, weights = block["density"]["eigenvalue"], block["density"]["share"]
        share = np.cumsum(weights[::-1])[::-1] / weights.sum()
        x, y = nodes[nodes >= least], share[nodes >= least]
        axes.step(x, y, where="pre", **{**look(number), "linewidth": 1.1})
        yield from ({"panel": "spectrum", "block": block["name"], "x": a, "y": b} for a, b in zip(x, y, strict=True))
    end = 1 / max(setting.inner_lrs["mid"])
    axes.axvline(end, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.annotate(
        "1 / inner lr", (end, 1.0), xytext=(-3, -3), textcoords="offset points", ha="right", va="top",
        rotation=90, fontsize=6.5, color=MUTED,
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", ylim=(None, 1.6), xlabel="eigenvalue", ylabel="share of directions above it")
    axes.set_xlim(left=least)
    yield {"panel": "spectrum", "block": "1 / inner lr", "x": end}


def _draw_progress(axes: Axes, blocks: Sequence[Facts], rounds: Mapping[str, Facts]) -> Iterator[Row]:
    """Draw a row for each block: the mean of each third of the run, and the interval from the rounds below it."""
    of_rounds = False
    for row, block in enumerate(blocks):
        name, colour = block["name"], look(row)["color"]
        means = {place: block["progress"][place]["mean"] for place in _MARKERS}
        low, high = block["spread_mid"]["0.05"], block["spread_mid"]["0.95"]
        axes.plot([low, high], [row - 0.12] * 2, color=colour, linewidth=5, alpha=0.2, solid_capstyle="butt")
        yield {"panel": "spread", "block": name, "place": "mid", "low": low, "high": high}
        axes.plot(list(means.values()), [row - 0.12] * len(means), color=colour, linewidth=0.8, alpha=0.6)
        for place, mean in means.items():
            axes.plot([mean], [row - 0.12], marker=_MARKERS[place], color=colour, markersize=4.5, linestyle="none")
            yield {"panel": "progress", "block": name, "place": place, "y": mean}
        thirds = rounds[name]["thirds"] if name in rounds else {}
        for (place, third), shift in zip(thirds.items(), (-0.16, 0.0, 0.16), strict=False):
            if shown := within(third):
                of_rounds, height = True, row + 0.24 + shift / 3
                low, middle, high = shown
                axes.plot([low, high], [height] * 2, color=INK, linewidth=1.0)
                axes.plot([middle], [height], marker="|", color=INK, markersize=4)
                yield {"panel": "rounds", "block": name, "place": place, "y": middle, "low": low, "high": high}
    for place, marker in _MARKERS.items():
        axes.plot([], [], marker=marker, color=MUTED, linestyle="none", markersize=4.5, label=place)
    axes.plot([], [], color=MUTED, linewidth=5, alpha=0.3, label="modes, mid: 90 % of the loss")
    if of_rounds:
        axes.plot([], [], color=INK, linewidth=1.0, label="from the rounds, 95 %")
    axes.set_yticks(range(len(blocks)), [block["name"] for block in blocks])
    axes.set(xlim=(-0.03, 1.03), ylim=(len(blocks) - 0.5, -0.5), xlabel="share of a mode that a round removes")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.24), ncols=2, fontsize=6.5)


def _draw_losses(axes: Axes, setting: Setting, blocks: Sequence[Facts]) -> Iterator[Row]:
    """Draw the loss at the end over that without restarts, against the period, by block; the best period is ringed."""
    last = min(setting.rounds, _MOST_PERIODS)
    periods = range(1, last + 1)
    for number, block in enumerate(blocks):
        name, style, best, at_mean = block["name"], look(number), block["period"], block["period_at_mean"]
        if not np.any(block["density"]["sigma_mid"] * loss_weights(block["density"]) > 0):
            axes.plot([], [], **style, label=f"{name}: no curvature")
            continue
        curve = loss_curve(setting, block, periods) / np.log(10)
        axes.plot(periods, curve, **style, label=f"{name}: {'no restart' if best is None else f'K = {best}'}")
        if at_mean and at_mean <= last:
            y = float(curve[at_mean - 1])
            axes.plot(at_mean, y, marker=look(number, every=1)["marker"], color=style["color"], markersize=4.5)
            yield {"panel": "at mean", "block": name, "x": at_mean, "y": y}
        if best and best <= last:
            axes.plot(
                [best], [curve[best - 1]], marker="o", markersize=6, markerfacecolor="none",
                markeredgecolor=style["color"], linestyle="none",
            )  # fmt: skip
        yield from ({"panel": "loss", "block": name, "x": k, "y": y} for k, y in zip(periods, curve, strict=True))
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
