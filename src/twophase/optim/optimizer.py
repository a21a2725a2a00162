"""`OuterOptimizer`: the outer step of any method of the shelf, with its filter, schedule, readout and restarts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from twophase.optim.filters import Context, dot, filtered
from twophase.optim.filters import function_of as function_of_filter
from twophase.optim.functional import buffer_dtype, restart_
from twophase.optim.groups import GroupRound, rule_of
from twophase.optim.methods import (
    Round,
    advance,
    first_moment_key,
    function_of,
    new_buffer,
    resets_second,
    restarted,
    torch_optimizer,
    torch_step,
)
from twophase.optim.outer import OuterSGD, Part
from twophase.optim.products import Angles, Dots
from twophase.policies.base import Answer, Never, Restart, RestartPolicy
from twophase.policies.text import parse as parse_policy
from twophase.rule import OuterRule
from twophase.shelf.base import SLOTS, Filter, Method, Readout, Schedule
from twophase.shelf.methods import AVERAGE, FIRST, SECOND, TorchMethod
from twophase.shelf.outer import Outer, as_outer
from twophase.shelf.text import parse

READOUT = "readout"
"""Key of a parameter's readout in the state."""
WEIGHTS = ("first", "second")
"""Entries of a group: the weights that its moments hold (`methods.advance`)."""


class OuterOptimizer(OuterSGD):
    """Outer optimizer made of a method, a filter, a schedule, a readout and a restart policy.

    Each `step()` is one outer round with the `.grad` of each parameter as pseudo-gradient (`twophase.shelf.base` has
    the equations). Restarts, state, param groups and reports are those of `OuterSGD`, of which a plain method without
    a filter, schedule or readout has the bits. A param group may override `method`, `filter`, `schedule`, `readout` and
    `restart`. Only under the schedule `constant` may a group give `lr` and `momentum`, or a scheduler of torch set
    them. Any other schedule sets them in every round, from those of the group's method.

    Args:
        params: parameters, named parameters, or param groups.
        outer: a value of `twophase.outer`, a method or its text form, or an `OuterRule`.
        restart: a policy of `twophase.restart`, its text form, or a period.
        signals: names of further values, as in `OuterSGD`.
        context: values that filters may read besides their tensors; an engine fills it in.

    Raises:
        ValueError: a value out of range; a restart without a first moment; a matrix method without a matrix; steps of a
            policy except with momentum SGD.

    >>> from twophase.shelf.outer import outer
    >>> x = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = OuterOptimizer([x], outer("adamw", lr=0.1), restart=2)
    >>> for _ in range(3):
    ...     x.grad = torch.full((1,), 0.5)
    ...     optimizer.step()
    >>> round(x.item(), 4)
    0.7
    """

    def __init__(
        self,
        params: Iterable[Any],
        outer: Outer | OuterRule | Method | str,
        restart: RestartPolicy | str | int = Never(),  # noqa: B008 - a frozen value
        *,
        signals: Collection[str] = (),
        context: Context = Context(),  # noqa: B008 - a frozen value
    ) -> None:
        self._default = as_outer(outer)
        self._parts_of_round: list[Part] | None = None
        self._along: float | None = None
        """<update, g> of the group's step under way."""
        self.context = context
        rule = parse_policy(restart).effective(self._default.rule()) if self._default.method.plain else None
        rule = rule or self._default.rule()
        super().__init__(
            params, rule.lr, rule.momentum, nesterov=rule.nesterov, form=rule.form, restart=restart, signals=signals
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its own `method`, `filter`, `schedule`, `readout` and `restart` override the defaults."""
        named = {slot: str(parse(slot, param_group[slot])) for slot in SLOTS if slot in param_group}
        numbers = asdict(parse("method", named["method"]).rule()) if "method" in named else {}
        group = dict.fromkeys(WEIGHTS, 0.0) | self._default.texts() | numbers | param_group | named
        dropped = [name for name in ("lr", "momentum") if name in param_group and group["schedule"] != "constant"]
        if dropped:
            raise ValueError(
                f"OuterOptimizer: a group has {' and '.join(dropped)} beside schedule {group['schedule']}, which "
                "begins at the numbers of the group's method. Write them there, such as "
                '"method": "heavy-ball:lr=0.1", or give the group "schedule": "constant"'
            )
        _check_restart({"restart": self.defaults["restart"], **group})  # before a remedy that not all methods can take
        super().add_param_group(group)
        try:
            check_slots(self.param_groups[-1], self.context)
        except ValueError:
            self.param_groups.pop()
            raise

    def take_place_in(self, context: Context) -> None:
        """Take an engine's context; raise a ValueError where a value needs whole matrices and has their shards."""
        self.context = context
        for group in self.param_groups:
            check_slots(group, context)

    # ------------------------------------------------------------------------------------------------- a round

    @torch.no_grad()
    def dots(self) -> list[Dots]:
        """Return `<g, g>`, `<m, m>` and `<g, m>` of each group that has a gradient, with g as the method sees it."""
        self._parts_of_round = None  # a repeated sync may have another sum
        return super().dots()

    @torch.no_grad()
    def step(self, closure: Any = None, *, measured: Any = None, **options: Any) -> Any:
        """Take one outer round; arguments as of `OuterSGD.step`."""
        if measured is None:
            self._parts_of_round = None
        try:
            # torch puts each class's step between its hooks: through super().step() they would run twice.
            return inspect.unwrap(OuterSGD.step)(self, closure, measured=measured, **options)
        finally:
            self._parts_of_round = None

    def _parts(self) -> list[Part]:
        if self._parts_of_round is None:
            self._parts_of_round = [self._filtered(part) for part in super()._parts()]
        return self._parts_of_round

    def _filtered(self, part: Part) -> Part:
        buffers = part.buffers
        if not method_of(part.group).plain:  # momentum 0 may be that of a method that keeps a buffer all the same
            buffers = [self.state.get(p, {}).get(FIRST) for p in part.params]
        gradients = filtered(filter_of_group(part.group), part.gradients, self.context)
        return part._replace(gradients=gradients, buffers=buffers)

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        _check_restart(group)

    def _schedule(self, group: dict[str, Any]) -> None:
        """Set a group's learning rate and momentum to those of its next round."""
        schedule: Schedule = parse("schedule", group["schedule"])
        if schedule.name != "constant":
            method, policy = method_of(group), parse_policy(group["restart"])
            rule = method.rule()
            if method.plain:  # these two may have come with the group, or with a state
                rule = policy.effective(replace(rule, nesterov=group["nesterov"], form=group["form"]))
            rule = schedule.at(rule, group["rounds"] + 1, group["rounds_since_restart"] + 1)
            group |= {"lr": rule.lr, "momentum": rule.momentum}

    def _step_group(self, part: Part, *arguments: Any, **options: Any) -> None:
        self._along = None
        self._schedule(part.group)
        super()._step_group(part, *arguments, **options)

    def _apply(self, part: Part, answer: Answer, sweep: Any) -> Dots | None:
        assert sweep is None  # it has the arithmetic of `OuterSGD` alone
        method = method_of(part.group)
        if method.plain:
            super()._apply(part, answer, None)
        else:
            self._take(method, part, answer)
        self._read_out(part)
        return None

    def _take(self, method: Method, part: Part, answer: Answer) -> None:
        """Take the update and the restart of a group whose method is not momentum SGD."""
        group, rule, restart = part.group, rule_of(part.group), answer.restart
        for x in group["params"] if not group["rounds"] else ():
            if x.grad is None:  # its state is of a rehearsal, perhaps from before the weights were loaded
                self.state.pop(x, None)
        weights = {name: group[name] for name in WEIGHTS}
        if restart is not None and restart.before:
            weights = restarted(method, restart, weights)
        weights = advance(method, rule, weights)
        round_ = Round(group["rounds"] + 1, rule, answer, weights)
        function, products = function_of(method), []
        for x, gradient in zip(part.params, part.gradients, strict=True):
            state, g = _completed(method, x, self.state[x]), gradient.to(buffer_dtype(x))
            average = state.pop(READOUT, None)  # no part of the state of torch's optimizer
            if restart is not None and restart.before:
                self._restart(method, state, g, restart)
            update = function(method, round_, x, g, state)
            products.append(dot(update, g))
            x.sub_(update)
            if restart is not None and not restart.before:
                self._restart(method, state, g, restart)
            if average is not None:
                state[READOUT] = average
        (self._along,) = self.context.total([float(torch.stack(products).double().sum())])
        if restart is not None and not restart.before:
            weights = restarted(method, restart, weights)
        group |= weights

    def _restart(self, method: Method, state: dict[str, Tensor], g: Tensor, restart: Restart) -> None:
        if FIRST in state:
            restart_([state[FIRST]], [g], restart)
        if resets_second(method) and SECOND in state:
            state[SECOND].copy_(new_buffer(method, SECOND, state[SECOND]))

    def _restart_resting(self, group: dict[str, Any], restart: Restart) -> None:
        if method_of(group).plain:
            super()._restart_resting(group, restart)
        else:
            for p in group["params"]:
                if p.grad is None and FIRST in (state := self.state.get(p, {})):
                    self._restart(method_of(group), state, state[FIRST], Restart(restart.retain))

    def _report(self, group: Mapping[str, Any], angles: Angles, answer: Answer) -> GroupRound:
        report = super()._report(group, angles, answer)
        if self._along is None:
            return report
        square = angles.pseudo_gradient_norm**2
        return replace(report, gain=self._along / square if square else math.nan)

    # ----------------------------------------------------------------------------------------------- the readout

    def _read_out(self, part: Part) -> None:
        readout: Readout = parse("readout", part.group["readout"])
        if readout.name == "last":
            return
        weight = readout.weight(part.group["rounds"] + 1)
        for x in part.group["params"]:
            # Frozen, it is its own average; an anchor may lack `requires_grad` and have gradients in other rounds.
            if x.grad is None and not x.requires_grad and READOUT not in self.state.get(x, {}):
                continue
            state = self.state[x]
            if weight == 1 or READOUT not in state:
                state[READOUT] = x.detach().to(buffer_dtype(x), copy=True)
            else:
                state[READOUT].lerp_(x.detach().to(state[READOUT].dtype), weight)

    def readout(self, x: Tensor) -> Tensor:
        """Return the tensor to evaluate in the place of a parameter: itself, or the average that its group keeps."""
        state = self.state.get(x, {})
        return state.get(READOUT, state.get(AVERAGE, x.detach()))

    @property
    def reads_out(self) -> bool:
        """True if any group is evaluated at another point than its parameters."""
        return any(group["readout"] != "last" or method_of(group).reads_out for group in self.param_groups)

    # -------------------------------------------------------------------------------------------------- the state

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        names = ("_default", "context", "_along", "_parts_of_round")
        return super().__getstate__() | {name: self.__dict__[name] for name in names}

    def _has_buffers(self, part: Part) -> bool:
        method = method_of(part.group)
        has = part.group["momentum"] != 0 if method.plain else bool(method.buffers)
        return has or part.group["readout"] != "last"

    def _rehearse(self, parts: Sequence[Part]) -> None:
        super()._rehearse(parts)
        for part in parts:
            method = method_of(part.group)
            round_ = Round(0, rule_of(part.group), Answer({}), {})
            for x, g in zip(part.params, part.gradients, strict=True) if not method.plain else ():
                state = _completed(method, x, self.state[x])
                if isinstance(method, TorchMethod):  # it makes new buffers in round 1
                    torch_step(method, round_, x, g.to(buffer_dtype(x)), state)
            self._read_out(part)

    def _check_loaded(self, groups: list[dict[str, Any]]) -> None:
        """Complete a state's groups, perhaps those of an `OuterSGD`; refuse values that do not fit here."""
        for group, current in zip(groups, self.param_groups, strict=False):
            if "method" not in group and not method_of(current).plain:
                raise ValueError(
                    f"OuterOptimizer: the loaded state is of momentum SGD, and this optimizer's method is "
                    f"{current['method']}; build it with the state's method, or start a new run"
                )
            if "method" not in group:  # what a schedule begins at
                group["method"] = str(as_outer(rule_of(group)).method)
            for name in (*SLOTS, *WEIGHTS):
                group.setdefault(name, current[name])
            check_slots({**group, "params": current["params"]}, self.context)


def outer_optimizer(
    params: Iterable[Any],
    outer: Outer | Method | OuterRule,
    restart: RestartPolicy | str | int,
    *,
    signals: Collection[str] = (),
    context: Context = Context(),  # noqa: B008 - a frozen value
) -> OuterSGD:
    """Return the optimizer of a value, an `OuterSGD` with its faster step where a rule says it all."""
    if isinstance(outer, OuterRule):
        return OuterSGD.from_rule(params, outer, restart, signals)
    return OuterOptimizer(params, outer, restart, signals=signals, context=context)


def _completed(method: Method, x: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a parameter's buffers; missing ones are made."""
    if not isinstance(method, TorchMethod):  # a torch optimizer makes its own
        for key in method.buffers:
            if key not in state:
                state[key] = new_buffer(method, key, x)
    return state


def method_of(group: Mapping[str, Any]) -> Method:
    """Return a group's method."""
    return parse("method", group["method"])


def filter_of_group(group: Mapping[str, Any]) -> Filter:
    """Return a group's filter."""
    return parse("filter", group["filter"])


def outer_of(group: Mapping[str, Any]) -> Outer:
    """Return the values of a group's slots; a group of an `OuterSGD` has its rule."""
    if "method" not in group:
        return as_outer(rule_of(group))
    return Outer(*(parse(slot, group[slot]) for slot in SLOTS))


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group's slots by their names in a run's configuration, a schedule's at its beginning."""
    rate = group.get("initial_lr", group["lr"])
    momentum = group.get("max_momentum", group["momentum"])  # of a scheduler that cycles it
    value = outer_of(group)
    if value.schedule.name != "constant":  # which writes into the group in every round
        rate, momentum = value.rule().lr, value.rule().momentum
    numbers = {"lr": float(rate), "momentum": momentum, "nesterov": group["nesterov"], "form": group["form"]}
    return {**numbers, "restart": str(group["restart"]), **value.unusual()}


def _check_restart(group: Mapping[str, Any]) -> None:
    """Refuse a restart policy that the group's method cannot serve."""
    value = outer_of(group)
    try:
        first_moment = first_moment_key(value.method) is not None
        value.check_restart(parse_policy(group["restart"]), first_moment=first_moment)
    except ValueError as error:
        raise ValueError(f"OuterOptimizer: {error}") from None


def check_slots(group: Mapping[str, Any], context: Context) -> None:
    """Refuse values that do not go together, or not with the group's parameters or surroundings."""
    value = outer_of(group)
    method = value.method
    if not method.plain:
        function_of(method)
    if not value.filter.linear:
        function_of_filter(value.filter)
    for part, real in ((method, not method.plain), (value.filter, not value.filter.linear)):
        if real and any(p.is_complex() for p in group["params"]):
            raise ValueError(
                f"OuterOptimizer: {part.slot} {part.name} takes real parameters, and one is complex; take method sgd "
                "without a filter"
            )
    _check_restart(group)
    try:
        value.schedule.at(value.rule(), 1, 1)
    except ValueError as error:
        raise ValueError(f"OuterOptimizer: {error}") from None
    for p in group["params"] if isinstance(method, TorchMethod) else ():
        try:
            torch_optimizer(method, [p.detach()])  # as in a round, each parameter by itself: some allocate their state
        except ValueError as error:  # not the arguments, with which the first moment was looked up
            raise ValueError(
                f"OuterOptimizer: method {method} refuses a parameter of shape {tuple(p.shape)} ({error.__cause__}). "
                "Give such parameters a group with another method, or take one for all shapes, such as adamw"
            ) from error
    if method.matrices or value.filter.matrices:
        whole = method if method.matrices else value.filter
        if context.sharded or any(getattr(p, "placements", ()) for p in group["params"]):
            raise ValueError(
                f"OuterOptimizer: {whole.slot} {whole.name} needs whole matrices, and the parameters are sharded; take "
                "a value that works on elements, such as adamw"
            )
        flat = [tuple(p.shape) for p in group["params"] if p.ndim < 2 and method.matrices]  # a filter leaves them
        has_rate = getattr(method, "rest", 1.0) != 0
        if flat and (len(flat) == len(group["params"]) or not has_rate):
            raise ValueError(
                f"OuterOptimizer: method {method.name} needs matrices, and a parameter has shape {flat[0]}; give such "
                "parameters a group with another method" + ("" if has_rate else ", or their rate (rest=0.7)")
            )
