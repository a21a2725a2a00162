"""What a sweep shows while it runs: a line a run on a pipe, a picture on a terminal."""

from __future__ import annotations

import io
import re

import pytest

from madeup import rows
from twophase.progress import meter
from twophase.recipes.demo import demo
from twophase.report.demo import terminal_maps

RESTORED = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_a_pipe_has_a_line_at_most_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """And one at the end; with `quiet` none."""
    for seconds, lines in ((0.0, ["train 1/3", "train 2/3", "train 3/3"]), (60.0, ["train 3/3"])):
        with meter("train", 3, plain_seconds=seconds) as show:
            for done in (1, 2, 3):
                show(done, "loss 2.500")
        said = capsys.readouterr().err.splitlines()
        assert [re.sub(r"  loss 2\.500  \(.*\)$", "", line) for line in said] == lines
    with meter("train", 3, quiet=True) as show:
        show(3, "done")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("width", "coloured"), [(40, True), (80, False)])
def test_a_terminal_has_the_map(monkeypatch: pytest.MonkeyPatch, width: int, coloured: bool) -> None:
    """The last picture has the numbers so far, no line is wider than the terminal, and NO_COLOR leaves no colour."""
    terminal, sweep = io.StringIO(), demo()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    settings = {"COLUMNS": f"{width}", "LINES": "40", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_COLOR", "" if coloured else "1")
    first, second, *_ = sweep.runs
    results = rows(sweep, lambda cell: {first: 15.95, second: "diverged"}.get(cell.run_id))
    with meter("demo", 83, picture=lambda: terminal_maps(results)) as show:
        show(4, "heavy ball: diverged")
    lines = RESTORED.sub("", terminal.getvalue()).replace("\r", "\n").splitlines()
    last = lines[max(index for index, line in enumerate(lines) if line.startswith("Heavy ball")) :]
    assert last[3].replace("\N{MIDDLE DOT}", "-").split() == "0.9 - 15.9 - 0.9 - div. -".split()
    assert "4/83" in "".join(last)
    assert "heavy ball: diverged" in "".join(last)
    assert max(map(len, lines)) <= width
    assert ("\x1b[38;2" in terminal.getvalue()) == coloured
