"""What a sweep shows while it runs: settings and perplexities, a line a run on a pipe, a picture on a terminal."""

from __future__ import annotations

import io
import re

import pytest

from madeup import rows
from twophase.cli.sweeping import watched
from twophase.recipes.demo import demo
from twophase.report.demo import terminal_maps
from twophase.sweeps.grid import Sweep
from twophase.sweeps.run import Status
from twophase.sweeps.table import Row, titles

RESTORED = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(sweep: Sweep) -> None:
    """Report the begin, a finished run, a diverged one and a replaced worker, as `run_sweep` does."""
    names = titles(sweep)
    first, second, *_ = sweep.runs

    def now() -> list[Row]:
        return rows(sweep, lambda cell: {first: 15.95, second: "diverged"}.get(cell.run_id))

    with watched("demo", quiet=False, picture=terminal_maps) as tell:
        tell(Status(83, 0, 0, 0, 2, rows=now))
        tell(Status(83, 1, 0, 0, 2, first, "finished", "", names[first], "perplexity 15.9", now))
        tell(Status(83, 1, 1, 0, 2, second, "diverged", "", names[second], rows=now))
        tell(Status(83, 1, 1, 0, 2, event="replaced", error="worker 7 was killed", rows=now))


def test_a_pipe_has_a_plain_line_for_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line has the count, the setting and the perplexity, and no run id."""
    sweep = demo()
    shown(sweep)
    lines = [re.sub(r"  \(\d+ s\)$", "", line) for line in capsys.readouterr().err.splitlines()]
    setting = "momentum 0.9, lr 0.7"
    assert lines == [
        "demo 2/83  2 finished before",
        f"demo 3/83  heavy ball, no restart, {setting}: perplexity 15.9; 2 finished before",
        f"demo 4/83  heavy ball, restart every 3 rounds, {setting}: diverged; 2 finished before; 1 diverged",
        "demo 4/83  worker 7 was killed; 2 finished before; 1 diverged",
    ]
    assert not any(run in line for run in sweep.runs for line in lines)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("coloured", [True, False])
def test_a_terminal_has_the_map(monkeypatch: pytest.MonkeyPatch, width: int, coloured: bool) -> None:
    """The last picture has the numbers so far, no line is wider than the terminal, and NO_COLOR leaves no colour."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    settings = {"COLUMNS": f"{width}", "LINES": "40", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_COLOR", "" if coloured else "1")
    shown(demo())
    written = terminal.getvalue()
    lines = RESTORED.sub("", written).replace("\r", "\n").splitlines()
    last = lines[max(index for index, line in enumerate(lines) if line.startswith("Heavy ball")) :]
    assert last[3].replace("\N{MIDDLE DOT}", "-").split() == "0.9 - 15.9 - 0.9 - div. -".split()
    assert "4/83" in "".join(last)
    assert max(map(len, lines)) <= width
    assert ("\x1b[38;2" in written) == coloured


def test_titles_name_what_varies() -> None:
    """A run is named by its arm and by the values that vary within it; a value that does not is left out."""
    names = list(titles(demo(quick=True, seeds=(0, 1))).values())
    assert names[0] == "heavy ball, no restart, seed 0, momentum 0.9, lr 1.1"
    assert "momentum-free, seed 1, lr 1" in names
    assert [name for name in names if name.startswith("auto")] == ["auto, seed 0", "auto, seed 1"]
    assert len(set(names)) == len(names)
