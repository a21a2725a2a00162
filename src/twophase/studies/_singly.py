"""Training the cells of a study one by one, in this process or a few: no queue, for stages that follow one another.

Its runs are in fragments and share no steps, so a plan would save none of them.

Each run is one of `twophase train`, with its checkpoint, in the folder of runs that the studies share; a finished run
is not trained again, and a run that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twophase.base.files import write_atomic
from twophase.recipes.paper import Scale
from twophase.runs.folder import RunFolder, read_summary
from twophase.sweep.grid import Sweep
from twophase.sweep.run import TABLE, Happening, Status
from twophase.sweep.table import Row, rows_of, write_rows
from twophase.tasks.lm.config import TrainConfig

Progress = Callable[[Status], None]
Summaries = dict[str, dict[str, Any]]
MEASURED = "measured.json"
"""Holds what a study has read off trained runs, by run id; plain JSON values."""


def train_in_stages(
    study: Any, scale: Scale, folder: Path, *, runs: Path, workers: int = 1, progress: Progress | None = None
) -> tuple[list[Row], Scale, dict[str, Any]]:
    """Train what a study's sweep lacks, measure, and go on as long as that adds cells.

    Args:
        study: names the cells by `sweep` and reads trained runs by `measure`.
        scale: of the study.
        folder: takes the table of cells and what was measured.
        runs: folder of the runs, by run id.
        workers: processes that train.
        progress: called when a stage begins and whenever a run ends.

    Returns:
        The rows of the table, the scale, and what was measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        measured = json.loads((folder / MEASURED).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: it is measured again
        measured = {}
    rows: list[Row] = []
    while True:
        sweep = study.sweep(scale, rows, measured)
        summaries = _train(sweep, runs, workers, progress)
        rows = rows_of(sweep, summaries)
        write_rows(folder / TABLE, rows)
        measured = study.measure(scale, rows, runs, measured)
        write_atomic(folder / MEASURED, json.dumps(measured) + "\n")
        further = study.sweep(scale, rows, measured)
        if further.runs.keys() == sweep.runs.keys():
            return rows_of(further, summaries), scale, measured


def _train(sweep: Sweep, runs: Path, workers: int, progress: Progress | None) -> Summaries:
    """Train the runs that have not ended; return the summaries of all."""
    summaries = {run: summary for run in sweep.runs if (summary := read_summary(runs / run, run)) is not None}
    skipped, diverged = len(summaries), 0

    def report(event: Happening, run: str = "") -> None:
        if progress is not None:
            finished = len(summaries) - skipped - diverged
            progress(Status(len(sweep.runs), finished, diverged, 0, skipped, run, event))

    waiting = [(runs / run, config) for run, config in sweep.runs.items() if run not in summaries]
    if waiting:
        report("begun")
    with _crew(min(workers, len(waiting))) as train_each:
        for run, summary in train_each(waiting):
            summaries[run] = summary
            diverged += bool(summary["diverged"])
            report("diverged" if summary["diverged"] else "finished", run)
    return summaries


@contextmanager
def _crew(workers: int) -> Iterator[Callable[[Sequence[tuple[Path, TrainConfig]]], Iterator[tuple[str, Any]]]]:
    """Yield what trains runs: this process, or several; each trains one run at a time."""
    if workers <= 1:
        yield lambda waiting: map(_train_run, waiting)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with context.Pool(workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        yield lambda waiting: pool.imap_unordered(_train_run, waiting)


def _train_run(job: tuple[Path, TrainConfig]) -> tuple[str, dict[str, Any]]:
    from twophase.tasks.build import build_task  # noqa: PLC0415 - torch, which a list of studies does without
    from twophase.training.train import train  # noqa: PLC0415

    path, config = job
    with RunFolder.claim(path, config) as folder:
        return path.name, folder.summary() or train(build_task(config), config, folder)
