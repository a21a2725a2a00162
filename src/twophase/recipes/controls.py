"""A grid as methods that are compared, and controls, without which a comparison of restarts says little.

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
from twophase.errors import UsageError
from twophase.restart import Never, mean_outer_gain
from twophase.sweeps.grid import MOMENTUM_FREE, Axis, Cell, fitted, product
from twophase.sweeps.table import cell_text

AVERAGING_LR = 1.0
"""The learning rate at which outer SGD without momentum is plain averaging of the replicas."""
LR, MOMENTUM, RESTART, BLOCKS = "outer.lr", "outer.momentum", "outer.restart", "sync.restart"
FORM, METHOD = "outer.form", "outer.method"
"""Axes of sweeps, by their dotted paths."""
_USUAL = {"outer.filter": "none", "outer.schedule": "constant"}
"""What a control has there."""
_gain = cache(mean_outer_gain)  # the same for every seed
_WORDS = {"heavy-ball": "heavy ball", "nesterov": "Nesterov"}


def momentum_free(
    base: Any, axes: Sequence[Axis], lrs: Iterable[float], fixed: Mapping[str, Any] | None = None
) -> list[Cell]:
    """Return runs of outer SGD without momentum and restarts, over learning rates and 1, of the method `MOMENTUM_FREE`.

    Without momentum all rules and forms are one, so it controls all of them. Arguments are as of `grid.product`; the
    learning rate runs fastest.
    """
    shared = {METHOD: "averaging", MOMENTUM: None, RESTART: "never"} | dict(fixed or {})
    return product(base, [*axes, Axis(LR, tuple(sorted({*lrs, AVERAGING_LR})))], MOMENTUM_FREE, shared)


def gain_matched(cells: Iterable[Cell], name: str) -> list[Cell]:
    """Return the controls of restarted cells: no restart, and the learning rate with the same mean outer gain.

    `lr_matched = lr gain(rule, policy, T) / gain(rule, never, T)` with the gains of `restart.mean_outer_gain` over the
    run's own number of rounds T; everything else stays. A cell has none when that is its own rate to six digits, when
    no positive rate has that gain, and when the outer optimizer is more than a rule. A ValueError refuses an adaptive
    policy, whose gain is not known in advance. The paper has no such control.

    Args:
        cells: the restarted cells.
        name: the controls' method.
    """
    controls = []
    for cell in cells:
        outer, rounds, rule = cell.config.outer, cell.config.rounds, cell.config.outer.rule()
        if rule is None or not outer.is_rule:
            continue
        restarted, plain = (_gain(rule, policy, rounds) for policy in (outer.policy, Never()))
        lr = rule.lr * (restarted / plain) if plain else 0.0
        if lr > 0 and f"{lr:.6g}" != f"{rule.lr:.6g}":
            changed = {LR: float(f"{lr:.6g}"), RESTART: "never"}  # readable in a table
            config = update(cell.config, changed).plain()
            controls.append(Cell(name, {**cell.values, **changed}, config, control_of=cell.run_id))
    return controls


def grid_of(base: Any, axes: Sequence[Axis], *, controls: bool) -> list[Cell]:
    """Return all combinations of the axes' values, as methods by form, method, filter, schedule, restart that vary.

    A method says *what* is tuned, such as `sum, Nesterov, K=3`; all other axes are what it is tuned over. A grid that
    varies none of them is one method without a name. Of cells that differ in values that change nothing, as in a
    restart of averaging, the first one stays. `grid.product` says what is refused.

    Args:
        base: the configuration that all share.
        axes: the values to try.
        controls: add momentum-free runs, which take the grid's outer learning rates (or the base's) and 1, and all axes
            that are not outer; and gain-matched ones. A policy that decides from measured signals has no gain-matched
            run, nor has one with a policy for each fragment.
    """
    if not axes:
        raise UsageError("--axis: must name at least one value of a run, such as outer.lr, and what to try for it")
    axes = [Axis(axis.path, tuple(fitted(base, axis))) for axis in axes]
    every = [replace(cell, arm=_method(cell.values, cell.config)) for cell in product(base, axes)]
    cells = list({cell.run_id: cell for cell in reversed(every)}.values())[::-1]
    if len(cells) < len(every):
        left_out = len(every) - len(cells)
        logging.getLogger(__name__).warning(
            "%d cells are left out: they differ in values that change nothing", left_out
        )
    return cells + (_controls(base, axes, cells) if controls else [])


def _controls(base: Any, axes: Sequence[Axis], cells: Sequence[Cell]) -> list[Cell]:
    lrs = next((axis.values for axis in axes if axis.path == LR), (base.outer.numbers().get("lr"),))
    others = [axis for axis in axes if not axis.path.startswith("outer.") and axis.path != BLOCKS]
    varied = {axis.path for axis in axes}
    # Only where the grid has others, so that the tables of all other grids stay as they are.
    fixed = {path: usual for path, usual in _USUAL.items() if path in varied or get(base, path) != usual}
    fixed |= {BLOCKS: ()} if any(cell.config.sync.restart for cell in cells) else {}
    controls = momentum_free(base, others, (lr for lr in lrs if lr is not None), fixed)
    for cell in cells:
        outer, policy = cell.config.outer, cell.config.outer.policy
        if policy == Never() or policy.needs or outer.numbers().get("momentum") == 0 or cell.config.sync.restart:
            continue
        never = _method({**cell.values, RESTART: "never"}, cell.config)
        controls += gain_matched([cell], f"{never}, gain of {_restart(str(policy))}")
    return controls


def _method(values: Any, config: Any) -> str:
    """Name the method of a cell by its values on the axes."""
    parts = [values[FORM]] if FORM in values else []
    parts += [_WORDS.get(values[METHOD], values[METHOD])] if METHOD in values else []
    parts += [f"{path.removeprefix('outer.')} {values[path]}" for path in _USUAL if path in values]
    of_blocks = values.get(BLOCKS)
    if RESTART in values or of_blocks == ():  # these have outer.restart, also where it does not vary
        parts.append(_restart(values.get(RESTART, config.outer.restart)))
    return ", ".join(parts + ([cell_text(of_blocks)] if of_blocks else []))


def _restart(text: str) -> str:
    return f"K={text}" if text.isdecimal() else text
