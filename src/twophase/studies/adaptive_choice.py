"""Which policy makes outer learning rate, momentum and restart period safe to leave untuned?

Every adaptive policy, the fixed periods, and the rules that a restart must beat, over a grid of learning rates and
momenta, both rules and both forms. The policy `auto` was chosen on runs like these, so that this study flatters it;
`adaptive_confirmation` has held-out runs.

Source: conclusion of the paper, which asks whether the outer loop can decide for itself; theory notes R30, R31.
"""

from __future__ import annotations

from collections.abc import Sequence

from twophase.recipes.adaptive import ADAPTIVE, FIXED, RIVALS, choice
from twophase.recipes.paper import Scale
from twophase.studies._adaptive import answer, result_of
from twophase.studies._adaptive_figure import draw
from twophase.studies.policies import share_with_workers
from twophase.studies.study import Result
from twophase.sweep.grid import Sweep
from twophase.sweep.table import Row

__all__ = ["QUESTION", "answer", "draw", "sweep", "table"]
QUESTION = "Which policy makes outer learning rate, momentum and restart period safe to leave untuned?"


def sweep(scale: Scale, rows: Sequence[Row]) -> Sweep:
    """Return the runs (`recipes.adaptive.choice`); nothing depends on earlier rows."""
    del rows
    share_with_workers()
    return choice(scale)


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Put every arm in numbers, by place, form and rule."""
    return result_of(rows, scale, (*FIXED, *ADAPTIVE, *RIVALS))
