"""The lines of a run's `.jsonl` files as columns of numbers, nan where there is none; no file is too damaged to read.

A long run has hundreds of thousands of lines. Each is parsed once, and some hundred together are turned into arrays
column by column: that costs less than the parsing, and a line's objects are forgotten at once.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
Line = Mapping[str, Any]

MOST_COLUMNS = 16
LARGEST = 1e100
"""No quantity of a run is beyond this; squares and sums of such numbers would be no numbers any more."""
LARGEST_COUNT = 1 << 53
"""Below this, a float holds every whole number."""
_MOST_NAMED, _LONGEST_NAME = 5, 40
_MARK = b"\xef\xbb\xbf"  # with which some editors begin a UTF-8 file
_LONGEST_LINE = 1 << 22  # bytes; no line that a run has written comes near
_TOGETHER = 200  # lines; the objects of many more no longer lie in the processor's cache


def read_columns(path: Path, problems: list[str], *, expected: bool) -> dict[str, Column]:
    """The numbers of a `.jsonl` file by name, a row for each JSON object.

    Args:
        path: the file.
        problems: takes a sentence about what is missing or wrong.
        expected: whether a missing file is worth one.
    """
    columns = Columns()
    for batch in read_batches(path, problems, expected=expected):
        columns.add(batch)
    name_absurd(path.name, columns.absurd, problems)
    return columns.arrays()


def read_batches(path: Path, problems: list[str], *, expected: bool) -> Iterator[list[dict[str, Any]]]:
    """The JSON objects of a file, some hundred at a time, and afterwards a sentence about the lines that are none.

    Args:
        path: the file.
        problems: takes the sentences.
        expected: whether a missing file is worth one.
    """
    if not path.is_file():
        if expected:
            problems.append(f"{path.name} is missing.")
        return
    found: list[dict[str, Any]] = []
    bad: list[int] = []
    cut = False
    parse = json.JSONDecoder().raw_decode  # json.loads would guess the encoding of every line
    try:
        for number, (line, ended) in enumerate(_lines(path), start=1):
            try:
                text = line.decode("utf-8", "surrogatepass").strip(" \t\r\n")
                value, end = parse(text)
                value = value if end == len(text) else None
            except (ValueError, RecursionError):
                value = None
            if type(value) is dict:
                found.append(value)
            elif ended:
                bad.append(number)
            else:
                cut = True
            if len(found) >= _TOGETHER:
                yield found
                found = []
    except OSError as error:
        problems.append(f"{path.name} cannot be read to its end ({error.strerror}).")
    yield found
    if bad:
        where = f"line {bad[0]} holds" if len(bad) == 1 else f"{len(bad):,} lines hold (the first is line {bad[0]})"
        problems.append(f"{path.name} is damaged: {where} no JSON object; left out.")
    if cut:
        problems.append(f"The last line of {path.name} is cut in its middle; left out.")


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Each line, and whether it has an end; nothing in place of one that has none, or is of absurd length.

    A line may also end with a bare carriage return, as some editors write it: within JSON there is none.
    """
    with path.open("rb") as file:
        if file.read(len(_MARK)) != _MARK:
            file.seek(0)
        while line := file.readline(_LONGEST_LINE):
            ended = whole = line.endswith(b"\n")
            if b"\r" in line:
                *before, line = re.split(rb"\r(?!\n)", line)
                yield from ((one, True) for one in before)
                if before and not whole:  # what is left begins a line, which may be longer
                    file.seek(-len(line), 1)
                    continue
            while not ended and (rest := file.readline(_LONGEST_LINE)):
                ended = rest.endswith(b"\n")
            yield line if whole else b"", ended


class Columns:
    """Columns of numbers, all of one length, that grow by some lines at a time.

    Args:
        names: of the columns; without any, every name that occurs has one, up to `MOST_COLUMNS`.
        flags: those of them in which true and false count as 1 and 0.
        counts: those of them that count something, up to `LARGEST_COUNT`.

    Attributes:
        absurd: of each column that has any, how many numbers were left out because nothing that is measured or counted
            is so large.
    """

    def __init__(self, names: Sequence[str] = (), flags: Sequence[str] = (), counts: Sequence[str] = ()) -> None:
        self.absurd: dict[str, int] = {}
        self._counts = frozenset(counts)
        self._most = len(names) or MOST_COLUMNS
        self._flags = flags
        self._parts: dict[str, list[Column]] = {name: [] for name in names}
        self._count = 0

    def add(self, lines: Sequence[Line]) -> None:
        """A row for each of some lines; nan where a line has no number of that name."""
        if len(self._parts) < self._most:
            for name in dict.fromkeys(itertools.chain.from_iterable(lines)):
                if name not in self._parts and len(self._parts) < self._most:
                    self._parts[name] = [np.full(self._count, math.nan)]
        for name, parts in self._parts.items():
            values = [line.get(name) for line in lines]
            found = column(values, flag=name in self._flags)
            if name in self._counts:
                found[~(np.abs(found) < LARGEST_COUNT)] = math.nan
            parts.append(found)
            odd = sum(_absurd(values[place]) for place in np.flatnonzero(np.isnan(found)))
            if odd:
                self.absurd[name] = self.absurd.get(name, 0) + odd
        self._count += len(lines)

    def arrays(self) -> dict[str, Column]:
        """The columns so far by name."""
        return {name: np.concatenate([np.empty(0), *parts]) for name, parts in self._parts.items()}


def column(values: Sequence[Any], *, flag: bool = False) -> Column:
    """Values of JSON as numbers; nan for all else, and beyond `LARGEST`. With `flag`, true and false are 1 and 0."""
    usual = {float, int, bool, NoneType} if flag else {float, int, NoneType}
    if set(map(type, values)) <= usual:
        try:
            found = np.array(values, dtype=np.float64)
        except OverflowError:  # a whole number beyond every float
            pass
        else:
            found[~(np.abs(found) <= LARGEST)] = math.nan
            return found
    return np.array([number(value, flag=flag) for value in values], dtype=np.float64)


def number(value: Any, *, flag: bool = False) -> float:
    """A value of JSON as `column` takes it.

    >>> number(3), number(True, flag=True), number("3"), number(float("inf"))
    (3.0, 1.0, nan, nan)
    """
    kind = type(value)
    if (kind is bool and not flag) or kind not in (int, float, bool):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if abs(found) <= LARGEST else math.nan


def _absurd(value: Any) -> bool:
    """Whether a value that was left out is a number, only too large a one."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def name_absurd(file: str, absurd: Mapping[str, int], problems: list[str]) -> None:
    """Say which numbers of a file were left out because they are too large, if any were."""
    if absurd:
        names = ", ".join(repr(name[:_LONGEST_NAME]) for name in list(absurd)[:_MOST_NAMED])
        more = f" and {len(absurd) - _MOST_NAMED} more names" if len(absurd) > _MOST_NAMED else ""
        count = sum(absurd.values())
        words = "a number is" if count == 1 else f"{count:,} numbers are"
        problems.append(
            f"{file} is damaged: {words} larger than anything that a run counts or measures ({names}{more}); left out."
        )
