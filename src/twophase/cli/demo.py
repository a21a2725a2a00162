"""`twophase demo`: a small grid with and without restarts, trained, drawn, and told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twophase.cli.common import PROGRAM, report_command
from twophase.cli.sweep import SweepOptions, run
from twophase.config import parse

if TYPE_CHECKING:
    from rich.text import Text

    from twophase.runs.record import RunRecord
    from twophase.sweeps.grid import Sweep
    from twophase.sweeps.table import Row

_SECONDS = 5.0
"""Between two writings of the page."""


@dataclass(frozen=True)
class Options(SweepOptions):
    """Train a small language model over a grid, with and without restarts, and draw it."""

    quick: bool = False
    """A smaller grid of shorter runs, under two minutes."""
    seeds: tuple[int, ...] = (0,)
    """Seeds, 83 runs each, or 60 without controls."""
    controls: bool = True
    """Also train the control runs."""
    verbose: bool = False
    """Print the table of all arms and controls, too."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options, _ = parse(Options, argv, f"{PROGRAM} demo")
    from twophase.recipes.demo import demo
    from twophase.report.demo import draw, terminal_maps, verdict

    sweep = demo(quick=options.quick, seeds=options.seeds, controls=options.controls)
    out = options.out or Path("runs") / ("demo-quick" if options.quick else "demo")
    page = _Page(sweep, out, quiet=options.quiet)

    def on_rows(rows: list[Row]) -> Text:
        page.follow(rows)
        return terminal_maps(rows)

    def results(rows: list[Row], sweep: Sweep, out: Path) -> str:
        (out / "figures").mkdir(exist_ok=True)
        draw(rows, sweep, out / "figures")
        return f"\n{verdict(rows, sweep)}" if options.verbose else ""

    try:
        status = run(sweep, out, options, ["demo", *argv], results=results, on_rows=on_rows)
    finally:  # also of a demo that was stopped: the page must not wait for more
        rows = page.finish()
    if rows:
        print(_ending(rows, sweep, out))
    return status


class _Page:
    """The demo's page, written again while runs end."""

    def __init__(self, sweep: Sweep, out: Path, *, quiet: bool = False) -> None:
        self.sweep, self.out, self.path, self.quiet = sweep, out, out / "story.html", quiet
        self.next_at: float | None = None
        """When it is written again; None before the first time."""

    def follow(self, rows: list[Row]) -> None:
        """Write the page of a running demo, at most every few seconds; a full disk does not end the demo."""
        began = time.monotonic()
        if self.next_at is None and not self.quiet:
            print(f"page {self.path}: open it in a browser now; it refreshes by itself", flush=True)
        elif self.next_at is not None and began < self.next_at:
            return
        with suppress(OSError):
            self._write(rows, refresh=_SECONDS)
        # Another process's twentieth at most: the workers need the cores.
        self.next_at = time.monotonic() + max(_SECONDS, 20 * (time.monotonic() - began))

    def finish(self) -> list[Row] | None:
        """Write the page for the last time; return the rows, or None where no demo was begun."""
        from twophase.sweeps.table import TABLE, read_rows

        if self.next_at is None:  # refused, or only planned: the folder may be another sweep's
            return None
        rows = read_rows(self.out / TABLE)
        self._write(rows, refresh=0)
        return rows

    def _write(self, rows: list[Row], refresh: float) -> None:
        from twophase.explorer.page import State, build
        from twophase.files import write_atomic
        from twophase.report import demo as told
        from twophase.report import story

        base, rule = self.sweep.base, self.sweep.cells[0].config.outer.rule()
        assert rule is not None
        # Judging loads pandas, for which the first page, and with it the training, must not wait.
        is_judged = any(row.state != "missing" for row in rows)
        state = State(rule.lr, rule.momentum, rule.nesterov, rule.form, rounds=base.rounds)
        page = story.Story(
            base,
            told.findings(rows, self.sweep) if is_judged else ["No run has ended yet."],
            told.main_maps(rows),
            told.scale(rows),
            told.beside(rows),
            self._pair(),
            build(state, guided=True),
            told.verdict(rows, self.sweep) if is_judged else "",
            told.LIMITS,
            _following(self.out),
            refresh,
        )
        write_atomic(self.path, story.build(page))

    def _pair(self) -> list[RunRecord]:
        """Return the two runs that the demo begins with, so far as they have ended."""
        from twophase.runs.folder import read_summary
        from twophase.runs.record import read_record
        from twophase.sweeps.grid import RUNS

        folders = [self.out / RUNS / cell.run_id for cell in self.sweep.cells[:2]]
        return [read_record(path) for path in folders if read_summary(path, path.name) is not None]


def _following(out: Path) -> dict[str, str]:
    """Return the commands that come next, and what each is for."""
    return {
        report_command(out): "every comparison, with intervals",
        f"{PROGRAM} explore --open": "the explorer in a browser window",
        f"{PROGRAM} period --help": "advice for your setting",
    }


def _ending(rows: list[Row], sweep: Sweep, out: Path) -> str:
    """Tell what the demo showed, and where to look further; the page comes last."""
    import shutil
    import textwrap

    from twophase.report.demo import findings

    width = min(100, shutil.get_terminal_size().columns)
    command, meaning = next(iter(_following(out).items()))
    entries = {
        "table": out / "cells.csv",
        "figures": out / "figures",
        "next": f"{command}   ({meaning})",
        "page": out / "story.html",
    }
    paragraphs = [textwrap.fill(text, width) for text in findings(rows, sweep)]
    return "\n\n".join(["", *paragraphs, "\n".join(f"{name:8} {entry}" for name, entry in entries.items())])
