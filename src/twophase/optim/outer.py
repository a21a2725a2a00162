"""`OuterSGD`: the outer momentum step with restarts, as a `torch.optim.Optimizer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from twophase.optim.functional import Angles, Dots, buffer_dtype, dots, outer_step_, restart_
from twophase.restart import Never, Restart, RestartPolicy, RoundSignal, parse
from twophase.rule import Form, OuterRule, check_rule


@dataclass(frozen=True, slots=True)
class GroupRound:
    """What a param group did in its last round.

    Args:
        restarted: whether its buffer restarted.
        pseudo_gradient_norm: Euclidean norm of g over the group.
        buffer_norm: Euclidean norm of m before g was mixed in.
        cosine: cosine of the angle between that m and g, 0 when either vanishes.
        gain: `<update, g> / <g, g>`, with update = x before - x after; 1 would be plain averaging. NaN when g = 0.
    """

    restarted: bool
    pseudo_gradient_norm: float
    buffer_norm: float
    cosine: float
    gain: float


BUFFER = "momentum_buffer"  # torch.optim.SGD's key, so that its checkpoints load here
COUNTERS = ("rounds", "rounds_since_restart", "restarts")
_MEASURED = frozenset({"pseudo_gradient_norm", "buffer_norm", "cosine"})


class OuterSGD(Optimizer):
    """SGD with momentum on pseudo-gradients, whose momentum restarts when a policy says so.

    Each `step()` is one outer round. With g the `.grad` of a parameter x and b the momentum:

        sum form:  m <- b m + g;          x <- x - lr m   or, Nesterov,  x <- x - lr (g + b m)
        EMA form:  m <- b m + (1 - b) g;  x <- x - lr m   or, Nesterov,  x <- x - lr ((1 + b) m - b m_old)

    then, if the policy restarts after this round, `m <- retain m + inject g` (hard: m <- 0). With `Never()` in sum
    form it equals `torch.optim.SGD` (no weight decay, dampening 0) bit for bit.

    | here       | symbol | paper      |
    |------------|--------|------------|
    | `lr`       | lr     | nu (in EMA form) |
    | `momentum` | b      | beta_out   |
    | `.grad`    | g      | pseudo-gradient g_t |
    | `state[p]["momentum_buffer"]` | m | m_t |
    | period of `restart` | K | K      |

    Every argument may be set for a param group, so a restart period for a block of parameters is a param group:

        OuterSGD([{"params": embeddings, "restart": Periodic(5)}, {"params": blocks, "restart": Periodic(9)}], lr=0.7)

    All memory lies in `state` (buffers) and `param_groups` (plain numbers and text: `rounds`, `rounds_since_restart`,
    `restarts`, `policy_state`, and the policy in its text form), so `state_dict()` moves all of it: to disk, to a
    healing replica of torchft, through `torch.save` with `weights_only` loading. Buffers of 16-bit parameters are
    float32 and stay so when loaded. Gradients are only read. A group in which no parameter has a gradient takes no
    round.

    Args:
        params: parameters, named parameters, or param groups.
        lr: outer learning rate in the form named, >= 0.
        momentum: in [0, 1).
        nesterov: whether the step looks ahead.
        form: `"sum"` (as torch.optim.SGD) or `"ema"` (as the restart paper).
        restart: a policy of `twophase.restart`, its text form, or a period.

    Raises:
        ValueError: a value outside its range, or a policy that is not known.

    Source: paper sections 2 and 3; theory notes R2 to R4.

    >>> x = torch.nn.Parameter(torch.tensor([1.0]))
    >>> outer = OuterSGD([x], lr=0.5, momentum=0.9, restart=2)
    >>> for _ in range(3):
    ...     x.grad = torch.tensor([0.1])
    ...     outer.step()
    >>> round(x.item(), 4), outer.param_groups[0]["rounds_since_restart"]
    (0.805, 1)
    """

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
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "form": form, "restart": str(parse(restart))}
        check_rule("OuterSGD", lr, momentum, form, nesterov)
        super().__init__(params, defaults)
        self.last_round: list[GroupRound] = []

    @classmethod
    def from_rule(
        cls,
        params: Iterable[Any],
        rule: OuterRule,
        restart: RestartPolicy | str | int = Never(),  # noqa: B008 - a frozen value
    ) -> OuterSGD:
        """The optimizer of a rule and a policy."""
        return cls(params, rule.lr, rule.momentum, nesterov=rule.nesterov, form=rule.form, restart=restart)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its own `lr`, `momentum`, `nesterov`, `form` and `restart` override the defaults."""
        super().add_param_group(param_group)
        _complete(self.param_groups[-1])

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        signals: Mapping[str, float] | None = None,
        measure: bool = False,
        measured: Sequence[Dots] | None = None,
    ) -> Any:
        """Take one outer round.

        Args:
            closure: re-evaluates and returns the loss, as for any torch optimizer.
            signals: further values for policies that need them (all-reduced: every replica must pass the same), such
                as losses.
            measure: also leave each group's norms, cosine and gain in `last_round` (three more reads of g and m).
            measured: what `dots()` has returned, to be used instead of measuring again; of several processes that hold
                the same bits on unlike machines, all should be given one's.

        Returns:
            The closure's value, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.last_round = []
        for index, (group, params) in enumerate(self._taking_part()):
            seen = None if measured is None else Angles.of(measured[index])
            self._step_group(group, params, signals, measure=measure, seen=seen)
        return loss

    @property
    def needs_measuring(self) -> bool:
        """Whether the policy of any group decides by norms or angles."""
        return any(parse(group["restart"]).needs & _MEASURED for group in self.param_groups)

    @torch.no_grad()
    def dots(self) -> list[Dots]:
        """`<g, g>`, `<m, m>` and `<g, m>` of each group that has a gradient, before g is mixed in."""
        return [self._measure(params) for _, params in self._taking_part()]

    def _taking_part(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """The groups that take a round, and their parameters that do."""
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        return [(group, params) for group, params in groups if params]

    def _step_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        signals: Mapping[str, float] | None,
        *,
        measure: bool,
        seen: Angles | None,
    ) -> None:
        gradients: list[Tensor] = [p.grad for p in params if p.grad is not None]
        if any(g.is_sparse for g in gradients):
            raise ValueError("OuterSGD: a pseudo-gradient is sparse; make it dense with .to_dense() before the step")
        _check(group)  # a scheduler may have changed it; after the update would be too late
        policy = parse(group["restart"])
        if not isinstance(group["restart"], str):  # the user put a policy there: it starts without memory,
            group["policy_state"] = policy.initial_state()
            group["restart"] = str(policy)  # and becomes text, which every checkpoint can hold
        number, age = group["rounds"] + 1, group["rounds_since_restart"] + 1
        if seen is None and (measure or policy.needs & _MEASURED):
            seen = Angles.of(self._measure(params))
        signal = _signal(policy, number, age, seen, signals)
        group["policy_state"], restart = policy.decide(policy.initial_state() | group["policy_state"], signal)
        group["rounds"] = number  # not before: a round that a missing signal stops has not happened
        if restart is not None and restart.before:
            if restart.inject != 0 and group["momentum"] != 0:  # a buffer that is not there yet counts as 0
                for p in params:
                    if BUFFER not in self.state[p]:
                        self.state[p][BUFFER] = torch.zeros_like(p, dtype=buffer_dtype(p), requires_grad=False)
            self._restart(params, restart)
            age = 1
        old = [p for p in params if BUFFER in self.state[p]]
        self._update(group, [p for p in params if BUFFER not in self.state[p]], fresh=True)
        self._update(group, old, fresh=False)
        if restart is not None and not restart.before:
            self._restart(params, restart)
            age = 0
        group["restarts"] += restart is not None
        group["rounds_since_restart"] = age
        if measure and seen is not None:
            self.last_round.append(_report(group, seen, restart))

    def _measure(self, params: list[Tensor]) -> Dots:
        held = [p for p in params if BUFFER in self.state[p]]
        fresh = [p for p in params if BUFFER not in self.state[p]]  # their m is 0
        seen = dots([_gradient(p) for p in (held or fresh)], [self.state[p][BUFFER] for p in held])
        if not (held and fresh):
            return seen
        return seen[0] + dots([_gradient(p) for p in fresh], [])[0], seen[1], seen[2]

    def _restart(self, params: list[Tensor], restart: Restart) -> None:
        held = [p for p in params if BUFFER in self.state[p]]
        restart_([self.state[p][BUFFER] for p in held], [_gradient(p) for p in held], restart.retain, restart.inject)

    def _update(self, group: dict[str, Any], params: list[Tensor], *, fresh: bool) -> None:
        buffers: list[Tensor] = []
        if group["momentum"] != 0:
            if fresh:
                for p in params:
                    self.state[p][BUFFER] = torch.empty_like(p, dtype=buffer_dtype(p), requires_grad=False)
            buffers = [self.state[p][BUFFER] for p in params]
        outer_step_(
            params,
            [_gradient(p) for p in params],
            buffers,
            lr=group["lr"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            form=group["form"],
            fresh=fresh,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned; float32 buffers of 16-bit parameters stay float32.

        A state of `torch.optim.SGD` loads too (its age counts from the loading), unless it used dampening, weight
        decay or maximize, which an outer step has not.

        Raises:
            ValueError: groups that do not fit, or values that this optimizer cannot honour.
        """
        for group in state_dict["param_groups"]:
            for key in ("dampening", "weight_decay", "maximize"):
                if group.get(key):
                    raise ValueError(f"OuterSGD: the loaded state has {key}={group[key]}; an outer step has no {key}")
            _complete(dict(group))  # refuse before anything is loaded
        super().load_state_dict(state_dict)
        # The base class has just cast every buffer to its parameter's dtype (and shares the others with the caller's
        # dictionary), so the buffers are put back from the original: as they were, and our own copy.
        for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, index in zip(ours["params"], theirs["params"], strict=True):
                saved = state_dict["state"].get(index, {}).get(BUFFER)
                if saved is not None:
                    self.state[param][BUFFER] = saved.to(device=param.device, dtype=buffer_dtype(param), copy=True)
                else:
                    self.state[param].pop(BUFFER, None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fill in what states of other versions, or of torch.optim.SGD, do not have."""
        super().__setstate__(state)
        self.last_round = []
        for group in self.param_groups:
            _complete(group)


def _signal(
    policy: RestartPolicy, number: int, age: int, seen: Angles | None, extra: Mapping[str, float] | None
) -> RoundSignal:
    missing = policy.needs - _MEASURED - set(extra or ())
    if missing:
        raise ValueError(
            f"OuterSGD: restart policy {policy} needs {', '.join(sorted(missing))}; pass them to step(signals=...), "
            "the same on every replica"
        )
    if seen is None:
        return RoundSignal(number, age, extra=extra)
    return RoundSignal(number, age, seen.pseudo_gradient_norm, seen.buffer_norm, seen.cosine, extra)


def _report(group: dict[str, Any], seen: Angles, restart: Restart | None) -> GroupRound:
    """The group's round in numbers; the gain follows from the angles because the update is linear in g and m."""
    rule = OuterRule(group["lr"], group["momentum"], group["nesterov"], group["form"])
    norm = seen.pseudo_gradient_norm
    along = seen.cosine * seen.buffer_norm / norm if norm else math.nan  # <m, g> / <g, g>
    if restart is not None and restart.before:
        along = restart.retain * along + restart.inject
    along = rule.momentum * along + rule.injection
    gain = rule.lr * (rule.momentum * along + rule.injection if rule.nesterov else along)
    return GroupRound(restart is not None, norm, seen.buffer_norm, seen.cosine, gain)


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _complete(group: dict[str, Any]) -> None:
    """Fill a param group's missing entries and check the others."""
    group.setdefault("form", "sum")
    group.setdefault("nesterov", False)
    policy = parse(group.get("restart", "never"))
    group["restart"] = str(policy)
    for key in COUNTERS:
        group.setdefault(key, 0)
    group.setdefault("policy_state", policy.initial_state())
    _check(group)


def _check(group: dict[str, Any]) -> None:
    check_rule("OuterSGD", group["lr"], group["momentum"], group["form"], group["nesterov"])
