"""Which policy makes outer learning rate, momentum and restart period safe to leave untuned?

Every adaptive policy, the fixed periods, and the rules that a restart must beat, over a grid of learning rates and
momenta, both rules and both forms. The policy `auto` was chosen on runs like these, so that this study flatters it;
`adaptive_confirmation` has runs that had no part in it.

Source: conclusion of the paper, which asks whether the outer loop can decide for itself; theory notes R30, R31.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twophase.experiment.grid import Sweep
from twophase.experiment.table import Row
from twophase.recipes.adaptive import ADAPTIVE, FIXED, RIVALS, choice, inner_steps_of, momenta_of
from twophase.recipes.paper import Scale
from twophase.studies._adaptive import aims, facts_of, lines_of, places_of, ranges, tables
from twophase.studies._lm import seeds_words, tally
from twophase.studies.study import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "Which policy makes outer learning rate, momentum and restart period safe to leave untuned?"
_CHOSEN = "auto"
_ARMS = (*FIXED, *ADAPTIVE, *RIVALS)


def sweep(scale: Scale, rows: Sequence[Row]) -> Sweep:
    """The runs (`recipes.adaptive.choice`); nothing depends on earlier rows."""
    del rows
    return choice(scale)


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Every arm by place, form and rule."""
    places = {name: facts_of(found, _ARMS, _CHOSEN) for name, found in places_of(rows).items()}
    settings = {
        "seeds": scale.seeds,
        "seeds_words": seeds_words(scale),
        "lrs": scale.lrs,
        "momenta": momenta_of(scale),
        "inner_steps": inner_steps_of(scale),
    }
    return Result(lines_of(places), {"places": places}, settings)


def answer(result: Result) -> str:
    """Every arm, and where the aims are reached."""
    places = result.numbers["places"]
    lines = [
        f"Validation perplexity ({result.settings['seeds_words']}). Ratios above 1 favour {_CHOSEN}; in brackets 95 %."
    ]
    lines += tables(places, _CHOSEN)
    lines += [tally(claim, held) for claim, held in aims(places, _CHOSEN).items()]
    return "\n".join(lines)


def draw(result: Result) -> Figure:
    """The arms' ranges."""
    count = len(result.settings["seeds"])
    return ranges(result.numbers["places"], _CHOSEN, f"Means over {count} seeds." if count > 1 else "One seed.")
