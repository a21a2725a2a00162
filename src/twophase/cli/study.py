"""`twophase study`: check a claim of the theory."""

from __future__ import annotations

from pathlib import Path

from twophase.base.config import UsageError
from twophase.cli.commands import between, plain_parser


def main(words: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.cli.sweeping import add_workers, watched, workers_of
    from twophase.studies.study import load, questions, redraw, run, so_far

    parser = plain_parser("study", epilog="--list shows the names")
    parser.add_argument("name", metavar="NAME", nargs="?", help="of the study")
    parser.add_argument("--list", action="store_true", help="list the studies and their questions, and stop")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("runs") / "studies",
        help="folder of NAME.png, .pdf, .csv and .json (%(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="coarser and faster")
    parser.add_argument(
        "--scale", metavar="NAME", help="of a study that trains: laptop (default), or paper, the paper's own, for GPUs"
    )
    parser.add_argument(
        "--so-far",
        type=between(0, 2**63 - 1),
        nargs="*",
        metavar="SEED",
        help="of a study that trains: what it says of the runs that have ended by now, of these seeds or those with the"
        " most whole arms; trains and writes nothing",
    )
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="tables (cells.csv) of runs of this study that were trained elsewhere; then nothing is trained here, and"
        " without --so-far every run must have ended",
    )
    parser.add_argument(
        "--redraw", action="store_true", help="draw the figures again from NAME.csv and NAME.json in --out, and stop"
    )
    add_workers(parser)
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    options = parser.parse_args(words)
    if options.list:
        questions_by_name = questions()
        width = max(map(len, questions_by_name))
        print("\n".join(f"{name:{width}}  {question}" for name, question in questions_by_name.items()))
        return 0
    if options.name is None:
        raise UsageError(f"name a study: {', '.join(questions())}")
    print(load(options.name).QUESTION, flush=True)
    if options.redraw:
        print("\n".join(map(str, redraw(options.name, options.out))))
        return 0
    if options.so_far is not None:
        where = {"scale": options.scale, "seeds": options.so_far, "tables": options.table}
        print(f"\n{so_far(options.name, options.out, options.quick, **where)}")
        return 0
    with watched(options.name, quiet=options.quiet) as progress:
        outcome = run(
            options.name,
            options.out,
            options.quick,
            scale=options.scale,
            workers=workers_of(options.workers),
            progress=progress,
            tables=options.table,
        )
    print("\n".join(["", outcome.answer, "", *map(str, outcome.paths)]))
    return 0
