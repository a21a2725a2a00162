"""The four workloads of the small Llama in `registration.md`, trained by sweeps; the excess is the perplexity.

python experiments/regimes/llama.py --out runs/regimes    an hour and a half of one core; a repeat resumes
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch

from common import DILOCO
from run import Found, Plan, studies  # pyright: ignore[reportAttributeAccessIssue] - the bench has one, too
from small_tasks import Cell, Outcome, Workload
from twophase.api import run_config
from twophase.diloco.group import SingleProcess
from twophase.rule import OuterRule
from twophase.runs.config import RunConfig, options_of
from twophase.sweeps.grid import RUNS, Sweep
from twophase.sweeps.grid import Cell as Run
from twophase.sweeps.runner import run_sweep
from twophase.tasks.registry import LM, task_of
from twophase.training.trainer import Trainer

START = {"sgd": 0.4, "momentum": 0.04, "adamw": 0.008, "muon": 0.016}
"""Inner rate in the middle of the first ladder."""
SGD = {"method": "sgd", "weight_decay": 0.0, "momentum": 0.0}
INNER = {"sgd": SGD, "momentum": SGD | {"momentum": 0.9}, "muon": {"method": "muon", "momentum": 0.95}}
"""The inner optimizers of `small_tasks`; with AdamW or Muon the weight decay is 0.01."""
OUTER = {"filter": {"filter": "orthogonal"}, "rising": {"schedule": "linear:2"}, "auto": {"restart": "auto"}}
NESTEROV = [OuterRule(lr, momentum, nesterov=True) for lr in (0.7, 1.0) for momentum in (0.3, 0.6, 0.9)]
WORK, PLAN = Workload("llama", 16, 480, 8, 2), Plan(seeds=range(2), held_out=range(100, 105), tuned=(0, 3, 7), more=())
PLAN = PLAN._replace(fine=(1 / 4, 1 / 2, 1.0, 2.0, 4.0), factors=(1 / 4, 1 / 2, 1.0))
PLAN = PLAN._replace(groups={"usual": [DILOCO], "nesterov": NESTEROV})


def config_of(work: Workload, cell: Cell, seed: int) -> RunConfig:
    """Return the configuration of a run."""
    inner = {"lr": cell.lr, "weight_decay": 0.01, "warmup": 0.0, "schedule": work.schedule} | INNER.get(cell.inner, {})
    outer = options_of(cell.rule) | {"restart": str(cell.period or "never")} | OUTER.get(cell.kind, {})
    run = {"replicas": work.replicas, "steps": work.steps, "inner_steps": work.inner_steps, "seed": seed}
    return run_config(LM, {"inner": inner, "outer": outer, "data.batch_size": work.batch, **run}).plain()


def train(work: Workload, seeds: Sequence[int], cells: set[Cell], runs: Path) -> Found:
    """Train cells on seeds as a sweep, whose runs lie in a folder with those of all others."""
    pairs = [(cell, seed) for cell in sorted(cells, key=str) for seed in seeds]
    runs.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        (Path(scratch) / RUNS).symlink_to(runs.absolute())
        of_sweep = [Run("", {"inner.lr": cell.lr, "seed": n}, config_of(work, cell, n)) for cell, n in pairs]
        outcome = run_sweep(Sweep(run_config(LM, {}), of_sweep), Path(scratch), workers=1)
        outcome.check(runs)
    found: Found = {cell: {} for cell in cells}
    for (cell, seed), row in zip(pairs, outcome.rows, strict=True):
        found[cell][seed] = Outcome(row.validation_loss or math.inf, row.outcome or math.inf, [])
    return found


def watched(config: RunConfig) -> Outcome:
    """Train a run by itself, and note each pseudo-gradient as `small_tasks.run` does."""
    trainer = Trainer(task_of(config), config, SingleProcess())
    (fragment,), path = trainer.engine.fragments, list[list[float]]()
    before = [torch.zeros_like(fragment.gradient)] * 2

    def look(*_: object) -> None:
        g, replicas = fragment.gradient.clone(), fragment.parameters()
        moved = [(a - x).square().sum() for own in replicas for a, x in zip(fragment.views, own, strict=True)]
        square = g.square().sum()
        agreement = (len(replicas) ** 2 * square / sum(moved) - 1) / (len(replicas) - 1)
        path.append(torch.stack([square, *(g @ old for old in before), agreement]).tolist())
        before[:] = [g, before[0]]

    fragment.outer.register_step_pre_hook(look)
    with TemporaryDirectory() as scratch:
        summary = trainer.run(Path(scratch), None, discard=True)
    return Outcome(summary["validation_loss"], summary["perplexity"], path)


def main(words: Sequence[str] | None = None) -> None:
    """Run the workloads, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of table and runs")
    parser.add_argument("--trial", action="store_true", help="a few steps with AdamW, on other seeds")
    options = parser.parse_args(words)
    works, plan = [(inner, WORK) for inner in START], PLAN
    if options.trial:
        works = [("adamw", WORK._replace(inner_steps=1, steps=9))]
        plan = plan._replace(seeds=[900], held_out=[901, 902], fine=(4.0, 8.0), factors=(0.5, 1.0))
        plan = plan._replace(groups={"usual": [DILOCO]})

    plan = plan._replace(
        train=partial(train, runs=options.out / "llama-runs"),
        watch=lambda work, cell: {seed: watched(config_of(work, cell, seed)) for seed in plan.seeds},
    )
    studies("regimes-llama", works, options.out, START, plan)


if __name__ == "__main__":
    main()
