"""The policies and rules that tests run over, four of them made here, and an oracle of the outer iteration in NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from modules import load
from twophase.restart import Decision, Never, Restart, RestartPolicy, RoundSignal, Soft, State, Step, register
from twophase.rule import Form, OuterRule

load(Path(__file__).parents[1] / "experiments" / "policies.py")  # another module of this name


def convert(rule: OuterRule, policy: RestartPolicy, form: Form) -> tuple[OuterRule, Any]:
    """Rule and policy of the same trajectory in another form, whose buffer is `factor` times as large."""
    other, changed = rule.to(form), {Soft.name: "inject", "norm": "ratio"}.get(policy.name)
    factor = other.injection / rule.injection
    return other, replace(policy, **{changed: getattr(policy, changed) * factor}) if changed else policy  # type: ignore[type-var]


@register("test-shrink")
@dataclass(frozen=True)
class Shrink(RestartPolicy):
    """Shorten the buffer in every round, the more the larger the inner learning rate."""

    needs: ClassVar[frozenset[str]] = frozenset({"inner_lr"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        return state, Restart(1 / (1 + signal.value("inner_lr")), before=True)


@register("test-half")
@dataclass(frozen=True)
class Half(RestartPolicy):
    """Take half steps with a buffer that begins anew every `period` rounds: steps that are known in advance."""

    period: int
    takes_steps: ClassVar[bool] = True

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        return state, Step(0.5, 0.5 if (signal.round - 1) % self.period else 0.0)


@register("test-longer")
@dataclass(frozen=True)
class Longer(RestartPolicy):
    """Restart after `first` rounds, and from then on after one more each time: the period is a memory."""

    first: int

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        period = state.get("period", float(self.first))
        ends = signal.rounds_since_restart >= period
        return {"period": period + ends}, Restart() if ends else None


@register("test-rising")
@dataclass(frozen=True)
class Rising(RestartPolicy):
    """Restart when the loss that the caller supplies has risen since the round before."""

    retain: float
    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        loss = signal.value("loss")
        return {"last": loss}, Restart(self.retain, before=True) if loss > state.get("last", math.inf) else None


@register("test-early")
@dataclass(frozen=True, slots=True)
class Early(RestartPolicy):
    """A soft restart every `period` rounds, before the round's pseudo-gradient is mixed in."""

    period: int
    retain: float
    inject: float

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        return state, Restart(self.retain, self.inject, before=True) if signal.round % self.period == 0 else None


MODELLED = ("gradient", "norm:1.5", "auto", "gain:1", "ramp:0.5", "test-shrink", "test-half:3", "test-longer:3")
"""What the theory's model can tell as well."""
SCHEDULED = ("3", "cycle:2,3,1", "at:4,9", "soft:3:0.2:0.1", "soft:2:-0.3:0.6")
ALL = (*SCHEDULED, *MODELLED, "test-rising:0.0", "test-rising:0.5")

RULES = [
    OuterRule(0.1 if form == "sum" else 1.0, 0.9, nesterov, form)
    for nesterov in (False, True)
    for form in ("sum", "ema")
]
each_rule = pytest.mark.parametrize("rule", RULES, ids=OuterRule.describe)
NEVER = Never()


class Oracle:
    """The outer iteration in NumPy and float64, everything copied, with the equations that `twophase.rule` prints.

    `seen` holds norms of g and m and their cosine in the last round, and the gain `<update, g> / <g, g>`.
    """

    def __init__(self, rule: OuterRule, policy: RestartPolicy = NEVER, x: Any = 0.0) -> None:
        self.rule, self.policy = rule, policy
        self.x = np.array(x, dtype=np.float64)
        self.m = np.zeros_like(self.x)
        self.memory: State = {}
        self.rounds = self.age = self.restarts = 0
        self.seen: list[float] = []

    def round(self, g: Any, **extra: float) -> None:
        """Take an outer round with pseudo-gradient g; `extra` is what else the policy is shown."""
        g, b, lr, old, before = np.asarray(g, dtype=np.float64), self.rule.momentum, self.rule.lr, self.m, self.x
        norms = float(np.linalg.norm(g)), float(np.linalg.norm(old))
        cosine = float((g * old).sum()) / math.prod(norms) if all(norms) else 0.0
        self.rounds, self.age = self.rounds + 1, self.age + 1
        signal = RoundSignal(self.rounds, self.age, *norms, cosine, extra)
        self.memory, decision = self.policy.decide(dict(self.memory), signal)
        restart = decision if isinstance(decision, Restart) else None
        if restart and restart.before:
            old = restart.retain * old + restart.inject * g
        if isinstance(decision, Step):
            self.m = decision.momentum * old + g
            self.x = before - decision.lr * self.m
        elif self.rule.form == "sum":
            self.m = b * old + g
            self.x = before - lr * (g + b * self.m if self.rule.nesterov else self.m)
        else:
            self.m = b * old + (1 - b) * g
            self.x = before - lr * ((1 + b) * self.m - b * old if self.rule.nesterov else self.m)
        if restart and not restart.before:
            self.m = restart.retain * self.m + restart.inject * g
        if restart:
            self.age, self.restarts = int(restart.before), self.restarts + 1
        self.seen = [*norms, cosine, float(((before - self.x) * g).sum()) / norms[0] ** 2 if norms[0] else math.nan]


def simulate(
    rule: OuterRule, gradients: Iterable[float], policy: RestartPolicy = NEVER, x: float = 0.0
) -> list[tuple[float, float]]:
    """(x, m) after each round on one number."""
    oracle, places = Oracle(rule, policy, x), []
    for g in gradients:
        oracle.round(g)
        places.append((float(oracle.x), float(oracle.m)))
    return places
