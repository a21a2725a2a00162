"""Count the steps of a Lightning `Trainer` as inner steps of `DiLoCo`, by a `Callback`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from twophase.integrations.rounds import Rounds, join_replicas

__all__ = ["DiLoCoCallback", "join_replicas"]


class DiLoCoCallback(Rounds, Callback):
    """Outer rounds for a Lightning `Trainer`.

        callback = DiLoCoCallback(OuterRule(0.7, 0.9, nesterov=True), inner_steps=500, restart=3, record="runs/mine")
        trainer = Trainer(devices=1, callbacks=[callback])
        trainer.fit(module, data, ckpt_path=...)

    An inner step is a step of the optimizer: under `accumulate_grad_batches` several batches. Lightning's checkpoints
    hold the engine's state, in the middle of a round as well. A resumed training equals an uninterrupted one except for
    random state and the place in an epoch, which Lightning does not save. Each replica has a separate Trainer: call
    `join_replicas()` first, and give each a `default_root_dir`.

    Arguments, attributes: see `Rounds`. With `record`, training losses and logged metrics go into the run too;
    `val_loss` is the validation loss.

    Raises:
        ValueError: a Trainer over several devices, manual optimization, or a checkpoint that was written without this
            callback; when the training begins.
    """

    _loaded: dict[str, Any] | None = None
    _steps = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse settings that average gradients or hide the inner steps, before any device is set up."""
        if stage != "fit":
            return
        if trainer.world_size > 1:
            raise ValueError(
                f"DiLoCoCallback: this Trainer spans {trainer.world_size} devices, and would average every gradient; "
                "it must be 1. Call join_replicas() first and pass Trainer(devices=1), a separate one in each process"
            )
        if not pl_module.automatic_optimization:
            raise ValueError(
                "DiLoCoCallback: automatic_optimization is False, so steps of the inner optimizer cannot be counted; "
                "it must be True. Or make a twophase.DiLoCo in the module and call its step() after each of them"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the engine; a resumed Trainer has loaded weights, optimizer and this callback's state."""
        self._steps = trainer.global_step
        if self._steps and self._loaded is None:
            raise ValueError(
                f"DiLoCoCallback: the training resumes from step {self._steps} without this callback's state; resume "
                "from a checkpoint that was written with it (ckpt_path=...)"
            )
        steps = trainer.estimated_stepping_batches
        planned = int(steps) if 0 < steps < math.inf else None  # of max_time alone, or of data without a length
        self.begin(pl_module, trainer.optimizers[0], self._steps, planned, self._loaded)
        self._loaded = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int  # noqa: ARG002
    ) -> None:  # fmt: skip
        """Count an inner step, if this batch was the last of one; this comes before Lightning saves and validates."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        scale = trainer.accumulate_grad_batches  # which Lightning has divided the loss by
        if loss is None or not self.engine.reports_next:  # to read a number would wait for the device
            self.step()
        else:
            self.step({"loss": float(loss) * scale})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Log the module's logged metrics."""
        if self.run is not None:
            values = {
                "validation_loss" if name == "val_loss" else name: value
                for name, value in trainer.callback_metrics.items()
                if value.numel() == 1 and name not in ("self", "step", "round")  # the last two are the record's
            }
            self.run.log(None, **values)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Take the last round, if it was cut short."""
        self.end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the last round of a training that was resumed at its end, which Lightning does not start."""
        if self._loaded is not None:
            self.on_train_start(trainer, pl_module)
            self.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Leave the record unfinished."""
        self.abandon()

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state for a checkpoint."""
        return self.saved() if hasattr(self, "engine") else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's state until the training begins."""
        self._loaded = state_dict or None
