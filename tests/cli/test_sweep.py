"""`twophase sweep`: from the words to the table and the figure."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from twophase.cli.main import main
from twophase.sweeps.table import TABLE, read_rows

WORDS = "sweep --task digits --steps 6 --inner-steps 3 --workers 1 --quiet --outer.method nesterov".split()


def test_a_grid_of_policies_by_fragment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several words are one value; controls, table and figure are there."""
    words = [*WORDS, "--out", str(tmp_path / "out"), "--controls", "--sync.fragments", "a=0", "b=."]
    words += ["--axis", "sync.restart", "none", "a=2,b=never", "--axis", "outer.lr", "0.3", "0.7"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "7 finished" in said
    rows = read_rows(tmp_path / "out" / TABLE)
    assert [row.values["sync.restart"] for row in rows[:4]] == ["none", "none", "a=2,b=never", "a=2,b=never"]
    assert {row.state for row in rows} == {"finished"}
    assert list((tmp_path / "out/figures").glob("*.png"))


def test_a_terminal_shows_the_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a sweep, which has no picture, runs and says what has ended."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    words = [word for word in WORDS if word != "--quiet"]
    assert main([*words, "--axis", "outer.lr", "0.3", "0.7", "--out", str(tmp_path)]) == 0
    assert "2/2 runs" in terminal.getvalue()


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says how many runs and steps there are, and makes no folder."""
    words = [*WORDS, "--out", str(tmp_path / "out"), "--axis", "outer.lr", "0.3", "0.7", "--dry-run"]
    assert main(words) == 0
    assert "2 different runs of 12 inner steps; 9 are left" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
