"""The one change that `diagnose` ends with: which, and for which run."""

from __future__ import annotations

from typing import Any

import pytest

from twophase.advice import change as house
from twophase.advice.change import change
from twophase.rule import Form, OuterRule
from twophase.runs.config import options_of

NESTEROV = OuterRule(0.7, 0.9, nesterov=True)
AVERAGING = {"outer.method": "averaging", "outer.lr": None, "outer.momentum": None, "outer.restart": "never"}
CASES: dict[str, tuple[OuterRule, dict[str, Any], str, dict[str, Any]]] = {
    "too large a momentum": (NESTEROV, {}, "cannot tell", AVERAGING),
    "the same with restarts": (NESTEROV, {"outer.restart": "5"}, "held", AVERAGING),
    "a small step": (OuterRule(1.0, 0.3), {}, "lags", {}),
    "a small gain": (OuterRule(0.7, 0.9, form="ema"), {}, "lags", AVERAGING),
    "averaging that diverges": (OuterRule(1.0, 0.0), {}, "diverges", {}),
    "a larger step without momentum": (OuterRule(1.1, 0.0), {}, "cannot tell", {"outer.filter": "orthogonal"}),
    "diverges": (NESTEROV, {}, "diverges", {"outer.lr": 0.35}),
    "diverges with restarts": (NESTEROV, {"outer.restart": "2"}, "diverges", {"outer.lr": 0.35}),
    "averaging under a cosine": (OuterRule(1.0, 0.0), {}, "cannot tell", {"outer.filter": "orthogonal"}),
    "averaging with inner Muon": (OuterRule(1.0, 0.0), {"inner.method": "muon"}, "cannot tell", {}),
    "no momentum, a large lr": (OuterRule(2.5, 0.0), {}, "cannot tell", {"outer.lr": 1.0}),
    "no momentum, a small lr": (OuterRule(0.5, 0.0), {}, "cannot tell", {"outer.lr": 1.0}),
    "auto": (OuterRule(1.0, 0.5), {"outer.restart": "auto"}, "cannot tell", {}),
    "restarts of fragments": (NESTEROV, {"sync.restart": ["head=3", "rest=never"]}, "held", {}),
    "a policy from elsewhere": (NESTEROV, {"outer.restart": "theirs:3"}, "held", {}),
    "auto that diverges": (OuterRule(1.0, 0.5), {"outer.restart": "auto"}, "diverges", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_which_change(case: str) -> None:
    """Averaging where the gain is large, the filter beside averaging, half the rate after divergence, else none."""
    rule, config, verdict, values = CASES[case]
    advised = change(rule, [verdict], 60, config)
    assert advised is not None
    assert dict(advised.values) == values
    assert advised.words.endswith("without restarts.") == (case == "diverges with restarts")  # these may be the cause
    assert bool(advised.command("runs/one", config)) == bool(values)


def test_a_rising_rate_where_the_map_of_regimes_says_so() -> None:
    """Averaging gets a rising rate beyond the limit."""
    rule, config = OuterRule(1.0, 0.0), {"inner.schedule": "wsd"}
    beyond, below = (change(rule, ["cannot tell"], 60, config, house.RISING + d) for d in (0.01, -0.01))
    assert beyond is not None
    assert below is not None
    assert dict(beyond.values) == {"outer.schedule": "linear:2"}
    larger = change(OuterRule(1.5, 0.0), ["cannot tell"], 60, config, house.RISING + 0.01)
    assert larger is not None
    assert dict(larger.values) == {"outer.schedule": "linear:2", "outer.lr": 1.0}  # from 1 to 2, as it says
    assert dict(below.values) == {"outer.filter": "orthogonal"}


def test_nothing_is_said_of_little() -> None:
    """A run of a few rounds, or without a known rule, has no change."""
    assert change(NESTEROV, ["cannot tell"], 7, {}) is None
    assert change(None, ["cannot tell"], 60, {}) is None


def test_a_plan_without_end_is_answered_at_once() -> None:
    """A run is stopped by hand; its plan may be longer than a loop over its rounds would take."""
    advised = change(NESTEROV, ["cannot tell"], 60, {"outer.restart": "5"}, planned=1 << 53)
    assert advised is not None
    assert dict(advised.values) == AVERAGING


def test_the_command_makes_the_changed_run() -> None:
    """The command takes the run's own configuration and changes these values; a recorded loop gets a line of code."""
    advised = change(NESTEROV, ["cannot tell"], 60, {})
    assert advised is not None
    command = advised.command("runs/one", {})
    assert "--config runs/one/config.yaml" in command
    assert "--outer.method averaging --outer.lr none --outer.momentum none" in command
    assert "--config 'runs/a b/config.yaml'" in advised.command("runs/a b", {})
    assert advised.command("runs/one", {"recorded": True}).endswith("OuterRule(lr=1, momentum=0)")


@pytest.mark.parametrize("form", ["sum", "ema"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("verdict", "lr", "momentum"), [("diverges", 0.6, 0.9), ("cannot tell", 1.0, 0.0)])
def test_the_code_makes_the_changed_rule(verdict: str, lr: float, momentum: float, nesterov: bool, form: Form) -> None:
    """The line for a recorded loop is the changed rule in the run's own form, with Nesterov momentum if it had that."""
    rule = OuterRule(1.2 if momentum else 12.0 if form == "ema" else 1.2, 0.9, nesterov, form)
    config = {"recorded": True, **{f"outer.{name}": value for name, value in options_of(rule).items()}}
    advised = change(rule, [verdict], 60, config)
    assert advised is not None
    code = advised.command("runs/one", config).removeprefix("in your loop: ")
    printed = eval(code, {"OuterRule": OuterRule})  # noqa: S307 - what a reader would do with it
    assert printed == OuterRule(lr, momentum, nesterov and momentum > 0, form if momentum else "sum")
