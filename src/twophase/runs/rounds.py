"""`rounds.jsonl` of a run, whatever its lines hold: columns of the rounds, of each block of the model, and what is odd.

A trainer that was resumed may have written rounds twice, a damaged file may lack some or hold them out of order, and a
newer version may have written what is not known here. Each is a sentence, and no round counts twice.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.runs.folder import ROUNDS, list_some
from twophase.runs.jsonl import LARGEST_COUNT, MOST_COLUMNS, Column, Columns, Line, name_absurd, read_batches

WHOLE = "whole model"
"""Name of the block of a run that has only one."""
_MOST_BLOCKS, _LONGEST_NAME = 256, 80
_TOTALS = ("step", "round", "inner_steps", "replicas", "newcomers", "attempts", "restarted", "complete", "bytes_sent")
_MEASURED = ("pseudo_gradient_norm", "buffer_norm", "cosine", "gain")
_FLAGS = ("restarted", "complete")
_COUNTS = ("inner_steps", "replicas", "newcomers", "attempts", "bytes_sent")
_SELDOM = 4
"""A fragment that the most frequent one outnumbers so many times was never one, but a damaged name."""


@dataclass(slots=True)
class Block:
    """One param group or fragment, a row for each of its rounds.

    Args:
        name: for people.
        index: the row of `Rounds.columns` of each row, from 0.
        number: the block's own round number.
        restarted: whether its momentum restarted.
        pseudo_gradient_norm, buffer_norm, cosine, gain: as in a round's report; nan where there is no number.
    """

    name: str
    index: NDArray[np.int64]
    number: Column
    restarted: NDArray[np.bool_]
    pseudo_gradient_norm: Column
    buffer_norm: Column
    cosine: Column
    gain: Column


@dataclass(slots=True)
class Rounds:
    """What the file holds.

    Args:
        columns: numbers of the lines, all of one length; a line for each sync, of one fragment or of several.
        phases: seconds of each phase, the same length.
        blocks: in order of appearance.
        recorded: rounds that every fragment has ended.
    """

    columns: dict[str, Column]
    phases: dict[str, Column]
    blocks: list[Block]
    recorded: int


def read_rounds(folder: Path, problems: list[str], *, last_step: float) -> Rounds:
    """Read `rounds.jsonl` in a run's folder.

    Args:
        folder: of the run.
        problems: takes a sentence about each thing that is missing or wrong.
        last_step: of the run's plan; nan if it is not known.
    """
    lines = _Lines()
    for batch in read_batches(folder / ROUNDS, problems, expected=True):
        lines.add(batch)
    totals = lines.totals.arrays()
    odd = int(np.sum(np.isnan(totals["pseudo_gradient_norm"]) | np.isnan(totals["cosine"])))
    for name in ("step", "round"):
        totals[name][~((totals[name] >= 0) & (totals[name] < LARGEST_COUNT))] = math.nan
    keep = _in_order(totals["step"], np.array(lines.fragments, dtype=np.int64), problems)
    columns = {name: values[keep] for name, values in totals.items()}
    blocks, own = lines.blocks.arrays(keep), lines.own_rounds.arrays(keep)
    seldom, others = _seldom(own), _seldom(blocks)
    if named := {name.removeprefix(" of "): count for name, count in (seldom | others).items() if name and count}:
        words = list_some([f"{name[:_LONGEST_NAME]!r} in {count:,}" for name, count in named.items()], limit=3)
        problems.append(
            f"{ROUNDS} names what occurs in hardly any of its rounds, as a damaged name does: {words}; not counted, "
            "and not shown by itself."
        )
    numbers = {name: rows["round"] for name, (_, rows) in own.items() if name not in seldom}
    _check_numbers(numbers, problems)
    absurd = {**lines.totals.absurd, **lines.blocks.absurd}
    absurd |= {f"seconds {name}": count for name, count in lines.phases.absurd.items()}
    name_absurd(ROUNDS, absurd, problems)
    beyond = int(np.sum(columns["step"] > last_step))
    if beyond:
        problems.append(f"{beyond:,} rounds lie beyond the plan: their step is larger than {last_step:.0f} (--steps).")
    if lines.wrong:
        problems.append(
            f"{lines.wrong:,} lines of {ROUNDS} hold something of a wrong kind where a whole number (step, round), a "
            "param group or a fragment should be; that part is left out."
        )
    if odd:
        problems.append(
            f"{odd:,} of {len(keep):,} rounds have no finite number for the norm or the cosine of the pseudo-gradient."
        )
    return Rounds(
        columns,
        {name: values[keep] for name, values in lines.phases.arrays().items()},
        _blocks({name: rows for name, rows in blocks.items() if name not in others}),
        min((len(found) for found in numbers.values()), default=0),
    )


class _Lines:
    """What the lines hold, as they were read.

    Attributes:
        totals: numbers of whole lines.
        phases: their seconds.
        fragments: of each line, which fragments it is of, as a number for each combination.
        blocks: rows of the param groups or fragments.
        own_rounds: numbers of the fragments' own rounds.
        wrong: lines that hold something of another kind than a trainer writes.
    """

    def __init__(self) -> None:
        self.totals = Columns((*_TOTALS, *_MEASURED), _FLAGS, _COUNTS)
        self.phases = Columns()
        self.fragments: list[int] = []
        self.blocks = _Named(("round", "restarted", *_MEASURED))
        self.own_rounds = _Named(("round",))
        self.wrong = 0
        self._combinations: dict[tuple[str, ...], int] = {}

    def add(self, batch: Sequence[Line]) -> None:
        """Some lines more."""
        self.totals.add(batch)
        self.phases.add([seconds if isinstance(seconds := line.get("seconds"), dict) else {} for line in batch])
        if not _as_written(batch):
            self.wrong += sum(not _as_written([line]) for line in batch)
        blocks: list[tuple[int, str, Line]] = []
        own: list[tuple[int, str, Line]] = []
        for index, line in enumerate(batch, start=len(self.fragments)):
            groups, parts = _list(line, "groups"), _list(line, "fragments")
            names = tuple([str(part.get("name")) for part in parts if isinstance(part, dict)])
            self.fragments.append(self._combinations.setdefault(names, len(self._combinations)))
            own += [
                (index, f" of fragment {part.get('name')}", part if "round" in part else line)
                for part in parts
                if isinstance(part, dict)
            ]
            if not names:
                own.append((index, "", line))
            blocks += [(index, *row) for row in _block_rows(line, groups, parts)]
        self.blocks.add(blocks)
        self.own_rounds.add(own)


class _Named:
    """Rows of numbers under names, of which there are at most `_MOST_BLOCKS`; each row is of a line.

    Args:
        columns: names of the numbers.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = Columns(columns, _FLAGS)
        self._names: dict[str, int] = {}
        self._of: list[int] = []
        self._line: list[int] = []

    def add(self, rows: Sequence[tuple[int, str, Line]]) -> None:
        """Some rows more: index of the line, name, and the numbers; those of names beyond the limit are left out."""
        taken: list[Line] = []
        for index, name, row in rows:
            if name not in self._names:
                if len(self._names) >= _MOST_BLOCKS:
                    continue
                self._names[name] = len(self._names)
            self._of.append(self._names[name])
            self._line.append(index)
            taken.append(row)
        self._columns.add(taken)

    @property
    def absurd(self) -> Mapping[str, int]:
        """As of `Columns`."""
        return self._columns.absurd

    def arrays(self, keep: NDArray[np.bool_]) -> dict[str, tuple[NDArray[np.int64], dict[str, Column]]]:
        """For each name the lines, counted among those that are kept, and the columns."""
        of, line = np.array(self._of, dtype=np.int64), np.array(self._line, dtype=np.int64)
        left = np.flatnonzero(keep[line])
        left = left[np.argsort(of[left], kind="stable")]
        ends = np.searchsorted(of[left], np.arange(len(self._names) + 1))
        place, columns = np.cumsum(keep) - 1, self._columns.arrays()
        found = {}
        for name, number in self._names.items():
            mine = left[ends[number] : ends[number + 1]]
            found[name] = place[line[mine]], {column: values[mine] for column, values in columns.items()}
        return found


def _block_rows(line: Line, groups: Sequence[Any], parts: Sequence[Any]) -> Iterator[tuple[str, Line]]:
    """Name and numbers of each block of a line: a fragment, or a param group where there are several."""
    for place, group in enumerate(groups):
        if not isinstance(group, dict):
            continue
        name, number = f"param group {place}", line.get("round")
        part = parts[place] if len(parts) == len(groups) else None
        if isinstance(part, dict):
            name, number = f"fragment {part.get('name', place)}", part.get("round", number)
        group["round"] = number  # nobody else sees the line
        yield name, group


def _list(line: Line, key: str) -> list[Any]:
    value = line.get(key)
    return value if isinstance(value, list) else []


def _as_written(lines: Sequence[Line]) -> bool:
    """Whether whole numbers, param groups and fragments are of the kinds that a trainer writes, in all these lines."""
    groups, fragments = ([line.get(name) for line in lines] for name in ("groups", "fragments"))
    if not set(map(type, groups + fragments)) <= {list, NoneType}:
        return False
    parts = [part for one in fragments if one for part in one]
    if not {type(entry) for one in groups if one for entry in one} | set(map(type, parts)) <= {dict}:
        return False
    counts = [line.get(name) for name in ("step", "round") for line in lines] + [part.get("round") for part in parts]
    whole = [value for value in counts if value is not None]
    return not whole or (set(map(type, whole)) == {int} and min(whole) >= 0 and max(whole) < LARGEST_COUNT)


def _in_order(steps: Column, fragments: NDArray[np.int64], problems: list[str]) -> NDArray[np.bool_]:
    """Which lines to keep: of the same fragments the most whose steps increase, and of one step the last.

    So a damaged step costs its own line and no other, wherever it points. Lines without a step are kept.
    """
    keep = np.ones(len(steps), dtype=bool)
    known = np.flatnonzero(np.isfinite(steps))
    order = known[np.argsort(fragments[known], kind="stable")]
    twice, astray = 0, []
    for mine in np.split(order, np.flatnonzero(np.diff(fragments[order])) + 1):
        if np.all(np.diff(steps[mine]) > 0):
            continue
        stays = np.zeros(len(mine), dtype=bool)
        stays[_rising(steps[mine].tolist())] = True
        out = mine[~stays]
        keep[out] = False
        last = dict(zip(steps[mine[stays]].tolist(), mine[stays].tolist(), strict=True))
        lost = [place for place in out.tolist() if last.get(steps[place], -1) < place]
        twice += len(out) - len(lost)
        astray += lost
    if twice:
        problems.append(f"{ROUNDS} has {twice:,} lines whose step comes again further down; the last of each is used.")
    if astray:
        which = "a line whose step does" if len(astray) == 1 else f"{len(astray):,} lines whose steps do"
        first = f"{steps[min(astray)]:.0f}"
        problems.append(f"{ROUNDS} has {which} not fit between those around (the first is step {first}); left out.")
    return keep


def _rising(values: Sequence[float]) -> list[int]:
    """The places of a longest sequence of values that increase; of equal values the last that fits."""
    ends: list[float] = []  # the smallest value that a sequence of each length can end with
    places: list[int] = []
    before: list[int] = []
    for place, value in enumerate(values):
        length = bisect_left(ends, value)
        before.append(places[length - 1] if length else -1)
        ends[length : length + 1] = [value]
        places[length : length + 1] = [place]
    found = []
    place = places[-1] if places else -1
    while place >= 0:
        found.append(place)
        place = before[place]
    return found[::-1]


def _seldom(found: Mapping[str, tuple[NDArray[np.int64], Any]]) -> dict[str, int]:
    """Those of some names that occur in very few rounds, and in how many."""
    counts = {name: len(index) for name, (index, _) in found.items()}
    most = max(counts.values(), default=0)
    return {name: count for name, count in counts.items() if count * _SELDOM < most}


def _check_numbers(numbers: Mapping[str, Column], problems: list[str]) -> None:
    """Name what is missing or repeated among the rounds that are left."""
    for name, found in list(numbers.items())[:MOST_COLUMNS]:
        known = found[np.isfinite(found)]
        jumps = np.diff(known, prepend=0.0)
        missing, again = int(np.sum(np.maximum(jumps - 1, 0))), int(np.sum(jumps < 1))
        if missing:
            first = known[int(np.flatnonzero(jumps > 1)[0])]
            problems.append(f"Rounds{name} are missing: {missing:,}, the first of them before round {first:.0f}.")
        if again:
            problems.append(f"Round numbers{name} do not increase in {again:,} places.")


def _blocks(found: Mapping[str, tuple[NDArray[np.int64], dict[str, Column]]]) -> list[Block]:
    """The blocks of which a round is left."""
    return [
        Block(
            WHOLE if len(found) == 1 else name.removeprefix("fragment "),
            index,
            rows["round"],
            rows["restarted"] == 1,
            *(rows[measured] for measured in _MEASURED),
        )
        for name, (index, rows) in found.items()
        if len(index)
    ]
