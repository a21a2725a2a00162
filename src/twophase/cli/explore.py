"""`twophase explore`: the interactive page as one file. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twophase.config import parse
from twophase.errors import UsageError


@dataclass(frozen=True)
class Options:
    """Write an interactive page (one file): what restarts do while you move the hyperparameters."""

    out: Path = Path("explore.html")
    """The page; nothing else is needed."""
    run: Path | None = None
    """Begin with this run's rule, restarts and length, and with the effective progress that `diagnose` shows of it."""
    open: bool = False
    """Open it in the browser."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.explorer.page import build
    from twophase.explorer.question import Question, of_run, state_of

    options, question = parse(Options, argv, "twophase explore", Question())
    # A page that was asked for without any value begins with the steps; any value asks for a view of one's own.
    guided = options.run is None and question == Question()
    seen: tuple[float, ...] = ()
    if options.run is not None:  # whose values the options replace
        of_that, seen = of_run(options.run)
        question = parse(Options, argv, "twophase explore", of_that)[1]
    page = build(state_of(question, seen), guided=guided)
    _save(options.out, page)
    print(f"page {options.out} ({len(page.encode()) / 1000:.0f} kB): open it in a browser; it needs no network")
    if options.run and not (seen or question.sigma or question.sigma_range):
        print(
            f"modes are the page's own: {options.run} does not show its effective progress; give --sigma-range LOW HIGH"
        )
    if options.open:
        import webbrowser

        webbrowser.open(options.out.resolve().as_uri())
    return 0


def _save(out: Path, page: str) -> None:
    """Write the page to a new file, or over an older page of this command."""
    from twophase.explorer.page import MARK
    from twophase.files import write_atomic

    if out.is_file() and out.stat().st_size and MARK.encode() not in out.read_bytes()[:1000]:
        raise UsageError(f"--out {out}: must be a new file or a page of twophase explore, holds something else")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, page)
