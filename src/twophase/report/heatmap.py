"""The heatmaps of a sweep's page: one for each arm, cut along further axes, with cells that lead to their runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from twophase.figures.heatmaps import Scale, scale_of
from twophase.judge.verdict import ArmVerdict, Verdict
from twophase.report.labels import Links, arm_name, perplexity_text, value_text
from twophase.report.page import Html, join, link, scroll, tag
from twophase.report.sweep_record import SweepRecord
from twophase.sweep.table import Row, Setting

_MOST_FRAMES, _LONGEST_AXIS = 24, 60
_PAIRED = "Each number stands at the setting that it is the control of; what it differs in is below it."
_Placed = tuple[Mapping[str, Any], Setting]
# From good to bad, by lightness alone in order: the ends and quarters of matplotlib's viridis, reversed.
_COLOURS = ((253, 231, 37), (94, 201, 98), (33, 145, 140), (59, 82, 139), (68, 1, 84))


def heatmaps(record: SweepRecord, judged: Verdict, cells: Sequence[Setting], links: Links) -> Iterator[Html | None]:
    """Yield the maps of every arm.

    Args:
        record: the sweep.
        judged: its verdict, for the arms and the best setting.
        cells: its settings.
        links: to the runs.
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
        mine, paired = _places(arm, cells, record.rows)
        title = tag("h3", f"{arm_name(arm.arm) or 'All settings'}{f' (control: {arm.control})' if arm.control else ''}")
        maps = tag("div", *_arm_maps(arm, mine, scale, judged.best, links), class_="frames")
        boxes.append(tag("div", title, tag("p", _PAIRED) if paired else None, maps))
    yield tag("div", *boxes, class_="maps")


def _places(arm: ArmVerdict, cells: Sequence[Setting], rows: Sequence[Row]) -> tuple[Sequence[_Placed], bool]:
    """Return an arm's settings with their places on the maps, and whether these are those of the paired runs.

    A paired control has a learning rate of its own for each setting; on these axes its map would be half empty.
    """
    mine = [setting for setting in cells if setting.arm == arm.arm]
    unpaired = [(setting.values, setting) for setting in mine]
    of = {row.run: row.control_of for row in rows if row.arm == arm.arm}
    partners = {run: setting.values for setting in cells if setting.arm != arm.arm for run in setting.runs}
    there = [partners.get(of.get(setting.runs[0]) or "") for setting in mine]
    paired = [
        ({path: values.get(path) for path in arm.varied}, setting)
        for values, setting in zip(there, mine, strict=True)
        if values is not None
    ]
    different = {tuple(str(value) for value in values.values()) for values, _ in paired}
    if arm.control == "paired" and len(different) == len(mine):
        return paired, True
    return unpaired, False


def _arm_maps(
    arm: ArmVerdict, mine: Sequence[_Placed], scale: Scale, best: Setting | None, links: Links
) -> Iterator[Html]:
    values = {path: _ordered({place.get(path) for place, _ in mine}) for path in arm.varied}
    # The two longest axes make the map, if they are numbers or few words; the others a map for each value.
    across, up, *others = [*values, "", ""][: max(2, len(values))]
    if any(len(axis) > _LONGEST_AXIS for axis in (values.get(across, []), values.get(up, []))):
        yield tag("p", f"An axis has more than {_LONGEST_AXIS} values; see the table of every cell.")
        return
    frames = list(itertools.product(*(values[path] for path in others)))
    if len(frames) > _MOST_FRAMES:
        yield tag("p", f"The first {_MOST_FRAMES} of {len(frames):,} maps; the table of every cell has all.")
    at = {
        tuple(str(place.get(path)) for path in arm.varied): (setting, _differences(place, setting))
        for place, setting in mine
    }
    for frame in frames[:_MOST_FRAMES]:
        fixed = dict(zip(others, frame, strict=True))
        rows = []
        for y in values.get(up, [None]):
            cells = []
            for x in values.get(across, [None]):
                place = {across: x, up: y} | fixed
                cells.append(
                    _cell(*at.get(tuple(str(place.get(path)) for path in arm.varied), (None, "")), scale, best, links)
                )
            rows.append(tag("tr", tag("th", value_text(y) if up else "", scope="row"), *cells))
        yield _map(arm, (across, up), values.get(across, [None]), rows, fixed)


def _map(
    arm: ArmVerdict, axes: tuple[str, str], columns: Sequence[Any], rows: Sequence[Html], fixed: Mapping[str, Any]
) -> Html:
    across, up = axes
    # In the corner the names would take most of a phone's width; the caption wraps.
    head = tag("tr", tag("td"), *(tag("th", value_text(x), scope="col") for x in columns))
    words = [f"{path} {value_text(value)}" for path, value in fixed.items()]
    words += [f"across: {across}"] if across else []
    words += [f"down: {up}"] if up else []
    name = arm_name(arm.arm) or "all settings"
    caption = "; ".join([name, *words])
    element = tag(
        "table",
        tag("caption", tag("span", f"{name}; ", class_="quiet"), *_unbroken(words)),
        tag("thead", head),
        tag("tbody", *rows),
        class_="heat",
    )
    return scroll(element, caption)


def _unbroken(words: Sequence[str]) -> Iterator[object]:
    for place, word in enumerate(words):
        yield "; " if place else None
        yield tag("span", word, class_="once")


def _differences(place: Mapping[str, Any], setting: Setting) -> str:
    """Return the values in which a setting differs from its place."""
    other = [(path, setting.values.get(path)) for path, value in place.items() if setting.values.get(path) != value]
    words = (f"{value:.3g}" if isinstance(value, float) else value_text(value) for _, value in other)
    return ", ".join(f"{path.rpartition('.')[2]} {word}" for (path, _), word in zip(other, words, strict=True))


def _cell(setting: Setting | None, differences: str, scale: Scale, best: Setting | None, links: Links) -> Html:
    if setting is None:
        return tag("td", tag("span", "–"), class_="void", title="the design has no such setting")
    seeds = join(
        [
            tag("small", differences) if differences else None,
            tag("small", _seed_links(setting, links)) if len(setting.runs) > 1 else None,
        ]
    )
    target = links.of(setting.canonical[0]) if len(setting.runs) == 1 else None
    if setting.perplexity is None:
        word = "diverged" if setting.state == "diverged" else "missing"
        return tag("td", tag("span", link(word, target)), seeds, class_="gone" if word == "diverged" else "void")
    ground, ink = _colours(setting.perplexity, scale)
    return tag(
        "td",
        link(perplexity_text(setting.perplexity), target),
        tag("small", "best of all") if setting == best else None,
        seeds,
        style=f"background:{ground};color:{ink}",
        class_="best" if setting == best else None,
    )


def _seed_links(setting: Setting, links: Links) -> Html:
    """Return how many seeds, each leading to its run; what became of those that have no result."""
    marks = {"finished": "", "diverged": " div.", "missing": " miss."}
    parts: list[object] = [f"{len(setting.runs)} seeds: "]
    for place, (seed, run, state) in enumerate(zip(setting.seeds, setting.canonical, setting.states, strict=True)):
        parts += [", " if place else None, link(f"{seed}{marks.get(state, '')}", links.of(run))]
    return join(parts)


def _colours(value: float, scale: Scale) -> tuple[str, str]:
    """Return ground and ink of a cell; the ink is whichever of black and white has the higher contrast (WCAG 2)."""
    share = math.log(value / scale.low) / math.log(scale.high / scale.low)
    place = min(max(share, 0.0), 1.0) * (len(_COLOURS) - 1)
    low = min(int(place), len(_COLOURS) - 2)
    mixed = [a + (place - low) * (b - a) for a, b in zip(_COLOURS[low], _COLOURS[low + 1], strict=True)]
    linear = [c / 255 / 12.92 if c <= 10.3 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in mixed]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    ink = "#fff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000"
    return f"rgb({','.join(f'{c:.0f}' for c in mixed)})", ink


def _ordered(values: Collection[Any]) -> list[Any]:
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return [*sorted(numbers), *sorted((v for v in values if v not in numbers), key=str)]
