"""Does the policy `auto` do on other seeds, another width and another text what it was chosen for?

The arms of `adaptive_choice` that matter, on held-out runs.

Source: conclusion of the paper; theory notes R30, R31.
"""

from __future__ import annotations

from functools import partial

from twophase.recipes.adaptive import CLOSEST, FIXED, confirmation
from twophase.studies._adaptive import CHOSEN, answer, result_of
from twophase.studies._adaptive_figures import details, draw

__all__ = ["QUESTION", "answer", "details", "draw", "sweep", "table"]
QUESTION = "Does the policy auto do on other seeds, another width and another text what it was chosen for?"
sweep = confirmation
table = partial(result_of, arms=(*FIXED, *CLOSEST, CHOSEN))
