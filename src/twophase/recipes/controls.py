"""A grid as arms that are compared, and controls, without which a comparison of restarts says little.

A restarted buffer pushes less, so a restarted run is also a run of smaller steps. Two kinds of runs tell what restarts
do beyond that: outer SGD without momentum over several learning rates, plain averaging (1) among them, and for each
restarted rule the same rule without restarts, whose learning rate gives the same mean outer gain. They have no filter
and no schedule. The gain of another method is not known in advance, so its restarted runs have no gain-matched one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from twophase.config import get, update
from twophase.restart import Never, mean_outer_gain
from twophase.sweeps.grid import MOMENTUM_FREE, Axis, Cell, fitted, product
from twophase.sweeps.table import cell_text

AVERAGING_LR = 1.0
"""The learning rate at which outer SGD without momentum is plain averaging of the replicas."""
_log = logging.getLogger(__name__)
LR, MOMENTUM, RESTART, BLOCKS = "outer.lr", "outer.momentum", "outer.restart", "sync.restart"
FORM, METHOD = "outer.form", "outer.method"
"""Axes of sweeps, by their dotted paths."""
_USUAL = {"outer.filter": "none", "outer.schedule": "constant"}
"""What a control has there."""
_gain = cache(mean_outer_gain)  # the same for every seed
_WORDS = {"heavy-ball": "heavy ball", "nesterov": "Nesterov"}


def with_averaging(lrs: Iterable[float]) -> tuple[float, ...]:
    """Add the learning rate of plain averaging; return the rates sorted.

    >>> with_averaging((0.3, 1.1))
    (0.3, 1.0, 1.1)
    """
    return tuple(sorted({*lrs, AVERAGING_LR}))


def momentum_free(
    base: Any, axes: Sequence[Axis], lrs: Sequence[float], fixed: Mapping[str, Any] | None = None
) -> list[Cell]:
    """Return runs of outer SGD without momentum and restarts, over learning rates, of the arm `MOMENTUM_FREE`.

    Without momentum all rules and forms are one, so it controls all of them. Arguments are as of `grid.product`; the
    learning rate runs fastest.
    """
    shared = {METHOD: "averaging", MOMENTUM: None, RESTART: "never"} | dict(fixed or {})
    return product(base, [*axes, Axis(LR, tuple(lrs))], MOMENTUM_FREE, shared)


def gain_matched(cell: Cell, arm: str) -> Cell | None:
    """Return the control of a restarted cell: no restart, and the learning rate with the same mean outer gain.

    `lr_matched = lr gain(rule, policy, T) / gain(rule, never, T)` with the gains of `restart.mean_outer_gain` over the
    run's own number of rounds T; everything else stays. None when that is the cell's own rate to six digits, when no
    positive rate has that gain, and when the outer optimizer is more than a rule. A ValueError refuses an adaptive
    policy, whose gain is not known in advance. The paper has no such control.
    """
    outer, rounds, rule = cell.config.outer, cell.config.rounds, cell.config.outer.rule()
    if rule is None or not outer.is_rule:
        return None
    restarted, plain = (_gain(rule, policy, rounds) for policy in (outer.policy, Never()))
    if plain == 0 or restarted <= 0:
        return None
    lr, own = (float(f"{value:.6g}") for value in (rule.lr * (restarted / plain), rule.lr))  # readable in a table
    changed = {LR: lr, RESTART: "never"}
    control = Cell(arm, {**cell.values, **changed}, update(cell.config, changed).plain(), control_of=cell.run_id)
    return None if lr == own else control


def gain_matched_all(cells: Iterable[Cell], arm: str) -> list[Cell]:
    """Return the gain-matched controls of the cells that have one."""
    return [control for cell in cells if (control := gain_matched(cell, arm)) is not None]


def controls_of(base: Any, axes: Sequence[Axis], cells: Sequence[Cell]) -> list[Cell]:
    """Return the controls of a grid: momentum-free outer SGD, plain averaging, and gain-matched runs.

    Momentum-free runs take the grid's outer learning rates (or the base's) and 1, and all axes that are not outer. A
    policy that decides from measured signals has no gain-matched run, nor has one with a policy for each fragment.
    """
    lrs = next((axis.values for axis in axes if axis.path == LR), (base.outer.numbers().get("lr", AVERAGING_LR),))
    others = [axis for axis in axes if not axis.path.startswith("outer.") and axis.path != BLOCKS]
    varied = {axis.path for axis in axes}
    # Only where the grid has others, so that the tables of all other grids stay as they are.
    fixed = {path: usual for path, usual in _USUAL.items() if path in varied or get(base, path) != usual}
    fixed |= {BLOCKS: ()} if any(cell.config.sync.restart for cell in cells) else {}
    controls = momentum_free(base, others, with_averaging(lr for lr in lrs if lr is not None), fixed)
    for cell in cells:
        outer, policy = cell.config.outer, cell.config.outer.policy
        if policy == Never() or policy.needs or outer.numbers().get("momentum") == 0 or cell.config.sync.restart:
            continue
        never = _arm({**cell.values, RESTART: "never"}, cell.config)
        controls += gain_matched_all([cell], f"{never}, gain of {_restart(str(policy))}")
    return controls


def grid_of(base: Any, axes: Sequence[Axis], *, controls: bool) -> list[Cell]:
    """Return all combinations of the axes' values, in arms by form, method, filter, schedule and restart, if they vary.

    Arms say *what* is tuned, such as `sum, Nesterov, K=3`; all other axes are what it is tuned over. A grid that varies
    none of them is one arm without a name. Of cells that differ in values that change nothing, as in a restart of
    averaging, the first one stays. `controls` adds those of `controls_of`; `grid.product` says what is refused.
    """
    axes = [Axis(axis.path, tuple(fitted(base, axis))) for axis in axes]
    every = [replace(cell, arm=_arm(cell.values, cell.config)) for cell in product(base, axes)]
    cells = list({cell.run_id: cell for cell in reversed(every)}.values())[::-1]
    if len(cells) < len(every):
        _log.warning("%d cells are left out: they differ in values that change nothing", len(every) - len(cells))
    return cells + (controls_of(base, axes, cells) if controls else [])


def _arm(values: Any, config: Any) -> str:
    parts = [values[FORM]] if FORM in values else []
    parts += [_WORDS.get(values[METHOD], values[METHOD])] if METHOD in values else []
    parts += [f"{path.removeprefix('outer.')} {values[path]}" for path in _USUAL if path in values]
    of_blocks = values.get(BLOCKS)
    if RESTART in values or of_blocks == ():  # these have outer.restart, also where it does not vary
        parts.append(_restart(values.get(RESTART, config.outer.restart)))
    return ", ".join(parts + ([cell_text(of_blocks)] if of_blocks else []))


def _restart(text: str) -> str:
    return f"K={text}" if text.isdecimal() else text
