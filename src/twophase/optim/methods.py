"""Compute the shelf's methods: from a pseudo-gradient and a parameter's buffers to its update.

`@update_of(AdamW)` registers the function of a method. It is called once a round for each parameter, mixes g into the
first moment (`FIRST`), and returns the update u of `x <- x - u`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from twophase.optim.functional import buffer_dtype
from twophase.optim.outer import OuterSGD
from twophase.policies.base import Answer, Restart
from twophase.rule import OuterRule
from twophase.shelf.base import Method, Value
from twophase.shelf.methods import (
    AVERAGE,
    FIRST,
    GPA,
    SECOND,
    AdamW,
    DelayedNesterov,
    FedAdagrad,
    FedAdam,
    FedYogi,
    Lion,
    Muon,
    ScheduleFree,
    Sign,
    TorchMethod,
)

State = dict[str, Tensor]
Memory = dict[str, float]
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class Round:
    """Describe a round without its tensors.

    Args:
        number: number of the round, from 1.
        rule: learning rate and momentum of the round, after the schedule.
        answer: answer of the restart policy.
        memory: the group's plain numbers after `advance`.
    """

    number: int
    rule: OuterRule
    answer: Answer
    memory: Memory


Update = Callable[[Any, Round, Tensor, Tensor, State], Tensor]
_UPDATES: dict[type[Method], Update] = {}


def update_of(*methods: type[Method]) -> Callable[[Update], Update]:
    """Register the function of some methods: (method, round, x, g, state) to the update; a decorator."""

    def add(function: Update) -> Update:
        _UPDATES.update(dict.fromkeys(methods, function))
        return function

    return add


def arithmetic_of(value: Value, functions: Mapping[type[Any], Any], decorator: str) -> Any:
    """Return the function of a value's class or the nearest base that has one; raise a ValueError where none has."""
    for kind in type(value).__mro__:
        if kind in functions:
            return functions[kind]
    raise ValueError(
        f"{value.slot} {value.name} has no arithmetic; register it with @{decorator}({type(value).__name__})"
    )


def function_of(method: Method) -> Update:
    """Return the function of a method; raise a ValueError where none is registered."""
    return arithmetic_of(method, _UPDATES, "twophase.optim.methods.update_of")


def advance(method: Method, rule: OuterRule, memory: Memory) -> Memory:
    """Return a group's numbers once g has been mixed in: the weights that its moments hold, at first `1 - b^t`."""
    first = rule.momentum * memory.get("first", 0.0) + rule.injection
    beta2 = getattr(method, "beta2", 0.0)
    return {"first": first, "second": beta2 * memory.get("second", 0.0) + 1 - beta2}


def restarted(method: Method, restart: Restart, memory: Memory) -> Memory:
    """Return a group's numbers after the restart of its first moment, and of the second where the method says so."""
    second = 0.0 if resets_second(method) else memory.get("second", 0.0)
    # In absolute value: weights of both signs may add up to 0, and m is divided by their sum.
    return {"first": abs(restart.retain) * memory.get("first", 0.0) + abs(restart.inject), "second": second}


def resets_second(method: Method) -> bool:
    """Return whether a restart empties the second moment, too."""
    return getattr(method, "second", "keep") == "restart"


def new_buffer(method: Method, key: str, x: Tensor) -> Tensor:
    """Return a buffer of a parameter in its state before the first round."""
    if key in ("iterate", AVERAGE):
        return x.detach().to(buffer_dtype(x), copy=True)
    start = getattr(method, "tau", 0.0) ** 2 if key == SECOND else 0.0
    return torch.full_like(x, start, dtype=buffer_dtype(x), requires_grad=False)


def mix(rule: OuterRule, g: Tensor, m: Tensor) -> Tensor:
    """Mix g into the first moment: `m <- b m + w g`."""
    return m.mul_(rule.momentum).add_(g, alpha=rule.injection)


# --------------------------------------------------------------------------------------------- with a second moment


def _divided(round_: Round, m: Tensor, root: Tensor) -> Tensor:
    return torch.div(m, root).mul_(round_.rule.lr)


@update_of(AdamW)
def adamw(method: AdamW, round_: Round, x: Tensor, g: Tensor, state: State) -> Tensor:
    """Compute `lr (m / W) / (sqrt(v / W2) + eps) + lr weight_decay x`."""
    m, v = mix(round_.rule, g, state[FIRST]), state[SECOND]
    v.mul_(method.beta2).addcmul_(g, g, value=1 - method.beta2)
    root = (v / round_.memory["second"]).sqrt_().add_(method.eps)
    update = _divided(round_, m, root).div_(round_.memory["first"])
    return update.add_(x, alpha=round_.rule.lr * method.weight_decay) if method.weight_decay else update


@update_of(FedAdam, FedYogi, FedAdagrad)
def fedopt(method: FedAdam | FedAdagrad, round_: Round, x: Tensor, g: Tensor, state: State) -> Tensor:
    """Compute `lr m / (sqrt(v) + tau)`."""
    del x
    m, v, square = mix(round_.rule, g, state[FIRST]), state[SECOND], g * g
    if isinstance(method, FedYogi):
        v.sub_(square * torch.sign(v - square), alpha=1 - method.beta2)
    elif isinstance(method, FedAdam):
        v.mul_(method.beta2).add_(square, alpha=1 - method.beta2)
    else:
        v.add_(square)
    return _divided(round_, m, v.sqrt().add_(method.tau))


# ------------------------------------------------------------------------------------------------- signs, matrices


@update_of(Sign)
def sign(method: Sign, round_: Round, x: Tensor, g: Tensor, state: State) -> Tensor:
    """Take the sign of the first moment."""
    del method, x
    return torch.sign(mix(round_.rule, g, state[FIRST])).mul_(round_.rule.lr)


@update_of(Lion)
def lion(method: Lion, round_: Round, x: Tensor, g: Tensor, state: State) -> Tensor:
    """Return `lr sign(b1 m + (1 - b1) g)` with the m before g is mixed in."""
    del x
    m = state[FIRST]
    update = torch.sign(m * method.beta1 + g * (1 - method.beta1)).mul_(round_.rule.lr)
    mix(round_.rule, g, m)
    return update


@update_of(Muon)
def muon(method: Muon, round_: Round, x: Tensor, g: Tensor, state: State) -> Tensor:
    """Return `lr scale NS(m)` of a matrix, and heavy ball's or Nesterov's update with `rest` of anything else."""
    rule = round_.rule
    m = mix(rule, g, state[FIRST])
    direction = m * rule.momentum + g * rule.injection if rule.nesterov else m
    if x.ndim < 2:
        # `rest` is meant in sum form, whose buffer is 1 / (1 - b) times this one, with the b of the round.
        return direction * (method.rest / (1 - rule.momentum) * (rule.lr / method.lr if method.lr else 1.0))
    if not x.numel():
        return torch.zeros_like(direction)
    matrix = direction.flatten(1)
    rows, columns = matrix.shape
    scales = {"original": max(1.0, rows / columns) ** 0.5, "rms": 0.2 * max(rows, columns) ** 0.5, "none": 1.0}
    return orthogonalized(matrix, method.steps).to(m.dtype).mul_(rule.lr * scales[method.scale]).view(x.shape)


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """Return about U V^T of a matrix U S V^T, by Newton-Schulz iterations in bfloat16.

    Source: Jordan et al., "Muon" (2024), whose coefficients these are.
    """
    a, b, c = _NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    y = matrix.bfloat16()
    y = y.T if tall else y
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


# --------------------------------------------------------------------------------------------- delays and averages


@update_of(DelayedNesterov)
def delayed_nesterov(method: DelayedNesterov, round_: Round, x: Tensor, g: Tensor, state: State) -> Tensor:
    """Return `lr (w b m + g / n)`, with the momentum refreshed in every n-th round."""
    del x
    rule, n, m, pending = round_.rule, method.every, state[FIRST], state["pending"]
    pending.add_(g)
    share = method.share
    if round_.number % n == 0:
        mix(rule, pending / n, m)
        pending.zero_()
        share = 1 - share * n + share
    return (m * (share * rule.momentum)).add_(g, alpha=1 / n).mul_(rule.lr)


@update_of(GPA, ScheduleFree)
def averages(method: GPA | ScheduleFree, round_: Round, x: Tensor, g: Tensor, state: State) -> Tensor:
    """Return x minus the next point of the gradients, between the iterate and its average."""
    z, average = state["iterate"], state[AVERAGE]
    if round_.number == 1:  # a rehearsal has made them, perhaps before the weights were loaded
        z.copy_(x)
        average.copy_(x)
    z.sub_(g, alpha=round_.rule.lr)
    if isinstance(method, GPA):
        weight, share = 1 - method.mu_x, method.mu_y
    else:
        weight, share = 1 / round_.number, method.beta
    average.lerp_(z, weight)
    return x - torch.lerp(z, average, share)


# --------------------------------------------------------------------------------------------- any torch optimizer


def from_torch(cls: type[torch.optim.Optimizer], **options: Any) -> TorchMethod:
    """Return any torch optimizer as a method, for example `from_torch(torch.optim.Adagrad, lr=0.1)`.

    Args:
        cls: the optimizer; its state must be tensors and numbers by parameter.
        options: its arguments: numbers, booleans, words and pairs of numbers.

    Raises:
        ValueError: an argument that has no text form, or that the optimizer refuses.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ValueError(f"from_torch: {cls!r:.60} is no class of optimizers; give one, such as torch.optim.Adagrad")
    name = cls.__name__ if getattr(torch.optim, cls.__name__, None) is cls else f"{cls.__module__}.{cls.__qualname__}"
    method = TorchMethod(name, ",".join(f"{key}={_text(key, value)}" for key, value in options.items()))
    torch_optimizer(method, [torch.zeros(1, 1, requires_grad=True)])  # torch's Muon takes matrices alone
    return method


def _text(key: str, value: Any) -> str:
    text = "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if not isinstance(value, bool | int | float | str | tuple) or set(text) & set(",:="):
        raise ValueError(f"from_torch: {key} is {value!r}, which has no text form; give a number, a word or a tuple")
    return text


_signature = lru_cache(maxsize=64)(inspect.signature)  # takes as long as a small optimizer's step


def torch_optimizer(method: TorchMethod, params: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of a method over some parameters; raise a ValueError where it cannot be built."""
    module, _, name = method.optimizer.rpartition(".")
    try:
        cls = getattr(import_module(module or "torch.optim"), name)
        options = {key: _value(word) for key, _, word in (w.partition("=") for w in method.options.split(",") if w)}
        if "foreach" in _signature(cls).parameters:
            options.setdefault("foreach", False)
        optimizer: torch.optim.Optimizer = cls(params, **options)
    except Exception as error:
        raise ValueError(
            f"method torch: {method.optimizer}({method.options}) cannot be built ({type(error).__name__}: {error}); "
            "give a torch.optim class, or package.module.Class, with its arguments as options=lr=0.1,betas=0.9/0.99"
        ) from error
    if isinstance(optimizer, OuterSGD):  # whose rounds and restarts are counted in its param groups
        raise ValueError(
            f"method torch: {method.optimizer} is rebuilt in each round, and would never restart. Give DiLoCo a "
            "function, lambda params: OuterSGD(params, ...), or an OuterRule with restart="
        )
    return optimizer


def _value(word: str) -> Any:
    if "/" in word:
        return tuple(map(_value, word.split("/")))
    if word in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[word]
    try:
        return int(word) if word.lstrip("-").isdecimal() else float(word)
    except ValueError:
        return word


@lru_cache(maxsize=64)
def first_moment_key(method: Method) -> str | None:
    """Return the name of a method's first moment in its state; None where it has none.

    Of a torch optimizer it is what a step of one on a small matrix leaves.
    """
    if not isinstance(method, TorchMethod):
        return FIRST if method.first_moment else None
    trial = torch.zeros(2, 2, requires_grad=True)
    trial.grad = torch.ones(2, 2)
    optimizer = torch_optimizer(method, [trial])
    try:
        optimizer.step()
    except Exception as error:
        raise ValueError(
            f"method {method} takes no step on a matrix with a gradient ({type(error).__name__}: "
            f"{error}). Take one that needs no closure and no sparse gradients, such as Adagrad"
        ) from error
    return next((key for key in ("exp_avg", FIRST) if isinstance(optimizer.state[trial].get(key), Tensor)), None)


@update_of(TorchMethod)
def torch_step(method: TorchMethod, round_: Round, x: Tensor, g: Tensor, state: State) -> Tensor:
    """Return x minus the optimizer's result; between steps the state has its first moment under the key `FIRST`."""
    first = first_moment_key(method)
    after = x.detach().to(g.dtype, copy=True).requires_grad_()
    after.grad = g.clone()  # some optimizers overwrite it
    optimizer = torch_optimizer(method, [after])
    rule, named = round_.rule, method.rule()
    for group in optimizer.param_groups if rule != named else ():  # a schedule, or a scheduler of torch
        group["lr"] *= rule.lr / named.lr if named.lr else 0.0
        if rule.momentum != named.momentum:
            momenta = {"betas": (rule.momentum, *group["betas"][1:])} if "betas" in group else {}
            group |= {"momentum": rule.momentum, **momenta}
    if round_.number > 1 and state:  # before that it is of a rehearsal, see `OuterSGD.is_rehearsal`
        optimizer.state[after].update({first if key == FIRST else key: value for key, value in state.items()})
    optimizer.step()
    state.clear()
    state.update({FIRST if key == first else key: value for key, value in optimizer.state[after].items()})
    return x - after.detach()
