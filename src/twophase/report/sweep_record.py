"""Read a sweep's folder, finished or not: its table, and what it says of the folder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError, flatten, values_of
from twophase.base.reading import read_json_object
from twophase.judge.verdict import select
from twophase.report.page import relative
from twophase.rule import FORM_WORDS
from twophase.runs.folder import REPORT, RUN_ID, SUMMARY, list_some, read_summary
from twophase.runs.method import numbers_of
from twophase.sweeps.run import SPEC, TABLE
from twophase.sweeps.table import Row, cell_text, perplexity_of, read_rows
from twophase.sweeps.work import RUNS
from twophase.tasks.lm.config import TrainConfig


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
    if described:
        _check_cells(path, rows, described[0])
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
    """Return arm, run, values and control of each cell of `sweep.json`, and its base's form; None where it is missing.

    A description leaves out what came later and has its default, also where cells of another arm vary it.
    """
    try:
        spec = read_json_object(path / SPEC)
        base = values_of(TrainConfig()) | flatten(spec["base"])
        cells = []
        for cell in spec["cells"]:
            values = base | flatten(cell["values"])
            own = numbers_of({path[6:]: value for path, value in values.items() if path.startswith("outer.")})
            values |= {f"outer.{name}": value for name, value in own.items() if values[f"outer.{name}"] is None}
            texts = {name: cell_text(values[name]) for name in spec["axes"]}
            cells.append((cell["arm"], cell["run"], texts, cell["control_of"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path / SPEC}: is damaged ({error}); put it back, or move it out of the folder") from None
    return cells, flatten(spec["base"]).get("outer.form", "")


def _check_cells(path: Path, rows: Sequence[Row], expected: Sequence[tuple[Any, ...]]) -> None:
    """Refuse a table with other cells than the sweep's description."""
    for number, row in enumerate(rows):
        values = {name: cell_text(value) for name, value in row.values.items()}
        if number >= len(expected) or (row.arm, row.run, values, row.control_of) != expected[number]:
            raise _differing(path, f"line {number + 2} is no cell of {SPEC}, or not in its place")
    if len(rows) < len(expected):
        raise _differing(path, f"{len(rows):,} cells of {len(expected):,} in {SPEC}")


def _differing(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path / TABLE}: is not what the sweep has written ({why}); repeat the sweep's command, which writes the "
        "table again"
    )


def _lost_runs(path: Path, rows: Sequence[Row]) -> list[str]:
    """Name the runs that have a result in the table and no sound folder; refuse a table with other results than they.

    The table is a copy of the runs' summaries. A digit of it that was changed would be shown and judged like any other.
    """
    done: dict[str, list[Row]] = {}
    for row in rows:
        if row.state in ("finished", "diverged"):
            done.setdefault(row.twin_of or row.run, []).append(row)
    lost = []
    for run, rows_of_run in done.items():
        summary = read_summary(path / RUNS / run, run) if RUN_ID.fullmatch(run) else None
        if summary is None:
            lost += [run] if RUN_ID.fullmatch(run) else []
            continue
        state = "diverged" if summary["diverged"] else "finished"
        expected = {"state": state, "perplexity": perplexity_of(summary)}
        expected |= {name: summary.get(name) for name in ("validation_loss", "seconds")}
        for row, (name, value) in itertools.product(rows_of_run, expected.items()):
            # Tables of earlier versions have nothing for a perplexity that has overflowed.
            if getattr(row, name) != value and (getattr(row, name), value) != (None, math.inf):
                raise _differing(
                    path,
                    f"{name} of run {row.run} is {getattr(row, name)}, and {value} in {RUNS}/{run}/{SUMMARY}",
                )
    if not lost:
        return []
    names = list_some(lost, 3)
    return [f"Of {len(lost):,} of {len(done):,} runs with a result there is no sound folder below {RUNS}/: {names}."]
