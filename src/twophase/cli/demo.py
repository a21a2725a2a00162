"""`twophase demo`: a small grid with and without restarts, trained, drawn, and told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.cli.sweep import SweepOptions, run
from twophase.cli.train import report_command
from twophase.config import parse

_SECONDS = 5  # between two writings of the page


@dataclass(frozen=True)
class Options(SweepOptions):
    """Train a small language model over a grid, with and without restarts, and draw it."""

    quick: bool = False
    """A smaller grid of shorter runs, under two minutes."""
    seeds: tuple[int, ...] = (0,)
    """Seeds, 83 runs each, or 60 without controls."""
    controls: bool = True
    """Also train the control runs."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options, _ = parse(Options, argv, "twophase demo")
    from twophase.explorer.page import State, build
    from twophase.files import write_atomic
    from twophase.recipes.demo import demo
    from twophase.report.demo import describe, draw, terminal_maps
    from twophase.report.story import story
    from twophase.sweeps.table import TABLE, read_rows

    sweep = demo(quick=options.quick, seeds=options.seeds, controls=options.controls)
    out = options.out or Path("runs") / ("demo-quick" if options.quick else "demo")
    page, next_at = out / "story.html", 0.0  # when the page is written again

    def on_rows(rows: list[Any]) -> Any:
        nonlocal next_at
        began = time.monotonic()
        if began < next_at:
            return terminal_maps(rows)
        with suppress(OSError):  # a full disk does not end the demo
            write_atomic(page, story(rows, sweep, out, refresh=_SECONDS))
            if not next_at:
                write_atomic(out / "explorer.html", build(State(rounds=sweep.base.rounds), guided=True))
        if not next_at and not options.quiet:
            print(f"page {page}: open it in a browser now; it refreshes by itself", flush=True)
        # Another process's twentieth at most: the workers need the cores.
        next_at = time.monotonic() + max(_SECONDS, 20 * (time.monotonic() - began))
        return terminal_maps(rows)

    def results(rows: list[Any]) -> str:
        draw(rows, out / "figures")
        return f"\n{describe(rows)}\n"

    try:
        status = run(sweep, out, options, results=results, on_rows=on_rows)
    finally:  # also of a demo that was stopped: the page must not wait for more
        if next_at:  # else it was refused, or only planned
            write_atomic(page, story(read_rows(out / TABLE), sweep, out))
    if next_at:
        print(f"table    {out / TABLE}\nfigures  {out / 'figures'}")
        print(f"next     {report_command(out)}   (every comparison)\npage     {page}")
    return status
