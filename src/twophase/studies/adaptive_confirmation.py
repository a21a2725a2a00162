"""Does the policy `auto` do on other seeds, another width and another text what it was chosen for?

The arms of `adaptive_choice` that matter, on runs that had no part in choosing.

Source: conclusion of the paper; theory notes R30, R31.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from twophase.experiment.grid import Sweep
from twophase.experiment.table import SEED, Row
from twophase.recipes.adaptive import FIXED, confirmation, inner_steps_of, momenta_of
from twophase.recipes.paper import Scale
from twophase.studies._adaptive import aims, facts_of, lines_of, places_of, ranges, tables
from twophase.studies._lm import seeds_words, tally
from twophase.studies.study import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "Does the policy auto do on other seeds, another width and another text what it was chosen for?"
_CHOSEN = "auto"
_ARMS = (*FIXED, _CHOSEN)


def sweep(scale: Scale, rows: Sequence[Row]) -> Sweep:
    """The runs (`recipes.adaptive.confirmation`); nothing depends on earlier rows."""
    del rows
    return confirmation(scale)


def table(rows: Sequence[Row], scale: Scale) -> Result:
    """Every arm by place, form and rule."""
    places = {name: facts_of(found, _ARMS, _CHOSEN) for name, found in places_of(rows).items()}
    seeds = sorted({row.values[SEED] for row in rows})
    settings = {
        "seeds": seeds,
        "seeds_words": seeds_words(replace(scale, seeds=tuple(seeds))),
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
    return ranges(result.numbers["places"], _CHOSEN, f"Means over up to {count} seeds." if count > 1 else "One seed.")
