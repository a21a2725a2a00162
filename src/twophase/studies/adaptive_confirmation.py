"""Does the policy `auto` do on other seeds, another width and another text what it was chosen for?

The arms of `adaptive_choice` that matter, on held-out runs.

Source: conclusion of the paper; theory notes R30, R31.
"""

from __future__ import annotations

from collections.abc import Sequence

from twophase.recipes.adaptive import CLOSEST, FIXED, confirmation
from twophase.recipes.paper import Scale
from twophase.studies._adaptive import CHOSEN, answer, result_of
from twophase.studies._adaptive_figure import draw
from twophase.studies.policies import share_with_workers
from twophase.studies.study import Result
from twophase.sweep.grid import Sweep
from twophase.sweep.table import Row

__all__ = ["QUESTION", "answer", "draw", "sweep", "table"]
QUESTION = "Does the policy auto do on other seeds, another width and another text what it was chosen for?"


def sweep(scale: Scale, rows: Sequence[Row]) -> Sweep:
    """Return the runs (`recipes.adaptive.confirmation`); nothing depends on earlier rows."""
    del rows
    share_with_workers()
    return confirmation(scale)


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Put every arm in numbers, by place, form and rule."""
    return result_of(rows, scale, (*FIXED, *CLOSEST, CHOSEN))
