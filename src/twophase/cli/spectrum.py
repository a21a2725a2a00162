"""`twophase spectrum`: its options; `block_report` measures and writes, and loads torch."""

from __future__ import annotations

from pathlib import Path

from twophase.cli.commands import config_paths, plain_parser


def main(words: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = plain_parser("spectrum")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, its --out")
    parser.add_argument(
        "--blocks",
        nargs="+",
        default=(),
        metavar="NAME=PATTERN",
        help="a parameter is in the first block whose pattern its name contains (default: the run's named fragments, "
        "else embeddings, attention, mlp, norms, head)",
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=4,
        metavar="N",
        help="of the run's training text, of its own batch size (%(default)s)",
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="N", help="eigenvalues of each block found one by one (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of spectrum.png, .pdf, .csv and .json (the run's own)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    options = parser.parse_args(words)
    from twophase.cli.block_report import Wish, spectrum

    blocks, known_paths = tuple(options.blocks), config_paths()
    wish = Wish(
        options.run, blocks, options.batches, options.top, options.out, options.json, options.quiet, known_paths
    )
    return spectrum(wish)
