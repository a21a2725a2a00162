"""Build the fixed part of an engine: check its arguments, make fragments with buffers and outer optimizers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twophase.diloco.communicator import Communicator
from twophase.diloco.flat import plan
from twophase.diloco.fragment import Fragment, Slot, check_placement, local, partition, slots_of, tensors_of
from twophase.diloco.transfer import Channel, check_wire
from twophase.optim.groups import as_number
from twophase.optim.outer import OuterSGD
from twophase.policies.base import AGREEMENT, MEASURED, PROBES, Never, RestartPolicy
from twophase.policies.text import parse
from twophase.rule import OuterRule

OuterFactory = Callable[[list[tuple[str, Tensor]]], Optimizer]
Restarts = RestartPolicy | str | int | None
Signals = Mapping[str, float] | Callable[[list[str]], Mapping[str, float]] | None
"""Values by name, or a function to them from the names of the fragments that end their round."""


def open_communicator(communicator: Communicator | None) -> Communicator:
    """Return the communicator, or the default; the code of process groups is loaded by name, for it is a backend."""
    return communicator or import_module("twophase.diloco.comm").default_communicator()


def open_channel(name: str, numel: int, *, dtype: torch.dtype, device: torch.device, **options: Any) -> Channel:
    """Return the channel of a wire, one of `WIRES`; arguments as of `Channel`, options as of `wire.LossyChannel`.

    Raises:
        ValueError: an unknown wire.
    """
    if check_wire(name) == "float32":
        return Channel(name, numel, dtype=dtype, device=device)
    return import_module("twophase.diloco.wire").LossyChannel(name, numel, dtype=dtype, device=device, **options)


def check_schedule(stagger: bool, delay: int, mixing: float, inner_steps: int) -> None:
    """Refuse a stagger that is no truth value, a delay that outlasts a round, and a mixing that ignores the anchor."""
    if not isinstance(stagger, bool):
        raise ValueError(
            f"DiLoCo: stagger is {stagger!r}; it must be True, fragments' syncs spread over a round, or False"
        )
    if isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay < inner_steps:
        raise ValueError(
            f"DiLoCo: delay is {delay!r}; it must be a whole number of inner steps from 0 to inner_steps - 1 = "
            f"{inner_steps - 1}, so that a reduction ends before the fragment's next one begins"
        )
    if not isinstance(mixing, Real) or not 0 <= mixing < 1:
        raise ValueError(
            f"DiLoCo: mixing is {mixing!r}; it must lie in [0, 1): 0 takes the anchor over, 0.5 keeps half of what a "
            "replica has reached by itself"
        )


def collect_slots(replicas: list[nn.Module], communicator: Communicator) -> list[list[Slot]]:
    """Return the trainable parameters of each replica of this process, checked to be alike."""
    if not replicas:
        raise ValueError("DiLoCo: replicas is empty; pass at least one module")
    for replica in replicas:
        if not isinstance(replica, nn.Module):
            raise ValueError(
                f"DiLoCo: replicas holds a {type(replica).__name__}; pass the module itself, or a list of modules"
            )
    if len({id(replica) for replica in replicas}) < len(replicas):
        raise ValueError("DiLoCo: the same module is listed twice in replicas; make one copy.deepcopy() a replica")
    collected = [slots_of(replica) for replica in replicas]
    if not collected[0]:
        raise ValueError("DiLoCo: the module has no parameter that requires a gradient; nothing could be synchronised")
    shapes = [[(slot.name, local(slot.parameter).shape) for slot in slots] for slots in collected]
    for number, shapes_of_replica in enumerate(shapes):
        if shapes_of_replica != shapes[0]:
            raise ValueError(
                f"DiLoCo: replica {number} has other trainable parameters than replica 0; build them alike"
            )
    if len({id(slot.parameter) for slots in collected for slot in slots}) < len(replicas) * len(shapes[0]):
        raise ValueError("DiLoCo: replicas share parameters; make one copy.deepcopy() of the module a replica")
    if any(len({slot.device for slot in slots}) > 1 for slots in collected):
        raise ValueError("DiLoCo: a replica's parameters lie on several devices; put each replica on one device")
    for slot in [slot for slots in collected for slot in slots]:
        check_placement(slot.name, slot.parameter, communicator.sharded)
        if not slot.parameter.is_floating_point():
            raise ValueError(
                f"DiLoCo: parameter {slot.name!r} is {slot.dtype}; only floating-point parameters can train"
            )
    bind = getattr(communicator, "bind", None)  # only groups that may send small messages through a GPU have it
    if bind is not None:
        bind(collected[0][0].device)
    return collected


def cut(
    slots: list[list[Slot]],
    fragments: int | Mapping[str, str],
    communicator: Communicator,
    *,
    wire: str,
    inner_steps: int,
    stagger: bool,
    delay: int,
) -> tuple[list[Fragment], Tensor]:
    """Make the fragments, each with its part of one flat anchor, which holds the first replica's parameters.

    Args:
        slots: the parameters of each replica of this process.
        fragments: as of `partition`.
        communicator: the processes.
        wire: how pseudo-gradients travel.
        inner_steps: of a round.
        stagger: whether the fragments' syncs are spread over a round.
        delay: inner steps between the launch of a reduction and its application.
    """
    by_name = [{slot.name: slot for slot in of_replica} for of_replica in slots]
    first = tensors_of(slots[0])
    shapes = {slot.name: tuple(p.shape) for slot, p in zip(slots[0], first, strict=True)}
    parts = partition({slot.name: slot.parameter.numel() for slot in slots[0]}, fragments)
    layouts = [plan((name, shapes[name]) for name in names) for names in parts.values()]
    lengths = [layout.numel for layout in layouts]
    if min(row[0] for row in communicator.exchange_in_replica([min(lengths)])) == 0:
        raise ValueError(
            "DiLoCo: a fragment is empty on one of the processes that share a replica: its parameters have fewer rows "
            "than there are shards; take fewer or larger fragments"
        )
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in first) else torch.float32
    anchor = torch.zeros(sum(lengths), dtype=dtype, device=first[0].device)
    gap = inner_steps // len(parts) if stagger else inner_steps
    if communicator.elastic and delay >= gap:
        raise ValueError(
            f"DiLoCo: delay is {delay} and the fragments' syncs lie {gap} inner steps apart; where processes come "
            "and go one must end before the next begins, so take a shorter delay or fewer fragments"
        )
    # Fragments that are never reduced at the same time share the room for their pseudo-gradients.
    shared = stagger and delay < gap
    room = torch.zeros(max(lengths) if shared else sum(lengths), dtype=dtype, device=anchor.device)
    alone = communicator.size == 1 and not communicator.elastic
    options = {"senders": len(slots) if alone else 1, "transactional": communicator.elastic}
    made: list[Fragment] = []
    start = 0
    for number, ((name, names), layout) in enumerate(zip(parts.items(), layouts, strict=True)):
        place = 0 if shared else start
        fragment = Fragment(
            name,
            number,
            slots=[[of_replica[name] for name in names] for of_replica in by_name],
            layout=layout,
            anchor=anchor[start : start + layout.numel],
            gradient=room[place : place + layout.numel],
            channel=open_channel(wire, layout.numel, dtype=dtype, device=anchor.device, **options),
            offset=-(-(number + 1) * inner_steps // len(parts)) if stagger else inner_steps,
        )
        with torch.no_grad():
            torch._foreach_copy_(fragment.anchor_views, fragment.look_up()[0])
        made.append(fragment)
        start += layout.numel
    return made, anchor


def constants(fragments: Sequence[Fragment], replica: nn.Module, communicator: Communicator) -> dict[str, Any]:
    """Return what all processes must have been started with and keep, by the words that name it; JSON values.

    What is not trained is never sent, so a difference (of the base model under an adapter, say) would never be noticed.
    Buffers may have values of their own, such as batch-norm statistics.
    """
    slots = [(fragment, slot) for fragment in fragments for slot in fragment.layout.slots]
    frozen = {name: p.detach() for name, p in replica.named_parameters() if not p.requires_grad}
    # Of a sharded replica the values differ from shard to shard.
    comparable = {} if communicator.sharded else {n: p for n, p in frozen.items() if p.device.type != "meta"}
    return {
        "frozen parameters": {name: f"{list(p.shape)} {p.dtype}" for name, p in frozen.items()},
        "values of frozen parameters": {name: _digest(p) for name, p in comparable.items()},
        "shapes of buffers": {name: str(list(buffer.shape)) for name, buffer in replica.named_buffers()},
        "numbers of fragments": len(fragments),
        "parameters": {slot.name: str(list(slot.shape)) for _, slot in slots},
        "orders of parameters": [slot.name for _, slot in slots],
        "types": {slot.name: str(slot.dtype) for fragment in fragments for slot in fragment.slots[0]},
        "fragments": {slot.name: fragment.name for fragment, slot in slots},
    }


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def build_outers(
    fragments: Sequence[Fragment], outer: OuterRule | OuterFactory, restart: Restarts | Mapping[str, Restarts]
) -> None:
    """Give each fragment its optimizer: a shared optimizer would step on the gradients of the fragments at rest."""
    names = [fragment.name for fragment in fragments]
    policies = restart if isinstance(restart, Mapping) else dict.fromkeys(names, restart)
    if set(policies) != set(names):
        raise ValueError(
            f"DiLoCo: restart and fragments do not name the same ({', '.join(sorted(set(policies) ^ set(names)))}); "
            f"the fragments are {', '.join(names)}: give each its policy"
        )
    for fragment in fragments:
        policy = policies[fragment.name]
        if isinstance(outer, OuterRule):
            policy = Never() if policy is None else policy
            needs = parse(policy).needs  # `check_needs` knows the remedy
            fragment.outer = OuterSGD.from_rule(fragment.named, outer, policy, signals=needs)
        elif isinstance(outer, Optimizer) or not callable(outer):
            raise ValueError(
                f"DiLoCo: outer is {type(outer).__name__}; pass an OuterRule, or a function of the engine's anchor "
                "parameters such as lambda params: OuterSGD(params, lr=0.7, momentum=0.9, nesterov=True)"
            )
        elif policy is not None:
            raise ValueError("DiLoCo: restart goes with an OuterRule; here give it to the optimizer that outer builds")
        else:
            fragment.outer = outer(fragment.named)
            _check_complete(fragment)


def _check_complete(fragment: Fragment) -> None:
    taken = {id(p) for group in fragment.outer.param_groups for p in group["params"]}
    unused = [name for name, p in fragment.named if id(p) not in taken]
    if unused:
        raise ValueError(
            f"DiLoCo: the optimizer that outer built does not hold {', '.join(unused[:3])}{' …' * (len(unused) > 3)}; "
            "parameters that no group takes would be set back in every round, so give it all that outer receives"
        )


def check_needs(groups: Iterable[Mapping[str, Any]], supplied: Collection[str]) -> None:
    """Refuse a restart policy of a param group that needs what will not be supplied."""
    for policy in [group["restart"] for group in groups]:
        missing = parse(policy).needs - MEASURED - set(supplied)
        ways = []
        if PROBES in missing:
            ways.append("give the engine a function that evaluates the loss on a probe batch, DiLoCo(..., probe=...)")
        if AGREEMENT in missing:
            ways.append("train two or more replicas: it compares them, and there is 1")
        if names := sorted(missing - {PROBES, AGREEMENT}):
            ways.append(f"pass them to step(signals=...), and promise them here with signals={names!r}")
        if ways:
            lacking = [*names, *sorted(missing & {PROBES, AGREEMENT}, reverse=True)]
            raise ValueError(f"DiLoCo: restart policy {policy} needs {', '.join(lacking)}; {', and '.join(ways)}")


def check_signals_kind(signals: Signals) -> None:
    """Refuse signals that are neither a mapping, a function nor None."""
    if not (signals is None or callable(signals) or isinstance(signals, Mapping)):
        raise ValueError(f"DiLoCo: signals are {signals!r}; give names and values, such as {{'loss': 2.3}}")


def values_for(fragments: Sequence[Fragment], signals: Signals) -> Mapping[str, float]:
    """Return the signals for the end of these fragments' round, checked before anything of it happens."""
    values = (signals([fragment.name for fragment in fragments]) if callable(signals) else signals) or {}
    groups = [g for f in fragments if isinstance(f.outer, OuterSGD) for g in f.outer.param_groups]
    for policy in [group["restart"] for group in groups]:
        missing = parse(policy).needs - MEASURED - {PROBES, AGREEMENT} - values.keys()
        if missing:
            raise ValueError(
                f"DiLoCo: a round ends, and restart policy {policy} needs {', '.join(sorted(missing))}; pass them "
                "to step(signals=...) and finish(signals=...)"
            )
    for name, value in values.items():
        as_number(f"DiLoCo: signals[{name!r}]", value)
    return values
