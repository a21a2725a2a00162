"""Training the cells of a study one by one, in this process or a few: no queue, for stages that follow one another.

Its runs are in fragments and share no steps, so a plan would save none of them.

Each run is one of `twophase train`, with its checkpoint, in the folder of runs that the studies share; whatever is
finished is not trained again, and a run that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from twophase.base.files import write_atomic
from twophase.recipes.paper import Scale
from twophase.runs.folder import RunFolder, read_summary
from twophase.sweep.grid import Sweep
from twophase.sweep.run import TABLE, Happening, Status
from twophase.sweep.table import Row, rows_of, write_rows
from twophase.tasks.lm.config import TrainConfig

Progress = Callable[[Status], None]
Measured = dict[str, Any]
"""What a study has read off trained runs, by run id; plain JSON values."""
MEASURED = "measured.json"


class Staged(Protocol):
    """A study whose later cells depend on what it measures in runs of the earlier ones."""

    def sweep(self, scale: Scale, rows: Sequence[Row], measured: Mapping[str, Any]) -> Sweep:
        """The cells that can be known."""
        ...

    def measure(self, scale: Scale, rows: Sequence[Row], runs: Path, known: Mapping[str, Any]) -> Measured:
        """What is known by now, with what the runs that have ended add to it."""
        ...


def train_in_stages(
    study: Staged, scale: Scale, folder: Path, *, runs: Path, workers: int = 1, progress: Progress | None = None
) -> tuple[list[Row], Measured]:
    """Train what a study's sweep lacks, measure, and go on as long as that adds cells.

    Args:
        study: names the cells and measures.
        scale: of the study.
        folder: takes the table of cells and what was measured.
        runs: folder of the runs, by run id.
        workers: processes that train.
        progress: called when a stage begins and whenever a run ends.

    Returns:
        The rows of the table, and what was measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    measured = _read(folder / MEASURED)
    rows: list[Row] = []
    while True:
        sweep = study.sweep(scale, rows, measured)
        rows = _train(sweep, runs, workers, progress)
        write_rows(folder / TABLE, rows)
        measured = study.measure(scale, rows, runs, measured)
        write_atomic(folder / MEASURED, json.dumps(measured) + "\n")
        if study.sweep(scale, rows, measured).runs.keys() == sweep.runs.keys():
            return rows_of(study.sweep(scale, rows, measured), _summaries(sweep, runs)), measured


def _read(path: Path) -> Measured:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: it is measured again
        return {}
    return found if isinstance(found, dict) else {}


def _summaries(sweep: Sweep, runs: Path) -> dict[str, dict[str, Any]]:
    found = {run: read_summary(runs / run, run) for run in sweep.runs}
    return {run: summary for run, summary in found.items() if summary is not None}


def _train(sweep: Sweep, runs: Path, workers: int, progress: Progress | None) -> list[Row]:
    done = _summaries(sweep, runs)
    skipped, began, diverged = len(done), time.monotonic(), 0

    def tell(event: Happening, run: str = "") -> None:
        if progress is not None:
            ended = len(done) - skipped - diverged
            seconds = time.monotonic() - began
            progress(Status(len(sweep.runs), ended, diverged, 0, skipped, seconds, run, event, ""))

    waiting = [(runs / run, config) for run, config in sweep.runs.items() if run not in done]
    if waiting:
        tell("begun")
    with _crew(min(workers, len(waiting))) as each:
        for run, summary in each(waiting):
            done[run] = summary
            diverged += bool(summary["diverged"])
            tell("diverged" if summary["diverged"] else "finished", run)
    return rows_of(sweep, done)


@contextmanager
def _crew(workers: int) -> Iterator[Callable[[Sequence[tuple[Path, TrainConfig]]], Iterator[tuple[str, Any]]]]:
    """This process, or several; each trains one run at a time."""
    if workers <= 1:
        yield lambda waiting: map(_one, waiting)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with context.Pool(workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        yield lambda waiting: pool.imap_unordered(_one, waiting)


def _one(job: tuple[Path, TrainConfig]) -> tuple[str, dict[str, Any]]:
    from twophase.tasks.build import build_task  # noqa: PLC0415 - torch, which a list of studies does without
    from twophase.training.train import train  # noqa: PLC0415

    path, config = job
    with RunFolder.claim(path, config) as folder:
        known = folder.summary()
        return path.name, known if known is not None else train(build_task(config), config, folder)
