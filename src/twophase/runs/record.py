"""Read a run's folder, finished or not, as columns of numbers. A missing file is an empty column."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.config import flatten, load_yaml
from twophase.errors import UsageError
from twophase.files import read_jsonl
from twophase.restart import RestartPolicy, parse
from twophase.rule import OuterRule
from twophase.runs.config import OuterConfig
from twophase.runs.folder import CONFIG, ENV, METRICS, ROUNDS, STEPS, SUMMARY, read_summary

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
    """A param group or fragment, with a row for each of its rounds: that in `RunRecord.rounds`, and its own number."""

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
        config: dotted paths and values; of a finished run there is a summary too.
        rounds: columns of `rounds.jsonl`, all of one length; a line for each sync, of one fragment or of several.
        recorded: rounds that every fragment has ended.
        phases: seconds of each phase, the same length.
        metrics, steps: columns of `metrics.jsonl` and `steps.jsonl`, a row a step.
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

    @property
    def state(self) -> str:
        """`finished`, `diverged`, or `running`, which a killed run is too."""
        if self.summary is None:
            return "running"
        return "diverged" if self.summary.get("diverged") else "finished"

    @property
    def unit(self) -> str:
        """Unit of its losses as the task describes it, after a space; empty without one."""
        return f" {self.environment['loss_unit']}" if self.environment.get("loss_unit") else ""

    @property
    def outer(self) -> OuterConfig | None:
        """The outer optimizer without its restarts; None where there is none, or one that only the user's loop has."""
        values: dict[str, Any] = {path[6:]: value for path, value in self.config.items() if path.startswith("outer.")}
        values["restart"] = "never"
        with suppress(UsageError):
            return OuterConfig(**values) if "method" in values else None
        return None

    @property
    def rule(self) -> OuterRule | None:
        """The outer rule, if nothing but it moves the anchors."""
        return self.outer.rule() if self.outer and self.outer.is_rule else None

    @property
    def outer_words(self) -> str:
        """The outer optimizer in words; empty if the configuration holds none."""
        return self.outer.describe() if self.outer else str(self.config.get("outer.method", ""))

    def policy(self, block: str = WHOLE) -> RestartPolicy | None:
        """Return the restart policy of a block, if the configuration holds one."""
        by_block = dict(word.split("=", 1) for word in self.config.get("sync.restart") or [] if "=" in word)
        text = by_block.get(block, self.config.get("outer.restart"))
        return None if text is None else parse(str(text))

    @property
    def restart(self) -> str:
        """The restart policy in words: a policy for each fragment, or the same for all."""
        words = self.config.get("sync.restart") or [self.config.get("outer.restart", "unknown")]
        return ", ".join(map(str, words))

    def number(self, path: str) -> float:
        """Return a value of the configuration as a number, else nan."""
        return _number(self.config.get(path))

    @property
    def planned_rounds(self) -> int | None:
        """Rounds of the whole run, by its configuration."""
        steps, inner = self.number("steps"), self.number("inner_steps")
        return math.ceil(steps / inner) if steps >= 1 and inner >= 1 else None

    def curve(self, name: str) -> tuple[Column, Column]:
        """Return steps and values of the metrics that have a value of this name; empty if none has."""
        values = self.metrics.get(name, np.array([]))
        rows = np.flatnonzero(~np.isnan(values))
        return self.metrics.get("step", values)[rows], values[rows]

    def inner_lr(self, index: NDArray[np.int64]) -> Column | None:
        """Return the inner learning rate at the end of each of some rounds; None where the metrics do not have it."""
        rates = dict(zip(*(values.tolist() for values in self.curve("inner_lr")), strict=True))
        shown = np.array([rates.get(step, math.nan) for step in self.rounds["step"][index].tolist()])
        return shown if np.isfinite(shown).any() else None


def is_run(path: Path) -> bool:
    """Return whether a folder looks like that of a run."""
    return any((path / name).is_file() for name in (CONFIG, ROUNDS, METRICS, SUMMARY))


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `rounds.jsonl`; of a round that was repeated, the last."""
    rows = {}
    for line in read_jsonl(path / ROUNDS):
        parts = [(part["name"], part["round"]) for part in line.get("fragments") or []]
        rows[str(parts or line["round"])] = line
    return list(rows.values())


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the lines of another log, those of a step as one, in which the last value of a name counts."""
    rows: dict[int, dict[str, Any]] = {}
    for line in read_jsonl(path):
        rows[line["step"]] = rows.get(line["step"], {}) | line
    return list(rows.values())


def read_record(path: Path) -> RunRecord:
    """Read a run's folder; a UsageError for another one."""
    if not is_run(path):
        raise UsageError(f"{path}: must be the folder of a run, the --out of `twophase train`")
    config, environment, lines = path / CONFIG, path / ENV, read_rounds(path)
    parts = [part["name"] for line in lines for part in line.get("fragments") or [{"name": ""}]]
    record = RunRecord(
        path,
        config=flatten(load_yaml(config)) if config.exists() else {},
        environment=json.loads(environment.read_bytes()) if environment.exists() else {},
        summary=read_summary(path),
        rounds=_columns(lines, (*_TOTALS, *MEASURED)),
        recorded=min((parts.count(name) for name in {*parts}), default=0),
        phases=_columns([line.get("seconds") or {} for line in lines]),
        metrics=_columns(read_steps(path / METRICS)),
        steps=_columns(read_steps(path / STEPS)),
    )
    record.blocks = _blocks(lines, several=len(record.config.get("sync.fragments") or []) > 1)
    return record


def _number(value: Any) -> float:
    """Return a value of JSON as a float, nan where it is no number."""
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST else math.nan


def _columns(lines: Sequence[Line], names: Collection[str] = ()) -> dict[str, Column]:
    """Return columns of numbers by name, a row for each line; without names, of every name that occurs."""
    return {
        name: np.array([_number(line.get(name)) for line in lines], dtype=np.float64)
        for name in names or dict.fromkeys(chain.from_iterable(lines))
    }


def _blocks(lines: Sequence[Line], *, several: bool) -> list[Block]:
    """Return the blocks of all lines: fragments, or param groups where a line has more of them."""
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
        blocks.append(Block(name if len(rows) > 1 else WHOLE, index, number, restarted, **columns))
    return blocks
