"""The heatmaps of a sweep's page: one for each arm, cut along further axes, with cells that lead to their runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from twophase.figures.heatmaps import Scale, scale_of, shade
from twophase.figures.overview import Placed, cut
from twophase.judge.verdict import ArmVerdict, Verdict
from twophase.report.page import Html, join, link, minus, scroll, tag
from twophase.report.sweep_record import SweepRecord
from twophase.sweep.table import Setting, readable

_MOST_MAPS, _LONGEST_AXIS = 24, 60


def arm_name(arm: str) -> str:
    """Return an arm's name; that of a sweep over restarts alone would be a bare "never"."""
    return re.sub(r"^never(?=,|$)", "no restart", arm)


def perplexity_text(value: float | None) -> str:
    """Return a perplexity in about three digits, written out up to a million."""
    return f"{value:,.0f}" if value is not None and 1e4 <= value < 1e6 else minus(readable(value))


def value_text(value: Any, spec: str = "g") -> str:
    """Return a value of a setting."""
    if isinstance(value, bool):
        return str(value).lower()
    return minus(format(value, spec)) if isinstance(value, float) else str(value)


def heatmaps(record: SweepRecord, judged: Verdict, cells: Sequence[Setting]) -> Iterator[Html | None]:
    """Yield the maps of every arm.

    Args:
        record: the sweep.
        judged: its verdict, for the arms and the best setting.
        cells: its settings.
    """
    scale = scale_of([setting.perplexity for setting in cells if setting.perplexity is not None])
    yield tag(
        "p",
        "Validation perplexity a token, mean over the seeds; lower is better and lighter, on one logarithmic scale for "
        f"all maps, from {perplexity_text(scale.low)} to {perplexity_text(scale.high)}; what is worse has the same "
        "colour. The best of all is framed. A setting with a diverged or a missing seed has no mean. Each number leads "
        "to its run.",
    )
    boxes = []
    for arm in judged.arms:
        title = f"{arm_name(arm.arm) or 'All settings'}{f' (control: {arm.control})' if arm.control else ''}"
        placed, note = _paired_places(arm, cells, record), "Each number stands at the setting that it is the control of"
        if placed is None:
            placed, note = [(setting.values, setting) for setting in cells if setting.arm == arm.arm], ""
        maps = tag("div", *_arm_maps(arm, placed, scale, judged.best, record), class_="frames")
        words = tag("p", f"{note}; what it differs in is below it.") if note else None
        boxes.append(tag("div", tag("h3", title), words, maps))
    yield tag("div", *boxes, class_="maps")


def _paired_places(arm: ArmVerdict, cells: Sequence[Setting], record: SweepRecord) -> Sequence[Placed] | None:
    """Return the settings of a paired control with the places of the settings that they control.

    A paired control has a learning rate of its own for each setting; on its own axes its map would be half empty.
    None for another arm, and where two settings would have one place.
    """
    if arm.control != "paired":
        return None
    controlled = {row.run: row.control_of for row in record.rows if row.arm == arm.arm}
    values_by_run = {run: setting.values for setting in cells if setting.arm != arm.arm for run in setting.runs}
    settings = [setting for setting in cells if setting.arm == arm.arm]
    partners = [values_by_run.get(controlled.get(setting.runs[0]) or "") for setting in settings]
    placed = [
        ({path: values.get(path) for path in arm.varied}, setting)
        for values, setting in zip(partners, settings, strict=True)
        if values is not None
    ]
    distinct = {tuple(place.items()) for place, _ in placed}
    return placed if len(distinct) == len(settings) else None


def _arm_maps(
    arm: ArmVerdict, placed: Sequence[Placed], scale: Scale, best: Setting | None, record: SweepRecord
) -> Iterator[Html]:
    axes = {path: _ordered({place.get(path) for place, _ in placed}) for path in arm.varied}
    if any(len(values) > _LONGEST_AXIS for values in list(axes.values())[:2]):
        yield tag("p", f"An axis has more than {_LONGEST_AXIS} values; see the table of every cell.")
        return
    maps = cut(placed, axes)
    if len(maps) > _MOST_MAPS:
        yield tag("p", f"The first {_MOST_MAPS} of {len(maps):,} maps; the table of every cell has all.")
    name = arm_name(arm.arm) or "all settings"
    for each in maps[:_MOST_MAPS]:
        across, up, *_ = each.axes
        words = [f"{path} {value_text(value)}" for path, value in each.fixed.items()]
        words += [f"{way}: {path}" for way, path in (("across", across), ("down", up)) if path]
        rows = [
            tag(
                "tr",
                tag("th", value_text(y) if up else "", scope="row"),
                *(_cell(*place, scale, best, record) for place in row),
            )
            for y, row in zip(axes.get(up, [None]), each.rows, strict=True)
        ]
        heads = (tag("th", value_text(x), scope="col") for x in axes.get(across, [None]))
        element = tag(
            "table",
            # In the corner the names of the axes would take most of a phone's width; the caption wraps.
            tag(
                "caption",
                tag("span", f"{name}; ", class_="quiet"),
                join((tag("span", word, class_="once") for word in words), "; "),
            ),
            tag("thead", tag("tr", tag("td"), *heads)),
            tag("tbody", *rows),
            class_="heat",
        )
        yield scroll(element, "; ".join([name, *words]))


def _cell(
    place: Mapping[str, Any], setting: Setting | None, scale: Scale, best: Setting | None, record: SweepRecord
) -> Html:
    if setting is None:
        return tag("td", tag("span", "–"), class_="void", title="the design has no such setting")
    differences = ", ".join(
        f"{path.rpartition('.')[2]} {value_text(setting.values.get(path), '.3g')}"
        for path, value in place.items()
        if path and setting.values.get(path) != value
    )
    below, target = tag("small", differences) if differences else None, None
    if len(setting.runs) > 1:
        below = join([below, tag("small", _seed_links(setting, record))])
    else:
        target = record.page_of(setting.canonical[0])
    if setting.perplexity is None:
        word = "diverged" if setting.state == "diverged" else "missing"
        return tag("td", tag("span", link(word, target)), below, class_="gone" if word == "diverged" else "void")
    ground, ink = shade(setting.perplexity, scale)
    return tag(
        "td",
        link(perplexity_text(setting.perplexity), target),
        tag("small", "best of all") if setting == best else None,
        below,
        style=f"background:rgb{ground};color:{ink}",
        class_="best" if setting == best else None,
    )


def _seed_links(setting: Setting, record: SweepRecord) -> Html:
    """Return how many seeds, each leading to its run; what became of those that have no result."""
    marks = {"finished": "", "diverged": " div.", "missing": " miss."}
    seeds = zip(setting.seeds, setting.canonical, setting.states, strict=True)
    links = [link(f"{seed}{marks.get(state, '')}", record.page_of(run)) for seed, run, state in seeds]
    return join([f"{len(links)} seeds: ", join(links, ", ")])


def _ordered(values: Collection[Any]) -> list[Any]:
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return [*sorted(numbers), *sorted((v for v in values if v not in numbers), key=str)]
