"""Training what a study's sweep lacks, stage after stage: what later stages hold may depend on earlier results."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from twophase.base.errors import RunError, UsageError
from twophase.base.files import write_atomic
from twophase.base.reading import read_json_object
from twophase.recipes.paper import Scale
from twophase.studies.policies import share_with_workers
from twophase.sweeps.grid import Sweep
from twophase.sweeps.run import TABLE, read_summaries, run_sweep
from twophase.sweeps.table import Row, read_rows, rows_of
from twophase.tasks.named import check

MEASURED = "measured.json"
"""Holds what a study has read off trained runs, by run id; plain JSON values."""


def train_in_stages(study: Any, scale: Scale, folder: Path, **options: Any) -> tuple[Any, ...]:
    """Train what a study's sweep lacks, measure, and go on as long as that adds cells.

    The folder takes the table and what was measured; `options` are those of `run_sweep`. Returned are the arguments of
    the study's `table`: the rows, the scale and, where it measures, what was measured.

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
        rows = _train_sweep(sweep, folder, **options)
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
    runs = {row.twin_of or row.run: row.state for row in rows}
    missing = sum(state == "missing" for state in runs.values())
    if missing:  # an answer from a part of its runs would be another one
        raise RunError(
            f"{missing} of the {len(runs)} runs of {sweep.name} have not ended, and no worker was started here. "
            f"Start some with `twophase sweep-worker --out {shlex.quote(str(folder))}`, and repeat the command when "
            "they are done"
        )
    return rows
