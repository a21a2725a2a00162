"""The policies and rules that tests run over, four of them made here; one number under a rule; answers to rounds."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from twophase.policies.base import Decision
from twophase.restart import (
    MEASURED,
    Answer,
    Never,
    Restart,
    RestartPolicy,
    RoundSignal,
    State,
    Step,
    ask,
    parse,
    register,
)
from twophase.rule import OuterRule

# those of the experiments, which are another module `policies`
_SPEC = importlib.util.spec_from_file_location(
    "experiment_policies", Path(__file__).parents[1] / "experiments" / "policies.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
OF_EXPERIMENTS = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = OF_EXPERIMENTS
_SPEC.loader.exec_module(OF_EXPERIMENTS)


@register("test-shrink")
@dataclass(frozen=True, slots=True)
class Shrink(RestartPolicy):
    """Shorten the buffer in every round, the more the larger the inner learning rate."""

    needs: ClassVar[frozenset[str]] = frozenset({"inner_lr"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Rescale before the mixing."""
        return state, Restart(1 / (1 + signal.value("inner_lr")), before=True)


@register("test-half")
@dataclass(frozen=True, slots=True)
class Half(RestartPolicy):
    """Take half of the rule's own step, and restart every `period` rounds: steps that are known in advance."""

    period: int

    takes_steps: ClassVar[bool] = True

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Answer with a step, and in the last round of a cycle with a restart that brings it."""
        assert signal.rule is not None
        step = Step.of(replace(signal.rule, lr=signal.rule.lr / 2))
        return state, Restart(step=step) if signal.round % self.period == 0 else step


@register("test-longer")
@dataclass(frozen=True, slots=True)
class Longer(RestartPolicy):
    """Restart after `first` rounds, and from then on after one more each time: the period is a memory."""

    first: int

    def initial_state(self) -> State:
        """Return the first period."""
        return {"period": float(self.first)}

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart at the end of the cycle."""
        if signal.rounds_since_restart < state["period"]:
            return state, None
        return {"period": state["period"] + 1}, Restart()


@register("test-rising")
@dataclass(frozen=True, slots=True)
class Rising(RestartPolicy):
    """Restart when the loss that the caller supplies has risen since the round before."""

    retain: float

    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart before the mixing."""
        loss = signal.value("loss")
        return {"last": loss}, Restart(self.retain, before=True) if loss > state.get("last", math.inf) else None


MEASURING = ("gradient", "norm:1.5", "auto", "gain:1")
TOLD = ("ramp:0.5", "test-shrink")
"""What the theory's model can tell as well."""
SUPPLIED = ("test-rising:0.0", "test-rising:0.5", *TOLD)
ALL = (*MEASURING, *SUPPLIED, "test-half:3", "test-longer:3")
MODELLED = (*MEASURING, *TOLD, "test-half:3", "test-longer:3")
SCHEDULED = ("3", "cycle:2,3,1", "at:4,9", "soft:3:0.2:0.1", "soft:2:-0.3:0.6")

SUM, EMA = OuterRule(0.1, 0.9), OuterRule(1.0, 0.9, form="ema")
RULES = [OuterRule(rule.lr, 0.9, nesterov, rule.form) for nesterov in (False, True) for rule in (SUM, EMA)]
each_rule = pytest.mark.parametrize("rule", RULES, ids=OuterRule.describe)


NEVER = Never()


def simulate(
    rule: OuterRule, gradients: Sequence[float], policy: RestartPolicy = NEVER, x: float = 0.0
) -> list[tuple[float, float]]:
    """(x, m) after each round on one number: the equations of house.md under a policy that needs no measurement."""
    b, m, age, state, places = rule.momentum, 0.0, 0, policy.initial_state(), []
    for number, g in enumerate(gradients, start=1):
        answer = ask(policy, state, RoundSignal(number, age + 1))
        state, age, restart = answer.state, answer.age(age + 1), answer.restart
        if restart and restart.before:
            m = restart.retain * m + restart.inject * g
        old = m
        if rule.form == "sum":
            m = b * old + g
            x = x - rule.lr * (g + b * m) if rule.nesterov else x - rule.lr * m
        else:
            m = b * old + (1 - b) * g
            x = x - rule.lr * ((1 + b) * m - b * old) if rule.nesterov else x - rule.lr * m
        if restart and not restart.before:
            m = restart.retain * m + restart.inject * g
        places.append((x, m))
    return places


def asked(text: str, rows: Sequence[Mapping[str, Any]], rule: OuterRule = SUM) -> list[Answer]:
    """The answers to rounds of which each row is what is measured and supplied.

    The memory goes through JSON between the rounds, as it does where a run is saved after every one of them.
    """
    policy = parse(text)
    state, age, answers = policy.initial_state(), 0, []
    for number, row in enumerate(rows, start=1):
        measured = {name: value for name, value in row.items() if name in MEASURED}
        extra = {name: value for name, value in row.items() if name not in measured}
        answer = ask(policy, state, RoundSignal(number, age + 1, **measured, extra=extra, rule=rule))
        state, age = json.loads(json.dumps(answer.state)), answer.age(age + 1)
        answers.append(answer)
    return answers


def fired(answers: Sequence[Answer]) -> list[int]:
    """The rounds, from 1, that began a new cycle."""
    return [number for number, answer in enumerate(answers, start=1) if answer.restarted]


def columns(names: str, *rows: Any) -> list[dict[str, Any]]:
    """Rounds that show a value of each name."""
    return [dict(zip(names.split(), row if " " in names else [row], strict=True)) for row in rows]
