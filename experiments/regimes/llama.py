"""The four workloads of the small Llama in `registration.md`, trained by sweeps; the excess is the perplexity.

python experiments/regimes/llama.py --out runs/regimes    an hour and a half of one core; a repeat resumes
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch

from common import DILOCO
from run import NESTEROV, Found, Plan, main  # pyright: ignore[reportAttributeAccessIssue] - the bench has one, too
from small_tasks import Cell, Outcome, Workload
from twophase.api import run_config
from twophase.diloco.group import SingleProcess
from twophase.runs.config import RunConfig, options_of
from twophase.sweeps.grid import RUNS, Sweep
from twophase.sweeps.grid import Cell as Run
from twophase.sweeps.runner import run_sweep
from twophase.tasks.registry import LM, task_of
from twophase.training.trainer import Trainer

SGD = {"method": "sgd", "weight_decay": 0.0, "momentum": 0.0}
INNER = {"sgd": SGD, "momentum": SGD | {"momentum": 0.9}, "muon": {"method": "muon", "momentum": 0.95}}
"""The inner optimizers of `small_tasks`; with AdamW or Muon the weight decay is 0.01."""
OUTER = {"filter": {"filter": "orthogonal"}, "rising": {"schedule": "linear:2"}, "auto": {"restart": "auto"}}
WORK, START = Workload("llama", 16, 480, 8, 2), {"sgd": 0.4, "momentum": 0.04, "adamw": 0.008, "muon": 0.016}
PLAN = Plan(seeds=range(2), held_out=range(100, 105), start=START, fine=(1 / 4, 1 / 2, 1.0, 2.0, 4.0))
PLAN = PLAN._replace(factors=(1 / 4, 1 / 2, 1.0), tuned=(0, 3, 7), more=())
PLAN = PLAN._replace(groups={"usual": [DILOCO], "nesterov": [rule for rule in NESTEROV if rule.lr > 0.5]})


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


def plan_in(out: Path, *_: object) -> Plan:
    """Return the plan whose runs lie in a folder below that of the table."""
    return PLAN._replace(
        train=partial(train, runs=out / "llama-runs"),
        watch=lambda work, seeds, cell: {seed: watched(config_of(work, cell, seed)) for seed in seeds},
    )


if __name__ == "__main__":
    main(__doc__, {"llama": [(inner, WORK) for inner in PLAN.start]}, plan_in)  # pyright: ignore[reportCallIssue] - not the bench's
