"""The demo: its runs, its controls, and figures, maps and tables that show what is in the rows."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from madeup import Value, rows
from twophase.config import update
from twophase.errors import UsageError
from twophase.recipes.demo import demo
from twophase.report.demo import comparisons, control_maps, describe, draw, main_maps, terminal_maps
from twophase.runs.config import InnerConfig
from twophase.sweeps.grid import Cell
from twophase.sweeps.table import Setting
from twophase.tasks.lm.config import TrainConfig

MAIN = ["heavy ball, never", "heavy ball, K=3", "Nesterov, never", "Nesterov, K=3"]
MATCHED = ["heavy ball, never, gain of K=3", "Nesterov, never, gain of K=3"]


def test_runs() -> None:
    """A main grid of 4 methods, 5 momenta x 3 learning rates; 4 momentum-free, 18 gain-matched, and `auto`."""
    sweep = demo()
    arms = Counter(cell.arm for cell in sweep.cells)
    assert arms == dict.fromkeys(MAIN, 15) | {"momentum-free": 4, "auto": 1} | dict.fromkeys(MATCHED, 9)
    assert len(sweep.runs) == 83
    assert sweep.base == TrainConfig(inner=InnerConfig(schedule="cosine"))
    assert {cell.config.outer.form for cell in sweep.cells} == {"sum"}
    for cell in sweep.cells:
        assert update(sweep.base, cell.values).plain() == cell.config
        assert cell.arm.startswith("Nesterov") == (cell.config.outer.method == "nesterov") or cell.arm == "auto"
        policy = {"auto": "auto"}.get(cell.arm, "never")
        assert cell.config.outer.restart == ("3" if cell.arm.endswith(", K=3") else policy)
    free = [cell.config.outer for cell in sweep.cells if cell.arm == "momentum-free"]
    assert [(outer.lr, outer.momentum) for outer in free] == [(lr, 0.0) for lr in (0.3, 0.7, 1.0, 1.1)]
    main = demo(controls=False)
    assert main.cells == sweep.cells[:60]
    values = [{cell.values[path] for cell in main.cells} for path in ("outer.lr", "outer.momentum")]
    assert (sorted(values[0]), sorted(values[1])) == ([0.3, 0.7, 1.1], [0.1, 0.3, 0.5, 0.7, 0.9])
    never, restarted = sweep.cells[:2]  # the pair that is shown round by round
    assert {**never.values, "outer.restart": "3"} == restarted.values
    assert (never.values["outer.momentum"], never.values["outer.lr"], never.arm) == (0.9, 0.7, "heavy ball, never")


def test_quick_form_is_small_and_short() -> None:
    """The quick form is 24 to 36 runs at half the steps, with every method and control in it."""
    sweep = demo(quick=True)
    assert 24 <= len(sweep.runs) <= 36
    assert {(cell.config.steps, cell.config.inner.lr) for cell in sweep.cells} == {(480, 4e-3)}
    assert {cell.arm for cell in sweep.cells} == {*MAIN, "momentum-free", *MATCHED, "auto"}
    assert sweep.name != demo().name


def test_seeds_repeat_every_run_and_the_base_is_kept() -> None:
    """Each seed adds one full set of runs; what the grid does not vary comes from the base."""
    single, three = demo(), demo(seeds=(0, 1, 2))
    assert len(three.runs) == 3 * len(single.runs)
    assert set(single.runs) <= set(three.runs)
    assert Counter(cell.config.seed for cell in three.cells) == {0: 83, 1: 83, 2: 83}
    for seeds in ((), (0, 0)):
        with pytest.raises(UsageError, match="--axis seed"):
            demo(seeds=seeds)
    values = {"data.corpus": "file:x.txt", "model.layers": 3}
    cells = demo(base=update(TrainConfig(), values)).cells
    assert {(cell.config.data.corpus, cell.config.model.layers) for cell in cells} == {("file:x.txt", 3)}


def numbered(cell: Cell) -> float:
    """A different perplexity for each configuration."""
    return 8 + cell.config.outer.numbers().get("momentum", 0) + cell.config.outer.numbers().get("lr", 0) / 100


@pytest.mark.parametrize("seeds", [(0,), (3, 4)])
def test_maps_show_every_cell_at_its_place(seeds: tuple[int, ...]) -> None:
    """The main grid's 60 settings, and each gain-matched run at the place of the restarted one that it controls."""
    sweep = demo(seeds=seeds)
    by_run = {cell.run_id: cell for cell in sweep.cells}
    results = rows(sweep, numbered)
    for maps, count in ((main_maps(results), 60), (control_maps(results), 36)):
        shown = 0
        for panel in (panel for row in maps for panel in row):
            for momentum, line in zip(panel.y, panel.cells, strict=True):
                for lr, setting in zip(panel.x, line, strict=True):
                    assert isinstance(setting, Setting)
                    for run in setting.runs:
                        cell = by_run[run]
                        at = by_run[cell.control_of] if cell.control_of else cell
                        assert (at.values["outer.momentum"], at.values["outer.lr"]) == (momentum, lr)
                        assert (cell.values["outer.restart"] == "3") == ("restart every 3" in panel.title)
                        assert cell.arm.split(",")[0].lower() == panel.title.split(",")[0].lower()
                    assert setting.result == pytest.approx(numbered(by_run[setting.runs[0]]))
                    shown += 1
        assert shown == count


def lowered(by: float) -> Callable[[Cell], float]:
    """Multiply the perplexity of restarted runs; the others have 8, or 16 at momentum 0.9."""

    def value(cell: Cell) -> float:
        high = cell.values["outer.momentum"] == 0.9 and cell.arm in MAIN
        return (16.0 if high else 8.0) * (by if cell.arm.endswith(", K=3") else 1.0)

    return value


def diverging(arms: str) -> Callable[[Cell], float | str]:
    return lambda cell: "diverged" if cell.arm.endswith(arms) else 8.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "value"),
    [
        *(({}, value) for value in (lowered(0.6), lowered(1.5), lambda _: None)),
        *(({}, diverging(arms)) for arms in ("K=3", "never", "")),
        *((options, lowered(1.0)) for options in ({"quick": True}, {"seeds": (0, 1)}, {"controls": False})),
    ],
)
def test_any_result_is_told(options: dict[str, Any], value: Value, tmp_path: Path) -> None:
    """Tables have a line for each method, and compare no heavy ball with a Nesterov; figures are drawn."""
    sweep = demo(**options)
    results = rows(sweep, value)
    methods, *against = comparisons(results)
    assert [line[0] for line in methods.rows] == list(dict.fromkeys(cell.arm for cell in sweep.cells))
    assert sum(line[2] for line in methods.rows) == len(sweep.cells) / len(options.get("seeds", (0,)))
    assert all(line[0].split(",")[0] == line[1].split(",")[0] for each in against for line in each.rows)
    assert describe(results)
    names = ["demo.png"] + ["controls.png"] * options.get("controls", True)
    if options:  # drawing takes a second
        assert (
            [path.name for path in draw(results, tmp_path)]
            == names
            == sorted(path.name for path in tmp_path.iterdir())[::-1]
        )


def test_a_restart_is_compared_with_its_twins() -> None:
    """Half the perplexity with restarts on every seed is a ratio of 2 against the same rule without, and is better."""
    sweep = demo(quick=True, seeds=(0, 1, 2))
    noisy = {0: 1.0, 1: 1.001, 2: 0.999}
    results = rows(sweep, lambda cell: lowered(0.5)(cell) * noisy[cell.config.seed])
    _, against = comparisons(results)
    lines = {(line[0], line[1], line[2]): (float(line[4]), line[-1]) for line in against.rows}
    for kind in ("heavy ball", "Nesterov"):
        assert lines[f"{kind}, K=3", f"{kind}, never", "matched"] == (2.0, "better")


def test_recipe_needs_no_torch() -> None:
    """Planning, comparing and drawing the demo load no torch."""
    imports = "import sys, twophase.report.demo, twophase.report.story, twophase.recipes.demo as d; d.demo()"
    script = f"{imports}; assert not {{'torch', 'matplotlib', 'pandas'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_terminal_maps_fill_in() -> None:
    """The map has a number for a finished cell, a dot for one to come, a word for a diverged one, in 40 columns."""
    sweep = demo()

    def value(cell: Cell) -> float | str | None:
        place = (cell.values["outer.momentum"], cell.values["outer.lr"])
        return {(0.9, 0.7): "diverged", (0.9, 1.1): 123.4}.get(place, 8.26 if place[0] == 0.1 else None)

    text = terminal_maps(rows(sweep, value))
    lines = text.plain.replace("\N{MIDDLE DOT}", ".").splitlines()
    assert max(map(len, lines[:-2])) == 40
    assert lines[2:5] == [
        "lr    0.3  0.7  1.1  lr    0.3  0.7  1.1",
        "0.9     . div.  123  0.9     . div.  123",
        "0.7     .    .    .  0.7     .    .    .",
    ]
    assert lines[7] == "0.1  8.26 8.26 8.26  0.1  8.26 8.26 8.26"
    grounds = {str(span.style) for span in text.spans if " on rgb(" in str(span.style)}
    assert len(grounds) == 2
