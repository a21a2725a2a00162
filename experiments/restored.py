"""A run of any task read back: its configuration, a checkpoint's weights, and Adam's scales for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twophase.config import load_yaml
from twophase.errors import UsageError
from twophase.runs.config import ComputeConfig, RunConfig
from twophase.runs.folder import CHECKPOINTS, CONFIG
from twophase.tasks.registry import config_of, task_of
from twophase.training import checkpoint
from twophase.training.distributed import to_device
from twophase.training.task import Task
from twophase.training.trainer import DIVERGED


@dataclass(frozen=True, eq=False)
class Restored:
    """A run at its newest checkpoint.

    Args:
        config: configuration of the run.
        step: inner steps taken.
        model: model with the anchor's weights, on the CPU, always in float32, in evaluation mode.
        scale: factor of each coordinate, by parameter name, that makes AdamW's steps those of gradient descent. It is
            `D^-1/2` with `D = sqrt(v / (1 - beta_2^t)) + eps`. For several replicas it is the root of the mean of
            `D^-1`, because the anchor takes the mean of their steps. None for SGD, where all are 1.
        replicas: number of replicas behind these second moments.
        task: task of the run.
    """

    config: RunConfig
    step: int
    model: nn.Module
    scale: dict[str, Tensor] | None
    replicas: int
    task: Task

    @property
    def names(self) -> list[str]:
        """The trained parameters."""
        return [name for name, weight in self.model.named_parameters() if weight.requires_grad]

    def batches(self, count: int) -> list[Any]:
        """Return some of the run's training batches, evenly spread over the steps taken and its replicas.

        Args:
            count: number of batches, each of the run's batch size.
        """
        config, batches = self.config, []
        for number in range(count):
            step, replica = number * self.step // count, number % config.replicas
            batches.append(to_device(self.task.batch(config.seed, step, replica), torch.device("cpu")))
        return batches


def restore(run: Path) -> Restored:
    """Read a run's newest checkpoint.

    Args:
        run: the run's folder; the cells of a sweep keep no checkpoints.

    Raises:
        UsageError: no checkpoint, a diverged run, a changed task or text, or an inner optimizer but AdamW and SGD.
    """
    config, saved = config_of(load_yaml(run / CONFIG)), checkpoint.latest(run / CHECKPOINTS)
    if saved is None:
        raise UsageError(f"{run}: must be a run of `twophase train` with a checkpoint")
    weights = saved.anchor()
    diverged = saved.progress["done"]["exit_reason"] == DIVERGED
    if diverged or not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise UsageError(f"{run}: must not have diverged; its weights have no curvature to speak of")
    # Wherever and however the run was trained, it is looked at on the CPU and in float32.
    local = replace(config, device="cpu", compute=ComputeConfig())
    task = task_of(local)
    if task.describe()["fingerprint"] != saved.progress["data"]:
        raise UsageError(f"{run}: its task or its data have changed since it was trained")
    method = "the task's own" if hasattr(task, "inner") else config.inner.method
    if method not in ("adamw", "sgd"):
        raise UsageError(f"{run}: --inner.method must be adamw or sgd, whose modes are known, got {method}")
    names = [name for name in sorted(saved.files) if name.startswith("replica")]
    saved.verify(name.removesuffix(".pt") for name in names)
    parts = (saved.part(name.removesuffix(".pt")) for name in names)
    first = next(parts)
    model = _loaded(task.model(config.seed), first.get("model", {}), weights)
    step = saved.progress["done"]["step"]
    if method == "sgd":
        return Restored(config, step, model, None, 0, task)
    scales = [_inverse_scales(part, model) for part in chain([first], parts)]
    mean = {name: torch.stack([scale[name] for scale in scales]).mean(0).sqrt() for name in scales[0]}
    return Restored(config, step, model, mean, len(scales), task)


def _loaded(model: nn.Module, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a model in evaluation mode with a replica's buffers, if it has any, and the anchor's weights."""
    model.load_state_dict(dict(state), strict=bool(state))
    model.load_state_dict(dict(weights), strict=False)
    return model.eval()


def _inverse_scales(part: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Return D^-1 of a replica by parameter name: 0 for parameters that have had no gradient, which take no step."""
    inner = part["inner"]
    pairs = [(group, index) for group in inner["param_groups"] for index in group["params"]]
    return {
        name: inverse_scale(group, inner["state"][index]) if index in inner["state"] else 0 * weight.detach().double()
        for (name, weight), (group, index) in zip(model.named_parameters(), pairs, strict=True)
    }


def inverse_scale(group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """Return what AdamW multiplies each coordinate's gradient with besides its learning rate: `1 / (sqrt(v) + eps)`.

    Exactly 0 where v = 0: such a coordinate (of a token that the replica has never seen) has had no gradient, and takes
    no step. With 1 / eps it would count as the most mobile of all.

    Args:
        group: a parameter group.
        state: state of a parameter; v is its second moment, corrected for its beginning at 0.
    """
    steps = float(state["step"])
    corrected = state["exp_avg_sq"].double() / -math.expm1(steps * math.log(group["betas"][1]))
    return torch.where(corrected > 0, 1 / (corrected.sqrt() + group["eps"]), 0.0)
