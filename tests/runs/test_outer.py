"""What a configuration's `outer` stands for: rules and numbers."""

from __future__ import annotations

from twophase.optim.names import NAMES, RULES
from twophase.rule import OuterRule
from twophase.runs.config import OuterConfig, options_of


def test_the_table() -> None:
    """Names with their own numbers; given ones replace them; a rule's options are its own."""
    table = {"averaging": (1, 0), "heavy-ball": (0.7, 0.9), "nesterov": (0.7, 0.9)}
    table |= {"adamw": (0.02, 0.9), "muon": (0.1, 0.9)}
    assert {name: tuple(OuterConfig(name).numbers().values()) for name in NAMES} == table
    assert OuterConfig("adamw", lr=3).numbers() == {"lr": 3.0, "momentum": 0.9}
    assert OuterConfig("own.py:make", lr=3).numbers() == {}
    assert OuterConfig("nesterov", 0.5, 0.8, "ema").rule() == OuterRule(0.5, 0.8, nesterov=True, form="ema")
    assert OuterConfig("adamw").rule() is OuterConfig("own.py:make").rule() is None
    for rule in (*RULES.values(), OuterRule(0.3, 0.5, form="ema"), OuterRule(1.3, 0.0)):
        assert OuterConfig(**options_of(rule)).rule() == rule
