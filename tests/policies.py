"""The policies and rules that tests run over, one number under a rule, and what asking round by round answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from twophase.restart import MEASURED, PROBES, Answer, Never, RestartPolicy, RoundSignal, ask, parse
from twophase.rule import OuterRule

MEASURING = (
    *("gradient", "cosine:0.2", "norm:1.5", "speed", "opposed", "tracked", "tracked:5", "cap:0.15", "bound:1.5"),
    "auto",
)
SUPPLIED = ("loss:0.0", "loss:0.5", "slowmo", "lookahead:0.1:0.25")
PROBING = ("probe:keep,average", "probe:keep,drop,average", "probe:drop,half,fresh,1.3")
ALL = tuple(
    text + ":3" * (text == "tracked")
    for text in (*MEASURING, *SUPPLIED, "reseed:3", "debiased:0", "debiased:3", *PROBING)
)
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
        measured = {name: value for name, value in row.items() if name in MEASURED | {PROBES}}
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
