"""Methods as text: what each tunes and fixes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from twophase.config import get
from twophase.errors import UsageError
from twophase.runs.config import InnerConfig
from twophase.tasks.registry import config_class
from twophase.tuning.methods import Method, read_method

LR, MOMENTUM = "outer.lr", "outer.momentum"
GOOD: list[tuple[str, set[str], dict[str, Any]]] = [
    # text, tuned beside the inner learning rate, values of its first run
    ("averaging", set(), {"outer.method": "averaging", LR: None, "outer.restart": "never"}),
    ("averaging outer.filter=orthogonal", set(), {"outer.filter": "orthogonal"}),
    ("averaging inner.method=muon", set(), {"inner.method": "muon", "inner.lr": 0.004}),
    ("averaging outer.lr=~1 outer.schedule=linear:2", {LR}, {LR: 1.0, "outer.schedule": "linear:2"}),
    ("nesterov", {LR, MOMENTUM}, {LR: 0.7, MOMENTUM: 0.9}),
    ("nesterov outer.restart=3 inner.lr=~0.02", {LR, MOMENTUM}, {"outer.restart": "3", "inner.lr": 0.02}),
    ("nesterov outer.restart=K", {LR, MOMENTUM, "outer.restart"}, {"outer.restart": "3"}),
    ("nesterov outer.restart=soft:3:0.2:0.1", {LR, MOMENTUM}, {"outer.restart": "soft:3:0.2:0.1"}),
    ("averaging outer.restart=ramp:~0.5", {"outer.restart"}, {"outer.restart": "ramp:0.5"}),  # a part of a text
    ("nesterov outer.lr=0.5 outer.momentum=~0.6", {MOMENTUM}, {LR: 0.5, MOMENTUM: 0.6}),
    ("adamw", {LR, MOMENTUM}, {LR: 0.02, MOMENTUM: 0.9}),
    ("nesterov outer.restart=auto", set(), {"outer.restart": "auto"}),
    ("averaging outer.restart=K", set(), {"outer.restart": "3"}),
    ("nesterov sync.delay=1 inner-steps=4", {LR, MOMENTUM}, {"sync.delay": 1, "inner_steps": 4}),
]


def method_of(text: str) -> Method:
    return read_method(text, config_class("digits")(inner=InnerConfig(lr=0.004)))


@pytest.mark.parametrize(("text", "tuned", "values"), GOOD, ids=[text for text, *_ in GOOD])
def test_what_a_method_tunes(text: str, tuned: set[str], values: dict[str, Any]) -> None:
    """A method tunes what its text leaves open, fixes the rest, and begins at the values that are the usual ones."""
    method = method_of(text)
    assert set(method.scales) == {"inner.lr"} | tuned
    config = method.config(method.start, seed=7)
    assert config.seed == 7
    assert {path: get(config, path) for path in values} == values
    ends = method.config(tuple(scale.high for scale in method.scales.values()))
    assert get(ends, "inner.lr") == pytest.approx(16 * config.inner.lr)
    for path in tuned - {"outer.restart"}:
        assert get(ends, path) > get(config, path)
    assert MOMENTUM not in tuned or get(ends, MOMENTUM) < 1


BAD = (
    "",
    "nesterv",
    "nesterov outer.lrr=1",
    "nesterov outer.lr=~0",
    "nesterov outer.restart=~never",
    "nesterov outer.momentum=~2",
    "nesterov outer.lr=1 outer.lr=2",
    "nesterov seed=3",
)


@pytest.mark.parametrize("text", BAD)
def test_methods_that_cannot_be(text: str) -> None:
    """A text that cannot be read, and a value out of its range, are refused by the option's name."""
    with pytest.raises(UsageError, match="--methods"):
        method_of(text)
