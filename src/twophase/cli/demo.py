"""`twophase demo`: a small grid with and without restarts, trained, drawn, and told."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.cli.sweep import SweepOptions, run
from twophase.cli.train import report_command
from twophase.config import parse

_SECONDS = 5.0  # between two writings of the page


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
    options, _ = parse(Options, argv, "twophase demo")
    from twophase.files import write_atomic
    from twophase.recipes.demo import demo
    from twophase.report.demo import draw, findings, story_page, terminal_maps, verdict
    from twophase.sweeps.table import TABLE, read_rows

    sweep = demo(quick=options.quick, seeds=options.seeds, controls=options.controls)
    out = options.out or Path("runs") / ("demo-quick" if options.quick else "demo")
    page, next_at = out / "story.html", 0.0  # when the page is written again

    def on_rows(rows: list[Any]) -> Any:
        nonlocal next_at
        began = time.monotonic()
        if not next_at and not options.quiet:
            print(f"page {page}: open it in a browser now; it refreshes by itself", flush=True)
        if began >= next_at:
            with suppress(OSError):  # a full disk does not end the demo
                write_atomic(page, story_page(rows, sweep, out, refresh=_SECONDS))
            # Another process's twentieth at most: the workers need the cores.
            next_at = time.monotonic() + max(_SECONDS, 20 * (time.monotonic() - began))
        return terminal_maps(rows)

    def results(rows: list[Any]) -> str:
        draw(rows, sweep, out / "figures")
        return f"\n{verdict(rows, sweep)}" if options.verbose else ""

    try:
        status = run(sweep, out, options, results=results, on_rows=on_rows)
    finally:  # also of a demo that was stopped: the page must not wait for more
        if next_at:  # else it was refused, or only planned
            write_atomic(page, story_page(read_rows(out / TABLE), sweep, out))
    if next_at:
        width = min(100, shutil.get_terminal_size().columns)
        paragraphs = [textwrap.fill(text, width) for text in findings(read_rows(out / TABLE), sweep)]
        print("", *paragraphs, "", sep="\n\n", end="")
        print(f"table    {out / TABLE}\nfigures  {out / 'figures'}")
        print(f"next     {report_command(out)}   (every comparison, with intervals)\npage     {page}")
    return status
