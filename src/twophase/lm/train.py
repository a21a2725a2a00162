"""One DiLoCo run of a small language model, from top to bottom."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor

import twophase
from twophase.config import UsageError, fingerprint
from twophase.diloco.comm import Communicator, SingleProcess
from twophase.diloco.engine import DiLoCo, RoundReport
from twophase.files import write_atomic
from twophase.lm import checkpoint
from twophase.lm.config import TrainConfig, check
from twophase.lm.corpus import Corpus, build
from twophase.lm.evaluate import Evaluation, evaluate
from twophase.lm.model import Llama

RUNNING, STOPPED, FINISHED, DIVERGED = "running", "stopped", "finished", "diverged"


class Recorder(Protocol):
    """Where a run is written: a folder in the file system, or nowhere (processes other than the first)."""

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of the checkpoints, seen by all processes."""
        ...

    @property
    def weights(self) -> Path:
        """The file of the final weights."""
        ...

    def write_env(self, env: dict[str, Any], /) -> None:
        """Record machine, versions and corpus."""

    def log_metrics(self, line: dict[str, Any], /) -> None:
        """Append a line of losses."""

    def log_round(self, line: dict[str, Any], /) -> None:
        """Append a line about the outer step."""

    def position(self) -> dict[str, int]:
        """How far the two logs go."""
        ...

    def rewind(self, position: dict[str, int], /) -> None:
        """Cut both logs back to a position."""

    def finish(self, summary: dict[str, Any], /) -> None:
        """Declare the run finished."""


def train(
    config: TrainConfig,
    folder: Recorder,
    *,
    communicator: Communicator | None = None,
    on_round: Callable[[dict[str, Any]], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train, resuming from the folder's newest checkpoint, and write the run.

    Args:
        config: the run.
        folder: where it is written; process 0's counts.
        communicator: the processes that share the replicas; None means this one alone.
        on_round: called with each round's line of metrics (in process 0).
        should_stop: asked after every step (after every round with several processes); true writes a checkpoint and
            returns early with `exit_reason` "stopped" and no summary on disk.

    Returns:
        The summary: validation loss and perplexity, tokens, seconds, diverged or not, exit reason.

    Raises:
        UsageError: an impossible configuration, corpus, device or checkpoint.
    """
    run = _Run(config, folder, communicator or SingleProcess())
    done = run.restore()
    before, started = done.seconds, time.perf_counter()
    validation: Evaluation | None = None

    while done.step < config.steps and done.exit_reason == RUNNING:
        lr = inner_lr(config, done.step)
        for replica in run.replicas:
            done.round_loss += replica.step(done.step, lr)
        done.step += 1
        report = run.synchronize()
        done.seconds = before + time.perf_counter() - started
        if report is None:
            if run.comm.size == 1 and should_stop():
                done.exit_reason = STOPPED
            continue

        line: dict[str, Any] = {"step": done.step, "round": report.round, "train_loss": run.mean_loss(report)}
        done.round_loss = 0.0
        done.exit_reason = run.exit_reason(report, line["train_loss"], should_stop)
        due = config.evaluate_every and report.round % config.evaluate_every == 0
        if run.lead:
            if due or done.exit_reason in (FINISHED, DIVERGED):
                validation = run.replicas[0].evaluate()  # after a round every replica is the anchor
                line |= _fields(validation)
            folder.log_round(_round_line(report, done.step))
            folder.log_metrics(line | {"inner_lr": lr})
            on_round(line | {"restarted": report.restarted, "seconds": done.seconds, "tokens": run.tokens()})
        if done.exit_reason == RUNNING and report.round % config.checkpoint_every == 0:
            run.save()

    if checkpoint.latest_step(folder.checkpoint_dir) != done.step:
        run.save()
    if not run.lead or done.exit_reason == STOPPED:
        return run.summary()
    # After the checkpoint and before the summary: whatever is interrupted here is done again by a repeated command.
    validation = validation or run.replicas[0].evaluate()
    if not validation.loss <= config.loss_bound:  # blown up by the very last outer step
        done.exit_reason = DIVERGED
    summary = _fields(validation) | run.summary()
    write_atomic(folder.weights, run.weights())
    folder.finish(summary)
    return summary


class _Run:
    """The parts of a run and what is done with all of them together."""

    def __init__(self, config: TrainConfig, folder: Recorder, comm: Communicator) -> None:
        self.config = config
        self.folder = folder
        self.comm = comm
        self.lead = comm.rank == 0
        self.done = Progress()
        corpus, device = preflight(config, comm.size)
        self.text: str = corpus.description["fingerprint"]
        if len(set(comm.gather(self.text))) > 1:
            raise UsageError(
                f"--data.corpus {config.data.corpus}: the processes see different texts; give all the same"
            )
        torch.set_num_threads(config.threads)
        share = config.replicas // comm.size
        numbers = range(comm.rank * share, (comm.rank + 1) * share)
        self.replicas = [Replica(config, number, corpus, device) for number in numbers]
        self.engine = DiLoCo(
            [replica.model for replica in self.replicas],
            config.outer.rule(),
            restart=config.outer.policy(),
            inner_steps=config.inner_steps,
            communicator=comm,
        )
        if self.lead:
            folder.write_env(_environment(corpus))
            checkpoint.clean(folder.checkpoint_dir)

    def synchronize(self) -> RoundReport | None:
        """Tell the engine that every replica has taken an inner step; the last round may be a shorter one."""
        clock = time.perf_counter()
        report = self.engine.step()
        if self.done.step == self.config.steps:
            report = report or self.engine.finish()
        self.done.engine_seconds += time.perf_counter() - clock
        return report

    def mean_loss(self, report: RoundReport) -> float:
        """Mean training loss of the round over all replicas and inner steps, nats a token."""
        total = torch.tensor([self.done.round_loss], dtype=torch.float64)
        self.comm.launch_sum(total).wait()
        return total.item() / (report.inner_steps * report.replicas)

    def exit_reason(self, report: RoundReport, loss: float, should_stop: Callable[[], bool]) -> str:
        """How the run stands after a round with this training loss; the same on all processes."""
        # A NaN is not <= anything.
        if not (loss <= self.config.loss_bound and math.isfinite(report.pseudo_gradient_norm)):
            return DIVERGED
        if self.done.step == self.config.steps:
            return FINISHED
        return STOPPED if any(self.comm.gather(should_stop())) else RUNNING

    def restore(self) -> Progress:
        """Continue from the newest checkpoint, where there is one; process 0 says which that is."""
        newest = self.comm.gather(checkpoint.latest(self.folder.checkpoint_dir))[0]
        logs: dict[str, int] = {}
        if newest is not None:
            saved = checkpoint.Checkpoint(newest, fingerprint(self.config))
            self.engine.load_state_dict(saved.part("engine.pt"))
            for replica in self.replicas:
                replica.load_state_dict(saved.part(checkpoint.replica_file(replica.number)))
            numbers = saved.progress()
            logs, text = numbers.pop("logs"), numbers.pop("text")
            if text != self.text:
                raise UsageError(
                    f"--data.corpus {self.config.data.corpus}: the text is not the one that this run began with "
                    f"(fingerprint {self.text[:12]}, at {newest} {text[:12]}); put the old text back, or choose "
                    "another --out"
                )
            self.done = Progress(**numbers)
            if self.done.exit_reason == STOPPED:
                self.done.exit_reason = RUNNING
            if not self.lead:
                self.done.round_loss = 0.0  # what was saved inside a round is a sum over all replicas; count it once
        if self.lead:
            self.folder.rewind(logs)  # lines written after the checkpoint will be written again
        return self.done

    def save(self) -> None:
        """Write a checkpoint."""
        parts: dict[str, Any] = {checkpoint.replica_file(r.number): r.state_dict() for r in self.replicas}
        if self.lead:
            parts["engine.pt"] = self.engine.state_dict()
        checkpoint.save(
            self.folder.checkpoint_dir,
            self.done.step,
            parts,
            dataclasses.asdict(self.done) | {"logs": self.folder.position() if self.lead else {}, "text": self.text},
            fingerprint=fingerprint(self.config),
            keep=self.config.keep_checkpoints,
            communicator=self.comm,
        )

    def tokens(self) -> int:
        """Tokens trained on so far, over all replicas."""
        data = self.config.data
        return self.done.step * self.config.replicas * data.batch_size * data.sequence_length

    def weights(self) -> bytes:
        """The anchor as a safetensors file."""
        tensors = {name: view.contiguous().clone() for name, view in self.engine.anchor.items()}
        return safetensors.torch.save(tensors, metadata={"config": fingerprint(self.config)})

    def summary(self) -> dict[str, Any]:
        """The run in numbers, less its validation."""
        done = self.done
        return {
            "tokens": self.tokens(),
            "seconds": done.seconds,
            "engine_share": done.engine_seconds / done.seconds if done.seconds else 0.0,
            "diverged": done.exit_reason == DIVERGED,
            "exit_reason": done.exit_reason,
            "steps": done.step,
            "rounds": self.engine.round,
            "restarts": sum(group["restarts"] for group in self.engine.outer.param_groups),
            "checksum": self.engine.checksum(),
        }


class Replica:
    """One replica: a model, its own inner AdamW, which persists over rounds, and its own part of the text."""

    def __init__(self, config: TrainConfig, number: int, corpus: Corpus, device: torch.device) -> None:
        self.config = config
        self.number = number
        self.corpus = corpus
        self.device = device
        self.model = Llama(config.model, config.vocabulary_size, seed=config.seed).to(device)
        self.inner = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.inner.lr,
            betas=config.inner.betas,
            weight_decay=config.inner.weight_decay,
            fused=True,
        )

    def step(self, step: int, lr: float) -> float:
        """One inner step; returns the training loss in nats a token."""
        tokens, targets = self.corpus.batch(self.config.seed, step, self.number)
        loss = self.model.loss(self._tensor(tokens), self._tensor(targets))
        loss.backward()
        if self.config.inner.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.inner.clip_norm)
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()
        self.inner.zero_grad()
        return loss.item()

    def evaluate(self) -> Evaluation:
        """Loss and perplexity on the held-out documents."""
        tokens, targets = self.corpus.validation()
        token_bytes = self.corpus.vocabulary.token_bytes
        return evaluate(self.model, self._tensor(tokens), self._tensor(targets), token_bytes, batch=64)

    def state_dict(self) -> dict[str, Any]:
        """Model and inner optimizer."""
        return {"model": self.model.state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])

    def _tensor(self, ids: Any) -> Tensor:
        return torch.from_numpy(ids).to(self.device)


@dataclasses.dataclass
class Progress:
    """How far a run is; the plain numbers of a checkpoint."""

    step: int = 0
    round_loss: float = 0.0
    """Sum of this process's training losses in the unfinished round."""
    seconds: float = 0.0
    engine_seconds: float = 0.0
    """Time spent in the engine: everything that is not forward, backward and inner optimizer."""
    exit_reason: str = RUNNING


def inner_lr(config: TrainConfig, step: int) -> float:
    """Inner learning rate at an inner step, counted from 0: linear warmup, then cosine decay to 0 at the end.

    `lr (t + 1) / w` for t < w = warmup x steps, then `lr (1 + cos(pi (t - w) / (steps - w))) / 2`.
    """
    warmup = round(config.inner.warmup * config.steps)
    if step < warmup:
        return config.inner.lr * (step + 1) / warmup
    return config.inner.lr * (1 + math.cos(math.pi * (step - warmup) / max(config.steps - warmup, 1))) / 2


_corpus = lru_cache(maxsize=2)(build)  # a sweep's worker trains many runs on the same text


def preflight(config: TrainConfig, processes: int = 1) -> tuple[Corpus, torch.device]:
    """Everything about a run that can be refused before a folder is made for it.

    Args:
        config: the run.
        processes: how many share its replicas.

    Returns:
        The corpus and the device.

    Raises:
        UsageError: an impossible value, corpus or device, or replicas that the processes cannot share.
    """
    check(config)
    if config.replicas % processes:
        raise UsageError(
            f"--replicas is {config.replicas} and there are {processes} processes; replicas must be a multiple of the "
            f"processes, for example --replicas {processes}"
        )
    try:
        device = torch.device(config.device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {config.device} cannot be used here ({reason}); use --device cpu") from None
    return _corpus(config.data, config.replicas), device


def _fields(validation: Evaluation) -> dict[str, float]:
    return {
        "validation_loss": validation.loss,
        "perplexity": validation.perplexity,
        "perplexity_per_byte": validation.perplexity_per_byte,
    }


def _round_line(report: RoundReport, step: int) -> dict[str, Any]:
    totals = {"buffer_norm": report.buffer_norm, "cosine": report.cosine, "gain": report.gain}
    return {"step": step} | dataclasses.asdict(report) | totals


def _environment(corpus: Corpus) -> dict[str, Any]:
    return {
        "twophase": twophase.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "command": sys.argv,
        "corpus": corpus.description,
    }
