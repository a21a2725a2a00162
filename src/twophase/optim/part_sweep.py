"""Take an outer round on flat vectors, part by part: the bits of `functional.outer_step_`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twophase.optim.functional import Scratch, Update, fused_is_exact, piece_length, round_
from twophase.optim.products import Dots, dots_of_batch


@dataclass(frozen=True, slots=True)
class PartSweep:
    """Sweep a group's tensors as flat vectors once, part by part, while each part is in the cache.

    Args:
        x: parameters, (n,) float32 or float64.
        g: pseudo-gradients, (n,).
        m: buffers, (n,); None at momentum 0.
        buffers: `m` in views of the parameters' shapes, in their order.
        parts: yields start and stop of each part, in order, as soon as its pseudo-gradient is there.
        after: called with start and stop of each part when its x and m are those of the next round.
        measure: whether the inner products are taken on the way, for a policy that does not decide by them.
        dense: whether the tensors lie without room between them.
    """

    x: Tensor
    g: Tensor
    m: Tensor | None
    buffers: Sequence[Tensor]
    parts: Callable[[], Iterator[tuple[int, int]]]
    after: Callable[[int, int], None]
    measure: bool
    dense: bool

    def dots(self, *, fresh: bool, angle: bool) -> Dots | None:
        """Return the inner products, where one operation on the vectors has the bits of `dots` of the tensors."""
        if not self.dense or len(self.g) > piece_length(self.g):
            return None
        if fresh or self.m is None:
            return float(torch.dot(self.g, self.g)), 0.0, 0.0
        gg, mm, *gm = map(float, dots_of_batch(self.g, self.m, angle))
        return gg, mm, gm[0] if gm else math.nan

    def run(self, update: Update) -> Dots | None:
        """Take the round; return `<g, g>`, `<m, m>` and `<g, m>` before all of it, where the sweep measures."""
        remembers = self.m is not None and not update.fresh
        update = update.simplified(unrounded=True)
        fused = self.x.is_cpu and fused_is_exact(self.x.dtype, update)
        scratch: Scratch = {}
        products: list[Tensor] = []
        for start, stop in self.parts():
            x, g = self.x[start:stop], self.g[start:stop]
            m = None if self.m is None else self.m[start:stop]
            if self.measure:
                products += dots_of_batch(g, m, angle=True) if m is not None and remembers else [torch.dot(g, g)]
            round_([x], [g], [] if m is None else [m], update, scratch, fused=fused)
            self.after(start, stop)
        if not self.measure:
            return None
        totals = torch.stack(products).double().view(-1, 3 if remembers else 1).sum(dim=0).tolist()
        gg, mm, gm = totals if remembers else (totals[0], 0.0, 0.0)
        return gg, mm, gm
