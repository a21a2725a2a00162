"""Reading a run's folder whatever state it is in: unfinished, damaged, of another version, or full of odd numbers.

What is there becomes columns of numbers, nan where there is none; what is wrong or missing becomes a sentence in
`problems`. Nothing is executed, followed or written. Trainers resume by the stricter `twophase.runs.folder`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from twophase import __version__
from twophase.base.config import UsageError
from twophase.policies.base import RestartPolicy
from twophase.policies.text import parse
from twophase.rule import OuterRule
from twophase.runs.folder import CONFIG, ENV, METRICS, ROUNDS, STEPS, SUMMARY, list_some, read_summary
from twophase.runs.jsonl import LARGEST_COUNT, Column, number, read_columns
from twophase.runs.rounds import WHOLE, Block, read_rounds

_LARGEST_FILE = 1 << 22  # bytes of config.yaml, env.json and summary.json
_MOST_NAMES = 500  # values of a configuration that are shown
_LONGEST_NAME = 80  # characters of one that a sentence gives


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

    @property
    def restart(self) -> str:
        """The restart policy in words: each fragment's own, or one for all."""
        own = self.config.get("sync.restart")
        words = ", ".join(map(str, own)) if isinstance(own, (list, tuple)) else ""
        return words or str(self.config.get("outer.restart", "unknown"))

    def number(self, path: str) -> float:
        """A value of the configuration as a number; nan if it is none."""
        return number(self.config.get(path))

    def count(self, path: str) -> float:
        """A value of the configuration that counts something; nan if it is none, or no run counts so far."""
        value = self.number(path)
        return value if 0 <= value < LARGEST_COUNT else math.nan

    @property
    def planned_rounds(self) -> int | None:
        """Rounds of the whole run, by its configuration."""
        steps, inner = self.count("steps"), self.count("inner_steps")
        return math.ceil(steps / inner) if steps >= 1 and inner >= 1 else None

    def inner_lr(self, index: NDArray[np.int64]) -> Column | None:
        """The inner learning rate at the end of each of some rounds; None where the metrics do not have it."""
        steps, rates = self.metrics.get("step"), self.metrics.get("inner_lr")
        mine = self.rounds.get("step")
        if steps is None or rates is None or mine is None:
            return None
        known = np.flatnonzero((rates > 0) & np.isfinite(steps))
        if not len(known):
            return None
        known = known[np.argsort(steps[known], kind="stable")]  # of a step that comes twice the last line counts
        wanted = mine[index]
        place = np.maximum(np.searchsorted(steps[known], wanted, side="right") - 1, 0)
        found = np.where(steps[known][place] == wanted, rates[known][place], math.nan)
        return found if np.isfinite(found).any() else None


def is_run(path: Path) -> bool:
    """Whether a folder looks like that of a run."""
    return any((path / name).is_file() for name in (CONFIG, ROUNDS, METRICS, SUMMARY))


def read_record(path: Path, known: Collection[str] = ()) -> RunRecord:
    """Read a run's folder, whatever is in it.

    Args:
        path: the folder.
        known: dotted paths that a configuration of this version has; others are named among the problems. Empty means
            that nobody knows.

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
            "give the --out of `twophase train`, or (for reports) a folder below runs/ of a sweep"
        )
    record = RunRecord(path)
    record.config = _config(path / CONFIG, record.problems)
    record.environment = _json_object(path / ENV, record.problems)
    found = read_rounds(path, record.problems, last_step=record.count("steps"))
    record.rounds, record.phases, record.blocks = found.columns, found.phases, found.blocks
    record.recorded = found.recorded
    record.metrics = read_columns(path / METRICS, record.problems, expected=True)
    record.steps = read_columns(path / STEPS, record.problems, expected=False)
    _read_end(record)
    _check_version(record, known)
    return record


def _check_version(record: RunRecord, known: Collection[str]) -> None:
    """Say so where a newer version has written the run, or one that has values which this one does not know."""
    version = record.environment.get("twophase")
    if isinstance(version, str) and _version(version) > _version(__version__):
        record.problems.append(
            f"The run was written by twophase {version}, and this is {__version__}: what it does not know is not shown."
        )
    unknown = [repr(path[:_LONGEST_NAME]) for path in record.config if known and path not in known]
    if unknown:
        count = "a value" if len(unknown) == 1 else f"{len(unknown):,} values"
        record.problems.append(
            f"{CONFIG} holds {count} that twophase {__version__} does not know, as a newer version may have written: "
            f"{list_some(unknown)}. What the run did with that is not shown."
        )


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
        return path.read_text(encoding="utf-8-sig", errors="replace")
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
