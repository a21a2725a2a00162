"""Results as data: what `load` returns is what the files of a folder hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

import twophase
from runmaker import EMA, make_sweep, write_run
from twophase.advice.verdict import diagnose
from twophase.errors import UsageError
from twophase.files import read_jsonl
from twophase.judge.verdict import verdict
from twophase.report.results import Run, Sweep
from twophase.runs.record import read_record
from twophase.sweeps.table import Row, read_rows, write_rows


def run_of(path: Path, sigma: float = 0.3, rounds: int = 20) -> Run:
    """A made-up run, loaded."""
    write_run(path, EMA, [sigma] * 3, rounds)
    run = twophase.load(path)
    assert isinstance(run, Run)
    return run


def test_a_run(tmp_path: Path) -> None:
    """Configuration, summary, rounds and metrics are the files'; the diagnosis is the report's; a repr is a line."""
    run = run_of(tmp_path / "run")
    lines = read_jsonl(tmp_path / "run" / "rounds.jsonl")
    frame = run.rounds.frame()
    assert frame["gain"].tolist() == [line["gain"] for line in lines]
    assert frame["round"].tolist() == run.rounds["round"].tolist() == [line["round"] for line in lines]
    assert run.metrics.frame()["step"].tolist() == [line["step"] for line in read_jsonl(run.path / "metrics.jsonl")]
    assert run.summary == json.loads((run.path / "summary.json").read_text())
    assert run.config["outer.momentum"] == EMA.momentum
    assert str(run.diagnosis()) == str(diagnose(read_record(run.path)))
    assert repr(run).count("\n") == 0
    assert run._repr_html_().count("<tr>") == 5


def test_two_runs(tmp_path: Path) -> None:
    """What differs is listed with both values, and nothing else; a run differs from itself in nothing.

    A default that `config.yaml` leaves out is a value as well, but not where a loop's own values were recorded.
    """
    run, other = run_of(tmp_path / "run"), run_of(tmp_path / "other", rounds=30)
    table = run.compare(other)
    assert table.loc["steps"].tolist() == [run.config["steps"], other.config["steps"]]
    other.record.config["inner.schedule"] = "cosine"
    assert run.compare(other).loc["inner.schedule"].tolist() == ["wsd", "cosine"]
    del run.record.config["inner.warmup"], run.record.config["inner.schedule"]
    assert run.compare(other).loc["inner.schedule"].isna().tolist() == [True, False]
    assert "outer.lr" not in table.index
    assert run.compare(run).empty
    with pytest.raises(ValueError, match=r"Run\.compare: "):
        run.compare("another")  # type: ignore[arg-type]


def test_a_run_that_has_begun(tmp_path: Path) -> None:
    """Without a summary and metrics it is loaded and drawn all the same."""
    write_run(tmp_path / "run", EMA, [0.3], 5, finished=False)
    (tmp_path / "run" / "metrics.jsonl").unlink(missing_ok=True)
    run = twophase.load(tmp_path / "run")
    assert isinstance(run, Run)
    assert (run.summary, list(run.metrics)) == (None, [])
    run.plot().savefig(tmp_path / "run.png")
    run.rounds["restarted"][2] = 1
    losses = run.plot().axes[0]
    assert (len(losses.lines), losses.get_legend()) == (1, None)


def test_a_drawn_run_shows_its_columns(tmp_path: Path) -> None:
    """Each curve is a column over the steps, each dotted line a restart."""
    run = run_of(tmp_path / "run")
    losses, gains, norms = run.plot().axes
    assert gains.lines[0].get_ydata() == pytest.approx(run.rounds["gain"])
    assert len(norms.lines) == 2 + int(run.rounds["restarted"].sum())
    assert losses.get_ylabel() == "loss"


def test_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame is cells.csv; best and comparisons are the verdict's; the runs are those that have begun."""
    made = make_sweep(tmp_path)
    sweep = twophase.load(tmp_path)
    assert isinstance(sweep, Sweep)
    pd.testing.assert_frame_equal(sweep.frame(), pd.read_csv(tmp_path / "cells.csv"), check_dtype=False)
    rows = read_rows(tmp_path / "cells.csv")
    judged = verdict(rows)
    assert sweep.best() == judged.best is not None
    assert sweep.compare("heavy ball", "momentum-free") == judged.comparisons[0]
    assert {run.path.name for run in sweep.runs} < set(made.runs)
    assert len(sweep.runs) == len(made.runs) - 1
    sweep.plot().savefig(tmp_path / "map.png")
    assert "cells" in sweep._repr_html_()
    assert repr(sweep) == f"Sweep({str(tmp_path)!r}, 12 cells)"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        with pytest.raises(UsageError, match="needs pandas, which is not installed"):
            sweep.frame()
    for pair in (("no arm", "momentum-free"), ("heavy ball", "heavy ball"), ("momentum-free", "heavy ball")):
        with pytest.raises(ValueError, match=r"Sweep\.compare: "):
            sweep.compare(*pair)


def test_a_frame_keeps_the_texts(tmp_path: Path) -> None:
    """An arm without a name, words that pandas takes for missing, and run ids of digits stay; a number may lack."""
    values = {"task.augment": "None", "outer.lr": 0.3}
    rows = [Row("", "012345678901", values, "finished", None, 2.5), Row("", "1e2345678901", values, "missing")]
    write_rows(tmp_path / "cells.csv", rows)
    sweep = twophase.load(tmp_path)
    assert isinstance(sweep, Sweep)
    frame = sweep.frame()
    assert frame["run"].tolist() == [row.run for row in rows]
    assert frame.groupby(["arm", "task.augment"])["validation_loss"].mean().to_dict() == {("", "None"): 2.5}
    assert frame[["perplexity", "control_of"]].isna().all(axis=None)
    assert frame["diverged"].isna().tolist() == [False, True]


def test_areas_are_near_the_best_of_all_arms(tmp_path: Path) -> None:
    """A pair of arms is compared as in the report, where a third arm may be the best."""
    values = {"a": (8.0, 8.4), "b": (8.3, 9.9), "best": (5.0, 5.1)}
    rows = [
        Row(arm, f"{arm}{lr}", {"outer.lr": lr}, "finished", result)
        for arm, results in values.items()
        for lr, result in enumerate(results)
    ]
    write_rows(tmp_path / "cells.csv", rows)
    sweep = twophase.load(tmp_path)
    assert isinstance(sweep, Sweep)
    compared = sweep.compare("a", "b")
    judged = verdict(rows, controls=["b"])
    assert compared in judged.comparisons
    areas = [difference.mean for difference in compared.differences if difference.measure == "area"]
    assert areas == [0.0] * len(areas) != []


def test_no_results(tmp_path: Path) -> None:
    """Another folder, and none at all, are refused with a message."""
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match="folder"):
            twophase.load(path)
