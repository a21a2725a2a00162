"""Read a sweep's folder, finished or not: its table, and what it says of the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.config import flatten
from twophase.errors import UsageError
from twophase.judge.verdict import select
from twophase.report.page import relative
from twophase.rule import FORM_WORDS
from twophase.runs.folder import REPORT, RUN_ID, SUMMARY, read_summary
from twophase.sweeps.grid import RUNS, SPEC
from twophase.sweeps.table import TABLE, Row, perplexity_of, read_rows


@dataclass(slots=True)
class SweepRecord:
    """Content of a sweep's folder.

    Args:
        path: the folder.
        page_folder: folder of the page, for its links.
        rows: a row a cell.
        problems: missing or damaged parts, a sentence each.
        forms: the forms of the outer rules that occur, in words.
        part: sentence that names a part of the sweep; else empty.
    """

    path: Path
    page_folder: Path
    rows: list[Row]
    problems: list[str]
    forms: str
    part: str = ""

    @property
    def going(self) -> bool:
        """True if a cell has no result yet."""
        return any(row.state == "missing" for row in self.rows)

    def run_folder(self, run: str) -> Path | None:
        """Return the folder of a run; None without one, or for an unsafe name."""
        folder = self.path / RUNS / run
        return folder if RUN_ID.fullmatch(run) and folder.is_dir() and not folder.is_symlink() else None

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
    """Read a sweep's folder, in any state.

    Args:
        path: the folder.
        where: only the cells with these values.
        page_folder: folder of the page; None means the sweep's folder.

    Raises:
        UsageError: no table, a damaged file, other results in the table than in the runs' folders, or no such cell.
    """
    described, rows = _described(path), read_rows(path / TABLE)
    problems = [] if described else [f"{SPEC} is missing."]
    if described and [(row.arm, row.run, row.control_of) for row in rows] != described[0]:
        raise _differing(path, f"has other cells than {SPEC}")
    lost = _lost_runs(path, rows)
    count, rows = len(rows), select(rows, where or {})
    chosen = ", ".join(f"{name}={text}" for name, text in (where or {}).items())
    part = f"Only the cells with {chosen}: {len(rows):,} of {count:,}." if chosen else ""
    missing, failed = (sum(row.state == state for row in rows) for state in ("missing", "failed"))
    if missing:
        problems.append(f"{missing:,} of {len(rows):,} cells have no result yet; the sweep's command continues it.")
    if failed:
        problems.append(f"{failed:,} of {len(rows):,} cells could not be run.")
    problems += lost
    forms = {str(row.values["outer.form"]) for row in rows if "outer.form" in row.values}
    forms = forms or ({described[1]} if described else {""})
    form_words = " and ".join(FORM_WORDS.get(form, "form unknown") for form in sorted(forms))
    return SweepRecord(path, page_folder or path, rows, problems, form_words, part)


def _described(path: Path) -> tuple[list[tuple[Any, ...]], str] | None:
    """Return arm, run and control of each cell of `sweep.json`, and its base's form; None where it is missing."""
    if not (path / SPEC).exists():
        return None
    spec = json.loads((path / SPEC).read_bytes())
    cells = [(cell["arm"], cell["run"], cell["control_of"]) for cell in spec["cells"]]
    return cells, flatten(spec["base"]).get("outer.form", "")


def _differing(path: Path, why: str) -> UsageError:
    return UsageError(f"{path / TABLE}: {why}; repeat the sweep's command, which writes the table again")


def _lost_runs(path: Path, rows: Sequence[Row]) -> list[str]:
    """Name the runs that have a result in the table and no sound folder; refuse a table with other results than they.

    The table is a copy of the runs' summaries. A digit of it that was changed would be shown and judged like any other.
    """
    done = {row.run: row for row in rows if row.state in ("finished", "diverged")}
    lost = []
    for run, row in done.items():
        summary = read_summary(path / RUNS / run, run)
        if summary is None:
            lost.append(run)
        elif (row.perplexity, row.validation_loss) != (perplexity_of(summary), summary["validation_loss"]):
            raise _differing(path, f"has another result of run {run} than its {SUMMARY}")
    names = f"{', '.join(lost[:3])}{' and others' * (len(lost) > 3)}"
    many = f"Of {len(lost):,} of {len(done):,} runs with a result there is no sound folder below {RUNS}/: {names}."
    return [many] if lost else []
