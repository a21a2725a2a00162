"""A grid as arms that are compared, and the controls that the comparison needs: what `twophase sweep` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from twophase.policies.base import Never
from twophase.recipes.controls import gain_matched, momentum_free, with_averaging
from twophase.sweep.grid import Axis, Cell, product, text_of

_FORM, _NESTEROV, _RESTART = "outer.form", "outer.nesterov", "outer.restart"
_LR, _OUTER = "outer.lr", "outer."
_BLOCKS = "sync.restart"


def in_arms(base: Any, axes: Sequence[Axis]) -> list[Cell]:
    """Every combination of the axes' values, in arms by form, rule and restart, so far as these vary.

    The form, the rule and the restart, of all or of each fragment, say *what* is tuned; all other axes are what it is
    tuned over. A grid that varies none of them is one arm without a name.

    Args:
        base: as for `grid.product`.
        axes: as for `grid.product`.

    Returns:
        The cells, with arms such as `sum, Nesterov, K=3`.

    Raises:
        UsageError: as `grid.product`.
    """
    return [replace(cell, arm=_arm(cell.values, cell.config)) for cell in product(base, axes)]


def controls(base: Any, axes: Sequence[Axis], cells: Sequence[Cell]) -> list[Cell]:
    """The controls of a grid: momentum-free outer SGD, plain averaging, and the gain-matched run of each restarted one.

    Args:
        base: of the grid.
        axes: of the grid; the momentum-free runs take its outer learning rates (or the base's) and 1, and vary with it
            in everything that is not outer.
        cells: of the grid. A policy that decides from measured signals has no mean gain known in advance, hence no
            gain-matched control; nor has a run whose fragments have a policy each, and so perhaps different gains.

    Returns:
        The cells of the controls.
    """
    lrs = next((axis.values for axis in axes if axis.path == _LR), (base.outer.lr,))
    others = [axis for axis in axes if not axis.path.startswith(_OUTER) and axis.path != _BLOCKS]
    by_block = any(cell.config.sync.restart for cell in cells)
    controls = momentum_free(base, others, with_averaging(lrs), {_BLOCKS: ()} if by_block else None)
    for cell in cells:
        policy = cell.config.outer.policy()
        is_scheduled = not (policy.needs or policy.by_coordinate)  # what its updates are
        if policy == Never() or not is_scheduled or cell.config.outer.momentum == 0 or cell.config.sync.restart:
            continue
        never = _arm({**cell.values, _RESTART: "never"}, cell.config)
        control = gain_matched(cell, f"{never}, gain of {_restart(str(policy))}")
        if control is not None:
            controls.append(control)
    return controls


def _arm(values: Any, config: Any) -> str:
    words = [values[_FORM]] if _FORM in values else []
    words += [("heavy ball", "Nesterov")[values[_NESTEROV]]] if _NESTEROV in values else []
    of_blocks = values.get(_BLOCKS)
    if _RESTART in values or of_blocks == ():  # these have outer.restart, also where it does not vary
        words.append(_restart(values.get(_RESTART, config.outer.restart)))
    words += [text_of(of_blocks)] if of_blocks else []
    return ", ".join(words)


def _restart(text: str) -> str:
    return f"K={text}" if text.isdecimal() else text
