"""Building an engine: its arguments checked, and the fragments with their buffers and outer optimizers."""

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
from twophase.diloco.flat import Layout, plan
from twophase.diloco.fragment import Fragment, Slot, check_placement, local, slots_of
from twophase.diloco.sweep import goes_on_device
from twophase.diloco.transfer import Channel, check_wire
from twophase.optim.groups import check_signals
from twophase.optim.outer import OuterSGD
from twophase.policies.base import AGREEMENT, MEASURED, PROBES, Never, RestartPolicy
from twophase.policies.text import parse
from twophase.rule import OuterRule

OuterFactory = Callable[[list[tuple[str, Tensor]]], Optimizer]
Restarts = RestartPolicy | str | int | None


def cut(
    slots: list[list[Slot]],
    parts: Mapping[str, list[str]],
    wire: str,
    communicator: Communicator,
    *,
    shared: bool,
) -> tuple[list[Fragment], Tensor, Layout]:
    """Make the fragments, each with its part of one flat anchor, which holds the first replica's parameters.

    Args:
        slots: the parameters of each replica of this process.
        parts: parameter names by fragment name.
        wire: how pseudo-gradients travel.
        communicator: the processes.
        shared: no two fragments are reduced at the same time, so one room serves all pseudo-gradients.

    Returns:
        The fragments, the flat anchor, and its layout.
    """
    by_name = [{slot.name: slot for slot in of_replica} for of_replica in slots]
    first = [slot.tensor() for slot in slots[0]]
    shapes = {slot.name: tuple(p.shape) for slot, p in zip(slots[0], first, strict=True)}
    layouts = [plan((name, shapes[name]) for name in names) for names in parts.values()]
    whole = plan((name, shapes[name]) for names in parts.values() for name in names)
    least = min(layout.numel for layout in layouts)
    if min(row[0] for row in communicator.exchange_in_replica([least])) == 0:
        raise ValueError(
            "DiLoCo: a fragment is empty on one of the processes that share a replica: its parameters have fewer rows "
            "than there are shards; take fewer or larger fragments"
        )
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in first) else torch.float32
    anchor = torch.zeros(whole.numel, dtype=dtype, device=first[0].device)
    room = torch.zeros(
        max(layout.numel for layout in layouts) if shared else whole.numel, dtype=dtype, device=anchor.device
    )
    alone = communicator.size == 1 and not communicator.elastic
    fragments, start = [], 0
    for number, ((name, names), layout) in enumerate(zip(parts.items(), layouts, strict=True)):
        place = 0 if shared else start
        fragment = Fragment(
            name,
            number,
            slots=[[of_replica[name] for name in names] for of_replica in by_name],
            layout=layout,
            anchor=anchor[start : start + layout.numel],
            gradient=room[place : place + layout.numel],
            channel=open_channel(
                wire,
                layout.numel,
                dtype=dtype,
                device=anchor.device,
                senders=len(slots) if alone else 1,
                transactional=communicator.elastic,
            ),
        )
        with torch.no_grad():
            torch._foreach_copy_(fragment.anchor_views, fragment.params()[0])
        fragments.append(fragment)
        start += layout.numel
    return fragments, anchor, whole


def open_communicator(communicator: Communicator | None) -> Communicator:
    """Return the communicator, or the default; the code of process groups is loaded by name, for it is a backend."""
    return communicator or import_module("twophase.diloco.comm").default_communicator()


def open_channel(name: str, numel: int, *, dtype: torch.dtype, device: torch.device, **options: Any) -> Channel:
    """Return the channel of a wire.

    Args:
        name: one of `WIRES`; "float32" means the tensor's own type.
        numel: elements of the fragment, >= 1.
        dtype: float32 or float64, of the tensors that are summed.
        device: of the tensors.
        options: of `wire.LossyChannel`; an exact channel needs none.

    Raises:
        ValueError: an unknown wire.
    """
    if check_wire(name) == "float32":
        return Channel(name, numel, dtype=dtype, device=device)
    return import_module("twophase.diloco.wire").LossyChannel(name, numel, dtype=dtype, device=device, **options)


def replicas_alike(replicas: list[nn.Module], communicator: Communicator) -> list[list[Slot]]:
    """The trainable parameters of each replica of this process, checked to be alike."""
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
    named = [[(slot.name, slot.parameter) for slot in slots] for slots in collected]
    layouts = [plan((name, tuple(local(p).shape)) for name, p in params) for params in named]
    if not layouts[0].slots:
        raise ValueError("DiLoCo: the module has no parameter that requires a gradient; nothing could be synchronised")
    for number, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise ValueError(
                f"DiLoCo: replica {number} has other trainable parameters than replica 0; build them alike"
            )
    if len({id(p) for params in named for _, p in params}) < len(named) * len(named[0]):
        raise ValueError("DiLoCo: replicas share parameters; make one copy.deepcopy() of the module a replica")
    _check_kinds(named, communicator)
    return collected


def _check_kinds(named: list[list[tuple[str, nn.Parameter]]], communicator: Communicator) -> None:
    for params in named:
        if len({p.device for _, p in params}) > 1:
            raise ValueError("DiLoCo: a replica's parameters lie on several devices; put each replica on one device")
        for name, p in params:
            check_placement(name, p, communicator.sharded)
            if not p.is_floating_point():
                raise ValueError(f"DiLoCo: parameter {name!r} is {p.dtype}; only floating-point parameters can train")
    bind = getattr(communicator, "bind", None)  # only groups that may send small messages through a GPU have it
    if bind is not None:
        bind(named[0][0][1].device)


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


def check_overlap(delay: int, gap: int, communicator: Communicator) -> bool:
    """Return whether each sync ends before the next begins; where processes come and go it must."""
    if communicator.elastic and not delay < gap:
        raise ValueError(
            f"DiLoCo: delay is {delay} and the fragments' syncs lie {gap} inner steps apart; where processes come "
            "and go one must end before the next begins, so take a shorter delay or fewer fragments"
        )
    return delay < gap


def restarts(restart: Restarts | Mapping[str, Restarts], fragments: Sequence[Fragment]) -> list[Restarts]:
    """Each fragment's policy."""
    if not isinstance(restart, Mapping):
        return [restart] * len(fragments)
    names = [fragment.name for fragment in fragments]
    if set(restart) != set(names):
        unlike = sorted(set(restart) ^ set(names))
        raise ValueError(
            f"DiLoCo: restart and fragments do not name the same ({', '.join(unlike)}); the fragments are "
            f"{', '.join(names)}: give each its policy"
        )
    return [restart[name] for name in names]


def frozen(replica: nn.Module, *, sharded: bool) -> dict[str, Any]:
    """What all processes must have alike of what is not trained, by the words that name it.

    It is never sent, so a difference (of the base model under an adapter, say) would never be noticed. Buffers may have
    values of their own, such as batch-norm statistics.

    Args:
        replica: any of this process.
        sharded: its values are then in parts that differ from shard to shard, and only their shapes are compared.
    """
    parameters = {name: p.detach() for name, p in replica.named_parameters() if not p.requires_grad}
    values = {} if sharded else {name: _digest(p) for name, p in parameters.items() if p.device.type != "meta"}
    return {
        "frozen parameters": {name: f"{list(p.shape)} {p.dtype}" for name, p in parameters.items()},
        "values of frozen parameters": values,
        "shapes of buffers": {name: str(list(buffer.shape)) for name, buffer in replica.named_buffers()},
    }


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def build_outer(fragment: Fragment, outer: OuterRule | OuterFactory, restart: Restarts) -> Optimizer:
    """A fragment's own outer optimizer: one for several fragments would step on the gradients of those at rest."""
    named = fragment.named
    if isinstance(outer, OuterRule):
        policy = Never() if restart is None else restart
        return OuterSGD.from_rule(named, outer, policy, signals=parse(policy).needs)  # `check_needs` knows the remedy
    if isinstance(outer, Optimizer) or not callable(outer):
        raise ValueError(
            f"DiLoCo: outer is {type(outer).__name__}; pass an OuterRule, or a function of the engine's anchor "
            "parameters such as lambda params: OuterSGD(params, lr=0.7, momentum=0.9, nesterov=True)"
        )
    if restart is not None:
        raise ValueError("DiLoCo: restart goes with an OuterRule; here give it to the optimizer that outer builds")
    optimizer = outer(named)
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    unused = [name for name, p in named if id(p) not in taken]
    if unused:
        raise ValueError(
            f"DiLoCo: the optimizer that outer built does not hold {', '.join(unused[:3])}{' …' * (len(unused) > 3)}; "
            "parameters that no group takes would be set back in every round, so give it all that outer receives"
        )
    return optimizer


def check_needs(
    groups: Iterable[Mapping[str, Any]], signals: Collection[str], *, probes: bool, replicas: int | None
) -> frozenset[str]:
    """Refuse a restart policy that needs what will not be supplied.

    Args:
        groups: param groups of `OuterSGD`s.
        signals: names of what `step(signals=...)` will be given.
        probes: whether there is a function that evaluates candidates.
        replicas: in the whole run; None where they come and go.

    Returns:
        The names of all that is supplied.
    """
    for policy in [group["restart"] for group in groups]:
        needs = parse(policy).needs
        missing = needs - MEASURED - set(signals)
        ways = []
        if PROBES in missing and not probes:
            ways.append("give the engine a function that evaluates the loss on a probe batch, DiLoCo(..., probe=...)")
        if AGREEMENT in missing and replicas == 1:
            ways.append("train two or more replicas: it compares them, and there is 1")
        named = sorted(missing - {PROBES, AGREEMENT})
        if named:
            ways.append(f"pass them to step(signals=...), and promise them here with signals={named!r}")
        if ways:
            lacking = named + [PROBES] * (PROBES in missing and not probes) + [AGREEMENT] * (AGREEMENT in missing)
            raise ValueError(f"DiLoCo: restart policy {policy} needs {', '.join(lacking)}; {', and '.join(ways)}")
    return frozenset({*signals, *[PROBES] * probes, *[AGREEMENT] * (replicas != 1)})


def constants(
    fragments: Sequence[Fragment], alike: Mapping[str, Any], inner_steps: int, schedules: Mapping[str, Any], wire: str
) -> dict[str, Any]:
    """Return what all processes must have been started with and keep, by the words that name it; JSON values."""
    slots = [(fragment, slot) for fragment in fragments for slot in fragment.layout.slots]
    return {
        **alike,
        "numbers of fragments": len(fragments),
        "parameters": {slot.name: str(list(slot.shape)) for _, slot in slots},
        "orders of parameters": [slot.name for _, slot in slots],
        "types": {slot.name: str(slot.dtype) for fragment in fragments for slot in fragment.slots[0]},
        "fragments": {slot.name: fragment.name for fragment, slot in slots},
        "inner_steps": inner_steps,
        "schedules": dict(schedules),
        "wires": wire,
    }


def describe(fragments: Sequence[Fragment], constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all processes must have alike now: the constants, the outer settings, and the kernels."""
    return {
        **constants,
        "outer settings": {f"fragment {fragment.name}": _settings(fragment.outer) for fragment in fragments},
        # With kernels the last bits are others.
        "kernels of the outer round": {f.name: goes_on_device(f) for f in fragments if not f.flat.is_cpu},
    }


def _settings(outer: Optimizer) -> list[dict[str, str]]:
    """Return an optimizer's param groups without their tensors, as text."""
    return [{key: str(value) for key, value in group.items() if key != "params"} for group in outer.param_groups]


Signals = Mapping[str, float] | Callable[[list[str]], Mapping[str, float]] | None
"""Values by name, or a function to them from the names of the fragments that end their round."""


def check_signals_kind(signals: Signals) -> None:
    """Refuse signals that are neither a mapping, a function nor None."""
    if not (signals is None or callable(signals) or isinstance(signals, Mapping)):
        raise ValueError(f"DiLoCo: signals are {signals!r}; give names and values, such as {{'loss': 2.3}}")


def values_for(fragments: Sequence[Fragment], signals: Signals) -> Mapping[str, float]:
    """Return the signals for the end of these fragments' round, checked before anything of it happens."""
    values = signals([fragment.name for fragment in fragments]) if callable(signals) else signals
    values = {} if values is None else values
    outers = [fragment.outer for fragment in fragments if isinstance(fragment.outer, OuterSGD)]
    for policy in [group["restart"] for outer in outers for group in outer.param_groups]:
        missing = parse(policy).needs - MEASURED - {PROBES, AGREEMENT} - set(values)
        if missing:
            raise ValueError(
                f"DiLoCo: a round ends, and restart policy {policy} needs {', '.join(sorted(missing))}; pass them "
                "to step(signals=...) and finish(signals=...)"
            )
    check_signals("DiLoCo", values)
    return values
