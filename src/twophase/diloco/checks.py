"""Checks of the engine at the start, and before and after each outer step.

Replicas that drift apart would train on unnoticed, so everything that ranks must share is compared by a few bytes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

import twophase
from twophase.diloco.buffers import buffers_of
from twophase.diloco.digest import digest, of_optimizer
from twophase.diloco.fragment import Fragment, Slot, local
from twophase.diloco.group import Disagreement, SingleProcess
from twophase.optim.outer_sgd import Dots, OuterSGD, rule_of
from twophase.restart import MEASURED

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo


INTERRUPTED = "DiLoCo: the last outer step was interrupted; load_state_dict() of a checkpoint first"
REPLACED = "DiLoCo: a later engine synchronizes these modules, as that of a second callback; keep one"
SHOWN = "DiLoCo: within anchored() replicas are not stepped, saved or loaded; leave its block first"


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
        if joint := [m for m in replica.modules() if isinstance(m, DistributedDataParallel | DataParallel)]:
            raise ValueError(f"DiLoCo: replicas holds a {type(joint[0]).__name__}, which joins gradients; pass .module")
        if difference := first_difference(_described(replicas[0], slots[0]), _described(replica, by_name)):
            name, first, other = difference
            raise ValueError(f"DiLoCo: {name} differs: {first} in replica 0, {other} in replica {number}")
        if len({slot.parameter.device for slot in by_name.values()}) > 1:
            raise ValueError(f"DiLoCo: parameters of replica {number} must be on one device")
    if len({id(slot.parameter) for by_name in slots for slot in by_name.values()}) < len(slots) * len(slots[0]):
        raise ValueError("DiLoCo: replicas share parameters; make a copy.deepcopy() of the module for each")
    for name, slot in slots[0].items():
        placements = getattr(slot.parameter, "placements", ())
        if bool(placements) != group.sharded or not all(placement.is_shard() for placement in placements):
            raise ValueError(
                f"DiLoCo: parameter {name!r} must be sharded by fully_shard(module, mesh=mesh['shard']) and "
                "group=ProcessGroup(mesh.get_group('replica'), mesh.get_group('shard')), or neither"
            )
        if slot.parameter.is_meta or not slot.parameter.is_floating_point():
            raise ValueError(f"DiLoCo: parameter {name!r} must hold floating-point values, is {slot.parameter.dtype}")


def assert_started_equal(engine: DiLoCo, expect_equal: Mapping[str, Any]) -> None:
    """Refuse to train unless all ranks were started with the same model, settings and versions.

    Frozen parameters are never sent, so a difference, as of the base model under an adapter, would stay unnoticed.
    """
    replica, group = engine.replicas[0], engine.group
    frozen = [p for p in replica.parameters() if not p.requires_grad and not p.is_meta]
    own = {
        "twophase": twophase.__version__,
        "torch": str(torch.__version__),
        **spec_of(engine),
        "frozen parameters": digest([local(p) for p in frozen]) if frozen and not group.sharded else "",
        **_described(replica, {slot.name: slot for fragment in engine.fragments for slot in fragment.slots[0]}),
        "outer": {fragment.name: describe(fragment.outer) for fragment in engine.fragments},
        "filter": engine.filter,
        "replicas": len(engine.replicas),
        "averaged buffers": engine.buffers,
    }
    rows = group.gather_json({**expect_equal, **own})  # first what names an option
    differences = ((rank, first_difference(rows[0], theirs)) for rank, theirs in enumerate(rows))
    faults = (f"{d[0]} differs: {d[1]} on rank 0, {d[2]} on rank {rank}" for rank, d in differences if d)
    if fault := group.fault_of_shards(next(faults, "")):
        raise ValueError(f"DiLoCo: {fault}")


def _described(module: nn.Module, slots: Mapping[str, Slot]) -> dict[str, dict[str, str]]:
    tensors = {"parameters": {name: slot.tensor() for name, slot in slots.items()}, "buffers": buffers_of(module)}
    return {kind: {n: f"{[*t.shape]} {t.dtype}" for n, t in by_name.items()} for kind, by_name in tensors.items()}


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


def check_call(engine: DiLoCo, fragments: Sequence[Fragment], signals: Mapping[str, float] | None) -> dict[str, float]:
    """Refuse a step where none may be; return the signals as numbers where fragments end their rounds."""
    if engine._closed:
        raise RuntimeError(engine._closed)
    with torch.no_grad():  # of a loss that still has its graph
        numbers = {name: float(value) for name, value in (signals or {}).items()} if fragments else {}
    for fragment in fragments:
        if missing := getattr(fragment.outer, "needs", MEASURED) - MEASURED - numbers.keys():
            raise ValueError(f"DiLoCo: step(signals=...) must have {min(missing)!r}, which a restart policy needs")
    return numbers


def weights_of(engine: DiLoCo, weight: float | Sequence[float] | None) -> list[float] | None:
    """Return the weight of each replica of this process in an inner step, or None where all count alike."""
    if any(f.steps and (f.weights is None) != (weight is None) for f in engine.fragments):
        raise ValueError("DiLoCo: step(weight=...) must be given in each inner step of a round, or in none")
    if weight is None:
        return None
    weights = [float(w) for w in (weight if isinstance(weight, Sequence) else [weight] * len(engine.replicas))]
    if len(weights) != len(engine.replicas) or not all(0 <= w < math.inf for w in weights):
        raise ValueError(f"DiLoCo: step(weight=...) must be finite and >= 0, or so for each replica, got {weight}")
    return weights


def meet(engine: DiLoCo, call: str, fragments: Sequence[Fragment], signals: Mapping[str, float] | None = None) -> None:
    """Refuse to go on unless all ranks make the same call: its collectives would pair with those of another.

    `fragments` are those that the call concerns. The launch of a reduction with a delay does not wait for the answer,
    which is read before the next wait.
    """
    here = call, engine.taken
    if not fragments and (call != "finish" or engine._met == here):  # a second one, perhaps on this rank alone
        return
    weighted = any(fragment.weights for fragment in fragments)
    given = [f"signals {', '.join(sorted(signals))}"] if signals else []
    place = f"{call}({', '.join(given + ['weight'] * weighted)}) after {engine.taken} inner steps"
    wait = engine.delay == 0 or call != "step" or weighted or any(f.age is not None for f in fragments)
    engine.group.meet(f"{place}, sync {engine.syncs}", wait=wait or not engine._met)
    engine._met = here


def share_inputs(
    engine: DiLoCo, fragments: Sequence[Fragment], signals: Mapping[str, float]
) -> tuple[dict[str, float], list[list[Dots]]]:
    """Return the means of the signals over the replicas, and inner products of shards or for policies that measure.

    Equal bits need not give equal norms on unlike machines, which sum in different orders, and a restart policy at its
    threshold would decide differently on two ranks. So every `OuterSGD` decides by rank 0's.
    """
    group, names, dots = engine.group, sorted(signals), list[list[Dots]]()
    if group.sharded or any(MEASURED & getattr(fragment.outer, "needs", set()) for fragment in fragments):
        dots = [
            f.outer.dots() if isinstance(f.outer, OuterSGD) else [(f.gradient.norm().item() ** 2, 0.0, 0.0)]
            for f in fragments
        ]
    numbers, products = [signals[name] for name in names], [x for of_one in dots for dot in of_one for x in dot]
    for ranks in (group.shards, group)[not group.sharded :] if numbers or products else ():
        rows = ranks.gather_bytes(array("d", numbers + products).tobytes())
        columns = list(zip(*(array("d", row) for row in rows), strict=True))
        # Equal values stay unrounded, for they may stand at a policy's threshold.
        numbers = [c[0] if len({*c}) == 1 else sum(c) / len(c) for c in columns[: len(names)]]
        products = [column[0] if ranks is group else sum(column) for column in columns[len(names) :]]
    shared = iter(products)
    triples: Any = [[tuple(islice(shared, 3)) for _ in of_one] for of_one in dots]
    return dict(zip(names, numbers, strict=True)), triples


# ------------------------------------------------------------------------------------------------ after an outer step


def assert_equal_on_all_ranks(engine: DiLoCo, fragments: Sequence[Fragment], anchors: Sequence[str]) -> None:
    """Compare digests of anchors and outer optimizers between all ranks; if two differ all raise a `Disagreement`."""
    group, watch = engine.group, engine._watch
    if group.size == 1:
        return
    names = ("anchor", "outer state", "outer settings")
    digests = "".join("".join((anchor, *of_optimizer(f.outer))) for f, anchor in zip(fragments, anchors, strict=True))
    rows = group.gather_bytes(f"{digests}{bool(watch.news):d}".encode())
    faults = (
        f"{names[n // 16 % 3]} of fragment {fragments[n // 48].name!r} differs between rank 0 and rank {rank}"
        for rank, row in enumerate(rows)
        for n in range(0, len(digests), 16)
        if row[n : n + 16] != rows[0][n : n + 16]
    )
    if any(row.endswith(b"1") for row in rows):
        watch.tell(group.gather_json(watch.news))
    if fault := group.fault_of_shards(next(faults, "")):
        raise Disagreement(
            f"DiLoCo: after round {fragments[0].round} {fault}; look for code that changes it on one rank, or for "
            "faulty memory, and resume from the newest checkpoint"
        )
