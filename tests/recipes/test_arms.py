"""Arms of a grid whose fragments have a restart policy each, and the controls of such a grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from twophase.recipes.arms import controls, in_arms
from twophase.recipes.controls import restarts_that_count
from twophase.restart import Restart, RestartPolicy, RoundSignal, State
from twophase.sweep.grid import Axis
from twophase.tasks.lm.config import TrainConfig, check
from twophase.training.config import SyncConfig

BASE = TrainConfig(sync=SyncConfig(fragments=("a=embedding", "b=.")))
BY_BLOCK = ("a=3", "b=auto")


def test_policies_by_block_are_arms() -> None:
    """A set of policies names its arm; without one it is outer.restart that does, whether that varies or not."""
    blocks, lrs = Axis("sync.restart", ((), BY_BLOCK)), Axis("outer.lr", (0.3, 0.7))
    assert [cell.arm for cell in in_arms(BASE, [blocks, lrs])] == ["never"] * 2 + ["a=3,b=auto"] * 2
    both = [Axis("outer.nesterov", (True,)), blocks, Axis("outer.restart", ("3",))]
    assert [cell.arm for cell in in_arms(BASE, both)] == ["Nesterov, K=3", "Nesterov, K=3, a=3,b=auto"]


def test_controls_restart_in_no_block() -> None:
    """Momentum-free controls have no fragment's policy; where fragments have one, outer.restart has no control."""
    axes = [Axis("sync.restart", ((), BY_BLOCK)), Axis("outer.restart", ("3",)), Axis("seed", (0, 1))]
    cells = in_arms(BASE, axes)
    added = controls(BASE, axes, cells)
    assert [cell.control_of for cell in added if cell.control_of] == [cell.run_id for cell in cells[:2]]
    assert [(cell.arm, cell.config.seed) for cell in added if not cell.control_of] == [
        ("momentum-free", seed) for seed in (0, 0, 1, 1)
    ]
    for cell in added:
        assert check(cell.config).sync == BASE.sync


def test_a_policy_by_coordinate_has_no_matched_gain(register_policy: Callable[[str], Any]) -> None:
    """Whatever it needs, its updates are not known in advance: it gets the momentum-free controls alone."""

    @register_policy("seldom")
    @dataclass(frozen=True)
    class Seldom(RestartPolicy):
        by_coordinate: ClassVar[bool] = True

        def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
            return state, Restart(before=True, opposed=True, counts=False) if signal.round % 2 else None

    base = TrainConfig()
    axes = [Axis("outer.restart", ("seldom", "3"))]
    added = controls(base, axes, in_arms(base, axes))
    assert [cell.arm for cell in added if cell.control_of] == ["never, gain of K=3"]
    with pytest.raises(ValueError, match="restarts_that_count: seldom"):
        restarts_that_count(Seldom(), 6)
