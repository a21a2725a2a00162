"""The fixed part of an engine: the replicas of this process, their fragments and anchor, and the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twophase.diloco.communicator import Communicator
from twophase.diloco.fragment import Fragment, fsdp_modules, reshard
from twophase.diloco.sweep import goes_on_device

Probe = Callable[[nn.Module, int, int], float]
"""From a module, the number of a replica in this process and a round's number to the loss on a probe batch."""


@dataclass
class Setting:
    """The values that all syncs of an engine share.

    Args:
        modules: the replicas that train in this process.
        fragments: their parameters in parts, each with its views of the anchor.
        anchor: the whole anchor, flat.
        communicator: the processes.
        mixing: share of a replica's own parameters that stays when the anchor comes back.
        probe: the loss of a candidate anchor; None where no policy needs it.
        constants: what all processes must have been started with; see `build.constants`.
    """

    modules: list[nn.Module]
    fragments: list[Fragment]
    anchor: Tensor
    communicator: Communicator
    mixing: float
    probe: Probe | None
    constants: Mapping[str, Any]

    def __post_init__(self) -> None:
        communicator = self.communicator
        self.alone = communicator.size == 1 and not communicator.elastic
        """Whether all replicas live in this process for good, so that there is nothing to compare."""
        # Elastic: the vote on the whole sum comes before any change of the anchor. Sharded: the norms of all shards are
        # added up before the outer step.
        self.may_part = not (self.alone or communicator.elastic or communicator.sharded)
        """Whether a sum may be used part by part, each before the next has come."""
        self._fsdp = [module for replica in self.modules for module in fsdp_modules(replica)]
        self.are_sharded = bool(self._fsdp)

    def describe(self) -> dict[str, Any]:
        """Return what all processes must have alike now: the constants, the outer settings, and the kernels."""
        groups_by_name = {f"fragment {f.name}": f.outer.param_groups for f in self.fragments}
        settings = {
            name: [{key: str(value) for key, value in group.items() if key != "params"} for group in groups]
            for name, groups in groups_by_name.items()
        }
        # With kernels the last bits are others.
        kernels = {f.name: goes_on_device(f) for f in self.fragments if not f.flat.is_cpu}
        return {**self.constants, "outer settings": settings, "kernels of the outer round": kernels}

    def look_up(self, fragments: Sequence[Fragment]) -> None:
        """Find the parameters of all replicas, which FSDP2 replaces in a forward pass: the engine works on shards."""
        reshard(self._fsdp)
        for fragment in fragments:
            fragment.look_up()

    @torch.no_grad()
    def restore(self, fragments: Sequence[Fragment], mixing: float = 0.0) -> None:
        """Set the fragments of all replicas: theta_r <- mixing theta_r + (1 - mixing) a."""
        self.look_up(fragments)
        for fragment in fragments:
            fragment.restore(mixing)

    @contextmanager
    def lend(self, number: int) -> Iterator[nn.Module]:
        """Yield a replica; its parameters may be written, and are set back afterwards."""
        self.look_up(self.fragments)
        before = [[theta.detach().clone() for theta in fragment.params[number]] for fragment in self.fragments]
        try:
            yield self.modules[number]
        finally:
            self.write(number, before)

    @torch.no_grad()
    def write(self, number: int, values: Sequence[Sequence[Tensor]]) -> None:
        """Set a replica's parameters, given fragment by fragment."""
        self.look_up(self.fragments)
        for fragment, tensors in zip(self.fragments, values, strict=True):
            torch._foreach_copy_(fragment.params[number], list(tensors))
