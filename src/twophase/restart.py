"""Export the public names of restart policies; the modules of `twophase.policies` define them."""

from twophase.policies.base import (
    AGREEMENT,
    HARD,
    MEASURED,
    PROBES,
    Answer,
    Decision,
    Never,
    Restart,
    RestartPolicy,
    RoundSignal,
    State,
    Step,
    answered,
    ask,
    register,
)
from twophase.policies.gain import convert, mean_outer_gain
from twophase.policies.scheduled import AtRounds, Cycle, Periodic, Soft
from twophase.policies.text import POLICIES_VARIABLE, parse

__all__ = [
    "AGREEMENT",
    "HARD",
    "MEASURED",
    "POLICIES_VARIABLE",
    "PROBES",
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
    "answered",
    "ask",
    "convert",
    "mean_outer_gain",
    "parse",
    "register",
]
