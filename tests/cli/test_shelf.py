"""Outer methods on the command line, end to end on the digits: trained, swept with controls, reported, diagnosed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import twophase
from extras import need
from twophase.advice.change import Change
from twophase.cli.main import main
from twophase.runs.record import read_record
from twophase.sweeps.table import read_rows

need("sklearn", "the extra digits is not installed")
pytestmark = pytest.mark.usefixtures("forked_workers")

SHORT = "--task digits --task.width 2 --task.batch-size 4 --steps 24 --inner-steps 2 --quiet".split()
ADAMW = "adamw:lr=0.05"
OUTERS = {
    "method": (["--outer.method", ADAMW, "--outer.restart", "3"], ADAMW),
    "schedule": (["--outer.schedule", "cosine"], "schedule cosine"),
    "readout": (["--outer.readout", "tail:rounds=3"], "readout tail:rounds=3"),
    "preset": (["--outer.method", "nesterov:lr=0.3"], "Nesterov lr 0.3 momentum 0.9"),
}
COVERED = {"readout", "preset"}
"""Of which the anchors move by a rule, so that the theory has verdicts."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each."""
    folder = tmp_path_factory.mktemp("runs")
    for name, (words, _) in OUTERS.items():
        assert main(["train", *SHORT, *words, "--out", str(folder / name)]) == 0
    return folder


@pytest.mark.parametrize("name", OUTERS)
@pytest.mark.slow
def test_a_run_is_named_and_judged_by_what_it_is(runs: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Headline, diagnosis and report name the outer optimizer; the theory speaks where a rule moves the anchors."""
    path, (words, shown) = runs / name, OUTERS[name]
    assert main(["train", *SHORT, *words, "--out", str(path)]) == 0  # finished: only its headline
    assert shown in capsys.readouterr().out
    assert main(["diagnose", str(path)]) == 0
    assert shown in capsys.readouterr().out
    assert main(["diagnose", str(path), "--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert (diagnosis["rule"] is not None) == (name in COVERED)
    assert (diagnosis["findings"][0]["latest"] is not None) == (name in COVERED)
    assert diagnosis["findings"][0]["restarts"] == ("3" if "--outer.restart" in words else "never")
    assert main(["report", str(path)]) == 0
    assert shown in (path / "report.html").read_text(encoding="utf-8")
    assert shown in twophase.load(path)._repr_html_()


def test_the_explorer_takes_rules_alone(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of another method gives the page no rule, and is refused by its name; a preset is its rule."""
    out = ["--out", str(tmp_path / "page.html"), "--sigma", "0.5"]
    assert main(["explore", "--run", str(runs / "method"), *out]) == 2
    assert ADAMW in capsys.readouterr().err
    assert main(["explore", "--run", str(runs / "preset"), *out]) == 0


def test_the_changed_run_of_a_preset(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of a change replaces the preset, whose text would win over the options."""
    record = read_record(runs / "preset")
    command = Change("", "", {"outer.lr": 0.1}).command(str(runs / "preset"), record.config).split()
    command[command.index("--out") + 1] = str(tmp_path / "changed")
    assert main([*command[1:], "--quiet"]) == 0
    capsys.readouterr()
    rule = read_record(tmp_path / "changed").rule
    assert rule is not None
    assert (rule.lr, rule.momentum, rule.nesterov) == (0.1, 0.9, True)


@pytest.mark.slow
def test_a_sweep_of_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arms by method and restart; controls are of momentum SGD, gain-matched ones of rules alone; all is judged."""
    out = tmp_path / "sweep"
    axes = ["--axis", "outer.method", "sgd", ADAMW, "nesterov:lr=0.3", "--axis", "outer.restart", "never", "3"]
    assert main(["sweep", *SHORT, *axes, "--controls", "--workers", "1", "--out", str(out)]) == 0
    rows = read_rows(out / "cells.csv")
    names = ("sgd", ADAMW, "nesterov:lr=0.3")
    arms = [row.arm for row in rows]
    assert arms[:6] == [f"{name}, {restart}" for name in names for restart in ("never", "K=3")]
    assert arms[6:] == ["momentum-free"] * 2 + [f"{name}, never, gain of K=3" for name in (names[0], names[2])]
    assert {row.values["outer.method"] for row in rows[6:]} == {"sgd"}
    assert all(row.state == "finished" for row in rows)
    capsys.readouterr()
    assert main(["report", str(out)]) == 0
    assert ADAMW in capsys.readouterr().out
    assert main(["report", str(out), "--runs"]) == 0
    assert ADAMW in (out / "report.html").read_text(encoding="utf-8")
    assert main(["diagnose", str(out / "runs" / rows[2].run)]) == 0
    assert ADAMW in capsys.readouterr().out
