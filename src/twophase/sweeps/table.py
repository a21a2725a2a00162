"""Tables of a sweep: a row for each cell, and settings that take the seeds together.

With several seeds, the runs that differ in nothing but the seed are one setting. Its result is the arithmetic mean over
its seeds, with their sample standard deviation as its spread. It counts as diverged if a seed diverged, and as missing
if a seed is missing: averaging only successful seeds is biased. A run whose perplexity overflowed has diverged here;
without a positive result it is missing. Where the task has no perplexity, the validation loss takes its place.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, get_args

from twophase.errors import UsageError
from twophase.files import write_atomic
from twophase.sweeps.grid import Sweep

State = Literal["finished", "diverged", "missing", "failed"]
TABLE, SEED = "cells.csv", "seed"
"""The table in a sweep's folder, and its column of seeds."""
ABOVE_ZERO = "ratios are compared, so that the task's loss must be above 0: add a constant to it"
_NUMBER = re.compile(r"\s*([+-]?[\d.,]+(e[+-]?\d+)?|inf|nan)?%?")
_BEFORE = ("arm", "run")
AFTER = ("perplexity", "validation_loss", "diverged", "state", "seconds", "control_of")
"""The last columns of the table; between these and the first two stand the axes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of a sweep and its result.

    Args:
        arm: name of its method.
        run: id of its run.
        values: value on every axis of the sweep, by dotted path.
        state: `finished`, `diverged` (ended early), `failed` (could not be run) or `missing` (not run yet).
        perplexity: perplexity on held-out text, per token, infinite after an overflow; None without a result.
        validation_loss: nats a token; None without a result.
        seconds: wall-clock time of the run; None when it has not ended.
        control_of: run id of the cell that it is the control of, or None.
    """

    arm: str
    run: str
    values: Mapping[str, Any]
    state: State
    perplexity: float | None = None
    validation_loss: float | None = None
    seconds: float | None = None
    control_of: str | None = None


@dataclass(frozen=True)
class Setting:
    """The runs of one method that differ in the seed only, as one.

    Args:
        arm: name of the method.
        values: every axis value but the seed.
        rows: its runs in order of appearance, each once.
    """

    arm: str
    values: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def runs(self) -> tuple[str, ...]:
        """Run ids."""
        return tuple(row.run for row in self.rows)

    @property
    def seeds(self) -> tuple[Any, ...]:
        """The seed of each run; None in a sweep that has no axis of seeds."""
        return tuple(row.values.get(SEED) for row in self.rows)

    @cached_property
    def results(self) -> tuple[float | None, ...]:
        """Result of each run; None for every run that is not `finished`."""
        return tuple(map(result, self.rows))

    @cached_property
    def by_seed(self) -> dict[Any, float]:
        """Result by seed, infinite where the run diverged, as `compare` takes it; without what is missing."""
        outcomes = zip(self.seeds, self.rows, self.results, strict=True)
        return {seed: value or math.inf for seed, row, value in outcomes if value or _has_diverged(row)}

    @property
    def state(self) -> State:
        """`finished` when all its runs are; else `diverged` when one is; else `missing`."""
        if any(map(_has_diverged, self.rows)):
            return "diverged"
        return "missing" if None in self.results else "finished"

    @cached_property
    def result(self) -> float | None:
        """Mean over the seeds when finished, else None."""
        return statistics.fmean(cast("tuple[float, ...]", self.results)) if self.state == "finished" else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds, s^2 = sum (p_i - mean)^2 / (n - 1); None for one, or unfinished."""
        is_known = self.state == "finished" and len(self.rows) > 1
        return statistics.stdev(cast("tuple[float, ...]", self.results)) if is_known else None


def rows_of(sweep: Sweep, summaries: Mapping[str, Mapping[str, Any]], failed: Collection[str] = ()) -> list[Row]:
    """Return the rows of a sweep, in the order of its cells.

    Args:
        sweep: the sweep.
        summaries: summary of each finished run, by run id.
        failed: run ids of runs that could not be run.
    """
    rows = []
    for cell in sweep.cells:
        summary = summaries.get(cell.run_id)
        state: State = "failed" if cell.run_id in failed else "missing"
        numbers: tuple[float | None, ...] = (None, None, None)
        if summary is not None:
            state, perplexity = "diverged" if summary["diverged"] else "finished", summary.get("perplexity")
            if "perplexity" in summary and state == "finished" and perplexity is None:
                perplexity = math.inf  # JSON has null for one that overflowed; the loss, finite then, is no substitute
            numbers = (perplexity, summary["validation_loss"], summary["seconds"])
        rows.append(Row(cell.arm, cell.run_id, sweep.values(cell), state, *numbers, cell.control_of))
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write `cells.csv` atomically: one row a cell, a column an axis; what is not known stays empty, never zero.

    A file that holds these rows already keeps its time.
    """
    paths = list(dict.fromkeys(name for row in rows for name in row.values))
    lines: list[Sequence[Any]] = [(*_BEFORE, *paths, *AFTER)]
    for row in rows:
        diverged = None if row.state in {"missing", "failed"} else row.state == "diverged"
        after = row.perplexity, row.validation_loss, diverged, row.state, row.seconds, row.control_of
        lines.append((row.arm, row.run, *map(row.values.get, paths), *after))
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(cell_text, line) for line in lines)
    if not path.exists() or path.read_text() != buffer.getvalue():
        write_atomic(path, buffer.getvalue())


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a `cells.csv`.

    Axis values come back as true/false, whole numbers, numbers or text: the first that fits. Restart policies stay
    text, and so do values of several words.

    Raises:
        UsageError: the file is no table of cells.
    """
    rows = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            names = tuple(table.fieldnames or ())
            if names[: len(_BEFORE)] != _BEFORE or names[-len(AFTER) :] != AFTER:
                raise ValueError(f"it has the columns {', '.join(names)}")
            for record in table:
                axes = {name: _value(name, record[name]) for name in names[len(_BEFORE) : -len(AFTER)]}
                numbers = (float(record[name]) if record[name] else None for name in (*AFTER[:2], "seconds"))
                state, control_of = cast(State, record["state"]), record["control_of"] or None
                if state not in get_args(State):
                    raise ValueError(f"state must be one of {', '.join(get_args(State))}, is {state}")
                rows.append(Row(record["arm"], record["run"], axes, state, *numbers, control_of=control_of))
    except (ValueError, TypeError, csv.Error) as error:  # edited by hand
        raise UsageError(f"{path}: must be a table of cells as the sweep's command writes it ({error})") from None
    return rows


def settings(rows: Iterable[Row]) -> list[Setting]:
    """Take the seeds of a setting together, in order of first appearance."""
    groups: dict[Any, dict[Any, Row]] = {}
    for row in rows:
        place = tuple((path, value) for path, value in row.values.items() if path != SEED)
        # Two cells of a method may be one run; its result must not count twice.
        groups.setdefault((row.arm, place), {})[row.run, row.values.get(SEED)] = row
    return [Setting(arm, dict(place), tuple(group.values())) for (arm, place), group in groups.items()]


def result(row: Row) -> float | None:
    """Return the perplexity of a run that finished with one; the validation loss where the task has no perplexity."""
    number = row.validation_loss if row.perplexity is None else row.perplexity
    return number if row.state == "finished" and number is not None and 0 < number < math.inf else None


def measure_of(runs: Iterable[Row | Setting]) -> str:
    """Return what some rows or settings are compared by, in words."""
    rows = [row for run in runs for row in (run.rows if isinstance(run, Setting) else [run])]
    losses = [row for row in rows if row.validation_loss is not None]
    return "validation loss" if losses and all(row.perplexity is None for row in losses) else "perplexity"


def method_name(arm: str) -> str:
    """Return a method's name for a table: that in `cells.csv`, or a word where a sweep's only one has none."""
    return arm or "(all)"


def place_words(values: Mapping[str, Any], paths: Iterable[str]) -> str:
    """Name a place by its values of some axes, by their last words where these are unambiguous.

    >>> place_words({"outer.lr": 0.3, "outer.method": "nesterov"}, ["outer.lr", "outer.method"])
    'lr 0.3, method nesterov'
    """
    last = {path: path.rpartition(".")[2] for path in paths}
    names = {path: leaf if [*last.values()].count(leaf) == 1 else path for path, leaf in last.items()}
    texts = {path: f"{v:g}" if isinstance(v := values.get(path), float) else cell_text(v) for path in names}
    return ", ".join(f"{name} {texts[path]}" for path, name in names.items())


def readable(value: float | None) -> str:
    """Write a result in about three digits; empty for None.

    >>> readable(7.6712), readable(15.384), readable(131.2), readable(None)
    ('7.67', '15.4', '131', '')
    """
    if value is None:
        return ""
    if value < 1:  # a loss
        return f"{value:.3g}" if 0 < value < 0.1 else f"{value:.3f}"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}" if value < 10000 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def format_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Lay out a table for reading: columns aligned, numbers to the right; None is an empty cell.

    >>> print(format_table(["method", "best"], [["a", "7.67"], ["long", "13.90"]]))
    method   best
    a        7.67
    long    13.90
    """
    columns = [list(map(cell_text, column)) for column in zip(header, *rows, strict=True)]
    for column in columns:
        side = ">" if column[1:] and all(map(_NUMBER.fullmatch, column[1:])) else "<"
        column[:] = [format(item, f"{side}{max(map(len, column))}") for item in column]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def cell_text(item: Any) -> str:
    """Write a value as a cell of the table has it, several words as an axis takes them.

    >>> cell_text(None), cell_text(True), cell_text(1e-5), cell_text(("a=3", "b=cycle:5,6")), cell_text(())
    ('', 'true', '1e-05', 'a=3,b=cycle:5,6', 'none')
    """
    if isinstance(item, tuple | list):
        return ",".join(map(str, item)) or "none"
    return "" if item is None else str(item).lower() if isinstance(item, bool) else str(item)


def _has_diverged(row: Row) -> bool:
    return row.state == "diverged" or (row.state == "finished" and row.perplexity == math.inf)


def _value(path: str, text: str) -> Any:
    if text in {"", "true", "false"}:
        return {"": None, "true": True, "false": False}[text]
    for kind in (int, float) if path.rpartition(".")[2] != "restart" else ():
        with suppress(ValueError):
            if cell_text(value := kind(text)) == text:  # else a text, such as 01 or 1.10
                return value
    return text
