"""References for the shelf's methods: optimizers of other packages, and slow twins from the papers' equations.

A slow twin is a function of x, g and a memory to the new x, on NumPy's float64. Pseudo-gradients
are g = anchor - mean of the replicas, so that a paper's `Delta` of the other sign is -g.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outers import SHAPES

MATRICES = [(3, 5), (5, 3), (4, 4), (33, 17)]
Memory = dict[str, Any]
Equation = Callable[[Any, Any, Memory], Any]


class Twin:
    """Step each parameter by a paper's equation."""

    def __init__(self, params: Sequence[Tensor], equation: Equation) -> None:
        self.params, self.equation = list(params), equation
        self.state: dict[Tensor, Memory] = {p: {} for p in params}

    @torch.no_grad()
    def step(self) -> None:
        """Take a round."""
        for p in self.params:
            assert p.grad is not None
            new = self.equation(p.detach().numpy(), p.grad.numpy(), self.state[p])
            p.copy_(torch.from_numpy(np.asarray(new)))


class Together:
    """Several optimizers as one."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers
        self.state = ChainMap(*(optimizer.state for optimizer in optimizers))

    def step(self) -> None:
        """Take a round."""
        for optimizer in self.optimizers:
            optimizer.step()


def ema_nesterov(lr: float, b: float) -> Equation:
    """The restart paper, section 2: `x <- x - lr ((1 + b) m - b m_old)`."""

    def equation(x: Any, g: Any, s: Memory) -> Any:
        old = s.get("m", 0.0)
        s["m"] = b * old + (1 - b) * g
        return x - lr * ((1 + b) * s["m"] - b * old)

    return equation


def slowmo(alpha: float, beta: float, gamma: float) -> Equation:
    """SlowMo, arXiv 1910.00643, Algorithm 1: the slow momentum in units of the inner learning rate gamma."""

    def equation(x: Any, g: Any, s: Memory) -> Any:
        s["u"] = beta * s.get("u", 0.0) + g / gamma
        return x - alpha * gamma * s["u"]

    return equation


def adamw(lr: float, b: float, b2: float, eps: float, decay: float) -> Equation:
    """AdamW, arXiv 1711.05101, with the bias corrections as the weights W and W2 that the moments hold."""

    def equation(x: Any, g: Any, s: Memory) -> Any:
        s["m"], s["W"] = b * s.get("m", 0.0) + (1 - b) * g, b * s.get("W", 0.0) + 1 - b
        s["v"], s["W2"] = b2 * s.get("v", 0.0) + (1 - b2) * g**2, b2 * s.get("W2", 0.0) + 1 - b2
        return x - lr * (s["m"] / s["W"] / (np.sqrt(s["v"] / s["W2"]) + eps) + decay * x)

    return equation


def fedopt(kind: str, lr: float, b: float, b2: float, tau: float) -> Equation:
    """FedOpt, arXiv 2003.00295, Algorithm 2."""

    def equation(x: Any, g: Any, s: Memory) -> Any:
        s["m"], v = b * s.get("m", 0.0) + (1 - b) * g, s.get("v", tau**2)
        if kind == "adagrad":
            s["v"] = v + g**2
        elif kind == "yogi":
            s["v"] = v - (1 - b2) * g**2 * np.sign(v - g**2)
        else:
            s["v"] = b2 * v + (1 - b2) * g**2
        return x - lr * s["m"] / (np.sqrt(s["v"]) + tau)

    return equation


def delayed_nesterov(lr: float, b: float, n: int, c: float) -> Equation:
    """Delayed Nesterov, arXiv 2401.09135, Algorithm 3: c activates the momentum between its refreshes."""

    def equation(x: Any, g: Any, s: Memory) -> Any:
        s["t"], s["delta"] = s.get("t", 0) + 1, s.get("delta", 0.0) + g
        if s["t"] % n:
            return x - lr * (c * b * s.setdefault("m", np.zeros_like(g)) + g / n)
        s["m"] = b * s.get("m", 0.0) + s.pop("delta") / n
        return x - lr * ((1 - c * n + c) * b * s["m"] + g / n)

    return equation


def gpa(lr: float, mu_x: float, mu_y: float) -> Equation:
    """GPA, arXiv 2512.17131, by a recursion of y and z alone: with x eliminated from the three equations."""

    def equation(y: Any, g: Any, s: Memory) -> Any:
        z = s.get("z", y.copy())
        s["z"] = z - lr * g
        return mu_x * y + (1 - mu_x) * z - lr * (1 - mu_x * mu_y) * g

    return equation


@dataclass(frozen=True)
class Reference:
    """An independent optimizer.

    Args:
        build: makes it over some parameters.
        key: of its first moment in its state; None where it has none.
        shapes: of parameters that it takes.
        unit: what a pseudo-gradient is in units of that first moment.
    """

    build: Callable[[list[Any]], Any]
    key: str | None = None
    shapes: Sequence[tuple[int, ...]] = tuple(SHAPES)
    unit: float = 1.0


def _sgd(lr: float, momentum: float = 0.0, *, nesterov: bool = False) -> Reference:
    key = "momentum_buffer" if momentum else None
    return Reference(lambda p: torch.optim.SGD(p, lr, momentum, nesterov=nesterov), key)


def _twin(equation: Equation, key: str | None = "m", unit: float = 1.0) -> Reference:
    return Reference(lambda p: Twin(p, equation), key, unit=unit)


def _collected(name: str, key: str, **options: Any) -> Reference:
    """An optimizer of the package pytorch-optimizer."""

    def build(p: list[Any]) -> Any:
        package = pytest.importorskip("pytorch_optimizer", reason="the package pytorch-optimizer is not installed")
        return getattr(package, name)(p, **options)

    return Reference(build, key)


def _muon(**options: Any) -> Reference:
    return Reference(
        lambda p: torch.optim.Muon(p, weight_decay=0.0, **options), "momentum_buffer", shapes=tuple(MATRICES)
    )


def _muon_and_rest(p: list[Any]) -> Any:
    matrices, others = [x for x in p if x.ndim == 2], [x for x in p if x.ndim < 2]
    muon = torch.optim.Muon(matrices, lr=0.1, momentum=0.9, weight_decay=0.0)
    return Together(muon, torch.optim.SGD(others, 0.4, 0.9, nesterov=True))


def _schedule_free(p: list[Any]) -> Any:
    package = pytest.importorskip("schedulefree", reason="the extra schedulefree is not installed")
    return package.SGDScheduleFreeReference(p, lr=0.4, momentum=0.8)


def _torch(cls: Any, key: str | None = None, **options: Any) -> Reference:
    return Reference(lambda p: cls(p, **options), key)


_ADAM = "lr=0.05:momentum=0.8:beta2=0.95"
REFERENCES: dict[str, Reference] = {
    "sgd:lr=0.3": _sgd(0.3, 0.9, nesterov=True),
    "sgd:lr=0.3:momentum=0.8:nesterov=false": _sgd(0.3, 0.8),
    "sgd:lr=3:form=ema": _twin(ema_nesterov(3.0, 0.9)),
    "heavy-ball": _sgd(0.7, 0.9),
    "nesterov:lr=0.4:momentum=0.5": _sgd(0.4, 0.5, nesterov=True),
    "memoryless:lr=1.2": _sgd(1.2),
    "averaging": _sgd(1.0),
    "lookahead": _sgd(0.5),
    "snoo": _sgd(0.7, 0.9, nesterov=True),
    "muloco-1": _sgd(0.7, 0.9, nesterov=True),
    "slowmo:lr=0.9": _twin(slowmo(0.9, 0.7, 0.003), "u", 1 / 0.003),
    f"adamw:{_ADAM}": Reference(lambda p: torch.optim.Adam(p, 0.05, (0.8, 0.95))),
    f"adamw:{_ADAM}:eps=0.01:weight_decay=0.3": Reference(
        lambda p: torch.optim.AdamW(p, 0.05, (0.8, 0.95), eps=0.01, weight_decay=0.3)
    ),
    f"adamw:{_ADAM}:weight_decay=0.2": _twin(adamw(0.05, 0.8, 0.95, 1e-8, 0.2)),
    f"adamw:{_ADAM}:second=restart": _twin(adamw(0.05, 0.8, 0.95, 1e-8, 0.0)),
    f"fedadam:{_ADAM}:tau=0.02": _twin(fedopt("adam", 0.05, 0.8, 0.95, 0.02)),
    f"fedyogi:{_ADAM}:tau=0.02": _twin(fedopt("yogi", 0.05, 0.8, 0.95, 0.02)),
    "fedyogi:lr=0.05:second=restart": _twin(fedopt("yogi", 0.05, 0.9, 0.99, 1e-3)),
    "fedadagrad:lr=0.1:momentum=0.7": _twin(fedopt("adagrad", 0.1, 0.7, 0.0, 1e-3)),
    "fedadagrad:lr=0.1:tau=0.01": Reference(
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.01**2, eps=0.01)
    ),
    "sign:lr=0.02": _collected("SignSGD", "momentum_buffer", lr=0.02, momentum=0.9),
    "lion:lr=0.02:beta1=0.8": _collected("Lion", "exp_avg", lr=0.02, betas=(0.8, 0.99)),
    "muon": _muon(lr=0.1, momentum=0.9),
    "muon:momentum=0.8:nesterov=false:steps=3": _muon(lr=0.1, momentum=0.8, nesterov=False, ns_steps=3),
    "muon:lr=0.05:scale=rms": _muon(lr=0.05, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
    "muon:rest=0.4": Reference(_muon_and_rest, shapes=[(7,), (), (3, 5), (33, 17)]),
    "delayed-nesterov:every=1": _sgd(0.7, 0.9, nesterov=True),
    "delayed-nesterov": _twin(delayed_nesterov(0.7, 0.9, 4, 0.0)),
    "delayed-nesterov:every=3:share=0.2": _twin(delayed_nesterov(0.7, 0.9, 3, 0.2)),
    "gpa:lr=0.8:mu_x=0.7:mu_y=0.6": _twin(gpa(0.8, 0.7, 0.6), None),
    "gpa:mu_x=0.6:mu_y=0.6": Reference(lambda p: torch.optim.SGD(p, 1 - 0.6, 0.6, nesterov=True)),
    "schedule-free:lr=0.4:beta=0.8": Reference(_schedule_free),
    "torch:optimizer=Adagrad:options=lr=0.1": _torch(torch.optim.Adagrad, lr=0.1),
    "torch:optimizer=Adam:options=lr=0.1,betas=0.8/0.95,amsgrad=True": _torch(
        torch.optim.Adam, "exp_avg", lr=0.1, betas=(0.8, 0.95), amsgrad=True
    ),
    "torch:optimizer=NAdam:options=lr=0.1": _torch(torch.optim.NAdam, "exp_avg", lr=0.1),
    "torch:optimizer=RMSprop:options=lr=0.1,momentum=0.5": _torch(
        torch.optim.RMSprop, "momentum_buffer", lr=0.1, momentum=0.5
    ),
    "torch:optimizer=SGD:options=lr=0.3,momentum=0.9,dampening=0.5": _torch(
        torch.optim.SGD, "momentum_buffer", lr=0.3, momentum=0.9, dampening=0.5
    ),
    "torch:optimizer=Rprop:options=lr=0.1": _torch(torch.optim.Rprop, lr=0.1),
}
"""By a method's text form."""
