"""Count the steps of a Lightning `Trainer` as inner steps of `DiLoCo`, by a `Callback`."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from twophase.integrations.rounds import Rounds, join_replicas

__all__ = ["DiLoCoCallback", "join_replicas"]


class DiLoCoCallback(Rounds, Callback):
    """Outer rounds for a Lightning `Trainer`: `Trainer(devices=1, callbacks=[DiLoCoCallback(inner_steps=500)])`.

    An inner step is a step of the optimizer: under `accumulate_grad_batches` several batches. Lightning's checkpoints
    hold the engine's state, in the middle of a round as well. A resumed training equals an uninterrupted one except for
    random state and the place in an epoch, which Lightning does not save. Each replica has a separate Trainer: call
    `join_replicas()` first, and give each a `default_root_dir`.

    Arguments, attributes: see `Rounds`. With `record`, training losses and logged metrics go into the run too;
    `val_loss` is the validation loss.

    Raises:
        ValueError: when the training begins: several devices, manual optimization, or a checkpoint without this state.
    """

    _loaded: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse settings that average gradients or hide the inner steps, before any device is set up."""
        if stage != "fit":
            return
        if trainer.world_size > 1:
            raise ValueError(f"DiLoCoCallback: devices must be 1, after join_replicas(), is {trainer.world_size}")
        if not pl_module.automatic_optimization:
            raise ValueError("DiLoCoCallback: automatic_optimization must be True; else step a twophase.DiLoCo")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the engine; a resumed Trainer has loaded weights, optimizer and this callback's state."""
        steps = trainer.estimated_stepping_batches
        planned = int(steps) if 0 < steps < math.inf else None  # of max_time alone, or of data without a length
        self.begin(pl_module, trainer.optimizers[0], trainer.global_step, planned, self._loaded)
        self._loaded = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Count an inner step, if this batch was the last of one; this comes before Lightning saves and validates."""
        if trainer.global_step > self.engine.taken:
            parts = trainer.accumulate_grad_batches  # which Lightning has divided the loss by
            is_read = "loss" in outputs and self.engine.ending  # else no wait for a GPU
            self.step({"loss": float(outputs["loss"]) * parts} if is_read else None)

    def on_validation_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Log the module's logged metrics."""
        if self.run is not None:
            values = {"validation_loss" if n == "val_loss" else n: v for n, v in trainer.callback_metrics.items()}
            self.run.log(None, **{n: v for n, v in values.items() if n not in ("self", "step", "round")})  # its own

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the last round of a training that was resumed at its end, which Lightning does not start."""
        if self._loaded is not None:
            self.on_train_start(trainer, pl_module)
            self.on_train_end()

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state for a checkpoint."""
        return self.saved() if hasattr(self, "engine") else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's state until the training begins."""
        self._loaded = state_dict or None
