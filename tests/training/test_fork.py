"""A run that forks from another's checkpoint, before the outer step in which they differ, is the run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commands import outcome
from trained import newest, run
from twophase.config import update
from twophase.tasks.lm.config import TrainConfig

FORKS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # round in which they begin to differ, values of the parent, and those that the child has besides
    "another learning rate and momentum": (1, {}, {"outer.lr": 0.3, "outer.momentum": 0.5}),
    "averaging": (1, {}, {"outer.method": "averaging"}),
    "adamw": (1, {}, {"outer.method": "adamw"}),
    "a filter": (1, {}, {"outer.filter": "clip:0.1"}),
    "a schedule": (1, {"log_every": 6}, {"outer.schedule": "momentum:0.5"}),
    "auto": (1, {}, {"outer.restart": "auto"}),
    "a round is a step": (1, {"inner_steps": 1, "steps": 4}, {"outer.lr": 0.3}),
    "K = 2": (2, {}, {"outer.restart": "2"}),
    "K = 3 in a schedule": (3, {"outer.schedule": "linear:3"}, {"outer.restart": "3"}),
    "a soft restart": (3, {}, {"outer.restart": "soft:3:0.5:0.2"}),
    "after a restart that both have": (3, {"outer.restart": "at:1"}, {"outer.restart": "at:1,3"}),
    "a shorter last round": (4, {"outer.method": "adamw"}, {"outer.restart": "4"}),
}


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_is_the_run_alone(short_run: TrainConfig, tmp_path: Path, name: str) -> None:
    """Bit for bit, with its logs; also stopped before its first step, and resumed without its parent."""
    number, shared, values = FORKS[name]
    parent = update(short_run, shared)
    child, stop = update(parent, values), min(number * parent.inner_steps, parent.steps)
    assert run(parent, tmp_path / "parent", stop=stop)["rounds"] == number - 1
    run(child, tmp_path / "child", start=newest(tmp_path / "parent"), asked_at=stop)
    run(child, tmp_path / "child")
    run(child, tmp_path / "alone")
    assert outcome(tmp_path / "child") == outcome(tmp_path / "alone")
