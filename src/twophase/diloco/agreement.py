"""What the processes must agree on: how they were started, what a round's decisions rest on, and what it has led to.

Replicas that drift apart would train on unnoticed. So everything that they must have in common is compared, by a few
bytes, and a difference ends the run with its name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import twophase
from twophase.base.errors import RunError
from twophase.base.source import source_digest
from twophase.diloco.communicator import Communicator, Interrupted, SingleProcess
from twophase.diloco.fragment import Fragment
from twophase.diloco.sweep import dots_on_device
from twophase.optim.outer import OuterSGD
from twophase.optim.products import Dots
from twophase.policies.base import AGREEMENT


class Disagreement(RunError):  # noqa: N818 - it says what there is
    """Processes that should hold the same bits do not. The message names the first fragment that differs, and how."""


def same_start(communicator: Communicator, description: Mapping[str, Any], replicas: int) -> list[int]:
    """Refuse to train, on every process alike, when the processes were not started alike.

    Args:
        communicator: the processes.
        description: what this process was started with, by the words that name it; JSON values.
        replicas: how many this process has.

    Returns:
        How many each process has.

    Raises:
        ValueError: naming the first difference.
    """
    here = json.loads(json.dumps(versions() | dict(description)))
    rank = communicator.rank
    everyone = communicator.gather([here, replicas])
    for other, (theirs, _) in enumerate(everyone):
        difference = first_unlike(here, theirs)
        if difference is not None:
            what, mine, its = difference
            raise ValueError(
                f"DiLoCo: {what} differ between process {rank} ({mine}) and process {other} ({its}); start all "
                "processes with the same program and options"
            )
    return [count for _, count in everyone]


_ROOMS = ("rule.py", "restart.py", "policies", "base", "optim", "diloco")
"""Code that the engine's numbers rest on; a trainer adds its own facts by `DiLoCo(alike=...)`."""


def versions() -> dict[str, str]:
    """The engine's code: an edit under one version number makes replicas as unlike as another release."""
    folder = Path(__file__).parents[1]
    release = f"{twophase.__version__}, source {source_digest(folder / room for room in _ROOMS)}"
    return {"versions of twophase": release, "versions of torch": str(torch.__version__)}


def first_unlike(here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first name under which two say different things, and what they say; None when they agree."""
    for what in [*here, *(what for what in there if what not in here)]:
        if here.get(what) != there.get(what):
            return what, *_difference(here.get(what, "nothing"), there.get(what, "nothing"))
    return None


def _difference(here: Any, there: Any) -> tuple[str, str]:
    """The first place where two JSON values part, as text: a whole list of parameters would hide it."""
    if isinstance(here, dict) and isinstance(there, dict):
        for key in [*here, *(key for key in there if key not in here)]:
            if here.get(key) != there.get(key):
                return _with(f"{key}: ", _difference(here.get(key, "nothing"), there.get(key, "nothing")))
    if isinstance(here, list) and isinstance(there, list):
        if len(here) != len(there):
            return f"{len(here)} of them", f"{len(there)}"
        for first, second in zip(here, there, strict=True):
            if first != second:
                return _difference(first, second)
    return str(here)[:200], str(there)[:200]


def _with(prefix: str, pair: tuple[str, str]) -> tuple[str, str]:
    return prefix + pair[0], prefix + pair[1]


@dataclass(frozen=True, slots=True)
class Shared:
    """What a round's decisions rest on, the same on every process.

    Args:
        signals: means over the replicas.
        dots: <g, g>, <m, m> and <g, m> of each param group of each fragment; None where no policy needs them.
        probes: the losses of the candidates of each fragment's restart policy; empty where it has none.
    """

    signals: dict[str, float]
    dots: list[list[Dots]] | None
    probes: Sequence[Sequence[float]] = ()

    @property
    def reported(self) -> dict[str, float]:
        """The signals that `step` was given."""
        return {name: value for name, value in self.signals.items() if not name.startswith(_SQUARE)}

    def shown(self, index: int) -> dict[str, float]:
        """What the restart policies of the fragment at an index are shown: the signals, and how the replicas agree."""
        signals = self.reported
        square = self.signals.get(f"{_SQUARE}{index}")
        if square is not None and self.dots is not None:
            whole = sum(gg for gg, _, _ in self.dots[index])
            signals[AGREEMENT] = whole / square if square != 0 else 1.0
        return signals


_SQUARE = "squared norm of a replica's pseudo-gradient, fragment "


def squares(communicator: Communicator, sums: Sequence[torch.Tensor | None], replicas: int) -> dict[str, float]:
    """The mean squared norm of this process's replicas' own pseudo-gradients, by the names of `Shared.shown`.

    Args:
        communicator: the processes.
        sums: of the squared norms, of each fragment that is measured.
        replicas: of this process.
    """
    means = {f"{_SQUARE}{index}": float(total) / replicas for index, total in enumerate(sums) if total is not None}
    if not means:
        return means
    parts = communicator.exchange_in_replica(list(means.values()))  # of a sharded replica each has a part of the norm
    return {name: sum(column) for name, column in zip(means, zip(*parts, strict=True), strict=True)}


def agree(
    communicator: Communicator, fragments: Sequence[Fragment], weight: float, signals: Mapping[str, float]
) -> Shared:
    """Average the signals, and take over process 0's measurements.

    Equal bits need not give equal norms on unlike machines, which add up in other orders, and a restart policy that
    stands at its threshold would then decide one thing here and another there. So all decide by the same numbers.

    Args:
        communicator: the processes.
        fragments: those that take their outer step next; each has its mean pseudo-gradient in `.grad`.
        weight: replicas of this process that count.
        signals: this process's values.
    """
    measured = communicator.sharded or any(_decides_by_measure(fragment) for fragment in fragments)
    if type(communicator) is SingleProcess and not measured:
        return Shared({name: float(signals[name]) for name in sorted(signals)}, None)
    dots = [_dots(fragment) for fragment in fragments] if measured else []
    names, values = _same_signals(communicator, weight, signals)
    if not names and not measured:
        return Shared({}, None)
    flat = [number for of_fragment in dots for of_group in of_fragment for number in of_group]
    parts = communicator.exchange_in_replica([*values, *flat])
    alike = [1.0] * len(parts)
    means = [_mean(column, alike) for column in list(zip(*parts, strict=True))[: len(names)]]
    totals = [sum(column) for column in list(zip(*parts, strict=True))[len(names) :]]
    everyone = communicator.exchange([weight, *means, *totals])
    averages = dict(zip(names, _weighted_mean([row[: 1 + len(names)] for row in everyone]), strict=True))
    if not measured:
        return Shared(averages, None)
    first = iter(everyone[0][1 + len(names) :])
    return Shared(averages, [[(next(first), next(first), next(first)) for _ in of_group] for of_group in dots])


def _weighted_mean(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of rows of (weight, values...), over those with weight."""
    counted = [row for row in rows if row[0]]
    weights = [row[0] for row in counted]
    return [_mean(column, weights) for column in list(zip(*counted, strict=True))[1:]]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean; what all have alike, such as the progress, unrounded: it may stand at a policy's threshold."""
    if all(value == values[0] for value in values):
        return values[0]
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def averaged(communicator: Communicator, weight: float, values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Lists of numbers, as many on every process, averaged over the replicas (and over the shards of each)."""
    flat = [number for numbers in values for number in numbers]
    parts = communicator.exchange_in_replica(flat)
    means = [_mean(column, [1.0] * len(parts)) for column in zip(*parts, strict=True)]
    result = iter(_weighted_mean(communicator.exchange([weight, *means])))
    return [[next(result) for _ in numbers] for numbers in values]


def _same_signals(
    communicator: Communicator, weight: float, signals: Mapping[str, float]
) -> tuple[list[str], list[float]]:
    """Return the names of the signals, and this process's values; a process without weight need not have any.

    What follows exchanges as many numbers as there are names: with others, strangers would be averaged, or the
    transport would fail without a word of the reason.

    Raises:
        ValueError: processes with weight do not give the same signals.
    """
    names = sorted(signals)
    values = [float(signals[name]) for name in names]
    head: list[float] = [len(names), *_halves(hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16])]
    if any(part != head for part in communicator.exchange_in_replica(head)):
        raise ValueError(
            "DiLoCo: step(signals=...) has other names in another shard of this replica; give the same ones"
        )
    everyone = communicator.exchange([weight, *head])
    if all(row[1:] == head for row in everyone):
        return names, values
    by_process = communicator.gather([weight, names])
    first, counted = next(((n, row[1]) for n, row in enumerate(by_process) if row[0]), (0, names))
    for number, (counts, theirs) in enumerate(by_process):
        if counts and theirs != counted:
            raise ValueError(
                f"DiLoCo: step(signals=...) differs between process {first} ({', '.join(counted) or 'none'}) and "
                f"process {number} ({', '.join(theirs) or 'none'}); give the same names on every process"
            )
    return (names, values) if names == counted else (counted, [0.0] * len(counted))


@dataclass(frozen=True, slots=True)
class Attendance:
    """The replicas that take part in a sync of an elastic communicator.

    Args:
        running: whether any of them is in the middle of a run.
        ready: whether all of them have restored what they have on disk.
        present: replicas that are there.
        replicas: those that count in the mean.
    """

    running: bool
    ready: bool
    present: int
    replicas: int


def attend(
    communicator: Communicator,
    fragments: Sequence[Fragment],
    description: Mapping[str, Any],
    *,
    replicas: int,
    weight: int,
    running: bool,
    ready: bool,
    position: tuple[int, int, int],
) -> Attendance:
    """Tell the others what this process brings to a sync, and see that all stand at the same place.

    Args:
        communicator: the processes.
        fragments: all of the engine's.
        description: what this process was started with, as for `same_start`.
        replicas: replicas of this process.
        weight: those that count in the mean.
        running: whether this process has joined before.
        ready: whether it has restored what it has on disk.
        position: number of the first fragment that it synchronises, how many, and its inner step in the round; compared
            in a run under way.

    Raises:
        ValueError: at the start of a run, the processes were not started alike.
        Disagreement: anchor, buffers, counters or positions differ.
    """
    # First a few words that are as many on all processes, whatever they were started with: unlike lengths would
    # fail without a reason. A joiner of a run under way has compared itself before it took the state over.
    text = json.dumps([versions(), description], sort_keys=True)
    kinds = communicator.exchange([running, *_halves(hashlib.sha256(text.encode()).hexdigest()[:16])])
    if not any(row[0] for row in kinds) and any(row != kinds[0] for row in kinds):
        same_start(communicator, description, replicas)
    digests = [fragment.digest() for fragment in fragments]
    digits = [half for digest in digests for text in digest.values() for half in _halves(text)]
    everyone = communicator.exchange([running, replicas, weight, ready, *position, *digits])
    fault = _first_difference([row[4 + len(position) :] for row in everyone], fragments, digests)
    under_way = any(row[0] for row in everyone)
    if under_way and fault is None:
        fault = _unlike_positions([row[4 : 4 + len(position)] for row in everyone])
    if fault is not None:
        remedy = _REMEDY if under_way else "start all replicas from the same seed, checkpoint and options"
        raise Disagreement(f"DiLoCo: before a sync {fault}. {remedy}")
    ready = all(row[3] for row in everyone)
    return Attendance(under_way, ready, int(sum(row[1] for row in everyone)), int(sum(row[2] for row in everyone)))


def _decides_by_measure(fragment: Fragment) -> bool:
    return isinstance(fragment.outer, OuterSGD) and (
        fragment.outer.needs_measuring or bool(fragment.outer.needs & {AGREEMENT})
    )


def _dots(fragment: Fragment) -> list[Dots]:
    """The inner products of each param group; for an optimizer of others, <g, g> alone."""
    if isinstance(fragment.outer, OuterSGD):
        return dots_on_device(fragment) if fragment.on_device else fragment.outer.dots()
    gradient = fragment.gradient
    return [(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2, 0.0, 0.0)]


def prove(
    communicator: Communicator, round_: int, fragments: Sequence[Fragment], digests: list[dict[str, str]]
) -> None:
    """Compare anchor, buffers and counters between all processes after a round.

    Args:
        communicator: the processes.
        round_: the round, for the message.
        fragments: those that have ended it.
        digests: of each.

    Raises:
        Disagreement: naming the first difference.
    """
    if communicator.size == 1:
        return
    digits = [half for digest in digests for text in digest.values() for half in _halves(text)]
    try:
        everyone = communicator.exchange(digits)
    except Interrupted:  # the round counts already, and the members of the next one compare everything before it
        return
    fault = _first_difference(everyone, fragments, digests)
    if any(row[0] for row in communicator.exchange_in_replica([float(fault is not None)])):
        fault = fault or "a fragment differs in another shard of this replica"
        raise Disagreement(f"DiLoCo: after round {round_} {fault}. {_REMEDY}")


_REMEDY = (
    "All processes must compute the same outer step: look for code that writes to the anchor or the outer optimizer on "
    "one of them only, for unlike versions, or for faulty memory; then resume from the newest checkpoint"
)


def _first_difference(
    everyone: Sequence[Sequence[float]], fragments: Sequence[Fragment], digests: Sequence[Mapping[str, str]]
) -> str | None:
    """Where the digests of the processes part first, in words."""
    for other, theirs in enumerate(everyone):
        for place, pair in enumerate(zip(theirs, everyone[0], strict=True)):
            if pair[0] != pair[1]:
                number, what = divmod(place // 2, len(digests[0]))
                return (
                    f"fragment {fragments[number].name!r} differs in its {list(digests[0])[what]} between process 0 "
                    f"and process {other}"
                )
    return None


def _unlike_positions(everyone: Sequence[Sequence[float]]) -> str | None:
    """Which process synchronises other fragments than the first, or after another inner step, in words."""
    places = [f"{int(count)} from number {int(first)}, after inner step {int(step)}" for first, count, step in everyone]
    for other, theirs in enumerate(places):
        if theirs != places[0]:
            return f"the fragments of the sync differ between process 0 ({places[0]}) and process {other} ({theirs})"
    return None


def _halves(text: str) -> tuple[int, int]:
    """Sixteen hexadecimal digits as two whole numbers that a float holds exactly."""
    value = int(text, 16)
    return value >> 32, value & 0xFFFFFFFF
