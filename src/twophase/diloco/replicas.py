"""The replicas of one process: modules that are set to the anchor, lent out, and set back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from twophase.diloco.flat import Layout
from twophase.diloco.fragment import Fragment, fsdp_modules, reshard


class Replicas:
    """The modules that train in this process, and the anchor and fragments that they share.

    Args:
        modules: the replicas.
        fragments: their parameters in parts, each with its views of the anchor.
        anchor: the whole anchor, flat.
        layout: places of the parameters in it.
    """

    def __init__(self, modules: list[nn.Module], fragments: list[Fragment], anchor: Tensor, layout: Layout) -> None:
        self.modules, self.fragments, self.anchor, self.layout = modules, fragments, anchor, layout
        self._fsdp = [fsdp_modules(module) for module in modules]
        self.are_sharded = any(self._fsdp)

    def __len__(self) -> int:
        """Number of replicas."""
        return len(self.modules)

    def reshard(self) -> None:
        """Have FSDP2 give up whole parameters: the engine reads and writes shards."""
        if self.are_sharded:
            for modules in self._fsdp:
                reshard(modules)

    @torch.no_grad()
    def restore(self, fragments: Sequence[Fragment], mixing: float = 0.0) -> None:
        """Set the fragments of all replicas: theta_r <- mixing theta_r + (1 - mixing) a."""
        self.reshard()
        for fragment in fragments:
            fragment.restore(mixing)

    @contextmanager
    def lend(self, number: int) -> Iterator[nn.Module]:
        """Yield a replica; its parameters may be written, and are set back afterwards."""
        reshard(self._fsdp[number])
        before = [[slot.tensor().clone() for slot in f.slots[number]] for f in self.fragments]
        try:
            yield self.modules[number]
        finally:
            self.write(number, before)

    @torch.no_grad()
    def write(self, number: int, values: Sequence[Sequence[Tensor]]) -> None:
        """Set a replica's parameters, given fragment by fragment."""
        reshard(self._fsdp[number])
        for fragment, of_fragment in zip(self.fragments, values, strict=True):
            torch._foreach_copy_([slot.tensor() for slot in fragment.slots[number]], list(of_fragment))
