"""Tables: rows on disk, summaries of arms over seeds, controls beside what they control."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.base.config import UsageError
from twophase.sweeps.grid import Axis, Sweep, product
from twophase.sweeps.table import (
    STATES,
    Row,
    State,
    _value,
    cell_text,
    format_table,
    geometric_mean,
    read_rows,
    readable,
    rows_of,
    settings,
    write_rows,
)


@dataclass(frozen=True)
class Config:
    """A small configuration."""

    lr: float = 0.7
    restart: str = "never"
    nesterov: bool = False
    seed: int = 0


def row(
    arm: str, perplexity: float | None, state: State = "finished", control_of: str | None = None, **values: Any
) -> Row:
    name = ",".join([arm, *(f"{key}={value}" for key, value in values.items())])
    return Row(arm, name, values, state, perplexity, control_of=control_of)


def summary(perplexity: float | None, diverged: bool = False) -> dict[str, Any]:
    loss = math.log(perplexity) if perplexity else None
    return {"perplexity": perplexity, "validation_loss": loss, "seconds": 5.5, "diverged": diverged}


def test_rows_of_a_sweep() -> None:
    """Each cell is a row with every axis value, also those that its arm does not vary, and a twin's results if any."""
    cells = product(Config(), [Axis("lr", (0.3, 0.7))], "a")
    cells += product(Config(), [Axis("restart", ("3", "4", "5", "6"))], "b")
    sweep = Sweep("s", Config(), cells)
    ids = [cell.run_id for cell in cells]
    summaries = {ids[0]: summary(8.0), ids[1]: summary(None, diverged=True)}
    rows = rows_of(sweep, summaries, failed=[ids[2], "lost"], stands_for={ids[4]: ids[0], ids[5]: "lost"})
    assert [r.run for r in rows] == ids
    assert [r.state for r in rows] == ["finished", "diverged", "failed", "missing", "finished", "failed"]
    assert [r.perplexity for r in rows] == [8.0, None, None, None, 8.0, None]
    assert [r.twin_of for r in rows] == [None] * 4 + [ids[0], "lost"]
    assert rows[0].seconds == 5.5
    assert rows[0].values == {"lr": 0.3, "restart": "never"}
    assert rows[2].values == {"lr": 0.7, "restart": "3"}


def test_rows_on_disk(tmp_path: Path) -> None:
    """The table has the promised columns, empty fields for what is not known, and reads back as it was written."""
    rows = [
        Row("a, b", "1f", {"lr": 0.3, "restart": "3", "nesterov": True, "seed": 0}, "finished", 8.25, 2.11, 5.0, None),
        Row(
            "a, b",
            "2f",
            {"lr": 1.0, "restart": "never", "nesterov": False, "seed": 1},
            "diverged",
            None,
            None,
            1.0,
            "1f",
            "4f",
        ),
        Row("c", "3f", {"lr": 1e-5, "restart": "at:4,9", "nesterov": False, "seed": 1}, "missing"),
        Row("c", "4f", {"lr": 0.1, "restart": "never", "nesterov": False, "seed": 1}, "failed"),
    ]
    path = tmp_path / "cells.csv"
    write_rows(path, rows)
    assert path.read_text().splitlines() == [
        "arm,run,lr,restart,nesterov,seed,perplexity,validation_loss,diverged,state,seconds,control_of,twin_of",
        '"a, b",1f,0.3,3,true,0,8.25,2.11,false,finished,5.0,,',
        '"a, b",2f,1.0,never,false,1,,,true,diverged,1.0,1f,4f',
        'c,3f,1e-05,"at:4,9",false,1,,,,missing,,,',
        "c,4f,0.1,never,false,1,,,,failed,,,",
    ]
    back = read_rows(path)
    assert back == rows
    assert [type(value) for value in back[1].values.values()] == [float, str, bool, int]


def test_a_table_without_twins_is_read(tmp_path: Path) -> None:
    """A table written before there was a column for twins reads as one in which every cell's own run was done."""
    path = tmp_path / "cells.csv"
    path.write_text(
        "arm,run,lr,perplexity,validation_loss,diverged,state,seconds,control_of\n"
        "a,1f,0.3,8.25,2.11,false,finished,5.0,\na,2f,0.7,,,,missing,,1f\n"
    )
    assert read_rows(path) == [
        Row("a", "1f", {"lr": 0.3}, "finished", 8.25, 2.11, 5.0),
        Row("a", "2f", {"lr": 0.7}, "missing", control_of="1f"),
    ]


NAMES = st.text("ab ,\"';#=\t\x0b\x1c\x85\u00e9\u2028\ufeff\u6f22\U0001f600")
WORDS = st.text("abc xyz,\"';#", min_size=1)
NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(NAMES, st.sampled_from(STATES), NUMBERS, WORDS), min_size=1))
def test_any_rows_survive_the_disk(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, State, float | None, str]]
) -> None:
    """Names with commas and quotes and numbers of any size come back as they were written."""
    rows = [
        Row(arm, str(i), {"corpus": word}, state, number, number, number)
        for i, (arm, state, number, word) in enumerate(records)
    ]
    path = tmp_path_factory.getbasetemp() / "cells.csv"
    write_rows(path, rows)
    assert read_rows(path) == rows


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a,b\n1,2\n",
        b"arm,run,perplexity,validation_loss,diverged,state,seconds\na,1,8.0,2.0,false,finished,1.0\n",
        b"arm,run,perplexity,validation_loss,diverged,state,seconds,control_of,twin_of\na,1,,,,missing,,\n",
        b"arm,run,perplexity,validation_loss,diverged,state,seconds,control_of\na,1,2\n",
        b"arm,run,perplexity,validation_loss,diverged,state,seconds,control_of\na,1,,,,asleep,,\n",
        b"arm,run,perplexity,validation_loss,diverged,state,seconds,control_of\na,1,many,,,finished,,\n",
        b"arm,run,perplexity,validation_loss,diverged,state,seconds,control_of,twin_of\n",
        b"\xff\xfe",
        None,
    ],
)
def test_read_rows_refuses(tmp_path: Path, content: bytes | None) -> None:
    """A file that is missing, damaged or something else is a usage error with its name and the remedy."""
    path = tmp_path / "cells.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"cells\.csv.*repeat the sweep's command"):
        read_rows(path)


def test_a_table_that_cannot_be_read_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy of `read_rows`, to repeat the sweep's command, works for a table that may not be read."""
    path, rows = tmp_path / "cells.csv", [row("a", 8.0, lr=0.3)]
    path.touch()

    def denied(_: Path) -> bytes:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", denied)
        write_rows(path, rows)
    assert read_rows(path) == rows


def test_settings_take_seeds_together() -> None:
    """A setting is the mean over its seeds, diverged when one of them is, missing when one of them is."""
    rows = [
        row("a", 8.0, lr=0.3, seed=0),
        row("a", None, "diverged", lr=0.7, seed=0),
        row("a", 9.0, lr=1.1, seed=0),
        row("a", 10.0, lr=0.3, seed=1),
        row("a", 5.0, lr=0.7, seed=1),
        row("a", None, "failed", lr=1.1, seed=1),
        row("a", 7.0, "diverged", lr=1.5, seed=0),
    ]
    merged = settings(rows)
    assert [(s.values["lr"], s.state, s.result) for s in merged] == [
        (0.3, "finished", 9.0),
        (0.7, "diverged", None),
        (1.1, "missing", None),
        (1.5, "diverged", None),
    ]
    assert merged[0].runs == ("a,lr=0.3,seed=0", "a,lr=0.3,seed=1")
    assert merged[0].results == (8.0, 10.0)
    assert merged[0].spread == pytest.approx(math.sqrt(2), rel=1e-15)
    assert [s.finished for s in merged] == [2, 1, 1, 0]
    assert [s.results for s in merged[1:]] == [(None, 5.0), (9.0, None), (None,)]
    assert [s.spread for s in merged[1:]] == [None, None, None]
    assert merged[2].states == ("finished", "missing")  # a run that could not be done is not there
    assert merged[2].seeds == (0, 1)


def test_one_seed_has_no_spread() -> None:
    """One seed, or a sweep without an axis of seeds, gives a mean and no spread, not a spread of zero."""
    (setting,) = settings([row("a", 8.0, lr=0.3)])
    assert (setting.result, setting.spread, setting.seeds) == (8.0, None, (None,))


def test_a_shared_run_counts_once() -> None:
    """Two cells of an arm that are one run, as controls of two cells may be, are one setting with one result."""
    twice = [row("match", 8.0, control_of=f"of {i}", lr=0.3, seed=0) for i in range(2)]
    (setting,) = settings([*twice, row("match", 10.0, lr=0.3, seed=1)])
    assert (setting.seeds, setting.results, setting.result) == ((0, 1), (8.0, 10.0), 9.0)


@pytest.mark.parametrize("perplexity", [None, math.nan, math.inf, 0.0, -1.0])
def test_a_finished_run_without_a_perplexity_is_missing(perplexity: float | None) -> None:
    """A number that can be no perplexity enters no mean, no ratio and no logarithm."""
    rows = [row("a", 8.0, lr=0.3, seed=0), row("a", perplexity, lr=0.3, seed=1, control_of="a,lr=0.3,seed=0")]
    (setting,) = settings(rows)
    assert (setting.state, setting.result, setting.results) == ("missing", None, (8.0, None))


def test_a_perplexity_that_overflowed_is_missing(tmp_path: Path) -> None:
    """JSON has null for it; its loss takes no place among perplexities, also on the disk. A task may have none."""
    sweep = Sweep("s", Config(), product(Config(), [Axis("lr", (0.1, 0.3, 0.7))]))
    without = {"validation_loss": 2.0, "seconds": 5.5, "diverged": False}
    overflow = without | {"validation_loss": 800.0, "perplexity": None}
    ended = [overflow, summary(8.0), summary(None, diverged=True)]
    rows = rows_of(sweep, dict(zip(sweep.runs, ended, strict=True)))
    assert [row.perplexity for row in rows] == [math.inf, 8.0, None]
    write_rows(tmp_path / "cells.csv", rows)
    assert read_rows(tmp_path / "cells.csv") == rows
    assert [setting.state for setting in settings(rows)] == ["missing", "finished", "diverged"]
    (setting, *_) = settings(rows_of(sweep, dict.fromkeys(sweep.runs, without)))
    assert (setting.result, setting.measure) == (2.0, "validation loss")


@given(st.lists(st.floats(1e-3, 1e3), min_size=1), st.floats(1e-2, 1e2))
def test_geometric_mean_scales(values: list[float], factor: float) -> None:
    """It lies between the extremes and scales with its values."""
    mean = geometric_mean(values)
    assert mean is not None
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    assert geometric_mean([factor * value for value in values]) == pytest.approx(factor * mean, rel=1e-9)


def test_format_table() -> None:
    """Columns align, numbers and percentages to the right; None is an empty cell, and in Markdown a bar ends none."""
    text = format_table(["arm", "best", "share"], [["a", 7.5, "40%"], ["long name", None, "100%"]])
    assert text.splitlines() == ["arm        best  share", "a           7.5    40%", "long name         100%"]
    assert format_table(["arm"], []) == "arm"
    text = format_table(["arm", "n"], [["a", 1], ["b|c", 20]], markdown=True)  # as ends=embedding|head
    assert text.splitlines() == ["| arm  |  n |", "| ---- | --: |", "| a    |  1 |", "| b\\|c | 20 |"]


def test_texts_that_look_like_numbers_stay_texts() -> None:
    """01 is not 1, and 1.10 not 1.1: settings of a text are told apart as they were written."""
    for value in ("01", "1.10", "1_0", "+1", 1, 1.5, -2.0, 1e-05, "x"):
        text = cell_text(value)
        assert _value("task.variant", text) == value, value
        assert isinstance(_value("task.variant", text), type(value))


def test_readable() -> None:
    """Results are written in about three digits."""
    assert [readable(value) for value in (10.04, 12345.0, 1e300)] == ["10.0", "1e4", "1e300"]
