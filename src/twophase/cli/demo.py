"""`twophase demo`: a small grid with and without restarts, trained, drawn, and told."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from twophase.base.errors import UsageError
from twophase.cli.commands import PROGRAM, between, command_line, report_command, run_parser

if TYPE_CHECKING:
    from rich.text import Text

    from twophase.runs.record import RunRecord
    from twophase.sweeps.grid import Sweep
    from twophase.sweeps.table import Row

_SECONDS = 5.0
"""Between two writings of the page."""


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.cli.sweeping import run
    from twophase.recipes.demo import demo
    from twophase.report.demo import draw, terminal_maps, verdict
    from twophase.tasks.lm.config import check

    options = _parser().parse_args(arguments)
    sweep = demo(quick=options.quick, seeds=options.seeds, controls=not options.no_controls)
    for config in sweep.runs.values():
        check(config)
    out = options.out or Path("runs") / ("demo-quick" if options.quick else "demo")

    page = _Page(sweep, out, quiet=options.quiet)

    def picture(rows: list[Row]) -> Text:
        page.follow(rows)
        return terminal_maps(rows)

    def results(rows: list[Row], sweep: Sweep, out: Path) -> str:
        draw(rows, sweep, out / "figures")
        return f"\n{verdict(rows, sweep)}" if options.verbose else ""

    repeat = command_line(["demo", *arguments])
    try:
        status = run(sweep, out, options, repeat=repeat, results=results, picture=picture)
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
        from twophase.sweeps.run import TABLE
        from twophase.sweeps.table import read_rows

        if self.next_at is None:  # refused, or only planned: the folder may be another sweep's
            return None
        rows = read_rows(self.out / TABLE)
        try:
            self._write(rows, refresh=0)
        except OSError as error:
            raise UsageError(
                f"{self.path}: cannot be written ({error.strerror}); free space, repeat the command"
            ) from None
        return rows

    def _write(self, rows: list[Row], refresh: float) -> None:
        from twophase.base.files import write_atomic
        from twophase.explorer.page import State, build
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
        from twophase.sweeps.work import RUNS

        folders = [self.out / RUNS / cell.run_id for cell in self.sweep.cells[:2]]
        return [read_record(path) for path in folders if read_summary(path, path.name) is not None]


def _parser() -> argparse.ArgumentParser:
    from twophase.cli.sweeping import add_options

    parser = run_parser("demo")
    add_options(parser)
    parser.add_argument("--quick", action="store_true", help="a smaller grid of shorter runs, under two minutes")
    parser.add_argument(
        "--seeds",
        type=between(0, 2**63 - 1),
        nargs="+",
        default=[0],
        metavar="SEED",
        help="seeds, 83 runs each, or 60 without controls (0)",
    )
    parser.add_argument("--no-controls", action="store_true", help="leave out the control runs")
    parser.add_argument("--verbose", action="store_true", help="print the table of all arms and controls, too")
    return parser


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
