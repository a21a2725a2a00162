"""A sweep's worker: trains the runs that it is handed, one after the other, in one process."""

from __future__ import annotations

import json
import queue
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from twophase.config import from_tree
from twophase.experiment.run import RunFolder
from twophase.lm.config import TrainConfig
from twophase.lm.train import train
from twophase.session import Stop, signals


def serve(jobs: TextIO, answers: TextIO) -> int:
    """Train the run of each line of JSON in `jobs` and answer with a line each, until the end or a signal.

    A run that was stopped gets no answer: it is not done, and whoever handed it out will see this process end.

    Returns:
        The exit status.
    """
    with signals() as stopped:
        for line in _lines_until_stop(jobs, stopped):
            job = json.loads(line)
            answer = _work(job, stopped)
            if answer is not None:
                print(json.dumps({"run": job["run"]} | answer), file=answers, flush=True)
    return 128 + stopped.number if stopped.number else 0


def _work(job: dict[str, Any], stopped: Stop) -> dict[str, str] | None:
    """Train one run; None when it was stopped, and so is not done."""
    try:
        config = from_tree(TrainConfig, job["config"])
        with RunFolder.claim(Path(job["folder"]), config) as folder:
            summary = folder.summary() or train(config, folder, should_stop=stopped.is_set)
    except Exception as error:  # one bad run must not take the others with it; the parent is told
        traceback.print_exc()
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    return None if summary["exit_reason"] == "stopped" else {"status": "finished"}


def _lines_until_stop(source: TextIO, stopped: Stop) -> Iterator[str]:
    """Lines of `source` as they come; its end means that the parent is gone or done, and stops a run under way."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in source:
            lines.put(line)
        stopped.set()

    threading.Thread(target=read, daemon=True).start()
    while not stopped.is_set():
        with suppress(queue.Empty):
            yield lines.get(timeout=0.1)  # wake up to see a signal: a blocking get would sleep through it
