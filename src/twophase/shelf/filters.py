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


@register("heloco")
@dataclass(frozen=True)
class HeLoCo(Filter):
    """A correction of each parameter's g where it does not go along with the first moment.

    With the cosine c between them, and the confidence k = |g| / (|g| + kappa |m| + eps), m in EMA form:

        c >= keep        g as it is, as is a g or m shorter than eps
        c < 0            g - b c |g| m/|m|,  b = min(-c k shrink, cap):  less of what opposes m
        0 <= c < keep    |g| u/|u|,  u = (1 - t) g/|g| + t m/|m|,  t = min((1 - c) k rotate, 1):  towards m

    Args:
        keep: c_ok, the cosine from which g stays, in [-1, 1]; -1 keeps every g.
        shrink: k_s.
        cap: beta_max, the largest b.
        rotate: k_d.
        kappa: weight of |m| in the confidence.
        eps: a length that counts as none, above 0.
    """

    equation = "per tensor: g (c >= keep),  g - b c |g| m/|m| (c < 0),  else rotated towards m;  c = cos(g, m)"
    source = "arXiv 2606.00271, equations 7 to 15"
    users = "asynchronous DiLoCo; yeto"
    first_moment = True
    test = _TEST

    keep: float = 0.2
    shrink: float = 0.5
    cap: float = 0.5
    rotate: float = 1.0
    kappa: float = 3.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        self.check("keep", -1.0, 1.0, "0.2")
        self.check("cap", 0.0, 1.0, "0.5")
        for name in ("shrink", "rotate", "kappa"):
            self.check(name, 0.0, 1e6, "1")
        self.check("eps", 0.0, math.inf, "1e-8")


@register("cgad")
@dataclass(frozen=True)
class CGAD(Filter):
    """The age decay of cosine-gated Adam-decay: the older g, the less of it, and nothing from `cutoff` on.

    With method `adamw` it is the paper's; without a gate (`cutoff=0`) its Adam-decay. The age is that of a delayed
    reduction, so without a delay it is 0 and g stays.

    Args:
        alpha: decay a round of age, >= 0.
        cutoff: age in rounds at which the gate (1 + cos(pi age / cutoff)) / 2 has closed; 0 means no gate.
    """

    equation = "gate(age) exp(-alpha age) g,  gate = (1 + cos(pi min(1, age / cutoff))) / 2"
    source = "arXiv 2605.09126"
    linear = True
    test = _TEST

    alpha: float = 0.1
    cutoff: float = 10.0

    def __post_init__(self) -> None:
        self.check("alpha", 0.0, 1e6, "0.1")
        self.check("cutoff", 0.0, 1e6, "10")

    def factor(self, age: float) -> float:
        """Return gate and decay of an age."""
        gate = (1 + math.cos(math.pi * min(1.0, age / self.cutoff))) / 2 if self.cutoff else 1.0
        return gate * math.exp(-self.alpha * age)


@register("orthogonal")
@dataclass(frozen=True)
class Orthogonal(Filter):
    """Every matrix of g with its singular values made alike, and its Frobenius norm as before; vectors stay.

    Muon orthogonalizes the momentum and sets the step's size by the shape; Iso-C gives all singular values their mean,
    which keeps their sum and shortens g. Here they become their root mean square, so the learning rate keeps its
    meaning, and norm and cosine in the report can be compared with those of other filters. It is made by Newton-Schulz
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
