"""Count the steps of transformers' `Trainer` as inner steps of `DiLoCo`, by a `TrainerCallback`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from transformers import TrainerCallback, TrainingArguments

from twophase.diloco.digest import digest
from twophase.integrations.rounds import Rounds, join_replicas
from twophase.training import checkpoint

__all__ = ["DiLoCoCallback", "join_replicas"]


class DiLoCoCallback(Rounds, TrainerCallback):
    """Outer rounds for a `Trainer`: `Trainer(..., callbacks=[DiLoCoCallback(inner_steps=500, restart=3)])`.

    The Trainer keeps its optimizer, schedule, logging and checkpoints. Each checkpoint also holds the engine's state,
    and a resumed training equals an uninterrupted one bit for bit, in the middle of a round as well. The last round
    comes after the Trainer's last checkpoint: call `save_model()` at the end. Each replica has a separate Trainer: call
    `join_replicas()` first, and give each an `output_dir`.

    Arguments, attributes: see `Rounds`. With `record`, logged and evaluation losses go into the run too.

    Raises:
        ValueError: when the training begins: several processes or GPUs in one Trainer, `load_best_model_at_end`,
            `save_total_limit=1`, or a checkpoint without this callback's state or the optimizer's.
    """

    def on_train_begin(self, args: TrainingArguments, state: Any, *_: Any, **kwargs: Any) -> None:
        """Build the engine; the Trainer has placed the model and, when it resumes, loaded weights and optimizer."""
        if args.world_size > 1 or args.n_gpu > 1:  # it would average every gradient
            count = f"{args.world_size} processes with {args.n_gpu} GPUs"
            raise ValueError(f"DiLoCoCallback: the Trainer must have one GPU, after join_replicas(), has {count}")
        if args.load_best_model_at_end:
            raise ValueError("DiLoCoCallback: load_best_model_at_end must be False: no round ends from older weights")
        if args.save_total_limit == 1:  # the earlier checkpoint goes before the engine's state is in the new one
            raise ValueError("DiLoCoCallback: save_total_limit must be 2 or more, or a kill leaves no checkpoint; is 1")
        path, model, saved = _path(args, state), kwargs["model"], None
        if state.global_step and path.exists():
            if not any(path.parent.glob("*optimizer*")):  # the Trainer begins with a fresh one, and says nothing
                raise ValueError(f"DiLoCoCallback: {path.parent} must hold the optimizer (save_only_model=False)")
            saved = checkpoint.load_sealed(path)
            if saved["weights"] != digest([*model.parameters()]):  # the Trainer resumes from another folder
                raise ValueError(f"DiLoCoCallback: output_dir must be the checkpoint's, {path} has other weights")
        self.begin(model, kwargs["optimizer"], state.global_step, state.max_steps, saved)
        if state.global_step >= state.max_steps:
            self.on_train_end()

    def on_step_end(self, args: TrainingArguments, state: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Count an inner step; this comes before the Trainer logs, evaluates and saves."""
        if state.global_step <= state.max_steps:
            self.step()
        else:  # a Trainer that resumes after its last step takes one more
            self.engine.restore()

    def on_log(self, args: TrainingArguments, state: Any, *_: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Log the losses of training and evaluation."""
        names = {"loss": "loss", "eval_loss": "validation_loss"}
        values = {names[name]: value for name, value in kwargs["logs"].items() if name in names}
        if self.run is not None and values:
            self.run.log(state.global_step, **values)

    def on_save(self, args: TrainingArguments, state: Any, *_: Any, **kwargs: Any) -> None:
        """Write the engine's state into the checkpoint that the Trainer has just written."""
        path, model = _path(args, state), kwargs["model"]
        if not any(path.parent.glob("*model*.safetensors")):  # save_pretrained writes in the group's process 0 only,
            save_model(model, str(path.with_name("model.safetensors")))  # and each replica has its own
        checkpoint.save_sealed(path, self.saved() | {"weights": digest([*model.parameters()])})


def _path(args: TrainingArguments, state: Any) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / "twophase.pt"
