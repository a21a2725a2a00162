"""`twophase spectrum`: its options, checked; `block_report` measures and writes, and loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twophase.base.config import UsageError
from twophase.cli.commands import between, plain_parser

_MOST_EIGENVALUES = 100  # each is found by itself


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
    text = "batches of the run's training data, of its batch size (%(default)s)"
    add("--batches", type=between(1, 10_000), default=4, metavar="N", help=text)
    add(
        "--top",
        type=between(1, _MOST_EIGENVALUES),
        default=5,
        metavar="N",
        help="eigenvalues of each block found one by one (%(default)s)",
    )
    add("--out", type=Path, metavar="DIR", help="folder of spectrum.png, .pdf, .csv and .json (the run's own)")
    add("--json", action="store_true", help="print one JSON object instead of words")
    add("--quiet", action="store_true", help="show no progress")
    options = parser.parse_args(words)
    patterns = _patterns(options.blocks)
    from twophase.cli.block_report import spectrum

    return spectrum(options, patterns)


def _patterns(words: Sequence[str]) -> dict[str, str] | None:
    """Return patterns by block."""
    patterns: dict[str, str] = {}
    for word in words:
        name, _, pattern = word.partition("=")
        if not (name and pattern) or name in patterns:
            what = "a name twice" if name in patterns else "no block"
            raise UsageError(
                f"--blocks {word}: {what}; write NAME=PATTERN for each block, such as ends='embedding|head' rest=."
            )
        patterns[name] = pattern
    return patterns or None
