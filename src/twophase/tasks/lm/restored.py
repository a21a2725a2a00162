"""A run read back: its configuration, the weights of a checkpoint, and what is looked at in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twophase.base.config import UsageError, fingerprint, from_tree, load_yaml, with_values
from twophase.diloco.flat import plan
from twophase.runs.folder import CONFIG
from twophase.tasks.lm.config import TrainConfig, check
from twophase.tasks.lm.corpus import Corpus
from twophase.tasks.lm.model import Llama
from twophase.tasks.lm.task import LanguageTask
from twophase.training import checkpoint
from twophase.training.preflight import preflight
from twophase.training.trainer import DIVERGED

CHECKPOINTS = "checkpoint"


def run_config(run: Path) -> tuple[TrainConfig, str]:
    """Return the configuration of a run's folder, and its fingerprint.

    Raises:
        UsageError: no folder, none of a run, or a configuration that this version cannot read.
    """
    path = run / CONFIG
    if not path.is_file():
        what = "there is no such folder" if not run.is_dir() else f"holds no {CONFIG}, so it is not the folder of a run"
        raise UsageError(f"{run}: {what}; give the --out of `twophase train`, or the folder of one run of a sweep")
    try:
        tree = load_yaml(path)
        return from_tree(TrainConfig, tree), fingerprint(tree)
    except (UsageError, TypeError, ValueError, AttributeError) as error:
        fault = str(error).removeprefix(f"--config {path}: ")
        raise UsageError(f"{path} cannot be used ({fault}); put the run's own {CONFIG} back") from None


def anchor_of(saved: checkpoint.Checkpoint) -> dict[str, Tensor]:
    """Read the anchor of a checkpoint as weights by name."""
    state = saved.part(checkpoint.ENGINE)
    layout = plan((name, tuple(shape)) for name, shape in state["layout"])
    return {slot.name: view for slot, view in zip(layout.slots, layout.views(state["anchor"]), strict=True)}


def model_of(config: TrainConfig, weights: Mapping[str, Tensor], run: Path) -> Llama:
    """Return a run's model with these weights, on the CPU; refuse weights that do not fit its configuration."""
    try:
        model = Llama(config.model, weights["embedding"].shape[0], seed=0)
        model.load_state_dict(weights)
    except (KeyError, RuntimeError) as error:
        fault = " ".join(str(error).split())
        raise UsageError(
            f"{run}: the weights do not fit the run's {CONFIG} ({fault}); put the run's own files back"
        ) from None
    return model


@dataclass(frozen=True, eq=False)
class Restored:
    """A run at its newest checkpoint.

    Args:
        config: of the run.
        step: inner steps that it had taken.
        model: with the anchor's weights, on the CPU and in float32 whatever the run computed in, without gradients.
        scale: by parameter name the factor of each coordinate that makes AdamW's steps those of gradient descent,
            `D^-1/2` with `D = sqrt(v / (1 - beta_2^t)) + eps`; of several replicas the root of the mean of `D^-1`,
            because the anchor takes the mean of their steps.
        replicas: number of replicas that these second moments come from.
        corpus: the text that the run trains on.
    """

    config: TrainConfig
    step: int
    model: Llama
    scale: dict[str, Tensor]
    replicas: int
    corpus: Corpus

    def batches(self, count: int) -> list[Tensor]:
        """Return tokens of some of the run's training batches, evenly spread over the steps taken and its replicas.

        Args:
            count: of batches, each of the run's own batch size.
        """
        config, batches = self.config, []
        for number in range(count):
            step, replica = number * self.step // count, number % config.replicas
            batches.append(torch.from_numpy(self.corpus.batch(config.seed, step, replica)[0]))
        return batches


def restore(run: Path) -> Restored:
    """Read a run's newest checkpoint.

    Args:
        run: the run's folder.

    Raises:
        UsageError: no run, no checkpoint, a damaged one, one without the inner optimizer's moments, weights that are
            not finite, a run that has diverged, or text that is gone or has changed.
    """
    config, identity = run_config(run)
    newest = checkpoint.latest(run / CHECKPOINTS)
    if newest is None:
        raise UsageError(
            f"{run}: has no checkpoint, which holds the weights and the inner optimizer's moments; train it with "
            "`twophase train` (the cells of a sweep keep none)"
        )
    saved = checkpoint.Checkpoint(newest, identity)
    progress, weights = saved.progress(), anchor_of(saved)
    if progress.get("exit_reason") == DIVERGED or not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise UsageError(
            f"{run}: the run has diverged, and its weights have no curvature to speak of; give another run"
        )
    model = model_of(config, weights, run).requires_grad_(False)
    scales = _scales(saved, config, [name for name, _ in model.named_parameters()])
    # Wherever the run was trained, it is looked at on the CPU.
    here = check(with_values(config, {"device": "cpu", "compute.attention": "auto"}))
    task = LanguageTask(here)
    preflight(here, task)
    if task.corpus.description["fingerprint"] != progress["text"]:
        raise UsageError(
            f"--data.corpus {config.data.corpus} of {run}: the text is not the one that the run was trained on; put "
            "the old text back (of `python`: use the Python that trained it)"
        )
    mean = {name: torch.stack([scale[name] for scale in scales]).mean(0).sqrt() for name in scales[0]}
    return Restored(config, saved.step, model, mean, len(scales), task.corpus)


def _scales(saved: checkpoint.Checkpoint, config: TrainConfig, names: list[str]) -> list[dict[str, Tensor]]:
    """Return D^-1 of each replica that the checkpoint holds, by parameter name."""
    scales = []
    for number in range(config.replicas):
        if not saved.holds(checkpoint.replica_file(number)):
            continue  # where replicas come and go, each has a folder of its own
        inner = saved.part(checkpoint.replica_file(number)).get("inner", {})
        try:
            groups = inner["param_groups"]
            places = [(group, place) for group in groups for place in group["params"]]
            moments = [inverse_scale(group, inner["state"][place]) for group, place in places]
            scales.append(dict(zip(names, moments, strict=True)))
        except (KeyError, TypeError, ValueError):
            scales = []
            break
    if not scales:
        raise UsageError(
            f"checkpoint {saved.path} lacks the second moments of an inner AdamW, without which the steps of the inner "
            "phase are not known; give a run of `twophase train` of this version, with --inner.method adamw"
        )
    return scales


def inverse_scale(group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """Return what AdamW multiplies each coordinate's gradient with besides its learning rate: `1 / (sqrt(v) + eps)`.

    Exactly 0 where v = 0: such a coordinate (of a token that the replica has never seen) has had no gradient, and takes
    no step. With 1 / eps it would count as the most mobile of all.

    Args:
        group: of its parameter groups.
        state: of a parameter; v is its second moment, corrected for its beginning at 0.
    """
    steps = float(state["step"])
    corrected = state["exp_avg_sq"].double() / -math.expm1(steps * math.log(group["betas"][1]))
    return torch.where(corrected > 0, 1 / (corrected.sqrt() + group["eps"]), 0.0)
