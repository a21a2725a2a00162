"""`twophase demo`: a small grid with and without restarts, trained and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twophase.cli.commands import between, command_line, run_parser
from twophase.cli.sweep import list_figures

if TYPE_CHECKING:
    from twophase.sweep.grid import Sweep
    from twophase.sweep.table import Row


def main(words: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.cli.sweeping import add_options, run, take_slurm_options
    from twophase.recipes.demo import demo
    from twophase.tasks.lm.config import check

    parser = run_parser("demo")
    add_options(parser)
    parser.add_argument("--quick", action="store_true", help="a smaller grid of shorter runs, under two minutes")
    parser.add_argument(
        "--seeds",
        type=between(0, 2**63 - 1),
        nargs="+",
        default=[0],
        metavar="SEED",
        help="seeds, 82 runs each, or 60 without controls (0)",
    )
    parser.add_argument("--no-controls", action="store_true", help="leave out the control runs")
    rest, slurm = take_slurm_options(words)
    options = parser.parse_args(rest)
    sweep = demo(quick=options.quick, seeds=options.seeds, controls=not options.no_controls)
    for config in sweep.runs.values():
        check(config)
    out = options.out or Path("runs") / ("demo-quick" if options.quick else "demo")
    return run(sweep, out, options, repeat=command_line(["demo", *words]), results=_demo_results, slurm=slurm)


def _demo_results(rows: list[Row], sweep: Sweep, out: Path) -> str:
    from twophase.studies._demo import draw, verdict

    return f"\n{verdict(rows, sweep)}\n\n{list_figures(draw(rows, sweep, out / 'figures'), out)}"
