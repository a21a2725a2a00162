"""Filters of pseudo-gradients. `twophase.optim.filters` holds their arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    users = "EDiT"
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


@register("edit")
@dataclass(frozen=True)
class EDiT(Filter):
    """The pseudo-gradient penalty of EDiT: replicas that stand out are rejected, the others weighed by norm; a clip.

    G is the norm of a replica's own g in a fragment. A replica is rejected if G is not finite or, after the warmup,
    exceeds the moving mean of all norms by `threshold` moving standard deviations. The other weights are exp(-G /
    temperature), so no replica much longer than the shortest one counts. Their mean is clipped to `clip`.

    One moving mean serves all replicas, which may come and go; EDiT keeps one a replica. Norms that are rejected do not
    enter it, except where all replicas are: then their level has changed. In such a round the anchor, its momentum and
    its round count stay, and the replicas are set back to it. Large numbers turn a part off: `threshold=1e9`,
    `temperature=1e30` (equal weights), `clip=1e30`.

    Args:
        threshold: of the z-test, in standard deviations, above 0.
        alpha: share of a round in mean and variance, in (0, 1]; in the first rounds t it is 1/t, if that is more.
        warmup: rounds before the test.
        temperature: of the weights, in the unit of G, above 0.
        clip: bound on the norm of the mean, above 0.
    """

    equation = "sum w g_r / sum w,  w = exp(-G / temperature), or 0 where (G - mean) / std > threshold;  then clip"
    source = "EDiT, arXiv 2412.07210"
    users = "EDiT, DLRover; Ling"
    replicas = True
    memory = ("norm_rounds", "norm_mean", "norm_variance")
    test = "tests/diloco/test_weighing.py"

    threshold: float = 3.0
    alpha: float = 0.02
    warmup: int = 10
    temperature: float = 1.0
    clip: float = 10.0

    def __post_init__(self) -> None:
        for name in ("threshold", "alpha", "temperature", "clip"):
            self.check(name, 0.0, math.inf, str(type(self).__dataclass_fields__[name].default))
        if self.alpha > 1:
            raise ValueError(f"filter edit: alpha is {self.alpha}; give at most 1, for example 0.02")
        check_count("filter edit", "warmup", self.warmup, 0)

    def weigh(self, norms: Sequence[float], memory: Mapping[str, float]) -> tuple[list[float], dict[str, float]]:
        """Return weights of which the largest is 1, 0 for each that is rejected, and count, mean and variance."""
        rounds, mean, variance = (memory[name] for name in self.memory)
        finite = [norm for norm in norms if math.isfinite(norm)]
        tested = rounds >= self.warmup and variance > 0
        passed = [norm for norm in finite if not (tested and norm - mean > self.threshold * variance**0.5)]
        weights = [math.exp((min(passed) - norm) / self.temperature) if norm in passed else 0.0 for norm in norms]
        entering = passed or finite
        if not entering:
            return weights, dict(memory)
        # Mean and variance of a mixture: of the old ones, and of this round's norms with their share.
        share = max(self.alpha, 1 / (rounds + 1))
        after = mean + share * (sum(entering) / len(entering) - mean)
        spread = sum((norm - after) ** 2 for norm in entering) / len(entering)
        variance = (1 - share) * (variance + (after - mean) ** 2) + share * spread
        return weights, dict(zip(self.memory, (rounds + 1, after, variance), strict=True))
