"""Training what a study's sweep lacks, stage after stage: what later stages hold may depend on earlier results."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twophase.base.errors import RunError, UsageError
from twophase.base.files import write_atomic
from twophase.base.reading import read_json_object
from twophase.recipes.paper import Scale
from twophase.runs.folder import RunFolder, read_summary
from twophase.studies._so_far import run_counts
from twophase.studies.policies import share_with_workers
from twophase.sweep.grid import Sweep
from twophase.sweep.run import TABLE, Happening, Status, read_summaries, run_sweep
from twophase.sweep.table import Row, read_rows, rows_of, titles, write_rows
from twophase.tasks.lm.config import TrainConfig, check

Progress = Callable[[Status], None]
MEASURED = "measured.json"
"""Holds what a study has read off trained runs, by run id; plain JSON values."""


def train_in_stages(study: Any, scale: Scale, folder: Path, **options: Any) -> tuple[Any, ...]:
    """Train what a study's sweep lacks, measure, and go on as long as that adds cells.

    A finished run is not trained again, and a run that was stopped goes on from its checkpoint.

    Args:
        study: names the cells by `sweep`; one that also has `measure` reads trained runs by it.
        scale: of the study.
        folder: takes the table of cells and what was measured.
        options: `runs`, the folder of the runs, by run id; `workers` and `progress`, as for `studies.study.run`; and
            further ones of `run_sweep`.

    Returns:
        The arguments of the study's `table`: the rows, the scale and, where it measures, what was measured.

    Raises:
        UsageError: a run that is impossible here.
        RunError: runs that could not be trained, by name, or that have not ended.
    """
    chooses, measures = hasattr(study, "CHOOSES_RUNS"), hasattr(study, "measure")
    extra = (_read_measured(folder),) if measures else ()
    try:  # a folder that has reached a later stage belongs to the larger sweep
        rows = read_rows(folder / TABLE) if (folder / TABLE).is_file() else []
    except UsageError:  # damaged: it is written again from the runs
        first = study.sweep(scale, [], *extra) if chooses else study.sweep(scale)
        rows = rows_of(first, read_summaries(first.runs, folder))
    cells = 0
    while True:
        sweep = study.sweep(scale, rows, *extra) if chooses else study.sweep(scale)
        if len(sweep.cells) == cells:
            return rows, scale, *extra
        cells = len(sweep.cells)
        rows = (_train_singly if measures else _train_sweep)(sweep, folder, **options)
        if measures:
            extra = (study.measure(scale, rows, options["runs"], *extra),)
            write_atomic(folder / MEASURED, json.dumps(extra[0]) + "\n")


def _read_measured(folder: Path) -> dict[str, Any]:
    try:
        return read_json_object(folder / MEASURED)
    except (OSError, ValueError):  # none yet, or damaged: it is measured again
        return {}


def _train_sweep(sweep: Sweep, folder: Path, **options: Any) -> list[Row]:
    """Train what runs share once, in the workers of a sweep; return the rows of its table."""
    from twophase.tasks.build import preflight_all  # noqa: PLC0415 - torch, which the theory's studies do without

    for config in sweep.runs.values():
        check(config)
    texts = preflight_all(sweep.runs.values())  # refuse what cannot be run here before a folder is made for it
    share_with_workers()
    threads = max(config.threads for config in sweep.runs.values())
    outcome = run_sweep(sweep, folder, **({"threads": threads, "texts": texts} | options))
    if outcome.errors:
        reasons = "".join(f"\n  run {run}: {reason}" for run, reason in outcome.errors.items())
        raise RunError(
            f"{len(outcome.errors)} of the {len(sweep.runs)} runs of {sweep.name} could not be trained; "
            f"repeat the command to try them again:{reasons}"
        )
    rows = read_rows(folder / TABLE)
    missing = len({row.twin_of or row.run for row in rows if row.state == "missing"})
    if missing:  # an answer from a part of its runs would be another one
        raise RunError(
            f"{missing} of the {run_counts(rows)[1]} runs of {sweep.name} have not ended, and no worker was started "
            f"here; start some with `twophase sweep-worker --out {folder}`, and repeat the command when they are "
            "done (--so-far says what there is until then)"
        )
    return rows


def _train_singly(
    sweep: Sweep, folder: Path, *, runs: Path, workers: int = 1, progress: Progress | None = None
) -> list[Row]:
    """Train runs that share no steps (they are in fragments) as `twophase train` does, each with its checkpoint."""
    summaries = {run: summary for run in sweep.runs if (summary := read_summary(runs / run, run)) is not None}
    skipped, diverged, names = len(summaries), 0, titles(sweep)

    def report(event: Happening, run: str = "") -> None:
        if progress is not None:
            finished = len(summaries) - skipped - diverged
            perplexity = summaries.get(run, {}).get("perplexity")
            words = (run, event, "", names.get(run, ""), perplexity)
            progress(Status(len(sweep.runs), finished, diverged, 0, skipped, *words))

    waiting = [(runs / run, config) for run, config in sweep.runs.items() if run not in summaries]
    if waiting:
        report("begun")
    with _crew(min(workers, len(waiting))) as train_each:
        for run, summary in train_each(waiting):
            summaries[run] = summary
            diverged += bool(summary["diverged"])
            report("diverged" if summary["diverged"] else "finished", run)
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows_of(sweep, summaries)
    write_rows(folder / TABLE, rows)
    return rows


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
