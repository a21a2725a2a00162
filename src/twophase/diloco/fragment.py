"""A fragment: a named part of the parameters with its own schedule of syncs.

A model is one fragment, or is cut into several (`partition`): in contiguous parts of about equal size, or by patterns
on the parameters' names. Each has its own outer optimizer, round count and restart period.

Only this module handles sharded parameters (DTensors of FSDP2): every other module receives the local shard.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twophase.diloco.flat import Digest, Layout, checksum, divide_
from twophase.diloco.transfer import Channel
from twophase.optim.groups import rule_of
from twophase.optim.orthogonal import Filter
from twophase.optim.outer import BUFFER, OuterSGD
from twophase.optim.restarting import Restarting

SMALL = 1 << 20
"""Elements up to which calls cost more than elements. Up to that size a fragment is measured tensor by tensor, which
rounds differently from a sweep."""


def partition(sizes: Mapping[str, int], fragments: int | Mapping[str, str]) -> dict[str, list[str]]:
    """Cut parameters into fragments.

    Args:
        sizes: number of elements by parameter name, in the module's order.
        fragments: number of fragments, >= 1, contiguous and with the smallest possible largest one; or regular
            expressions by fragment name. A parameter belongs to the first expression that its name contains.

    Returns:
        Parameter names by fragment name; fragments of a count are named "0", "1", ….

    Raises:
        ValueError: more fragments than parameters, an invalid pattern, one without parameters, or a parameter without
            a pattern.

    >>> partition({"a": 5, "b": 1, "c": 4}, 2)
    {'0': ['a'], '1': ['b', 'c']}
    >>> partition({"embedding": 5, "blocks.0": 1, "head": 5}, {"ends": "embedding|head", "blocks": "blocks"})
    {'ends': ['embedding', 'head'], 'blocks': ['blocks.0']}
    """
    names = list(sizes)
    if isinstance(fragments, Mapping):
        return _by_pattern(names, fragments)
    if isinstance(fragments, bool) or not isinstance(fragments, int) or not 1 <= fragments <= len(sizes):
        raise ValueError(
            f"partition: fragments is {fragments!r}; it must be a whole number between 1 and the number of parameters, "
            f"{len(sizes)}, or patterns by name"
        )
    starts = _balanced(list(sizes.values()), fragments)
    stops = [*starts[1:], len(names)]
    return {str(number): names[start:stop] for number, (start, stop) in enumerate(zip(starts, stops, strict=True))}


def _by_pattern(names: list[str], patterns: Mapping[str, str]) -> dict[str, list[str]]:
    names_by_fragment: dict[str, list[str]] = {fragment: [] for fragment in patterns}
    for fragment, pattern in patterns.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"partition: the pattern {pattern!r} of fragment {fragment!r} is no regular expression ({error})"
            ) from None
    for name in names:
        taker = next((fragment for fragment, pattern in patterns.items() if re.search(pattern, name)), None)
        if taker is None:
            raise ValueError(
                f"partition: no fragment's pattern is found in the parameter name {name!r}. Every parameter must "
                "belong to a fragment: add one at the end such as rest=."
            )
        names_by_fragment[taker].append(name)
    for fragment, taken in names_by_fragment.items():
        if not taken:
            raise ValueError(
                f"partition: fragment {fragment!r} takes no parameter: nothing that an earlier fragment leaves matches "
                f"{patterns[fragment]!r}; parameters are named like {names[0]!r}"
            )
    return names_by_fragment


def _balanced(sizes: list[int], count: int) -> list[int]:
    """Return the starts of contiguous, non-empty parts with the least possible largest sum."""

    def starts(capacity: int) -> list[int]:
        """Return the starts of parts that are filled up to a capacity, but leave an element for each later part."""
        result, filled = [0], 0
        for index, size in enumerate(sizes):
            must_end = len(sizes) - index < count - len(result) + 1
            if index > result[-1] and (filled + size > capacity or must_end):
                result.append(index)
                filled = 0
            filled += size
        return result

    low, high = max(sizes), sum(sizes)
    while low < high:  # the least capacity into which `count` parts fit
        middle = (low + high) // 2
        low, high = (low, middle) if len(starts(middle)) <= count else (middle + 1, high)
    return starts(low)


@dataclass(frozen=True, slots=True)
class Slot:
    """Name a trainable parameter and its place in its module."""

    name: str
    module: nn.Module
    leaf: str
    parameter: nn.Parameter
    dtype: torch.dtype
    device: torch.device


def slots_of(replica: nn.Module) -> list[Slot]:
    """Return the trainable parameters of a module, in its order."""
    reshard(fsdp_modules(replica))  # after an evaluation FSDP2 names whole parameters in place of the trained shards
    slots = []
    for name, p in replica.named_parameters():
        if p.requires_grad:
            path, _, leaf = name.rpartition(".")
            slots.append(Slot(name, replica.get_submodule(path), leaf, p, p.dtype, p.device))
    return slots


def tensors_of(slots: Sequence[Slot]) -> list[Tensor]:
    """Return the present parameters, of a sharded parameter this process's shard.

    Raises:
        ValueError: a parameter was replaced; further training would silently synchronise nothing.
    """
    tensors: list[Tensor] = []
    for slot in slots:
        p = slot.parameter
        tensors.append(p if type(p) is nn.Parameter else local(p))
        if slot.module._parameters.get(slot.leaf) is not p or p.dtype is not slot.dtype or p.device != slot.device:
            raise ValueError(
                f"DiLoCo: parameter {slot.name!r} was replaced, moved or cast after the engine was built; call "
                ".to(), .double() or load_state_dict(assign=True) first and build the engine last"
            )
    return tensors


def local(p: Tensor) -> Tensor:
    """Return this process's part of a parameter: its shard of a DTensor, and all of an ordinary parameter."""
    return p.detach().to_local() if hasattr(p, "to_local") else p.detach()  # type: ignore[operator]


def check_placement(name: str, p: Tensor, sharded: bool) -> None:
    """Refuse shards that would not be summed, and on a mesh parameters that would be summed more than once."""
    placements = getattr(p, "placements", ())
    if placements and not sharded:
        raise ValueError(
            f"DiLoCo: parameter {name!r} is sharded (a DTensor); pass communicator=ProcessGroup.of_mesh(mesh), with an "
            "axis of replicas and the axis of its shards"
        )
    if sharded and not (placements and all(placement.is_shard() for placement in placements)):
        raise ValueError(
            f"DiLoCo: parameter {name!r} is whole on every process of the mesh's shard axis, which would count it once "
            "a process. Shard every parameter, with fully_shard(module, mesh=mesh['shard'])"
        )


def fsdp_modules(replica: nn.Module) -> list[Any]:
    """Return the modules of a replica that FSDP2 shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # not imported means not used; importing it costs 50 MB
        return []
    if any(isinstance(module, fsdp.FullyShardedDataParallel) for module in replica.modules()):  # shards as if whole
        raise ValueError("DiLoCo: replicas holds a FullyShardedDataParallel; shard it by FSDP2's fully_shard instead")
    return [module for module in replica.modules() if isinstance(module, fsdp.FSDPModule)]


def reshard(modules: Sequence[Any]) -> None:
    """Make FSDP2 free whole parameters: the engine reads and writes shards."""
    for module in modules:
        module.reshard()


class Fragment:
    """Hold a fragment in this process: its part of the flat anchor, outer optimizer, pseudo-gradient and rounds.

    Args:
        name: name of the fragment.
        number: index among the fragments, from 0.
        slots: parameters in each replica of this process.
        layout: places of the parameters in the flat buffers.
        anchor: (layout.numel,) part of the anchor.
        gradient: (layout.numel,) buffer for the pseudo-gradient.
        channel: channel that sums the pseudo-gradient over the processes.
        offset: inner step of a round, from 1, after which its pseudo-gradient is taken.
    """

    def __init__(
        self,
        name: str,
        number: int,
        *,
        slots: list[list[Slot]],
        layout: Layout,
        anchor: Tensor,
        gradient: Tensor,
        channel: Channel,
        offset: int,
    ) -> None:
        self.name, self.number, self.offset = name, number, offset
        self.slots, self.layout, self.channel = slots, layout, channel
        self.flat, self.gradient = anchor, gradient
        self.anchor_views = layout.views(anchor)
        self.gradient_views = layout.views(gradient)
        self.gaps = layout.gaps(gradient)
        self.bounds = [(slot.offset, slot.end) for slot in layout.slots]
        self.anchor_digest = Digest(anchor) if anchor.is_cpu else None
        kinds = {(slot.dtype, slot.device) for slots_of_replica in slots for slot in slots_of_replica}
        self._is_plain = kinds == {(anchor.dtype, anchor.device)} and layout.numel <= SMALL
        self._gathered: list[Tensor] = []
        """Buffer of a replica's parameters as one vector, and its views; for small fragments of several replicas."""
        self._momentum: Tensor | None = None
        self.momentum_views: list[Tensor] = []
        self.outer: Optimizer
        self.filter: Filter | None = None
        self.params: list[list[Tensor]] = []
        """The parameters of each replica, by the last `look_up`."""
        self.round = 0
        """Rounds that it has ended."""
        self.steps = 0
        """Inner steps in its next pseudo-gradient."""
        self.divisor: float = 1
        """Number by which its gradient, a sum over replicas, is still to be divided."""
        self.torn = False
        """True if an interrupted outer step has changed only a part of it."""

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """The anchor's parameters by name."""
        return list(zip((slot.name for slot in self.layout.slots), self.anchor_views, strict=True))

    @property
    def outer_sgd(self) -> OuterSGD:
        """The outer optimizer of a fragment that has an `OuterSGD`."""
        assert isinstance(self.outer, OuterSGD)
        return self.outer

    def describe_outer(self) -> list[str]:
        """Return rule and restart of each param group; for another optimizer than `OuterSGD` its name."""
        groups = self.outer.param_groups
        if isinstance(self.outer, OuterSGD):
            return [f"{rule_of(group).describe()}, restart {group['restart']}" for group in groups]
        if isinstance(self.outer, Restarting):
            names = " and ".join(type(each).__name__ for each in self.outer.optimizers)
            return [f"{names}, restart {group['restart']}" for group in groups]
        return [type(self.outer).__name__]

    @property
    def needs(self) -> frozenset[str]:
        """Names of the values that its restart policies need; empty without an `OuterSGD`."""
        return self.outer.needs if isinstance(self.outer, OuterSGD) else frozenset()

    def look_up(self) -> list[list[Tensor]]:
        """Return the present parameters of each replica, valid in `params` until the next inner step.

        Raises:
            ValueError: a parameter was replaced after the engine was built.
        """
        self.params = [tensors_of(slots) for slots in self.slots]
        return self.params

    def write_pseudo_gradient(self, *, alone: bool) -> None:
        """Write g <- sum over this process's replicas of (a - theta_r), from `params`.

        Differences are summed, not parameters: a sum of parameters would round away the low bits of a small
        difference. A reduction over processes has the same order, difference first, then sum. So two replicas in one
        process equal two processes bit for bit.

        A 16-bit replica began its round at the anchor rounded to its type, so its progress counts from there. Counted
        from the anchor, an unchanged replica would add its rounding error to the momentum in every round.

        Args:
            alone: True if this process is the only one, so that each replica is its own sender on a lossy wire.
        """
        self.close_gaps()
        simulated = alone and self.channel.lossy
        if self._is_plain and not simulated:  # few calls: they cost more than elements here
            torch._foreach_copy_(self.gradient_views, self.params[0])
            torch.sub(self.flat, self.gradient, out=self.gradient)
            for params in self.params[1:]:
                if not self._gathered:
                    flat = torch.zeros_like(self.flat)
                    self._gathered = [flat, *self.layout.views(flat)]
                flat, *views = self._gathered
                torch._foreach_copy_(views, params)
                self.gradient.add_(torch.sub(self.flat, flat, out=flat))
            return
        scratch = torch.zeros_like(self.gradient) if simulated and len(self.slots) > 1 else None
        for number, params in enumerate(self.params):
            target, views = self.gradient, self.gradient_views
            if scratch is not None and number:
                target, views = scratch, self.layout.views(scratch)
            for anchor, out, theta in zip(self.anchor_views, views, params, strict=True):
                adds = number > 0 and not simulated
                difference = progress_of(anchor, theta, None if adds else out)
                if adds:
                    out.add_(difference)
            if simulated:
                self.channel.quantize(target, number)
                if number:
                    self.gradient.add_(target)

    def close_gaps(self) -> None:
        """Zero the padding between two pseudo-gradients: another fragment's values would coarsen int8's scales."""
        if self.gaps:
            torch._foreach_zero_(self.gaps)

    def momentum(self) -> Tensor | None:
        """Return the flat vector whose views are all parameters' momentum buffers; None if a parameter lacks one.

        Buffers with other memory, such as loaded ones, are copied into a new vector and become its views.
        """
        if type(self.outer) is not OuterSGD:  # another optimizer's state may hold more
            return None
        state, views = self.outer.state, self.momentum_views
        # In the order of the parameters, as rounds make them: a lookup by parameter takes far longer.
        buffers = [entry.get(BUFFER) for entry in state.values()]
        if views and len(buffers) == len(views) and all(map(operator.is_, buffers, views)):
            return self._momentum
        buffers = [state.get(p, {}).get(BUFFER) for p in self.anchor_views]
        present = [buffer for buffer in buffers if buffer is not None]
        kinds = [(type(buffer), buffer.dtype, buffer.shape) for buffer in present]
        if kinds != [(Tensor, self.flat.dtype, view.shape) for view in self.anchor_views]:
            return None
        self._momentum, self.momentum_views = None, []  # free it first, or memory would hold two and the buffers
        momentum = self.new_momentum()
        torch._foreach_copy_(self.momentum_views, present)
        for p, view in zip(self.anchor_views, self.momentum_views, strict=True):
            state[p] = state.pop(p) | {BUFFER: view}
        return momentum

    def new_momentum(self) -> Tensor:
        """Make a flat vector, and its `momentum_views`, for momentum buffers that are still to be written."""
        # Never the earlier vector: other objects, such as a sweep's forest, may have views of it.
        self._momentum = torch.zeros_like(self.flat)
        self.momentum_views = self.layout.views(self._momentum)
        return self._momentum

    def divide(self) -> None:
        """Make the sum of pseudo-gradients their mean."""
        divide_(self.gradient, self.divisor)
        self.divisor = 1

    def apply_filter(self) -> None:
        """Let the filter change the mean pseudo-gradient."""
        if self.filter is not None:
            self.filter({name: g for (name, _), g in zip(self.named, self.gradient_views, strict=True)})

    def hand_over(self) -> None:
        """Pass the pseudo-gradient to the outer optimizer, as `.grad` of the anchor's parameters."""
        for anchor, gradient in zip(self.anchor_views, self.gradient_views, strict=True):
            # In every round: a user's zero_grad() may have removed it.
            if anchor.grad is not gradient:
                anchor.grad = gradient

    def restore(self, mixing: float = 0.0) -> None:
        """Set theta_r <- mixing theta_r + (1 - mixing) a, for the tensors in `params`."""
        for params in self.params:
            if mixing == 0:
                torch._foreach_copy_(params, self.anchor_views)
                continue
            for theta, anchor in zip(params, self.anchor_views, strict=True):
                theta.lerp_(anchor.to(device=theta.device, dtype=theta.dtype), 1 - mixing)

    def counters(self) -> list[Any]:
        """Return the settings and counters of groups and parameters on which the next outer step depends."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.outer.param_groups]
        plain = [{k: v for k, v in state.items() if not isinstance(v, Tensor)} for state in self._states()]
        return [self.round, groups, plain]

    def digest(self, taken: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return sixteen hexadecimal digits each of the anchor, the outer optimizer's tensors, and its counters.

        Args:
            taken: digests that a sweep has taken already.
        """
        digits = dict(taken or {})
        anchor = digits.get("anchor") or checksum(self.flat)
        buffer = digits.get("momentum buffer")
        if buffer is None and (momentum := self.momentum()) is not None:
            buffer = checksum(momentum)
        elif buffer is None:
            tensors = [s[key] for s in self._states() for key in sorted(s) if isinstance(s[key], Tensor)]
            buffer = short_hash("\n".join(map(checksum_of, tensors)))
        counters = json.dumps(self.counters(), sort_keys=True, default=_exactly)
        return {"anchor": anchor, "momentum buffer": buffer, "counters": short_hash(counters)}

    def _states(self) -> list[Mapping[str, Any]]:
        """Return the outer optimizer's state of each parameter, in their order."""
        return [self.outer.state.get(p, {}) for group in self.outer.param_groups for p in group["params"]]


def progress_of(anchor: Tensor, theta: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a - theta, with a rounded to the replica's type, on the anchor's device."""
    start = anchor if theta.dtype == anchor.dtype else anchor.to(theta.dtype).to(anchor.dtype)
    return torch.sub(start, theta.to(anchor.device), out=out)


def checksum_of(tensor: Tensor) -> str:
    """Return the checksum of a tensor of any dtype and shape."""
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.dtype not in (torch.float32, torch.float64):
        flat = nn.functional.pad(flat.view(torch.uint8), (0, -flat.nbytes % 8)).view(torch.float32)
    return checksum(flat)


def _exactly(value: Any) -> Any:
    """Return text for values that JSON lacks; the plain text of a learning rate that is a tensor would round it."""
    return [str(value.dtype), list(value.shape), checksum_of(value)] if isinstance(value, Tensor) else str(value)


def short_hash(text: str) -> str:
    """Return sixteen hexadecimal digits of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
