"""`twophase diagnose`: what the theory says of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

from twophase.config import parse


@dataclass(frozen=True)
class Options:
    """Does a run's outer loop oscillate, overshoot or lag, and what does the theory suggest?"""

    run: Positional[Path] = tyro.MISSING
    """Folder of the run, its --out."""
    json: bool = False
    """Print one JSON object instead of words."""
    verbose: bool = False
    """Say also what the theory leaves out."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options, _ = parse(Options, argv, "twophase diagnose")
    from twophase.advice.text import describe
    from twophase.advice.verdict import as_json, diagnose
    from twophase.runs.record import read_record

    diagnosis = diagnose(read_record(options.run))
    words = describe(diagnosis, str(options.run), verbose=options.verbose)
    print(json.dumps(as_json(diagnosis), indent=2, allow_nan=False) if options.json else words)
    return 0
