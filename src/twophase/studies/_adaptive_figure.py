"""The figure of the studies on adaptive policies: the range of every arm over its grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twophase.figures.style import INK, MUTED, look, new_page
from twophase.recipes.adaptive import FIXED
from twophase.studies._adaptive import CHOSEN, arms_of
from twophase.studies._lm_figures import note
from twophase.studies.study import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(result: Result) -> Figure:
    """Draw of every arm the geometric mean over its grid, from its best setting to its worst.

    Rows: form and rule; columns: places. The vertical line is plain averaging.
    """
    places: Mapping[str, Any] = result.numbers["places"]
    names = list(places)
    rules = list(dict.fromkeys(rule for facts in places.values() for rule in facts["rules"]))
    drawn = {rule: arms_of(facts["rules"].get(rule, {}) for facts in places.values()) for rule in rules}
    heights = [0.3 + 0.125 * len(drawn[rule]) for rule in rules]
    figure = new_page(0.8 + sum(heights))
    shape: dict[str, Any] = {"sharey": "row", "sharex": "col", "gridspec_kw": {"height_ratios": heights}}
    panels = figure.subplots(len(rules), len(names), squeeze=False, **shape)
    for row, rule in zip(panels, rules, strict=True):
        for panel, name in zip(row, names, strict=True):
            lines = places[name]["rules"].get(rule, {})
            for height, arm in enumerate(reversed(drawn[rule])):
                if arm in lines:
                    _draw_range(
                        panel, height, lines[arm], look(2 if arm == CHOSEN else 1 if arm in FIXED else 0)["color"]
                    )
            if places[name]["averaging"] is not None:
                panel.axvline(places[name]["averaging"], color=INK, linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)
            panel.set_xscale("log")
            panel.set_yticks(range(len(drawn[rule])), list(reversed(drawn[rule])), fontsize=6)
            panel.set_ylim(-0.7, len(drawn[rule]) - 0.3)
            panel.tick_params(axis="x", labelsize=6)
        row[0].set_ylabel(rule, fontsize=7.5)
    for column in panels.T:
        _plain_ticks(column)
    for panel, name in zip(panels[0], names, strict=True):
        panel.set_title(name.replace(", ", "\n", 1), fontsize=7)
    panels[-1][len(names) // 2].set_xlabel("validation perplexity a token", fontsize=6.5)
    count = len(result.settings["seeds"])
    seeds = f"Means over up to {count} seeds." if count > 1 else "One seed."
    dot = "Dot: geometric mean over the grid; line: from its best setting to its worst. Dashed: averaging."
    note(figure, f"{dot} {seeds}")
    return figure


def _draw_range(panel: Any, height: int, line: Mapping[str, Any], colour: Any) -> None:
    """Draw one arm in one panel."""
    if line["best"] is None:
        panel.annotate(f"{line['diverged']} div.", (0.02, height), xycoords=("axes fraction", "data"), **_SMALL)
        return
    right = line["worst"] if line["worst"] is not None else line["best"]
    panel.plot([line["best"], right], [height, height], color=colour, linewidth=1.1)
    if line["geometric_mean"] is not None:
        panel.plot(line["geometric_mean"], height, marker="o", color=colour, markersize=3.2)
    if line["diverged"]:
        panel.annotate(f" {line['diverged']} div.", (right, height), **_SMALL)


_SMALL: dict[str, Any] = {"fontsize": 5.5, "color": MUTED, "va": "center"}
_MOST_TICKS = 6


def _plain_ticks(column: Any) -> None:
    """Set a few plain numbers instead of powers of ten on the shared logarithmic axis of a column."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: PLC0415 - an extra

    low, high = column[0].get_xlim()
    for subs in ((1, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [sub * 10.0**power for power in range(-1, 12) for sub in subs if low <= sub * 10.0**power <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    for panel in column:
        panel.xaxis.set_major_locator(FixedLocator(ticks))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_locator(NullLocator())
