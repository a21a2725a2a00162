"""Read a sweep's folder, finished or not: its table, or else its description and its runs' summaries."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError, flatten
from twophase.judge.verdict import select
from twophase.report.page import relative
from twophase.rule import FORM_WORDS
from twophase.runs.folder import list_some, read_summary
from twophase.sweep.grid import text_of
from twophase.sweep.run import SPEC, TABLE, read_summaries
from twophase.sweep.table import Row, State, read_rows
from twophase.sweep.work import RUNS, Work

REPORT = "report.html"
"""Name of a report in its run's or sweep's folder."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(slots=True)
class SweepRecord:
    """What a sweep's folder holds.

    Args:
        path: the folder.
        page_folder: where the page will lie, for its links.
        rows: a row a cell.
        problems: what is missing or wrong, a sentence each.
        forms: the forms of the outer rules that occur, in words.
    """

    path: Path
    page_folder: Path
    rows: list[Row]
    problems: list[str]
    forms: str

    @property
    def going(self) -> bool:
        """Whether some cell has no result yet."""
        return any(row.state == "missing" for row in self.rows)

    def run_folder(self, run: str) -> Path | None:
        """Return the folder of a run; None where there is none, or the name is no run's and might lead anywhere."""
        folder = self.path / RUNS / run
        return folder if _RUN_ID.fullmatch(run) and folder.is_dir() else None

    def page_of(self, run: str) -> str | None:
        """Return the path from the page to a run's own report, or to its folder; None where there is neither."""
        folder = self.run_folder(run)
        if folder is None:
            return None
        return relative(folder / REPORT if (folder / REPORT).is_file() else folder, self.page_folder)


def is_sweep(path: Path) -> bool:
    """Return whether a folder looks like that of a sweep."""
    return (path / SPEC).is_file() or (path / TABLE).is_file()


def read_sweep(path: Path, where: Mapping[str, str] | None = None, page_folder: Path | None = None) -> SweepRecord:
    """Read a sweep's folder, whatever state it is in.

    Args:
        path: the folder.
        where: only the cells with these values.
        page_folder: where the page will lie; None means the sweep's own folder.

    Raises:
        UsageError: a damaged file, neither a table nor a description, or no cell has these values.
    """
    problems: list[str] = []
    spec = _description(path)
    if not (path / SPEC).is_file():
        problems.append(f"{SPEC} is missing.")
    if "cells" in spec and not (path / TABLE).is_file():
        rows = _rows_of(spec, path)
        problems.append(f"{TABLE} is missing; the cells are from {SPEC} and the summaries of their runs.")
    else:
        rows = read_rows(path / TABLE)
    rows = select(rows, where or {})
    missing, failed = (sum(row.state == state for row in rows) for state in ("missing", "failed"))
    if missing:
        problems.append(f"{missing:,} of {len(rows):,} cells have no result yet; the sweep's command continues it.")
    if failed:
        problems.append(f"{failed:,} of {len(rows):,} cells could not be run.")
    problems += _lost_runs(path, rows)
    forms = {str(row.values["outer.form"]) for row in rows if "outer.form" in row.values}
    forms = forms or {str(flatten(spec.get("base", {})).get("outer.form", ""))}
    words = " and ".join(FORM_WORDS.get(form, "form unknown") for form in sorted(forms))
    return SweepRecord(path, page_folder or path, rows, problems, words)


def _description(path: Path) -> dict[str, Any]:
    """Return what `sweep.json` holds, or nothing where it is missing."""
    try:
        spec = json.loads((path / SPEC).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / SPEC}: is damaged ({error}); put it back, or move it out of the folder") from None
    return spec


def _lost_runs(path: Path, rows: Sequence[Row]) -> list[str]:
    """Name the runs that have a result in the table and no sound folder."""
    done = dict.fromkeys(row.twin_of or row.run for row in rows if row.state in ("finished", "diverged"))
    lost = [run for run in done if _RUN_ID.fullmatch(run) and read_summary(path / RUNS / run, run) is None]
    if not lost:
        return []
    names = list_some(lost, 3)
    return [f"Of {len(lost):,} of {len(done):,} runs with a result there is no sound folder below {RUNS}/: {names}."]


def _rows_of(spec: Mapping[str, Any], folder: Path) -> list[Row]:
    """Return a row a cell from the sweep's description and the summaries of its runs."""
    cells, base = spec["cells"], flatten(spec["base"])
    work = Work.read(folder)
    stands_for = work.stands_for if work is not None else {}
    summaries = read_summaries({stands_for.get(cell["run"], cell["run"]) for cell in cells}, folder)
    paths = dict.fromkeys(path for cell in cells for path in cell["values"])
    rows = []
    for cell in cells:
        values = {path: cell["values"].get(path, base.get(path)) for path in paths}
        values = {path: text_of(tuple(value)) if isinstance(value, list) else value for path, value in values.items()}
        twin = stands_for.get(cell["run"])
        done = summaries.get(twin or cell["run"])
        state: State = "missing" if done is None else "diverged" if done["diverged"] else "finished"
        numbers = (done["perplexity"], done["validation_loss"], done["seconds"]) if done else (None, None, None)
        rows.append(Row(cell["arm"], cell["run"], values, state, *numbers, cell["control_of"], twin))
    return rows
