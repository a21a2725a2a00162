"""Filters of pseudo-gradients. `twophase.optim.filters` holds their arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twophase.shelf.base import Filter, register

_TEST = "tests/optim/test_filters.py"


@register("none")
@dataclass(frozen=True)
class NoFilter(Filter):
    """The pseudo-gradient as it is."""

    equation = "g"
    linear = True
    test = _TEST

    def factor(self, age: float) -> float:
        """Return 1."""
        del age
        return 1.0


@register("clip")
@dataclass(frozen=True)
class Clip(Filter):
    """A bound on the norm of g over a param group (of an engine: a fragment)."""

    equation = "g min(1, norm / |g|)"
    source = "torch.nn.utils.clip_grad_norm_"
    users = "EDiT; streaming DiLoCo trials"
    test = _TEST

    norm: float = 1.0

    def __post_init__(self) -> None:
        self.check("norm", 0.0, math.inf, "1")
