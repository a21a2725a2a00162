"""Compare restarts with these policies in studies; docs/log.md, 22 November 2026, says why none is recommended.

An example of a module that `TWOPHASE_POLICIES` names:

    TWOPHASE_POLICIES=twophase.studies.policies twophase train --outer.restart gradient

Restart tests: `gradient` and `norm:1.5`, both before the round's g is mixed in. And `auto` in parts, as its controls:
`along:0.5` (its direction with a fixed gain), `ramp:0.5` (with one that rises over the run), `gain:1` (its gain alone).
`observe` averages and measures.

Source: theory note R30.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import ClassVar

from twophase.policies.base import Decision, Restart, RestartPolicy, RoundSignal, State
from twophase.policies.checks import check_number
from twophase.policies.text import POLICIES_VARIABLE, register
from twophase.studies import _extrapolation  # noqa: F401 - the import registers its policies


def share_with_workers() -> None:
    """Name this module in `TWOPHASE_POLICIES`, so that the workers of a sweep, processes of their own, know it too."""
    modules = [name for name in os.environ.get(POLICIES_VARIABLE, "").split(",") if name]
    os.environ[POLICIES_VARIABLE] = ",".join(dict.fromkeys([*modules, __name__]))


@register("gradient")
@dataclass(frozen=True, slots=True)
class Gradient(RestartPolicy):
    """Restart when the pseudo-gradient points against the buffer: `<g, m> < 0`. Text form `gradient`.

    Not in the first round after a restart. Without noise the first choice of the adaptive rules; in language models
    pseudo-gradients stay positively correlated even in failing runs, so that it hardly ever fires.

    Source: theory note R30; O'Donoghue and Candes (2015), the gradient scheme.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"cosine"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart before the mixing when the cosine is negative."""
        return state, _drop_if(signal.value("cosine") < 0, signal)


@register("norm")
@dataclass(frozen=True, slots=True)
class NormRatio(RestartPolicy):
    """Restart when the buffer has outgrown the pseudo-gradient: `|m| > ratio |g|`. Text form `norm:1.5`.

    Args:
        ratio: above 0, for the buffer of the rule's own form (an EMA buffer is 1 - momentum times a sum buffer).
    """

    ratio: float

    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm"})

    def __post_init__(self) -> None:
        """Refuse what lies outside of the range, and keep a plain number."""
        ratio = check_number("NormRatio", "ratio", self.ratio, (0, math.inf), "norm:1.5")
        object.__setattr__(self, "ratio", ratio)

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart before the mixing when the buffer is too long."""
        return state, _drop_if(signal.value("buffer_norm") > self.ratio * signal.value("pseudo_gradient_norm"), signal)

    def scaled(self, factor: float) -> RestartPolicy:
        """Scale the ratio with the buffer."""
        return replace(self, ratio=self.ratio * factor)


def _drop_if(fires: bool, signal: RoundSignal) -> Decision:
    """Restart before the mixing if a test fires, unless the buffer holds a single round."""
    return Restart(before=True) if fires and signal.rounds_since_restart > 1 else None
