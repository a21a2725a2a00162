"""The policy `auto` in parts, as its controls: its direction with a fixed or a rising gain, its gain; and a measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from twophase.policies.adaptive import Auto
from twophase.policies.base import AGREEMENT, AVERAGING, Decision, RestartPolicy, RoundSignal, State, Step
from twophase.policies.checks import LARGEST, check_number
from twophase.policies.text import register
from twophase.rule import OuterRule


class _Alone(RestartPolicy):
    """A policy whose updates are its own: of the rule nothing enters, as with `auto`."""

    takes_steps: ClassVar[bool] = True

    def canonical(self, rule: OuterRule) -> OuterRule:
        """Return the same rule for all, also for those without momentum."""
        del rule
        return OuterRule(1.0, 0.5)


class _Part(_Alone):
    """A part of `auto`."""

    def __post_init__(self) -> None:
        """Refuse negative shares, and keep plain numbers."""
        share = check_number(type(self).__name__, "share", self.share, (0, LARGEST), f"{self.name}:0.5")  # type: ignore[attr-defined]
        object.__setattr__(self, "share", share)


@register("along")
@dataclass(frozen=True, slots=True)
class Along(_Part):
    """Go on along the last update by a fixed share: the direction of `auto` without its gain. Text form `along:0.5`.

    `u <- g + share |g| u / |u|,  x <- x - u`; `auto` has `1 - |g| / M` in the place of the share.

    Args:
        share: >= 0.
    """

    share: float

    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the step of the round."""
        return state, self._step(signal, self.share)

    @staticmethod
    def _step(signal: RoundSignal, share: float) -> Step:
        g, u = signal.value("pseudo_gradient_norm"), signal.value("buffer_norm")
        along = share * g / u if u > 0 else 0.0
        return Step(1.0, along, mix=(along, 1.0))


@register("ramp")
@dataclass(frozen=True, slots=True)
class Ramp(Along):
    """Go on along the last update by a share that rises over the run: `auto` as a schedule. Text form `ramp:0.5`.

    `u <- g + share (t / T) |g| u / |u|,  x <- x - u` in round t of T.

    Args:
        share: at the run's end, >= 0.
    """

    needs: ClassVar[frozenset[str]] = Along.needs | {"progress"}

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the step of the round."""
        return state, self._step(signal, self.share * signal.value("progress"))


@register("gain")
@dataclass(frozen=True, slots=True)
class Gain(_Part):
    """Lengthen plain averaging as g shrinks: the gain of `auto` without its direction. Text form `gain:1`.

    `x <- x - (1 + share (1 - |g| / M)) g` with the M of `auto`.

    Args:
        share: >= 0; 1 has the length that `auto` has where all updates are parallel.
    """

    share: float

    needs: ClassVar[frozenset[str]] = Auto.needs

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the step of the round."""
        after, largest = Auto.largest(state, signal)
        shrunk = 1 - signal.value("pseudo_gradient_norm") / largest if largest > 0 else 0.0
        return after, Step(1 + self.share * shrunk, 0.0)


@register("observe")
@dataclass(frozen=True, slots=True)
class Observe(_Alone):
    """Average, and measure: the cosine of g and the last g, and how far replicas agree. Text form `observe`."""

    needs: ClassVar[frozenset[str]] = Along.needs | {"cosine", AGREEMENT}

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Average; the buffer becomes g."""
        del signal
        return state, Step(AVERAGING.along_g, AVERAGING.along_m, mix=(0.0, 1.0))
