"""Compute outer optimizers of the shelf on arrays, where they are linear in the pseudo-gradients, for `rollout`.

Schedules, filters and readouts need nothing here: their values hold the numbers. `@step_of(GPA)` registers the
arithmetic of a method that is not momentum SGD.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.policies.base import RestartPolicy
from twophase.rule import OuterRule
from twophase.shelf.base import SLOTS, Method
from twophase.shelf.methods import GPA, DelayedNesterov, ScheduleFree
from twophase.shelf.outer import Outer, as_outer
from twophase.shelf.text import registered
from twophase.theory.inputs import Floats

State = dict[str, Floats]
"""State vectors besides x and m, by name; a method evaluates `average` in the place of x."""


@dataclass(frozen=True, slots=True)
class Round:
    """Hold the round that a method's arithmetic sees, rows for trajectories.

    Args:
        number: number of the round, from 1.
        lr, momentum, injection: numbers of its rule, after the schedule, shape (rows, 1).
        x: the anchor, shape (rows, modes).
        g: the pseudo-gradient behind the filter.
        m: the first moment.
    """

    number: int
    lr: Floats
    momentum: Floats
    injection: Floats
    x: Floats
    g: Floats
    m: Floats


Step = Callable[[Any, Round, State], tuple[Floats, Floats]]
_STEPS: dict[type[Method], Step] = {}


def step_of(*methods: type[Method]) -> Callable[[Step], Step]:
    """Register the function of some methods: (method, round, state) to the new m and the update; a decorator."""

    def add(function: Step) -> Step:
        _STEPS.update(dict.fromkeys(methods, function))
        return function

    return add


def momentum_sgd(now: Round, nesterov: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the new m and the update of a rule."""
    m = now.momentum * now.m + now.injection * now.g
    return m, now.lr * np.where(nesterov, now.momentum * m + now.injection * now.g, m)


@step_of(DelayedNesterov)
def _delayed_nesterov(method: DelayedNesterov, now: Round, state: State) -> tuple[Floats, Floats]:
    n, share, m = method.every, method.share, now.m
    pending = state.get("pending", 0.0) + now.g
    if now.number % n == 0:
        m, pending = now.momentum * m + now.injection * pending / n, np.zeros_like(pending)
        share = 1 - (n - 1) * share
    state["pending"] = pending
    return m, now.lr * (share * now.momentum * m + now.g / n)


@step_of(GPA, ScheduleFree)
def _averages(method: GPA | ScheduleFree, now: Round, state: State) -> tuple[Floats, Floats]:
    z = state["iterate"] = state.get("iterate", now.x) - now.lr * now.g
    retained, share = (
        (method.mu_x, method.mu_y) if isinstance(method, GPA) else ((now.number - 1) / now.number, method.beta)
    )
    average = state["average"] = retained * state.get("average", now.x) + (1 - retained) * z
    return now.m, now.x - (share * average + (1 - share) * z)


class LinearOuter:
    """Hold an outer optimizer of the shelf and its state vectors over a rollout.

    Args:
        where: the caller, for messages.
        value: a method, or a value of `twophase.outer`.
        policy: its restart policy.
        rounds: rounds of the rollout, the length of a schedule that names none.

    Raises:
        ValueError: a value that is not linear, or a policy that the method cannot serve.
    """

    def __init__(self, where: str, value: Outer | Method, policy: RestartPolicy, rounds: int) -> None:
        outer = as_outer(value)
        refused = next((part for part in (getattr(outer, slot) for slot in SLOTS) if not part.linear), None)
        if refused is not None:
            inside = ", ".join(name for name, kind in registered(refused.slot).items() if kind.linear)
            raise ValueError(
                f"{where}: {refused.slot} {refused} is not linear in the pseudo-gradients and lies outside the linear "
                f"theory; inside lie {inside}"
            )
        if not outer.method.plain and type(outer.method) not in _STEPS:
            raise ValueError(
                f"{where}: method {outer.method.name} has no arithmetic here; register it with "
                f"@twophase.theory.outer.step_of({type(outer.method).__name__})"
            )
        try:
            outer.check_restart(policy, first_moment=outer.method.first_moment)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        self.value = replace(outer, schedule=outer.schedule.over(rounds))
        self.rule: OuterRule = outer.rule() if not outer.method.plain else policy.effective(outer.rule())
        """Before its schedule."""
        self.factor = outer.filter.factor(0.0)
        """Of the pseudo-gradient, which is applied in the round that it is from."""
        self.keeps_buffer = not outer.method.plain
        """True for a method with a buffer at momentum 0, too."""
        self._state: State = {}
        self._averages: list[Floats] = []

    def step(self, now: Round, nesterov: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Return the new m and the update of a round."""
        method = self.value.method
        if method.plain:
            return momentum_sgd(now, nesterov)
        m, update = _STEPS[type(method)](method, now, self._state)
        if method.reads_out:
            self._averages.append(self._state["average"])
        return m, update

    def readouts(self, x: Floats) -> Floats:
        """Return what is evaluated before the first round and after each, where the anchors are x."""
        if self.value.method.reads_out:
            return np.stack([x[0], *self._averages])
        if self.value.readout.name == "last":
            return x
        values = x.copy()
        for number in range(2, len(x)):
            weight = self.value.readout.weight(number)
            values[number] = (
                x[number] if weight == 1 else values[number - 1] + weight * (x[number] - values[number - 1])
            )
        return values
