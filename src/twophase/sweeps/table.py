"""Tables of a sweep: a row for each cell, and settings that take the seeds together.

With several seeds, the runs that differ in nothing but the seed are one setting. Its result is the arithmetic mean over
its seeds, with their sample standard deviation as its spread. It counts as diverged if a seed diverged, and as missing
if a seed is missing: averaging only successful seeds is biased. Everything that compares settings (best, worst,
geometric mean, share near the best) is computed on these means. A run that ended without a positive, finite perplexity
has no result and counts as missing. Where the task has no perplexity, the validation loss takes its place everywhere.
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
from pathlib import Path
from typing import Any, Literal, cast, get_args

from twophase.errors import UsageError
from twophase.files import write_atomic
from twophase.sweeps.grid import Sweep, text_of

State = Literal["finished", "diverged", "missing", "failed"]
STATES: tuple[State, ...] = get_args(State)
TABLE = "cells.csv"
"""The table in a sweep's folder."""
SEED = "seed"
PERPLEXITY, LOSS = "perplexity", "validation loss"
ABOVE_ZERO = "ratios are compared, so that the task's loss must be above 0: add a constant to it"
_BEFORE = ("arm", "run")
AFTER = ("perplexity", "validation_loss", "diverged", "state", "seconds", "control_of")


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of a sweep and its result.

    Args:
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


@dataclass(frozen=True, slots=True)
class Setting:
    """The runs of one arm that differ in the seed only, as one.

    Args:
        values: every axis value but the seed.
        state: `finished` when all its runs are; else `diverged` when one is; else `missing`, failed runs included.
        result: mean perplexity over the seeds when finished, else None; of a task without perplexity, that of the loss.
        runs: their run ids, in order of appearance; a run that several rows share is there once.
        spread: sample standard deviation of the results, s^2 = sum (p_i - mean)^2 / (n - 1); None for one seed
            and for a setting that is not finished.
        seeds: the seed of each run; None in a sweep that has no axis of seeds.
        states: state of each run; never `failed`, which counts as missing here.
        results: result of each run; None for every run that is not `finished`.
        measure: name of the quantity in `result`.
    """

    arm: str
    values: Mapping[str, Any]
    state: State
    result: float | None
    runs: tuple[str, ...]
    spread: float | None
    seeds: tuple[Any, ...]
    states: tuple[State, ...]
    results: tuple[float | None, ...]
    measure: str = PERPLEXITY

    @property
    def finished(self) -> int:
        """Number of seeds that have finished."""
        return self.states.count("finished")


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
            state = "diverged" if summary["diverged"] else "finished"
            numbers = (perplexity_of(summary), summary["validation_loss"], summary["seconds"])
        rows.append(Row(cell.arm, cell.run_id, sweep.values(cell), state, *numbers, cell.control_of))
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write `cells.csv` atomically: one row a cell, a column an axis; what is not known stays empty, never zero.

    A file that holds these rows already keeps its time.
    """
    paths = list(dict.fromkeys(name for row in rows for name in row.values))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*_BEFORE, *paths, *AFTER])
    for row in rows:
        diverged = None if row.state in {"missing", "failed"} else row.state == "diverged"
        after = [row.perplexity, row.validation_loss, diverged, row.state, row.seconds, row.control_of]
        writer.writerow(
            [cell_text(item) for item in [row.arm, row.run, *(row.values.get(name) for name in paths), *after]]
        )
    text = buffer.getvalue()
    if not path.exists() or path.read_text() != text:
        write_atomic(path, text)


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a `cells.csv`.

    Axis values come back as true/false, whole numbers, numbers or text: the first that fits. Restart policies stay
    text, and so do values of several words.

    Raises:
        UsageError: the file is no table of cells.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(file)
        names = tuple(table.fieldnames or ())
        if names[: len(_BEFORE)] != _BEFORE or names[-len(AFTER) :] != AFTER:
            raise UsageError(f"{path}: must be a table of cells, has the columns {', '.join(names)}")
        return [_row(record) for record in table]


def settings(rows: Iterable[Row]) -> list[Setting]:
    """Take the seeds of a setting together, in order of first appearance."""
    groups: dict[tuple[str, tuple[tuple[str, Any], ...]], list[Row]] = {}
    for row in rows:
        key = tuple((path, value) for path, value in row.values.items() if path != SEED)
        groups.setdefault((row.arm, key), []).append(row)
    return [_setting(arm, dict(key), group) for (arm, key), group in groups.items()]


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean of positive numbers, None for an empty sequence.

    >>> geometric_mean([2.0, 8.0])
    4.0
    """
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def arm_name(arm: str, *, long: bool = False) -> str:
    """Return the name that people read of an arm, the same in every table and page; `long` is without letters.

    >>> arm_name("heavy ball, never"), arm_name("heavy ball, K=3", long=True), arm_name("")
    ('heavy ball, no restart', 'heavy ball, restart every 3 rounds', '(all)')
    >>> arm_name("Nesterov, never, gain of K=3", long=True)
    'Nesterov, no restart, the mean step of a restart every 3 rounds'
    """
    text = re.sub(r"\bnever\b", "no restart", arm)
    if long:
        text = re.sub(r"\bgain of K=(\d+)", r"the mean step of a restart every \1 rounds", text)
        text = re.sub(r"\bK=(\d+)", r"restart every \1 rounds", text)
    return text or "(all)"


def place_words(values: Mapping[str, Any], paths: Sequence[str]) -> str:
    """Name a place by its values of some axes, by their last words where these are unambiguous.

    >>> place_words({"outer.lr": 0.3, "outer.method": "nesterov"}, ["outer.lr", "outer.method"])
    'lr 0.3, method nesterov'
    """
    last = [path.rpartition(".")[2] for path in paths]
    parts = []
    for path, leaf in zip(paths, last, strict=True):
        value = values.get(path)
        text = f"{value:g}" if isinstance(value, float) else cell_text(value)
        parts.append(f"{leaf if last.count(leaf) == 1 else path} {text}")
    return ", ".join(parts)


def titles(sweep: Sweep) -> dict[str, str]:
    """Name every run of a sweep for people: its arm in words, and the values that vary within the arm."""
    by_arm: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for cell in sweep.cells:
        by_arm.setdefault(cell.arm, []).append((cell.run_id, sweep.values(cell)))
    names: dict[str, str] = {}
    for arm, cells in by_arm.items():
        varied = [path for path in sweep.paths if any(values[path] != cells[0][1][path] for _, values in cells)]
        for run, values in cells:
            parts = filter(None, [arm and arm_name(arm, long=True), place_words(values, varied)])
            names.setdefault(run, ", ".join(parts) or "the only run")
    return names


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


def format_table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, markdown: bool = False) -> str:
    """Lay out a table for reading: columns aligned, numbers to the right; None is an empty cell.

    Args:
        header: names of the columns.
        rows: their values; numbers that need rounding come as text.
        markdown: write a Markdown table.

    >>> print(format_table(["arm", "best"], [["a", "7.67"], ["long", "13.90"]]))
    arm    best
    a      7.67
    long  13.90
    """
    lines = [list(header), *([cell_text(item) for item in row] for row in rows)]
    if markdown:  # a bar would end the cell
        lines = [[item.replace("|", "\\|") for item in line] for line in lines]
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [len(lines) > 1 and all(map(_reads_as_number, column[1:])) for column in columns]
    lines = [
        [
            item.rjust(width) if to_right else item.ljust(width)
            for item, width, to_right in zip(line, widths, right, strict=True)
        ]
        for line in lines
    ]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in lines)
    marks = [
        "-" * (max(width, 3) - 1) + (":" if to_right else "-") for width, to_right in zip(widths, right, strict=True)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], marks, *lines[1:]))


def _setting(arm: str, values: Mapping[str, Any], group: Sequence[Row]) -> Setting:
    # Two cells of an arm may be one run; its result must not count twice.
    once = list({(row.run, row.values.get(SEED)): row for row in group}.values())
    results = tuple(result(row) for row in once)
    numbers = [value for value in results if value is not None]
    states: tuple[State, ...] = tuple(
        "finished" if value is not None else "diverged" if row.state == "diverged" else "missing"
        for row, value in zip(once, results, strict=True)
    )
    state: State = "diverged" if "diverged" in states else "missing" if "missing" in states else "finished"
    return Setting(
        arm,
        values,
        state,
        statistics.fmean(numbers) if state == "finished" else None,
        tuple(row.run for row in once),
        statistics.stdev(numbers) if state == "finished" and len(numbers) > 1 else None,
        tuple(row.values.get(SEED) for row in once),
        states,
        results,
        measure_of(once),
    )


def result(row: Row) -> float | None:
    """Return the perplexity of a run that finished with one; the validation loss where the task has no perplexity."""
    number = row.validation_loss if row.perplexity is None else row.perplexity
    return number if row.state == "finished" and number is not None and 0 < number < math.inf else None


def without_ratio(rows: Iterable[Row]) -> list[str]:
    """Return a sentence on finished runs whose loss is not above 0, so that they have no result; empty without any."""
    losses = [row.validation_loss for row in rows if row.state == "finished" and row.perplexity is None]
    count = sum(loss is not None and loss <= 0 for loss in losses)
    cells = "finished cell has" if count == 1 else "finished cells have"
    return [f"{count:,} {cells} a validation loss of 0 or below, and so no result; {ABOVE_ZERO}."] if count else []


def perplexity_of(summary: Mapping[str, Any]) -> float | None:
    """Return the perplexity of a run's summary; None where it diverged or its task has none.

    JSON has null for one that has overflowed. The loss, which is finite then, must not take its place.
    """
    is_overflow = "perplexity" in summary and not summary["diverged"] and summary["perplexity"] is None
    return math.inf if is_overflow else summary.get("perplexity")


def measure_of(runs: Iterable[Row | Setting]) -> str:
    """Return what some rows or settings are judged by, in words."""
    runs = list(runs)
    if any(isinstance(run, Setting) and run.measure == LOSS for run in runs):
        return LOSS
    rows = [run for run in runs if isinstance(run, Row) and run.validation_loss is not None]
    return LOSS if rows and all(row.perplexity is None for row in rows) else PERPLEXITY


def with_unit(measure: str) -> str:
    """Return the words of a measure with its unit."""
    return f"{measure} a token" if measure == PERPLEXITY else measure


def result_words(row: Row) -> str:
    """Return what became of a run, in a word or a number."""
    number = result(row)
    return row.state if number is None else f"{measure_of([row])} {readable(number)}"


def _row(record: dict[str, str]) -> Row:
    axes = {path: _value(path, text) for path, text in record.items() if path not in {*_BEFORE, *AFTER}}
    perplexity, loss, seconds = (_number(record[name]) for name in ("perplexity", "validation_loss", "seconds"))
    state, control_of = cast(State, record["state"]), record["control_of"] or None
    return Row(record["arm"], record["run"], axes, state, perplexity, loss, seconds, control_of)


def _value(path: str, text: str) -> Any:
    if text in {"", "true", "false"}:
        return {"": None, "true": True, "false": False}[text]
    if path.rpartition(".")[2] == "restart":
        return text
    for kind in (int, float):
        with suppress(ValueError):
            value = kind(text)
            if cell_text(value) == text:  # else a text, such as 01 or 1.10
                return value
    return text


def _number(text: str) -> float | None:
    return float(text) if text else None


def cell_text(item: Any) -> str:
    """Write a value as a cell of the table has it."""
    if item is None:
        return ""
    if isinstance(item, tuple | list):
        return text_of(tuple(item))
    return str(item).lower() if isinstance(item, bool) else repr(item) if isinstance(item, float) else str(item)


def _reads_as_number(text: str) -> bool:
    try:
        float(text.removesuffix("%").strip() or "0")
    except ValueError:
        return False
    return True
