"""`Trainer`: one run from its start or its newest checkpoint to its end, with the replicas and the engine."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import runpy
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.utils import deterministic

from twophase.config import fingerprint, flatten, to_tree
from twophase.diloco.engine import DiLoCo
from twophase.diloco.group import SingleProcess
from twophase.diloco.report import RoundReport, merged
from twophase.errors import UsageError
from twophase.optim.build import named_optimizer
from twophase.optim.names import TORCH
from twophase.optim.outer_sgd import COUNTERS, keep_types
from twophase.optim.schedules import Schedule, follow
from twophase.runs.config import OuterConfig, RunConfig, inner_lr, named_values
from twophase.runs.folder import CHECKPOINTS, LOGS, METRICS, ROUNDS, STEPS, RunFolder
from twophase.training import checkpoint
from twophase.training.checkpoint import ENGINE, Checkpoint, Checkpointer, DamagedError
from twophase.training.distributed import device_of, environment, peak_bytes, raised_on_all_ranks
from twophase.training.inner import Replica, hidden_matrices
from twophase.training.task import OwnTask, PlainStep, Step, Task

LOSS, STOP = "train_loss", "stop"
"""Signals that the ranks share at the end of a round. Restart policies may need the first, the mean training loss since
the last report, and `inner_lr`, the rate of the last step, and `progress`, the completed share of the run."""
RUNNING, STOPPED, FINISHED, DIVERGED = "running", "stopped", "finished", "diverged"
_MAY_DIFFER = ("compute.", "device", "threads", "log_every", "checkpoint_every", "keep_checkpoints")
"""Values that ranks may have of their own: how to compute, and what to write."""


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


def optimizers_of(outer: OuterConfig) -> Callable[..., Any]:
    """Return the function from named parameters to the torch optimizers of an outer method that is no rule."""
    if outer.method in TORCH:
        return partial(named_optimizer, method=outer.method, lr=outer.lr, momentum=outer.momentum)
    file, _, name = outer.method.rpartition(":")
    try:
        return runpy.run_path(file)[name]  # type: ignore[no-any-return]
    except Exception as error:  # of the file's own code
        raise UsageError(f"--outer.method {outer.method}: {type(error).__name__}: {error}") from error


class Trainer:
    """One run of a task on this rank.

    Attributes:
        replicas: this rank's replicas; the run's others are on other ranks.
        engine: the `DiLoCo` over them.
        done: how far the run is.
        compute: what computes losses and gradients; its `chosen` holds decisions that a resumed run repeats.

    Raises:
        UsageError: values that do not fit each other, the task, the device or the ranks.
    """

    def __init__(self, task: Task, config: RunConfig, group: SingleProcess) -> None:
        self.config, self.task, self.group = config, task, group
        self.done = Progress()
        self.validation: Mapping[str, float] | None = None
        """Held-out numbers of the present anchor, if it has been evaluated."""
        if config.replicas % group.size:
            raise UsageError(f"--replicas: must be a multiple of the {group.size} ranks, got {config.replicas}")
        device = device_of(config.device)
        torch.set_num_threads(config.threads)
        if device.type == "cuda":  # a CPU gives the same bits every time
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(config.deterministic)
            deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] - costs time
        if isinstance(task, OwnTask) and not task.is_shipped:
            task.check(device, config.seed)
        if not config.repeat and (check_data := getattr(task, "check_data", None)):
            check_data(config.steps)
        share = config.replicas // group.size
        own_step = getattr(task, "step", None)
        self.compute: Step = own_step(device, share, group) if own_step else PlainStep(task, device)
        self.data = dict(task.describe())
        self.loss_unit: str = self.data.pop("loss_unit", "")
        self.loss_bound: float = config.divergence_loss or self.compute.loss_bound
        self._losses: list[Tensor] = []
        self._last_line: tuple[int, float] | None = None  # step and time of the last line of steps.jsonl
        first = group.rank * share
        self.replicas = [Replica(config, number, task, self.compute) for number in range(first, first + share)]
        self.engine = self._engine()

    def _engine(self) -> DiLoCo:
        config, sync = self.config, self.config.sync
        shared = {f"--{path}": value for path, value in flatten(to_tree(config)).items()}
        shared = {path: value for path, value in shared.items() if not path[2:].startswith(_MAY_DIFFER)}
        try:
            engine = DiLoCo(
                [replica.model for replica in self.replicas],
                config.outer.rule() or optimizers_of(config.outer),
                restart=named_values("sync.restart", sync.restart) if sync.restart else config.outer.restart,
                filter=config.outer.filter,
                inner_steps=config.inner_steps,
                fragments=sync.parts,
                stagger=sync.stagger,
                delay=sync.delay,
                mixing=sync.mixing,
                compression=sync.compression,
                buffers="mean",
                group=self.group,
                expect_equal={"data": self.data["fingerprint"]} | shared,
            )
            if config.outer.schedule != "constant":
                for fragment in engine.fragments:
                    follow(fragment.outer, Schedule.parse(config.outer.schedule), config.rounds)
        # Fragments without parameters, a delay beyond the round, a schedule of AdamW's momentum, ranks that differ.
        except ValueError as error:
            text = re.sub("^DiLoCo: (delay|fragments) ", r"--sync.\1: ", str(error))
            raise UsageError(re.sub("^schedule ", "--outer.schedule: ", text)) from None
        return engine

    def run(
        self,
        path: Path,
        folder: RunFolder | None,
        *,
        on_line: Callable[[dict[str, Any]], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        start: Checkpoint | None = None,
        stop: int | None = None,
        discard: bool = False,
    ) -> dict[str, Any]:
        """Train to the end, from the folder's newest checkpoint, and write the run.

        Args:
            path: the run's folder.
            folder: the same as rank 0 has claimed it; None on the other ranks, which only write checkpoints.
            on_line: called on rank 0 with each line of metrics or steps.
            should_stop: asked after every step (with several ranks after every round); True writes a checkpoint and
                ends the run with `exit_reason` "stopped" and without a summary on disk.
            start: checkpoint of another run, from which this one forks if it has none of its own (`load`).
            stop: inner step after which a checkpoint is written and the run ends as "stopped"; it is taken before the
                outer step of that inner step, in which forks begin to differ.
            discard: write no checkpoint at the end of a run that has ended.

        Returns:
            The summary: held-out numbers, tokens, seconds, diverged or not, exit reason.
        """
        self._resume(path, folder, start)
        done, config, engine = self.done, self.config, self.engine
        before, started = done.seconds, time.perf_counter()
        checkpoints = Checkpointer(path / CHECKPOINTS, self.group, config.keep_checkpoints)
        saved = (done.step, engine.taken)
        while done.exit_reason == RUNNING and engine.taken < config.steps:
            if done.step == engine.taken:  # else a fork, whose first sync comes before its first inner step
                self.inner_step()
            done.seconds = before + time.perf_counter() - started
            if done.step == stop:
                done.exit_reason = STOPPED
                break
            report = self.synchronize(stop=should_stop())
            if folder and (line := self.step_line()):
                folder.log(STEPS, line)
                on_line(line)
            if report is None:
                done.exit_reason = STOPPED if self.group.size == 1 and should_stop() else RUNNING
                continue
            line = self.end_round(report)
            if folder:
                kept = {name: value for name, value in report.as_dict().items() if name != "signals"}  # how it stops
                folder.log(ROUNDS, {"step": done.step} | kept)
                folder.log(METRICS, line)
                rate = self.tokens / done.seconds if done.seconds else 0.0
                on_line(line | {"restarted": report.restarted, "tokens_per_second": rate})
            if done.exit_reason == RUNNING and report.complete and report.round % config.checkpoint_every == 0:
                checkpoints.save(done.step, self.parts(), self.progress())
                saved = (done.step, engine.taken)
        has_ended = done.exit_reason != STOPPED
        if saved != (done.step, engine.taken) and not (discard and has_ended):
            checkpoints.save(done.step, self.parts(), self.progress())
        checkpoints.close()
        summary = self.summary()
        if folder and has_ended:
            folder.finish(summary, self.weights())
        return summary

    def _resume(self, path: Path, folder: RunFolder | None, start: Checkpoint | None) -> None:
        """Load the newest checkpoint that is sound on all ranks, or fork, and cut the logs back to it."""
        step, fault = None, True
        while fault:
            found = {saved.step: saved for saved in checkpoint.complete(path / CHECKPOINTS)}
            step, fault = self.group.gather_json(max(found, default=None))[0], False
            if step is None:
                break
            with raised_on_all_ranks(self.group):
                if step not in found:
                    raise UsageError(f"--out {path}: must be a folder that rank {self.group.rank} sees, too")
                try:
                    self.load(found[step])
                except DamagedError:
                    fault = True
            fault = any(self.group.gather_json(fault))
            if fault and folder:
                checkpoint.set_aside(found[step])
        if step is None and start is not None:
            with raised_on_all_ranks(self.group):
                self.load(start, fork=True)
                for log in LOGS if folder else ():  # a fork has its parent's past
                    with suppress(FileNotFoundError):
                        shutil.copy(start.path.parents[1] / log, path / log)
        if folder:
            if any((path / log).exists() for log in LOGS):
                folder.truncate(self.engine.taken)  # of a fork the sync of its last inner step is still to come
            facts = {"hidden_matrices": len(hidden_matrices(self.replicas[0].model)), "corpus": self.data}
            folder.write_env(environment(self.compute.device) | {"loss_unit": self.loss_unit} | facts)

    def inner_step(self) -> None:
        """Take an inner step of every replica; nothing here waits for a GPU."""
        self._last_line = self._last_line or (self.done.step, time.perf_counter())
        lr = inner_lr(self.config, self.done.step)
        self._losses += [replica.step(self.done.step, lr) for replica in self.replicas]
        self.done.step += 1
        self.validation = None

    def synchronize(self, *, stop: bool = False) -> RoundReport | None:
        """Tell the engine that every replica has taken an inner step; the last round may be a shorter one.

        `stop` says that this rank was asked to stop: where a round ends, all ranks learn of it.
        """
        signals = None
        is_last = self.done.step == self.config.steps
        if is_last or self.engine.ending:
            self.read_losses()  # else the wait for the inner steps would count as the engine's time
            # Each replica's mean first: the same bits as with one rank a replica.
            means = [sum(losses) / len(losses) for replica in self.replicas if (losses := replica.round_losses)]
            signals = {
                LOSS: sum(means) / len(means) if means else 0.0,
                STOP: float(stop),
                "inner_lr": inner_lr(self.config, self.done.step - 1),
                "progress": self.done.step / self.config.steps,
            }
        clock = time.perf_counter()
        reports = [self.engine.step(signals), self.engine.finish(signals) if is_last else None]
        self.done.engine_seconds += time.perf_counter() - clock
        taken = list(filter(None, reports))
        return merged(taken) if taken else None

    def read_losses(self) -> None:
        """Read the losses on the device into `done`; this waits for the device."""
        if self._losses:
            for replica, loss in zip(itertools.cycle(self.replicas), torch.stack(self._losses).tolist(), strict=False):
                replica.round_losses.append(loss)
                self.done.recent_loss += loss
            self.done.recent_losses += len(self._losses)
            self._losses.clear()

    def end_round(self, report: RoundReport) -> dict[str, Any]:
        """Set `done.exit_reason` after a round; return its line of metrics, on rank 0 with a due validation."""
        for replica in self.replicas:
            replica.round_losses = []
        loss, done, interval = report.signals[LOSS], self.done, self.config.evaluate_every
        is_sound = loss <= self.loss_bound and math.isfinite(report.pseudo_gradient_norm)
        if not is_sound or any(group.not_finite for group in report.groups):
            done.exit_reason = DIVERGED
        elif done.step == self.config.steps:
            done.exit_reason = FINISHED
        elif report.signals[STOP]:
            done.exit_reason = STOPPED
        line: dict[str, Any] = {"step": done.step, "round": report.round, "train_loss": loss}
        due = interval and report.complete and report.round % interval == 0
        if self.group.rank == 0 and (due or done.exit_reason in (FINISHED, DIVERGED)):
            line = {**line, **self.validate(), **line}  # an evaluation may have numbers of the same names
        return line | {"inner_lr": inner_lr(self.config, done.step - 1)}

    def validate(self) -> Mapping[str, float]:
        """Evaluate the anchor on held-out data; `validation_loss` and what else the task measures."""
        if self.validation is None:
            with self.engine.anchored(), torch.no_grad():
                found = self.compute.evaluate(self.replicas[0].model)
            self.validation = {"validation_loss" if name == "loss" else name: value for name, value in found.items()}
        return self.validation

    def step_line(self) -> dict[str, Any] | None:
        """Return a line of `steps.jsonl` if one is due: this rank's mean loss and speed since the last one."""
        done, config = self.done, self.config
        if config.log_every == 0 or done.step % config.log_every:
            return None
        self.read_losses()  # before the clock is read: it waits for the device
        now = (done.step, time.perf_counter())
        # None in a fork whose first line comes before its first inner step.
        (step, clock), self._last_line = self._last_line or now, now
        loss = done.recent_loss / max(done.recent_losses, 1)
        done.recent_loss, done.recent_losses = 0.0, 0
        line = {"step": done.step, "train_loss": loss, "inner_lr": inner_lr(config, done.step - 1)}
        line |= self.compute.rates((done.step - step) * len(self.replicas), now[1] - clock)
        return line | {"peak_memory_bytes": peak_bytes(self.compute.device)}

    def parts(self) -> dict[str, Any]:
        """Return this rank's parts of a checkpoint, by name; the tensors are live."""
        self.read_losses()
        parts: dict[str, Any] = {}
        # Before a sync that the engine has not been told of, the replicas are a step ahead of it.
        at_anchor = self.engine.at_anchor and self.engine.taken == self.done.step
        for replica in self.replicas:
            state = {"inner": replica.inner.state_dict(), "round_losses": replica.round_losses}
            weights = replica.model.state_dict()
            if not (at_anchor and weights.keys() <= self.engine.anchor.keys()):
                state["model"] = weights  # else equal to the anchor, as usual at the end of a round
            parts[f"replica-{replica.number:03d}"] = state
        engine, residuals = self.engine.state_dict(), self.engine.residuals()  # both wait for an all-reduce
        if self.group.rank == 0:
            parts[ENGINE] = engine
        if residuals:
            parts[f"residuals-{self.group.rank:03d}"] = residuals
        return parts

    def progress(self) -> dict[str, Any]:
        """Return the plain numbers of a checkpoint."""
        return {
            "done": dataclasses.asdict(self.done),
            "chosen": self.compute.chosen,
            "ranks": self.group.size,
            "data": self.data["fingerprint"],
        }

    def load(self, saved: Checkpoint, *, fork: bool = False) -> None:
        """Continue from a checkpoint of this run, or, as a fork, from one of a run with another outer optimizer.

        A fork takes over all that has happened, and its own settings hold from here on. It equals the run alone, bit
        for bit, if both outer optimizers would have taken the same outer steps so far.

        Raises:
            DamagedError: a damaged file; nothing has changed.
            UsageError: other data than this run's.
        """
        if saved.progress["data"] != self.data["fingerprint"]:
            folder = saved.path.parents[1]
            raise UsageError(
                f"--out {folder}: the data or the task have changed since the run began; give another --out"
            )
        residuals = f"residuals-{self.group.rank:03d}"
        names = [ENGINE, *(f"replica-{replica.number:03d}" for replica in self.replicas)]
        saved.verify(names + [residuals] * (f"{residuals}.pt" in saved.files))  # before anything has changed
        state = saved.part(ENGINE)
        if fork:
            for fragment, of_saved in zip(self.engine.fragments, state["fragments"], strict=True):
                own = fragment.outer.state_dict()
                if of_saved["round"] == 0:  # no outer step yet, so that any optimizer can go on
                    of_saved["outer"] = own
                for group, mine in zip(of_saved["outer"]["param_groups"], own["param_groups"], strict=True):
                    counted = (*COUNTERS, "policy_state")
                    group.update({key: value for key, value in mine.items() if key not in counted})
            state["spec"].pop("outer", None)
        self.engine.load_state_dict(state)
        # With another number of ranks, what was owed belongs to no rank.
        owed = saved.progress["ranks"] == self.group.size and f"{residuals}.pt" in saved.files
        self.engine.load_residuals(saved.part(residuals) if owed else {})
        for replica, name in zip(self.replicas, names[1:], strict=True):
            of_replica = saved.part(name)
            replica.model.load_state_dict(of_replica.get("model", replica.model.state_dict()))
            replica.inner.load_state_dict(of_replica["inner"])
            keep_types(replica.inner, of_replica["inner"])
            replica.round_losses = of_replica["round_losses"]
        self.compute.chosen = dict(saved.progress["chosen"])
        self.done, self._losses = Progress(**saved.progress["done"]), []
        self.done.exit_reason = RUNNING if self.done.exit_reason == STOPPED else self.done.exit_reason

    @property
    def tokens(self) -> int:
        """Tokens trained on so far, over all replicas."""
        return self.done.step * self.config.replicas * self.compute.tokens

    def weights(self) -> bytes:
        """Return the evaluated weights (anchor and saved buffers) as a safetensors file."""
        model = self.replicas[0].model
        names = model.state_dict().keys()
        tensors = self.engine.anchor | {name: buffer for name, buffer in model.named_buffers() if name in names}
        tensors = {name: value.contiguous().clone() for name, value in tensors.items()}
        return safetensors.torch.save(tensors, metadata={"config": fingerprint(self.config)})

    def summary(self) -> dict[str, Any]:
        """Return the run in numbers; at its end with the held-out numbers, which may show that it has diverged."""
        done = self.done
        validation: Mapping[str, Any] = {}
        if done.exit_reason in (FINISHED, DIVERGED) and self.group.rank == 0:
            validation = self.validate()
            if not validation["validation_loss"] <= self.loss_bound:  # in the last outer step
                done.exit_reason = DIVERGED
        groups = [group for fragment in self.engine.fragments for group in fragment.outer.param_groups]
        return {
            **validation,
            "tokens": self.tokens,
            "seconds": done.seconds,
            "engine_share": done.engine_seconds / done.seconds if done.seconds else 0.0,
            "diverged": done.exit_reason == DIVERGED,
            "exit_reason": done.exit_reason,
            "steps": done.step,
            "rounds": self.engine.round,
            "restarts": sum(group.get("restarts", 0) for group in groups),
            "checksum": self.engine.checksum(),
            "execution": dict(self.compute.chosen),
        }
