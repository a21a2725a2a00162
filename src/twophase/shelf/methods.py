"""Outer methods: how an update is made of a pseudo-gradient. `twophase.optim.methods` holds their arithmetic.

In the equations g is the filtered pseudo-gradient, m the first moment, b its `momentum`, x the anchor.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from twophase.policies.checks import check_count
from twophase.rule import Form, OuterRule
from twophase.shelf.base import Method, register

_GOLDEN = "tests/optim/test_shelf.py"
FIRST, SECOND, AVERAGE = "momentum_buffer", "second_moment", "average"
"""Keys of a parameter's buffers in the optimizer's state."""


# ------------------------------------------------------------------------------------------------- momentum SGD


class _Plain(Method):
    """Momentum SGD: a rule by a name, whose fields are the rule's."""

    linear = True
    plain = True
    test = f"{_GOLDEN}::test_presets"


@register("sgd")
@dataclass(frozen=True)
class MomentumSGD(_Plain):
    """Momentum SGD: an `OuterRule` as a method, for the sake of the other slots."""

    equation = "m <- b m + g;  x <- x - lr m  (nesterov: x - lr (g + b m))"
    source = "DiLoCo, arXiv 2311.08105"
    users = "torchft, torchtitan, OpenDiLoCo, MaxText"
    test = f"{_GOLDEN}::test_sgd"

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    form: Form = "sum"  # type: ignore[misc]


@register("heavy-ball")
@dataclass(frozen=True)
class HeavyBall(_Plain):
    """Heavy ball in sum form."""

    equation = "m <- b m + g;  x <- x - lr m"
    source = "Polyak 1964; torch.optim.SGD"
    users = "torchft, torchtitan"

    lr: float = 0.7
    momentum: float = 0.9


@register("nesterov")
@dataclass(frozen=True)
class Nesterov(HeavyBall):
    """Nesterov momentum in sum form: DiLoCo's own outer optimizer."""

    equation = "m <- b m + g;  x <- x - lr (g + b m)"
    source = "DiLoCo, arXiv 2311.08105"
    users = "DiLoCo, OpenDiLoCo, MaxText, torchft, torchtitan"
    ahead = True


@register("memoryless")
@dataclass(frozen=True)
class Memoryless(_Plain):
    """Outer SGD without momentum."""

    equation = "x <- x - lr g"
    source = "arXiv 2509.10439"
    users = "yeto"
    first_moment = False
    buffers = ()

    lr: float = 1.0


@register("averaging")
@dataclass(frozen=True)
class Averaging(_Plain):
    """Local SGD: the anchor becomes the mean of the replicas."""

    equation = "x <- x - g"
    source = "local SGD, arXiv 1805.09767"
    users = "federated averaging"
    first_moment = False
    buffers = ()


@register("lookahead")
@dataclass(frozen=True)
class Lookahead(Memoryless):
    """Lookahead: one replica, and slow weights that go a part of the way; `lr` is its alpha."""

    equation = "x <- x - lr g,  one replica"
    source = "arXiv 1907.08610"
    users = ""

    lr: float = 0.5


@register("snoo")
@dataclass(frozen=True)
class SNOO(Nesterov):
    """SNOO: Nesterov momentum on the pseudo-gradients of one replica."""

    equation = "m <- b m + g;  x <- x - lr (g + b m),  one replica"
    source = "arXiv 2510.15830"
    users = ""


@register("muloco-1")
@dataclass(frozen=True)
class MuLoCo(Nesterov):
    """MuLoCo with one replica: Nesterov momentum over an inner Muon (`--inner.method muon`)."""

    equation = "m <- b m + g;  x <- x - lr (g + b m),  one replica, inner Muon"
    source = "arXiv 2505.23725"
    users = "modded-nanogpt's optimizer track"


@register("slowmo")
@dataclass(frozen=True)
class SlowMo(HeavyBall):
    """SlowMo: heavy ball in units of the inner learning rate, which cancel where that is constant; lr is its alpha.

    Where the inner learning rate changes, the buffer stays in the units of the rounds that filled it.
    """

    equation = "u <- b u + g / gamma;  x <- x - lr gamma u"
    source = "arXiv 1910.00643"
    users = "fairscale"

    lr: float = 1.0
    momentum: float = 0.7


# --------------------------------------------------------------------------------------- with a second moment


class _Moments(Method):
    """Methods whose step is divided by the root of a second moment of g."""

    form = "ema"
    buffers = (FIRST, SECOND)

    def _check(self) -> None:
        super().__post_init__()
        self.choose("second", "keep", "restart")

    @property
    def restarts(self) -> bool:
        """Whether a restart changes anything."""
        return self.rule().momentum != 0 or getattr(self, "second", "") == "restart"


@register("adamw")
@dataclass(frozen=True)
class AdamW(_Moments):
    """AdamW on pseudo-gradients.

    A restart resets the first moment's bias correction, too. `W`, the weight of m, restarts with m, so the next step is
    as long as the first one. Of a soft restart `W <- |retain| W + |inject|`. W counts the rounds of the param group.
    Steps of a parameter with a later first pseudo-gradient are not corrected. With the defaults they are up to twice as
    long for some tens of rounds.

    Args:
        lr, momentum: learning rate and beta_1.
        beta2: coefficient of the second moment, in [0, 1).
        eps: added to the root, > 0.
        weight_decay: decoupled, `x <- (1 - lr weight_decay) x`.
        second: `keep` the second moment at a restart, or `restart` it with the first.
    """

    equation = "m <- b m + (1-b) g;  v <- b2 v + (1-b2) g^2;  x <- x - lr (m / W) / (sqrt(v / (1-b2^t)) + eps)"
    source = "arXiv 1711.05101; FedOpt, arXiv 2003.00295"
    users = "CGAD, arXiv 2605.09126"
    test = f"{_GOLDEN}::test_adamw"

    lr: float = 0.02
    momentum: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    second: str = "keep"

    def __post_init__(self) -> None:
        self._check()
        self.check("beta2", 0.0, 1 - 1e-12, "0.99")
        self.check("eps", 0.0, float("inf"), "1e-8")
        self.check("weight_decay", 0.0, 1e3, "0.1")


class _FedOpt(_Moments):
    """Adaptive federated optimizers, without bias correction, with `v_0 = tau^2`."""

    grows = True
    source = "FedOpt, arXiv 2003.00295"
    users = "Flower"

    def __post_init__(self) -> None:
        self._check()
        if hasattr(self, "beta2"):
            self.check("beta2", 0.0, 1 - 1e-12, "0.99")
        self.check("tau", 0.0, float("inf"), "1e-3")


@register("fedadam")
@dataclass(frozen=True)
class FedAdam(_FedOpt):
    """FedAdam: Adam without bias correction; tau is the degree of adaptivity."""

    equation = "m <- b m + (1-b) g;  v <- b2 v + (1-b2) g^2;  x <- x - lr m / (sqrt(v) + tau)"
    test = f"{_GOLDEN}::test_fedopt"

    lr: float = 0.02
    momentum: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    second: str = "keep"


@register("fedyogi")
@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedYogi: a second moment that moves by a bounded amount."""

    equation = "v <- v - (1-b2) g^2 sign(v - g^2);  m, x as fedadam"


@register("fedadagrad")
@dataclass(frozen=True)
class FedAdagrad(_FedOpt):
    """FedAdagrad: a second moment that adds up."""

    equation = "v <- v + g^2;  m, x as fedadam"
    test = f"{_GOLDEN}::test_fedopt"

    lr: float = 0.05
    momentum: float = 0.0
    tau: float = 1e-3
    second: str = "keep"


# ---------------------------------------------------------------------------------------------- signs, matrices


@register("sign")
@dataclass(frozen=True)
class Sign(Method):
    """The sign of the momentum (signum)."""

    equation = "m <- b m + (1-b) g;  x <- x - lr sign(m)"
    source = "signSGD, arXiv 1802.04434"
    form = "ema"
    test = f"{_GOLDEN}::test_sign"

    lr: float = 0.01
    momentum: float = 0.9


@register("lion")
@dataclass(frozen=True)
class Lion(Sign):
    """Lion: the sign of an interpolation; `momentum` is the memory's coefficient (its beta_2)."""

    equation = "x <- x - lr sign(b1 m + (1-b1) g);  m <- b m + (1-b) g"
    source = "arXiv 2302.06675"
    users = "distributed Lion, arXiv 2404.00438"
    test = f"{_GOLDEN}::test_lion"

    momentum: float = 0.99
    beta1: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("beta1", 0.0, 1.0, "0.9")


@register("muon")
@dataclass(frozen=True)
class Muon(Method):
    """Outer Muon: the momentum of each weight matrix is orthogonalized.

    Args:
        lr: of matrices, before `scale`.
        momentum: b.
        nesterov: whether `(1-b) g + b m` is orthogonalized in place of m.
        steps: Newton-Schulz iterations, 1 to 20.
        scale: `original`: times sqrt(max(1, rows / columns)); `rms`: times 0.2 sqrt(max(rows, columns)); or `none`.
        rest: learning rate of what is no matrix (biases, norms), by the same momentum in sum form; 0 refuses such
            parameters.
    """

    equation = "m <- b m + (1-b) g;  x <- x - lr NS(m)  (nesterov: NS((1-b) g + b m))"
    source = "Muon, github.com/KellerJordan/Muon; torch.optim.Muon"
    form = "ema"
    matrices = True
    test = f"{_GOLDEN}::test_muon"

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    steps: int = 5
    scale: str = "original"
    rest: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose("scale", "original", "rms", "none")
        self.check("rest", 0.0, 1e6, "0.7")
        if check_count(f"method {self.name}", "steps", self.steps) > 20:
            raise ValueError(f"method {self.name}: steps is {self.steps}; give at most 20, for example 5")


# ------------------------------------------------------------------------------------------ delays and averages


@register("delayed-nesterov")
@dataclass(frozen=True)
class DelayedNesterov(Method):
    """Delayed Nesterov: the momentum is refreshed every n-th round by the mean pseudo-gradient since.

    Args:
        lr, momentum: of Nesterov momentum; with `every=1` it is that.
        every: n.
        share: c, in [0, 1 / n]: the share of the momentum that each round in between takes.
    """

    equation = "every n-th: m <- b m + mean g, x <- x - lr ((1-cn+c) b m + g/n);  else x <- x - lr (c b m + g/n)"
    source = "arXiv 2401.09135"
    ahead = True
    linear = True
    buffers = (FIRST, "pending")
    test = f"{_GOLDEN}::test_delayed_nesterov"

    lr: float = 0.7
    momentum: float = 0.9
    every: int = 4
    share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        every = check_count(f"method {self.name}", "every", self.every)
        self.check("share", 0.0, 1 / every, "0")


class _Averages(Method):
    """Methods that average their own iterates: the anchor is y, the point of the gradients; x is evaluated."""

    first_moment = False
    reads_out = True
    buffers = ("iterate", AVERAGE)


@register("gpa")
@dataclass(frozen=True)
class GPA(_Averages):
    """Generalized primal averaging, once a round; `inner_steps=1` over an inner optimizer is the paper's.

    Args:
        lr: factor of each step of z.
        mu_x: coefficient of the average, in [0, 1).
        mu_y: share of the average in the point of the gradients, in [0, 1].
    """

    equation = "z <- z - lr g;  a <- mu_x a + (1-mu_x) z;  x = mu_y a + (1-mu_y) z;  a is evaluated"
    source = "arXiv 2512.17131"
    linear = True
    test = f"{_GOLDEN}::test_gpa"

    lr: float = 1.0
    mu_x: float = 0.9
    mu_y: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("mu_x", 0.0, 1 - 1e-12, "0.9")
        self.check("mu_y", 0.0, 1.0, "0.9")


@register("schedule-free")
@dataclass(frozen=True)
class ScheduleFree(_Averages):
    """Schedule-free averaging, once a round: a uniform mean of all z; `beta` is its share in the gradients' point."""

    equation = "z <- z - lr g;  a <- a + (z - a) / t;  x = beta a + (1-beta) z;  a is evaluated"
    source = "arXiv 2405.15682"
    linear = True
    test = f"{_GOLDEN}::test_schedule_free"

    lr: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("beta", 0.0, 1.0, "0.9")


# ------------------------------------------------------------------------------------------ any torch optimizer


@register("torch")
@dataclass(frozen=True)
class TorchMethod(Method):
    """Any torch optimizer as outer optimizer (`twophase.from_torch`).

    Its first moment (`exp_avg` or `momentum_buffer` of its state) takes part in norms, cosine and restarts. Its other
    buffers and its step count stay at a restart.

    Args:
        optimizer: its class, `Adagrad` of torch.optim or `package.module.Class`.
        options: its arguments, `lr=0.1,betas=0.9/0.99`.
    """

    equation = "x <- x - (x - optimizer(x, g))"
    source = "torch.optim.Optimizer"
    users = "torchtitan (Optimizer), torchft"
    test = f"{_GOLDEN}::test_torch"

    optimizer: str = "Adam"
    options: str = "lr=0.05,betas=0.9/0.99"

    def rule(self) -> OuterRule:
        """Return lr and momentum as far as the options name them; the optimizer refuses what is no number.

        Its form is what a pseudo-gradient adds to the buffer: all of it in SGD without dampening.
        """
        texts = {key: value for key, _, value in (word.partition("=") for word in self.options.split(","))}
        values = {"momentum": texts.get("betas", "").split("/")[0]} | texts
        numbers = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0}
        for name in numbers:
            with suppress(KeyError, ValueError):
                numbers[name] = float(values[name])
        is_sum = self.optimizer.rpartition(".")[2] == "SGD" and numbers["dampening"] == 0
        return OuterRule(numbers["lr"], numbers["momentum"], form="sum" if is_sum else "ema")
