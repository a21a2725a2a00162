"""Checks of the engine at the start, and before and after each outer step.

Replicas that drift apart would train on unnoticed, so everything that ranks must share is compared by a few bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

import twophase
from twophase.diloco.buffers import buffers_of
from twophase.diloco.digest import digest, of_optimizer
from twophase.diloco.fragment import Fragment, Slot, local
from twophase.diloco.group import SingleProcess
from twophase.errors import RunError
from twophase.optim.outer_sgd import Dots, OuterSGD, rule_of
from twophase.restart import MEASURED

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo


INTERRUPTED = "DiLoCo: the last outer step was interrupted; load_state_dict() of a checkpoint first"


class Disagreement(RunError):  # noqa: N818 - a public name
    """Ranks hold different bits that should be equal; the message names the fragment and the ranks."""


# ------------------------------------------------------------------------------------------------------ at the start


def check_replicas(
    replicas: Sequence[nn.Module], slots: Sequence[Mapping[str, Slot]], group: SingleProcess, buffers: str
) -> None:
    """Refuse replicas that cannot be synchronised."""
    if buffers not in ("local", "mean") or (buffers == "mean" and group.sharded):
        raise ValueError(f'DiLoCo: buffers must be "local" or, without shards, "mean", got {buffers!r}')
    if not slots or not slots[0]:
        raise ValueError("DiLoCo: replicas must be modules with at least one parameter that requires a gradient")
    for number, (replica, by_name) in enumerate(zip(replicas, slots, strict=True)):
        for module in replica.modules():
            if isinstance(module, DistributedDataParallel | DataParallel):
                raise ValueError(
                    f"DiLoCo: replicas holds a {type(module).__name__}, which joins gradients; pass .module"
                )
        if {n: s.tensor().shape for n, s in by_name.items()} != {n: s.tensor().shape for n, s in slots[0].items()}:
            raise ValueError(f"DiLoCo: replica {number} has other trainable parameters than replica 0")
        if len({slot.device for slot in by_name.values()}) > 1:
            raise ValueError(f"DiLoCo: parameters of replica {number} must be on one device")
        if difference := first_difference(_buffers(replicas[0]), _buffers(replica)):
            raise ValueError(f"DiLoCo: buffers of replica {number} must be as of replica 0, {difference[0]} is not")
    if len({id(slot.parameter) for by_name in slots for slot in by_name.values()}) < len(slots) * len(slots[0]):
        raise ValueError("DiLoCo: replicas share parameters; make a copy.deepcopy() of the module for each")
    for name, slot in slots[0].items():
        placements = getattr(slot.parameter, "placements", ())
        if bool(placements) != group.sharded or not all(placement.is_shard() for placement in placements):
            raise ValueError(
                f"DiLoCo: parameter {name!r} must be sharded by fully_shard(module, mesh=mesh['shard']) and "
                "group=ProcessGroup.of_mesh(mesh), or neither"
            )
        if slot.parameter.is_meta or not slot.parameter.is_floating_point():
            raise ValueError(f"DiLoCo: parameter {name!r} must hold floating-point values, is {slot.dtype}")


def assert_started_equal(engine: DiLoCo, expect_equal: Mapping[str, Any]) -> int:
    """Refuse to train unless all ranks were started with the same model, settings and versions; count the replicas.

    Frozen parameters are never sent, so a difference, as of the base model under an adapter, would stay unnoticed.
    """
    replica, group = engine.replicas[0], engine.group
    frozen = [p for p in replica.parameters() if not p.requires_grad and not p.is_meta]
    own = {
        "twophase": twophase.__version__,
        "torch": str(torch.__version__),
        **spec_of(engine),
        "frozen parameters": digest([local(p) for p in frozen]) if frozen and not group.sharded else "",
        "buffers": _buffers(replica),
        "types": sorted({str(slot.dtype) for fragment in engine.fragments for slot in fragment.slots[0]}),
        "outer": {fragment.name: describe(fragment.outer) for fragment in engine.fragments},
        "filter": engine.filter,
        "averaged buffers": engine.buffers,
    }
    if twice := own.keys() & expect_equal.keys():
        raise ValueError(f"DiLoCo: expect_equal must not hold {min(twice)!r}, which the engine compares itself")
    try:
        own = json.loads(json.dumps({**expect_equal, **own}))  # first what names an option
    except TypeError as error:
        raise ValueError(f"DiLoCo: expect_equal must hold JSON values: {error}") from None
    text = json.dumps(own, sort_keys=True).encode()
    hashes = group.gather_json([len(engine.replicas), hashlib.sha256(text).hexdigest()])
    fault = ""
    if any(row[1] != hashes[0][1] for row in hashes):  # only then sent: many parameters make it very long
        for rank, theirs in enumerate(group.gather_json(own)):
            if not fault and (difference := first_difference(own, theirs)):
                name, mine, other = difference
                fault = f"DiLoCo: {name} differs: {mine} on rank {group.rank}, {other} on rank {rank}"
    if group.sharded:  # the shards without a fault would wait for those that have raised it
        fault = next(filter(None, group.gather_json(fault, shards=True)), "")
    if fault:
        raise ValueError(fault)
    return sum(int(row[0]) for row in hashes)


def _buffers(module: nn.Module) -> dict[str, str]:
    return {name: f"{[*b.shape]} {b.dtype}" for name, b in buffers_of(module).items()}


def spec_of(engine: DiLoCo) -> dict[str, Any]:
    """Return what ranks, and an engine and its state, must have in common, as JSON values."""
    parts = [[f.name, [[name, list(view.shape)] for name, view in f.named]] for f in engine.fragments]
    names = ("inner_steps", "stagger", "delay", "mixing", "compression")
    return {name: getattr(engine, name) for name in names} | {"fragments": parts}


def describe(outer: Optimizer) -> list[str]:
    """Return rule and restart of each param group; of another optimizer its class and settings."""
    if isinstance(outer, OuterSGD):
        return [f"{rule_of(group).describe()}, restart {group['restart']}" for group in outer.param_groups]
    return [f"{kind_of(outer)} lr {float(g['lr']):g}, restart {g.get('restart', 'never')}" for g in outer.param_groups]


def kind_of(outer: Optimizer) -> str:
    """Return the class of an outer optimizer, or the classes that one is made of."""
    return " and ".join(type(each).__name__ for each in getattr(outer, "optimizers", [outer]))


def first_difference(first: Any, second: Any, name: str = "") -> tuple[str, str, str] | None:
    """Return the place of the first difference between two JSON values, and both values there as text."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        pairs = [(f"{name} {key}".strip(), first.get(key), second.get(key)) for key in {**first, **second}]
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = [(name, a, b) for a, b in zip(first, second, strict=True)]
    else:
        return None if first == second else (name, f"{first!s:.200}", f"{second!s:.200}")
    return next((found for key, a, b in pairs if (found := first_difference(a, b, key))), None)


# ------------------------------------------------------------------------------------------------ before an outer step


def check_call(engine: DiLoCo, fragments: Sequence[Fragment], signals: Mapping[str, float]) -> None:
    """Refuse a step where none may be, and signals that are no numbers or lack what a restart policy needs."""
    if engine._interrupted:
        raise RuntimeError(INTERRUPTED)
    if engine._is_replaced:
        raise RuntimeError("DiLoCo: a later engine synchronizes these modules, as that of a second callback; keep one")
    if engine._showing:
        raise RuntimeError("DiLoCo: step() and finish() must not be called within anchored(); leave its block first")
    for name, value in signals.items():
        try:
            float(value)
        except (TypeError, ValueError, RuntimeError):  # the last of tensors with several elements
            raise ValueError(f"DiLoCo: signals[{name!r}] must be a number, got {value!r:.80}") from None
    for fragment in fragments:
        if missing := getattr(fragment.outer, "needs", MEASURED) - MEASURED - signals.keys():
            raise ValueError(f"DiLoCo: step(signals=...) must have {min(missing)!r}, which a restart policy needs")
    engine._loads.tell(engine)


def share_inputs(
    engine: DiLoCo, fragments: Sequence[Fragment], signals: Mapping[str, float]
) -> tuple[dict[str, float], list[list[Dots]] | None]:
    """Return the means of the signals over the replicas, and inner products of shards or for policies that measure.

    Equal bits need not give equal norms on unlike machines, which sum in different orders, and a restart policy at its
    threshold would decide differently on two ranks. So every `OuterSGD` decides by rank 0's. The ranks' places in their
    rounds are compared, too.
    """
    group, values = engine.group, {name: float(signals[name]) for name in sorted(signals)}
    dots = None
    if group.sharded or any(MEASURED & getattr(fragment.outer, "needs", set()) for fragment in fragments):
        dots = [
            f.outer.dots() if isinstance(f.outer, OuterSGD) else [(f.gradient.norm().item() ** 2, 0.0, 0.0)]
            for f in fragments
        ]
    if group.size == 1 and not group.sharded:
        return values, dots
    place = {"fragments": [[f.name, f.round + 1, f.launched] for f in fragments], "signals": list(values)}
    numbers, weights, fault = list(values.values()), [float(len(engine.replicas))], ""
    rows: list[Any] = []
    for shards in (True, False) if group.sharded else (False,):
        rows = group.gather_json([place, numbers, dots, weights, fault, engine._watch.news], shards=shards)
        fault = next((row[4] for row in rows if row[4]), "") or _unlike_places(rows, "shard" if shards else "rank")
        if fault and shards:
            continue  # the other replicas must learn of it, or they would wait for this one
        if fault:
            raise Disagreement(f"DiLoCo: {fault}")
        shares = [1.0] * len(rows) if shards else [row[3][0] for row in rows]
        columns = zip(*(row[1] for row in rows), strict=True)
        # Equal values stay unrounded, for they may stand at a policy's threshold.
        numbers = [
            column[0]
            if all(number == column[0] for number in column)
            else sum(share * number for share, number in zip(shares, column, strict=True)) / sum(shares)
            for column in columns
        ]
        if shards:
            of_fragments = zip(*(row[2] for row in rows), strict=True)
            dots = [
                [tuple(map(sum, zip(*parts, strict=True))) for parts in zip(*of_fragment, strict=True)]  # type: ignore[misc]
                for of_fragment in of_fragments
            ]
    engine._watch.tell([row[5] for row in rows])
    return dict(zip(values, numbers, strict=True)), rows[0][2]


def _unlike_places(rows: Sequence[Any], kind: str) -> str:
    """Return in words the first difference between the ranks' rounds or names of signals."""
    for rank, (place, *_) in enumerate(rows):
        if difference := first_difference(rows[0][0], place):
            name, first, other = difference
            return f"{name} differ at a round's end: {first} on {kind} 0, {other} on {kind} {rank}"
    return ""


# ------------------------------------------------------------------------------------------------ after an outer step


def assert_equal_on_all_ranks(group: SingleProcess, fragments: Sequence[Fragment], anchors: Sequence[str]) -> None:
    """Compare anchors, by their digests, and outer optimizers between all ranks: a few bytes a round.

    Raises:
        Disagreement: two ranks differ, which both then raise.
    """
    if group.size == 1:
        return
    names = ("anchor", "outer state", "outer settings")
    digests = [(anchor, *of_optimizer(f.outer)) for f, anchor in zip(fragments, anchors, strict=True)]
    rows = group.gather_bytes("".join(map("".join, digests)).encode())
    fault = ""
    for rank, row in enumerate(rows):
        if row != rows[0] and not fault:
            differs = next(i for i in range(0, len(row), 16) if row[i : i + 16] != rows[0][i : i + 16]) // 16
            fragment, name = fragments[differs // 3].name, names[differs % 3]
            fault = f"{name} of fragment {fragment!r} differs between rank 0 and rank {rank}"
    if group.sharded:
        fault = next(filter(None, group.gather_json(fault, shards=True)), "")
    if fault:
        raise Disagreement(
            f"DiLoCo: after round {fragments[0].round} {fault}; look for code that changes it on one rank, or for "
            "faulty memory, and resume from the newest checkpoint"
        )
