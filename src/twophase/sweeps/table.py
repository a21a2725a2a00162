"""Tables of a sweep: a row for each cell, and settings that take the seeds together.

A setting is the runs of a method that differ in the seed alone. Its result is the arithmetic mean over its seeds. It
has diverged if a seed has, and is missing if a seed is: averaging only successful seeds is biased. A run whose
perplexity overflowed has diverged; one without a positive result is missing. Where the task has no perplexity, the
validation loss takes its place.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, get_args

from twophase.config import flatten
from twophase.errors import UsageError
from twophase.files import write_atomic
from twophase.sweeps.grid import SPEC, Sweep

State = Literal["finished", "diverged", "missing", "failed"]
TABLE, SEED = "cells.csv", "seed"
"""The table in a sweep's folder, and its column of seeds."""
ABOVE_ZERO = (
    "ratios are compared, so that the task's loss must be above 0; let its evaluate() return exp(loss) as perplexity, "
    "too, or add a constant"
)
_NUMBER = re.compile(r"([+-]?[\d.,]+(e[+-]?\d+)?|inf|nan)?%?")
_BEFORE = ["arm", "run"]
AFTER = ["perplexity", "validation_loss", "diverged", "state", "seconds", "control_of"]
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

    @property
    def outcome(self) -> float | None:
        """Perplexity, or else the validation loss; infinite for a run that diverged, None for one without a result."""
        number = self.validation_loss if self.perplexity is None else self.perplexity
        if self.state == "diverged" or (self.state == "finished" and self.perplexity == math.inf):
            return math.inf
        return number if self.state == "finished" and number is not None and 0 < number < math.inf else None


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

    def __str__(self) -> str:
        result = f"{measure_of(self.rows)} {readable(self.result) or self.state}"
        return f"{method_name(self.arm)} at {place_words(self.values, self.values)}: {result}"

    @property
    def runs(self) -> tuple[str, ...]:
        """Run ids."""
        return tuple(row.run for row in self.rows)

    @cached_property
    def by_seed(self) -> dict[Any, float]:
        """Result by seed, infinite where the run diverged, as `compare` takes it; without what is missing.

        The seed is None in a sweep that has no axis of seeds.
        """
        return {row.values.get(SEED): row.outcome for row in self.rows if row.outcome is not None}

    @property
    def state(self) -> State:
        """`finished` when all its runs are; else `diverged` when one is; else `missing`."""
        if math.inf in self.by_seed.values():
            return "diverged"
        return "finished" if len(self.by_seed) == len(self.rows) else "missing"

    @cached_property
    def result(self) -> float | None:
        """Mean over the seeds when finished, else None."""
        return statistics.fmean(self.by_seed.values()) if self.state == "finished" else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds, s^2 = sum (p_i - mean)^2 / (n - 1); None for one, or unfinished."""
        is_known = self.state == "finished" and len(self.rows) > 1
        return statistics.stdev(self.by_seed.values()) if is_known else None


def rows_of(sweep: Sweep, summaries: Mapping[str, Mapping[str, Any]], failed: Collection[str] = ()) -> list[Row]:
    """Return the rows of a sweep, in the order of its cells: of summaries by run id, and ids of runs that failed."""
    rows = []
    for cell in sweep.cells:
        summary = summaries.get(cell.run_id, {})
        state: State = "failed" if cell.run_id in failed else "missing"
        perplexity = summary.get("perplexity")
        if summary:
            state = "diverged" if summary["diverged"] else "finished"
        if state == "finished" and "perplexity" in summary and perplexity is None:
            perplexity = math.inf  # JSON has null for one that overflowed; the loss, finite then, is no substitute
        numbers = perplexity, summary.get("validation_loss"), summary.get("seconds")
        rows.append(Row(cell.arm, cell.run_id, sweep.values(cell), state, *numbers, cell.control_of))
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write `cells.csv` atomically: one row a cell, a column an axis; what is not known stays empty, never zero.

    A file that holds these rows already keeps its time.
    """
    paths = list(dict.fromkeys(name for row in rows for name in row.values))
    lines: list[list[Any]] = [[*_BEFORE, *paths, *AFTER]]
    for row in rows:
        diverged = None if row.state in {"missing", "failed"} else row.state == "diverged"
        after = row.perplexity, row.validation_loss, diverged, row.state, row.seconds, row.control_of
        lines.append([row.arm, row.run, *map(row.values.get, paths), *after])
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(cell_text, line) for line in lines)
    if not path.exists() or path.read_text() != buffer.getvalue():
        write_atomic(path, buffer.getvalue())


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a `cells.csv`.

    Axis values come back as true/false, whole numbers, numbers or text: the first that fits, but values of `text_paths`
    as they are. A UsageError refuses a file that is no table of cells.
    """
    rows, texts_of = [], text_paths(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            names, *lines = csv.reader(file)
        if (names[:2], names[-6:]) != (_BEFORE, AFTER):
            raise ValueError(f"it has the columns {', '.join(names)}")
        for arm, run, *texts, perplexity, loss, _, state, seconds, control_of in lines:
            values = {
                name: text if name in texts_of else _value(text) for name, text in zip(names[2:-6], texts, strict=True)
            }
            numbers = (float(text) if text else None for text in (perplexity, loss, seconds))
            if state not in get_args(State):
                raise ValueError(f"state must be one of {', '.join(get_args(State))}, is {state}")
            rows.append(Row(arm, run, values, cast(State, state), *numbers, control_of=control_of or None))
    except (ValueError, csv.Error) as error:  # edited by hand
        raise UsageError(f"{path}: must be a table of cells as the sweep's command writes it ({error})") from None
    return rows


def text_paths(table: Path) -> set[str]:
    """Return the axes of a `cells.csv` that hold text or several words, by the sweep's description beside it."""
    base: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):  # a table alone, as of published results
        base = flatten(json.loads(table.with_name(SPEC).read_bytes())["base"])
    return {"outer.restart", "sync.restart"} | {path for path, value in base.items() if isinstance(value, str | list)}


def settings(rows: Iterable[Row]) -> list[Setting]:
    """Take the seeds of a setting together, in order of first appearance."""
    groups: dict[Any, dict[Any, Row]] = {}
    for row in rows:
        place = tuple((path, value) for path, value in row.values.items() if path != SEED)
        # Two cells of a method may be one run; its result must not count twice.
        groups.setdefault((row.arm, place), {})[row.run, row.values.get(SEED)] = row
    return [Setting(arm, dict(place), tuple(group.values())) for (arm, place), group in groups.items()]


def measure_of(rows: Iterable[Row]) -> str:
    """Return what some rows are compared by, in words."""
    measured = [row.perplexity for row in rows if row.validation_loss is not None]
    return "validation loss" if measured and measured.count(None) == len(measured) else "perplexity"


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
    return ", ".join(f"{name} {cell_text(values.get(path))}" for path, name in names.items())


def readable(value: float | None) -> str:
    """Write a result in three digits; empty for None and infinity.

    >>> readable(7.6712), readable(15.384), readable(131.2), readable(20400.0), readable(None)
    ('7.67', '15.4', '131', '2e+04', '')
    """
    if value is None or value == math.inf:
        return ""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:.0f}" if value < 10000 else f"{value:.0e}"


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


def _value(text: str) -> Any:
    if text in {"", "true", "false"}:
        return {"": None, "true": True, "false": False}[text]
    for kind in (int, float):
        with suppress(ValueError):
            if cell_text(value := kind(text)) == text:  # else a text, such as 01 or 1.10
                return value
    return text
