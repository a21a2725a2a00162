"""Read a sweep's folder, finished or not."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from twophase.compare.sweep import select
from twophase.errors import UsageError
from twophase.report.page import href
from twophase.runs.folder import REPORT, RUN_ID
from twophase.sweeps.grid import RUNS
from twophase.sweeps.table import TABLE, Row, State, read_rows


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """Content of a sweep's folder.

    Args:
        path: the folder.
        page_folder: folder of the page, for its links.
        rows: a row a cell.
        problems: what is missing, a sentence each.
    """

    path: Path
    page_folder: Path
    rows: list[Row]
    problems: list[str]

    @property
    def going(self) -> bool:
        """True if a cell has no result yet."""
        return any(row.state == "missing" for row in self.rows)

    def run_folder(self, run: str) -> Path | None:
        """Return the folder of a run; None without one, or for an unsafe name."""
        folder = self.path / RUNS / run
        return folder if RUN_ID.fullmatch(run) and folder.is_dir() and not folder.is_symlink() else None

    def page_of(self, run: str) -> str | None:
        """Return the address of a run's own report, or of its folder; None where there is neither."""
        folder = self.run_folder(run)
        if folder is None:
            return None
        return href(folder / REPORT if (folder / REPORT).is_file() else folder, self.page_folder)


def read_sweep(path: Path, where: Mapping[str, str] | None = None, page_folder: Path | None = None) -> SweepRecord:
    """Read a sweep's folder, in any state.

    Args:
        path: the folder.
        where: only the cells with these values.
        page_folder: folder of the page; None means the sweep's folder.

    Raises:
        UsageError: no folder of a sweep, a table that cannot be read, or no such cell.
    """
    if not (path / TABLE).is_file():
        raise UsageError(f"{path}: must be the folder of a run or a sweep, the --out of `twophase train` or `sweep`")
    try:
        rows = read_rows(path / TABLE)
    except UsageError:
        raise
    except (ValueError, TypeError, csv.Error) as error:  # edited by hand
        raise UsageError(f"{path / TABLE}: cannot be read ({error}); the sweep's command writes it again") from None
    if unknown := {row.state for row in rows} - set(get_args(State)):
        raise UsageError(f"{path / TABLE}: state must be one of {', '.join(get_args(State))}, is {min(unknown)}")
    rows = select(rows, where or {})
    counts = {state: sum(row.state == state for row in rows) for state in ("missing", "failed")}
    words = {"missing": "have no result yet; the sweep's command continues it", "failed": "could not be run"}
    problems = [f"{count:,} of {len(rows):,} cells {words[state]}." for state, count in counts.items() if count]
    if where:
        problems.append(f"Only the cells with {', '.join(f'{name}={text}' for name, text in where.items())}.")
    return SweepRecord(path, page_folder or path, rows, problems)
