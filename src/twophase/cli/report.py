"""`twophase report`: the page of a run, of several runs or of a sweep, once or during training, and in words."""

from __future__ import annotations

from pathlib import Path

from twophase.base.options import Parser
from twophase.cli.commands import between, plain_parser
from twophase.number import number
from twophase.runs.folder import COMPARE, REPORT

WATCH_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(arguments)
    from twophase.cli.reporting import write_pages  # what reads and draws is slow to import

    write_pages(options)
    return 0


def _parser() -> Parser:
    parser = plain_parser("report")
    add = parser.add_argument
    text = "folder of the run or sweep, its --out; several runs are laid over each other"
    add("folders", type=Path, metavar="RUN|SWEEP", nargs="+", help=text)
    page = (
        f"the page to write ({REPORT} in the folder, with --where named after it; for several runs {COMPARE} in the "
        "folder that holds all)"
    )
    add("--out", type=Path, metavar="FILE", help=page)
    watch = (
        f"rewrite the page every so many seconds during the run ({WATCH_SECONDS:g}); the page then reloads by "
        "itself, until that is switched off on it"
    )
    add("--watch", type=between(1, 86400, number), nargs="?", const=WATCH_SECONDS, metavar="SECONDS", help=watch)
    add("--runs", action="store_true", help="of a sweep: also write the report of each of its runs")
    within = (
        "of a sweep: distances from the best of all that robustness areas are given for, relative, such as 0.05 "
        "(several from 0.01 to 0.25)"
    )
    add("--within", type=between(0, 1, number), nargs="+", default=None, metavar="X", help=within)
    controls = "of a sweep: further arms that serve as controls, besides linked and momentum-free ones"
    add("--controls", nargs="+", default=(), metavar="ARM", help=controls)
    where = "of a sweep: judge only the cells with these values, such as inner_steps=20"
    add("--where", nargs="+", default=[], metavar="PATH=VALUE", help=where)
    return parser
