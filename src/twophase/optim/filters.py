"""The arithmetic of the shelf's filters: from a group's pseudo-gradients and first moments to what the method sees.

`@filter_of(Clip)` registers the function of a filter. It returns new tensors, or those that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from twophase.shelf.base import Filter
from twophase.shelf.filters import Clip, NoFilter

Total = Callable[[Sequence[float]], list[float]]
"""Sums over the shards of a parameter, of numbers that each process has of its own shard."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a filter may know besides its tensors.

    Args:
        age: rounds that the pseudo-gradient is old when it is applied.
        total: sums of numbers over the shards.
    """

    age: float = 0.0
    total: Total = field(default=list)


Function = Callable[[Any, Sequence[Tensor], Sequence[Tensor | None], Context], list[Tensor]]
_FUNCTIONS: dict[type[Filter], Function] = {}


def filter_of(kind: type[Filter]) -> Callable[[Function], Function]:
    """Register the function of a filter: (filter, pseudo-gradients, first moments, context) to pseudo-gradients."""

    def add(function: Function) -> Function:
        _FUNCTIONS[kind] = function
        return function

    return add


def filtered(
    value: Filter, gradients: Sequence[Tensor], buffers: Sequence[Tensor | None], context: Context
) -> list[Tensor]:
    """Return a group's pseudo-gradients as the method sees them; those given are only read."""
    if isinstance(value, NoFilter):
        return list(gradients)
    if value.linear:
        factor = value.factor(context.age)
        return list(gradients) if factor == 1 else [g * factor for g in gradients]
    return _FUNCTIONS[type(value)](value, gradients, buffers, context)


def square(tensor: Tensor) -> float:
    """Return the squared norm, accumulated in float64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


@filter_of(Clip)
def clip(value: Clip, gradients: Sequence[Tensor], buffers: Sequence[Tensor | None], context: Context) -> list[Tensor]:
    """Scale all of them by `min(1, norm / |g|)` with the norm over all."""
    del buffers
    (whole,) = context.total([sum(map(square, gradients))])
    factor = min(1.0, value.norm / whole**0.5) if whole > 0 else 1.0
    return list(gradients) if factor == 1 else [g * factor for g in gradients]
