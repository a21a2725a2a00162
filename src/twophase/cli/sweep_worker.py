"""`twophase sweep-worker`: one more worker for a sweep."""

from __future__ import annotations

from pathlib import Path

from twophase.cli.commands import between, plain_parser


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = plain_parser("sweep-worker")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the sweep's folder")
    parser.add_argument(
        "--in-memory",
        type=between(0, 10**6),
        default=8,
        metavar="N",
        help="states at branches held in memory at most, each about the size of a checkpoint; others are read back "
        "from disk (%(default)s)",
    )
    parser.add_argument("--leash", action="store_true", help="end when stdin does")
    options = parser.parse_args(arguments)
    from twophase.sweeps.worker import serve

    return serve(options.out, in_memory=options.in_memory, leash=options.leash)
