"""Read a run's folder, finished or not, as columns of numbers; name what is missing in a sentence each.

A folder may lack files, and a kill may have torn the last line of a log. Any other damage is refused with the file, the
line and a remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from twophase import __version__
from twophase.base.config import UsageError, fingerprint, flatten, load_yaml
from twophase.base.reading import read_json_object
from twophase.restart import RestartPolicy, parse
from twophase.rule import OuterRule
from twophase.runs.folder import CONFIG, ENV, METRICS, RECORDED, ROUNDS, STEPS, SUMMARY, USER, list_some, read_summary
from twophase.runs.log import read_log
from twophase.runs.method import describe, rule_of

Column = NDArray[np.float64]
Line = Mapping[str, Any]
Config = TypeVar("Config")

WHOLE = "whole model"
"""Name of the block of a run that has a single one."""
LARGEST = 1e100
"""Numbers beyond this, as a diverged run may write, count as missing: their squares and sums would overflow."""
_LARGEST_COUNT = 1 << 53  # below it, a float holds every whole number
_TOTALS = tuple("step round inner_steps replicas restarted complete bytes_sent".split())
_MEASURED = ("pseudo_gradient_norm", "buffer_norm", "cosine", "gain")


@dataclass(slots=True)
class Block:
    """A param group or fragment, with a row for each of its rounds.

    Args:
        name: name for people.
        index: the row of `RunRecord.rounds` of each row, from 0.
        number: the block's round numbers.
        restarted: True where its momentum restarted.
        pseudo_gradient_norm, buffer_norm, cosine, gain: values of a round's report; nan without a number.
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
    """Content of a run's folder.

    Args:
        path: the folder.
        config: dotted paths and values; empty without `config.yaml`.
        environment: content of `env.json`, or empty.
        summary: summary of a finished run, else None.
        rounds: columns of `rounds.jsonl`, all of one length; a line for each sync, of one fragment or of several.
        recorded: rounds that every fragment has ended.
        phases: seconds of each phase, the same length.
        blocks: blocks in order of appearance.
        metrics: columns of `metrics.jsonl`.
        measured: rows of each of these columns that have an entry, finite or not.
        steps: columns of `steps.jsonl`.
        problems: missing parts, a sentence each.
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
    measured: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    steps: dict[str, Column] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """`finished`, `diverged`, or `unfinished`."""
        if self.summary is None:
            return "unfinished"
        return "diverged" if self.summary.get("diverged") else "finished"

    @property
    def unit(self) -> str:
        """Unit of its losses as the task describes it, after a space; empty without one."""
        unit = self.environment.get("loss_unit")
        if isinstance(unit, str):
            return f" {unit}" if unit else ""
        # Earlier versions recorded none: theirs is the language model's, unless the configuration names another task.
        return "" if self.config.get(RECORDED) is True or "task.name" in self.config else " nats a token"

    @property
    def rule(self) -> OuterRule | None:
        """The outer rule, if the configuration holds one and nothing but it moves the anchors."""
        try:
            options: dict[str, Any] = {"filter": "none", "schedule": "constant", "form": "sum"} | self._outer
            is_more = options["filter"] != "none" or options["schedule"] != "constant"
            return None if is_more else rule_of(*(options[name] for name in ("method", "lr", "momentum", "form")))
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def outer_words(self) -> str:
        """The outer optimizer in words; empty if the configuration holds none."""
        try:
            return describe(self._outer)
        except (KeyError, TypeError, ValueError):
            return str(self._outer.get("method", ""))  # of another program's optimizer

    @property
    def _outer(self) -> dict[str, Any]:
        return {path[6:]: value for path, value in self.config.items() if path.startswith("outer.")}

    @property
    def _by_fragment(self) -> list[Any]:
        words = self.config.get("sync.restart") or []
        return list(words) if isinstance(words, list | tuple) else [words]

    def policy(self, block: str = WHOLE) -> RestartPolicy | None:
        """Return the restart policy of a block, if the configuration holds one."""
        by_block = dict(str(word).split("=", 1) for word in self._by_fragment if "=" in str(word))
        text = by_block.get(block, self.config.get("outer.restart"))
        try:
            return parse(str(text)) if isinstance(text, (str, int)) else None
        except ValueError:
            return None

    @property
    def restart(self) -> str:
        """The restart policy in words: a policy for each fragment, or the same for all."""
        words = self._by_fragment or [self.config.get("outer.restart", "unknown")]
        return ", ".join(map(str, words))

    def number(self, path: str) -> float:
        """Return a value of the configuration as a number, else nan."""
        return _number(self.config.get(path))

    def count(self, path: str) -> float:
        """Return a value of the configuration as a count; nan if it is no number, or too large for a count."""
        value = self.number(path)
        return value if 0 <= value < _LARGEST_COUNT else math.nan

    @property
    def planned_rounds(self) -> int | None:
        """Rounds of the whole run, by its configuration."""
        steps, inner = self.count("steps"), self.count("inner_steps")
        return math.ceil(steps / inner) if steps >= 1 and inner >= 1 else None

    def curve(self, name: str) -> tuple[Column, Column]:
        """Return steps and values of the lines of metrics that have a value of this name; none if no line has both."""
        if not {name, "step"} <= self.metrics.keys():
            return np.array([]), np.array([])
        rows = self.measured[name]
        return self.metrics["step"][rows], self.metrics[name][rows]

    def inner_lr(self, index: NDArray[np.int64]) -> Column | None:
        """Return the inner learning rate at the end of each of some rounds; None where the metrics do not have it."""
        steps, rates = self.metrics.get("step"), self.metrics.get("inner_lr")
        if steps is None or rates is None:
            return None
        by_step = {step: rate for step, rate in zip(steps.tolist(), rates.tolist(), strict=True) if rate > 0}
        shown = np.array([by_step.get(step, math.nan) for step in self.rounds["step"][index].tolist()])
        return shown if np.isfinite(shown).any() else None


def is_run(path: Path) -> bool:
    """Return whether a folder looks like that of a run."""
    return any((path / name).is_file() for name in (CONFIG, ROUNDS, METRICS, SUMMARY))


def read_record(path: Path, paths: Collection[str] = ()) -> RunRecord:
    """Read a run's folder.

    Args:
        path: the folder.
        paths: dotted paths that a configuration of this version has; others are named among the problems. Empty means
            that any path is accepted.

    Raises:
        UsageError: the path is no folder, nothing in it is a run's, or a file is damaged before its last line.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UsageError(f"{path}: {what}; give the folder of a run, its --out")
    if not is_run(path):
        raise UsageError(
            f"{path}: is not the folder of a run (it has no {CONFIG}, {ROUNDS}, {METRICS} or {SUMMARY}). Give the "
            "--out of `twophase train`, or (for reports) a folder below runs/ of a sweep"
        )
    record = RunRecord(path)
    record.problems += [f"{name} is missing." for name in (CONFIG, ENV, ROUNDS, METRICS) if not (path / name).is_file()]
    try:
        tree = load_yaml(path / CONFIG) if (path / CONFIG).is_file() else {}
        record.config = flatten(tree)
    except UsageError as error:  # in whose words the file was an option
        fault = str(error).removeprefix(f"--config {path / CONFIG}: ")
        raise UsageError(
            f"{path / CONFIG}: cannot be used ({fault}); put it back, or move it out of the folder"
        ) from None
    record.environment = _json_object(path / ENV)
    _read_rounds(record)
    lines = _log(record, METRICS)
    record.metrics, record.steps = _columns(lines), _columns(_log(record, STEPS))
    record.measured = {name: np.array([name in line for line in lines]) for name in record.metrics}
    record.summary = _json_object(path / SUMMARY) or None
    if record.summary is None:
        record.problems.append("The run has not finished: there is no summary.json yet.")
    elif record.config and read_summary(path, fingerprint(tree)) is None:
        record.problems.append(
            "summary.json does not fit the run's configuration, or lacks a value; its numbers are shown as they are."
        )
    ended = _number((record.summary or {}).get("rounds"))
    if ended > (last := np.nanmax(record.rounds["round"], initial=0)):
        record.problems.append(f"The last rounds are missing: {ended - last:,.0f}, after round {last:.0f}.")
    unknown = [
        repr(str(name)[:80])
        for name in record.config
        if paths and name not in {*paths, RECORDED} and not name.startswith((f"{USER}.", "task."))
    ]
    if unknown:
        count = "a value" if len(unknown) == 1 else f"{len(unknown):,} values"
        record.problems.append(
            f"{CONFIG} holds {count} that twophase {__version__} does not know, as a newer version may have written: "
            f"{list_some(unknown)}. What the run did with that is not shown."
        )
    return record


def run_config(run: Path, parse: Callable[[Mapping[str, Any]], Config]) -> tuple[Config, str]:
    """Return the configuration of a run's folder as `parse` makes it of its tree, and its fingerprint.

    Raises:
        UsageError: no folder, none of a run, or a configuration that cannot be read by this version or from here.
    """
    path = run / CONFIG
    if not path.is_file():
        what = "there is no such folder" if not run.is_dir() else f"holds no {CONFIG}, so it is not the folder of a run"
        raise UsageError(f"{run}: {what}; give the --out of `twophase train`, or the folder of one run of a sweep")
    try:
        tree = load_yaml(path)
        if not tree.get(RECORDED):
            return parse(tree), fingerprint(tree)
    except (UsageError, TypeError, ValueError, AttributeError) as error:
        fault, remedy = str(error).removeprefix(f"--config {path}: "), f"put the run's own {CONFIG} back"
        if fault.startswith("--task "):  # the remedy in it is for training
            fault = fault.partition("; ")[0]
            remedy = "put the task's file back, or repeat the command in the folder that the run was trained from"
        raise UsageError(f"{path} cannot be used ({fault}); {remedy}") from None
    raise UsageError(
        f"{run}: was recorded from another program's loop, whose model and data are not known here; save or measure "
        "the model there"
    )


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        fault = (
            f"cannot be read ({error.strerror})"
            if isinstance(error, OSError)
            else "is damaged (it holds no JSON object)"
        )
        raise UsageError(f"{path}: {fault}; put it back, or move it out of the folder") from None


def _log(record: RunRecord, name: str) -> list[dict[str, Any]]:
    """Return the lines of a log, with a sentence among the problems for a gap and for a torn last line."""
    path = record.path / name
    lines, gaps = read_log(path)
    record.problems += [
        f"{name} was lost or altered before the run resumed at step {gap['step']} with --accept-logs ({gap['gap']})."
        for gap in gaps
    ]
    if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        record.problems.append(f"The last line of {name} is cut in its middle; left out.")
    return lines


# ------------------------------------------------------------------------------------------------------------ columns


def _number(value: Any) -> float:
    """Return a value of JSON as a float, nan where it is no number."""
    return float(value) if isinstance(value, (int, float)) and abs(value) <= LARGEST else math.nan


def _columns(lines: Sequence[Line], names: Collection[str] = ()) -> dict[str, Column]:
    """Return columns of numbers by name, a row for each line; without names, of every name that occurs."""
    return {
        name: np.array([_number(line.get(name)) for line in lines], dtype=np.float64)
        for name in names or dict.fromkeys(chain.from_iterable(lines))
    }


def _read_rounds(record: RunRecord) -> None:
    """Fill a record's rounds, phases and blocks from `rounds.jsonl`."""
    lines = _log(record, ROUNDS)
    rows: dict[str, list[tuple[int, Line]]] = {}
    numbers: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    fragments = record.config.get("sync.fragments")
    several = isinstance(fragments, list | tuple) and len(fragments) > 1
    for index, line in enumerate(lines):
        try:
            for name, row in _block_rows(line, sizes, several=several):
                rows.setdefault(name, []).append((index, row))
            for part in line.get("fragments") or [{}]:
                name = f" of fragment {part['name']}" if part else ""
                number, rounds = part.get("round", line["round"]), numbers.setdefault(name, [])
                if not isinstance(number, int) or number <= max(rounds[-1:], default=0):
                    raise ValueError(f"round {number}{name} does not come after the round before")
                rounds.append(number)
            if not isinstance(line.get("seconds") or {}, dict):
                raise TypeError(f"seconds are {line['seconds']!r}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{record.path / ROUNDS}: line {index + 1} is no round as twophase writes it ({error}); the file is "
                "damaged: put it back, or take the line out"
            ) from None
    for name, rounds in numbers.items():
        jumps = np.diff(rounds, prepend=0)
        if missing := int(np.sum(jumps - 1)):
            first = rounds[int(np.flatnonzero(jumps > 1)[0])]
            record.problems.append(f"Rounds{name} are missing: {missing:,}, the first of them before round {first}.")
    record.rounds = _columns(lines, (*_TOTALS, *_MEASURED))
    odd = int(np.sum(np.isnan(record.rounds["pseudo_gradient_norm"]) | np.isnan(record.rounds["cosine"])))
    if odd:
        record.problems.append(
            f"{odd:,} of {len(lines):,} rounds have no finite number for the norm or the cosine of the pseudo-gradient."
        )
    record.phases = _columns([line.get("seconds") or {} for line in lines])
    for name, rows_of_block in rows.items():
        index, block_lines = zip(*rows_of_block, strict=True)
        columns = _columns(block_lines, ("round", "restarted", *_MEASURED))
        columns["number"], columns["restarted"] = columns.pop("round"), columns["restarted"] == 1
        shown = WHOLE if len(rows) == 1 else name.removeprefix("fragment ")
        record.blocks.append(Block(shown, np.array(index, dtype=np.int64), **columns))  # type: ignore[arg-type]
    record.recorded = min(map(len, numbers.values()), default=0)


def _block_rows(line: Line, sizes: dict[str, int], *, several: bool) -> Iterator[tuple[str, Line]]:
    """Yield name and numbers of each block of a line: a fragment, or a param group where one has several.

    Args:
        line: line of `rounds.jsonl`.
        sizes: numbers of param groups by fragment, as lines of one fragment have shown them; filled here.
        several: True if the run has several fragments.
    """
    groups, parts = line.get("groups") or [], line.get("fragments") or []
    if len(groups) < len(parts):  # a filter left all of a fragment's replicas out, and which group is whose is unknown
        return
    if len(parts) == 1:
        sizes[parts[0]["name"]] = len(groups)
    owners = [(part, place) for part in parts for place in range(sizes.get(part["name"], 0))]
    are_known = several and len(owners) == len(groups)
    for place, group in enumerate(groups):
        part: Line = {}
        if len(parts) == len(groups):
            part = parts[place]
            name = f"fragment {part['name']}"
        elif are_known:  # fragments take turns, and the first group of each is another block
            part, number = owners[place]
            name = f"fragment {part['name']}"
            if sizes[part["name"]] > 1:
                name = f"param group {number} of {name}"
        else:
            name = f"param group {place}"
        yield name, {**group, "round": part.get("round", line["round"])}
