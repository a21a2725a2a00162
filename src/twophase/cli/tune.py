"""`twophase tune`: which outer optimizer a task should use, each arm tuned with the same budget."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from twophase.cli.commands import between, config_options, print_config, run_parser, train_config

ARMS = ("memoryless", "nesterov", "nesterov@3", "auto", "adamw")
"""What is compared where nothing is asked for."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def main(words: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.cli.sweeping import add_workers
    from twophase.cli.tuning import Tuning, describe, tune
    from twophase.recipes.arms import CONTROL, Arm
    from twophase.sweeps.run import TABLE
    from twophase.sweeps.table import measure_of, read_rows, with_unit

    if words and not words[0].startswith("-"):
        words = ["--task", *words]
    parser = run_parser("tune", on_demand=["run"], usage="twophase tune [TASK] [options]")
    group = parser.add_argument_group("the comparison")
    group.add_argument(
        "--arms",
        nargs="+",
        default=list(ARMS),
        metavar="ARM",
        help="METHOD[@RESTART][+SLOT=TEXT], such as nesterov@3, adamw@K (a tuned period), auto, or "
        f"nesterov+readout=tail; {CONTROL} is always there (default: {' '.join(ARMS)})",
    )
    group.add_argument("--budget", type=_seconds, metavar="TIME", help="for all of it, such as 30m or 2h (default: 2h)")
    group.add_argument(
        "--points", type=between(1, 10_000), default=0, metavar="N", help="settings an arm, in the place of a budget"
    )
    group.add_argument(
        "--seeds", nargs="+", type=between(0, 2**62), default=[0, 1], metavar="SEED", help="tuning seeds (0 1)"
    )
    group.add_argument(
        "--fresh",
        nargs="+",
        type=between(0, 2**62),
        default=[100, 101, 102, 103, 104],
        metavar="SEED",
        help="seeds of the final comparison (100 to 104)",
    )
    config_options(parser)
    add_workers(parser)
    options, base = train_config(parser, words)
    if options.print_config:
        return print_config(base)
    texts = [CONTROL, *(arm for arm in options.arms if arm != CONTROL)]
    arms = tuple(Arm(text, base.inner.lr) for text in texts)
    tuning = Tuning(base, arms, options.points, tuple(options.seeds), tuple(options.fresh))
    out = options.out or Path("runs") / "tune"
    budget = options.budget or _seconds("2h")
    outcome = tune(tuning, out, budget=budget, workers=options.workers, quiet=options.quiet)
    measure = with_unit(measure_of(read_rows(out / "fresh" / TABLE)))
    print(f"{describe(outcome, tuning, measure)}\n\nsweeps of all stages {out}, verdict {out / 'verdict.json'}")
    return 0


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write a number and s, m, h or d, such as 30m or 2h")
    return float(match[1]) * _UNITS[match[2]]
