"""Count the steps of transformers' `Trainer` as inner steps of `DiLoCo`, by a `TrainerCallback`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from twophase.integrations.rounds import Rounds, join_replicas
from twophase.training import parts

__all__ = ["DiLoCoCallback", "join_replicas"]

_FILE = "twophase.safetensors"


class DiLoCoCallback(Rounds, TrainerCallback):
    """Outer rounds for a `Trainer`.

        callback = DiLoCoCallback(OuterRule(0.7, 0.9, nesterov=True), inner_steps=500, restart=3, record="runs/mine")
        trainer = Trainer(..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=...)
        trainer.save_model()                    # the last round comes after the Trainer's last checkpoint

    The Trainer keeps its optimizer, schedule, logging and checkpoints. Each checkpoint also holds the engine's state.
    A resumed training equals an uninterrupted one bit for bit, in the middle of a round as well. Each replica has a
    separate Trainer: call `join_replicas()` first, and give each an `output_dir`.

    Arguments, attributes: see `Rounds`. With `record`, logged and evaluation losses go into the run too.

    Raises:
        ValueError: a Trainer over several processes or GPUs, `load_best_model_at_end`, `save_total_limit=1`, or a
            checkpoint that was written without this callback or the optimizer; when the training begins.
    """

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Build the engine; the Trainer has placed the model and, when it resumes, loaded weights and optimizer."""
        if args.world_size > 1 or args.n_gpu > 1:
            remedy = "call join_replicas() before TrainingArguments are made, so that each process has its own Trainer"
            if args.world_size == 1:  # without torchrun, join_replicas() does nothing
                remedy = f"use torchrun --nproc-per-node {args.n_gpu} and {remedy}, or set CUDA_VISIBLE_DEVICES=0"
            raise ValueError(
                f"DiLoCoCallback: this Trainer spans {args.world_size} processes with {args.n_gpu} GPUs each, and "
                f"averages every gradient; it must be 1 process with at most 1 GPU: {remedy}"
            )
        if args.load_best_model_at_end:
            raise ValueError(
                "DiLoCoCallback: load_best_model_at_end is True, but a round cannot end from older weights; it must be "
                "False: pick the model among the checkpoints afterwards"
            )
        if args.save_total_limit == 1:
            raise ValueError(
                "DiLoCoCallback: save_total_limit is 1, and the Trainer removes the earlier checkpoint before the "
                "engine's state is in the new one. A kill in between would leave no resumable one; give 2 or more"
            )
        if getattr(args, "enable_jit_checkpoint", False) or state.is_hyper_param_search:
            raise ValueError(
                "DiLoCoCallback: enable_jit_checkpoint and hyperparameter_search save where no callback can add the "
                "engine's state; leave them out"
            )
        path, saved = _path(args, state), None
        if state.global_step:
            if not path.exists():
                raise ValueError(
                    f"DiLoCoCallback: {path} is missing: the checkpoint was written without this callback, "
                    "incompletely, or in another folder; resume from an earlier checkpoint of output_dir"
                )
            if not any(path.parent.glob("*optimizer*")):  # the Trainer begins with a fresh one, and says nothing
                raise ValueError(
                    f"DiLoCoCallback: {path.parent} has no optimizer.pt, so the inner optimizer and its schedule would "
                    "start over. Resume from one saved with save_only_model=False, or start a new run from its weights"
                )
            saved = parts.load(path, "DiLoCoCallback")
            if saved.get("weights", (digits := _digits(kwargs["model"]))) != digits:
                raise ValueError(
                    f"DiLoCoCallback: {path} belongs to other weights than those that the Trainer has loaded; set "
                    "output_dir to the folder of the checkpoint that you resume from"
                )
        self.begin(kwargs["model"], kwargs["optimizer"], state.global_step, state.max_steps, saved)
        self._final = []
        if state.global_step >= state.max_steps:  # in the middle of an epoch, the Trainer takes a step beyond the end
            self.end()
            self._final = [p.detach().clone() for p in kwargs["model"].parameters()]

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count an inner step; this comes before the Trainer logs, evaluates and saves."""
        if not self._final:
            return self.step()
        with torch.no_grad():
            for p, final in zip(kwargs["model"].parameters(), self._final, strict=True):
                p.copy_(final)
        return None

    def on_log(  # noqa: D102 - the Trainer's
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: Any,
        control: Any,  # noqa: ARG002
        logs: dict[str, float] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        names = {"loss": "loss", "eval_loss": "validation_loss"}
        values: dict[str, Any] = {names[name]: value for name, value in (logs or {}).items() if name in names}
        if self.run is not None and values:
            self.run.log(state.global_step, **values)

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Write the engine's state into the checkpoint that the Trainer has just written."""
        path = _path(args, state)
        if not any(path.parent.glob("*model*.safetensors")):  # save_pretrained writes in the group's process 0 only,
            save_model(kwargs["model"], str(path.with_name("model.safetensors")))  # and each replica has its own
        parts.save(path, self.saved() | {"weights": _digits(kwargs["model"])})

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Take the last round, if it was cut short."""
        if not self._final:
            self.end()


def _digits(model: nn.Module) -> str:
    """Return digits of a model's weights."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _path(args: TrainingArguments, state: Any) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / _FILE
