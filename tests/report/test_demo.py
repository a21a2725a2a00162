"""The demo: its runs, its controls, and figures, maps and tables that show what is in the rows."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from madeup import Value, rows
from twophase.config import update
from twophase.errors import UsageError
from twophase.recipes.demo import demo
from twophase.report.demo import comparisons, control_maps, describe, draw, main_maps
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


def test_maps_show_every_cell_at_its_place() -> None:
    """The main grid's 60 settings, and each gain-matched run at the place of the restarted one that it controls."""
    sweep = demo(seeds=(3, 4))
    by_run = {cell.run_id: cell for cell in sweep.cells}
    results = rows(sweep, lambda cell: 8.0 + int(cell.run_id, 36) % 97)
    for maps, count in ((main_maps(results), 60), (control_maps(results), 36)):
        panels = [panel for row in maps for panel in row]
        assert sum(len(panel.x) * len(panel.y) for panel in panels) == count
        for panel in panels:
            for (momentum, line), lr in product(zip(panel.y, panel.cells, strict=True), panel.x):
                setting = line[list(panel.x).index(lr)]
                assert isinstance(setting, Setting)
                for cell in map(by_run.__getitem__, setting.runs):
                    at = by_run[cell.control_of] if cell.control_of else cell
                    assert (at.values["outer.momentum"], at.values["outer.lr"]) == (momentum, lr)
                    assert (cell.values["outer.restart"] == "3") == ("restart every 3" in panel.title)
                    assert cell.arm.split(",")[0].lower() == panel.title.split(",")[0].lower()


def told(restarted: float | str | None) -> Value:
    """Let restarted runs have this result, and their twins 16 at momentum 0.9; all others have 8."""

    def value(cell: Cell) -> float | str | None:
        if cell.arm.endswith(", K=3"):
            return restarted
        return 16.0 if cell.arm in MAIN and cell.values["outer.momentum"] == 0.9 else 8.0

    return value


@pytest.mark.parametrize(
    ("options", "restarted"),
    [({}, 9.6), ({"quick": True}, "diverged"), ({"seeds": (0, 1)}, 9.6), ({"controls": False}, None)],
)
def test_any_result_is_told(options: dict[str, Any], restarted: float | str | None) -> None:
    """Tables have a line for each method with all its settings, and compare no heavy ball with a Nesterov."""
    sweep = demo(**options)
    results = rows(sweep, told(restarted))
    methods, *against = comparisons(results)
    assert [line[0] for line in methods.rows] == list(dict.fromkeys(cell.arm for cell in sweep.cells))
    assert sum(line[2] for line in methods.rows) == len(sweep.cells) / len(options.get("seeds", (0,)))
    assert all(line[0].split(",")[0] == line[1].split(",")[0] for each in against for line in each.rows)
    assert all(each.title in describe(results) for each in [methods, *against])


@pytest.mark.slow
@pytest.mark.parametrize(("controls", "names"), [(True, ["demo.png", "controls.png"]), (False, ["demo.png"])])
def test_figures(tmp_path: Path, controls: bool, names: list[str]) -> None:
    """They are drawn before anything has finished, too; without controls there is none of them."""
    sweep = demo(quick=True, controls=controls)
    for value in (told(None), lambda _: None):
        assert [path.name for path in draw(rows(sweep, value), tmp_path)] == names
        assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_a_restart_is_compared_with_its_twins() -> None:
    """Half the perplexity with restarts on every seed is a ratio of 2 against the same rule without, and is better."""
    sweep = demo(quick=True, seeds=(0, 1, 2))
    noisy = {0: 1.0, 1: 1.001, 2: 0.999}
    results = rows(sweep, lambda cell: (4.0 if cell.arm.endswith(", K=3") else 8.0) * noisy[cell.config.seed])
    _, against = comparisons(results)
    lines = {(line[0], line[1], line[2]): (float(line[4]), line[-1]) for line in against.rows}
    for kind in ("heavy ball", "Nesterov"):
        assert lines[f"{kind}, K=3", f"{kind}, never", "matched"] == (2.0, "better")
