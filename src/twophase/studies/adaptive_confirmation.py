"""Does the policy `auto` do on other seeds, another width and another text what it was chosen for?

The arms of `adaptive_choice` that matter, on runs that had no part in choosing.

Source: conclusion of the paper; theory notes R30, R31.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twophase.recipes.adaptive import CLOSEST, FIXED, confirmation
from twophase.recipes.paper import Scale
from twophase.studies._adaptive import CHOSEN, answer_of, result_of
from twophase.studies._adaptive_figure import draw_of
from twophase.studies.policies import share_with_workers
from twophase.studies.study import Result
from twophase.sweep.grid import Sweep
from twophase.sweep.table import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "Does the policy auto do on other seeds, another width and another text what it was chosen for?"


def sweep(scale: Scale, rows: Sequence[Row]) -> Sweep:
    """The runs (`recipes.adaptive.confirmation`); nothing depends on earlier rows."""
    del rows
    share_with_workers()
    return confirmation(scale)


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Every arm by place, form and rule."""
    return result_of(rows, scale, (*FIXED, *CLOSEST, CHOSEN))


def answer(result: Result) -> str:
    """Every arm, and where the aims are reached."""
    return answer_of(result)


def draw(result: Result) -> Figure:
    """The arms' ranges."""
    return draw_of(result)
