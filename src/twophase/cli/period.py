"""`twophase period`: when to restart a rule on modes of given sigma."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twophase.config import parse


@dataclass(frozen=True)
class Options:
    """When to restart a rule, in the linear model: the best period beside the best setting without restarts."""

    plot: Path | None = None
    """Draw the residual of a mode, and rate and loss against the period, into a .png or .pdf."""
    json: bool = False
    """Print one JSON object instead of text."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.diagnose.period import Question, answer, describe, to_json

    options, question = parse(Options, argv, "twophase period", Question())
    advice = answer(question)
    if options.plot:
        from twophase.figures.period import draw

        draw(advice, options.plot)
    print(to_json(advice) if options.json else describe(advice))
    if options.plot and not options.json:
        print(f"\nfigure {options.plot}")
    return 0
