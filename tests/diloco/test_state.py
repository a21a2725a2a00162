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
    *((name,) for name in STATE),
    *(("fragments", n, name) for n in (0, 2) for name in ("round", "steps", "outer")),
    ("fragments", 2, "sum"),
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


def test_shapes_are_compared() -> None:
    """Tensors of other shapes and types, param groups of other sizes, no state at all."""
    parts, groups = STATE["fragments"], STATE["fragments"][1]["outer"]["param_groups"]
    for path, value, word in (
        (("anchor",), STATE["anchor"][:1], "anchor"),
        (("fragments", 2, "sum"), parts[2]["sum"][:1], "sums"),
        (("fragments", 1, "outer", "param_groups"), groups * 2, "groups"),
    ):
        assert_refused(changed(STATE, path, value), word)
    for other in ({}, None, [], {"anchor": torch.zeros(3)}):
        assert_refused(other, "state_dict")


def test_a_state_that_a_later_fragment_refuses_changes_none() -> None:
    """The outer optimizers load one after the other; those before the refusal go back."""
    state = through_file(STATE)
    (index, buffers), *_ = state["fragments"][1]["outer"]["state"].items()
    state["fragments"][1]["outer"]["state"][index] = {key: value[..., None] for key, value in buffers.items()}
    assert_refused(state, "buffer")
