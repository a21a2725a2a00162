"""Grids: typed axes, products, arms, runs that are equal, and the description of a sweep."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from twophase.config import fingerprint, update
from twophase.errors import UsageError
from twophase.recipes.controls import grid_of
from twophase.restart import Periodic
from twophase.runs.config import OuterConfig
from twophase.sweeps.grid import RUNS, Axis, Sweep, product, write_spec
from twophase.sweeps.table import cell_text
from twophase.tasks.lm.config import TrainConfig

NESTEROV = TrainConfig(outer=OuterConfig("nesterov"))


def test_product_covers_every_combination_once():
    """The last axis runs fastest, and the fixed values are in every cell."""
    cells = product(NESTEROV, [Axis("seed", (0, 1)), Axis("outer.lr", (0.3, 0.7))], "arm", {"outer.form": "ema"})
    assert [(c.values["seed"], c.values["outer.lr"]) for c in cells] == [(0, 0.3), (0, 0.7), (1, 0.3), (1, 0.7)]
    assert all(c.config.outer.form == "ema" and c.config.seed == c.values["seed"] for c in cells)
    assert len({c.run_id for c in cells}) == 4


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("outer.lr", (1, 1.0, "1", "1e0")),
        ("outer.restart", (3, "3", "03", Periodic(3))),
        ("inner.betas", ((0, 0.9), [0.0, 0.9], "0,0.9")),
        ("sync.fragments", (("a=x|y", "b=."), "a=x|y,b=.", "a=x|y, b=.")),
        ("sync.fragments", (("a=cycle:5,6", "b=3"), cell_text(("a=cycle:5,6", "b=3")))),
        ("sync.stagger", (True, "true", "True")),
        ("outer.momentum", (0.9, None)),  # Nesterov's own
    ],
)
def test_equal_settings_are_one_run(path: str, values: tuple[Any, ...]):
    """However a value is written."""
    assert len({product(NESTEROV, [Axis(path, (value,))])[0].run_id for value in values}) == 1


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("outer.lrr", (0.3,)), ("outer", (0.3,)), ("outer.lr", ("x",)), ("outer.lr", (-1,)), ("outer.lr", ()),
        ("outer.lr", (0.3, "0.3")), ("inner.betas", ("0.9",)), ("outer.restart", ("often",)), ("seed", (1.5,)),
        ("sync.stagger", ("maybe",)), ("inner.method", ("adam",)),
    ],
)  # fmt: skip
def test_axes_that_cannot_be(path: str, values: tuple[Any, ...]):
    """An unknown path, no values, values of another type, out of range, or given twice: the message names the path."""
    with pytest.raises(UsageError, match=re.escape(path)):
        product(TrainConfig(), [Axis(path, values)])


def sweep(*axes: Axis, base: TrainConfig = NESTEROV) -> Sweep:
    return Sweep(base, grid_of(base, axes, controls=True))


def test_the_runs_of_a_sweep_come_back_from_its_description(tmp_path: Path):
    """From JSON, with axes of every kind."""
    axes = [Axis("outer.restart", ("never", 3)), Axis("inner.betas", ((0.9, 0.95), (0.9, 0.99))), Axis("seed", (0, 1))]
    made = sweep(*axes)
    write_spec(made, tmp_path / "a")
    spec = json.loads((tmp_path / "a/sweep.json").read_bytes())
    again = {run: update(NESTEROV, changes) for run, changes in spec["runs"].items()}
    assert again == made.runs
    assert all(run == fingerprint(config) for run, config in again.items())
    assert list(made.values(made.cells[0])) == list(made.paths)
    assert None not in made.values(made.cells[-1]).values()


def test_a_folder_belongs_to_one_sweep(tmp_path: Path):
    """The same again and further cells are welcome; another base, fewer cells or other files are refused."""
    few, many = sweep(Axis("outer.restart", (2,))), sweep(Axis("outer.restart", (2, 3)))
    (tmp_path / RUNS).mkdir()
    for made in (few, few, many):
        write_spec(made, tmp_path)
    shorter = sweep(Axis("outer.restart", (2, 3)), base=TrainConfig(steps=7, outer=OuterConfig("nesterov")))
    for made, option in ((few, "--out"), (shorter, "--steps")):
        with pytest.raises(UsageError, match=option):
            write_spec(made, tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(UsageError, match="--out"):
        write_spec(few, tmp_path / "other")
    assert not (tmp_path / "other/sweep.json").exists()
