"""Check and build the fixed part of an engine once: schedule, replicas, fragments, anchor and processes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from twophase.diloco.agreement import versions
from twophase.diloco.communicator import Communicator
from twophase.diloco.flat import plan
from twophase.diloco.formats import check_wire
from twophase.diloco.fragment import (
    Fragment,
    Slot,
    check_placement,
    checksum_of,
    fsdp_modules,
    local,
    partition,
    reshard,
    slots_of,
    tensors_of,
)
from twophase.diloco.transfer import Channel
from twophase.diloco.wire import LossyChannel
from twophase.optim.build import OuterChoice, is_policy, outer_optimizer
from twophase.optim.groups import as_number
from twophase.optim.orthogonal import Filter, filter_of
from twophase.optim.outer import OuterSGD
from twophase.optim.restarting import Restarting
from twophase.policies.base import MEASURED, RestartPolicy
from twophase.policies.checks import check_count
from twophase.policies.text import parse

Restarts = RestartPolicy | str | int | None
Signals = Mapping[str, float] | None
"""Values by name."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Schedule the syncs of fragments, and the mixing of their replicas; arguments as of `DiLoCo`.

    Raises:
        ValueError: a value outside its range.
    """

    inner_steps: int
    stagger: bool = True
    delay: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        check_count("DiLoCo", "inner_steps", self.inner_steps)
        if not isinstance(self.stagger, bool):
            raise ValueError(
                f"DiLoCo: stagger is {self.stagger!r}; it must be True, fragments' syncs spread over a round, or False"
            )
        last = self.inner_steps - 1
        if isinstance(self.delay, bool) or not isinstance(self.delay, int) or not 0 <= self.delay <= last:
            raise ValueError(
                f"DiLoCo: delay is {self.delay!r}. It must be a whole number of inner steps from 0 to inner_steps - 1 "
                f"= {last}, so that a reduction ends before the fragment's next begins"
            )
        if not isinstance(self.mixing, Real) or not 0 <= self.mixing < 1:
            raise ValueError(
                f"DiLoCo: mixing is {self.mixing!r}. It must lie in [0, 1): 0 takes the anchor over, 0.5 keeps half of "
                "what a replica has reached by itself"
            )

    def offset(self, number: int, count: int) -> int:
        """Return the inner step of a round, from 1, after which a fragment of `count` takes its pseudo-gradient."""
        return -(-(number + 1) * self.inner_steps // count) if self.stagger else self.inner_steps

    def gap(self, count: int) -> int:
        """Return the least number of inner steps between the syncs of `count` fragments."""
        return self.inner_steps // count if self.stagger else self.inner_steps

    def full(self) -> int:
        """Return the inner steps that a whole round's outer step contains: a delay without mixing is discarded."""
        return self.inner_steps - (self.delay if self.mixing == 0 else 0)


class Setting:
    """Hold the values that all syncs of an engine share; arguments as of `DiLoCo`.

    The anchor, one flat vector of which each fragment has a part, holds the first replica's parameters.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        communicator: Communicator,
        schedule: Schedule,
        *,
        outer: OuterChoice,
        restart: Restarts | Mapping[str, Restarts],
        filter: str | Filter | None,  # noqa: A002 - what it is
        fragments: int | Mapping[str, str],
        wire: str,
        alike: Mapping[str, Any],
    ) -> None:
        self.modules, self.communicator = modules, communicator
        self.mixing = schedule.mixing
        self.supplied = frozenset[str]()
        """Names of the values that restart policies may need: see `promise`."""
        self.alone = communicator.alone
        slots = _collect_slots(modules, communicator)
        self._fsdp = [module for replica in modules for module in fsdp_modules(replica)]
        self.are_sharded = bool(self._fsdp)
        self.fragments, self.anchor = _cut(slots, fragments, communicator, wire, schedule)
        self.gap = schedule.gap(len(self.fragments))
        """The least number of inner steps between two syncs."""
        _build_outers(self.fragments, outer, restart, filter, communicator)
        self.constants = {
            **versions(),
            **alike,
            **_constants(self.fragments, modules[0], communicator),
            "inner_steps": schedule.inner_steps,
            "schedules": {"stagger": schedule.stagger, "delay": schedule.delay, "mixing": schedule.mixing},
            "wires": wire,
        }
        """Facts that all processes must have been started with, by the words that name them; JSON values."""

    def describe(self) -> dict[str, Any]:
        """Return the facts that all processes must share now: the constants and the outer settings."""
        settings = {
            f"fragment {f.name}": [
                {key: str(value) for key, value in group.items() if key != "params"} for group in f.outer.param_groups
            ]
            for f in self.fragments
        }
        return {**self.constants, "outer settings": settings}

    def promise(self, signals: Collection[str]) -> None:
        """Name the values that restart policies may need from now on, and refuse a policy that needs more."""
        self.supplied = frozenset(signals)
        outers = [fragment.outer for fragment in self.fragments if isinstance(fragment.outer, OuterSGD)]
        check_needs([group for outer in outers for group in outer.param_groups], self.supplied)
        for outer in outers:
            outer.promised |= self.supplied  # a state may bring another policy

    def check_whole(self) -> None:
        """Refuse to continue from an outer step that was interrupted."""
        if any(fragment.torn for fragment in self.fragments):
            raise ValueError(
                "DiLoCo: the last outer step was interrupted, and a part of the anchor is ahead of the rest. Go back "
                "to the newest checkpoint with load_state_dict(), on a lossy wire load_wire_state_dict() as well"
            )

    def look_up(self, fragments: Sequence[Fragment]) -> None:
        """Look up the parameters of all replicas: FSDP2 replaces shards in a forward pass, the engine needs them."""
        reshard(self._fsdp)
        for fragment in fragments:
            fragment.look_up()

    @torch.no_grad()
    def restore(self) -> None:
        """Set all replicas to the anchor."""
        self.look_up(self.fragments)
        for fragment in self.fragments:
            fragment.restore()

    @contextmanager
    def lend(self, number: int) -> Iterator[nn.Module]:
        """Yield a replica; its parameters may be written, and are restored afterwards."""
        self.look_up(self.fragments)
        before = [[theta.detach().clone() for theta in fragment.params[number]] for fragment in self.fragments]
        try:
            yield self.modules[number]
        finally:
            try:
                self.write(number, before)
            except BaseException:  # an interrupt while they are restored
                self.write(number, before)
                raise

    @torch.no_grad()
    def write(self, number: int, values: Sequence[Sequence[Tensor]]) -> None:
        """Set a replica's parameters, fragment by fragment."""
        self.look_up(self.fragments)
        for fragment, tensors in zip(self.fragments, values, strict=True):
            torch._foreach_copy_(fragment.params[number], list(tensors))


# ----------------------------------------------------------------------------------------------- replicas, fragments


def _collect_slots(replicas: list[nn.Module], communicator: Communicator) -> list[list[Slot]]:
    """Check that the replicas of this process have the same trainable parameters; return those of each."""
    for replica in replicas:
        if any(isinstance(module, DistributedDataParallel) for module in replica.modules()):
            raise ValueError(
                "DiLoCo: replicas holds a DistributedDataParallel, which averages the gradients of each inner step: "
                "no replica would train on its own. Pass its .module. Use FSDP2 to shard a replica over processes"
            )
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
        if slot.parameter.is_meta or not slot.parameter.is_floating_point():
            raise ValueError(
                f"DiLoCo: parameter {slot.name!r} is {slot.dtype} on {slot.device}; it needs floating-point values"
            )
    communicator.bind(collected[0][0].device)
    return collected


def _cut(
    slots: list[list[Slot]],
    fragments: int | Mapping[str, str],
    communicator: Communicator,
    wire: str,
    schedule: Schedule,
) -> tuple[list[Fragment], Tensor]:
    """Make the fragments, each with its part of the anchor."""
    by_name = [{slot.name: slot for slot in of_replica} for of_replica in slots]
    first = dict(zip(by_name[0], tensors_of(slots[0]), strict=True))
    parts = partition({slot.name: slot.parameter.numel() for slot in slots[0]}, fragments)
    layouts = [plan((name, tuple(first[name].shape)) for name in names) for names in parts.values()]
    lengths = [layout.numel for layout in layouts]
    least = int(min(row[0] for row in communicator.exchange_in_replica([min(lengths)])))
    if least == 0:
        raise ValueError(
            "DiLoCo: a fragment is empty. Its parameters have no elements, or fewer rows than the replica has shards. "
            "Take fewer or larger fragments"
        )
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in first.values()) else torch.float32
    anchor = torch.zeros(sum(lengths), dtype=dtype, device=slots[0][0].device)
    # Fragments that are never reduced at the same time share a buffer for their pseudo-gradients.
    shared = schedule.stagger and schedule.delay < schedule.gap(len(parts))
    room = torch.zeros(max(lengths) if shared else sum(lengths), dtype=dtype, device=anchor.device)
    senders = len(slots) if communicator.alone else 1
    made: list[Fragment] = []
    start = 0
    for (name, names), layout in zip(parts.items(), layouts, strict=True):
        begin = 0 if shared else start
        fragment = Fragment(
            name,
            len(made),
            slots=[[of_replica[name] for name in names] for of_replica in by_name],
            layout=layout,
            anchor=anchor[start : start + layout.numel],
            gradient=room[begin : begin + layout.numel],
            channel=open_channel(
                wire,
                layout.numel,
                dtype=dtype,
                device=anchor.device,
                senders=senders,
            ),
            offset=schedule.offset(len(made), len(parts)),
        )
        with torch.no_grad():
            torch._foreach_copy_(fragment.anchor_views, fragment.look_up()[0])
        made.append(fragment)
        start += layout.numel
    return made, anchor


def open_channel(name: str, numel: int, *, dtype: torch.dtype, device: torch.device, **options: Any) -> Channel:
    """Return the channel of a wire; arguments as of `Channel`, options as of `wire.LossyChannel`.

    Raises:
        ValueError: an unknown wire.
    """
    if check_wire(name) == "float32":
        return Channel(name, numel, dtype=dtype, device=device)
    return LossyChannel(name, numel, dtype=dtype, device=device, **options)


def _constants(fragments: Sequence[Fragment], replica: nn.Module, communicator: Communicator) -> dict[str, Any]:
    """Return the facts about parameters that all processes must share.

    Frozen parameters are never sent, so a difference (of the base model under an adapter, say) would stay unnoticed.
    Values of buffers may differ, such as batch-norm statistics.
    """
    slots = [(fragment, slot) for fragment in fragments for slot in fragment.layout.slots]
    frozen = {name: p.detach() for name, p in replica.named_parameters() if not p.requires_grad}
    # The values of a sharded replica differ between its shards.
    comparable = {} if communicator.sharded else {n: p for n, p in frozen.items() if p.device.type != "meta"}
    return {
        "frozen parameters": {name: f"{list(p.shape)} {p.dtype}" for name, p in frozen.items()},
        "values of frozen parameters": {name: checksum_of(p.cpu()) for name, p in comparable.items()},
        "shapes of buffers": {name: str(list(buffer.shape)) for name, buffer in replica.named_buffers()},
        "numbers of fragments": len(fragments),
        "parameters": {slot.name: str(list(slot.shape)) for _, slot in slots},
        "orders of parameters": [slot.name for _, slot in slots],
        "types": {slot.name: str(slot.dtype) for fragment in fragments for slot in fragment.slots[0]},
        "fragments": {slot.name: fragment.name for fragment, slot in slots},
    }


# ------------------------------------------------------------------------------------------------- outer optimizers


def _build_outers(
    fragments: Sequence[Fragment],
    outer: OuterChoice,
    restart: Restarts | Mapping[str, Restarts],
    filters: str | Filter | None,
    communicator: Communicator,
) -> None:
    """Build an optimizer for each fragment: a shared one would also step on gradients of fragments without a sync."""
    if is_policy(outer) and restart is not None:
        raise ValueError(f"DiLoCo: outer is {outer}, a policy, and restart is {restart}; give one of the two")
    names = [fragment.name for fragment in fragments]
    policies = restart if isinstance(restart, Mapping) else dict.fromkeys(names, restart)
    if set(policies) != set(names):
        raise ValueError(
            f"DiLoCo: restart and fragments do not name the same ({', '.join(sorted(set(policies) ^ set(names)))}); "
            f"the fragments are {', '.join(names)}: give each its policy"
        )

    def total(numbers: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*communicator.exchange_in_replica(list(numbers)), strict=True)]

    try:
        chosen = filter_of(filters, total if communicator.sharded else None)
    except ValueError as error:
        raise ValueError(f"DiLoCo: {error}") from None
    for fragment in fragments:
        fragment.filter = chosen
        policy = policies[fragment.name]
        try:
            needs = () if policy is None else parse(policy).needs  # `promise` checks them
            made = outer_optimizer(fragment.named, outer, policy, needs)
        except ValueError as error:
            raise ValueError(f"DiLoCo: {error}") from None
        optimizers = made.optimizers if isinstance(made, Restarting) else [made]
        measures = isinstance(made, Restarting) and made.needs
        if communicator.sharded and (measures or any(isinstance(each, torch.optim.Muon) for each in optimizers)):
            raise ValueError("DiLoCo: Muon and measured restarts need whole parameters, got shards; take another outer")
        fragment.outer = made


def check_needs(groups: Sequence[Mapping[str, Any]], supplied: Collection[str]) -> None:
    """Refuse a restart policy that needs values which the caller will not supply."""
    for group in groups:
        if missing := sorted(parse(group["restart"]).needs - MEASURED - set(supplied)):
            raise ValueError(
                f"DiLoCo: restart policy {group['restart']} needs {', '.join(missing)}; pass them to "
                f"step(signals=...), and promise them with DiLoCo(signals={missing!r})"
            )


def check_kind(signals: Signals) -> None:
    """Refuse signals that are neither a mapping nor None."""
    if not (signals is None or isinstance(signals, Mapping)):
        raise ValueError(f"DiLoCo: signals are {signals!r}; give names and values, such as {{'loss': 2.3}}")


def values_for(fragments: Sequence[Fragment], signals: Signals) -> Mapping[str, float]:
    """Check and return the signals for the end of these fragments' round, before the round changes anything."""
    values = signals or {}
    check_needs([g for f in fragments if isinstance(f.outer, OuterSGD) for g in f.outer.param_groups], values)
    for name, value in values.items():
        as_number(f"DiLoCo: signals[{name!r}]", value)
    return values
