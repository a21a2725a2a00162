"""Restart policies that the experiments compare; experiments/log.md, 22 November 2026, says why none is recommended.

Import this module, or name it for the command line:

    PYTHONPATH=experiments TWOPHASE_POLICIES=policies twophase train --outer.restart gradient

Restart tests: `gradient` and `norm:1.5`, both before the round's g is mixed in. Parts of `auto` are its controls:
`along:0.5` (its direction with a fixed gain), `ramp:0.5` (with a rising gain), `gain:1` (its gain alone).

Source: theory note R30.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from twophase.restart import (
    POLICIES_VARIABLE,
    Auto,
    Decision,
    Restart,
    RestartPolicy,
    RoundSignal,
    State,
    Step,
    register,
)


def share_with_workers() -> None:
    """Name this module in the environment, so that the worker processes of a sweep load it too."""
    here = Path(__file__)
    for variable, separator, value in (
        (POLICIES_VARIABLE, ",", here.stem),
        ("PYTHONPATH", os.pathsep, str(here.parent)),
    ):
        os.environ[variable] = separator.join(filter(None, [value, os.environ.get(variable)]))


@register("gradient")
@dataclass(frozen=True)
class Gradient(RestartPolicy):
    """Restart when the pseudo-gradient points against the buffer: `<g, m> < 0`. Text form `gradient`.

    Not in the first round after a restart. Without noise the first choice of the adaptive rules. In language models
    pseudo-gradients stay positively correlated even in failing runs, so it hardly ever fires.

    Source: theory note R30; O'Donoghue and Candes (2015), the gradient scheme.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"cosine"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart before the mixing when the cosine is negative."""
        return state, _drop_if(signal.value("cosine") < 0, signal)


@register("norm")
@dataclass(frozen=True)
class NormRatio(RestartPolicy):
    """Restart when the buffer has outgrown the pseudo-gradient: `|m| > ratio |g|`. Text form `norm:1.5`.

    Args:
        ratio: above 0, for the buffer of the rule's own form (an EMA buffer is 1 - momentum times a sum buffer).
    """

    ratio: float

    needs: ClassVar[frozenset[str]] = Auto.needs

    def __post_init__(self) -> None:
        if not 0 < self.ratio < math.inf:
            raise ValueError(f"NormRatio: ratio must be above 0, got {self.ratio}")

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart before the mixing when the buffer is too long."""
        return state, _drop_if(signal.value("buffer_norm") > self.ratio * signal.value("pseudo_gradient_norm"), signal)


def _drop_if(fires: bool, signal: RoundSignal) -> Decision:
    """Restart before the mixing if a test fires, unless the buffer holds a single round."""
    return Restart(before=True) if fires and signal.rounds_since_restart > 1 else None


@register("along")
@dataclass(frozen=True)
class Along(RestartPolicy):
    """Go on along the last update by a fixed share: the direction of `auto` without its gain. Text form `along:0.5`.

    `u <- g + share |g| u / |u|,  x <- x - u`; `auto` has `1 - |g| / M` in the place of the share, which is >= 0.
    As in `auto`, nothing of the rule enters.
    """

    share: float

    needs: ClassVar[frozenset[str]] = Auto.needs
    takes_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1e30:
            raise ValueError(f"{type(self).__name__}: share must be in [0, 1e30], got {self.share}")

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the step of the round."""
        g, u = signal.value("pseudo_gradient_norm"), signal.value("buffer_norm")
        return state, Step(1.0, self.share * g / u if u > 0 else 0.0)


@register("ramp")
@dataclass(frozen=True)
class Ramp(Along):
    """Go on along the last update by a share that rises over the run: `auto` as a schedule. Text form `ramp:0.5`.

    `u <- g + share (t / T) |g| u / |u|,  x <- x - u` in round t of T.
    """

    needs: ClassVar[frozenset[str]] = Along.needs | {"progress"}

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the step of the round."""
        return Along(self.share * signal.value("progress")).decide(state, signal)


@register("gain")
@dataclass(frozen=True)
class Gain(Along):
    """Lengthen plain averaging as g shrinks: the gain of `auto` without its direction. Text form `gain:1`.

    `x <- x - (1 + share (1 - |g| / M)) g` with the M of `auto`.
    At a share of 1 it has the length that `auto` has where all updates are parallel.
    """

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the step of the round."""
        after, _ = Auto().decide(state, signal)
        largest = max(after.values())
        shrunk = 1 - signal.value("pseudo_gradient_norm") / largest if largest > 0 else 0.0
        return after, Step(1 + self.share * shrunk, 0.0)
