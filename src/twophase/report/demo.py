"""The demo's maps, figures and table, from the rows of its sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from twophase.compare.sweep import Table, compare_sweep, tables
from twophase.figures.heatmap import Panel, Scale, heatmaps, scale_of
from twophase.figures.style import save, styled
from twophase.figures.terminal import text_maps
from twophase.recipes.controls import AVERAGING_LR, LR, MOMENTUM, MOMENTUM_FREE
from twophase.recipes.demo import AUTO, MATCHED, NEVER, PERIOD, RESTARTED, RULES
from twophase.sweeps.table import Row, Setting, format_table, readable, settings

if TYPE_CHECKING:
    from rich.text import Text

WITHIN = 0.25
"""A setting works when its perplexity is at most this much above the best of all, relatively."""
_READING = f"perplexity: lighter is better; outlined: within {WITHIN:.0%} of the best"


def main_maps(rows: Sequence[Row]) -> list[list[Panel]]:
    """Return the heatmaps of the main grid: for each kind of rule one without restarts and one with them."""
    return _maps(rows, NEVER, "no restart")


def control_maps(rows: Sequence[Row]) -> list[list[Panel]]:
    """Return those of the gain-matched runs, each at the place of the restarted one that it controls; [] without."""
    return _maps(rows, MATCHED, f"no restart, mean gain of K={PERIOD}")


def _maps(rows: Sequence[Row], part: str, words: str) -> list[list[Panel]]:
    """Map a method of each kind of rule, and beside it the restarted one at the same places."""
    values = {row.run: row.values for row in rows}
    cells: dict[str, dict[tuple[float, float], Setting]] = {}
    for setting in settings(rows):
        at = values[setting.rows[0].control_of or setting.runs[0]]
        cells.setdefault(setting.arm, {})[at[LR], at[MOMENTUM]] = setting
    panels = []
    for kind in RULES:
        ours, restarted = cells.get(f"{kind}, {part}", {}), cells[f"{kind}, {RESTARTED}"]
        lrs, momenta = (sorted({place[axis] for place in ours}) for axis in (0, 1))
        panels.append(
            [
                Panel(
                    f"{kind[0].upper()}{kind[1:]}, {title}",
                    "outer learning rate",
                    "outer momentum",
                    lrs,
                    momenta,
                    [[those.get((lr, momentum)) for lr in lrs] for momentum in momenta],
                )
                for title, those in ((words, ours), (f"restart every {PERIOD} rounds", restarted))
            ]
        )
    return panels if all(panel.x for row in panels for panel in row) else []


def scale(rows: Sequence[Row]) -> Scale:
    """Return the colours of all maps of the demo: from the best of all results."""
    return scale_of([cell.result for cell in settings(rows) if cell.result is not None], WITHIN)


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw `demo.png` (the main grid) and `controls.png` (the gain-matched runs, if any) into a folder."""
    figures = {
        "demo": ("Perplexity without and with a restart every 3 rounds", main_maps(rows)),
        "controls": ("Restarts against none at the same mean outer gain", control_maps(rows)),
    }
    paths = []
    for name, (title, panels) in figures.items():
        if panels:
            with styled():
                save(folder / f"{name}.png", heatmaps(panels, scale(rows), title=title, reading=_READING))
            paths.append(folder / f"{name}.png")
    return paths


def terminal_maps(rows: Sequence[Row]) -> Text:
    """Return the main grid as text that fills in while the demo runs, and what stands beside it below."""
    text = text_maps(main_maps(rows), scale(rows), x_label="lr")
    results = (f"{name} {readable(cell.result)}" for name, cell in beside(rows).items() if cell.result is not None)
    text.append(f"Perplexity; lower is better. Rows: momentum.\n{', '.join(results) or 'Nothing beside it yet'}")
    return text


def beside(rows: Sequence[Row]) -> dict[str, Setting]:
    """Return what the grid is to be held against: the best without momentum, plain averaging, and `auto`."""
    cells = settings(rows)
    free = [cell for cell in cells if cell.arm == MOMENTUM_FREE]
    found = {
        "no momentum": min((cell for cell in free if cell.result), key=lambda cell: cell.result or 0.0, default=None),
        "plain averaging": next((cell for cell in free if cell.values[LR] == AVERAGING_LR), None),
        AUTO: next((cell for cell in cells if cell.arm == AUTO), None),
    }
    return {name: cell for name, cell in found.items() if cell is not None}


def comparisons(rows: Sequence[Row]) -> list[Table]:
    """Return the methods, and each restarted one against its twins: without restarts, and with the same mean gain."""
    methods, *against = tables(compare_sweep(rows, [f"{kind}, {NEVER}" for kind in RULES]))
    twins = [[line for line in each.rows if line[0].split(",")[0] == line[1].split(",")[0]] for each in against]
    return [methods, *(each._replace(rows=lines) for each, lines in zip(against, twins, strict=True) if lines)]


def describe(rows: Sequence[Row]) -> str:
    """Return `comparisons` as text."""
    return "\n\n".join(
        f"{each.title}\n{format_table(each.header, each.rows)}\n{fill(each.caption, 100)}" for each in comparisons(rows)
    )
