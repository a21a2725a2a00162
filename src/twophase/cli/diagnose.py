"""`twophase diagnose`: the state of a run's outer loop, and the one change to try."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

from twophase.config import parse


@dataclass(frozen=True)
class Options:
    """Does a run's outer loop diverge, take too large a step or oscillate, and which change to try?"""

    run: Positional[Path] = tyro.MISSING
    """Folder of the run, its --out."""
    json: bool = False
    """Print one JSON object instead of text."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options, _ = parse(Options, argv, "twophase diagnose")
    from twophase.diagnose import describe, diagnose
    from twophase.files import finite
    from twophase.runs.record import read_record

    diagnosis = diagnose(read_record(options.run))
    tree = finite(dataclasses.asdict(diagnosis))
    print(json.dumps(tree, indent=2, allow_nan=False) if options.json else describe(diagnosis))
    return 0
