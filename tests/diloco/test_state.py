"""States that are no engine's, or another engine's, are refused by name, and change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from diloco.scenarios import BLOCKS, Run, start, unlike
from replicas import through_file


def under_way(**changes: Any) -> Run:
    """Three fragments, of which the last is being reduced."""
    run = start("three, delay", **changes)
    run.go(range(6))
    return run


STATE = under_way().engine.state_dict()
PATHS: list[tuple[Any, ...]] = [
    *((name,) for name in ("anchor", "spec", "fragments", "inner_step")),
    ("fragments", 0, "steps"),
]
"""Places in a state."""


def changed(state: Any, path: tuple[Any, ...], *value: Any) -> dict[str, Any]:
    """A copy with another value at a place, or with none."""
    state = copy.deepcopy(state)
    place = state
    for key in path[:-1]:
        place = place[key]
    place.pop(path[-1])
    if value:
        (place[path[-1]],) = value
    return state


def assert_refused(state: Any, word: str, **changes: Any) -> None:
    """A state is refused with a word, and the engine goes on as if nothing had happened."""
    run, other = (under_way(seed=3, **changes) for _ in range(2))
    with pytest.raises(ValueError, match=word):
        run.engine.load_state_dict(state)
    assert unlike(run.tensors(), other.tensors()) == []
    for first, second in zip(run.engine.fragments, other.engine.fragments, strict=True):
        assert first.outer.state_dict()["param_groups"] == second.outer.state_dict()["param_groups"]
    run.go(range(6, 12))
    other.go(range(6, 12))
    assert unlike(run.tensors(), other.tensors()) == []


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_each_missing_entry_is_named(path: tuple[Any, ...]) -> None:
    """As of a state of an older version."""
    assert_refused(changed(STATE, path), str(path[-1]))


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("inner_steps", {"inner_steps": 9}),
        ("delay", {"delay": 2}),
        ("compression", {"compression": "int8"}),
        ("replicas", {"replicas": [0]}),
        ("fragments", {"fragments": BLOCKS, "restart": 2}),
    ],
)
def test_a_reduction_ends_by_the_schedule_that_it_began_in(word: str, changes: dict[str, Any]) -> None:
    """With one under way a state is loaded by an engine of the same schedule only."""
    assert_refused(STATE, word, **changes)


def test_what_is_no_state_is_refused() -> None:
    """A float64 one, another object."""
    assert_refused(changed(STATE, ("anchor",), STATE["anchor"].double()), "anchor")
    for other in ({}, None, [], {"anchor": torch.zeros(3)}):
        assert_refused(other, "state_dict")


def test_a_state_that_an_outer_optimizer_refuses_ends_the_engine_until_it_is_loaded() -> None:
    """Earlier fragments have been loaded then."""
    run, state = under_way(seed=3), through_file(STATE)
    groups = state["fragments"][1]["outer"]["param_groups"]
    groups += groups
    with pytest.raises(ValueError, match="groups"):
        run.engine.load_state_dict(state)
    with pytest.raises(RuntimeError, match="load_state_dict"):
        run.engine.step()
    run.engine.load_state_dict(STATE)
    run.engine.step({"loss": 1.0})
