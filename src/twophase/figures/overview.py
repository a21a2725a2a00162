"""The figure of `twophase sweep`: a heatmap over the first two axes, a panel for each value of further axes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.figures.heatmaps import Heatmaps, Panel, scale_of, tile
from twophase.figures.matplotlib_types import Figure
from twophase.figures.style import styled
from twophase.sweeps.grid import MOMENTUM_FREE
from twophase.sweeps.table import (
    LOSS,
    Row,
    Setting,
    arm_name,
    cell_text,
    format_table,
    measure_of,
    readable,
    settings,
    without_ratio,
)

_MOST_PANELS = 24
_TOP = 10
_ACROSS = "outer.lr"


Placed = tuple[Mapping[str, Any], Setting]
"""The values at which a setting stands, and the setting."""


@dataclass(frozen=True, slots=True)
class Map:
    """The settings that share their values of all axes but two."""

    axes: Sequence[str]
    """Axes: across, up, and further ones; the first two may be empty."""
    fixed: Mapping[str, Any]
    """Values on the further axes."""
    rows: Sequence[Sequence[tuple[Mapping[str, Any], Setting | None]]]
    """One a value of the axis up, in it one place a value of the axis across, with the setting there."""


def cut(placed: Sequence[Placed], axes: Mapping[str, Sequence[Any]]) -> list[Map]:
    """Cut settings along some axes into maps: the first across, the second up, a map for each value of further axes."""
    # All figures of this package have the outer learning rate across.
    axes = {path: axes[path] for path in sorted(axes, key=lambda path: path != _ACROSS)}
    by_place = {tuple(str(values.get(path)) for path in axes): setting for values, setting in placed}
    across, up, *others = names = [*axes, "", ""][: max(2, len(axes))]

    def at(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], Setting | None]:
        return values, by_place.get(tuple(str(values[path]) for path in axes))

    maps = []
    for frame in itertools.product(*(axes[path] for path in others)):
        fixed = dict(zip(others, frame, strict=True))
        rows = [[at({across: x, up: y} | fixed) for x in axes.get(across, [None])] for y in axes.get(up, [None])]
        maps.append(Map(names, fixed, rows))
    return maps


def draw(rows: Sequence[Row], form: str, folder: Path) -> list[Path]:
    """Draw `sweep.png`, `.pdf` and `.csv`: the axes as `cut` places them; seeds averaged; `form` in words.

    Nothing is written when the other axes would make more panels than a page holds (`cells.csv` has all).
    """
    page = _page(rows, form)
    return page.write(folder / "sweep") if page else []


def figure(rows: Sequence[Row], form: str) -> Figure | None:
    """Return the figure that `draw` writes; None where it writes none."""
    page = _page(rows, form)
    if page is None:
        return None
    with styled():
        return page.draw()


def _page(rows: Sequence[Row], form: str) -> Heatmaps | None:
    """Return the grid's heatmaps; None where there are too many panels."""
    by_setting = settings(_grid(rows))
    axes = {path: list(dict.fromkeys(setting.values[path] for setting in by_setting)) for path in by_setting[0].values}
    maps = cut([(setting.values, setting) for setting in by_setting], axes)
    if len(maps) > _MOST_PANELS:
        return None
    across, up, *others = maps[0].axes
    panels = [
        Panel(
            ", ".join(f"{path} {cell_text(value)}" for path, value in group.fixed.items()),
            axes.get(across, [""]),
            axes.get(up, [""]),
            [[tile(setting) for _, setting in row] for row in group.rows],
        )
        for group in maps
    ]
    width = len(axes[others[-1]]) if others else 1
    return Heatmaps(
        [panels[start : start + width] for start in range(0, len(panels), width)],
        x_label=across or "seed",
        y_label=up,
        colour_label=LOSS if measure_of(by_setting) == LOSS else "validation perplexity a token",
        title=_finding(by_setting),
        reading=f"{form}; {_seeds_note(by_setting).lower().rstrip('.')}",
        note=f"Axes: {', '.join(axes) or 'seeds'}. Outlined: within 25 % of the best.",
    )


def describe(rows: Sequence[Row]) -> str:
    """List the best settings of a sweep, best first, and count diverged and missing ones, as plain text."""
    by_setting = settings(rows)
    finished = sorted((s for s in by_setting if s.result is not None), key=lambda s: s.result or 0.0)
    arms = len({s.arm for s in by_setting}) > 1
    table = [[*([arm_name(s.arm)] if arms else []), *s.values.values(), readable(s.result)] for s in finished[:_TOP]]
    counts = {state: sum(s.state == state for s in by_setting) for state in ("diverged", "missing")}
    title = f"best {len(table)} of {len(by_setting)} settings" + "".join(
        f", {n} {state}" for state, n in counts.items() if n
    )
    header = [*(["arm"] if arms else []), *by_setting[0].values, measure_of(by_setting)]
    lines = [f"{title}. {_seeds_note(by_setting)}", format_table(header, table), *without_ratio(rows)]
    return "\n".join(lines)


def _grid(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without controls, whose places are not the grid's."""
    return [row for row in rows if row.control_of is None and row.arm != MOMENTUM_FREE] or list(rows)


def _finding(by_setting: Sequence[Setting]) -> str:
    """Name the best setting of a grid, and how many come near it."""
    values = [setting.result for setting in by_setting if setting.result is not None]
    if not values:
        return "No setting has finished yet"
    best = next(setting for setting in by_setting if setting.result == min(values))
    where = ", ".join(f"{path.rpartition('.')[2]} {cell_text(value)}" for path, value in best.values.items())
    near = sum(value <= scale_of(values).bound for value in values)
    lost = sum(setting.state == "diverged" for setting in by_setting)
    return (
        f"Best {readable(best.result)}{where and f' at {where}'}; {near} of {len(by_setting)} settings are within "
        f"25 % of it{f', {lost} diverged' if lost else ''}"
    )


def _seeds_note(by_setting: Sequence[Setting]) -> str:
    seeds = max(len(setting.runs) for setting in by_setting)
    return f"Mean over {seeds} seeds." if seeds > 1 else "One seed."
