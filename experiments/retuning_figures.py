"""Drawing of `retuning`: what wrong choices cost, and every curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from common import Result, select
from heatmap_page import never_fires
from paper import BETA_SWEEP, BOTH_FORMS, K_SWEEP, OWN_K_SWEEP, RULES, arm_name, control_name
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import MUTED, PAPER, headline, look, new_figure, share_legend
from twophase.rule import FORM_WORDS
from twophase.sweeps.grid import MOMENTUM_FREE
from twophase.sweeps.table import readable

HIGHEST = 1.7
"""A panel ends at this multiple of the best of its row; what lies above is written at its upper edge."""
Lines = Sequence[Mapping[str, Any]]


def figures(result: Result) -> dict[str, Figure]:
    """Draw what the worst choices cost, and every curve, a figure a form and rule."""
    rules = product(BOTH_FORMS, RULES)
    pages = {f"-{form}-{kind.replace(' ', '-').lower()}": _curves_page(result, form, kind) for form, kind in rules}
    return {"": _costs(result)} | pages


def _costs(result: Result) -> Figure:
    """Draw what the worst choice of the momentum, of K, and of a smaller step costs; a panel a form and rule."""
    rules, steps = list(product(BOTH_FORMS, RULES)), list(result.settings["inner_steps"])
    figure, grid = new_figure(5.0, 2, -(-len(rules) // 2), sharex=True, sharey=True)
    spreads = _spreads(result)
    for panel, rule in zip(grid.flat, rules, strict=True):
        for name, number, label in _SPREADS:
            values = [100 * (spreads[*rule, name].get(s) or math.nan) - 100 for s in steps]
            panel.plot(range(len(steps)), values, label=label, **look(number, every=1))
        panel.set(title=f"{FORM_WORDS[rule[0]]}, {rule[1]}", xticks=range(len(steps)))
        panel.set_xticklabels([str(s) for s in steps])
        panel.grid(axis="y", color="#e4e4e4", linewidth=0.5)
    for panel in grid[-1]:
        panel.set_xlabel("communication period S, inner steps")
    for panel in grid[:, 0]:
        panel.set_ylabel("worst over best, %\n(lower is flatter)")
    seeds = len(result.settings["seeds"])
    headline(
        figure,
        "Perplexity varies little over K, over the same gains without restarts too",
        "how much higher perplexity is at the worst value of one hyperparameter than at its best, lower is flatter\n"
        f"tuned at S={result.settings['tuned_at']}, K** with K={result.settings['tuning_period']}; "
        + (f"means over {seeds} seeds" if seeds > 1 else "one seed"),
    )
    share_legend(figure, list(grid.flat), columns=2)
    return figure


_SPREADS = (
    ("beta_sweep", 1, "no restart, over the momentum"),
    ("k_sweep", 2, "K*: over K, at the setting tuned without restarts"),
    ("own_k_sweep", 3, "K**: over K, at the setting tuned with them"),
    ("matched", 7, "no restart, at the mean gains of K*"),
)


def _spreads(result: Result) -> dict[tuple[str, str, str], dict[int, float | None]]:
    """Divide worst by best of each sweep and of K*'s controls, by form, rule and sweep, then by S."""
    spreads: dict[tuple[str, str, str], dict[int, float | None]] = {}
    for facts in result.numbers["places"].values():
        rule, steps = (facts["form"], facts["rule"]), facts["inner_steps"]
        matched = select(result.rows, inner_steps=steps, arm=control_name(arm_name(*rule, K_SWEEP)))
        values = [line["perplexity"] for line in matched]
        whole = max(values) / min(values) if values and None not in values else None
        for name in ("beta_sweep", "k_sweep", "own_k_sweep"):
            spreads.setdefault((*rule, name), {})[steps] = facts[name]["worst_over_best"]
        spreads.setdefault((*rule, "matched"), {})[steps] = whole
    return spreads


def _curves_page(result: Result, form: str, kind: str) -> Figure:
    """Draw a panel for each communication period; below each the periods K, above it the momenta."""
    settings, lines, inner_steps = result.settings, result.rows, result.settings["inner_steps"]
    free = {facts["inner_steps"]: facts for facts in result.numbers["places"].values()}
    figure, grid = new_figure(5.6, 2, -(-(len(inner_steps) + 1) // 2), sharey=True)
    panels, spare = list(grid.flat)[: len(inner_steps)], list(grid.flat)[len(inner_steps) :]
    low, high = _range(lines, form, kind)
    for panel, steps in zip(panels, inner_steps, strict=True):
        panel.set_yscale("log")
        panel.set_ylim(low, high)
        _draw_panel(panel, select(lines, inner_steps=steps), (form, kind), free[steps], settings)
        panel.set_title(f"S={steps}, {free[steps]['rounds']} rounds\nouter momentum", fontsize=8, pad=14)
        panel.set_xlabel("restart period K", labelpad=1)
    ticks = sorted({float(f"{tick:.2g}") for tick in np.geomspace(low, high, 6)})
    ticks = [tick for tick in ticks if low <= tick <= high]
    for row in grid:
        row[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        row[0].minorticks_off()
        row[0].set_ylabel("perplexity a token\n(lower is better)")
    seeds = "; means over the seeds, bars from the smallest to the largest" if len(settings["seeds"]) > 1 else ""
    headline(
        figure,
        f"{FORM_WORDS[form][0].upper()}{FORM_WORDS[form][1:]}, {kind}: perplexity over K and over the momentum",
        f"validation perplexity a token, lower is better{seeds}; at the upper edge: values beyond it\n"
        f"tuned at S={settings['tuned_at']}, K** with K={settings['tuning_period']}; hollow: the period never fires",
    )
    share_legend(figure, panels, spare)
    return figure


_FREE = {"momentum_free": "momentum-free SGD at its best", "averaging": "plain averaging"}
_MATCHED = 7
"""Look of the gain-matched controls."""
_HEIGHTS = {1: 0.98, 2: 0.84, 3: 0.70, _MATCHED: 0.56}
"""Height of each curve at the upper edge, so that words at one place do not cover each other."""
_CURVES = (
    (BETA_SWEEP, 1, "no restart, over momentum (top)"),
    (K_SWEEP, 2, "K*: at the setting tuned without"),
    (OWN_K_SWEEP, 3, "K**: at the setting tuned with restarts"),
)


def _draw_panel(panel: Axes, here: Lines, rule: tuple[str, str], free: Mapping[str, Any], settings: Any) -> None:
    """Draw one form and rule at one communication period, with an axis of momenta above."""
    periods, momenta = settings["periods"], settings["momenta"]
    at_period = {str(period): float(number) for number, period in enumerate(periods)}
    # The momenta are spread over the same width, with an axis of their own above.
    at_momentum = dict(zip(momenta, np.linspace(0, len(periods) - 1, len(momenta)).tolist(), strict=True))
    for name, style in (("momentum_free", "--"), ("averaging", ":")):
        if free[name] and free[name]["perplexity"]:
            line = {"color": MUTED, "linestyle": style, "linewidth": 0.9, "zorder": 1}
            panel.axhline(free[name]["perplexity"], label=_FREE[name], **line)
    drawn = 0
    for what, number, label in _CURVES:
        group = select(here, arm=arm_name(*rule, what))
        where = [at_momentum[line["momentum"]] if what == BETA_SWEEP else at_period[line["restart"]] for line in group]
        drawn += len(group)
        _draw_curve(panel, where, group, number, label)
    matched = select(here, arm=control_name(arm_name(*rule, K_SWEEP)))
    where = [at_period[line["of_restart"]] for line in matched]
    _draw_curve(panel, where, matched, _MATCHED, "no restart, mean gain of K*", joined=False)
    if not drawn:
        panel.text(0.5, 0.5, "no runs", transform=panel.transAxes, ha="center", color=MUTED, fontsize=7)
    panel.set_xticks(range(len(periods)), [str(period) for period in periods])
    panel.set_xlim(-0.5, len(periods) - 0.5)
    above = panel.secondary_xaxis("top")
    above.set_xticks(list(at_momentum.values()), [f"{momentum:g}" for momentum in momenta])
    for axis in (panel, above):
        axis.tick_params(length=2, pad=1.5, labelsize=7)


def _draw_curve(
    panel: Axes, where: Sequence[float], group: Lines, number: int, label: str, *, joined: bool = True
) -> None:
    """Draw one curve with the range of its seeds; it breaks off where a setting has no perplexity."""
    style = look(number)
    marker, colour = look(number, every=1)["marker"], style["color"]
    values = [math.nan if line["perplexity"] is None else line["perplexity"] for line in group]
    if joined:
        panel.plot(where, values, **style, zorder=3)
    high = panel.get_ylim()[1]
    points = [*zip(where, group, values, strict=True)]
    for x, line, value in points:
        if math.isnan(value) or value > high:
            words = readable(line["perplexity"]) or ("div." if line["state"] == "diverged" else "miss.")
            at = {"transform": panel.get_xaxis_transform(), "rotation": 90, "ha": "center", "va": "top"}
            panel.text(x, _HEIGHTS[number], words, color=colour, fontsize=6.5, in_layout=False, **at)
    points = [point for point in points if point[2] <= high]
    bars = [(x, line["min"], line["max"]) for x, line, _ in points if line["seeds"] > 1]
    if bars:
        panel.vlines(*zip(*bars, strict=True), color=colour, linewidth=0.8, zorder=3)
    for face in (colour, PAPER):
        drawn = [(x, value) for x, line, value in points if never_fires(line) == (face == PAPER)]
        if drawn:
            panel.plot(
                *zip(*drawn, strict=True), marker=marker, markersize=3.2, color=colour, markeredgecolor=colour,
                linestyle="none", markerfacecolor=face, markeredgewidth=0.8, zorder=4,
            )  # fmt: skip
    # For the legend: a label on what is always there, even where no point of the curve lies inside the panel.
    stroke = style["linestyle"] if joined else "none"
    panel.plot([], [], color=colour, linestyle=stroke, marker=marker, label=label)


def _range(lines: Lines, form: str, kind: str) -> tuple[float, float]:
    """Return the ends of the vertical axis of a row of panels."""
    arms = {arm_name(form, kind, what) for what, *_ in _CURVES} | {control_name(arm_name(form, kind, K_SWEEP))}
    ended = [line for line in lines if line["perplexity"] is not None]
    drawn = [line["perplexity"] for line in ended if line["arm"] in arms]
    if not drawn:
        return 1.0, HIGHEST
    low = min(line["perplexity"] for line in ended if line["arm"] in {*arms, MOMENTUM_FREE})
    return low * 0.97, max(min(max(drawn) * 1.03, HIGHEST * low), low * 1.1)
