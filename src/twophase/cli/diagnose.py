"""`twophase diagnose`: what the theory says of a run."""

from __future__ import annotations

import json
from pathlib import Path

from twophase.advice.text import describe
from twophase.advice.verdict import as_json, diagnose
from twophase.base.config import UsageError
from twophase.cli.commands import config_paths, plain_parser
from twophase.runs.record import read_record


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = plain_parser("diagnose")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, its --out")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    parser.add_argument("--verbose", action="store_true", help="say also what the theory leaves out")
    options = parser.parse_args(arguments)
    record = read_record(options.run, config_paths())
    if not record.config and not len(record.rounds["round"]):
        raise UsageError(
            f"{record.path}: holds neither a readable config.yaml nor any round; there is nothing to judge"
        )
    diagnosis = diagnose(record)
    print(
        json.dumps(as_json(diagnosis), indent=2, allow_nan=False)
        if options.json
        else describe(diagnosis, str(options.run), verbose=options.verbose)
    )
    return 0
