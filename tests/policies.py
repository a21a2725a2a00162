"""The adaptive restart policies and those that they must beat, and what asking them round by round answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from twophase.restart import MEASURED, PROBES, Answer, RoundSignal, ask, parse
from twophase.rule import OuterRule

MEASURING = (
    "gradient",
    "cosine:0.2",
    "norm:1.5",
    "speed",
    "opposed",
    "tracked",
    "tracked:5",
    "cap:0.15",
    "bound:1.5",
    "auto",
)
SUPPLIED = ("loss:0.0", "loss:0.5", "slowmo", "lookahead:0.1:0.25")
SCHEDULED = ("reseed:3", "debiased:0", "debiased:3")
PROBING = ("probe:keep,average", "probe:keep,drop,average", "probe:drop,half,fresh,1.3")
ALL = tuple(text + ":3" * (text == "tracked") for text in (*MEASURING, *SUPPLIED, *SCHEDULED, *PROBING))

SUM, EMA = OuterRule(0.1, 0.9), OuterRule(1.0, 0.9, form="ema")
RULES = [OuterRule(rule.lr, 0.9, nesterov, rule.form) for nesterov in (False, True) for rule in (SUM, EMA)]
each_rule = pytest.mark.parametrize("rule", RULES, ids=OuterRule.describe)


def asked(text: str, rows: Sequence[Mapping[str, Any]], rule: OuterRule = SUM) -> list[Answer]:
    """The answers to rounds of which each row is what is measured and supplied.

    The memory goes through JSON between the rounds, as it does where a run is saved after every one of them.
    """
    policy = parse(text)
    state, age, found = policy.initial_state(), 0, []
    for number, row in enumerate(rows, start=1):
        measured = {name: value for name, value in row.items() if name in MEASURED | {PROBES}}
        extra = {name: value for name, value in row.items() if name not in measured}
        answer = ask(policy, state, RoundSignal(number, age + 1, **measured, extra=extra, rule=rule))
        state, age = json.loads(json.dumps(answer.state)), answer.age(age + 1)
        found.append(answer)
    return found


def fired(answers: Sequence[Answer]) -> list[int]:
    """The rounds, from 1, that began a new cycle."""
    return [number for number, answer in enumerate(answers, start=1) if answer.restarted]


def column(name: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    """Rounds that show one value each."""
    return [{name: value} for value in values]
