"""Which policy makes outer learning rate, momentum and restart period safe to leave untuned?

Every adaptive policy, the fixed periods, and the rules that a restart must beat, over a grid of learning rates and
momenta, both rules and both forms. The policy `auto` was chosen on runs like these, so that this study flatters it;
`adaptive_confirmation` has held-out runs.

Source: conclusion of the paper, which asks whether the outer loop can decide for itself; theory notes R30, R31.
"""

from __future__ import annotations

from functools import partial

from twophase.recipes.adaptive import ADAPTIVE, FIXED, RIVALS, choice
from twophase.studies._adaptive import answer, result_of
from twophase.studies._adaptive_figures import details, draw

__all__ = ["QUESTION", "TAKES_TASK", "answer", "details", "draw", "sweep", "table"]
QUESTION = "Which policy makes outer learning rate, momentum and restart period safe to leave untuned?"
TAKES_TASK = True
sweep = choice
table = partial(result_of, arms=(*FIXED, *ADAPTIVE, *RIVALS))
