"""`twophase tune`: which outer optimizer a task should use, each arm tuned with the same budget."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from twophase.base.options import values_given
from twophase.cli.commands import (
    PROGRAM,
    between,
    config_options,
    print_config,
    report_command,
    run_parser,
    train_config,
)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST = 1e9


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.cli.sweeping import add_workers
    from twophase.recipes.arms import ARMS, CONTROL, check_arm_options

    if arguments and not arguments[0].startswith("-"):
        arguments = ["--task", *arguments]
    parser = run_parser("tune", on_demand=["run"], usage=f"{PROGRAM} tune [TASK] [OPTIONS]")
    group = parser.add_argument_group("the comparison")
    group.add_argument(
        "--arms",
        nargs="+",
        default=ARMS,
        metavar="ARM",
        help="METHOD[:lr=X][@RESTART][+filter=TEXT], such as nesterov@3, adamw@K (a tuned period), auto, or "
        f"nesterov+filter=orthogonal; {CONTROL} is always there (default: {' '.join(ARMS)})",
    )
    group.add_argument(
        "--budget", type=_seconds, metavar="TIME", help="for all of it, about, such as 30m or 2h (default: 2h)"
    )
    group.add_argument(
        "--points", type=between(1, 10_000), metavar="N", help="settings an arm, in the place of a budget"
    )
    seed = between(0, 2**62)
    group.add_argument(
        "--seeds", nargs="+", type=seed, default=[0, 1], metavar="SEED", help="tuning seeds (default: 0 1)"
    )
    group.add_argument(
        "--fresh",
        nargs="+",
        type=seed,
        default=list(range(100, 105)),
        metavar="SEED",
        help="seeds of the final comparison (default: 100 to 104)",
    )
    config_options(parser)
    add_workers(parser)
    options, base = train_config(parser, arguments)
    if options.print_config:
        return print_config(base)
    check_arm_options(values_given(options, base))

    from twophase.cli.tuning import FRESH, RESULT, Tuning, run_tuning

    tuning = Tuning(base, options.arms, options.points, options.budget, options.seeds, options.fresh)
    out = options.out or Path("runs") / "tune"
    outcome = run_tuning(tuning, out, workers=options.workers, quiet=options.quiet)
    print(f"{outcome}\n\nverdict {out / RESULT}\nevery fresh run: {report_command(out / FRESH)}")
    return 0


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write a number and s, m, h or d, such as 30m or 2h")
    return seconds
