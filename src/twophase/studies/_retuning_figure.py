"""The figure of the study `retuning`: perplexity against period and momentum, one panel a communication period."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from twophase.figures.style import INK, MUTED, PAPER, look, new_page
from twophase.recipes.paper import BETA_SWEEP, BOTH_FORMS, K_SWEEP, OWN_K_SWEEP, RULES, arm_name, control_name
from twophase.rule import FORM_WORDS
from twophase.studies._lm import pick
from twophase.studies._lm_figures import never_fires, note
from twophase.sweep.grid import MOMENTUM_FREE
from twophase.sweep.table import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from twophase.studies.study import Result

HIGHEST = 1.7
"""A panel ends at this multiple of the best of its row; what lies above is written at its upper edge."""
Lines = Sequence[Mapping[str, Any]]


def draw(result: Result) -> Figure:
    """Rows: form and rule; columns: communication periods; below each panel the periods K, above it the momenta."""
    settings, lines = result.settings, result.rows
    rules, inner_steps = list(product(BOTH_FORMS, RULES)), settings["inner_steps"]
    free = {facts["inner_steps"]: facts for facts in result.numbers["places"].values()}
    figure = new_page(1.1 + 1.7 * len(rules))
    axes = figure.subplots(len(rules), len(inner_steps), squeeze=False, sharey="row")
    for number, (row, rule) in enumerate(zip(axes, rules, strict=True)):
        low, high = _range(lines, *rule)
        for panel, steps in zip(row, inner_steps, strict=True):
            panel.set_yscale("log")
            panel.set_ylim(low, high)
            above = _draw_panel(panel, pick(lines, inner_steps=steps), rule, free[steps], settings)
            if number > 0:
                above.set_xticklabels([])
        ticks = sorted({float(f"{tick:.2g}") for tick in np.geomspace(low, high, 6)})
        ticks = [tick for tick in ticks if low <= tick <= high]
        row[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        row[0].minorticks_off()
        row[0].set_ylabel(f"{FORM_WORDS[rule[0]]}, {rule[1]}\nperplexity a token", fontsize=7)
    for panel, steps in zip(axes[0], inner_steps, strict=True):
        panel.set_title(f"S={steps}, {settings['rounds'][steps]} rounds\nmomentum", fontsize=7, pad=14)
    for panel in axes[-1]:
        panel.set_xlabel("restart period K", fontsize=7, labelpad=1)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, labelcolor=INK)
    seeds = "Means over the seeds, bars from the smallest to the largest. " if len(settings["seeds"]) > 1 else ""
    note(
        figure,
        f"{seeds}Tuned at S={settings['tuned_at']}, K** with K={settings['tuning_period']}. Hollow: the period never "
        "fires.\nAt the upper edge: values beyond it, div. for diverged, miss. for missing.\n"
        "Horizontal: momentum-free SGD at its best (dashed), plain averaging (dotted).",
    )
    return figure


_MATCHED = 7
"""Look of the gain-matched controls."""
_HEIGHTS = {1: 0.98, 2: 0.84, 3: 0.70, _MATCHED: 0.56}
"""Each curve has a height of its own at the upper edge, so that words at one place do not cover each other."""
_CURVES = (
    (BETA_SWEEP, 1, "no restart, over momentum (top)"),
    (K_SWEEP, 2, "K*: restarts at the setting tuned without"),
    (OWN_K_SWEEP, 3, "K**: restarts at the setting tuned with them"),
)


def _draw_panel(panel: Axes, here: Lines, rule: tuple[str, str], free: Mapping[str, Any], settings: Any) -> Any:
    """Draw one form and rule at one communication period; return the axis above."""
    periods, momenta = settings["periods"], settings["momenta"]
    at_period = {str(period): float(number) for number, period in enumerate(periods)}
    # The momenta are spread over the same width, with an axis of their own above.
    at_momentum = dict(zip(momenta, np.linspace(0, len(periods) - 1, len(momenta)).tolist(), strict=True))
    for name, style in (("momentum_free", "--"), ("averaging", ":")):
        if free[name] and free[name]["perplexity"]:
            panel.axhline(free[name]["perplexity"], color=MUTED, linestyle=style, linewidth=0.9, zorder=1)
    drawn = 0
    for what, number, label in _CURVES:
        group = pick(here, arm=arm_name(*rule, what))
        where = [at_momentum[line["momentum"]] if what == BETA_SWEEP else at_period[line["restart"]] for line in group]
        drawn += len(group)
        _draw_curve(panel, where, group, number, label)
    matched = pick(here, arm=control_name(arm_name(*rule, K_SWEEP)))
    where = [at_period[line["of_restart"]] for line in matched]
    _draw_curve(panel, where, matched, _MATCHED, "no restart, mean gain of K*", joined=False)
    if not drawn:
        panel.text(0.5, 0.5, "no runs", transform=panel.transAxes, ha="center", color=MUTED, fontsize=7)
    panel.set_xticks(range(len(periods)), [str(period) for period in periods])
    panel.set_xlim(-0.5, len(periods) - 0.5)
    above = panel.secondary_xaxis("top")
    above.set_xticks(list(at_momentum.values()), [f"{momentum:g}" for momentum in momenta])
    for axis in (panel, above):
        axis.tick_params(length=2, pad=1.5, labelsize=6.5)
    return above


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
    for x, line, value in zip(where, group, values, strict=True):
        if math.isnan(value) or value > high:
            words = readable(line["perplexity"]) or ("div." if line["state"] == "diverged" else "miss.")
            at = {"transform": panel.get_xaxis_transform(), "rotation": 90, "ha": "center", "va": "top"}
            panel.text(x, _HEIGHTS[number], words, color=colour, fontsize=5.5, **at)
            continue
        if line["seeds"] > 1:
            panel.vlines(x, line["min"], line["max"], color=colour, linewidth=0.8, zorder=3)
        panel.plot(
            [x], [value], marker=marker, markersize=3.2, color=colour, markeredgecolor=colour, linestyle="none",
            markerfacecolor=PAPER if never_fires(line) else colour, markeredgewidth=0.8, zorder=4,
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
