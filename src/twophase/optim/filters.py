"""Apply the shelf's filters: from a group's pseudo-gradients to those that the method sees.

`@filter_of(Clip)` registers the function of a filter. It returns new tensors, or its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from twophase.optim.functional import is_plain
from twophase.optim.methods import arithmetic_of, orthogonalized
from twophase.optim.products import PIECE_DOTS
from twophase.shelf.base import Filter
from twophase.shelf.filters import Clip, Orthogonal

Total = Callable[[Sequence[float]], list[float]]
"""Sums over the shards of a parameter; each process gives the numbers of its shard."""


@dataclass(frozen=True, slots=True)
class Context:
    """Hold what a filter may read besides its tensors.

    Args:
        total: sums of numbers over the shards.
        sharded: True if this process holds a shard of each parameter.
    """

    total: Total = field(default=list)
    sharded: bool = False


Function = Callable[[Any, Sequence[Tensor], Context], list[Tensor]]
_FUNCTIONS: dict[type[Filter], Function] = {}


def filter_of(kind: type[Filter]) -> Callable[[Function], Function]:
    """Register the function of a filter: (filter, pseudo-gradients, context) to pseudo-gradients."""

    def add(function: Function) -> Function:
        _FUNCTIONS[kind] = function
        return function

    return add


def filtered(value: Filter, gradients: Sequence[Tensor], context: Context) -> list[Tensor]:
    """Return a group's pseudo-gradients as the method sees them; the arguments are only read."""
    if value.linear:
        return list(gradients)
    return function_of(value)(value, gradients, context)


def function_of(value: Filter) -> Function:
    """Return the function of a filter; raise a ValueError where none is registered."""
    return arithmetic_of(value, _FUNCTIONS, "twophase.optim.filters.filter_of")


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of two like tensors as a float64, of DTensors over all of their shards."""
    if is_plain(a) and is_plain(b):
        a, b = a.reshape(-1), b.reshape(-1)
        if len(a) <= PIECE_DOTS:  # in few calls, which here cost more than elements
            return torch.dot(a, b).double()
        pieces = zip(a.split(PIECE_DOTS), b.split(PIECE_DOTS), strict=True)
        return torch.stack([torch.dot(*pair) for pair in pieces]).sum(dtype=torch.float64)
    total = (a * b).sum(dtype=torch.float64)
    return total.full_tensor() if hasattr(total, "full_tensor") else total  # type: ignore[operator]


def square(tensor: Tensor) -> float:
    """Return the squared norm, accumulated in float64, of a DTensor over all of its shards."""
    norm: Any = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) ** 2


@filter_of(Clip)
def clip(value: Clip, gradients: Sequence[Tensor], context: Context) -> list[Tensor]:
    """Scale all of them by `min(1, norm / |g|)` with the norm over all."""
    (whole,) = context.total([sum(map(square, gradients))])
    factor = min(1.0, value.norm / whole**0.5) if whole > 0 else 1.0
    return list(gradients) if factor == 1 else [g * factor for g in gradients]


@filter_of(Orthogonal)
def orthogonal(value: Orthogonal, gradients: Sequence[Tensor], context: Context) -> list[Tensor]:
    """Orthogonalize each matrix and keep its norm; a tensor of more axes is flattened behind its first one."""
    del context
    return [g if g.ndim < 2 or not g.numel() else _orthogonal(g, value.steps) for g in gradients]


def _orthogonal(g: Tensor, steps: int) -> Tensor:
    flat = orthogonalized(g.reshape(len(g), -1), steps).to(g.dtype).view(g.shape)
    return flat * (torch.linalg.vector_norm(g) / torch.linalg.vector_norm(flat).clamp(min=torch.finfo(g.dtype).tiny))
