"""The demo in a folder whose runs have ended: the page, the figures and the ending, without the training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import snapshot
from runmaker import SUM, write_run, write_summary
from twophase.cli.main import main
from twophase.recipes.demo import demo
from twophase.report.demo import describe
from twophase.sweeps.table import read_rows

QUICK = ["demo", "--quick", "--workers", "1"]


def finished(folder: Path) -> None:
    for number, cell in enumerate((sweep := demo(quick=True)).cells):
        path = folder / "runs" / cell.run_id
        if number < 2:  # which the page shows in rounds
            write_run(path, SUM, (0.95, 0.3), 12, cell.config.outer.restart)
        path.mkdir(parents=True, exist_ok=True)
        write_summary(path, cell.config, 8.0 + cell.config.outer.numbers()["momentum"])
    (folder / "sweep.json").write_text(json.dumps(sweep.spec()))


def test_the_ending(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's path is printed first; then the table of the rows; then table, figures, and the page."""
    finished(tmp_path)
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].startswith(f"page {tmp_path / 'story.html'}")
    assert describe(read_rows(tmp_path / "cells.csv")) in said
    assert said.splitlines()[-1].endswith("story.html")
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["controls.png", "demo.png"]
    page = (tmp_path / "story.html").read_text(encoding="utf-8")
    assert 'data-refresh="' not in page
    assert 'class="rounds"' in page
    assert (tmp_path / "explorer.html").read_bytes().startswith(b"<!doctype html>")


def test_another_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A demo that is refused, or only planned, writes nothing and draws no conclusion."""
    (tmp_path / "sweep.json").write_text(json.dumps(demo(quick=True, seeds=(5,)).spec()))
    before = snapshot(tmp_path)
    assert main([*QUICK, "--out", str(tmp_path)]) == 2
    assert main([*QUICK, "--dry-run", "--out", str(tmp_path)]) == 0
    assert snapshot(tmp_path) == before
    said = capsys.readouterr()
    assert "--out" in said.err
    assert "inner steps" in said.out
    assert "Methods" not in said.out
