"""`DiLoCo` for loops on accelerate, in the shape of accelerate's own `LocalSGD`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType
from torch import nn

from twophase.diloco import engine
from twophase.diloco.engine import Signals
from twophase.diloco.report import RoundReport
from twophase.optim.build import OuterChoice
from twophase.optim.outer_sgd import keep_types
from twophase.training import checkpoint


class DiLoCo:
    """Outer rounds for a loop on an `Accelerator`, in the place of `LocalSGD`.

        with DiLoCo(accelerator, model, inner_steps=500, restart=3) as rounds:
            ...                                  # forward, backward, optimizer.step(), optimizer.zero_grad()
            rounds.step()

    In the block each process is a replica, and gradients are not averaged; its end takes the last, shorter round.
    `accelerator.save_state` and `load_state` include the engine and each replica's weights and optimizers: a training
    that loads before the block equals an uninterrupted one bit for bit. To write a run folder: `with
    twophase.record(folder, rounds.engine) as run, rounds:`, `run.log_round(rounds.step())`, last of `rounds.finish()`.

    Arguments are those of `twophase.DiLoCo`, over a model that the accelerator has prepared; "nesterov" is DiLoCo's
    published rule.
    A ValueError refuses FSDP, DeepSpeed, Megatron-LM and a TPU.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        inner_steps: int,
        *,
        outer: OuterChoice = "nesterov",
        **options: Any,
    ) -> None:
        self._accelerator, self._model, self._block = accelerator, model, ExitStack()
        kind = accelerator.distributed_type
        if kind != DistributedType.NO and not kind.value.startswith("MULTI_"):
            raise ValueError(f"DiLoCo: distributed_type must be NO, MULTI_CPU or MULTI_GPU, is {kind.value}")
        replica = accelerator.unwrap_model(model)
        self.engine = engine.DiLoCo(replica, outer, inner_steps=inner_steps, **options)
        self._file = f"twophase_{len(accelerator._custom_objects)}_replica_{accelerator.process_index}.pt"
        accelerator.register_for_checkpointing(self)
        accelerator.register_save_state_pre_hook(self._save_replica)
        accelerator.register_load_state_pre_hook(self._note_folder)

    def step(self, signals: Signals = None) -> RoundReport | None:
        """Count an inner step, unless the batch was only accumulated; return a report where a round ends.

        A step that a gradient scaler skipped counts as well: all replicas must count alike.
        """
        return self.engine.step(signals) if self._accelerator.sync_gradients else None

    def finish(self) -> RoundReport | None:
        """Take the last, shorter round now, and return its report; the block's end does it otherwise."""
        return self.engine.finish()

    def __enter__(self) -> DiLoCo:
        self._block.enter_context(self._accelerator.no_sync(self._model))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._block:
            if kind is None:  # after an error the other replicas may not sync
                self.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all replicas share; the accelerator saves it."""
        return self.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `accelerator.load_state`, which has loaded process 0's replica into all of them."""
        path = self._folder / self._file
        replica = checkpoint.load_sealed(path)
        if replica["taken"] != state["taken"]:  # a kill while a folder is written over leaves files of two steps
            steps = f"{state['taken']}, is of {replica['taken']}"
            raise ValueError(f"DiLoCo: {path} must be of inner step {steps}; saving was interrupted, load another")
        self.engine.load_state_dict(state)
        self.engine.load_residuals(replica["residuals"])
        self.engine.replicas[0].load_state_dict(replica["model"])
        for wrapper, saved in zip(self._accelerator._optimizers, replica["optimizers"], strict=True):
            wrapper.optimizer.load_state_dict(saved)
            keep_types(wrapper.optimizer, saved)

    def _save_replica(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:  # noqa: ARG002
        """Save this process's replica into the accelerator's checkpoint, which holds only that of process 0."""
        state = {
            "taken": self.engine.taken,
            "residuals": self.engine.residuals(),
            "model": self.engine.replicas[0].state_dict(),
            "optimizers": [wrapper.optimizer.state_dict() for wrapper in self._accelerator._optimizers],
        }
        checkpoint.save_sealed(Path(folder) / self._file, state)

    def _note_folder(self, models: list[nn.Module], folder: str) -> None:  # noqa: ARG002
        self._folder = Path(folder)
