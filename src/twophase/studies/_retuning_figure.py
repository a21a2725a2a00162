"""The figure of the study `retuning`: perplexity against period and momentum, one panel a communication period."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    names = [(form, kind) for form in BOTH_FORMS for kind in RULES]
    places = result.numbers["places"]
    figure = new_page(1.1 + 1.7 * len(names))
    axes = figure.subplots(len(names), len(settings["inner_steps"]), squeeze=False, sharey="row")
    for number, (form, kind) in enumerate(names):
        low, high = _range(lines, form, kind)
        for panel, inner_steps in zip(axes[number], settings["inner_steps"], strict=True):
            panel.set_yscale("log")
            panel.set_ylim(low, high)
            here = pick(lines, inner_steps=inner_steps)
            free = next(facts for facts in places.values() if facts["inner_steps"] == inner_steps)
            _draw_panel(panel, here, (form, kind), free, settings, top_labels=number == 0)
        ticks = sorted({float(f"{tick:.2g}") for tick in np.geomspace(low, high, 6)})
        axes[number, 0].set_yticks(
            [tick for tick in ticks if low <= tick <= high], [f"{t:g}" for t in ticks if low <= t <= high]
        )
        axes[number, 0].minorticks_off()
        axes[number, 0].set_ylabel(f"{FORM_WORDS[form]}, {kind}\nperplexity a token", fontsize=7)
    for panel, inner_steps in zip(axes[0], settings["inner_steps"], strict=True):
        panel.set_title(f"S={inner_steps}, {settings['rounds'][inner_steps]} rounds\nmomentum", fontsize=7, pad=14)
    for panel in axes[-1]:
        panel.set_xlabel("restart period K", fontsize=7, labelpad=1)
    _legend(figure, axes[0, 0])
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
_CURVES = (
    (BETA_SWEEP, 1, "no restart, over momentum (top)"),
    (K_SWEEP, 2, "K*: restarts at the setting tuned without"),
    (OWN_K_SWEEP, 3, "K**: restarts at the setting tuned with them"),
)


def _draw_panel(
    panel: Axes, here: Lines, place: tuple[str, str], free: Mapping[str, Any], settings: Any, *, top_labels: bool
) -> None:
    periods, momenta = settings["periods"], settings["momenta"]
    at_period = {str(period): float(number) for number, period in enumerate(periods)}
    # The momenta are spread over the same width, with an axis of their own above.
    at_momentum = dict(zip(momenta, np.linspace(0, len(periods) - 1, len(momenta)).tolist(), strict=True))
    for name, style in (("momentum_free", "--"), ("averaging", ":")):
        if free[name] and free[name]["perplexity"]:
            panel.axhline(free[name]["perplexity"], color=MUTED, linestyle=style, linewidth=0.9, zorder=1)
    drawn = 0
    for what, number, label in _CURVES:
        group = pick(here, arm=arm_name(*place, what))
        where = [at_momentum[line["momentum"]] if what == BETA_SWEEP else at_period[line["restart"]] for line in group]
        drawn += len(group)
        _draw_curve(panel, where, group, number, label)
    matched = pick(here, arm=control_name(arm_name(*place, K_SWEEP)))
    where = [at_period[line["of_restart"]] for line in matched]
    _draw_curve(panel, where, matched, _MATCHED, "no restart, mean gain of K*", joined=False)
    if not drawn:
        panel.text(0.5, 0.5, "no runs", transform=panel.transAxes, ha="center", color=MUTED, fontsize=7)
    panel.set_xticks(range(len(periods)), [str(period) for period in periods])
    panel.set_xlim(-0.5, len(periods) - 0.5)
    above = panel.secondary_xaxis("top")
    above.set_xticks(list(at_momentum.values()), [f"{momentum:g}" for momentum in momenta] if top_labels else [])
    for axis in (panel, above):
        axis.tick_params(length=2, pad=1.5, labelsize=6.5)


def _draw_curve(
    panel: Axes, where: Sequence[float], group: Lines, number: int, label: str, *, joined: bool = True
) -> None:
    """One curve with the range of its seeds; it breaks off where a setting has no perplexity."""
    style = look(number)
    marker, colour = look(number, every=1)["marker"], style["color"]
    values = [math.nan if line["perplexity"] is None else line["perplexity"] for line in group]
    if joined:
        panel.plot(where, values, **style, zorder=3)
    high = panel.get_ylim()[1]
    for x, line, value in zip(where, group, values, strict=True):
        if math.isnan(value) or value > high:
            words = readable(line["perplexity"]) or ("div." if line["state"] == "diverged" else "miss.")
            # Each curve has a height of its own there, so that words at one place do not cover each other.
            at = {"transform": panel.get_xaxis_transform(), "rotation": 90, "ha": "center", "va": "top"}
            panel.text(x, _HEIGHTS[number], words, color=colour, fontsize=5.5, **at)
            continue
        hollow = never_fires(line)
        if line["seeds"] > 1:
            panel.vlines(x, line["min"], line["max"], color=colour, linewidth=0.8, zorder=3)
        panel.plot(
            [x], [value], marker=marker, markersize=3.2, color=colour, markeredgecolor=colour, linestyle="none",
            markerfacecolor=PAPER if hollow else colour, markeredgewidth=0.8, zorder=4,
        )  # fmt: skip
    # For the legend: a label on what is always there, even where no point of the curve lies inside the panel.
    stroke = style["linestyle"] if joined else "none"
    panel.plot([], [], color=colour, linestyle=stroke, marker=marker, label=label)


def _range(lines: Lines, form: str, kind: str) -> tuple[float, float]:
    """Ends of the vertical axis of a row of panels."""
    arms = {arm_name(form, kind, what) for what, *_ in _CURVES} | {control_name(arm_name(form, kind, K_SWEEP))}
    found = [line["perplexity"] for line in lines if line["arm"] in arms and line["perplexity"] is not None]
    free = [line["perplexity"] for line in pick(lines, arm=MOMENTUM_FREE) if line["perplexity"] is not None]
    if not found:
        return 1.0, HIGHEST
    low = min(found + free)
    return low * 0.97, max(min(max(found) * 1.03, HIGHEST * low), low * 1.1)


def _legend(figure: Figure, panel: Axes) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, labelcolor=INK)
