"""`twophase demo`: a small grid with and without restarts, trained, drawn, and told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from twophase.cli.commands import PROGRAM, between, command_line, run_parser

if TYPE_CHECKING:
    from rich.text import Text

    from twophase.sweep.grid import Sweep
    from twophase.sweep.table import Row


def main(words: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.cli.sweeping import run, take_slurm_options
    from twophase.recipes.demo import demo
    from twophase.studies._demo import draw, terminal_maps, verdict
    from twophase.sweep.run import TABLE
    from twophase.sweep.table import read_rows
    from twophase.tasks.lm.config import check

    rest, slurm = take_slurm_options(words)
    options = _parser().parse_args(rest)
    sweep = demo(quick=options.quick, seeds=options.seeds, controls=not options.no_controls)
    for config in sweep.runs.values():
        check(config)
    out = options.out or Path("runs") / ("demo-quick" if options.quick else "demo")

    def picture(rows: list[Row]) -> Text:
        return terminal_maps(rows)

    def results(rows: list[Row], sweep: Sweep, out: Path) -> str:
        draw(rows, sweep, out / "figures")
        return f"\n{verdict(rows, sweep)}" if options.verbose else ""

    repeat = command_line(["demo", *words])
    status = run(sweep, out, options, repeat=repeat, results=results, slurm=slurm, picture=picture)
    if not options.dry_run:
        print(_ending(read_rows(out / TABLE), sweep, out))
    return status


def _parser() -> argparse.ArgumentParser:
    from twophase.cli.sweeping import add_options

    parser = run_parser("demo")
    add_options(parser)
    parser.add_argument("--quick", action="store_true", help="a smaller grid of shorter runs, under two minutes")
    parser.add_argument(
        "--seeds",
        type=between(0, 2**63 - 1),
        nargs="+",
        default=[0],
        metavar="SEED",
        help="seeds, 83 runs each, or 60 without controls (0)",
    )
    parser.add_argument("--no-controls", action="store_true", help="leave out the control runs")
    parser.add_argument("--verbose", action="store_true", help="print the table of all arms and controls, too")
    return parser


def _ending(rows: list[Row], sweep: Sweep, out: Path) -> str:
    """Tell what the demo showed, and where to look further."""
    import shutil
    import textwrap

    from twophase.studies._demo import findings

    width = min(100, shutil.get_terminal_size().columns)
    paragraphs = [textwrap.fill(text, width) for text in findings(rows, sweep)]
    return "\n\n".join(
        [
            "",
            *paragraphs,
            f"table     {out / 'cells.csv'}\nfigures   {out / 'figures'}\n"
            f"next      {PROGRAM} report {out}   (every comparison, with intervals)",
        ]
    )
