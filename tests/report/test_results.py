"""Results as data: what `load` returns is what the files of a folder hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest

import twophase
from runmaker import EMA, make_sweep, write_run
from twophase.compare.sweep import compare_sweep
from twophase.diagnose import diagnose
from twophase.errors import UsageError
from twophase.files import read_jsonl
from twophase.report.results import Run, Sweep
from twophase.runs.record import read_record
from twophase.sweeps.table import Row, read_rows, write_rows


def run_of(path: Path, sigma: float = 0.3, rounds: int = 20, **options: Any) -> Run:
    run = twophase.load(write_run(path, EMA, [sigma] * 3, rounds, **options))
    assert isinstance(run, Run)
    return run


def sweep_of(path: Path) -> Sweep:
    sweep = twophase.load(path)
    assert isinstance(sweep, Sweep)
    return sweep


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
    assert run.diagnosis().state == diagnose(read_record(run.path)).state
    assert repr(run).count("\n") == 0
    assert run._repr_html_().count("<tr>") == 5


def test_two_runs(tmp_path: Path) -> None:
    """What differs is listed with both values, and nothing else; a run differs from itself in nothing."""
    run, other = run_of(tmp_path / "run"), run_of(tmp_path / "other", rounds=30)
    other.record.config["own"] = "x"
    table = run.compare(other)
    assert table.loc["steps"].tolist() == [20, 30]
    assert table.loc["own"].isna().tolist() == [True, False]
    assert not {"outer.lr", "config"} & set(table.index)
    assert run.compare(run).empty
    make_sweep(tmp_path / "sweep")
    with pytest.raises(UsageError, match="Run"):
        run.compare(sweep_of(tmp_path / "sweep"))  # type: ignore[arg-type]


def test_a_drawn_run_shows_its_columns(tmp_path: Path) -> None:
    """Each curve is a column over the steps, each dotted line a restart; of a run that has begun, as far as it is."""
    run = run_of(tmp_path / "run", restart="5")
    losses, gains, norms = run.plot().axes
    assert gains.lines[0].get_ydata() == pytest.approx(run.rounds["gain"])
    assert (len(norms.lines), losses.get_ylabel()) == (2 + 4, "loss")
    begun = run_of(tmp_path / "begun", rounds=5, restart="2", finished=False)
    (begun.path / "metrics.jsonl").unlink()
    begun = Run(read_record(begun.path))
    losses = begun.plot().axes[0]
    assert (begun.summary, list(begun.metrics), len(losses.lines), losses.get_legend()) == (None, [], 2, None)


def test_figures_for_a_paper(tmp_path: Path) -> None:
    """Title, words and limits are the caller's; those that the figure has not are refused by name."""
    figure = run_of(tmp_path / "run").plot(title="Mine", labels={"loss": "L", "gain": "g"}, limits={"loss": (1, 3)})
    losses, gains, _ = (cast("Any", axes) for axes in figure.axes)
    assert (figure.get_suptitle(), losses.get_ylabel(), losses.get_ylim()) == ("Mine", "L", (1, 3))
    assert {text.get_text() for text in gains.get_legend().get_texts()} == {"g", "cosine"}
    make_sweep(tmp_path / "sweep")
    maps = [sweep_of(tmp_path / "sweep").plot(labels={"outer.lr": "rate"}, limits=ends) for ends in (None, (1, 2))]
    assert maps[0].axes[0].get_xlabel() == "rate"
    colours, others = ([patch.get_facecolor() for patch in drawn.axes[0].patches] for drawn in maps)
    assert colours != others
    of_run = ("labels", {"los": "L"}), ("limits", {"los": (1, 3)}), ("limits", (1, 3))
    of_sweep = of_run[0], *(("limits", value) for value in ((0, 3), (3, 1), {"loss": (1, 3)}, 3))
    for path, wrong in ((tmp_path / "run", of_run), (tmp_path / "sweep", of_sweep)):
        for option, value in wrong:
            with pytest.raises(UsageError, match=option):
                cast("Any", twophase.load(path)).plot(**{option: value})


def test_a_sweep(tmp_path: Path) -> None:
    """The frame is cells.csv; best and comparisons are those of the comparison; the runs are those that have begun."""
    made, sweep = make_sweep(tmp_path), sweep_of(tmp_path)
    pd.testing.assert_frame_equal(sweep.frame(), pd.read_csv(tmp_path / "cells.csv"), check_dtype=False)
    compared = compare_sweep(read_rows(tmp_path / "cells.csv"))
    assert sweep.comparison().against == compared.against
    assert sweep.best() == compared.best is not None
    against = sweep.compare("heavy ball", "momentum-free")
    assert against == compared.against[0]
    assert [line.split()[0] for line in str(against).splitlines()] == ["method", "heavy"]
    assert against.frame()[["by", "word", "low"]].iloc[0].tolist() == ["tuned", against.tuned.word, against.tuned.low]
    assert str(against).splitlines()[1] in str(sweep.comparison())
    assert "perplexity" in str(sweep.best())
    for pair in (("no arm", "momentum-free"), ("heavy ball", "heavy ball"), ("momentum-free", "heavy ball")):
        with pytest.raises(ValueError, match="heavy ball"):  # not there, the same twice, a control on the left
            sweep.compare(*pair)
    assert {run.path.name for run in sweep.runs} < set(made.runs)
    assert len(sweep.runs) == len(made.runs) - 1
    sweep.plot().savefig(tmp_path / "map.png")
    assert "cells" in sweep._repr_html_()
    assert repr(sweep) == f"Sweep({str(tmp_path)!r}, 12 cells)"


def test_a_frame_keeps_the_texts(tmp_path: Path) -> None:
    """An arm without a name, words that pandas takes for missing, and run ids of digits stay; a number may lack."""
    values = {"task.augment": "None", "outer.lr": 0.3}
    rows = [Row("", "012345678901", values, "finished", None, 2.5), Row("", "1e2345678901", values, "missing")]
    write_rows(tmp_path / "cells.csv", rows)
    frame = sweep_of(tmp_path).frame()
    assert frame["run"].tolist() == [row.run for row in rows]
    assert frame.groupby(["arm", "task.augment"])["validation_loss"].mean().to_dict() == {("", "None"): 2.5}
    assert frame[["perplexity", "control_of"]].isna().all(axis=None)
    assert frame["diverged"].isna().tolist() == [False, True]


def test_no_results(tmp_path: Path) -> None:
    """Another folder, and none at all, are refused."""
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match="folder"):
            twophase.load(path)
    (tmp_path / "fresh-2").mkdir()  # as in a comparison's folder
    write_rows(tmp_path / "fresh-2" / "cells.csv", [])
    with pytest.raises(UsageError, match="fresh-2"):
        twophase.load(tmp_path)
