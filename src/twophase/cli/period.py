"""`twophase period`: when to restart a rule on a spectrum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twophase.config import parse


@dataclass(frozen=True)
class Options:
    """When to restart a rule on a spectrum, what it gains, and where it cannot help."""

    plot: Path | None = None
    """Draw the oscillation, and rate and loss against the period, into a .png or .pdf; the numbers as .csv."""
    json: bool = False
    """Print one JSON object instead of words."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.advice.period import Question, answer, describe, to_json

    options, question = parse(Options, argv, "twophase period", Question())
    from twophase.figures.period import check_files, draw

    if options.plot:
        check_files(options.plot)
    advice = answer(question)
    print(to_json(advice) if options.json else describe(advice), flush=True)
    if options.plot:
        paths = draw(advice, options.plot)
        if not options.json:
            print("figure " + ", numbers ".join(map(str, paths)))
    return 0
