"""The training loop of one run: resume, train, write, end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from twophase.errors import UsageError
from twophase.runs.folder import CHECKPOINTS, LOGS, METRICS, ROUNDS, STEPS, RunFolder
from twophase.training import checkpoint
from twophase.training.checkpoint import Checkpoint, Checkpointer, DamagedError
from twophase.training.distributed import environment, raised_on_all_ranks
from twophase.training.trainer import RUNNING, STOPPED, Trainer


def run(
    trainer: Trainer,
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
        trainer: the run on this rank.
        path: the run's folder.
        folder: the same as rank 0 has claimed it; None on the other ranks, which only write checkpoints.
        on_line: called on rank 0 with each line of metrics or steps.
        should_stop: asked after every step (with several ranks after every round); True writes a checkpoint and ends
            the run with `exit_reason` "stopped" and without a summary on disk.
        start: checkpoint of another run, from which this one forks if it has none of its own (`Trainer.load`).
        stop: inner step after which a checkpoint is written and the run ends as "stopped"; it is taken before the
            outer step of that inner step, in which forks begin to differ.
        discard: write no checkpoint at the end of a run that has ended.

    Returns:
        The summary: held-out numbers, tokens, seconds, diverged or not, exit reason.
    """
    checkpoint_dir = path / CHECKPOINTS
    _resume(trainer, checkpoint_dir, folder, start)
    done, config = trainer.done, trainer.config
    before, started, first = done.seconds, time.perf_counter(), done.step
    checkpoints = Checkpointer(checkpoint_dir, trainer.group, config.keep_checkpoints)
    saved = (done.step, trainer.engine.taken)
    while done.exit_reason == RUNNING and trainer.engine.taken < config.steps:
        if done.step == trainer.engine.taken:  # else a fork, whose first sync comes before its first inner step
            trainer.inner_step()
        if done.step == first + 1:  # at the first checkpoint an error would cost all steps
            checkpoint.check_plain([replica.inner.state_dict() for replica in trainer.replicas])
        done.seconds = before + time.perf_counter() - started
        if done.step == stop:
            done.exit_reason = STOPPED
            break
        report = trainer.synchronize(stop=should_stop())
        if folder and (line := trainer.step_line()):
            folder.log(STEPS, line)
            on_line(line)
        if report is None:
            done.exit_reason = STOPPED if trainer.group.size == 1 and should_stop() else RUNNING
            continue
        line = trainer.end_round(report)
        if folder is not None:
            folder.log(ROUNDS, {"step": done.step} | report.as_dict())
            folder.log(METRICS, line)
            rate = trainer.tokens / done.seconds if done.seconds else 0.0
            on_line(line | {"restarted": report.restarted, "tokens_per_second": rate})
        if done.exit_reason == RUNNING and report.complete and report.round % config.checkpoint_every == 0:
            checkpoints.save(done.step, trainer.parts(), trainer.progress())
            saved = (done.step, trainer.engine.taken)
    has_ended = done.exit_reason != STOPPED
    if saved != (done.step, trainer.engine.taken) and not (discard and has_ended):
        checkpoints.save(done.step, trainer.parts(), trainer.progress())
    checkpoints.close()
    summary = trainer.summary()
    if folder and has_ended:
        folder.finish(summary, trainer.weights())
    return summary


def _resume(trainer: Trainer, checkpoint_dir: Path, folder: RunFolder | None, start: Checkpoint | None) -> None:
    """Load the newest checkpoint that is sound on all ranks, and cut the logs back to it."""
    group = trainer.group
    while True:
        found = {saved.step: saved for saved in checkpoint.complete(checkpoint_dir)}
        step = group.gather_json(max(found, default=None))[0]
        if step is None:
            break
        fault, saved = "", found.get(step)
        with raised_on_all_ranks(group):
            if saved is None:
                raise UsageError(f"--out {checkpoint_dir.parent}: must be a folder that rank {group.rank} sees, too")
            try:
                trainer.load(saved)
            except DamagedError as error:
                fault = str(error)
        if not any(group.gather_json(fault)):
            break
        if folder and saved:
            checkpoint.set_aside(saved)
    if step is None and start is not None:
        with raised_on_all_ranks(group):
            trainer.load(start, fork=True)
            for log in LOGS if folder else ():  # a fork has its parent's past
                with suppress(FileNotFoundError):
                    shutil.copy(start.path.parents[1] / log, checkpoint_dir.parent / log)
    if folder:
        folder.truncate(trainer.engine.taken)  # of a fork the sync of its last inner step is still to come
        data = {"loss_unit": trainer.loss_unit, "corpus": trainer.data}
        folder.write_env(environment(trainer.compute.device) | data)
