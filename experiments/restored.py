"""A run of any task read back: its configuration, a checkpoint's weights, and Adam's scales for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twophase.base.config import UsageError
from twophase.runs.folder import CHECKPOINTS
from twophase.runs.record import run_config
from twophase.tasks.build import task_of
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.named import check, config_of, takes_repeat
from twophase.training import checkpoint
from twophase.training.config import ComputeConfig, RunConfig
from twophase.training.device import moved
from twophase.training.preflight import preflight
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
            batches.append(moved(self.task.batch(config.seed, step, replica), torch.device("cpu")))
        return batches


def restore(run: Path) -> Restored:
    """Read a run's newest checkpoint.

    Args:
        run: the run's folder.

    Raises:
        UsageError: no run, no checkpoint, or a damaged one. Also an unknown inner optimizer or one without its moments,
            weights that are not finite, a diverged run, or a changed task or text.
    """
    config, identity = run_config(run, config_of)
    restored = checkpoint.read_latest(run / CHECKPOINTS, partial(_restored, run, config, identity))
    if restored is None:
        raise UsageError(
            f"{run}: has no checkpoint, which holds the weights and the inner optimizer's moments; train it with "
            "`twophase train` (the cells of a sweep keep none)"
        )
    return restored


def _restored(run: Path, config: RunConfig, identity: str, newest: Path) -> Restored:
    """Read a run at a checkpoint."""
    saved = checkpoint.Checkpoint(newest, identity)
    progress, weights = saved.progress(), saved.anchor()
    if progress.get("exit_reason") == DIVERGED or not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise UsageError(
            f"{run}: the run has diverged, and its weights have no curvature to speak of; give another run"
        )
    # Wherever and however the run was trained, it is looked at on the CPU and in float32.
    local = replace(config, device="cpu", compute=ComputeConfig())
    local = check(local if takes_repeat(local) else replace(local, repeat=False))  # older runs could set it
    task = task_of(local)
    preflight(local, task)
    if task.describe()["fingerprint"] != progress["text"]:
        option, kind = f"--task {getattr(task, 'name', '')}", "the task, its file or data,"
        if isinstance(local, TrainConfig):
            option, kind = f"--data.corpus {local.data.corpus}", "the text"
        raise UsageError(
            f"{option} of {run}: {kind} is not the one that the run was trained on. Put the old one back (the text "
            "`python` is that of the Python that trained it)"
        )
    method = "the task's own" if hasattr(task, "inner") else config.inner.method
    if method not in ("adamw", "sgd"):
        raise UsageError(
            f"{run}: the inner optimizer is {method}, and no curvature is known whose modes its steps shrink; give a "
            "run with --inner.method adamw or sgd"
        )
    files = filter(saved.holds, map(checkpoint.replica_file, range(config.replicas)))
    first = saved.part(next(files, checkpoint.replica_file(0)))
    model = _loaded(task.model(config.seed), first.get("model", {}), weights, run)
    if method == "sgd":
        return Restored(config, saved.step, model, None, 0, task)
    scales = [_inverse_scales(part, model, saved) for part in chain([first], map(saved.part, files))]
    mean = {name: torch.stack([scale[name] for scale in scales]).mean(0).sqrt() for name in scales[0]}
    return Restored(config, saved.step, model, mean, len(scales), task)


def _loaded(model: nn.Module, state: Mapping[str, Any], weights: Mapping[str, Tensor], run: Path) -> nn.Module:
    """Return a model in evaluation mode with a replica's buffers, if it has any, and the anchor's weights."""
    try:
        model.load_state_dict(dict(state), strict=bool(state))
        model.load_state_dict(dict(weights), strict=False)
        if {name for name, weight in model.named_parameters() if weight.requires_grad} != weights.keys():
            raise RuntimeError(f"the weights are {', '.join(weights)}")
    except RuntimeError as error:
        fault = " ".join(str(error).split())
        raise UsageError(
            f"{run}: the weights do not fit the run's model ({fault}); put the run's own files back"
        ) from None
    return model.eval()


def _inverse_scales(part: Mapping[str, Any], model: nn.Module, saved: checkpoint.Checkpoint) -> dict[str, Tensor]:
    """Return D^-1 of a replica by parameter name: 0 for parameters that have had no gradient, which take no step."""
    try:
        inner = part["inner"]
        pairs = [(group, index) for group in inner["param_groups"] for index in group["params"]]
        if not inner["state"]:
            raise KeyError("state")
        return {
            name: inverse_scale(group, inner["state"][index])
            if index in inner["state"]
            else 0 * weight.detach().double()
            for (name, weight), (group, index) in zip(model.named_parameters(), pairs, strict=True)
        }
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"checkpoint {saved.path} lacks the second moments of an inner AdamW, so the steps of the inner phase "
            "are unknown. Give a run of `twophase train` of this version, with --inner.method adamw"
        ) from None


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
