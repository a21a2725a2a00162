"""Tables: rows on disk, settings over seeds, tables for readers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twophase.api import run_config
from twophase.compare.sweep import select
from twophase.errors import UsageError
from twophase.runs.config import OuterConfig
from twophase.sweeps.grid import Axis, Sweep, product, write_spec
from twophase.sweeps.table import Row, State, measure_of, read_rows, rows_of, settings, write_rows
from twophase.tasks.lm.config import TrainConfig


def row(method: str, perplexity: float | None, state: State = "finished", **values: Any) -> Row:
    name = ",".join([method, *(f"{key}={value}" for key, value in values.items())])
    return Row(method, name, values, state, perplexity)


def summary(perplexity: float | None, diverged: bool = False) -> dict[str, Any]:
    loss = math.log(perplexity) if perplexity else None
    return {"perplexity": perplexity, "validation_loss": loss, "seconds": 5.5, "diverged": diverged}


def test_rows_of_a_sweep(tmp_path: Path) -> None:
    """Each cell is a row with every axis value, also those that its method does not vary, and comes back from disk.

    JSON has null for a perplexity that overflowed: its loss takes no place among perplexities.
    """
    base = TrainConfig(outer=OuterConfig("nesterov"))
    cells = product(base, [Axis("outer.lr", (0.3, 0.7, 1.1))], "a") + product(base, [Axis("seed", (3, 4))], "b")
    ids = [cell.run_id for cell in cells]
    ended = [summary(8.0), summary(None, diverged=True), summary(None) | {"validation_loss": 800.0}]
    rows = rows_of(Sweep(base, cells), dict(zip(ids, ended, strict=False)), failed=[ids[3]])
    assert [each.run for each in rows] == ids
    assert [each.state for each in rows] == ["finished", "diverged", "finished", "failed", "missing"]
    assert [each.perplexity for each in rows] == [8.0, None, math.inf, None, None]
    assert [each.values for each in rows[::4]] == [{"outer.lr": 0.3, "seed": 0}, {"outer.lr": 0.7, "seed": 4}]
    write_rows(tmp_path / "cells.csv", rows)
    assert read_rows(tmp_path / "cells.csv") == rows
    assert [each.state for each in settings(rows)] == ["finished", "diverged", "diverged", "missing"]


def test_rows_on_disk(tmp_path: Path) -> None:
    """The table has the promised columns, empty fields for what is not known, and reads back as it was written."""
    first = {"lr": 0.3, "outer.restart": "3", "stagger": True, "seed": 0}
    second = {"lr": 1.0, "outer.restart": "never", "stagger": False, "seed": 1}
    rows = [
        Row("a, b", "1f", first, "finished", 8.25, 2.11, 5.0),
        Row("a, b", "2f", second, "diverged", None, None, 1.0, "1f"),
        Row("c", "3f", second | {"outer.restart": "at:4,9", "lr": 1e-5}, "missing"),
    ]
    path = tmp_path / "cells.csv"
    write_rows(path, rows)
    assert path.read_text().splitlines() == [
        "arm,run,lr,outer.restart,stagger,seed,perplexity,validation_loss,diverged,state,seconds,control_of",
        '"a, b",1f,0.3,3,true,0,8.25,2.11,false,finished,5.0,',
        '"a, b",2f,1.0,never,false,1,,,true,diverged,1.0,1f',
        'c,3f,1e-05,"at:4,9",false,1,,,,missing,,',
    ]
    assert read_rows(path) == rows
    odd = [Row("\ufeff=,'\"#\t\x0b\x1c\x85\u2028\U0001f600", "4f", {"corpus": "x; y,z"}, "failed", 5e-324, 1e300)]
    write_rows(path, odd)
    assert read_rows(path) == odd


def test_texts_stay_texts(tmp_path: Path) -> None:
    """Values of a field of text are text beside the sweep's description, also those that look like something else."""
    values = ["1", "01", "true", "nan", "", "none"]
    base = run_config("hf:x", {})
    cells = product(base, [Axis("task.weights", (False, True)), Axis("task.corpus", tuple(values))])
    write_spec(sweep := Sweep(base, cells), tmp_path)
    write_rows(tmp_path / "cells.csv", rows := rows_of(sweep, {}))
    assert read_rows(tmp_path / "cells.csv") == rows
    assert [each.values["task.corpus"] for each in select(rows, {"task.corpus": "1"})] == ["1"] * 2
    assert len(select(rows, {"task.corpus": "nan", "task.weights": "true"})) == 1


EDITED: dict[str, Callable[[str], str]] = {
    "no number": lambda text: text.replace("8.5", "eight"),
    "no state": lambda text: text.replace("finished", "done"),
    "a line cut": lambda text: text[:-20],
    "other columns": lambda text: text.replace("perplexity", "ppl"),
    "no text": lambda text: text + "\udcff",
}
"""Changes of a table by hand."""


@pytest.mark.parametrize("change", EDITED.values(), ids=EDITED)
def test_an_edited_table_is_refused(tmp_path: Path, change: Callable[[str], str]) -> None:
    """A table that cannot be read is named."""
    write_rows(tmp_path / "cells.csv", [Row("a", "r1", {"lr": 0.3, "seed": 0}, "finished", 8.5, 2.1, 1.0)])
    text = change((tmp_path / "cells.csv").read_text())
    (tmp_path / "cells.csv").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UsageError, match=r"cells\.csv"):
        read_rows(tmp_path / "cells.csv")


def test_settings_take_seeds_together() -> None:
    """A setting is the mean over its seeds, diverged when one of them is, missing when one of them is."""
    results: dict[float, list[Row]] = {
        0.3: [row("a", 8.0, lr=0.3, seed=0), row("a", 10.0, lr=0.3, seed=1)],
        0.7: [row("a", None, "diverged", lr=0.7, seed=0), row("a", 5.0, lr=0.7, seed=1)],
        1.1: [row("a", 9.0, lr=1.1, seed=0), row("a", None, "failed", lr=1.1, seed=1)],
        1.5: [row("a", 7.0, "diverged", lr=1.5, seed=0)],  # its perplexity does not count
    }
    found = settings(each for pair in zip(*list(results.values())[:3], strict=True) for each in [*pair, *results[1.5]])
    assert [setting.values["lr"] for setting in found] == [0.3, 0.7, 1.1, 1.5]
    assert [setting.state for setting in found] == ["finished", "diverged", "missing", "diverged"]
    assert [setting.result for setting in found] == [9.0, None, None, None]
    assert [setting.spread for setting in found] == [pytest.approx(math.sqrt(2), rel=1e-15), None, None, None]
    assert [setting.by_seed for setting in found] == [{0: 8.0, 1: 10.0}, {0: math.inf, 1: 5.0}, {0: 9.0}, {0: math.inf}]


def test_a_shared_run_counts_once() -> None:
    """Two cells of a method that are one run, as controls of two cells may be, are one setting with one result."""
    (one,) = settings([row("a", 8.0, lr=0.3)])
    assert (one.result, one.spread, one.by_seed) == (8.0, None, {None: 8.0})  # no spread of zero
    (both,) = settings([*[row("a", 8.0, lr=0.3, seed=0)] * 2, row("a", 10.0, lr=0.3, seed=1)])
    assert (both.by_seed, both.result) == ({0: 8.0, 1: 10.0}, 9.0)


@pytest.mark.parametrize("perplexity", [None, math.nan, 0.0, -1.0])
def test_a_finished_run_without_a_perplexity_is_missing(perplexity: float | None) -> None:
    """A number that can be no perplexity enters no mean, no ratio and no logarithm."""
    (setting,) = settings([row("a", 8.0, lr=0.3, seed=0), row("a", perplexity, lr=0.3, seed=1)])
    assert (setting.state, setting.result, setting.by_seed) == ("missing", None, {0: 8.0})


def test_a_task_without_a_perplexity_is_compared_by_its_loss() -> None:
    """The loss takes its place everywhere."""
    (setting,) = settings([Row("a", "run", {}, "finished", None, 2.0)])
    assert (setting.result, measure_of(setting.rows)) == (2.0, "validation loss")
