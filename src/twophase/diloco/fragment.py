"""A fragment: a named part of the parameters with its own outer optimizer, rounds and schedule.

Only this module knows that parameters may be sharded (DTensors of FSDP2): all others see this rank's shard.
"""

from __future__ import annotations

import math
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twophase.diloco.compression import Compression
from twophase.diloco.group import SingleProcess
from twophase.optim.orthogonal import Filter
from twophase.optim.outer_sgd import Dots, GroupRound, OuterSGD
from twophase.rule import whole_number


def partition(sizes: Mapping[str, int], fragments: int | Mapping[str, str]) -> dict[str, list[str]]:
    """Return parameter names by fragment, for parameters of some sizes in the module's order.

    `fragments` is their number, contiguous, with the smallest possible largest one, named "0", "1", …; or regular
    expressions by fragment name, where a parameter belongs to the first expression that its name contains.

    >>> partition({"a": 5, "b": 1, "c": 4}, 2)
    {'0': ['a'], '1': ['b', 'c']}
    """
    names = list(sizes)
    if not isinstance(fragments, Mapping):
        if (count := whole_number("DiLoCo: fragments", fragments)) > len(names):
            raise ValueError(f"DiLoCo: fragments must be at most the {len(names)} parameters, got {fragments}")
        starts = [*(_balanced(list(sizes.values()), count) if count > 1 else [0]), len(names)]
        return {str(i): names[start:stop] for i, (start, stop) in enumerate(pairwise(starts))}
    taken: dict[str, list[str]] = {fragment: [] for fragment in fragments}
    try:
        expressions = {fragment: re.compile(pattern) for fragment, pattern in fragments.items()}
    except re.error as error:
        raise ValueError(f"DiLoCo: fragments must be regular expressions, got {error.pattern!r}: {error}") from None
    for name in names:
        owner = next((fragment for fragment, pattern in expressions.items() if pattern.search(name)), None)
        if owner is None:
            raise ValueError(f"DiLoCo: fragments has no pattern for the parameter {name!r}; end with a rest='.'")
        taken[owner].append(name)
    if empty := [fragment for fragment, found in taken.items() if not found]:
        raise ValueError(f"DiLoCo: fragments {empty[0]!r} takes no parameter; they are named like {names[0]!r}")
    return taken


def _balanced(sizes: list[int], count: int) -> list[int]:
    """Return the starts of contiguous, non-empty parts with the least possible largest sum."""

    def starts(capacity: int) -> list[int]:
        """Fill parts up to a capacity, but leave an element for each later part."""
        result = [0]
        for index in range(1, len(sizes)):
            must_end = len(sizes) - index <= count - len(result)
            if must_end or sums[index + 1] - sums[result[-1]] > capacity:
                result.append(index)
        return result

    sums, capacities = [*accumulate(sizes, initial=0)], range(max(sizes), sum(sizes) + 1)
    return starts(capacities[bisect_left(capacities, -count, key=lambda capacity: -len(starts(capacity)))])


# ------------------------------------------------------------------------------------------ parameters of a replica


@dataclass(frozen=True, slots=True)
class Slot:
    """A trainable parameter and its place in its module."""

    name: str
    module: nn.Module
    leaf: str
    parameter: nn.Parameter
    like: tuple[torch.dtype, torch.device, torch.Size]

    def tensor(self) -> Tensor:
        """Return the parameter now, of a sharded one this rank's shard; refuse one that was replaced."""
        p = self.parameter
        if self.module._parameters.get(self.leaf) is not p or (p.dtype, p.device, p.shape) != self.like:
            was = "replaced, resized, moved or cast"
            raise ValueError(f"DiLoCo: parameter {self.name!r} was {was} after the engine was built; build it last")
        return p.detach() if type(p) is nn.Parameter else local(p)


_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
"""What torch.compile and activation checkpointing add to names: a state is the same with and without them."""


def slots_of(replica: nn.Module) -> dict[str, Slot]:
    """Return the trainable parameters of a module by name."""
    slots = {}
    for name, p in replica.named_parameters():
        if p.requires_grad:
            path, _, leaf = name.rpartition(".")
            name = _WRAPPERS.sub("", name)  # noqa: PLW2901 - as in the module's own state_dict()
            slots[name] = Slot(name, replica.get_submodule(path), leaf, p, (p.dtype, p.device, p.shape))
    return slots


def local(p: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, and all of another tensor."""
    return p.detach().to_local() if hasattr(p, "to_local") else p.detach()  # type: ignore[operator]


def reshard(replicas: Sequence[nn.Module]) -> None:
    """Make FSDP2 free whole parameters, which it names after an evaluation: the engine reads and writes shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported means not used; importing it costs 50 MB
    for replica in replicas if fsdp else ():
        for module in replica.modules():
            if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
                module.reshard()  # type: ignore[operator]


# --------------------------------------------------------------------------------------------------- the fragment


class Fragment:
    """A part of the model in this process.

    Args:
        name, slots: its name, and its parameters in each replica of this process.
        anchor: (numel,) its part of the flat anchor; each parameter begins at a cache line.
        gradient: (numel,) room for its pseudo-gradient, free between two of its rounds.
        compression, filter: of what it sends, and of the mean pseudo-gradient, or None.

    Attributes:
        outer: its outer optimizer, over `views`, the anchor's parameters.
        offset: inner step of a round, from 1, after which its pseudo-gradient is taken.
        round: outer steps so far.
        steps: inner steps that its next pseudo-gradient holds.
        age: inner steps since its reduction was launched; None where none is under way.
        launched: inner steps in that reduction.
        weights: sums over those `steps` of each replica's weight, or None where all are alike.
        bytes_sent: bytes that this rank has sent for it.
        halfway: True if a compressed sum is under way whose second stage has not begun.
        norm, restarted, groups: of its last outer step, as in a report.
    """

    outer: Optimizer
    offset: int
    norm: float
    restarted: bool
    groups: tuple[GroupRound, ...] = ()

    def __init__(
        self,
        name: str,
        slots: Sequence[Sequence[Slot]],
        anchor: Tensor,
        gradient: Tensor,
        compression: Compression | None,
        *,
        filter: Filter | None,  # noqa: A002 - what it is
    ) -> None:
        self.name, self.slots, self.compression, self.filter = name, slots, compression, filter
        self.anchor, self.gradient = anchor, gradient
        shapes = [slot.tensor().shape for slot in slots[0]]
        self.views, self.gradient_views = views_of(anchor, shapes), views_of(gradient, shapes)
        ends = [int(view.storage_offset() - gradient.storage_offset()) + view.numel() for view in self.gradient_views]
        self._gaps = [*(gradient[end : padded(end)] for end in ends if end % _ALIGNMENT), gradient[padded(ends[-1]) :]]
        self.named = list(zip((slot.name for slot in slots[0]), self.views, strict=True))
        self.round = self.steps = self.launched = self.bytes_sent = 0
        self.age: int | None = None
        self.weights: list[float] | None = None
        self.halfway = False
        self._sum: Iterator[int] = iter(())  # under way; see `SingleProcess.all_reduce`
        self.seconds: dict[str, float] = {}

    def parameters(self) -> list[list[Tensor]]:
        """Return the parameters of each replica as they are now."""
        return [[slot.tensor() for slot in slots] for slots in self.slots]

    def count(self, weights: list[float] | None) -> None:
        """Count an inner step, in which the replicas have weights."""
        self.steps, sums = self.steps + 1, self.weights or [0.0] * len(self.slots)
        self.weights = weights and [a + b for a, b in zip(sums, weights, strict=True)]
        if self.age is not None:
            self.age += 1

    def shares(self, group: SingleProcess, weights: list[float]) -> list[float] | None:
        """Return by how much each replica of this process counts in the round, 1 on average; None is all alike."""
        own = group.sum_over_shards(weights)  # which may each have a part of a replica's batch
        of_all = [weight for row in group.gather_json(own) for weight in row]
        mean = math.fsum(of_all) / len(of_all)
        return None if min(of_all) == max(of_all) else [weight / mean for weight in own]

    @torch.no_grad()
    def launch(self, group: SingleProcess) -> None:
        """Write g <- sum over this process's replicas of share_r (a - theta_r), and begin to sum it over the ranks.

        Differences are summed, not parameters, whose sum would round away the low bits of a small difference. With the
        same order, difference first, then sum, two replicas in one process have the bits of two processes.
        """
        self.seconds, shares = {}, self.weights and self.shares(group, self.weights)
        with self.phase("pseudo_gradient"):
            for gap in self._gaps:  # the room may hold another fragment's values there
                gap.zero_()
            for number, params in enumerate(self.parameters()):
                target = self.gradient if number == 0 else torch.zeros_like(self.gradient)
                out = self.gradient_views if number == 0 else views_of(target, [a.shape for a in self.views])
                for a, theta, difference in zip(self.views, params, out, strict=True):
                    # A 16-bit replica began its round at a rounded to its type. Counted from a itself, an unchanged
                    # replica would add its rounding error to the momentum in every round.
                    start = a if theta.dtype == a.dtype else a.to(theta.dtype).to(a.dtype)
                    torch.sub(start, theta.to(a.device), out=difference)
                if shares and shares[number] != 1:  # a share of 0 also leaves out what is not finite
                    target.mul_(shares[number]) if shares[number] else target.zero_()
                if self.compression and group.size == 1:  # each replica is a sender of its own
                    self.compression.quantize_(target, number)
                if number:
                    self.gradient.add_(target)
        with self.phase("reduce"):
            if self.compression:
                self._sum = self.compression.all_reduce(self.gradient, group)  # type: ignore[arg-type]
            elif group.size > 1:
                self._sum = group.all_reduce(self.gradient)
            self.bytes_sent = next(self._sum, 0)
        self.halfway = self.compression is not None and group.size > 1
        self.launched, self.steps, self.age, self.weights = self.steps, 0, 0, None

    def advance(self) -> None:
        """Begin the second stage of a compressed sum."""
        self.bytes_sent += next(self._sum)
        self.halfway = False

    def settle(self) -> None:
        """Wait for the sum."""
        self.bytes_sent += sum(self._sum)
        self.halfway = False

    @torch.no_grad()
    def complete(self, replicas: int) -> None:
        """Wait for the sum, make it the mean, filter it, and assign it as `.grad` of the anchor."""
        self.settle()
        self.gradient.div_(replicas)
        if self.filter is not None:
            self.filter({name: g for (name, _), g in zip(self.named, self.gradient_views, strict=True)})
        for view, gradient in zip(self.views, self.gradient_views, strict=True):
            view.grad = gradient  # each time: a user's zero_grad() may have removed it

    def step(self, signals: Mapping[str, float], dots: list[Dots] | None) -> None:
        """Take the outer step; `dots` are inner products to decide by, instead of its own."""
        before = [group.get("restarts", 0) for group in self.outer.param_groups]
        if isinstance(self.outer, OuterSGD):
            self.outer.step(signals=signals, measure=True, dots=dots)
            self.groups = tuple(self.outer.last_round)
            self.norm = sum(group.pseudo_gradient_norm**2 for group in self.groups) ** 0.5
        else:  # its step may overwrite g
            self.norm = dots[0][0] ** 0.5 if dots else self.gradient.norm().item()
            self.outer.step()
        self.restarted = before != [group.get("restarts", 0) for group in self.outer.param_groups]

    @torch.no_grad()
    def restore(self, mixing: float = 0.0) -> None:
        """Set theta_r <- mixing theta_r + (1 - mixing) a."""
        for params in self.parameters():
            if mixing == 0:
                torch._foreach_copy_(params, self.views)
                continue
            for theta, anchor in zip(params, self.views, strict=True):
                theta.lerp_(anchor.to(theta.device, theta.dtype), 1 - mixing)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall time of a phase to `seconds`, under a profiler scope of its name."""
        start = time.perf_counter()
        with torch.profiler.record_function(f"twophase::{name}"):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def state_dict(self) -> dict[str, Any]:
        """Return rounds, outer optimizer and, where a reduction is under way, its sum."""
        state = {"name": self.name, "round": self.round, "steps": self.steps, "outer": self.outer.state_dict()}
        state["weights"] = self.weights
        if self.age is not None:
            self.settle()
            state |= {"age": self.age, "launched": self.launched, "sum": self.gradient, "bytes_sent": self.bytes_sent}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; the outer optimizer is loaded by the engine, before."""
        self.round, self.steps, self._sum = state["round"], state["steps"], iter(())
        self.weights, self.age, self.launched = state.get("weights"), state.get("age"), state.get("launched", 0)
        self.bytes_sent = state.get("bytes_sent", 0)
        if self.age is not None:
            self.gradient.copy_(state["sum"])


# ------------------------------------------------------------------------------------------------- flat buffers

_ALIGNMENT = 16  # elements: a cache line in float32; products of the same numbers then have the same bits anywhere


def padded(numel: int) -> int:
    """Return the elements that a parameter takes in a flat buffer."""
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


def views_of(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the parameters' places in a flat buffer, in their shapes."""
    starts = accumulate((padded(shape.numel()) for shape in shapes), initial=0)
    return [flat[start : start + shape.numel()].view(shape) for start, shape in zip(starts, shapes, strict=False)]
