"""`OuterSGD`: `torch.optim.SGD` on pseudo-gradients, whose momentum restarts when a policy says so.

The sum form is torch's, and torch's fused kernel computes it where it can, plain lines the rest: the EMA form too, and
16-bit parameters, whose buffers are float32. `twophase.rule` has the equations.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd
from torch.utils.weak import WeakTensorKeyDictionary

from twophase.restart import MEASURED, Decision, Never, Restart, RestartPolicy, RoundSignal, Step, age_after, ask, parse
from twophase.rule import Form, OuterRule

BUFFER = "momentum_buffer"  # torch.optim.SGD's key, so that its checkpoints load here
COUNTERS = ("rounds", "rounds_since_restart", "restarts")
Dots = tuple[float, float, float]
"""`<g, g>`, `<m, m>` and `<g, m>` of a param group, with the m before g is mixed in."""


OWNERS: MutableMapping[Tensor, ReferenceType[Any]] = WeakTensorKeyDictionary()
"""By parameter of a replica the `DiLoCo` that synchronizes it; neither is kept alive."""


def owner_of(p: Tensor) -> Any:
    """Return the `DiLoCo` of a replica's parameter, or None."""
    return OWNERS[p]() if p in OWNERS else None


@dataclass(frozen=True, slots=True)
class GroupRound:
    """The last round of a param group: norms of g, and of m before g was mixed in, and the cosine between the two.

    `gain` is `<update, g> / <g, g>`: 1 would be plain averaging, and it is NaN where g = 0. `not_finite` names needs of
    the policy that were not finite: the run has diverged, and nothing restarted.
    """

    restarted: bool
    pseudo_gradient_norm: float
    buffer_norm: float
    cosine: float
    gain: float
    not_finite: tuple[str, ...] = ()


def with_gradients(optimizer: Optimizer) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """Return the param groups that have a gradient, which take a round, and their parameters that have one."""
    found = [(group, [p for p in group["params"] if p.grad is not None]) for group in optimizer.param_groups]
    return [(group, params) for group, params in found if params]


class OuterSGD(torch.optim.SGD):
    """Outer optimizer: SGD with momentum on pseudo-gradients, with restarts.

    Each `step()` is one outer round; `.grad` of each parameter holds the pseudo-gradient. With `Never()` in sum form it
    is `torch.optim.SGD`, on a CPU bit for bit. A param group may override every argument, so a restart period for a
    block of parameters is a param group:

        OuterSGD([{"params": embeddings, "restart": 5}, {"params": blocks, "restart": 9}], lr=0.7, momentum=0.9)

    Groups count `rounds`, `rounds_since_restart` and `restarts`. A group without gradients takes no round; in another
    one a parameter without a gradient does not move, and its buffer restarts with the group. `state_dict()` holds
    tensors, numbers and text (`torch.load(weights_only=True)`); a state of `torch.optim.SGD` loads, too. A first step
    at lr 0 is no round: `torch.distributed.checkpoint` takes one to learn what a state holds.

    Args:
        params: parameters, named parameters, or param groups.
        lr: outer learning rate, >= 0, in the form given; a policy that takes the steps, as `auto`, does not read it.
        momentum, nesterov: b, in [0, 1), and whether to look ahead.
        form: "sum" (as torch.optim.SGD) or "ema" (as the restart paper); lr_sum = lr_ema (1 - b).
        restart: a policy of `twophase.restart`, its text form, or a period.

    >>> x = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = OuterSGD([x], lr=1.0, momentum=0.5, restart=2)
    >>> for _ in range(3):
    ...     x.grad = torch.full((1,), 0.125)
    ...     optimizer.step()
    >>> x.item()
    0.5625
    """

    last_round: Sequence[GroupRound] = ()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        form: Form = "sum",
        restart: RestartPolicy | str | int = Never(),  # noqa: B008 - a frozen value
    ) -> None:
        rule, policy = OuterRule(lr, momentum, nesterov, form), parse(restart)
        numbers = {"lr": rule.lr, "momentum": rule.momentum, "nesterov": rule.nesterov, "form": form}
        others = dict.fromkeys(("weight_decay", "dampening", "maximize", "differentiable"), 0)  # so that SGD loads them
        others |= {"foreach": None, "fused": None}
        Optimizer.__init__(self, params, numbers | others | {"restart": str(policy)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; what it leaves out are the constructor's arguments, and its rounds count from 0."""
        group = self.defaults | param_group
        _complete(group)
        super().add_param_group(group)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Any = None,
        *,
        signals: Mapping[str, float] | None = None,
        measure: bool = False,
        dots: Sequence[Dots] | None = None,
    ) -> Any:
        """Take one outer round.

        Args:
            closure: as for every torch optimizer.
            signals: values for policies that need more than norms and cosine, the same on every rank.
            measure: True to leave norms, cosine and gain of each group in `last_round`, at the cost of reading g and m
                once more; they are there anyway where a policy needs them.
            dots: what `dots()` has returned, where several ranks hold shards and have added it up.

        Returns:
            The closure's value, or None.

        Raises:
            KeyError: a policy needs a signal that is missing; nothing has happened.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.last_round = seen = list[GroupRound]()
        active = with_gradients(self)
        if signals is None and not measure and dots is None and is_init_step(self):  # an engine's step is a round
            for group, params in active:
                self._buffers(group, params)
            return loss
        if any(owner_of(params[0]) for _, params in active):
            raise ValueError("OuterSGD: takes the outer steps of a DiLoCo; replicas need an inner optimizer, as AdamW")
        if dots is None and (measure or self.needs & MEASURED):
            dots = self.dots()
        measured: Sequence[Dots | None] = dots or [None] * len(active)
        # All before any: a round that a policy refuses has not happened.
        decisions = [decide(group, of_group, signals) for (group, _), of_group in zip(active, measured, strict=True)]
        for (group, params), of_group, (memory, decision, broken) in zip(active, measured, decisions, strict=True):
            self._update(group, params, decision)
            count_round(group, memory, decision)
            if of_group is not None:
                seen.append(_report(group, of_group, decision, broken))
            elif broken:
                fault = f"OuterSGD: {', '.join(broken)} is not finite, and nothing restarted"
                warnings.warn(fault, RuntimeWarning, stacklevel=2)
        return loss

    def _update(self, group: dict[str, Any], params: Sequence[Tensor], decision: Decision) -> None:
        """Take a group's update and its restart."""
        lr, momentum, nesterov, weight = group["lr"], group["momentum"], group["nesterov"], 1.0
        if isinstance(decision, Step):
            lr, momentum, nesterov = decision.lr, decision.momentum, False
        elif group["form"] == "ema":
            weight = 1 - momentum
        buffers = self._buffers(group, params)
        if isinstance(decision, Restart) and decision.before:
            self._restart(group, decision)
        by_torch = weight == 1 and (momentum != 0 or not _has_buffers(group))
        fused, plain = list[Any](), list[Any]()
        for row in zip(params, [p.grad for p in params], buffers, strict=True):
            (fused if by_torch and _fits_fused(*row) else plain).append(row)
        if fused:
            numbers = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "dampening": 0.0}
            columns: Any = map(list, zip(*fused, strict=True))
            sgd(*columns, fused=True, nesterov=nesterov and momentum != 0, maximize=False, **numbers)
        for x, g, m in plain:
            direction = g if m is None else m.mul_(momentum).add_(g, alpha=weight)
            if m is not None and nesterov:  # (1 + b) m - b m_old, with b m_old = m - w g
                direction = torch.add(g, m, alpha=momentum) if weight == 1 else m.mul(momentum).add_(g, alpha=weight)
            x.add_(direction, alpha=-lr)  # 16-bit x is rounded here, once
        if isinstance(decision, Restart) and not decision.before:
            self._restart(group, decision)

    def _restart(self, group: Mapping[str, Any], restart: Restart) -> None:
        """Set `m <- retain m + inject g`, also where a parameter has no gradient in this round."""
        for p in group["params"]:
            if (m := self.state.get(p, {}).get(BUFFER)) is not None:
                m.mul_(restart.retain) if restart.retain else m.zero_()  # 0 x inf would keep a NaN alive
                if restart.inject and p.grad is not None:
                    m.add_(p.grad, alpha=restart.inject)

    def _buffers(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> list[Any]:
        """Return momentum buffers, at first -0, which plus any g is g; float32 for 16-bit parameters; None without."""
        if not _has_buffers(group):
            return [None] * len(params)
        for p in params:
            dtype, m = p.dtype if p.dtype.itemsize >= _FLOAT32 else torch.float32, self.state[p].get(BUFFER)
            if m is None:
                self.state[p][BUFFER] = torch.full_like(p, -0.0, dtype=dtype, requires_grad=False)
            elif m.dtype != dtype:
                self.state[p][BUFFER] = m.to(dtype)
        return [self.state[p][BUFFER] for p in params]

    @torch.no_grad()
    def dots(self) -> list[Dots]:
        """Return `<g, g>`, `<m, m>` and `<g, m>` of each group that has a gradient, before g is mixed in."""
        return [dots([p.grad for p in params], self._buffers(group, params)) for group, params in with_gradients(self)]

    @property
    def needs(self) -> frozenset[str]:
        """Everything that the policies of the groups need."""
        return frozenset[str]().union(*(parse(group["restart"]).needs for group in self.param_groups))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned; its settings win over the constructor's.

        A state of `torch.optim.SGD` loads too, unless it used dampening, weight decay or maximize, which an outer step
        lacks: in sum form, with this optimizer's restart policies, rounds counted from 0.

        Raises:
            ValueError: not the state of such an optimizer, or of other parameters; nothing has been changed.
        """
        groups = []
        for current, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            groups.append({"restart": current["restart"]} | saved)
            _complete(groups[-1])
            for p, index in zip(current["params"], saved["params"], strict=False):
                buffer = state_dict["state"].get(index, {}).get(BUFFER)
                if buffer is not None and buffer.shape != p.shape:
                    raise ValueError(f"OuterSGD: the saved buffer of parameter {index} must have shape {[*p.shape]}")
        loaded = {**state_dict, "param_groups": groups + state_dict["param_groups"][len(groups) :]}
        super().load_state_dict(loaded)
        keep_types(self, loaded)


def is_init_step(optimizer: Optimizer) -> bool:
    """Return whether a step is that of `torch.distributed.checkpoint`, which learns by it what a state holds.

    It comes with an empty state, at lr 0 and with gradients of 0; a warm-up from lr 0 has others.
    """
    groups = optimizer.param_groups
    if optimizer.state or any(group["lr"] != 0 for group in groups):
        return False
    grads: list[Any] = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return not any(bool((g.to_local() if hasattr(g, "to_local") else g).any()) for g in grads)


def rule_of(group: Mapping[str, Any]) -> OuterRule:
    """Return the rule of a param group; a ValueError if its values make none."""
    return OuterRule(group["lr"], group["momentum"], group["nesterov"], group["form"])


def _complete(group: dict[str, Any]) -> None:
    """Check a param group's values, fill in those that it lacks, and read its policy and memory from text."""
    if missing := {"lr", "momentum"} - group.keys():
        raise ValueError(f"OuterSGD: a param group must have {', '.join(sorted(missing))}, as torch.optim.SGD's")
    for name in ("weight_decay", "dampening", "maximize"):
        if group.get(name):
            raise ValueError(f"OuterSGD: {name} must be 0, got {group[name]}; an outer step has none")
    for name, value in {"form": "sum", "nesterov": False, "policy_state": "{}", **dict.fromkeys(COUNTERS, 0)}.items():
        group.setdefault(name, value)
    rule = rule_of(group)
    # Plain numbers and text. The memory is one leaf: torch.distributed.checkpoint restores those alone that a fresh
    # optimizer's state has, too.
    group |= {"lr": rule.lr, "momentum": rule.momentum, "restart": str(parse(group.get("restart", "never")))}


def _has_buffers(group: Mapping[str, Any]) -> bool:
    """Return whether a group's steps read buffers; else one may be left from another momentum."""
    return group["momentum"] != 0 or parse(group["restart"]).takes_steps


def decide(
    group: Mapping[str, Any], measured: Dots | None = None, signals: Mapping[str, float] | None = None
) -> tuple[dict[str, float], Decision, tuple[str, ...]]:
    """Return what `ask` returns for the next round of a param group."""
    norms = (None, None, None) if measured is None else angles(measured)
    signal = RoundSignal(group["rounds"] + 1, group["rounds_since_restart"] + 1, *norms, extra=signals)
    return ask(parse(group["restart"]), json.loads(group["policy_state"]), signal)


def count_round(group: dict[str, Any], memory: Mapping[str, float], decision: Decision) -> None:
    """Count a round of a param group, and keep its policy's memory as text."""
    group["rounds"] += 1
    group["rounds_since_restart"] = age_after(decision, group["rounds_since_restart"] + 1)
    group["restarts"] += isinstance(decision, Restart)
    group["policy_state"] = json.dumps(memory, default=float)


def _report(group: Mapping[str, Any], measured: Dots, decision: Decision, broken: tuple[str, ...]) -> GroupRound:
    """Return a round in numbers; the gain follows from the angle, because the update is linear in g and m."""
    norm, buffer_norm, cosine = angles(measured)
    along_g, along_m = rule_of(group).weights
    if isinstance(decision, Step):
        along_g, along_m = decision.lr, decision.lr * decision.momentum
    elif isinstance(decision, Restart) and decision.before:
        along_g, along_m = along_g + along_m * decision.inject, along_m * decision.retain
    along = cosine * buffer_norm / norm if norm else math.nan  # <m, g> / <g, g>
    gain = along_g + along_m * along
    return GroupRound(isinstance(decision, Restart), norm, buffer_norm, cosine, gain, broken)


def keep_types(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Give an optimizer's loaded state the types that it was saved in, in tensors of its own.

    torch casts it to the parameters' types, as a bfloat16 average to float32, and shares what it need not cast.
    """
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for p, index in zip(group["params"], saved["params"], strict=True):
            of_p = optimizer.state.get(p, {})
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and isinstance(of_p.get(key), Tensor):
                    of_p[key] = value.to(of_p[key].device, copy=True)


def unlike_types(optimizer: Optimizer) -> dict[str, Any]:
    """Return of an optimizer's state dict the tensors that torch would load in another type, for `keep_types`."""
    state, params = optimizer.state_dict(), [p for group in optimizer.param_groups for p in group["params"]]
    tensors = {
        index: {k: t for k, t in of_p.items() if isinstance(t, Tensor) and t.dtype != params[index].dtype}
        for index, of_p in state["state"].items()
    }
    return {"param_groups": [{"params": group["params"]} for group in state["param_groups"]], "state": tensors}


# ------------------------------------------------------------------------------------------- arithmetic and measuring

_FLOAT32 = 4  # bytes
_FEW = 1 << 20  # elements of a group, up to which it is faster to join its tensors
_PIECE = 1 << 17  # elements: g and m of a piece stay in the cache


def _fits_fused(x: Tensor, g: Tensor | None, m: Tensor | None) -> bool:
    """Return whether torch's fused kernel may take a tensor; on a CPU, with the bits of torch's plain loop.

    There it rounds the elements that fill no vector register in another way. It ignores strides, so that of a
    transposed or channels-last tensor it would take the wrong elements (tests/optim/test_outer_sgd.py).
    """
    is_plain = type(x.data) is Tensor and x.is_floating_point() and x.dtype.itemsize >= _FLOAT32
    is_whole = all(t is None or t.is_contiguous() for t in (x, g, m))
    return is_plain and is_whole and (x.is_cuda or (x.is_cpu and x.numel() % 16 == 0))


def dots(grads: Sequence[Any], buffers: Sequence[Tensor | None]) -> Dots:
    """Return `<g, g>`, `<m, m>` and `<g, m>` over all tensors; all buffers are None where there are none.

    Products are summed in the tensors' type (of 16-bit ones in float32) within a piece, and in float64 over pieces.
    """
    rows = [(g,) if m is None else (g, m) for g, m in zip(grads, buffers, strict=True)]
    pieces: Iterable[tuple[Tensor, ...]] = (piece for row in rows for piece in _pieces(row))
    if sum(g.numel() for g in grads) <= _FEW and all(g.is_cpu and not hasattr(g, "full_tensor") for g in grads):
        batches: list[list[tuple[Tensor, ...]]] = [[]]
        for piece in pieces:  # joined, up to a piece's size: an operation on each would cost more
            if sum(g.numel() for g, *_ in batches[-1]) + piece[0].numel() > _PIECE:
                batches.append([])
            batches[-1].append(piece)
        pieces = [tuple(map(torch.cat, zip(*batch, strict=True))) for batch in batches]
    products = [product for piece in pieces for product in _products(piece)]
    stacked = off_mps(torch.stack([t.to(products[0].device) for t in products]))
    gg, gm, mm, *_ = [*stacked.double().view(-1, 2 * len(rows[0]) - 1).sum(0).tolist(), 0.0, 0.0]
    return gg, mm, gm


def _pieces(row: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Cut a tensor g, and its m, into flat pieces, on a CPU of the cache's size; a DTensor is taken whole."""
    if hasattr(row[0], "full_tensor"):
        return [tuple(row)]
    dtype = row[0].dtype if row[0].dtype.itemsize >= _FLOAT32 else torch.float32
    flat = [t.detach().reshape(-1).to(dtype) for t in row]
    return zip(*(t.split(_PIECE if t.is_cpu else 1 << 24) for t in flat), strict=True)


def _products(piece: Sequence[Any]) -> list[Tensor]:
    """Return <g, g> of a piece, and with m <g, m> and <m, m>."""
    pairs = combinations_with_replacement(piece, 2)
    if hasattr(piece[0], "full_tensor"):  # the sum of a DTensor is partial on each rank
        return [(a * b).sum(dtype=torch.float64).full_tensor() for a, b in pairs]
    return [torch.dot(a, b) for a, b in pairs]


def off_mps(t: Tensor) -> Tensor:
    """Return a tensor where float64 exists: one on Apple's GPU, which lacks it, on the CPU."""
    return t.cpu() if t.device.type == "mps" else t


def angles(measured: Dots) -> tuple[float, float, float]:
    """Return the norms of g and m, and the cosine between them, 0 when either is zero."""
    gg, mm, gm = measured
    scale = gg**0.5 * mm**0.5  # the product of the squares may over- or underflow
    cosine = gm / scale if scale != 0 else 0.0
    return gg**0.5, mm**0.5, math.copysign(1.0, cosine) if abs(cosine) > 1 else cosine  # a NaN stays one
