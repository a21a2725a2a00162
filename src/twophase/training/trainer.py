"""The parts of a run: replicas with their inner optimizers, engine, data, progress.

`train` uses one `Trainer` from a run's start to its end; the forest of a sweep uses one for all its runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.optim import Optimizer

from twophase.base.config import UsageError, fingerprint, values_of
from twophase.base.source import source_digest
from twophase.diloco.engine import DiLoCo, Signals
from twophase.diloco.group import SingleProcess
from twophase.diloco.report import RoundReport, merged
from twophase.optim.schedules import Schedule, follow
from twophase.restart import MEASURED
from twophase.training.config import RunConfig, inner_lr
from twophase.training.device import environment, make_repeatable, peak_bytes, room_for
from twophase.training.inner import Replica
from twophase.training.outer import outer_of
from twophase.training.parts import take_apart
from twophase.training.task import Task, step_of

LOSS, STOP = "train_loss", "stop"
"""Signals that the processes share at the end of a round."""
FOR_POLICIES = ("inner_lr", "progress", LOSS)
"""Signals for restart policies: inner learning rate of the last step, completed share of the run, mean training loss
since the last report."""
RUNNING, STOPPED, FINISHED, DIVERGED = "running", "stopped", "finished", "diverged"
RESERVED = frozenset(
    "step round train_loss validation_loss inner_lr tokens seconds engine_share diverged exit_reason steps rounds "
    "restarts checksum execution config weights_sha256 summary_sha256".split()
)
"""Columns of metrics (`Trainer.end_round`) and of the summary, which a task's evaluation must not return."""


class Trainer:
    """Replicas, engine and data of one checked configuration, and their progress."""

    def __init__(self, task: Task, config: RunConfig, communicator: SingleProcess) -> None:
        self.config = config
        self.task = task
        self.comm = communicator
        self.lead = communicator.rank == 0
        self.done = Progress()
        self.validation: Mapping[str, float] | None = None
        """Held-out numbers of the present anchor, if it has been evaluated."""
        device = torch.device(config.device)
        torch.set_num_threads(config.threads)
        make_repeatable(device, strictly=config.deterministic)
        share = config.replicas // communicator.size
        first = communicator.rank * share
        self.compute = step_of(task, device, share, communicator)
        self.data = task.describe()
        self.data_fingerprint: str = self.data["fingerprint"]
        self.loss_bound: float = config.divergence_loss or self.compute.loss_bound
        self._losses: list[Tensor] = []
        self._last_line: tuple[int, float] | None = None
        """Step and time of the last line of `steps.jsonl`, or of the first step of this process."""
        with room_for(f"the weights of {share} replicas and the outer optimizer's", config.device):
            self.replicas = [Replica(config, number, task, self.compute) for number in range(first, first + share)]
            self.engine = self._engine()

    def _engine(self) -> DiLoCo:
        config, sync = self.config, self.config.sync
        try:
            engine = DiLoCo(
                [replica.model for replica in self.replicas],
                outer_of(config),
                restart=sync.policies() or config.outer.policy(),
                filter=config.outer.filter,
                inner_steps=config.inner_steps,
                fragments=sync.parts(),
                stagger=sync.stagger,
                delay=sync.delay,
                mixing=sync.mixing,
                compression=sync.compression,
                buffers="mean",
                group=self.comm,
                expect_equal={"data": self.data_fingerprint[:12], "training code": self._source()} | _shared(config),
            )
            for fragment in engine.fragments:
                _check_needs(fragment.outer)
                follow(fragment.outer, Schedule.parse(config.outer.schedule), config.rounds)
            return engine
        except ValueError as error:  # processes, or fragments, that do not fit
            raise UsageError(str(error)) from None

    def _source(self) -> str:
        """Hash the code that determines a replica's training, without the engine's: this room's and the task's."""
        source = getattr(self.task, "source", None)
        if source is not None:
            return f"{source_digest([Path(__file__).parent])} {source()}"
        parts = (type(self.replicas[0].model), type(self.task))
        return source_digest({Path(__file__).parent, *(Path(inspect.getfile(kind)).parent for kind in parts)})

    def inner_step(self) -> None:
        """Take an inner step of every replica."""
        self._last_line = self._last_line or (self.done.step, time.perf_counter())
        lr = inner_lr(self.config, self.done.step)
        self._losses += [replica.step(self.done.step, lr) for replica in self.replicas]
        self.done.step += 1
        self.validation = None

    def check_states(self) -> None:
        """Refuse a task's inner optimizer whose state no checkpoint can hold."""
        try:
            for replica in self.replicas:
                take_apart(replica.state_dict())
        except ValueError as error:
            raise UsageError(f"the inner optimizer's state cannot be saved: {error}") from None

    def data_fault(self, *, wait: bool = False) -> str:
        """Return the fault that the task's background check of its data found; `wait` for its end."""
        check = getattr(self.task, "data_fault", None)
        return check(wait=wait) if check else ""

    def settle(self) -> None:
        """Read the losses on the device into `done`; this waits for the device."""
        if self._losses:
            for replica, loss in zip(itertools.cycle(self.replicas), torch.stack(self._losses).tolist(), strict=False):
                replica.round_losses.append(loss)
                self.done.recent_loss += loss
            self.done.recent_losses += len(self._losses)
            self._losses.clear()

    @property
    def execution(self) -> dict[str, Any]:
        """Return this process's decisions about how to compute; a resumed run must compute the same way."""
        return dict(self.compute.chosen)

    def restore_execution(self, execution: Mapping[str, Any]) -> None:
        """Compute as an earlier part of the run did."""
        self.compute.chosen = dict(execution)
        self._losses.clear()

    def step_line(self) -> dict[str, Any] | None:
        """Return a line of `steps.jsonl` if one is due: the mean loss and the speed of this process since the last."""
        done, config = self.done, self.config
        if not self.lead or config.log_every == 0 or done.step % config.log_every:
            return None
        self.settle()  # before the clock is read: it waits for the device
        assert self._last_line is not None
        (step, clock), self._last_line = self._last_line, (done.step, time.perf_counter())
        loss = done.recent_loss / max(done.recent_losses, 1)
        done.recent_loss, done.recent_losses = 0.0, 0
        line = {"step": done.step, "train_loss": loss, "inner_lr": inner_lr(config, done.step - 1)}
        line |= self.compute.rates((done.step - step) * len(self.replicas), self._last_line[1] - clock)
        return line | {"peak_memory_bytes": peak_bytes(self.compute.device)}

    def synchronize(self, should_stop: Callable[[], bool] = lambda: False) -> RoundReport | None:
        """Tell the engine that every replica has taken an inner step; the last round may be a shorter one.

        Where a round ends, `should_stop` is called, and its answer reaches all processes.
        """
        signals = None
        if self.done.step == self.config.steps or self.engine.reports_next:
            self.settle()  # else the wait for the inner steps would count as the engine's time
            signals = self._signals(float(should_stop()))
        clock = time.perf_counter()
        with room_for("the outer step", self.config.device):
            report = self._last(self.engine.step(signals), signals)
        self.done.engine_seconds += time.perf_counter() - clock
        return report

    def _signals(self, stop: float) -> dict[str, float]:
        """Return this process's signals at the end of a round."""
        # Each replica's mean first: the same bits as with one process a replica.
        means = [sum(losses) / len(losses) for replica in self.replicas if (losses := replica.round_losses)]
        return {
            LOSS: sum(means) / len(means) if means else 0.0,
            STOP: stop,
            "inner_lr": inner_lr(self.config, self.done.step - 1),
            "progress": self.done.step / self.config.steps,
        }

    def _last(self, report: RoundReport | None, signals: Signals) -> RoundReport | None:
        """Return the report of a sync; at the run's end, also synchronize remaining steps."""
        if self.done.step < self.config.steps:
            return report
        final = self.engine.finish(signals)
        reports = [part for part in (report, final) if part is not None]
        return merged(reports) if reports else None

    def end_round(self, report: RoundReport) -> dict[str, Any]:
        """Set `done.exit_reason` after a round; return its line of metrics, with a validation in process 0 if due."""
        loss = report.signals[LOSS]
        line: dict[str, Any] = {"step": self.done.step, "round": report.round, "train_loss": loss}
        for replica in self.replicas:
            replica.round_losses = []
        self.done.exit_reason = self._exit_reason(report)
        interval = self.config.evaluate_every
        due = interval and report.complete and report.round % interval == 0
        if self.lead and (due or self.done.exit_reason in (FINISHED, DIVERGED)):
            line |= _columns(self.validate())
        return line | {"inner_lr": inner_lr(self.config, self.done.step - 1)}

    def validate(self) -> Mapping[str, float]:
        """Evaluate the anchor on held-out data."""
        if self.validation is None:
            with self.engine.anchored():
                self.validation = self.replicas[0].evaluate()
        return self.validation

    def _exit_reason(self, report: RoundReport) -> str:
        """Return the state of the run after a round, the same on all processes."""
        bounded = report.signals[LOSS] <= self.loss_bound
        if report.not_finite or not (bounded and math.isfinite(report.pseudo_gradient_norm)):
            return DIVERGED
        if self.done.step == self.config.steps:
            return FINISHED
        return STOPPED if report.signals[STOP] else RUNNING

    def tokens(self) -> int:
        """Return the tokens trained on so far, over all replicas."""
        return self.done.step * self.config.replicas * self.compute.tokens

    def weights(self, config: RunConfig) -> bytes:
        """Return the evaluated weights (anchor and buffers) as a safetensors file of a run."""
        tensors = {name: value.contiguous().clone() for name, value in (self.engine.anchor | self._buffers()).items()}
        return safetensors.torch.save(tensors, metadata={"config": fingerprint(config)})

    def _buffers(self) -> dict[str, Tensor]:
        """Return the first replica's buffers that its state dict has, such as BatchNorm's statistics."""
        model = self.replicas[0].model
        names = model.state_dict().keys()
        return {name: buffer for name, buffer in model.named_buffers() if name in names}

    def outcome(self) -> dict[str, Any]:
        """Return the validation's numbers at the end of a run, after judging the last outer step by them."""
        validation = self.validate()
        if not validation["loss"] <= self.loss_bound:  # diverged in the last outer step
            self.done.exit_reason = DIVERGED
        return _columns(validation)

    def summary(self, restarts: int | None = None) -> dict[str, Any]:
        """Return the run in numbers, without its validation; `restarts` defaults to the engine's count."""
        done = self.done
        if restarts is None:
            optimizers = [fragment.outer for fragment in self.engine.fragments]
            restarts = sum(group.get("restarts", 0) for outer in optimizers for group in outer.param_groups)
        return {
            "tokens": self.tokens(),
            "seconds": done.seconds,
            "engine_share": done.engine_seconds / done.seconds if done.seconds else 0.0,
            "diverged": done.exit_reason == DIVERGED,
            "exit_reason": done.exit_reason,
            "steps": done.step,
            "rounds": self.engine.round,
            "restarts": restarts,
            "checksum": self.engine.checksum(),
            "execution": self.execution,
        }

    def environment(self) -> dict[str, Any]:
        """Return versions, machine, unit of the losses and data, for `env.json`."""
        data = dict(self.data)
        unit = data.pop("loss_unit", "")
        return environment(self.compute.device) | {"loss_unit": unit, "corpus": data}


@dataclasses.dataclass
class Progress:
    """Progress of a run; the plain numbers of a checkpoint."""

    step: int = 0
    recent_loss: float = 0.0
    """Sum of the training losses since the last line of `steps.jsonl`."""
    recent_losses: int = 0
    """Number of these losses."""
    seconds: float = 0.0
    engine_seconds: float = 0.0
    """Seconds in the engine: everything but forward, backward and inner optimizer."""
    exit_reason: str = RUNNING


def _check_needs(outer: Optimizer) -> None:
    """Refuse restart policies that need what training does not have."""
    needs: Collection[str] = getattr(outer, "needs", ())  # an optimizer of the user's own has none
    if missing := sorted({*needs} - MEASURED - {*FOR_POLICIES}):
        has = ", ".join([*sorted(MEASURED), *FOR_POLICIES])
        raise ValueError(
            f"--outer.restart: a policy needs {', '.join(missing)}, which training does not have; it has {has}"
        )


def _shared(config: RunConfig) -> dict[str, Any]:
    """List the values that must be the same in all processes; those of computing and of output may differ."""
    free = ("compute.", "device", "threads", "log_every", "checkpoint_every", "keep_checkpoints")
    return {f"--{path}": value for path, value in values_of(config).items() if not path.startswith(free)}


def _columns(validation: Mapping[str, float]) -> dict[str, float]:
    """Rename the numbers of an evaluation as in the logs and the summary."""
    return {"validation_loss" if name == "loss" else name: value for name, value in validation.items()}
