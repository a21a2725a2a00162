"""`twophase sweep`: a grid of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twophase.base.config import UsageError
from twophase.cli.commands import command_line, config_options, print_config, report_command, run_parser, train_config

if TYPE_CHECKING:
    from twophase.sweeps.grid import Sweep
    from twophase.sweeps.table import Row


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.base.options import values_given
    from twophase.cli.sweeping import add_options, run
    from twophase.recipes.controls import grid_of
    from twophase.sweeps.grid import Sweep, parse_axes

    parser = run_parser("sweep", on_demand=["run"])
    grid = parser.add_argument_group("the grid")
    grid.add_argument(
        "--axis",
        nargs="+",
        action="append",
        default=[],
        metavar=("PATH VALUE", "VALUE"),
        help="an axis of the grid and its values, such as --axis outer.lr 0.3 0.7 or --axis outer.restart never 3. "
        "A set of words is one value, with commas: --axis sync.restart none a=3,b=loss",
    )
    grid.add_argument(
        "--controls",
        action="store_true",
        help="add controls for restarts: momentum-free runs, plain averaging, and gain-matched runs without restarts",
    )
    config_options(parser)
    add_options(parser)
    options, config = train_config(parser, arguments)
    if options.print_config:
        return print_config(config)
    if not options.axis:
        raise UsageError(
            "no --axis; name at least one, for example --axis outer.lr 0.3 0.7 --axis outer.restart never 3"
        )
    axes = parse_axes(options.axis, config)
    if both := [axis.path for axis in axes if axis.path in values_given(options, config)]:
        raise UsageError(f"--{both[0]} is an axis of the grid, too; leave the option or the axis out")
    cells = grid_of(config, axes, controls=options.controls)
    out = options.out or Path("runs") / "sweep"
    repeat = command_line(["sweep", *arguments])
    return run(Sweep("sweep", config, cells), out, options, repeat=repeat, results=_results)


def _results(rows: list[Row], sweep: Sweep, out: Path) -> str:
    from twophase.figures.overview import describe, draw
    from twophase.rule import FORM_WORDS

    forms = sorted({config.outer.form for config in sweep.runs.values()})
    form = " and ".join(FORM_WORDS[form] for form in forms)
    more = f"what each arm is worth, and against the controls: {report_command(out)}"
    pictures = [f"figure {path}" for path in draw(rows, form, out / "figures") if path.suffix == ".png"]
    return "\n".join([describe(rows), f"table {out / 'cells.csv'}", *pictures, more])
