"""Curvature of a trained run by block, what a round removes of it, and the restart periods that follow.

    python experiments/blockwise/spectrum.py RUN --blocks 'ends=embedding|head' rest=.

RUN is a folder of `twophase train` with a checkpoint, of a task with `logits(model, batch)`, with AdamW or SGD inside.
Its blocks are its named fragments, else the parts of the Llama; a parameter is in the first block whose pattern its
name contains. The matrix is the Gauss-Newton matrix G of the loss.

An inner optimizer that divides the gradient by D (AdamW: `D = sqrt(v) + eps`) takes steps of `-lr D^-1 gradient`. In
the coordinates `y = D^1/2 x` that is gradient descent on the matrix `D^-1/2 G D^-1/2`, whose modes shrink
independently. The displacement is unknown, so that each direction counts alike, and a mode weighs its eigenvalue's
share of the trace.

Assumptions, seldom true of a trained model: blocks do not interact, curvature and second moments are constant, replicas
see the same data, AdamW's first moment is the present gradient, nothing is clipped.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from curvature import Floats, density, gauss_newton
from twophase.config import load_yaml
from twophase.diloco.fragment import partition
from twophase.errors import UsageError
from twophase.rule import OuterRule
from twophase.runs.config import ComputeConfig, RunConfig, inner_lr, named_values
from twophase.runs.folder import CHECKPOINTS, CONFIG
from twophase.tasks.registry import config_of, task_of
from twophase.theory import best_period, log_final_loss, rounded_period, scheduled_progress
from twophase.training import checkpoint
from twophase.training.distributed import to_device

LLAMA = {
    "embedding": "^embedding$",
    "attention": "query_key_value|output|attention_norm",
    "mlp": "gate_up|down|mlp_norm",
    "head": ".",
}
"""Blocks of the small Llama; the last norm goes with the head."""


class Restored(NamedTuple):
    """A run at its newest checkpoint, on the CPU and in float32.

    Args:
        step: inner steps taken.
        model: with the anchor's weights, in evaluation mode.
        scale: `D^-1/2` by parameter name; of several replicas the root of the mean of `D^-1`, because the anchor
            takes the mean of their steps. Ones for SGD.
    """

    config: RunConfig
    task: Any
    step: int
    model: nn.Module
    scale: Mapping[str, Tensor]


def restore(run: Path) -> Restored:
    """Read a run's newest checkpoint.

    Raises:
        UsageError: no checkpoint (the cells of a sweep keep none), a task without logits, or an inner optimizer whose
            modes are not known.
    """
    config, saved = config_of(load_yaml(run / CONFIG)), checkpoint.latest(run / CHECKPOINTS)
    if saved is None:
        raise UsageError(f"{run}: must be a run of `twophase train` with a checkpoint")
    task = task_of(replace(config, device="cpu", compute=ComputeConfig()))
    if not hasattr(task, "logits") or hasattr(task, "inner") or config.inner.method not in ("adamw", "sgd"):
        raise UsageError(f"{run}: must be of a task with logits, and with adamw or sgd inside, whose modes are known")
    parts = [saved.part(name.removesuffix(".pt")) for name in sorted(saved.files) if name.startswith("replica")]
    model = task.model(config.seed)
    model.load_state_dict(parts[0].get("model", {}), strict=False)
    model.load_state_dict(saved.anchor(), strict=False)
    scale = {name: torch.ones_like(weight) for name, weight in model.named_parameters()}
    if config.inner.method == "adamw":
        every = [_inverse(part["inner"], model) for part in parts]
        scale = {name: torch.stack([each[name] for each in every]).mean(0).sqrt() for name in every[0]}
    return Restored(config, task, saved.progress["done"]["step"], model.eval(), scale)


def _inverse(inner: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Return AdamW's `1 / (sqrt(v / (1 - beta_2^t)) + eps)` by parameter name, in float64.

    Exactly 0 where v = 0: such a coordinate (of a token that the replica has never seen) takes no step. With 1 / eps it
    would count as the most mobile of all.
    """
    pairs = [(group, inner["state"].get(index)) for group in inner["param_groups"] for index in group["params"]]
    scales = {name: torch.zeros_like(weight).double() for name, weight in model.named_parameters()}
    for name, (group, state) in zip(scales, pairs, strict=True):
        if state is not None:
            v = state["exp_avg_sq"].double() / -math.expm1(float(state["step"]) * math.log(group["betas"][1]))
            scales[name] = torch.where(v > 0, 1 / (v.sqrt() + group["eps"]), 0.0)
    return scales


@dataclass(frozen=True, eq=False)
class Block:
    """A block's modes and what a round in the middle of the run does to them.

    Args:
        eigenvalue, weight: modes of the preconditioned matrix, ascending, and the share of each in the trace.
        sigma: effective progress of a round of each.
        unstable: share of the trace in modes with a step beyond 2, where the linear model has no answer.
        trace: of the preconditioned matrix.
    """

    name: str
    parameters: int
    eigenvalue: Floats
    weight: Floats
    sigma: Floats
    unstable: float
    trace: float

    @property
    def mean(self) -> float:
        """Mean progress, by loss."""
        return float(self.weight @ self.sigma)

    def period(self, rule: OuterRule, rounds: int) -> int:
        """Return the period of the least loss after `rounds`, by all modes together; `rounds` where none helps."""
        if not np.any(self.weight * self.sigma > 0):
            return rounds
        return int(best_period(rule, self.sigma, weights=self.weight, max_period=rounds, rounds=rounds))

    def period_at_mean(self, rule: OuterRule, rounds: int) -> int:
        """Return the first cancellation of one mode at the mean progress, the paper's closed form; likewise."""
        period = int(rounded_period(rule, min(self.mean, 1.0)))
        return period if 1 <= period < rounds else rounds

    def log_loss(self, rule: OuterRule, rounds: int, period: int) -> float:
        """Return the logarithm of the loss after `rounds` over that at the start."""
        return float(log_final_loss(rule, self.sigma, rounds, period, self.weight) - math.log(0.5))


def restart_of(period: int, rounds: int) -> str:
    """Return the restart policy of a period, as text."""
    return "never" if period >= rounds else str(period)


def measure(restored: Restored, patterns: Mapping[str, str], batches: int = 4) -> list[Block]:
    """Return the blocks of a run, by its curvature on some training batches and its learning rates in mid-run.

    The batches are evenly spread over its steps and replicas.
    """
    config, task, count, model, scales = restored
    middle = config.rounds // 2 * config.inner_steps
    steps = range(middle, min(middle + config.inner_steps, config.steps))
    damping = 1 - config.inner.momentum if config.inner.method == "sgd" else 1
    lrs = np.array([inner_lr(config, step) / damping for step in steps])
    sizes = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
    made = [task.batch(config.seed, number * count // batches, number % config.replicas) for number in range(batches)]
    made, blocks = [to_device(batch, torch.device("cpu")) for batch in made], []
    for name, names in partition(sizes, patterns).items():
        scale = torch.cat([scales[weight].reshape(-1) for weight in names]).float()
        product = gauss_newton(model, made, names, task.logits, scale)
        size = sum(sizes[weight] for weight in names)
        eigenvalue, share = density(product, size)
        eigenvalue = np.maximum(eigenvalue, 0)
        weight = eigenvalue * share
        trace = float(weight.sum())
        weight = weight / trace if trace > 0 else weight
        removed = scheduled_progress(eigenvalue, lrs, weight_decay=config.inner.weight_decay, clip=True)
        sigma = np.where(eigenvalue > 0, removed, 0.0)  # decay alone makes no progress
        unstable = float(weight[lrs.max() * (eigenvalue + config.inner.weight_decay) > 2].sum())
        blocks.append(Block(name, size, eigenvalue, weight, sigma, unstable, trace * size))
    return blocks


def main() -> None:
    """Measure the blocks of a run, print the table, and write spectrum.csv into its folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--blocks", nargs="+", default=(), metavar="NAME=PATTERN", help="cut the model in this way")
    parser.add_argument("--batches", type=int, default=4, help="batches of the run's training data (%(default)s)")
    options = parser.parse_args()
    restored = restore(options.run)
    fragments = restored.config.sync.parts
    patterns = named_values("blocks", options.blocks) or (fragments if isinstance(fragments, dict) else LLAMA)
    rule, rounds = restored.config.outer.rule(), restored.config.rounds
    rows = []
    for block in measure(restored, patterns, options.batches):
        low, high = np.quantile(block.sigma, [0.05, 0.95], weights=block.weight, method="inverted_cdf")
        periods = [block.period(rule, rounds), block.period_at_mean(rule, rounds)] if rule else [rounds, rounds]
        whole, mean = (restart_of(period, rounds) for period in periods)
        row = {"block": block.name, "parameters": block.parameters, "largest": block.eigenvalue[-1]}
        row |= {"sigma": block.mean, "from": low, "to": high, "unstable": block.unstable}
        rows.append(row | {"K": whole, "K at mean": mean})
    table = pd.DataFrame(rows)
    print(table.to_string(index=False, float_format="{:.3g}".format))
    table.to_csv(options.run / "spectrum.csv", index=False, float_format="%.3g")
    print(options.run / "spectrum.csv")


if __name__ == "__main__":
    main()
