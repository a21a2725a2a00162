"""The maps of a sweep's page: one for each arm, as the figures draw them, whose cells put their curves on the page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twophase.figures.heatmaps import Panel, Scale, scale_of, shade, tile
from twophase.figures.overview import Placed, cut
from twophase.judge.verdict import ArmVerdict, Verdict
from twophase.report.page import Html, join, link, minus, scroll, tag
from twophase.report.plot import Chart, Curve
from twophase.report.sweep_record import SweepRecord
from twophase.sweeps.table import Setting, State, arm_name, measure_of, place_words, readable

_MOST_MAPS, _LONGEST_AXIS, _MOST_POINTS = 24, 60, 60
_OUTLINED = 0.25
"""As in the figures: relative distance from the best of all."""


def perplexity_text(value: float | None) -> str:
    """Return a perplexity in about three digits, written out up to a million."""
    return f"{value:,.0f}" if value is not None and 1e4 <= value < 1e6 else minus(readable(value))


def value_text(value: Any, spec: str = "g") -> str:
    """Return a value of a setting; nothing for an axis that is not there."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    return minus(format(value, spec)) if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class View:
    """What a page needs to show any setting.

    Args:
        record: the sweep.
        judged: its verdict.
        cells: its settings.
        curves: the number of each setting's curve, by arm and runs.
    """

    record: SweepRecord
    judged: Verdict
    cells: Sequence[Setting]
    curves: Mapping[tuple[str, tuple[str, ...]], int]

    def number(self, setting: Setting, title: str) -> Html:
        """Return the setting's number or state as a button that shows its curve, or as text where it has none."""
        if setting.result is None:
            text = "diverged" if setting.state == "diverged" else "missing"
        else:
            text = perplexity_text(setting.result)
        curve = self.curves.get((setting.arm, setting.runs))
        if curve is None:
            return tag("span", text)
        label = f"{text}, {title}: its curve"
        return tag("button", text, type="button", aria_pressed="false", aria_label=label, data_curve=curve)

    def runs(self, setting: Setting) -> Html:
        """Return a link for each seed, with what became of those that have no result, or a single one."""
        if len(setting.runs) == 1:
            return tag("span", link("run", self.record.page_of(setting.runs[0])), class_="runs")
        marks = {"finished": "", "diverged": " div.", "missing": " miss."}
        seeds = zip(setting.seeds, setting.runs, setting.states, strict=True)
        links = (link(f"{seed}{marks.get(state, '')}", self.record.page_of(run)) for seed, run, state in seeds)
        return tag("span", tag("span", "seeds ", class_="quiet"), join(links, " "), class_="runs")


def is_map(judged: Verdict) -> bool:
    """Return whether an arm varies along two axes, or one along an axis that another arm does not vary."""
    paths = {path for arm in judged.arms for path in arm.varied}
    return len(paths) > 1 or sum(arm.settings for arm in judged.arms) > _MOST_POINTS


def maps(view: View) -> Iterator[Html | None]:
    """Yield the maps of every arm."""
    finished = [setting.result for setting in view.cells if setting.result is not None]
    scale = scale_of(finished, _OUTLINED)
    best = f" ({perplexity_text(scale.low)}), so at most {perplexity_text(scale.bound)}" if finished else ""
    yield tag(
        "p",
        f"Each number is a setting's {measure_of(view.cells)} on held-out data, mean over its "
        "seeds. Lower is better and lighter. "
        f"The thick line goes around what is within {_OUTLINED:.0%} of the best of all{best}. Press a number to show "
        "or hide its curve; the links below it are its seeds and lead to its runs.",
    )
    boxes = []
    for arm in view.judged.arms:
        title = f"{arm_name(arm.arm)}{f' (control: {arm.control})' if arm.control else ''}"
        placed, note = _paired_places(arm, view), "Each number stands at the setting that it is the control of"
        if placed is None:
            placed, note = [(setting.values, setting) for setting in view.cells if setting.arm == arm.arm], ""
        elements = tag("div", *_arm_maps(arm, placed, scale, view), class_="frames")
        caption = tag("p", f"{note}; what it differs in is below it.") if note else None
        boxes.append(tag("div", tag("h3", title), caption, elements))
    yield tag("div", *boxes, class_="maps")
    yield tag(
        "p",
        f"One logarithmic scale of colours for all maps, from {perplexity_text(scale.low)} to "
        f"{perplexity_text(scale.high)}; what is worse has the same colour. A setting with a diverged or a missing "
        "seed has no mean.",
    )


def _paired_places(arm: ArmVerdict, view: View) -> Sequence[Placed] | None:
    """Return the settings of a paired control with the places of the settings that they control.

    A paired control has a different learning rate for each setting; on its axes the map would be half empty. None for
    another arm, and where two settings would have one place.
    """
    if arm.control != "paired":
        return None
    controlled = {row.run: row.control_of for row in view.record.rows if row.arm == arm.arm}
    values_by_run = {run: setting.values for setting in view.cells if setting.arm != arm.arm for run in setting.runs}
    settings = [setting for setting in view.cells if setting.arm == arm.arm]
    partners = [values_by_run.get(controlled.get(setting.runs[0]) or "") for setting in settings]
    placed = [
        ({path: values.get(path) for path in arm.varied}, setting)
        for values, setting in zip(partners, settings, strict=True)
        if values is not None
    ]
    distinct = {tuple(values.items()) for values, _ in placed}
    return placed if len(distinct) == len(settings) else None


def _arm_maps(arm: ArmVerdict, placed: Sequence[Placed], scale: Scale, view: View) -> Iterator[Html]:
    axes = {path: _ordered({values.get(path) for values, _ in placed}) for path in arm.varied}
    cuts = cut(placed, axes)
    if any(len(axes.get(path, ())) > _LONGEST_AXIS for path in cuts[0].axes[:2]):
        yield tag("p", f"An axis has more than {_LONGEST_AXIS} values; see the table of every cell.")
        return
    if len(cuts) > _MOST_MAPS:
        yield tag("p", f"The first {_MOST_MAPS} of {len(cuts):,} maps; the table of every cell has all.")
    name = arm_name(arm.arm)
    for group in cuts[:_MOST_MAPS]:
        across, up, *_ = group.axes
        remarks = [f"{path} {value_text(value)}" for path, value in group.fixed.items()]
        remarks += [f"{way}: {path}" for way, path in (("across", across), ("up", up)) if path]
        cells = [[tile(setting) for _, setting in row] for row in group.rows]
        panel = Panel("; ".join([name, *remarks]), axes.get(across, []), axes.get(up, []), cells)
        # In the corner the names of the axes would take most of a phone's width; the caption wraps.
        caption = (
            tag("span", f"{name}; ", class_="quiet"),
            join((tag("span", word, class_="once") for word in remarks), "; "),
        )
        inside = [[list(_inside(*entry, view)) for entry in row] for row in group.rows]
        yield scroll(heat(panel, scale, caption, lambda i, j, inside=inside: inside[j][i]), panel.title)


def heat(panel: Panel, scale: Scale, caption: Sequence[object], inside: Callable[[int, int], Sequence[object]]) -> Html:
    """Return a heatmap as a table, the largest y value on top and the x values below, as in the figures.

    Args:
        panel: states and values of the cells; an axis without values has no heads.
        scale: scale of the colours, and the bound inside of which cells are outlined.
        caption: elements.
        inside: content of the cell of a column and a row.
    """
    good = {(i, j) for i, j, _, value in panel.tiles() if value is not None and value <= scale.bound}

    def cell(i: int, j: int, state: State, value: float | None) -> Html:
        if value is None:
            return tag("td", *inside(i, j), class_="gone" if state == "diverged" else "void")
        ground, ink = shade(value, scale)
        looks = _edges(good, i, j) or None
        return tag("td", *inside(i, j), style=f"background:rgb{ground};color:{ink}", class_=looks)

    rows = [
        tag(
            "tr",
            tag("th", value_text(panel.y[j]), scope="row") if panel.y else None,
            *(cell(i, j, *place) for i, place in enumerate(row)),
        )
        for j, row in enumerate(panel.cells)
    ]
    heads = tag("tr", tag("td") if panel.y else None, *(tag("th", value_text(x), scope="col") for x in panel.x))
    foot = tag("tfoot", heads) if panel.x else None
    return tag("table", tag("caption", *caption), tag("tbody", *reversed(rows)), foot, class_="heat")


def _edges(good: Collection[tuple[int, int]], i: int, j: int) -> str:
    """Return the classes of a cell's sides that lie between what is outlined and what is not."""
    sides = {"et": (i, j + 1), "eb": (i, j - 1), "el": (i - 1, j), "er": (i + 1, j)}
    return " ".join(side for side, other in sides.items() if (i, j) in good and other not in good)


def _inside(values: Mapping[str, Any], setting: Setting | None, view: View) -> Iterator[Html | None]:
    if setting is None:
        yield tag("span", "–", title="the design has no such setting")
        return
    differences = ", ".join(
        f"{path.rpartition('.')[2]} {value_text(setting.values.get(path), '.3g')}"
        for path, value in values.items()
        if path and setting.values.get(path) != value
    )
    number = view.number(setting, place_text(setting, [path for path in values if path]))
    is_best = setting == view.judged.best
    yield tag("strong", number) if is_best else number
    yield tag("small", differences) if differences else None
    yield tag("small", "best of all") if is_best else None
    yield tag("small", view.runs(setting))


def place_text(setting: Setting, varied: Sequence[str]) -> str:
    """Name a setting by its arm and what varies in it."""
    name = arm_name(setting.arm) if setting.arm else ""
    return ", ".join(filter(None, [name, place_words(setting.values, varied)])) or "the setting"


def _ordered(values: Collection[Any]) -> list[Any]:
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return [*sorted(numbers), *sorted((v for v in values if v not in numbers), key=str)]


def points(view: View) -> Chart:
    """Return the chart of a sweep along one axis, or none: a point for each run, a column for each setting.

    The settings of a categorical axis, such as the restart policy, are separate arms and have no map.
    """
    names: list[str] = []
    columns: list[list[tuple[Any, float]]] = []
    for setting in view.cells:
        varied = next(arm.varied for arm in view.judged.arms if arm.arm == setting.arm)
        results = zip(setting.seeds, setting.results, strict=True)
        names.append(place_text(setting, varied))  # of settings near each other the same
        columns.append([(seed, value) for seed, value in results if value is not None])
    seeds = list(dict.fromkeys(seed for results in columns for seed, _ in results))
    curves = []
    for number, seed in enumerate(seeds):
        # Beside each other, or equal results would hide one another.
        aside = 0.3 * (number / (len(seeds) - 1) - 0.5) if len(seeds) > 1 else 0.0
        points_ = [
            (column + aside, value)
            for column, results in enumerate(columns)
            for other, value in results
            if other == seed
        ]
        curves.append(Curve("run" if seed is None else f"seed {seed}", *zip(*points_, strict=True), dots=True))
    return Chart(
        "settings",
        "Result of each setting on held-out data",
        "setting",
        measure_of(view.cells),
        curves,
        names=names,
        note="A point for each run; lower is better.",
    )
