"""The demo's page while it runs and when it ends, without the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from madeup import rows
from runmaker import SUM, write_run
from twophase.cli import demo as command
from twophase.cli.main import main
from twophase.recipes.demo import demo
from twophase.sweeps.grid import Cell, Sweep
from twophase.sweeps.table import write_rows


def begun(folder: Path) -> command._Page:
    """The page of a quick demo in a folder with the two runs that it begins with."""
    sweep = demo(quick=True)
    for cell, restart in zip(sweep.cells[:2], ("never", "3"), strict=True):
        write_run(path := folder / "runs" / cell.run_id, SUM, (0.95, 0.3), 12, restart)
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        (path / "summary.json").write_text(json.dumps(summary | {"config": cell.run_id}), encoding="utf-8")
    return command._Page(sweep, folder)


def test_the_page_follows_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its path is printed first; it is written at once, then at most every few seconds, and last without a watch."""
    page = begun(tmp_path)
    page.follow(rows(page.sweep, lambda _: None))
    assert str(page.path) in capsys.readouterr().out
    first = page.path.read_text(encoding="utf-8")
    assert "No run has ended yet." in first
    assert "in progress" in first
    results = rows(page.sweep, lambda cell: 8.0 + cell.config.outer.numbers()["lr"])
    page.follow(results)
    assert page.path.read_text(encoding="utf-8") == first
    page.next_at = 0.0
    page.follow(results)
    assert "in progress" in (second := page.path.read_text(encoding="utf-8"))
    assert "Compared:" in second
    write_rows(tmp_path / "cells.csv", results)
    assert page.finish() == results
    last = page.path.read_text(encoding="utf-8")
    assert "in progress" not in last
    assert 'class="rounds"' in last
    assert capsys.readouterr().out == ""


def test_a_full_disk_is_not_the_end_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that cannot be written is left out while runs go on; at the end it is one message."""

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    page = begun(tmp_path)
    monkeypatch.setattr("twophase.base.files.write_atomic", refuse)
    page.follow(rows(page.sweep, lambda _: None))
    monkeypatch.undo()
    write_rows(tmp_path / "cells.csv", rows(page.sweep, lambda _: 8.0))
    monkeypatch.setattr("twophase.base.files.write_atomic", refuse)
    with pytest.raises(command.UsageError, match=r"story\.html: cannot be written \(No space left"):
        page.finish()


def test_another_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A demo that is refused, or only planned, writes no page and draws no conclusion."""
    page = command._Page(demo(quick=True), tmp_path)
    write_rows(tmp_path / "cells.csv", rows(page.sweep, lambda _: 8.0))
    (tmp_path / "sweep.json").write_text("{}", encoding="utf-8")
    assert main(["demo", "--quick", "--out", str(tmp_path)]) == 2
    assert page.finish() is None
    assert not page.path.exists()
    assert "Compared" not in capsys.readouterr().out


def test_the_ending_names_the_page_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures and the table of arms come first, also of a demo that was stopped, whose status stays.

    Then findings, in the terminal's width; then table, figures, a next command, and the page.
    """

    def value(cell: Cell) -> float:
        return 8.0 + cell.config.outer.numbers()["momentum"]

    def run(sweep: Sweep, out: Path, _: Any, *, results: Any, picture: Any, **more: Any) -> int:
        assert " demo --quick --verbose --out" in more["repeat"]
        (out / "figures").mkdir()
        results_of_runs = rows(sweep, value)
        assert "lr" in picture(results_of_runs).plain
        write_rows(out / "cells.csv", results_of_runs)
        print(results(results_of_runs, sweep, out))
        return 130

    monkeypatch.setattr("twophase.cli.sweeping.run", run)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["demo", "--quick", "--verbose", "--out", str(tmp_path)]) == 130
    table, ending = capsys.readouterr().out.split("Compared:")
    assert "no restart" in table
    lines = ending.splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["table", "figures", "next", "page"]
    assert lines[-1].endswith("story.html")
    assert max(map(len, lines[:-4])) <= 60
    assert list((tmp_path / "figures").glob("*.png"))
    assert "in progress" not in (tmp_path / "story.html").read_text(encoding="utf-8")
