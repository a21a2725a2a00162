"""Take inner products of pseudo-gradients and buffers, and the angles that follow from them.

On plain tensors a piece is summed in float32 (or the tensors' own float64), and the pieces in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from twophase.optim.functional import batches, is_plain, piece_length

PIECE_DOTS = 1 << 19  # elements: of inner products over many, which are read once; a longer sum rounds more
_MANY = 1 << 20  # elements

Dots = tuple[float, float, float]
"""`<g, g>`, `<m, m>` and `<g, m>` over a group of parameters."""


@dataclass(frozen=True, slots=True)
class Angles:
    """Hold the norms of pseudo-gradient and buffer and the cosine between them (0 when either vanishes)."""

    pseudo_gradient_norm: float
    buffer_norm: float
    cosine: float

    @classmethod
    def of(cls, dots: Dots) -> Angles:
        """Return the angles of the inner products."""
        gg, mm, gm = dots
        scale = gg**0.5 * mm**0.5  # the product of the squares may over- or underflow
        cosine = gm / scale if scale != 0 else 0.0
        if abs(cosine) > 1:  # by rounding; a NaN stays a NaN, for it is a divergence that the report must show
            cosine = math.copysign(1.0, cosine)
        return cls(gg**0.5, mm**0.5, cosine)


def dots(pseudo_gradients: Sequence[Tensor], buffers: Sequence[Tensor], *, angle: bool = True) -> Dots:
    """Return `<g, g>`, `<m, m>` and `<g, m>` over all tensors together.

    An empty `buffers` counts as m = 0. Without `angle` the last one is not computed where it costs time, and is a NaN.
    """
    device, limit = pseudo_gradients[0].device, piece_length(pseudo_gradients[0])
    if device.type == "cpu" and sum(g.numel() for g in pseudo_gradients) > _MANY:
        limit = PIECE_DOTS
    pairs = list(batches(pseudo_gradients, buffers or pseudo_gradients, limit=limit))
    # On a CPU, joining small tensors is cheaper than an operation on each; elsewhere it would be two more passes.
    if not (device.type == "cpu" and all(t.device == device for t in pseudo_gradients)):
        pairs = [([a], [b]) for g, m in pairs for a, b in zip(g, m, strict=True)]
    totals = [dot.to(device) for g, m in pairs for dot in dots_of_batch(_joined(g), _joined(m), angle)]
    parts = torch.stack(totals).double()  # a batch is short, all of them are not
    gg, mm, *gm = parts.view(-1, 3 if angle else 2).sum(dim=0).tolist()  # one transfer to the host
    if not buffers:
        return gg, 0.0, 0.0
    return gg, mm, gm[0] if gm else math.nan


def _joined(tensors: list[Tensor]) -> Tensor:
    """Return the tensors of a batch as one vector, in a type wide enough to sum in."""
    if not {t.dtype for t in tensors} <= {torch.float32, torch.float64}:
        # |z|^2 is the sum of the squares of both parts, and so is torch's step on a complex tensor one on its parts.
        real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
        tensors = [t.float() if t.dtype.itemsize < 4 else t for t in real]
    return _flatten_dense_tensors(tensors) if len(tensors) > 1 else tensors[0]


def dots_of_batch(g: Tensor, m: Tensor, angle: bool) -> tuple[Tensor, ...]:
    """Return <g, g>, <m, m> and, with `angle`, <g, m> of a batch."""
    if is_plain(g):
        g, m = g.reshape(-1), m.reshape(-1).to(g.dtype)
    pairs = ((g, g), (m, m), (g, m))[: 3 if angle else 2]
    if is_plain(g):
        return tuple(torch.dot(a, b) for a, b in pairs)
    totals = [(a * b).sum(dtype=torch.float64) for a, b in pairs]
    # A DTensor's sum is partial on each rank; full_tensor() adds the parts up, the same on every rank.
    return tuple(total.full_tensor() if hasattr(total, "full_tensor") else total for total in totals)  # type: ignore[operator]
