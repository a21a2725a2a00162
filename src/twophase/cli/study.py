"""`twophase study`: check a claim of the theory."""

from __future__ import annotations

import argparse
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twophase.base.config import UsageError, with_values
from twophase.base.options import add_values, values_given
from twophase.cli.commands import option_values, plain_parser

if TYPE_CHECKING:
    from twophase.recipes.paper import Scale
    from twophase.training.config import RunConfig


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.cli.sweeping import add_workers, watched, workers_of
    from twophase.studies.study import load, question, questions, redraw, run
    from twophase.tasks.named import LM, TASK, config_class, task_label

    task = [LM, *option_values("--task", arguments)][-1]
    default = None if task == LM else config_class(task)()
    parts = [name for name, part in vars(default).items() if is_dataclass(part) and name != TASK] if default else []
    parser = plain_parser("study", epilog="--list shows the names", on_demand=parts)
    parser.add_argument("name", metavar="NAME", nargs="?", help="of the study")
    parser.add_argument("--list", action="store_true", help="list the studies and their questions, and stop")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("runs") / "studies" / (task_label(task) if default else ""),
        help="folder of NAME.png, .pdf, .csv and .json (%(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="coarser and faster")
    parser.add_argument(
        "--scale", metavar="NAME", help="of a study that trains: laptop (default), or paper, the paper's own, for GPUs"
    )
    parser.add_argument(
        "--task",
        metavar="NAME",
        help="task of some studies in place of the built-in model (digits, hf:MODEL, FILE.py:CLASS). Options of its "
        "configuration go with it: --task.width, --inner.lr, --steps and --inner-steps, the short communication "
        "period",
    )
    parser.add_argument(
        "--redraw", action="store_true", help="draw the figures again from NAME.csv and NAME.json in --out, and stop"
    )
    add_workers(parser)
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    if default:
        add_values(parser, default, "run")
    options = parser.parse_args(arguments)
    if options.list:
        questions_by_name = questions()
        width = max(map(len, questions_by_name))
        print("\n".join(f"{name:{width}}  {question}" for name, question in questions_by_name.items()))
        return 0
    if options.name is None:
        raise UsageError(f"name a study: {', '.join(questions())}")
    print(question(load(options.name), task), flush=True)
    if options.redraw:
        print("\n".join(map(str, redraw(options.name, options.out))))
        return 0
    scale = _scale_at(default, options) if default else options.scale
    with watched(options.name, quiet=options.quiet) as progress:
        outcome = run(
            options.name,
            options.out,
            options.quick,
            scale=scale,
            workers=workers_of(options.workers),
            progress=progress,
        )
    print("\n".join(["", outcome.answer, "", *map(str, outcome.paths)]))
    return 0


def _scale_at(default: RunConfig, options: argparse.Namespace) -> Scale:
    """Return the scale that is asked for, with a task at its default configuration and the values that are given."""
    from twophase.studies.study import scale_named
    from twophase.tasks.named import check

    scale, values = scale_named(options.scale, quick=options.quick), values_given(options, default)
    if varied := [path for path in values if path.startswith(("outer.", "seed", "sync.restart", "sync.wire"))]:
        raise UsageError(f"--{varied[0].replace('_', '-')}: the study sets it; leave it out")
    return scale.at(check(with_values(default, {"steps": scale.base.steps, "inner_steps": scale.short, **values})))
