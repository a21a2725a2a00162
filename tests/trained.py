"""Runs in this process, stopped where a test wants it, and ranks that a test starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forked import Program, places
from twophase.diloco.group import SingleProcess
from twophase.runs.config import RunConfig
from twophase.runs.folder import RunFolder
from twophase.tasks.registry import task_of
from twophase.training import checkpoint
from twophase.training.trainer import Trainer

ALONE = SingleProcess()


def trainer_of(config: RunConfig, task: Any = None, group: SingleProcess = ALONE) -> Trainer:
    return Trainer(task or task_of(config), config, group)


def run(
    config: RunConfig,
    path: Path,
    task: Any = None,
    group: SingleProcess = ALONE,
    *,
    asked_at: int = sys.maxsize,
    **options: Any,
) -> dict[str, Any]:
    """Train in a folder, asked to stop from an inner step on; returns the summary without its times."""
    folder = RunFolder.claim(path, config) if group.rank == 0 else None
    try:
        trainer = trainer_of(config, task, group)
        summary = trainer.run(path, folder, should_stop=lambda: trainer.done.step >= asked_at, **options)
    finally:
        if folder:
            folder.release()
    return {key: value for key, value in summary.items() if key not in ("seconds", "engine_share")}


def weightless_bytes(found: dict[str, Any]) -> dict[str, Any]:
    """Return an outcome without what is sent, which one process does not."""
    rounds = [{key: value for key, value in line.items() if key != "bytes_sent"} for line in found["rounds"]]
    return found | {"rounds": rounds}


def newest(path: Path) -> checkpoint.Checkpoint:
    found = checkpoint.latest(path / "checkpoint")
    assert found is not None
    return found


def start_group(folder: Path, *words: Sequence[str | Path]) -> list[Program]:
    """Start a command in one process for each list of words; as under torchrun, they meet over the loopback."""
    return [
        Program(["-m", "twophase", *map(str, command)], folder / f"output-{rank}", folder / f"errors-{rank}", env)
        for rank, (command, env) in enumerate(zip(words, places(len(words)), strict=True))
    ]


def end_group(processes: Sequence[Program], folder: Path) -> list[tuple[int, str]]:
    """Wait for the processes of a group; returns the status and standard error of each."""
    try:
        statuses = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(status, (folder / f"errors-{rank}").read_text()) for rank, status in enumerate(statuses)]
