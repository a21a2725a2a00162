"""`DiLoCo` for loops on accelerate, in the shape of accelerate's own `LocalSGD`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator, DistributedType
from torch import nn

from twophase.diloco import engine
from twophase.diloco.report import RoundReport
from twophase.diloco.setting import OuterChoice, Restarts, Signals
from twophase.integrations.rounds import USUAL
from twophase.training import parts


class DiLoCo:
    """Outer rounds for a loop on an `Accelerator`, in the place of `LocalSGD`.

        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        with DiLoCo(accelerator, model, inner_steps=500, restart=3) as rounds:
            for batch in data:
                with accelerator.accumulate(model):
                    accelerator.backward(loss(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
                    rounds.step()

    Inside the block each process is a replica: gradients are not averaged. The end of the block takes the last, shorter
    round. `accelerator.save_state` and `load_state` include the engine and each replica's weights and optimizers. A
    resumed training equals an uninterrupted one bit for bit; load before the block. For a standard run folder make it
    first, and record around the block: `with twophase.record(rounds.engine, "runs/mine"), rounds:`.

    Args:
        accelerator: accelerator of one process or several, on CPUs or GPUs.
        model: result of `accelerator.prepare`.
        inner_steps: steps of the optimizer in a round, >= 1.
        enabled: False changes nothing about the loop; `engine` is None then.
        outer: outer optimizer, as in `twophase.DiLoCo`.
        restart: restart policy of the outer momentum; None is never.
        options: further arguments of `twophase.DiLoCo`.

    Raises:
        ValueError: an accelerator with FSDP, DeepSpeed, Megatron-LM or a TPU, or anything that `twophase.DiLoCo`
            refuses.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        inner_steps: int,
        enabled: bool = True,
        *,
        outer: OuterChoice = USUAL,
        restart: Restarts = None,
        **options: Any,
    ) -> None:
        self.engine: engine.DiLoCo | None = None
        self._accelerator, self._model, self._block = accelerator, model, ExitStack()
        self._folder: Path | None = None
        if not enabled:
            return
        kind = accelerator.distributed_type
        if kind != DistributedType.NO and not kind.value.startswith("MULTI_"):
            raise ValueError(
                f"DiLoCo: the accelerator's distributed_type is {kind.value}; it must be NO or one of MULTI_CPU and "
                "MULTI_GPU: start the loop without FSDP, DeepSpeed and Megatron-LM"
            )
        self.engine = engine.DiLoCo(
            accelerator.unwrap_model(model), outer, inner_steps=inner_steps, restart=restart, **options
        )
        others = sum(isinstance(other, DiLoCo) for other in accelerator._custom_objects)
        self._prefix = f"twophase_model_{others}_replica_" if others else "twophase_replica_"
        accelerator.register_for_checkpointing(self)
        accelerator.register_save_state_pre_hook(self._save_replica)
        accelerator.register_load_state_pre_hook(self._note_folder)

    def step(self, signals: Signals = None) -> RoundReport | None:
        """Count an inner step, unless the batch was only accumulated; return a report where a round ends.

        A step that a gradient scaler skipped counts as well: all replicas must count alike.
        """
        if self.engine is None or not self._accelerator.sync_gradients:
            return None
        return self.engine.step(signals)

    def __enter__(self) -> DiLoCo:
        if self.engine is not None:
            self._block.enter_context(self._accelerator.no_sync(self._model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._block:
            if self.engine is not None and kind is None:  # after an error the other replicas may not sync
                self.engine.finish()

    # ------------------------------------------------------------------------------------ the accelerator's checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all replicas share; the accelerator saves it."""
        assert self.engine is not None  # a disabled one is not registered with the accelerator
        return self.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `accelerator.load_state`, which has loaded process 0's replica into all of them."""
        assert self.engine is not None
        if self._folder is None:
            raise ValueError("DiLoCo.load_state_dict: it needs each replica's own state; use accelerator.load_state")
        if not (self._folder / self._file).exists():
            saved = len(list(self._folder.glob(f"{self._prefix}*.safetensors")))
            raise ValueError(
                f"DiLoCo.load_state_dict: {self._folder / self._file} is missing: replicas saved: {saved}, "
                f"now: {self._accelerator.num_processes}; start {saved} processes, or put the file back"
            )
        replica = parts.load(self._folder / self._file, "DiLoCo.load_state_dict")
        # A kill while a folder is written over leaves files of two steps, which no later comparison would notice.
        if replica.get("taken", taken := state.get("taken")) != taken:
            raise ValueError(
                f"DiLoCo.load_state_dict: {self._folder / self._file} is of inner step {replica['taken']}, and the "
                f"engine's state of {taken}, so saving was interrupted; load another folder. Save into a new one each "
                "time"
            )
        self.engine.load_state_dict(state)
        self.engine.load_wire_state_dict(replica["wire"])
        self.engine.replicas[0].load_state_dict(replica["model"])
        for optimizer, saved in zip(self._optimizers, replica["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    @property
    def _file(self) -> str:
        return f"{self._prefix}{self._accelerator.process_index}.safetensors"

    @property
    def _optimizers(self) -> list[Any]:
        return [wrapper.optimizer for wrapper in self._accelerator._optimizers]

    def _save_replica(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """Save this process's replica into the accelerator's checkpoint, which holds only that of process 0."""
        del models, weights
        assert self.engine is not None
        state = {
            "taken": self.engine.taken,
            "wire": self.engine.wire_state_dict(),
            "model": self.engine.replicas[0].state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        parts.save(Path(folder) / self._file, state)

    def _note_folder(self, models: list[nn.Module], folder: str) -> None:
        del models
        self._folder = Path(folder)
