"""`twophase spectrum`: its options; `twophase.spectrum.report` measures and writes, and loads torch."""

from __future__ import annotations

from pathlib import Path

from twophase.cli.commands import between, config_paths, plain_parser


def main(words: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = plain_parser("spectrum")
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run, its --out")
    add(
        "--blocks",
        nargs="+",
        default=(),
        metavar="NAME=PATTERN",
        help="patterns of blocks; a parameter is in the first block that matches its name (default: named "
        "fragments, else parts of lm or top modules)",
    )
    batches = "batches of the run's training data, of its batch size (%(default)s)"
    add("--batches", type=between(1, 10_000), default=4, metavar="N", help=batches)
    add("--out", type=Path, metavar="DIR", help="folder of spectrum.png, .pdf, .csv and .json (the run's own)")
    add("--json", action="store_true", help="print one JSON object instead of words")
    add("--quiet", action="store_true", help="show no progress")
    options = parser.parse_args(words)
    from twophase.runs.record import read_record
    from twophase.training.config import named_values

    patterns = named_values("blocks", options.blocks, "ends='embedding|head' rest=.")
    record = read_record(options.run, config_paths())
    from twophase.spectrum.report import report  # torch, after every mistake that needs none

    text, facts = report(record, options.out or options.run, patterns, options.batches, quiet=options.quiet)
    print(facts if options.json else text)
    return 0
