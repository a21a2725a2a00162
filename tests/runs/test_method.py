"""What a configuration's `outer` stands for: rules, numbers, a line for people, refusals."""

from __future__ import annotations

import pytest

from twophase.optim.names import NAMES, RULES
from twophase.rule import OuterRule
from twophase.runs.method import describe, is_function, numbers_of, options_of, rule_of


def test_the_table():
    """Names with their own numbers; given ones replace them; a rule's options are its own."""
    table = {"averaging": (1, 0), "heavy-ball": (0.7, 0.9), "nesterov": (0.7, 0.9)}
    table |= {"adamw": (0.02, 0.9), "muon": (0.1, 0.9)}
    assert {name: tuple(numbers_of({"method": name}).values()) for name in NAMES} == table
    assert numbers_of({"method": "adamw", "lr": 3, "momentum": None}) == {"lr": 3.0, "momentum": 0.9}
    assert numbers_of({"method": "own.py:make", "lr": 3}) == {}
    assert rule_of("nesterov", 0.5, 0.8, "ema") == OuterRule(0.5, 0.8, nesterov=True, form="ema")
    assert (rule_of("adamw"), rule_of("own.py:make"), is_function("muon")) == (None, None, False)
    for rule in (*RULES.values(), OuterRule(0.3, 0.5, form="ema"), OuterRule(1.3, 0.0)):
        assert rule_of(**options_of(rule)) == rule
    for word, arguments in {"method": ("adam",), "lr": ("nesterov", -1.0)}.items():
        with pytest.raises(ValueError, match=word):
            rule_of(*arguments)


def test_a_line_for_people():
    """It names method, numbers, form, and what is not usual."""
    for words, options in {
        "averaging 0.5": {"method": "averaging", "lr": 0.5, "momentum": 0.9},
        "Nesterov EMA": {"method": "nesterov", "form": "ema"},
        "adamw 0.02 clip:1 linear:2": {"method": "adamw", "filter": "clip:1", "schedule": "linear:2"},
        "own.py:make": {"method": "own.py:make", "filter": "none"},
    }.items():
        assert all(word in describe(options) for word in words.split())
        assert "none" not in describe(options)
