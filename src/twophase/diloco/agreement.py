"""Agree between processes on how they were started, on the inputs of a round's decisions, and on its result.

Replicas that drift apart would train on unnoticed. So all that they must share is compared by a few bytes, and a
difference ends the run with a message that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import twophase
from twophase.base.errors import RunError
from twophase.base.source import source_digest
from twophase.diloco.communicator import Communicator
from twophase.diloco.fragment import Fragment, short_hash
from twophase.optim.outer import OuterSGD
from twophase.optim.products import Dots
from twophase.policies.base import MEASURED


class Disagreement(RunError):  # noqa: N818 - a public name
    """Processes hold different bits that should be equal. The message names the first fragment that differs."""


# ------------------------------------------------------------------------------------------------------ the start

_ROOMS = ("rule.py", "restart.py", "schedule.py", "policies", "base", "optim", "diloco")
"""Code that the engine's numbers rest on; a trainer adds its facts by `DiLoCo(alike=...)`."""


def versions() -> dict[str, str]:
    """Return version and checksum of the engine's code: replicas may differ by an edit under one version number."""
    folder = Path(__file__).parents[1]
    release = f"{twophase.__version__}, source {source_digest(folder / room for room in _ROOMS)}"
    return {"versions of twophase": release, "versions of torch": str(torch.__version__)}


def same_start(communicator: Communicator, description: Mapping[str, Any], replicas: int) -> list[int]:
    """Refuse to train, on every process, when the processes were not started alike.

    Args:
        communicator: processes of the run.
        description: facts that this process was started with, by the words that name them; JSON values.
        replicas: number of replicas in this process.

    Returns:
        The number of replicas in each process.

    Raises:
        ValueError: the processes differ, or JSON cannot hold a value; the message names the first.
    """
    try:
        text = json.dumps(description, sort_keys=True)
    except TypeError as error:  # in the caller's `alike`
        raise ValueError(f"DiLoCo: alike: {error}; give numbers, texts, lists and dicts of them") from None
    rows = communicator.exchange([replicas, *halves(short_hash(text))])
    if any(row[1:] != rows[0][1:] for row in rows):  # only then sent: many parameters make it very long
        sent = json.loads(json.dumps(description))
        for other, received in enumerate(communicator.gather(sent, dict)):
            difference = first_unlike(sent, received, (f"process {communicator.rank}", f"process {other}"))
            if difference is not None:
                raise ValueError(f"DiLoCo: {difference}; start all processes with the same program and options")
    return [int(row[0]) for row in rows]


def first_unlike(first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str]) -> str | None:
    """Return a sentence on the first difference between two descriptions; None when they agree.

    Args:
        first: JSON values by the words that name them.
        second: JSON values of the other description.
        names: names of the two descriptions, for the sentence.
    """
    for fact, a, b in _unlike_entries(first, second):
        return f"{fact} differ between {names[0]} ({a}) and {names[1]} ({b})"
    return None


def _unlike_entries(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for fact in {**first, **second}:
        a, b = first.get(fact, "nothing"), second.get(fact, "nothing")
        if a != b:
            yield fact, *_difference(a, b)


def _difference(first: Any, second: Any) -> tuple[str, str]:
    """Return the first entries that differ, as text: a whole list of parameters would hide them."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        fact, a, b = next(_unlike_entries(first, second))
        return f"{fact}: {a}", f"{fact}: {b}"
    if isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            return f"{len(first)} of them", f"{len(second)}"
        return next(_difference(a, b) for a, b in zip(first, second, strict=True) if a != b)
    return str(first)[:200], str(second)[:200]


# ---------------------------------------------------------------------------------------------- a round's decisions


@dataclass(slots=True)
class Shared:
    """Hold the inputs of a round's decisions, the same on every process.

    Args:
        signals: means over the replicas of the values passed to `step`.
        dots: <g, g>, <m, m> and <g, m> of each param group of each fragment; None where no policy needs them.
    """

    signals: dict[str, float]
    dots: Sequence[list[Dots]] | None = None


def agree(
    communicator: Communicator,
    fragments: Sequence[Fragment],
    weight: float,
    signals: Mapping[str, float],
) -> Shared:
    """Average the signals, and adopt process 0's measurements.

    Equal bits need not give equal norms on unlike machines, which sum in different orders. A restart policy at its
    threshold would then decide differently on two processes. So all processes decide by the same numbers.

    Args:
        communicator: processes of the run.
        fragments: fragments that take their outer step next; each has its mean pseudo-gradient in `.grad`.
        weight: number of this process's replicas.
        signals: values of this process.
    """
    measured = communicator.sharded or any(f.needs & MEASURED for f in fragments)
    dots = [_dots(fragment) for fragment in fragments] if measured else None
    if communicator.size == 1 and not communicator.sharded:
        return Shared({name: float(signals[name]) for name in sorted(signals)}, dots)
    names, values = _same_signals(communicator, signals)
    local_dots = [number for groups in dots or () for group in groups for number in group]
    if not (names or local_dots):
        return Shared({})
    rows = _rows(communicator, weight, values, local_dots)
    means = _weighted_mean([row[: 1 + len(names)] for row in rows])
    first = iter(rows[0][1 + len(names) :])
    if dots is not None:
        dots = [[(next(first), next(first), next(first)) for _ in groups] for groups in dots]
    return Shared(dict(zip(names, means, strict=True)), dots)


def _dots(fragment: Fragment) -> list[Dots]:
    """Return the inner products of each param group; for another optimizer than `OuterSGD`, <g, g> alone."""
    if isinstance(fragment.outer, OuterSGD):
        return fragment.outer.dots()
    return [(float(torch.linalg.vector_norm(fragment.gradient, dtype=torch.float64)) ** 2, 0.0, 0.0)]


def _rows(
    communicator: Communicator, weight: float, means: Sequence[float], sums: Sequence[float]
) -> list[list[float]]:
    """Return each process's weight and numbers; of a sharded replica their means over its shards, or their sums."""
    shards = communicator.exchange_in_replica([*means, *sums])
    columns = list(zip(*shards, strict=True))
    over_shards = [_mean(column, [1.0] * len(shards)) for column in columns[: len(means)]]
    return communicator.exchange([weight, *over_shards, *map(sum, columns[len(means) :])])


def _weighted_mean(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of rows of (weight, values...)."""
    weights, *columns = zip(*rows, strict=True)
    return [_mean(column, weights) for column in columns]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean; equal values stay unrounded, for they may stand at a policy's threshold."""
    if all(value == values[0] for value in values):
        return values[0]
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def _same_signals(communicator: Communicator, signals: Mapping[str, float]) -> tuple[list[str], list[float]]:
    """Return the names of the signals, and this process's values.

    The next exchange sends a number for each name. With unlike names, unlike quantities would be averaged, or the
    transport would fail without a reason.
    """
    names = sorted(signals)
    head: list[float] = [len(names), *halves(short_hash(json.dumps(names)))]
    if any(part != head for part in communicator.exchange_in_replica(head)):
        raise ValueError(
            "DiLoCo: step(signals=...) has other names in another shard of this replica; give the same ones"
        )
    if any(row != head for row in communicator.exchange(head)):
        everyone = [list(map(str, names_there)) for names_there in communicator.gather(names, list)]
        number, names_there = next((n, there) for n, there in enumerate(everyone) if there != everyone[0])
        raise ValueError(
            f"DiLoCo: step(signals=...) differs between process 0 ({', '.join(everyone[0]) or 'none'}) and process "
            f"{number} ({', '.join(names_there) or 'none'}); give the same names on every process"
        )
    return names, [float(signals[name]) for name in names]


# ------------------------------------------------------------------------------------------------ a round's result

REMEDY = (
    "All processes must compute the same outer step. Look for code that writes to the anchor or the outer optimizer "
    "on one of them only, for unlike versions, or for faulty memory. Then resume from the newest checkpoint"
)


def prove(
    communicator: Communicator, round_: int, fragments: Sequence[Fragment], digests: Sequence[Mapping[str, str]]
) -> None:
    """Compare the digests of the fragments that have ended a round between all processes.

    Raises:
        Disagreement: the digests differ; the message names the first difference.
    """
    if communicator.size == 1:
        return
    everyone = communicator.exchange(all_halves(digests))
    fault = first_difference(everyone, fragments, digests)
    if any(row[0] for row in communicator.exchange_in_replica([float(fault is not None)])):
        fault = fault or "a fragment differs in another shard of this replica"
        raise Disagreement(f"DiLoCo: after round {round_} {fault}. {REMEDY}")


def first_difference(
    everyone: Sequence[Sequence[float]], fragments: Sequence[Fragment], digests: Sequence[Mapping[str, str]]
) -> str | None:
    """Return a sentence on the first digest, as of `all_halves`, that differs between processes; None if equal."""
    for other, row in enumerate(everyone):
        for index, pair in enumerate(zip(row, everyone[0], strict=True)):
            if pair[0] != pair[1]:
                number, digest = divmod(index // 2, len(digests[0]))
                return (
                    f"fragment {fragments[number].name!r} differs in its {list(digests[0])[digest]} between process 0 "
                    f"and process {other}"
                )
    return None


def all_halves(digests: Sequence[Mapping[str, str]]) -> list[float]:
    """Return the digests of fragments as numbers for `Communicator.exchange`."""
    return [half for digest in digests for text in digest.values() for half in halves(text)]


def halves(text: str) -> tuple[int, int]:
    """Return sixteen hexadecimal digits as two whole numbers that a float holds exactly."""
    value = int(text, 16)
    return value >> 32, value & 0xFFFFFFFF
