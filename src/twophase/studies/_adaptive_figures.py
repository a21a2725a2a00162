"""Drawing of the two studies on adaptive policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twophase.figures.style import INK, MUTED, headline, look, new_figure, share_legend, span
from twophase.judge.bootstrap import LEVEL
from twophase.recipes.adaptive import FIXED
from twophase.studies._adaptive import AVERAGING, BEST_K, CHOSEN, TUNED_FREE, arms_of
from twophase.studies._lm import judged, measure
from twophase.studies.study import Result
from twophase.sweeps.table import arm_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(result: Result) -> Figure:
    """Rows: the arms; across: the geometric mean over the grid over that of the chosen arm; a panel a place."""
    places: Mapping[str, Any] = result.numbers["places"]
    rules = list(dict.fromkeys(rule for facts in places.values() for rule in facts["rules"]))
    every = [facts["rules"][rule] for facts in places.values() for rule in facts["rules"]]
    arms = [arm for arm in arms_of(every) if arm != CHOSEN] + [AVERAGING, TUNED_FREE]
    figure, panels, spare = _panels(len(places), 0.165 * len(arms))
    for panel, (name, facts) in zip(panels, places.items(), strict=True):
        for number, rule in enumerate(rules):
            some = [(arms.index(arm), line["over_chosen"]) for arm, line in _shown(facts["rules"].get(rule, {}), arms)]
            style = look(number, every=1)
            marks = {"linestyle": "none", "marker": style["marker"], "color": style["color"], "label": rule}
            panel.plot([over["mean"] for _, over in some], [row for row, _ in some], markersize=4, **marks)
            for row, over in some:
                if over["low"] is not None:
                    panel.plot([over["low"], over["high"]], [row, row], color=style["color"], linewidth=0.9)
        panel.axvline(1, color=INK, linewidth=0.8, zorder=0)
        panel.set_xscale("log")
        panel.set_yticks(range(len(arms)), map(arm_name, arms))
        panel.set_ylim(len(arms) - 0.3, -0.7)
        panel.set_title(name, fontsize=8)
        panel.grid(axis="y", color="#ebebeb", linewidth=0.5)
        _plain_ticks([panel])
    for panel in panels[-3:]:
        panel.set_xlabel(f"over {CHOSEN} (right of 1: {CHOSEN} is better)", fontsize=7)
    count = len(result.settings["seeds"])
    seeds = f"means over up to {count} seeds; bars: the bootstrap's {LEVEL:.0%}" if count > 1 else "one seed"
    headline(
        figure,
        _finding(places),
        f"{judged(result.settings)}, geometric mean over learning rates and momenta, divided by {CHOSEN}'s: further "
        "right is worse\n"
        f"{TUNED_FREE}: one setting, chosen on these runs; {seeds}",
    )
    share_legend(figure, panels[:1], spare, columns=4)
    return figure


def _shown(lines: Mapping[str, Any], arms: Sequence[str]) -> list[tuple[str, Any]]:
    return [(arm, line) for arm, line in lines.items() if arm in arms and line["over_chosen"]]


def _panels(count: int, height: float) -> tuple[Figure, list[Any], list[Any]]:
    """Make a panel for each place, up to three a row; return the figure, the panels, and the places left empty."""
    columns = min(3, count)
    rows = -(-count // columns)
    figure, grid = new_figure(1.6 + rows * (0.6 + height), rows, columns, sharey=True)
    return figure, list(grid.flat)[:count], list(grid.flat)[count:]


def _finding(places: Mapping[str, Any]) -> str:
    """Count the arms over which the chosen one is ahead over the grid, and hold it against the two single settings."""
    ratios: dict[str, list[float]] = {}
    for facts in places.values():
        for lines in facts["rules"].values():
            for arm, line in lines.items():
                if arm not in (CHOSEN, BEST_K) and line["over_chosen"]:
                    ratios.setdefault(arm, []).append(line["over_chosen"]["mean"])
    single = {
        what: f"{what} {span(some, '.2f')} times it"
        for what in (AVERAGING, TUNED_FREE)
        if (some := ratios.pop(what, []))
    }
    every = [ratio for some in ratios.values() for ratio in some]
    if not every:
        return f"Nothing is known yet: {CHOSEN} and no other arm have both finished"
    ahead = sum(ratio > 1 for ratio in every)
    words = f"{CHOSEN} is below every other arm" if ahead == len(every) else f"{CHOSEN} is below other arms"
    return "; ".join([f"Over the grid {words} in {ahead} of {len(every)} comparisons", *single.values()])


def details(result: Result) -> dict[str, Figure]:
    """Draw from the best setting of every arm to its worst, a figure a form and rule."""
    rules = dict.fromkeys(rule for facts in result.numbers["places"].values() for rule in facts["rules"])
    return {rule.replace(" ", "-").lower(): _ranges(result, rule) for rule in rules}


def _ranges(result: Result, rule: str) -> Figure:
    places: Mapping[str, Any] = result.numbers["places"]
    arms = arms_of(facts["rules"].get(rule, {}) for facts in places.values())
    figure, panels, spare = _panels(len(places), 0.165 * len(arms))
    for panel, (name, facts) in zip(panels, places.items(), strict=True):
        lines = facts["rules"].get(rule, {})
        for height, arm in enumerate(reversed(arms)):
            if arm in lines:
                _draw_range(panel, height, lines[arm], look(2 if arm == CHOSEN else 1 if arm in FIXED else 0)["color"])
        if facts["averaging"] is not None:
            panel.axvline(facts["averaging"], color=INK, linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)
        panel.set_xscale("log")
        panel.set_yticks(range(len(arms)), map(arm_name, reversed(arms)))
        panel.set_ylim(-0.7, len(arms) - 0.3)
        panel.set_title(name, fontsize=8)
        _plain_ticks([panel])
    for panel in panels[-3:]:
        panel.set_xlabel(f"{judged(result.settings, unit=True)} (lower is better)", fontsize=7)
    for axes in spare:
        axes.set_axis_off()
    headline(
        figure,
        f"{rule}: {_spread_words(places, rule, measure(result.settings))}",
        f"validation {judged(result.settings, unit=True)}, lower is better; dot: geometric mean over the grid\n"
        "line: from the best setting to the worst; dashed: plain averaging",
    )
    return figure


def _spread_words(places: Mapping[str, Any], rule: str, measure: str) -> str:
    """Say by how much the worst setting exceeds the best, of the chosen arm and of all others."""
    spreads: dict[bool, list[float]] = {True: [], False: []}
    for facts in places.values():
        for arm, line in facts["rules"].get(rule, {}).items():
            if arm not in (BEST_K, AVERAGING, TUNED_FREE) and line["worst"] and line["best"]:
                spreads[arm == CHOSEN].append(line["worst"] / line["best"] - 1)
    words = [
        f"by {span(some, '.0%')} with {name}"
        for name, some in ((CHOSEN, spreads[True]), ("other arms", spreads[False]))
        if some
    ]
    return f"from best to worst setting {measure} rises {', '.join(words)}" if words else "no arm has finished its grid"


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


_SMALL: dict[str, Any] = {"fontsize": 6.5, "color": MUTED, "va": "center"}
_MOST_TICKS = 5


def _plain_ticks(column: Any) -> None:
    """Set a few plain numbers instead of powers of ten on the logarithmic axis of some panels."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: PLC0415 - an extra

    low, high = column[0].get_xlim()
    for subs in ((1, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [sub * 10.0**power for power in range(-9, 12) for sub in subs if low <= sub * 10.0**power <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    for panel in column:
        panel.xaxis.set_major_locator(FixedLocator(ticks))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_locator(NullLocator())
