"""Reading a run's folder whatever state it is in: unfinished, damaged, of another version, or full of odd numbers.

What is there becomes columns of numbers, nan where there is none; what is wrong or missing becomes a sentence in
`problems`. Nothing is executed, followed or written. Trainers resume by the stricter `twophase.experiment.run`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from twophase import __version__
from twophase.config import UsageError
from twophase.experiment.run import CONFIG, ENV, METRICS, ROUNDS, STEPS, SUMMARY, read_summary
from twophase.restart import RestartPolicy, parse
from twophase.rule import OuterRule

Column = NDArray[np.float64]

WHOLE = "whole model"
"""Name of the block of a run that has only one."""
_LONGEST_LINE = 1 << 22  # bytes; no line that a run has written comes near
_LARGEST_FILE = 1 << 22  # of config.yaml, env.json and summary.json
_MOST_PHASES, _MOST_BLOCKS = 16, 256
_MOST_NAMES = 500  # values of a configuration that are shown
_LARGEST_COUNT = 1 << 53
_TOTALS = ("step", "round", "inner_steps", "replicas", "newcomers", "attempts", "restarted", "complete", "bytes_sent")
_MEASURED = ("pseudo_gradient_norm", "buffer_norm", "cosine", "gain")


@dataclass(slots=True)
class Block:
    """One param group or fragment, a row for each of its rounds.

    Args:
        name: for people.
        index: the line of `rounds.jsonl` of each row, from 0.
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
class RunRecord:
    """What a run's folder holds.

    Args:
        path: the folder.
        config: dotted paths and values, as far as they could be read.
        environment: what `env.json` holds, or nothing.
        summary: of a finished run, else None.
        rounds: columns of `rounds.jsonl`, all of one length; a line for each sync, of one fragment or of several.
        recorded: rounds that every fragment has ended.
        phases: seconds of each phase, the same length.
        blocks: in order of appearance.
        metrics: columns of `metrics.jsonl`.
        steps: columns of `steps.jsonl`.
        problems: what is missing or wrong, a sentence each.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    rounds: dict[str, Column] = field(default_factory=dict)
    recorded: int = 0
    phases: dict[str, Column] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    metrics: dict[str, Column] = field(default_factory=dict)
    steps: dict[str, Column] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """`finished`, `diverged`, or `unfinished`."""
        if self.summary is None:
            return "unfinished"
        return "diverged" if self.summary.get("diverged") else "finished"

    @property
    def rule(self) -> OuterRule | None:
        """The outer rule, if the configuration holds one."""
        values = [self.config.get(f"outer.{name}") for name in ("lr", "momentum", "nesterov", "form")]
        try:
            return OuterRule(*values)  # type: ignore[arg-type] - it checks
        except (TypeError, ValueError):
            return None

    def policy(self, block: str = WHOLE) -> RestartPolicy | None:
        """The restart policy of a block, if the configuration holds one."""
        text = self.config.get("outer.restart")
        own = self.config.get("sync.restart")
        for word in own if isinstance(own, list) else ():
            name, equals, value = str(word).partition("=")
            if equals and name == block:
                text = value
        try:
            return parse(str(text)) if isinstance(text, (str, int)) else None
        except ValueError:
            return None

    def number(self, path: str) -> float:
        """A value of the configuration as a number; nan if it is none."""
        return _number(self.config.get(path))

    @property
    def planned_rounds(self) -> int | None:
        """Rounds of the whole run, by its configuration."""
        steps, inner = self.number("steps"), self.number("inner_steps")
        return math.ceil(steps / inner) if steps >= 1 and inner >= 1 else None

    def inner_lr(self, index: NDArray[np.int64]) -> Column | None:
        """The inner learning rate at the end of each of some rounds; None where the metrics do not have it."""
        steps, rates = self.metrics.get("step"), self.metrics.get("inner_lr")
        mine = self.rounds.get("step")
        if steps is None or rates is None or mine is None:
            return None
        by_step = {step: rate for step, rate in zip(steps.tolist(), rates.tolist(), strict=True) if rate > 0}
        found = np.array([by_step.get(step, math.nan) for step in mine[index].tolist()])
        return found if np.isfinite(found).any() else None


def is_run(path: Path) -> bool:
    """Whether a folder looks like that of a run."""
    return any((path / name).is_file() for name in (CONFIG, ROUNDS, METRICS, SUMMARY))


def read_record(path: Path) -> RunRecord:
    """Read a run's folder, whatever is in it.

    Raises:
        UsageError: the path is no folder, or nothing in it is a run's.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UsageError(f"{path}: {what}; give the folder of a run, its --out")
    if not is_run(path):
        replicas = sorted(entry.name for entry in path.glob("replica-*") if is_run(entry))
        if replicas:
            raise UsageError(f"{path}: each replica of this run has a folder of its own; give {path / replicas[0]}")
        raise UsageError(
            f"{path}: is not the folder of a run (it has no {CONFIG}, {ROUNDS}, {METRICS} or {SUMMARY}); "
            "give the --out of `twophase train`, or a folder below runs/ of a sweep"
        )
    record = RunRecord(path)
    record.config = _config(path / CONFIG, record.problems)
    record.environment = _json_object(path / ENV, record.problems)
    _read_rounds(record)
    record.metrics = _columns(path / METRICS, record.problems, expected=True)
    record.steps = _columns(path / STEPS, record.problems, expected=False)
    _read_end(record)
    version = record.environment.get("twophase")
    if isinstance(version, str) and _version(version) > _version(__version__):
        record.problems.append(
            f"The run was written by twophase {version}, and this is {__version__}: what it does not know is not shown."
        )
    return record


def _read_end(record: RunRecord) -> None:
    """The summary, or why there is none."""
    record.summary = _json_object(record.path / SUMMARY, record.problems, expected=False) or None
    if record.summary is None:
        if not (record.path / SUMMARY).exists():
            record.problems.append("The run has not finished: there is no summary.json yet.")
    elif record.config and read_summary(record.path) is None:
        record.problems.append(
            "summary.json does not fit the run's configuration, or lacks a value; its numbers are shown as they are."
        )


# ------------------------------------------------------------------------------------------------------- small files


def _text(path: Path, problems: list[str], *, expected: bool) -> str | None:
    try:
        if not path.is_file():
            if expected:
                problems.append(f"{path.name} is missing.")
            return None
        if path.stat().st_size > _LARGEST_FILE:
            problems.append(f"{path.name} is larger than {_LARGEST_FILE >> 20} MiB and was not read.")
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror}).")
        return None


def _json_object(path: Path, problems: list[str], *, expected: bool = True) -> dict[str, Any]:
    text = _text(path, problems, expected=expected)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path.name} is damaged: it holds no JSON object.")
        return {}
    return value


def _config(path: Path, problems: list[str]) -> dict[str, Any]:
    """Dotted paths and plain values of `config.yaml`."""
    text = _text(path, problems, expected=True)
    if text is None:
        return {}
    try:
        # An alias repeats what may itself hold aliases: a short file could stand for more than memory holds.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            problems.append(f"{path.name} has YAML aliases, which twophase never writes; it was not read.")
            return {}
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        problems.append(f"{path.name} is damaged: it holds no YAML mapping.")
        return {}
    flat = dict(_flat(tree))
    if len(flat) > _MOST_NAMES:
        problems.append(f"{path.name} holds {len(flat):,} values; the first {_MOST_NAMES} are shown.")
    return dict(list(flat.items())[:_MOST_NAMES])


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _version(text: str) -> tuple[int, ...]:
    words = text.split("+", maxsplit=1)[0].split(".")
    return tuple(int(word) for word in words if word.isdecimal() and len(word) < 9)


# --------------------------------------------------------------------------------------------------------- the lines


def _lines(path: Path, problems: list[str], *, expected: bool) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, line by line, and afterwards a sentence about those that are none."""
    if not path.is_file():
        if expected:
            problems.append(f"{path.name} is missing.")
        return
    bad: list[int] = []
    cut, number = False, 0
    try:
        with path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE):
                number += 1
                whole = line.endswith(b"\n")
                while not line.endswith(b"\n") and (rest := file.readline(_LONGEST_LINE)):
                    line = rest  # one of absurd length: skip to its end
                try:
                    value = json.loads(line) if whole else None
                except (ValueError, RecursionError):
                    value = None
                if isinstance(value, dict):
                    yield value
                elif whole or line.endswith(b"\n"):
                    bad.append(number)
                else:
                    cut = True
    except OSError as error:
        problems.append(f"{path.name} cannot be read to its end ({error.strerror}).")
    if bad:
        where = f"line {bad[0]} holds" if len(bad) == 1 else f"{len(bad):,} lines hold (the first is line {bad[0]})"
        problems.append(f"{path.name} is damaged: {where} no JSON object; left out.")
    if cut:
        problems.append(f"The last line of {path.name} is cut in its middle; left out.")


def _columns(path: Path, problems: list[str], *, expected: bool) -> dict[str, Column]:
    """The numbers of a `.jsonl` file by name, nan where a line has none."""
    columns: dict[str, list[float]] = {}
    for count, line in enumerate(_lines(path, problems, expected=expected)):
        for name, value in line.items():
            if name not in columns and len(columns) < _MOST_PHASES:
                columns[name] = [math.nan] * count
            if name in columns:
                columns[name].append(_number(value))
        for values in columns.values():
            if len(values) <= count:
                values.append(math.nan)
    return {name: np.array(values) for name, values in columns.items()}


def _read_rounds(record: RunRecord) -> None:
    """Fill `rounds`, `phases` and `blocks`."""
    totals: dict[str, list[float]] = {name: [] for name in (*_TOTALS, *_MEASURED)}
    phases: dict[str, list[float]] = {}
    rows: dict[str, list[tuple[float, ...]]] = {}
    keys: list[tuple[str, ...]] = []
    own: dict[str, list[tuple[int, float]]] = {}
    odd = count = wrong = 0
    for line in _lines(record.path / ROUNDS, record.problems, expected=True):
        for name, values in totals.items():
            values.append(_number(line.get(name), flag=name in ("restarted", "complete")))
        wrong += _wrong(line)
        keys.append(_fragments(line))
        for name, number in _own_rounds(line):
            if name in own or len(own) < _MOST_BLOCKS:
                own.setdefault(name, []).append((count, number))
        odd += any(math.isnan(totals[name][-1]) for name in ("pseudo_gradient_norm", "cosine"))
        seconds = line.get("seconds")
        for name, value in (seconds if isinstance(seconds, dict) else {}).items():
            if name in phases or len(phases) < _MOST_PHASES:
                column = phases.setdefault(name, [])
                column += [math.nan] * (count - len(column)) + [_number(value)]
        for name, row in _block_rows(line, count):
            if name in rows or len(rows) < _MOST_BLOCKS:
                rows.setdefault(name, []).append(row)
        count += 1
    for name in ("step", "round"):
        totals[name] = [value if 0 <= value < _LARGEST_COUNT else math.nan for value in totals[name]]
    keep = _in_order(totals["step"], keys, record.problems)
    place = np.cumsum(keep) - 1
    record.rounds = {name: np.array(values)[keep] for name, values in totals.items()}
    record.phases = {
        name: np.array(values + [math.nan] * (count - len(values)))[keep] for name, values in phases.items()
    }
    kept = {
        name: [(int(place[int(row[0])]), *row[1:]) for row in found if keep[int(row[0])]]
        for name, found in rows.items()
    }
    record.blocks = [_block(WHOLE if len(rows) == 1 else name, found) for name, found in kept.items() if found]
    numbers = {name: [number for line, number in found if keep[line]] for name, found in own.items()}
    record.recorded = min((len(found) for found in numbers.values()), default=0)
    _check_numbers(record, numbers)
    if wrong:
        record.problems.append(
            f"{wrong:,} lines of {ROUNDS} hold something of a wrong kind where a whole number (step, round), a param "
            "group or a fragment should be; that part is left out."
        )
    if odd:
        record.problems.append(
            f"{odd:,} of {count:,} rounds have no finite number for the norm or the cosine of the pseudo-gradient."
        )


def _block_rows(line: dict[str, Any], index: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Name and numbers of each block of a round's line: a fragment, or a param group where there are several."""
    groups, parts = _list(line, "groups"), _list(line, "fragments")
    for place, group in enumerate(groups):
        if not isinstance(group, dict):
            continue
        name, number = f"param group {place}", line.get("round")
        part = parts[place] if len(parts) == len(groups) else None
        if isinstance(part, dict):
            name, number = f"fragment {part.get('name', place)}", part.get("round", number)
        restarted = _number(group.get("restarted"), flag=True)
        yield name, (index, _number(number), restarted, *(_number(group.get(key)) for key in _MEASURED))


def _list(line: dict[str, Any], key: str) -> list[Any]:
    value = line.get(key)
    return value if isinstance(value, list) else []


def _wrong(line: dict[str, Any]) -> bool:
    """Whether a round's line holds something of another kind than a trainer writes."""
    counts = [line[name] for name in ("step", "round") if line.get(name) is not None]
    counts += [
        part["round"] for part in _list(line, "fragments") if isinstance(part, dict) and part.get("round") is not None
    ]
    lists = [line[name] for name in ("groups", "fragments") if line.get(name) is not None]
    entries = [entry for name in ("groups", "fragments") for entry in _list(line, name)]
    return (
        any(type(value) is not int or not 0 <= value < _LARGEST_COUNT for value in counts)
        or not all(isinstance(value, list) for value in lists)
        or not all(isinstance(entry, dict) for entry in entries)
    )


def _fragments(line: dict[str, Any]) -> tuple[str, ...]:
    """Names of the fragments that a line is of; none where it does not say."""
    return tuple(str(part.get("name")) for part in _list(line, "fragments") if isinstance(part, dict))


def _own_rounds(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The number of its own round, for each fragment of a line."""
    parts = [part for part in _list(line, "fragments") if isinstance(part, dict)]
    for part in parts:
        yield f" of fragment {part.get('name')}", _number(part.get("round", line.get("round")))
    if not parts:
        yield "", _number(line.get("round"))


def _in_order(steps: list[float], keys: list[tuple[str, ...]], problems: list[str]) -> NDArray[np.bool_]:
    """Which lines to keep: the last of those of one step and the same fragments, and none that goes back."""
    named = list(zip(steps, keys, strict=True))
    last = {key: line for line, key in enumerate(named)}
    keep = np.ones(len(steps), dtype=bool)
    reached: dict[tuple[str, ...], float] = {}
    twice = back = 0
    for line, (step, key) in enumerate(named):
        if math.isnan(step):
            continue
        if last[step, key] != line:
            keep[line], twice = False, twice + 1
        elif step < reached.get(key, -math.inf):
            keep[line], back = False, back + 1
        else:
            reached[key] = step
    if twice:
        problems.append(f"{ROUNDS} has {twice:,} lines whose step comes again further down; the last of each is used.")
    if back:
        problems.append(f"{ROUNDS} has {back:,} lines whose step is smaller than one before; left out.")
    return keep


def _check_numbers(record: RunRecord, numbers: dict[str, list[float]]) -> None:
    """Name what is missing, repeated or beyond the plan among the rounds that are left."""
    for name, found in list(numbers.items())[:_MOST_PHASES]:
        known = [value for value in found if math.isfinite(value)]
        jumps = np.diff([0.0, *known])
        missing, again = int(np.sum(np.maximum(jumps - 1, 0))), int(np.sum(jumps < 1))
        if missing:
            first = known[int(np.flatnonzero(jumps > 1)[0])]
            record.problems.append(
                f"Rounds{name} are missing: {missing:,}, the first of them before round {first:.0f}."
            )
        if again:
            record.problems.append(f"Round numbers{name} do not increase in {again:,} places.")
    limit = record.number("steps")
    beyond = int(np.sum(record.rounds["step"] > limit))
    if beyond:
        record.problems.append(
            f"{beyond:,} rounds lie beyond the plan: their step is larger than {limit:.0f} (--steps)."
        )


def _block(name: str, rows: list[tuple[float, ...]]) -> Block:
    table = np.array(rows, dtype=np.float64)
    return Block(
        name.removeprefix("fragment "),
        table[:, 0].astype(np.int64),
        table[:, 1],
        table[:, 2] == 1,
        *(table[:, 3 + place] for place in range(len(_MEASURED))),
    )


def _number(value: Any, *, flag: bool = False) -> float:
    """A number that is finite, or nan; with `flag`, true and false are 1 and 0."""
    kind = type(value)
    if kind is float:  # a long run has millions of them
        return value if value - value == 0 else math.nan
    if kind is bool:
        return float(value) if flag else math.nan
    try:
        return float(value) if kind is int else math.nan
    except OverflowError:
        return math.nan
