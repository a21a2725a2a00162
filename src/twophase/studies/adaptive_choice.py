"""Which policy makes outer learning rate, momentum and restart period safe to leave untuned?

Every adaptive policy, the fixed periods, and the rules that a restart must beat, over a grid of learning rates and
momenta, both rules and both forms. The policy `auto` was chosen on runs like these, so that this study flatters it;
`adaptive_confirmation` has runs that had no part in it.

Source: conclusion of the paper, which asks whether the outer loop can decide for itself; theory notes R30, R31.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twophase.recipes.adaptive import ADAPTIVE, FIXED, RIVALS, choice
from twophase.recipes.paper import Scale
from twophase.studies._adaptive import answer_of, result_of
from twophase.studies._adaptive_figure import draw_of
from twophase.studies.policies import share_with_workers
from twophase.studies.study import Result
from twophase.sweep.grid import Sweep
from twophase.sweep.table import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "Which policy makes outer learning rate, momentum and restart period safe to leave untuned?"


def sweep(scale: Scale, rows: Sequence[Row]) -> Sweep:
    """The runs (`recipes.adaptive.choice`); nothing depends on earlier rows."""
    del rows
    share_with_workers()
    return choice(scale)


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Every arm by place, form and rule."""
    return result_of(rows, scale, (*FIXED, *ADAPTIVE, *RIVALS))


def answer(result: Result) -> str:
    """Every arm, and where the aims are reached."""
    return answer_of(result)


def draw(result: Result) -> Figure:
    """The arms' ranges."""
    return draw_of(result)
