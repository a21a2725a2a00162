"""Filters of pseudo-gradients. `twophase.optim.filters` holds their arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twophase.policies.checks import check_count
from twophase.shelf.base import Filter, register

_TEST = "tests/optim/test_filters.py"


@register("none")
@dataclass(frozen=True)
class NoFilter(Filter):
    """The pseudo-gradient as it is."""

    equation = "g"
    linear = True
    test = _TEST


@register("clip")
@dataclass(frozen=True)
class Clip(Filter):
    """A bound on the norm of g over a param group (of an engine: a fragment)."""

    equation = "g min(1, norm / |g|)"
    source = "torch.nn.utils.clip_grad_norm_"
    test = _TEST

    norm: float = 1.0

    def __post_init__(self) -> None:
        self.check("norm", 0.0, math.inf, "1")


@register("orthogonal")
@dataclass(frozen=True)
class Orthogonal(Filter):
    """Every matrix of g with its singular values made alike, and its Frobenius norm as before; vectors stay.

    Muon orthogonalizes the momentum and sets the step's size by the shape. Iso-C gives all singular values their mean,
    which keeps their sum and shortens g. Here they become their root mean square, so the learning rate keeps its
    meaning. Norm and cosine in the report then compare with those of other filters. It is made by Newton-Schulz
    iterations in bfloat16 (`twophase.optim.methods.orthogonalized`), which bring them within about 30 % of it.

    Args:
        steps: iterations, 1 to 20.
    """

    equation = "per matrix g = U S V^T: |g| NS(g) / |NS(g)|,  about |g| U V^T / sqrt(rank)"
    source = "Iso-C, arXiv 2502.04959; Muon, github.com/KellerJordan/Muon"
    users = "IsoLoCo, arXiv 2607.03011"
    matrices = True
    test = _TEST

    steps: int = 5

    def __post_init__(self) -> None:
        if check_count("filter orthogonal", "steps", self.steps) > 20:
            raise ValueError(f"filter orthogonal: steps is {self.steps}; give at most 20, for example 5")
