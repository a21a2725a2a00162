"""Read a run's folder, finished or not, as columns of numbers. A missing file is an empty column."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.config import fingerprint as fingerprint_of
from twophase.config import flatten, load_yaml
from twophase.errors import UsageError
from twophase.files import read_jsonl
from twophase.rule import OuterRule
from twophase.runs.config import OuterConfig
from twophase.runs.folder import CONFIG, ENV, METRICS, ROUNDS, STEPS, SUMMARY

Column = NDArray[np.float64]
Line = Mapping[str, Any]

WHOLE = "whole model"
"""Name of the block of a run that has a single one."""
LARGEST = 1e100
"""Numbers beyond this, as a diverged run may write, count as missing: their squares and sums would overflow."""
_TOTALS = ("step", "round", "inner_steps", "replicas", "restarted", "complete", "bytes_sent")
MEASURED = ("pseudo_gradient_norm", "buffer_norm", "cosine", "gain")


@dataclass(slots=True)
class Block:
    """A param group or fragment, with a row for each of its rounds: that in `RunRecord.rounds`, and its own number.

    `restart` is the text of its restart policy; None where the configuration holds none.
    """

    name: str
    restart: str | None
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
        config: dotted paths and values; `numbers` are those of them that are numbers.
        summary: of a finished run; `results` are the values of it that are numbers.
        state: `finished`, `diverged`, or `running`, which a killed run is too.
        unit: unit of its losses as the task describes it, after a space; empty without one.
        outer: the outer optimizer without its restarts; None where there is none, or one that only the user's loop has.
        rule: the outer rule, if nothing but it moves the anchors.
        outer_words: the outer optimizer in words; empty if the configuration holds none.
        restart: the restart policy in words: a policy for each fragment, or the same for all.
        planned_rounds: rounds of the whole run, by its configuration.
        rounds: columns of `rounds.jsonl`, all of one length; a line for each sync, of one fragment or of several. And
            `inner_lr` at the end of each round, nan where the metrics do not have it.
        recorded: rounds that every fragment has ended.
        phases: seconds of each phase, the same length.
        metrics, steps: columns of `metrics.jsonl` and `steps.jsonl`, a row a step.
    """

    path: Path
    config: dict[str, Any]
    numbers: dict[str, float]
    environment: dict[str, Any]
    summary: dict[str, Any] | None
    results: dict[str, float]
    state: str
    unit: str
    outer: OuterConfig | None
    rule: OuterRule | None
    outer_words: str
    restart: str
    planned_rounds: int | None
    rounds: dict[str, Column]
    recorded: int
    phases: dict[str, Column]
    blocks: list[Block]
    metrics: dict[str, Column]
    steps: dict[str, Column]

    def curve(self, name: str) -> tuple[Column, Column]:
        """Return steps and values of the metrics that have a value of this name; empty if none has."""
        values = self.metrics.get(name, np.array([]))
        rows = np.flatnonzero(~np.isnan(values))
        return self.metrics.get("step", values)[rows], values[rows]


def is_run(path: Path) -> bool:
    """Return whether a folder looks like that of a run."""
    return any((path / name).is_file() for name in (CONFIG, ROUNDS, METRICS, SUMMARY))


def read_summary(path: Path, fingerprint: str | None = None) -> dict[str, Any] | None:
    """Return the outcome of the run with a fingerprint, by default the `config.yaml`'s; None while it is unfinished."""
    with suppress(OSError, ValueError):  # not there, damaged, or without a config.yaml
        record = json.loads((path / SUMMARY).read_bytes())
        if isinstance(record, dict) and record.get("config") == (
            fingerprint or fingerprint_of(load_yaml(path / CONFIG))
        ):
            return record
    return None


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `rounds.jsonl`; of a round that was repeated, the last."""
    rows = {}
    for line in read_jsonl(path / ROUNDS):
        try:
            number, parts = line["round"], [(part["name"], part["round"]) for part in line.get("fragments") or []]
            rows[str(parts or number)] = line
        except (KeyError, TypeError):
            raise UsageError(f"{path / ROUNDS}: each line must have a round, got {line!r:.60}") from None
    return list(rows.values())


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the lines of another log by step, those of a step as one, in which the last value of a name counts."""
    rows: dict[float, dict[str, Any]] = {}
    for line in read_jsonl(path):
        if not isinstance(step := line.get("step"), int | float):
            raise UsageError(f"{path}: each line must have a step, got {line!r:.60}")
        rows[step] = rows.get(step, {}) | line
    return [rows[step] for step in sorted(rows)]


def read_record(path: Path) -> RunRecord:
    """Read a run's folder.

    Raises:
        UsageError: the path is no folder, nothing in it is a run's, or a file of it is not as runs write it.
    """
    if not is_run(path):
        raise UsageError(f"{path}: must be the folder of a run")
    config = flatten(load_yaml(path / CONFIG)) if (path / CONFIG).exists() else {}
    if not all(isinstance(config.get(name, []), list) for name in ("sync.fragments", "sync.restart")):
        raise UsageError(f"{path / CONFIG}: sync.fragments and sync.restart must be lists")
    environment: Any = None
    with suppress(ValueError):
        environment = json.loads((path / ENV).read_bytes()) if (path / ENV).exists() else {}
    if not isinstance(environment, dict):
        raise UsageError(f"{path / ENV}: must hold values by name as JSON")
    given: dict[str, Any] = {name[6:]: value for name, value in config.items() if name.startswith("outer.")}
    outer = None
    with suppress(UsageError, TypeError):  # an optimizer that only the user's loop has
        outer = OuterConfig(**{**given, "restart": "never"}) if "method" in given else None
    lines, summary, metrics = read_rounds(path), read_summary(path), _columns(read_steps(path / METRICS))
    parts = [part["name"] for line in lines for part in line.get("fragments") or [{"name": ""}]]
    rounds = _columns(lines, (*_TOTALS, *MEASURED))
    rates = dict(zip(metrics.get("step", ()), metrics.get("inner_lr", ()), strict=False))
    rounds["inner_lr"] = np.array([rates.get(step, math.nan) for step in rounds["step"]])
    numbers = _numbers(config)
    steps, inner_steps = numbers.get("steps", 0), numbers.get("inner_steps", 0)
    return RunRecord(
        path,
        config,
        numbers,
        environment,
        summary,
        results=_numbers(summary or {}),
        state="running" if summary is None else "diverged" if summary.get("diverged") else "finished",
        unit=f" {environment['loss_unit']}" if environment.get("loss_unit") else "",
        outer=outer,
        rule=outer.rule() if outer and outer.is_rule else None,
        outer_words=outer.describe() if outer else str(given.get("method", "")),
        restart=", ".join(map(str, config.get("sync.restart") or [given.get("restart", "unknown")])),
        planned_rounds=math.ceil(steps / inner_steps) if steps >= 1 and inner_steps >= 1 else None,
        rounds=rounds,
        recorded=min((parts.count(name) for name in {*parts}), default=0),
        phases=_columns([line.get("seconds") or {} for line in lines]),
        blocks=_blocks(lines, config),
        metrics=metrics,
        steps=_columns(read_steps(path / STEPS)),
    )


def _numbers(values: Line) -> dict[str, float]:
    """Return those of some values that are numbers, and finite."""
    return {
        name: float(value) for name, value in values.items() if isinstance(value, int | float) and abs(value) <= LARGEST
    }


def _columns(lines: Sequence[Line], names: Collection[str] = ()) -> dict[str, Column]:
    """Return columns of numbers by name, a row for each line; without names, of every name that occurs."""
    rows = [_numbers(line) for line in lines]
    return {
        name: np.array([row.get(name, math.nan) for row in rows], dtype=np.float64)
        for name in names or dict.fromkeys(chain.from_iterable(lines))
    }


def _blocks(lines: Sequence[Line], config: Line) -> list[Block]:
    """Return the blocks of all lines: fragments, or param groups where a line has more of them."""
    several = len(config.get("sync.fragments") or []) > 1
    restarts = dict(word.split("=", 1) for word in config.get("sync.restart") or [] if "=" in word)
    take_turns = several and any(len(line.get("fragments") or []) == 1 for line in lines)
    rows: dict[str, list[tuple[int, Line]]] = {}
    for index, line in enumerate(lines):
        groups, parts = line.get("groups") or [], line.get("fragments") or []
        if len(parts) == len(groups):
            names = [(part["name"], part["round"]) for part in parts]
        elif take_turns:  # which group is whose is unknown
            continue
        else:
            names = [(f"param group {number}", line["round"]) for number in range(len(groups))]
        for (name, number), group in zip(names, groups, strict=True):
            rows.setdefault(name, []).append((index, {**group, "round": number}))
    blocks = []
    for name, of_block in rows.items():
        columns = _columns([row for _, row in of_block], ("round", "restarted", *MEASURED))
        number, restarted = columns.pop("round"), columns.pop("restarted") == 1
        index = np.array([index for index, _ in of_block])
        text = restarts.get(name, config.get("outer.restart"))
        policy = None if text is None else str(text)
        blocks.append(Block(name if len(rows) > 1 else WHOLE, policy, index, number, restarted, **columns))
    return blocks
