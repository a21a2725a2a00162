"""One DiLoCo run of a small language model, from top to bottom."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from twophase.config import UsageError, fingerprint
from twophase.diloco.comm import Communicator, SingleProcess
from twophase.files import write_atomic
from twophase.lm import checkpoint
from twophase.lm.config import TrainConfig
from twophase.lm.trainer import RUNNING, STOPPED, Progress, Trainer, round_line


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
    run = Trainer(config, communicator or SingleProcess())
    if run.lead:
        folder.write_env(run.environment())
        checkpoint.clean(folder.checkpoint_dir)
    done = _restore(run, folder)
    before, started = done.seconds, time.perf_counter()

    while done.step < config.steps and done.exit_reason == RUNNING:
        run.inner_step()
        report = run.synchronize()
        done.seconds = before + time.perf_counter() - started
        if report is None:
            if run.comm.size == 1 and should_stop():
                done.exit_reason = STOPPED
            continue
        line = run.end_round(report, should_stop)
        if run.lead:
            folder.log_round(round_line(report, done.step))
            folder.log_metrics(line)
            on_round(line | {"restarted": report.restarted, "seconds": done.seconds, "tokens": run.tokens()})
        if done.exit_reason == RUNNING and report.round % config.checkpoint_every == 0:
            _save(run, folder)

    if checkpoint.latest_step(folder.checkpoint_dir) != done.step:
        _save(run, folder)
    if not run.lead or done.exit_reason == STOPPED:
        return run.summary()
    # After the checkpoint and before the summary: whatever is interrupted here is done again by a repeated command.
    summary = run.outcome() | run.summary()
    write_atomic(folder.weights, run.weights(config))
    folder.finish(summary)
    return summary


def _restore(run: Trainer, folder: Recorder) -> Progress:
    """Continue from the newest checkpoint, where there is one; process 0 says which that is."""
    newest = run.comm.gather(checkpoint.latest(folder.checkpoint_dir))[0]
    logs: dict[str, int] = {}
    if newest is not None:
        saved = checkpoint.Checkpoint(newest, fingerprint(run.config))
        run.engine.load_state_dict(saved.part("engine.pt"))
        for replica in run.replicas:
            replica.load_state_dict(saved.part(checkpoint.replica_file(replica.number)))
        numbers = saved.progress()
        logs, text = numbers.pop("logs"), numbers.pop("text")
        if text != run.text:
            raise UsageError(
                f"--data.corpus {run.config.data.corpus}: the text is not the one that this run began with "
                f"(fingerprint {run.text[:12]}, at {newest} {text[:12]}); put the old text back, or choose "
                "another --out"
            )
        run.done = Progress(**numbers)
        if run.done.exit_reason == STOPPED:
            run.done.exit_reason = RUNNING
        if not run.lead:
            run.done.round_loss = 0.0  # what was saved inside a round is a sum over all replicas; count it once
    if run.lead:
        folder.rewind(logs)  # lines written after the checkpoint will be written again
    return run.done


def _save(run: Trainer, folder: Recorder) -> None:
    """Write a checkpoint."""
    parts: dict[str, Any] = {checkpoint.replica_file(r.number): r.state_dict() for r in run.replicas}
    if run.lead:
        parts["engine.pt"] = run.engine.state_dict()
    checkpoint.save(
        folder.checkpoint_dir,
        run.done.step,
        parts,
        dataclasses.asdict(run.done) | {"logs": folder.position() if run.lead else {}, "text": run.text},
        fingerprint=fingerprint(run.config),
        keep=run.config.keep_checkpoints,
        communicator=run.comm,
    )
