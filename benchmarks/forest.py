"""What a forest of runs saves, and what walking it costs.

First the exact counts on the paper's grid (6 learning rates x 5 momenta x 7 restart periods x 2 rules = 420 runs of
12,500 inner steps, T full rounds and a shorter one): inner steps asked, and executed by the tree. Then a small forest
of the demo's model is walked in this process, and its wall time compared with the inner steps that it executed times
their median duration, so that everything else (outer steps, copies at branches, states on disk, logs, validation,
weights) is the excess over 1.

Last line: one JSON object. `wall_ratio` is that wall time over executed steps x median step; `executed_ratio` is
executed / asked inner steps, counted while walking; `exact_ratio` is the same from the plan alone, and `repeated_ratio`
the first over the second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from bounds import finish
from twophase.base.config import with_values
from twophase.diloco.communicator import SingleProcess
from twophase.sweeps.forest import Grower
from twophase.sweeps.grid import Axis, Sweep, product
from twophase.sweeps.plan import Plan, plan
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training.trainer import Trainer

LRS, MOMENTA = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1), (0.1, 0.3, 0.5, 0.7, 0.9)
PERIODS = ("2", "3", "5", "7", "9", "11", "never")
STEPS = 12500


def paper_plan(form: str, inner_steps: int) -> Plan:
    base = with_values(TrainConfig(), {"outer.form": form, "steps": STEPS, "inner_steps": inner_steps})
    axes = [
        Axis("outer.nesterov", (False, True)),
        Axis("outer.lr", LRS),
        Axis("outer.momentum", MOMENTA),
        Axis("outer.restart", PERIODS),
    ]
    return plan(Sweep("paper", base, product(base, axes)))


def count(sizes: tuple[int, ...] = (64, 128, 512, 1024, 2048)) -> None:
    print(f"{'form':>5}{'S':>6}{'T':>8}{'runs':>6}{'asked':>10}{'executed':>10}{'saving':>8}")
    for form in ("sum", "ema"):
        for inner_steps in sizes:
            made = paper_plan(form, inner_steps)
            print(
                f"{form:>5}{inner_steps:6}{STEPS // inner_steps:8}{len(made.runs):6}{made.steps_asked:10}"
                f"{made.steps:10}{made.steps_asked / made.steps:8.3f}"
            )


def walk(made: Plan) -> tuple[Grower, float]:
    """Walk a forest; returns what walked it, and the wall time in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        grower = Grower(made.forest, made.runs, Path(folder) / "runs", Path(folder) / "states")
        began = time.perf_counter()
        for root in made.forest.roots:
            grower.grow(root.id)
        return grower, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=480, help="inner steps of a run (default 480)")
    parser.add_argument("--inner-steps", type=int, default=20, help="inner steps a round (default 20)")
    parser.add_argument("--form", choices=("sum", "ema"), default="sum")
    parser.add_argument("--count", action="store_true", help="count only, and walk nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count()
    if options.count:
        return 0
    changed = {"steps": options.steps, "inner_steps": options.inner_steps, "outer.form": options.form}
    base = with_values(TrainConfig(), changed)
    axes = [
        Axis("outer.nesterov", (False, True)),
        Axis("outer.momentum", (0.5, 0.9)),
        Axis("outer.restart", ("3", "7", "never")),
    ]
    made = plan(Sweep("small", base, product(base, axes)))
    # What happens once a process: reading the text, loading libraries.
    Trainer(LanguageTask(base), base, SingleProcess()).inner_step()
    grower, seconds = walk(made)
    tally = grower.tally
    middle = statistics.median(tally.step_seconds)
    rounds = options.steps // options.inner_steps
    mean = statistics.mean(tally.step_seconds)
    print(
        f"\n{len(made.runs)} runs of the demo's model, {options.form} form, {rounds} rounds: {tally.steps} inner steps "
        f"in {seconds:.1f} s, {1e3 * middle:.2f} ms each (median; mean {1e3 * mean:.2f}); at most {tally.most_held} "
        f"states held, {tally.restored} taken up again"
    )
    figures = {
        "wall_ratio": round(seconds / (tally.steps * middle), 4),
        "wall_ratio_to_mean_step": round(seconds / sum(tally.step_seconds), 4),
        "repeated_ratio": tally.steps / made.steps,
        "executed_ratio": round(tally.steps / made.steps_asked, 6),
        "exact_ratio": round(made.steps / made.steps_asked, 6),
    }
    return finish("forest", figures)


if __name__ == "__main__":
    sys.exit(main())
