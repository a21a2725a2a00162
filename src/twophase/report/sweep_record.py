"""Read a sweep's folder, finished or not: its table, or else its description and its runs' summaries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError, flatten
from twophase.judge.verdict import select
from twophase.report.labels import RUN_ID
from twophase.rule import FORM_WORDS
from twophase.runs.folder import CONFIG, METRICS, SUMMARY, list_some, read_summary
from twophase.sweep.run import SPEC, TABLE
from twophase.sweep.table import Row, State, read_rows
from twophase.sweep.work import PLAN, RUNS


@dataclass(slots=True)
class SweepRecord:
    """What a sweep's folder holds.

    Args:
        path: the folder.
        rows: a row a cell.
        problems: what is missing or wrong, a sentence each.
        forms: the forms of the outer rules that occur, in words.
    """

    path: Path
    rows: list[Row]
    problems: list[str]
    forms: str

    @property
    def going(self) -> bool:
        """Whether some cell has no result yet."""
        return any(row.state == "missing" for row in self.rows)


def is_sweep(path: Path) -> bool:
    """Return whether a folder looks like that of a sweep."""
    return (path / SPEC).is_file() or (path / TABLE).is_file()


def read_sweep(path: Path, where: Mapping[str, str] | None = None) -> SweepRecord:
    """Read a sweep's folder, whatever state it is in.

    Args:
        path: the folder.
        where: only the cells with these values.

    Raises:
        UsageError: neither its table nor its cells can be read, or no cell has these values.
    """
    problems: list[str] = []
    spec = _spec(path / SPEC, problems)
    try:
        rows = read_rows(path / TABLE)
    except UsageError as error:
        rows = _other_rows(spec, path, error, problems)
    rows = select(rows, where or {})
    missing, failed = (sum(row.state == state for row in rows) for state in ("missing", "failed"))
    if missing:
        problems.append(f"{missing:,} of {len(rows):,} cells have no result yet; the sweep's command continues it.")
    if failed:
        problems.append(f"{failed:,} of {len(rows):,} cells could not be run.")
    problems += _lost_runs(path, rows)
    forms = {str(row.values["outer.form"]) for row in rows if "outer.form" in row.values}
    base = flatten(spec["base"]) if spec and isinstance(spec.get("base"), Mapping) else {}
    forms |= set() if forms else {str(base.get("outer.form", ""))}
    words = " and ".join(FORM_WORDS.get(form, "form unknown") for form in sorted(forms))
    return SweepRecord(path, rows, problems, words)


def _spec(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{SPEC} is missing or damaged.")
        return None
    return value


def _other_rows(spec: Mapping[str, Any] | None, path: Path, fault: UsageError, problems: list[str]) -> list[Row]:
    """Return the cells from the sweep's description where its table cannot be read; without it, the fault stands."""
    what = f"is damaged ({fault})" if (path / TABLE).exists() else "is missing"
    stands_for = _stands_for(path / PLAN)
    designed = _rows_of(spec, path, stands_for or {})
    if designed is not None:
        problems.append(f"{TABLE} {what}; the cells are from {SPEC} and the summaries of their runs.")
        if stands_for is None and any(row.state == "missing" for row in designed):
            problems.append(
                f"{PLAN} is missing or damaged, so that cells which share the run of another one count as missing; the "
                "sweep's command writes it and the table again."
            )
        return designed
    raise fault


def _lost_runs(path: Path, rows: Sequence[Row]) -> list[str]:
    """Return a sentence each on runs with a result in the table and a folder that is gone, or lacks a sound file."""
    done = dict.fromkeys(row.twin_of or row.run for row in rows if row.state in ("finished", "diverged"))
    folders = [path / RUNS / run for run in done if RUN_ID.fullmatch(run)]
    gone = [folder.name for folder in folders if not folder.is_dir()]
    damaged = [folder.name for folder in folders if folder.is_dir() and not _sound(folder)]
    words = []
    for names, what in (
        (gone, f"is no folder below {RUNS}/, so that nothing leads to them"),
        (damaged, f"is no sound {SUMMARY}, {CONFIG} or {METRICS} in the folder"),
    ):
        if names:
            words.append(f"Of {len(names):,} of {len(done):,} runs with a result there {what}: {list_some(names, 3)}.")
    return words


def _sound(folder: Path) -> bool:
    """Return whether a run's folder has what its page begins with; neither its values nor its lines are read."""
    files = [folder / name for name in (CONFIG, METRICS)]
    return read_summary(folder, folder.name) is not None and all(
        file.is_file() and file.stat().st_size > 0 for file in files
    )


def _stands_for(path: Path) -> dict[str, str] | None:
    """Map the run id of a cell that is not run to that of the run done in its place; None without a sound plan."""
    try:
        twins = json.loads(path.read_text(encoding="utf-8"))["stands_for"]
        return {run: other for run, other in twins.items() if isinstance(other, str) and RUN_ID.fullmatch(other)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _rows_of(spec: Mapping[str, Any] | None, folder: Path, stands_for: Mapping[str, str]) -> list[Row] | None:
    """Return a row a cell from the sweep's description and the summaries of its runs; None without a description."""
    cells = spec.get("cells") if spec else None
    if not isinstance(cells, list):
        return None
    base = flatten(spec["base"]) if spec and isinstance(spec.get("base"), Mapping) else {}
    designed = [cell for cell in cells if isinstance(cell, dict) and isinstance(cell.get("values"), dict)]
    paths = list(dict.fromkeys(str(path) for cell in designed for path in cell["values"]))
    rows = []
    for cell in designed:
        run, of = str(cell.get("run", "")), cell.get("control_of")
        values = {path: _scalar(cell["values"].get(path, base.get(path))) for path in paths}
        twin = stands_for.get(run)
        done_as = run if twin is None else twin
        done = read_summary(folder / RUNS / done_as, done_as) if RUN_ID.fullmatch(done_as) else None
        state: State = "missing" if done is None else "diverged" if done["diverged"] else "finished"
        numbers = (done["perplexity"], done["validation_loss"], done["seconds"]) if done else (None, None, None)
        of = of if isinstance(of, str) else None
        rows.append(Row(str(cell.get("arm", "")), run, values, state, *numbers, of, twin))
    return rows or None


def _scalar(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
