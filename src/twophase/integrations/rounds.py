"""Engine, saved state and record of a training, as the callbacks of trainers share them; join torchrun's processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from twophase.diloco.engine import DiLoCo, Signals
from twophase.diloco.report import RoundReport
from twophase.errors import UsageError
from twophase.optim.build import OuterChoice
from twophase.optim.outer_sgd import keep_types, unlike_types
from twophase.training.recording import Recorder, record

_TORCHRUN = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE TORCHELASTIC_RUN_ID".split()
_RECORDING: WeakValueDictionary[Path, Recorder] = WeakValueDictionary()
"""Records of this process; a trainer may not report that its training has raised, and a traceback may still hold it."""


class Rounds:
    """Outer rounds of one training; callbacks inherit it, and call `begin` and `step`.

    Args:
        record: folder of a standard run (`twophase.record`), written while the trainer trains; None writes none.
        outer, inner_steps, options: arguments of `DiLoCo`; "nesterov" is DiLoCo's published rule.

    Attributes:
        engine: the `DiLoCo` of the training, from its beginning on.
        reports: the rounds that have ended in it.
        run: the open record, if `record` names a folder.
    """

    engine: DiLoCo
    run: Recorder | None = None

    def __init__(
        self, outer: OuterChoice = "nesterov", *, inner_steps: int, record: str | Path | None = None, **options: Any
    ) -> None:
        self._settings: dict[str, Any] = {"outer": outer, "inner_steps": inner_steps, **options}
        self._folder = record
        self.reports: list[RoundReport] = []

    def begin(
        self, model: nn.Module, inner: Optimizer, step: int, planned: int | None, state: dict[str, Any] | None = None
    ) -> None:
        """Build the engine over a model that holds its first, or its restored, weights, and open the record.

        `inner` has taken `step` of the `planned` inner steps (None: not known); `saved()` returned `state` after them.

        Raises:
            ValueError: no state, replicas that resume from different steps, or anything that `DiLoCo` refuses.
        """
        if step and not state:
            raise ValueError(f"DiLoCoCallback: the checkpoint of step {step} must hold this callback's state, has none")
        weights = [p.detach().clone() for p in model.parameters()] if state else []
        # a kill between two replicas' checkpoints leaves them at different steps
        equal = {"planned inner steps": planned, "inner steps taken": step} | self._settings.get("expect_equal", {})
        self.engine = DiLoCo(model, **self._settings | {"expect_equal": equal})
        self.reports, self._inner = [], inner
        if state:
            with torch.no_grad():  # building the engine set all replicas to the first one's weights
                torch._foreach_copy_(list(model.parameters()), weights)
            self.engine.load_state_dict(state["engine"])
            self.engine.load_residuals(state["residuals"])
            keep_types(inner, state["inner"])
        if self._folder is not None:
            folder = Path(self._folder).resolve()
            if earlier := _RECORDING.get(folder):
                earlier.close()
            self.run = _RECORDING[folder] = record(folder, self.engine, {"steps": planned} if planned else {})

    def step(self, signals: Signals = None) -> None:
        """Count an inner step; a round may end. Of a schedule-free optimizer the replicas exchange the average."""
        self._set_mode("eval")
        self._note(self.engine.step(signals))
        self._set_mode("train")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take the last round, if it was cut short, and finish the record; trainers call this by its name."""
        self._set_mode("eval")
        self._note(self.engine.finish())
        if self.run is not None:
            self.run.finish()
            self.run = None  # what the trainer logs afterwards is no part of it

    def _set_mode(self, mode: str) -> None:
        if hasattr(self._inner, mode):
            getattr(self._inner, mode)()

    def _note(self, report: RoundReport | None) -> None:
        self.reports += [report] if report is not None else []
        if report is not None and self.run is not None:
            self.run.log_round(report, inner_lr=max(float(group["lr"]) for group in self._inner.param_groups))

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint of the trainer lacks: anchor, outer state, position, residuals of compression."""
        inner = unlike_types(self._inner)
        return {"engine": self.engine.state_dict(), "residuals": self.engine.residuals(), "inner": inner}


def join_replicas() -> int:
    """Join the processes that torchrun started, hide torchrun from the trainer, and return this replica's number.

    Trainers that see torchrun average the gradients of every inner step. Afterwards each process is a separate trainer
    on its own GPU; its number chooses its folder and its share of the data. Call this before the trainer's arguments
    are made and before CUDA is used. A second call, or one without torchrun, changes nothing.
    A UsageError says that there are more processes on this machine than `CUDA_VISIBLE_DEVICES` names GPUs.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return 0
        local = int(os.environ.get("LOCAL_RANK", "0"))
        # transformers' Trainer would spread a replica over all GPUs that it sees
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(local + 1))))
        if visible not in ("", "-1"):  # which hide all GPUs
            names = visible.split(",")
            if local >= len(names):
                raise UsageError(f"join_replicas: CUDA_VISIBLE_DEVICES must name GPU {local}, is {visible}")
            os.environ["CUDA_VISIBLE_DEVICES"] = names[local]
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    for name in _TORCHRUN:
        os.environ.pop(name, None)
    return dist.get_rank()
