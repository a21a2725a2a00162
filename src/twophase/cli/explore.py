"""`twophase explore`: the interactive page as one file. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twophase.cli.report import save
from twophase.config import parse


@dataclass(frozen=True)
class Options:
    """Write an interactive page (one file): what restarts do while you move the hyperparameters."""

    out: Path = Path("explore.html")
    """The page; nothing else is needed."""
    run: Path | None = None
    """Begin with this run's rule, length and estimated effective progress."""
    open: bool = False
    """Open it in the browser."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.explorer.from_run import read_run
    from twophase.explorer.page import build
    from twophase.explorer.question import Question, of_run, state_of

    options, given = parse(Options, argv, "twophase explore", Question())
    run = read_run(options.run) if options.run else None
    # A page that was asked for without any value begins with the steps; any value asks for a view of one's own.
    guided = run is None and given == Question()
    question = parse(Options, argv, "twophase explore", of_run(run))[1] if run else given
    state = state_of(question, run)
    page = build(state, run.spectrum if run and state.spectrum == "run" else None, guided=guided)
    save(options.out, page)
    print(f"page {options.out} ({len(page.encode()) / 1000:.0f} kB): open it in a browser; it needs no network")
    if run and state.spectrum == "run":
        print(f"spectrum of {run.spectrum.name}: {run.spectrum.note}")
    elif run and run.problems:
        print(f"{run.spectrum.name}: {run.problems}")
    if options.open:
        import webbrowser

        webbrowser.open(options.out.resolve().as_uri())
    return 0
