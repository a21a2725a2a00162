"""One DiLoCo run of a task, from top to bottom."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twophase.base.config import RunError, UsageError, fingerprint
from twophase.diloco.group import SingleProcess
from twophase.runs.folder import METRICS, ROUNDS, STEPS, RunFolder
from twophase.training import checkpoint
from twophase.training.config import RunConfig, check
from twophase.training.preflight import preflight
from twophase.training.session import in_agreement
from twophase.training.task import Task
from twophase.training.trainer import RUNNING, STOPPED, Progress, Trainer

_log = logging.getLogger("twophase")


def train(
    task: Task,
    config: RunConfig,
    folder: RunFolder,
    *,
    communicator: SingleProcess | None = None,
    on_round: Callable[[dict[str, Any]], None] = lambda _: None,
    on_step: Callable[[dict[str, Any]], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train, resuming from the folder's newest checkpoint, and write the run.

    Args:
        task: task to train.
        config: the run.
        folder: the run's folder, written by process 0.
        communicator: the processes that share the replicas; None means this one alone.
        on_round: function called with each round's line of metrics (in process 0).
        on_step: function called with each line of `steps.jsonl` (in process 0).
        should_stop: function called after every step (after every round with several processes). True writes a
            checkpoint and returns early with `exit_reason` "stopped" and no summary on disk.

    Returns:
        The summary: held-out numbers, tokens, seconds, diverged or not, exit reason.

    Raises:
        UsageError: an impossible configuration, corpus, device or checkpoint.
        RunError: the data is damaged, or the connection to the other processes is lost.
        OSError: the folder cannot be written, or the disk is full; nothing is lost since the newest checkpoint.
    """
    communicator = communicator or SingleProcess()
    check(config)
    preflight(config, task, communicator.size)
    run = Trainer(task, config, communicator)
    with in_agreement(run.comm), disk(folder):
        if run.lead:
            checkpoint.clean(folder.checkpoint_dir)
    _go(run, folder, on_round, on_step, should_stop)

    # The last checkpoint is complete now, on all processes.
    _check_data(run, folder)
    if not run.lead or run.done.exit_reason == STOPPED:
        return run.summary()
    # After the checkpoint and before the summary: a repeated command repeats a step interrupted here.
    summary, weights = run.outcome() | run.summary(), run.weights(config)
    with disk(folder):
        folder.write_weights(weights)
        folder.finish(summary)
    return summary


def _go(
    run: Trainer,
    folder: RunFolder,
    on_round: Callable[[dict[str, Any]], None],
    on_step: Callable[[dict[str, Any]], None],
    should_stop: Callable[[], bool],
) -> None:
    """Train to the end, or until `should_stop`, and write the last checkpoint; arguments as of `train`."""
    config = run.config
    _restore(run, folder)
    with in_agreement(run.comm), disk(folder):
        if run.lead:
            _write_env(run, folder)
    done = run.done
    before, started, first = done.seconds, time.perf_counter(), done.step
    saved: int | None = done.step

    def stopping() -> bool:
        return should_stop() or bool(run.data_fault())

    with checkpoint.Writer(
        folder.checkpoint_dir,
        fingerprint=fingerprint(config),
        keep=config.keep_checkpoints,
        communicator=run.comm,
        before=folder.sync_logs if run.lead else lambda: None,
    ) as writer:
        while done.step < config.steps and done.exit_reason == RUNNING:
            run.inner_step()
            if done.step == first + 1:  # at the first checkpoint an error would cost all steps
                run.check_states()
            report = run.synchronize(stopping)
            _log_step(run, folder, on_step)
            done.seconds = before + time.perf_counter() - started
            if report is None:
                if run.comm.size == 1 and stopping():
                    done.exit_reason = STOPPED
                continue
            line = run.end_round(report)
            if run.lead:
                with disk(folder):
                    folder.log(ROUNDS, {"step": done.step} | report.as_dict())
                    folder.log(METRICS, line)
                on_round(line | {"restarted": report.restarted, "seconds": done.seconds, "tokens": run.tokens()})
            due = report.complete and report.round % config.checkpoint_every == 0
            if done.exit_reason == RUNNING and due:
                _save(run, folder, writer)
                saved = done.step
            writer.poll()
        if saved != done.step:
            _save(run, folder, writer)


def _check_data(run: Trainer, folder: RunFolder) -> None:
    """End the run in all processes if the data of one process was damaged.

    Logs and checkpoints depend on that data: they are set aside, so that a repeated command starts from step 0.
    """
    faults = run.comm.gather_json(run.data_fault(wait=run.done.exit_reason != STOPPED))
    fault = next(filter(None, faults), "")
    if not fault:
        return
    aside = ""
    if run.lead:
        with disk(folder):
            aside = str(folder.set_aside("damaged-data"))
    aside = run.comm.gather_json(aside)[0]
    raise RunError(f"{fault}; {aside} keeps what rests on it, and the repeated command begins again")


def _write_env(run: Trainer, folder: RunFolder) -> None:
    """Record machine and data, after the check that a checkpoint has the same data; without one, start again."""
    folder.write_env(run.environment(), anew=checkpoint.latest(folder.checkpoint_dir) is None)


def _log_step(run: Trainer, folder: RunFolder, on_step: Callable[[dict[str, Any]], None]) -> None:
    """Write a line about the inner steps since the last one, if it is due."""
    line = run.step_line()
    if line is not None:
        with disk(folder):
            folder.log(STEPS, line)
        on_step(line)


def _restore(run: Trainer, folder: RunFolder) -> None:
    """Continue from the newest checkpoint of process 0, if it has one."""
    with in_agreement(run.comm):
        step = checkpoint.latest_step(folder.checkpoint_dir)
    step = run.comm.gather_json(step)[0]
    with in_agreement(run.comm):
        logs = {} if step is None else _read(run, checkpoint.path_of(folder.checkpoint_dir, step))
        if run.lead:
            with disk(folder):
                folder.rewind(logs, run.done.step)  # lines written after the checkpoint will be written again


def _read(run: Trainer, newest: Path) -> dict[str, Any]:
    """Load a checkpoint into a new run; return the log positions it recorded. Call no collective in here."""
    if run.comm.size > 1 and not newest.is_dir():
        raise UsageError(
            f"checkpoint {newest} is not in the folder that process {run.comm.rank} sees, and process 0 has it; "
            "choose an --out that all processes see"
        )
    saved = checkpoint.Checkpoint(newest, fingerprint(run.config))
    numbers = saved.progress()
    with saved.content("progress.json"):
        logs, text, execution = (numbers.pop(key) for key in ("logs", "text", "execution"))
        processes = numbers.pop("processes")
        done = Progress(**numbers)
    if text != run.data_fingerprint:
        raise UsageError(
            f"{run.compute.data_name}: its file or data is not the one that this run began with (fingerprint "
            f"{run.data_fingerprint[:12]}, at {newest} {text[:12]}). Put the old one back, or choose another --out"
        )
    _load(run, saved, processes)
    run.restore_execution(execution[run.comm.rank % len(execution)])
    run.done = done
    if run.done.exit_reason == STOPPED:
        run.done.exit_reason = RUNNING
    return logs


def _load(run: Trainer, saved: checkpoint.Checkpoint, processes: int) -> None:
    """Load a checkpoint's states into a new run."""
    state = saved.part(checkpoint.ENGINE)
    with saved.content(checkpoint.ENGINE):
        run.engine.load_state_dict(state)  # at a round's end it also sets the models
    residuals_file = checkpoint.residuals_file(run.comm.rank)
    # With other processes, the residuals belong to no process.
    if processes == run.comm.size and saved.holds(residuals_file):
        residuals = saved.part(residuals_file)
        with saved.content(residuals_file):
            run.engine.load_residuals(residuals)
    for replica in run.replicas:
        name = checkpoint.replica_file(replica.number)
        part = saved.part(name)
        with saved.content(name):
            replica.load_state_dict({"model": replica.model.state_dict()} | part)


def _save(run: Trainer, folder: RunFolder, writer: checkpoint.Writer) -> None:
    """Start to write a checkpoint of the present state."""
    run.settle()
    parts: dict[str, Any] = {}
    for replica in run.replicas:
        state = replica.state_dict()
        if run.engine.at_anchor and state["model"].keys() <= run.engine.anchor.keys():
            del state["model"]  # equal to the anchor, as usual at the end of a round
        parts[checkpoint.replica_file(replica.number)] = state
    engine, residuals = run.engine.state_dict(), run.engine.residuals()
    if run.lead:
        parts[checkpoint.ENGINE] = engine
    if residuals:
        parts[checkpoint.residuals_file(run.comm.rank)] = residuals
    progress = dataclasses.asdict(run.done) | {
        "logs": folder.position() if run.lead else {},
        "text": run.data_fingerprint,
        "execution": run.comm.gather_json(run.execution),  # each process may have its own choice
        "processes": run.comm.size,
    }
    writer.save(run.done.step, parts, progress)


@contextmanager
def disk(folder: RunFolder) -> Iterator[None]:
    """Name the file or folder that cannot be written, and the remedy."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename or folder.path)
        raise checkpoint.unwritable(path, "the run's files", error, folder.checkpoint_dir) from error
