"""`OuterSGD`: the outer momentum step with restarts, as a `torch.optim.Optimizer`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from twophase.optim.functional import Update, buffer_dtype, outer_step_, restart_
from twophase.optim.groups import (
    GroupRound,
    as_number,
    check_group,
    check_needs,
    complete_,
    loaded_groups,
    rule_of,
    saved_group,
)
from twophase.optim.products import Angles, Dots, dots
from twophase.policies.base import MEASURED, Answer, Never, Restart, RestartPolicy, RoundSignal, ask
from twophase.policies.text import parse
from twophase.rule import Form, OuterRule, check_rule

BUFFER = "momentum_buffer"  # torch.optim.SGD's key, so that its checkpoints load here


class Part(NamedTuple):
    """Hold a param group that takes a round, and of its parameters those that have a gradient."""

    group: dict[str, Any]
    params: list[Tensor]
    gradients: list[Tensor]
    buffers: list[Tensor | None]  # None where no buffer is read: a first round, or momentum 0


class Sweep(Protocol):
    """Step and restart a group's parameters, pseudo-gradients and buffers as flat vectors, in one go."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Buffers in the parameters' shapes and order; zeros before the first round."""
        ...

    @property
    def measure(self) -> bool:
        """True if `run` takes the inner products on its way."""
        ...

    def dots(self, *, fresh: bool, angle: bool) -> Dots | None:
        """Return the inner products before the round; None where only the tensors themselves give their bits."""
        ...

    def run(self, update: Update) -> Dots | None:
        """Take a round; return the inner products before it, where it measures."""
        ...


class OuterSGD(Optimizer):
    """SGD with momentum on pseudo-gradients; its momentum restarts when a policy says so.

    Each `step()` is one outer round. With g the `.grad` of a parameter x, b the momentum and m its `momentum_buffer`:

        sum form:  m <- b m + g;          x <- x - lr m   or, Nesterov,  x <- x - lr (g + b m)
        EMA form:  m <- b m + (1 - b) g;  x <- x - lr m   or, Nesterov,  x <- x - lr ((1 + b) m - b m_old)

    then, if the policy restarts after this round, `m <- retain m + inject g` (hard: m <- 0). With `Never()` in sum
    form it equals `torch.optim.SGD` (no weight decay, dampening 0) bit for bit, on parameters of float32 and float64.

    Every argument may be set for a param group, so a restart period for a block of parameters is a param group:

        OuterSGD([{"params": embeddings, "restart": Periodic(5)}, {"params": blocks, "restart": Periodic(9)}], lr=0.7)

    `state_dict()` holds all memory, also through `torch.save` with `weights_only` loading. Buffers lie in `state`;
    `param_groups` has plain numbers and text: `rounds`, `rounds_since_restart`, `restarts`, `policy_state`, the
    policy's text form. Buffers of 16-bit parameters are float32 and stay so when loaded. Gradients are only read. A
    group without gradients takes no round. In another one a parameter without a gradient does not move, and its buffer
    restarts with the group. A policy put into a param group as an object starts without memory; as text it takes over
    the present memory.

    Args:
        params: parameters, named parameters, or param groups.
        lr: outer learning rate in the form named, >= 0 (the paper's nu in EMA form). Only a policy that no rule enters,
            such as `auto`, needs none.
        momentum: b, in [0, 1) (the paper's beta_out).
        nesterov: True if the step looks ahead.
        form: `"sum"` (as torch.optim.SGD) or `"ema"` (as the restart paper).
        restart: a policy of `twophase.restart`, its text form, or a period.
        signals: names of the further values that `step(signals=...)` will pass; a policy that needs more is refused.

    Raises:
        ValueError: a value outside its range, an unknown policy, or one that needs signals not promised.

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
        lr: float | None = None,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        form: Form = "sum",
        restart: RestartPolicy | str | int = Never(),  # noqa: B008 - a frozen value
        signals: Collection[str] = (),
    ) -> None:
        self.promised = frozenset(signals)
        if lr is None:
            rule = parse(restart).own_rule()
            lr, momentum = rule.lr, rule.momentum
        check_rule("OuterSGD", lr, momentum, form, nesterov)
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "form": form}
        super().__init__(params, defaults | {"restart": str(parse(restart))})
        self.last_round: list[GroupRound] = []
        self.begun = False
        """True once the last `step` has reached its first group: a refusal before that has changed nothing."""

    @classmethod
    def from_rule(
        cls,
        params: Iterable[Any],
        rule: OuterRule,
        restart: RestartPolicy | str | int = Never(),  # noqa: B008 - a frozen value
        signals: Collection[str] = (),
    ) -> OuterSGD:
        """Build the optimizer of a rule and a policy (`RestartPolicy.effective`)."""
        rule = parse(restart).effective(rule)
        options: dict[str, Any] = {"nesterov": rule.nesterov, "form": rule.form, "restart": restart, "signals": signals}
        return cls(params, rule.lr, rule.momentum, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its own `lr`, `momentum`, `nesterov`, `form` and `restart` override the defaults."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            complete_(group)
            check_needs(group, self.promised)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        signals: Mapping[str, float] | None = None,
        measure: bool = False,
        measured: Sequence[Dots] | None = None,
        sweep: Sweep | None = None,
    ) -> Any:
        """Take one outer round.

        Args:
            closure: re-evaluates and returns the loss, as for any torch optimizer.
            signals: further values for policies that need them, such as losses; the same on every replica.
            measure: True to leave each group's norms, cosine and gain in `last_round`, by three more reads of g and m.
                A signal that is not finite is then named there, without a warning.
            measured: result of `dots()`; of several processes, the same one's for all: equal bits need not give equal
                sums on unlike machines.
            sweep: the parameters, gradients and buffers of the only group as flat vectors.

        Returns:
            The closure's value, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.last_round, self.begun = [], False
        parts = self._parts()
        if not measure and signals is None and measured is None and self.is_rehearsal():
            self._rehearse(parts)
            return loss
        for part in parts:  # all of them before any: a round that is refused has not happened
            self._check(part.group)  # a scheduler may have changed it, or a user its policy
            check_needs(part.group, signals or ())
        if signals is not None:  # the policies' memory would hold the tensor itself, which may change
            needed = frozenset().union(*(parse(part.group["restart"]).needs for part in parts))
            signals = {
                name: as_number(f"OuterSGD: signals[{name!r}]", value) if name in needed else value
                for name, value in signals.items()
            }
        self.begun = True
        for index, part in enumerate(parts):
            angles = None if measured is None else Angles.of(measured[index])
            self._step_group(part, signals, measure=measure, angles=angles, sweep=sweep)
        return loss

    _check, _report = staticmethod(check_group), staticmethod(GroupRound.of)  # of a group

    def _parts(self) -> list[Part]:
        parts = []
        for group in self.param_groups:
            pairs = [(p, g) for p in group["params"] if (g := p.grad) is not None]
            if pairs:
                params, gradients = map(list, zip(*pairs, strict=True))
                if any(g.is_sparse for g in gradients):
                    raise ValueError("OuterSGD: a pseudo-gradient is sparse; make it dense with .to_dense() first")
                # A buffer that remains from a larger momentum is not read.
                states = [self.state.get(p, {}) for p in params] if group["momentum"] != 0 else [{}] * len(params)
                parts.append(Part(group, params, gradients, [state.get(BUFFER) for state in states]))
        return parts

    def is_rehearsal(self) -> bool:
        """Return whether a step would only make the buffers, and be no round: all gradients are 0, the state is empty.

        To learn what a state holds, `get_optimizer_state_dict` of torch.distributed.checkpoint (at learning rate 0) and
        hivemind's averager take such a step. With no buffer to make, as without momentum, it is a round unless lr is 0.
        """
        parts = [] if self.state else self._parts()
        makes = any(map(self._has_buffers, parts)) or all(part.group["lr"] == 0 for part in parts)
        if not parts or not makes or any(part.group["rounds"] for part in parts):
            return False
        gradients = [g for part in parts for g in part.gradients]
        return not any(bool(getattr(g, "to_local", lambda g=g: g)().any()) for g in gradients)

    def _has_buffers(self, part: Part) -> bool:
        return bool(part.group["momentum"] != 0)

    def _rehearse(self, parts: Sequence[Part]) -> None:
        """Make the buffers of a first round."""
        for part in parts:
            if part.group["momentum"] != 0:
                self._make_buffers(part.params)

    def _step_group(
        self,
        part: Part,
        signals: Mapping[str, float] | None,
        *,
        measure: bool,
        angles: Angles | None,
        sweep: Sweep | None,
    ) -> None:
        """Ask a group's policy, and take and report its round; `angles` where they are measured already."""
        group = part.group
        policy = parse(group["restart"])
        if not isinstance(group["restart"], str):  # the user put a policy there: it starts without memory,
            group["policy_state"] = policy.initial_state()
            group["restart"] = str(policy)  # and becomes text, which every checkpoint can hold
        number, age = group["rounds"] + 1, group["rounds_since_restart"] + 1
        cosine = True
        if angles is None and (policy.needs & MEASURED or (measure and not (sweep is not None and sweep.measure))):
            cosine = measure or "cosine" in policy.needs
            angles = Angles.of(dots_of(part, sweep, cosine=cosine))
        norms: tuple[float | None, ...] = (None, None, None)
        if angles is not None:
            norms = (angles.pseudo_gradient_norm, angles.buffer_norm, angles.cosine if cosine else None)
        signal = RoundSignal(number, age, *norms, signals, rule_of(group))
        answer = ask(policy, group["policy_state"], signal)
        totals = self._apply(part, answer, sweep)
        if angles is None and totals is not None:  # `measured` is of all shards, and the sweep's of this one
            angles = Angles.of(totals)
        if answer.restart is not None:
            self._restart_resting(group, answer.restart)
        group |= {"policy_state": answer.state, "rounds": number, "rounds_since_restart": answer.age(age)}
        group["restarts"] += answer.restarted
        if measure and angles is not None:
            self.last_round.append(self._report(group, angles, answer))
        elif answer.not_finite:
            warnings.warn(
                f"OuterSGD: in round {number} {', '.join(answer.not_finite)} is not finite: the run has diverged, and "
                f"restart policy {policy} cannot decide. Resume an earlier checkpoint with a smaller learning rate",
                RuntimeWarning,
                stacklevel=3,
            )

    def _apply(self, part: Part, answer: Answer, sweep: Sweep | None) -> Dots | None:
        """Take a group's update and restart; return the inner products before them, where a sweep measures them."""
        rule = rule_of(part.group)
        if sweep is not None:
            fresh = rule.momentum != 0 and part.buffers[0] is None
            for p, buffer in zip(part.params, sweep.buffers, strict=True) if fresh else ():
                self.state[p][BUFFER] = buffer
            return sweep.run(Update.of(rule, answer, fresh=fresh))
        present = [buffer for buffer in part.buffers if buffer is not None]
        for fresh in (True, False):
            indices = [index for index, buffer in enumerate(part.buffers) if (buffer is None) == fresh]
            x, g = [part.params[index] for index in indices], [part.gradients[index] for index in indices]
            m = self._make_buffers(x) if fresh and rule.momentum != 0 else present
            outer_step_(x, g, m, Update.of(rule, answer, fresh=fresh))
        return None

    def _restart_resting(self, group: dict[str, Any], restart: Restart) -> None:
        """Restart buffers outside a round as if g were 0: the new cycle begins for them, too."""
        resting = [p for p in group["params"] if p.grad is None or group["momentum"] == 0]
        buffers = [m for p in resting if (m := self.state.get(p, {}).get(BUFFER)) is not None]
        restart_(buffers, buffers, Restart(restart.retain))

    def _make_buffers(self, params: Sequence[Tensor]) -> list[Tensor]:
        for p in params:
            self.state[p][BUFFER] = torch.zeros_like(p, dtype=buffer_dtype(p), requires_grad=False)
        return [self.state[p][BUFFER] for p in params]

    @property
    def needs(self) -> frozenset[str]:
        """Signals that the policies of the groups need."""
        return frozenset().union(*(parse(group["restart"]).needs for group in self.param_groups))

    @torch.no_grad()
    def dots(self) -> list[Dots]:
        """Return `<g, g>`, `<m, m>` and `<g, m>` of each group that has a gradient, before g is mixed in."""
        return [dots_of(part) for part in self._parts()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as every torch optimizer does; next to tensors it holds plain numbers and text alone."""
        state = super().state_dict()
        return state | {"param_groups": [saved_group(group) for group in state["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned; float32 buffers of 16-bit parameters stay float32.

        The state's settings win over the constructor's. A state of `torch.optim.SGD` loads too, unless it used
        dampening, weight decay or maximize, which an outer step lacks. Its form is SGD's (sum); the restart
        policy stays, and rounds count from the loading.

        Raises:
            ValueError: groups that do not fit, values that this optimizer cannot honour, or a policy that needs signals
                not promised; nothing has been changed.
        """
        saved: dict[str, Any] = {}

        def check(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            saved.update(state, param_groups=loaded_groups(state, self.param_groups, self.promised))
            return saved

        # Between the user's own hooks, which may change what is loaded, and what has been.
        after = self.register_load_state_dict_post_hook(lambda _: self._put_back(saved), prepend=True)
        with self.register_load_state_dict_pre_hook(check), after:
            super().load_state_dict(state_dict)

    def _put_back(self, state_dict: Mapping[str, Any]) -> None:
        """Put back the buffers, which torch has cast to the parameters' dtypes or shares with the caller's state."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, index in zip(group["params"], loaded["params"], strict=True):
                self.state.pop(param, None)  # not left empty: a state saved again has the bytes of the first one
                for key, saved in state_dict["state"].get(index, {}).items():
                    self.state[param][key] = _copied(saved, param)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return super().__getstate__() | {"promised": self.promised}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fill in the entries that states of other versions, or of torch.optim.SGD, lack."""
        super().__setstate__(state)
        self.last_round, self.begun = [], False
        for group in self.param_groups:
            complete_(group)


def _copied(saved: Any, param: Tensor) -> Any:
    """Return a copy of an entry of a parameter's state, a buffer of its shape with its device and buffer dtype."""
    if not isinstance(saved, Tensor):
        return saved
    if saved.shape != param.shape or not (saved.is_floating_point() or saved.is_complex()):
        return saved.to(device=param.device, copy=True)
    return saved.to(device=param.device, dtype=buffer_dtype(param), copy=True)


def dots_of(part: Part, sweep: Sweep | None = None, *, cosine: bool = True) -> Dots:
    """Return `<g, g>`, `<m, m>` and `<g, m>` of a group; a missing buffer counts as 0."""
    if sweep is not None:
        totals = sweep.dots(fresh=part.buffers[0] is None, angle=cosine)
        if totals is not None:
            return totals
    old = [(g, m) for g, m in zip(part.gradients, part.buffers, strict=True) if m is not None]
    new = [g for g, m in zip(part.gradients, part.buffers, strict=True) if m is None]  # their m is 0
    if not old:
        return dots(new, [], angle=cosine)
    gg, mm, gm = dots([g for g, _ in old], [m for _, m in old], angle=cosine)
    return gg + (dots(new, [])[0] if new else 0.0), mm, gm
