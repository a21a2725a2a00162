"""Export the public names of restart policies; the modules of `twophase.policies` define them."""

from twophase.policies.base import (
    HARD,
    MEASURED,
    Answer,
    Decision,
    Never,
    Restart,
    RestartPolicy,
    RoundSignal,
    State,
    Step,
    ask,
    register,
)
from twophase.policies.gain import convert, mean_outer_gain
from twophase.policies.scheduled import AtRounds, Cycle, Periodic, Soft
from twophase.policies.text import POLICIES_VARIABLE, parse

__all__ = [
    "HARD",
    "MEASURED",
    "POLICIES_VARIABLE",
    "Answer",
    "AtRounds",
    "Cycle",
    "Decision",
    "Never",
    "Periodic",
    "Restart",
    "RestartPolicy",
    "RoundSignal",
    "Soft",
    "State",
    "Step",
    "ask",
    "convert",
    "mean_outer_gain",
    "parse",
    "register",
]
