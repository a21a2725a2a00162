"""`twophase tune`: which outer optimizer a task should use, every method tuned with the same budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twophase.cli.train import RunOptions, parse_run, report_command
from twophase.config import require
from twophase.errors import RunError
from twophase.tuning.methods import METHODS, check_paths

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Options(RunOptions):
    """Compare outer optimizers, each tuned with the same number of settings; repeat the command to resume it."""

    methods: tuple[str, ...] = METHODS
    """A quoted word each: the outer method and any values, such as "nesterov outer.restart=3". Inner and outer learning
    rate and momentum are tuned where no value fixes them; outer.momentum=~0.6 is tuned from there, and so is the period
    of outer.restart=K. averaging is always there."""
    budget: str | None = None
    """Time for all of it, about, such as 30m or 2h (default: 2h)."""
    points: int | None = None
    """Settings that each method tries, in the place of a budget."""
    seeds: tuple[int, ...] = (0, 1)
    """Tuning seeds."""
    fresh: tuple[int, ...] = (100, 101, 102, 103, 104)
    """Held-out seeds of the final comparison."""
    workers: int | None = None
    """Processes that train (default: one a GPU, or one for each --threads cores)."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    words = ["--task", *argv] if argv and not argv[0].startswith("-") else [*argv]
    options, config, _ = parse_run(Options, words, "tune")
    check_paths(word.split("=")[0].removeprefix("--").replace("-", "_") for word in words)
    from twophase.training.distributed import stop_on_signal
    from twophase.tuning.tune import RESULT, Tuning, run_tuning

    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", options.budget or "2h")
    require(match is not None, "budget", options.budget, "a number and s, m, h or d, such as 30m")
    budget = float(match[1]) * _UNITS[match[2]] if match and options.budget else None
    tuning = Tuning(config, options.methods, options.points, budget, options.seeds, options.fresh)
    out = options.out or Path("runs/tune")
    with stop_on_signal() as stop:
        try:
            outcome = run_tuning(tuning, out, workers=options.workers, quiet=options.quiet, should_stop=stop.is_set)
        except RunError:
            if stop.number:
                return 128 + stop.number
            raise
    print(f"{outcome}\n\nresults {out / RESULT}\nevery fresh run: {report_command(outcome.path)}")
    return 0
