"""Runs in this process, stopped where a test wants it, and the files that they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forked import Program, places
from twophase.runs.folder import RunFolder
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training import checkpoint
from twophase.training.train import train


def run(config: TrainConfig, path: Path, **options: Any) -> dict[str, Any]:
    """Train in a folder; returns the summary without its times."""
    with RunFolder.claim(path, config) as folder:
        summary = train(LanguageTask(config), config, folder, **options)
    return {key: value for key, value in summary.items() if key not in ("seconds", "engine_share")}


def stop_after(calls: int) -> Callable[[], bool]:
    """Return a `should_stop` that answers yes from that call on."""
    count = iter(range(1, 10**6))
    return lambda: next(count) >= calls


def run_in_parts(config: TrainConfig, path: Path, stops: Sequence[int], **options: Any) -> dict[str, Any]:
    """Stop a run after each of these steps and resume it; `should_stop` is called once a step, except the last."""
    for stop in stops:
        start = checkpoint.latest_step(path / "checkpoint") or 0
        part = run(config, path, should_stop=stop_after(stop - start), **options)
        assert (part["exit_reason"], part["steps"]) == ("stopped", stop)
        assert checkpoint.latest_step(path / "checkpoint") == stop
    return run(config, path, **options)


def newest(path: Path) -> Path:
    """Return the newest checkpoint of a run."""
    folder = checkpoint.latest(path / "checkpoint")
    assert folder is not None
    return folder


def start_group(folder: Path, *words: Sequence[str | Path]) -> list[Program]:
    """Start a command in one process for each list of words; as under torchrun, they meet over the loopback."""
    return [
        Program(["-m", "twophase", *map(str, command)], folder / f"output-{rank}", folder / f"errors-{rank}", env)
        for rank, (command, env) in enumerate(zip(words, places(len(words)), strict=True))
    ]


def end_group(processes: Sequence[Program], folder: Path) -> list[tuple[int, str]]:
    """Wait for the processes of a group; returns the status and standard error of each."""
    statuses = [process.wait(120) for process in processes]
    return [(status, (folder / f"errors-{rank}").read_text()) for rank, status in enumerate(statuses)]
