"""What `twophase sweep` shows of any grid: a heatmap over its first two axes, a panel for each value of the others."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twophase.figures.heatmaps import Panel, heatmaps
from twophase.sweep.grid import MOMENTUM_FREE
from twophase.sweep.table import Row, Setting, State, format_table, readable, settings

_MOST_PANELS = 24
_TOP = 10


def draw(rows: Sequence[Row], form: str, folder: Path) -> list[Path]:
    """Draw `sweep.png`, `.pdf` and `.csv`: the first axis across, the second up, the others as panels; seeds averaged.

    Args:
        rows: of the sweep's `cells.csv`.
        form: the form that outer learning rates are meant in, in words.
        folder: the sweep's `figures`.

    Returns:
        The paths written; none when the other axes would make more panels than a page holds (`cells.csv` has all).
    """
    by_setting = settings(_grid(rows))
    axes = {path: list(dict.fromkeys(setting.values[path] for setting in by_setting)) for path in by_setting[0].values}
    across, up, *others = [*axes, "", ""][: max(2, len(axes))]
    frames = list(itertools.product(*(axes[path] for path in others)))
    if len(frames) > _MOST_PANELS:
        return []
    width = len(axes[others[-1]]) if others else 1
    panels = [_panel(by_setting, axes, across, up, dict(zip(others, frame, strict=True))) for frame in frames]
    return heatmaps(
        [panels[start : start + width] for start in range(0, len(panels), width)],
        x_label=across or "seed",
        y_label=up,
        colour_label="validation perplexity a token",
        title=f"Sweep over {', '.join(axes) or 'seeds'} ({form})",
        note=_seeds_note(by_setting),
        path_stem=folder / "sweep",
    )


def describe(rows: Sequence[Row]) -> str:
    """The best settings of a sweep, best first, and how many diverged or are missing, as plain text."""
    by_setting = settings(rows)
    finished = sorted((s for s in by_setting if s.perplexity is not None), key=lambda s: s.perplexity or 0.0)
    arms = len({s.arm for s in by_setting}) > 1
    table = [[*([s.arm] if arms else []), *s.values.values(), readable(s.perplexity)] for s in finished[:_TOP]]
    counts = {state: sum(s.state == state for s in by_setting) for state in ("diverged", "missing")}
    shown = f"best {len(table)} of {len(by_setting)} settings" + "".join(
        f", {n} {state}" for state, n in counts.items() if n
    )
    return f"{shown}. {_seeds_note(by_setting)}\n" + format_table(
        [*(["arm"] if arms else []), *by_setting[0].values, "perplexity"], table
    )


def _grid(rows: Sequence[Row]) -> list[Row]:
    """The rows without controls, whose places are not the grid's."""
    return [row for row in rows if row.control_of is None and row.arm != MOMENTUM_FREE] or list(rows)


def _panel(
    by_setting: Sequence[Setting], axes: Mapping[str, Sequence[Any]], x: str, y: str, fixed: dict[str, Any]
) -> Panel:
    at = {
        (setting.values.get(x), setting.values.get(y)): setting
        for setting in by_setting
        if all(setting.values[path] == value for path, value in fixed.items())
    }
    acrosses, ups = axes.get(x, [None]), axes.get(y, [None])
    grid = [[at.get((across, up)) for across in acrosses] for up in ups]
    values = [[setting.perplexity if setting else None for setting in line] for line in grid]
    states: list[list[State]] = [[setting.state if setting else "missing" for setting in line] for line in grid]
    title = ", ".join(f"{path} {value}" for path, value in fixed.items())
    x_values, y_values = (["" if value is None else value for value in line] for line in (acrosses, ups))
    return Panel(title, x_values, y_values, values, states)


def _seeds_note(by_setting: Sequence[Setting]) -> str:
    seeds = max(len(setting.runs) for setting in by_setting)
    return f"Mean over {seeds} seeds." if seeds > 1 else "One seed."
