"""Arms as text: what each tunes and fixes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from twophase.base.config import UsageError, with_values
from twophase.recipes.arms import ARMS, CONTROL, Arm, check_arm_options
from twophase.tasks.named import check, config_class
from twophase.training.config import RunConfig

GOOD: list[tuple[str, set[str], dict[str, Any]]] = [
    # text, tuned numbers beside the inner learning rate, values of its first run
    (CONTROL, set(), {"method": "averaging", "lr": None, "restart": "never"}),
    ("averaging:lr=~1", {"method.lr"}, {"method": "averaging", "lr": 1.0}),
    ("nesterov", {"method.lr", "method.momentum"}, {"method": "nesterov", "lr": 0.7, "momentum": 0.9}),
    ("nesterov@3", {"method.lr", "method.momentum"}, {"restart": "3"}),
    ("nesterov@K", {"method.lr", "method.momentum", "period"}, {"restart": "3"}),
    ("nesterov@soft:3:0.2:0.1", {"method.lr", "method.momentum"}, {"restart": "soft:3:0.2:0.1"}),
    ("nesterov:lr=0.5:momentum=0.8@3", set(), {"method": "nesterov", "lr": 0.5, "momentum": 0.8}),
    ("adamw", {"method.lr", "method.momentum"}, {"method": "adamw", "lr": 0.02, "momentum": 0.9}),
    ("muon:momentum=0.8@3", {"method.lr"}, {"method": "muon", "lr": 0.1, "momentum": 0.8}),
    ("auto", set(), {"method": "averaging", "restart": "auto"}),
    ("nesterov:momentum=~0.6", {"method.lr", "method.momentum"}, {"lr": 0.7, "momentum": 0.6}),
    ("heavy-ball:lr=~2:momentum=0.3", {"method.lr"}, {"lr": 2.0, "momentum": 0.3}),
    ("along:~0.5", {"policy.share"}, {"method": "averaging", "restart": "along:0.5"}),
    ("gain:2", set(), {"restart": "gain:2"}),
    ("auto+filter=clip:2", set(), {"restart": "auto", "filter": "clip:2"}),
    (
        "nesterov+schedule=linear:2+filter=orthogonal",
        {"method.lr", "method.momentum"},
        {"schedule": "linear:2", "filter": "orthogonal"},
    ),
]


def first(arm: Arm, base: RunConfig) -> RunConfig:
    """The configuration of the first run of an arm's search."""
    return arm.cell(base, {name: scale.start for name, scale in arm.scales.items()}, 7).config


@pytest.mark.parametrize(("text", "tuned", "values"), GOOD, ids=[text for text, *_ in GOOD])
def test_arms(text: str, tuned: set[str], values: dict[str, Any]) -> None:
    """An arm tunes what its text leaves open, fixes the rest, and its first run can be run."""
    base = config_class("digits")()
    arm = Arm(text, 0.004)
    assert set(arm.scales) == {"inner.lr"} | tuned
    config = check(first(arm, base))
    assert (config.inner.lr, config.seed) == (0.004, 7)
    for name, value in values.items():
        assert getattr(config.outer, name) == value
    numbers = {name: scale.value(1) for name, scale in arm.scales.items()}
    moved = check(arm.cell(base, numbers, 7).config)
    assert moved.inner.lr == 0.008
    assert ("period" in tuned) == (moved.outer.restart == "6")


BAD = (
    " @3 nesterv nesterov@ nesterov@0 nesterov@k nesterov@auto averaging@3 averaging@K averaging:momentum=0.5 "
    "auto@3 3 never memoryless nesterov:lr=0.7:lr=1 nesterov:rate=1 nesterov+ nesterov+lr=1 nesterov+filter "
    "nesterov+filter=clip nesterov+filter=clip:1+filter=clip:2 adamw:beta2=0.9 nesterov:momentum=~ "
    "nesterov:momentum=~2 along:~ nesterov@~3"
).split(" ")


@pytest.mark.parametrize("text", BAD)
def test_impossible_arms(text: str) -> None:
    """A text that cannot be read, and parts that would change nothing, are refused by the arm's name."""
    with pytest.raises(UsageError, match="--arms"):
        Arm(text, 0.002)


@pytest.mark.parametrize("policy", ["gradient", "3"])
def test_a_policy_of_a_rule_stands_behind_a_method(policy: str) -> None:
    """The remedy for a policy that needs a rule is an arm."""
    with pytest.raises(UsageError, match=rf"write it behind one, such as nesterov@{policy}$"):
        Arm(policy, 0.002)
    Arm(f"nesterov@{policy}", 0.002)


@pytest.mark.parametrize("path", ["outer.lr", "outer.restart", "outer.method", "sync.restart", "seed"])
def test_options_that_arms_have(path: str) -> None:
    """An option that would be looked at by no arm is refused; others are not."""
    check_arm_options(["inner.lr", "outer.filter", "steps"])
    with pytest.raises(UsageError, match=f"--{path}"):
        check_arm_options(["steps", path])


def test_restarts_of_fragments_in_a_file() -> None:
    """They would override the restart of every arm; an arm's own is that of all fragments."""
    base = with_values(config_class("digits")(), {"sync.fragments": ("2",), "sync.restart": ("0=2", "1=2")})
    config = first(Arm("nesterov@3", 0.002), base)
    assert (config.outer.restart, config.sync.restart) == ("3", ())


def test_the_control_is_plain() -> None:
    """What the base has in the other slots holds for all arms but the control, which is averaging."""
    slots = {"outer.filter": "orthogonal", "outer.schedule": "linear:2"}
    base = with_values(config_class("digits")(), slots)
    control, other = (first(Arm(text, 0.002), base).outer for text in (CONTROL, "nesterov"))
    assert (control.filter, control.schedule) == ("none", "constant")
    assert [getattr(other, path.removeprefix("outer.")) for path in slots] == list(slots.values())


def test_the_usual_arms() -> None:
    """What is compared without a word can be run, and the control is not among it."""
    for text in ARMS:
        check(first(Arm(text, 0.002), config_class("digits")()))
    assert CONTROL not in ARMS
