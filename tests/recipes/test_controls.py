"""Controls: equal mean gain by a direct count, nothing superfluous, and which restarts a run feels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import simulate
from twophase.config import update
from twophase.recipes.controls import gain_matched, grid_of, momentum_free
from twophase.runs.config import OuterConfig, SyncConfig
from twophase.sweeps.grid import Axis, Cell, product
from twophase.tasks.lm.config import TrainConfig

POLICIES = ("2", "3", "7", "cycle:2,5", "at:4,9", "soft:3:0.25:0.5", "soft:5:0.75:1.0", "soft:2:-0.3:0.1")


def direct_gain(config: TrainConfig) -> float:
    """Mean displacement a round under a constant pseudo-gradient of 1."""
    return -simulate(config.outer.rule(), [1.0] * config.rounds, config.outer.policy)[-1][0] / config.rounds  # type: ignore[arg-type]


def restarted(restart: str, **values: object) -> Cell:
    """One restarted cell of 23 rounds, the last of them short."""
    base = update(TrainConfig(), {"steps": 90, "inner_steps": 4, "outer.method": "nesterov"} | values)
    (cell,) = product(base, [Axis("outer.restart", (restart,))], "method")
    return cell


def controls_of(base: TrainConfig, axes: list[Axis]) -> list[Cell]:
    return grid_of(base, axes, controls=True)[len(grid_of(base, axes, controls=False)) :]


@given(
    st.sampled_from(POLICIES), st.sampled_from(["sum", "ema"]), st.booleans(), st.floats(0.05, 0.95), st.floats(0.05, 3)
)
def test_gains_are_equal(restart: str, form: str, nesterov: bool, momentum: float, lr: float) -> None:
    """A control has the mean outer gain of its cell to six digits, counted round by round, and differs in no more."""
    values = {"outer.method": "nesterov" if nesterov else "heavy-ball", "outer.momentum": momentum, "outer.lr": lr}
    cell = restarted(restart, **values, **{"outer.form": form})
    (control,) = gain_matched([cell], "control")
    assert direct_gain(control.config) == pytest.approx(direct_gain(cell.config), rel=1e-5)
    assert (control.arm, control.control_of) == ("control", cell.run_id)
    assert control.values == {"outer.restart": "never", "outer.lr": control.config.outer.lr}
    assert update(control.config, {"outer.lr": lr, "outer.restart": restart}).plain() == cell.config


@pytest.mark.parametrize(
    ("restart", "values"),
    [
        *(("never", {}), ("23", {}), ("24", {}), ("3", {"outer.momentum": 0.0}), ("soft:3:1.0:0.0", {})),
        *(("3", {"outer.lr": 0.0}), ("soft:3:-5:0", {})),
    ],
)
def test_no_control_where_there_is_none(restart: str, values: dict[str, object]) -> None:
    """A restart that changes no gain (it never fires, there is no buffer, or it keeps all) needs no control.

    A rule that moves nothing, or backwards on average, has none.
    """
    cell = restarted(restart, **values)
    (control,) = gain_matched([cell, restarted("22")], "control")
    assert control.control_of == restarted("22").run_id


def test_momentum_free_is_plain_sgd() -> None:
    """Momentum 0, no restart, no look-ahead, at every learning rate and place; plain averaging is among them."""
    for lrs in ((0.3, 1.1), (1.1, 1.0, 0.3)):
        cells = momentum_free(TrainConfig(), [Axis("seed", (0, 1))], lrs, {"inner_steps": 8})
        expected = [(seed, lr) for seed in (0, 1) for lr in (0.3, 1.0, 1.1)]
        assert [(cell.config.seed, cell.config.outer.lr) for cell in cells] == expected
    for cell in cells:
        outer = cell.config.outer
        assert (cell.arm, outer.rule().momentum, outer.restart) == ("momentum-free", 0.0, "never")
        assert (cell.config.inner_steps, cell.values["inner_steps"], cell.control_of) == (8, 8, None)


BASE = TrainConfig(outer=OuterConfig("nesterov"), sync=SyncConfig(fragments=("a=embedding", "b=.")))
BY_BLOCK = ("a=3", "b=auto")


def test_policies_by_block_are_methods() -> None:
    """A set of policies names its method; without one it is outer.restart that does, whether that varies or not."""
    blocks, lrs = Axis("sync.restart", ((), BY_BLOCK)), Axis("outer.lr", (0.3, 0.7))
    assert [cell.arm for cell in grid_of(BASE, [blocks, lrs], controls=False)] == ["never"] * 2 + ["a=3,b=auto"] * 2
    both = [Axis("outer.method", ("nesterov",)), blocks, Axis("outer.restart", ("3",))]
    assert [cell.arm for cell in grid_of(BASE, both, controls=False)] == ["Nesterov, K=3", "Nesterov, K=3, a=3,b=auto"]


def test_controls_restart_in_no_block() -> None:
    """Momentum-free controls have no fragment's policy; where fragments have one, outer.restart has no control."""
    axes = [Axis("sync.restart", ((), BY_BLOCK)), Axis("outer.restart", ("3",)), Axis("seed", (0, 1))]
    cells = grid_of(BASE, axes, controls=False)
    added = controls_of(BASE, axes)
    assert [cell.control_of for cell in added if cell.control_of] == [cell.run_id for cell in cells[:2]]
    assert [(cell.arm, cell.config.seed) for cell in added if not cell.control_of] == [
        ("momentum-free", seed) for seed in (0, 0, 1, 1)
    ]
    for cell in added:
        assert cell.config.sync == BASE.sync


def test_an_adaptive_policy_has_no_matched_gain() -> None:
    """A policy that decides from what a run measures gets the momentum-free controls alone."""
    with pytest.raises(ValueError, match="not known in advance"):
        gain_matched([restarted("auto")], "control")
    base = update(TrainConfig(), {"outer.method": "nesterov"})
    axes = [Axis("outer.restart", ("gradient", "3"))]
    added = controls_of(base, axes)
    assert [cell.arm for cell in added if cell.control_of] == ["never, gain of K=3"]


def test_controls_are_rules_alone() -> None:
    """What an axis or the base has as filter or schedule, a control has not; only then do its rows name them."""
    base = update(TrainConfig(), {"steps": 90, "inner_steps": 4, "outer.schedule": "linear:2"})
    axes = [Axis("outer.method", ("nesterov", "adamw")), Axis("outer.filter", ("none", "clip:1")), Axis("seed", (0, 1))]
    cells = grid_of(base, axes, controls=False)
    assert list(dict.fromkeys(cell.arm for cell in cells)) == [
        f"{method}, filter {words}" for method in ("Nesterov", "adamw") for words in ("none", "clip:1")
    ]
    free = controls_of(base, axes)
    assert len(free) == 2
    for cell in free:
        outer = cell.config.outer
        assert (outer.method, outer.filter, outer.schedule) == ("averaging", "none", "constant")
        assert cell.values.keys() >= {"outer.method", "outer.filter", "outer.schedule"}
    plain = [Axis("outer.restart", ("never", "3"))]
    for cell in controls_of(TrainConfig(), plain):
        assert not cell.values.keys() & {"outer.filter", "outer.schedule"}


def test_averaging_is_one_cell_in_a_grid(caplog: pytest.LogCaptureFixture) -> None:
    """Of its restarts and momenta, which would all be the same run, and the user is told."""
    values = {"outer.method": ("nesterov", "averaging"), "outer.momentum": (0.5, 0.9), "outer.restart": ("never", "3")}
    cells = grid_of(TrainConfig(), [Axis(*axis) for axis in values.items()], controls=False)
    assert [tuple(cell.values.values()) for cell in cells] == [
        *(("nesterov", momentum, restart) for momentum in (0.5, 0.9) for restart in ("never", "3")),
        ("averaging", 0.5, "never"),
    ]
    assert "3 cells are left out" in caplog.text
