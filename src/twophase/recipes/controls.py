"""Controls: the runs without which a comparison with and without restarts says little.

A restart empties the momentum buffer, and an emptied buffer pushes less, so a restarted run is also a run of smaller
steps. Three kinds of runs tell the two apart:

* momentum-free outer SGD over several learning rates (`momentum_free`): whatever momentum is worth, with or without
  restarts, it must be worth more than this;
* plain averaging of the replicas: momentum-free at learning rate 1, `AVERAGING_LR`;
* the gain-matched run of a restarted one (`gain_matched`): the same rule without restarts, whose learning rate gives
  the same mean outer gain over the run. What remains between the two is what restarts do beyond a smaller step.

A period that is not shorter than the run restarts nothing that still counts; `restarts_that_count` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twophase.base.config import with_values
from twophase.policies.base import Never, RestartPolicy, RoundSignal, ask
from twophase.policies.gain import mean_outer_gain
from twophase.rule import OuterRule
from twophase.sweep.grid import MOMENTUM_FREE, Axis, Cell, product

AVERAGING_LR = 1.0
"""The learning rate at which outer SGD without momentum is plain averaging of the replicas."""
_ANY = OuterRule(1.0, 0.5)
"""When a schedule restarts does not depend on the rule."""
_LR, _MOMENTUM, _NESTEROV, _RESTART = "outer.lr", "outer.momentum", "outer.nesterov", "outer.restart"


def with_averaging(lrs: Iterable[float]) -> tuple[float, ...]:
    """Learning rates with that of plain averaging among them, sorted.

    >>> with_averaging((0.3, 1.1))
    (0.3, 1.0, 1.1)
    """
    return tuple(sorted({*lrs, AVERAGING_LR}))


def momentum_free(
    base: Any,
    axes: Sequence[Axis],
    lrs: Sequence[float],
    fixed: Mapping[str, Any] | None = None,
    arm: str = MOMENTUM_FREE,
) -> list[Cell]:
    """Outer SGD without momentum and restarts, over learning rates.

    Without momentum both forms and both kinds of rule are one rule, so one arm controls all of them.

    Args:
        base: what the runs share, a tree with an `outer` like that of `lm.config.TrainConfig`.
        axes: what else varies, such as the seed.
        lrs: outer learning rates; with 1 among them (`with_averaging`) there is plain averaging too.
        fixed: further values that all of them share, from dotted path to value.
        arm: name of the arm.

    Returns:
        The cells; the learning rate runs fastest.

    Raises:
        UsageError: as for `grid.product`.
    """
    shared = {_NESTEROV: False, _MOMENTUM: 0.0, _RESTART: "never"} | dict(fixed or {})
    return product(base, [*axes, Axis(_LR, tuple(lrs))], arm, shared)


def gain_matched(cell: Cell, arm: str) -> Cell | None:
    """The control of a restarted cell: no restart, and the learning rate that gives the same mean outer gain.

    `lr_matched = lr gain(rule, policy, T) / gain(rule, never, T)` with the gains of `restart.mean_outer_gain` over the
    run's own number of rounds T; everything else stays.

    Args:
        cell: the restarted cell.
        arm: name of the control's arm.

    Returns:
        The control, with `control_of` set; None when its learning rate equals the cell's to six digits, because then
        the run without restarts at the same learning rate is that control, and when no positive one has that gain.

    Raises:
        ValueError: an adaptive policy, whose gain is not known in advance.

    Source: theory note R31; the paper has no such control.
    """
    outer, rounds = cell.config.outer, cell.config.rounds
    restarted, plain = (mean_outer_gain(outer.rule(), policy, rounds) for policy in (outer.policy(), Never()))
    if plain == 0 or restarted <= 0:
        return None
    lr = _six_digits(outer.lr * (restarted / plain))
    if lr == _six_digits(outer.lr):
        return None
    changed = {_LR: lr, _RESTART: "never"}
    return Cell(arm, {**cell.values, **changed}, with_values(cell.config, changed), control_of=cell.run_id)


def gain_matched_all(cells: Iterable[Cell], arm: str) -> list[Cell]:
    """The gain-matched controls of several cells, without those that need none."""
    return [control for cell in cells if (control := gain_matched(cell, arm)) is not None]


def restarts_that_count(policy: RestartPolicy, rounds: int) -> int:
    """How many restarts of a policy a run of some rounds feels; one after the last round changes nothing.

    Args:
        policy: one that decides from the round alone.
        rounds: of the run, >= 1.

    Raises:
        ValueError: an adaptive policy, which decides from what a run measures.

    >>> from twophase.policies.scheduled import Periodic
    >>> [restarts_that_count(Periodic(k), 6) for k in (2, 3, 5, 6, 7)]
    [2, 1, 1, 0, 0]
    """
    if policy.needs or policy.by_coordinate:
        raise ValueError(f"restarts_that_count: {policy} decides from measured signals; it cannot be known in advance")
    state, age, count = policy.initial_state(), 0, 0
    for number in range(1, rounds):
        answer = ask(policy, state, RoundSignal(number, age + 1, rule=_ANY))
        state, age, count = answer.state, answer.age(age + 1), count + answer.restarted
    return count


def _six_digits(value: float) -> float:
    """Equal to any precision that matters, and readable in a table."""
    return float(f"{value:.6g}")
