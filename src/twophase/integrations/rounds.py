"""Share engine, saved state and record of a training among the callbacks of trainers; join torchrun's processes."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from twophase.base.config import UsageError
from twophase.diloco.engine import DiLoCo
from twophase.diloco.report import RoundReport
from twophase.diloco.setting import OuterChoice, Restarts, Signals
from twophase.rule import OuterRule
from twophase.training.recording import Recorder, record
from twophase.training.session import world_size

USUAL = OuterRule(0.7, 0.9, nesterov=True)
"""Outer rule of the DiLoCo paper."""
_TORCHRUN = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE TORCHELASTIC_RUN_ID".split()
_RECORDING: WeakValueDictionary[Path, Rounds] = WeakValueDictionary()
"""Trainings of this process by the folder of their record; a trainer may not report that its training has raised."""


class Rounds:
    """Outer rounds of one training; callbacks inherit it and call `begin`, `step` and `end`.

    Args:
        outer: outer optimizer: an `OuterRule`, a name, `"auto"`, or a function that builds it.
        inner_steps: steps of the trainer's optimizer in a round, >= 1.
        restart: restart policy of the outer momentum; None is never.
        record: folder of a standard run (`twophase.record`), written while the trainer trains; None writes none.
        options: further arguments of `DiLoCo`, such as `fragments`, `delay` and `wire`.

    Attributes:
        engine: the `DiLoCo` of the training, from its beginning on.
        reports: the rounds that have ended in it.
        run: the open record, if `record` names a folder.
    """

    engine: DiLoCo
    run: Recorder | None = None

    def __init__(
        self,
        outer: OuterChoice = USUAL,
        *,
        inner_steps: int,
        restart: Restarts = None,
        record: str | Path | None = None,
        **options: Any,
    ) -> None:
        self._setting = {"outer": outer, "inner_steps": inner_steps, "restart": restart, **options}
        self._folder = record
        self._open: AbstractContextManager[Recorder] | None = None
        self.reports: list[RoundReport] = []

    def begin(
        self, model: nn.Module, inner: Optimizer, step: int, planned: int | None, state: dict[str, Any] | None = None
    ) -> None:
        """Build the engine over a model that holds its first, or its restored, weights, and open the record.

        Args:
            model: this process's replica.
            inner: its optimizer, whose learning rate the record notes.
            step: inner steps that it has taken.
            planned: inner steps in all; None where that is not known.
            state: `saved()` of that step, where the training resumes.

        Raises:
            ValueError: replicas that resume from different steps, or anything that `DiLoCo` refuses.
        """
        self.abandon()  # of an earlier training that raised
        weights = [p.detach().clone() for p in model.parameters()] if state else []
        self.engine = DiLoCo(model, **self._setting, alike={"planned inner steps": planned})
        self.reports = []
        steps = self.engine.communicator.gather(step, int)
        if len(set(steps)) > 1:  # a kill between two replicas' checkpoints leaves them so
            raise ValueError(
                f"DiLoCoCallback: the replicas resume from steps {steps}; give all of them the checkpoint of step "
                f"{min(steps)}"
            )
        if state:
            self.engine.load_state_dict(state["engine"])
            self.engine.load_wire_state_dict(state["wire"])
            with torch.no_grad():  # building the engine set all replicas to the first one's weights
                for p, saved in zip(model.parameters(), weights, strict=True):
                    p.copy_(saved)
        if self._folder is not None:
            folder = Path(self._folder).resolve()
            earlier = _RECORDING.get(folder)
            if earlier is not None:  # its training has raised, and a traceback still holds it
                earlier.abandon()
            _RECORDING[folder] = self
            self._open = record(self.engine, self._folder, {"steps": planned} if planned else {}, inner=inner)
            self.run = self._open.__enter__()

    def step(self, signals: Signals = None) -> None:
        """Count an inner step; a round may end."""
        self._keep(self.engine.step(signals))

    def end(self) -> None:
        """Take the last round, if it was cut short, and finish the record."""
        self._keep(self.engine.finish())
        self._close(None)

    def abandon(self) -> None:
        """Close the record of a training that has raised; its run stays unfinished."""
        self._close(RuntimeError("the training has raised"))

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint of the trainer lacks: anchor, outer state and position; on int8, the residual."""
        return {"engine": self.engine.state_dict(), "wire": self.engine.wire_state_dict()}

    def _close(self, reason: Exception | None) -> None:
        if self._open is not None:
            self._open.__exit__(type(reason) if reason else None, reason, None)
            self._open = self.run = None

    def _keep(self, report: RoundReport | None) -> None:
        if report is not None:
            self.reports.append(report)


def join_replicas() -> int:
    """Join the processes that torchrun started, and hide torchrun from the trainer; a second call does nothing.

    Trainers that see torchrun wrap the model in `DistributedDataParallel`, which averages the gradients of every inner
    step. Afterwards each process is a separate trainer on its own GPU. Choose its folder and its share of the data by
    the number returned. Call this function before the trainer's arguments are made and before CUDA is used.

    Returns:
        The number of this replica, from 0; 0 without torchrun.

    Raises:
        UsageError: torchrun started more processes on this machine than `CUDA_VISIBLE_DEVICES` names GPUs.
    """
    if not dist.is_initialized():
        if world_size() == 1:
            return 0
        local = int(os.environ.get("LOCAL_RANK", "0"))
        # Transformers' Trainer would spread a replica over all GPUs that it sees.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(local + 1))))
        if visible not in ("", "-1"):  # which hide all GPUs
            names = visible.split(",")
            if local >= len(names):
                raise UsageError(
                    f"join_replicas: process {local} of this machine has no GPU, for CUDA_VISIBLE_DEVICES is "
                    f"{visible!r}; give torchrun --nproc-per-node {len(names)} or fewer"
                )
            os.environ["CUDA_VISIBLE_DEVICES"] = names[local]
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    for name in _TORCHRUN:
        os.environ.pop(name, None)
    return dist.get_rank()
