"""Arms as text: what each tunes and fixes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from twophase.base.config import UsageError, with_values
from twophase.recipes.arms import ARMS, CONTROL, Arm, check_arm_options
from twophase.tasks.named import check, config_class
from twophase.training.config import RunConfig

GOOD: list[tuple[str, set[str], dict[str, Any]]] = [
    # text, tuned numbers beside the inner learning rate, beginnings of values of its first run
    (CONTROL, set(), {"method": "averaging", "restart": "never"}),
    ("memoryless", {"method.lr"}, {"method": "memoryless:lr="}),
    ("nesterov", {"method.lr", "method.momentum"}, {"method": "nesterov:lr="}),
    ("nesterov@3", {"method.lr", "method.momentum"}, {"restart": "3"}),
    ("nesterov@K", {"method.lr", "method.momentum", "period"}, {"restart": "3"}),
    ("nesterov@soft:3:0.2:0.1", {"method.lr", "method.momentum"}, {"restart": "soft:3:0.2:0.1"}),
    ("nesterov:lr=0.5:momentum=0.8@3", set(), {"method": "nesterov:lr=0.5:momentum=0.8"}),
    ("adamw:beta2=0.95", {"method.lr", "method.momentum"}, {"method": "adamw:beta2=0.95:lr="}),
    ("fedadagrad", {"method.lr"}, {"method": "fedadagrad:lr="}),
    ("gpa", {"method.lr", "method.mu_x"}, {"method": "gpa:lr="}),
    ("schedule-free", {"method.lr", "method.beta"}, {"method": "schedule-free:lr="}),
    ("torch:optimizer=Adagrad:options=lr=0.1", set(), {"method": "torch:optimizer=Adagrad:options=lr=0.1"}),
    ("auto", set(), {"method": "sgd", "restart": "auto"}),
    ("nesterov:momentum=~0.6", {"method.lr", "method.momentum"}, {"method": "nesterov:lr=0.7:momentum=0.6"}),
    ("heavy-ball:lr=~2:momentum=0.3", {"method.lr"}, {"method": "heavy-ball:momentum=0.3:lr=2"}),
    ("along:~0.5", {"policy.share"}, {"method": "sgd", "restart": "along:0.5"}),
    ("gain:2", set(), {"restart": "gain:2"}),
    ("auto+readout=tail:rounds=4", set(), {"restart": "auto", "readout": "tail:rounds=4"}),
    (
        "nesterov+schedule=cosine+filter=clip:norm=2",
        {"method.lr", "method.momentum"},
        {"schedule": "cosine:", "filter": "clip:norm=2"},
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
        assert getattr(config.outer, name).startswith(value)
    numbers = {name: scale.value(1) for name, scale in arm.scales.items()}
    moved = check(arm.cell(base, numbers, 7).config)
    assert moved.inner.lr == 0.008
    assert ("period" in tuned) == (moved.outer.restart == "6")


BAD = (
    " @3 nesterv nesterov@ nesterov@0 nesterov@k nesterov@auto memoryless@3 gpa@3 averaging@K auto@3 3 never loss "
    "torch:optimizer=Adagrad:options=lr=0.1@3 fedadagrad@3 nesterov:lr=0.7:lr=1 nesterov:rate=1 nesterov+ "
    "nesterov+lr=1 nesterov+readout nesterov+readout=tial nesterov+readout=tail+readout=ema adamw:beta2=~0.9 "
    "nesterov:momentum=~ nesterov:momentum=~2 along:~ nesterov@~3"
).split(" ")


@pytest.mark.parametrize("text", BAD)
def test_impossible_arms(text: str) -> None:
    """A text that cannot be read, and parts that would change nothing, are refused by the arm's name."""
    with pytest.raises(UsageError, match="--arms"):
        Arm(text, 0.002)


@pytest.mark.parametrize("policy", ["loss", "3"])
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
    slots = {"outer.filter": "orthogonal", "outer.schedule": "linear:final=2", "outer.readout": "ema"}
    base = with_values(config_class("digits")(), slots)
    control, other = (first(Arm(text, 0.002), base).outer for text in (CONTROL, "nesterov"))
    assert [getattr(control, slot) for slot in ("filter", "schedule", "readout")] == ["none", "constant", "last"]
    assert [getattr(other, path.removeprefix("outer.")) for path in slots] == list(slots.values())


def test_the_usual_arms() -> None:
    """What is compared without a word can be run, and the control is not among it."""
    for text in ARMS:
        check(first(Arm(text, 0.002), config_class("digits")()))
    assert CONTROL not in ARMS
