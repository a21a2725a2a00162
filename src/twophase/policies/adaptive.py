"""`Auto`: average the replicas, and extrapolate by how far the pseudo-gradient has shrunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from twophase.policies.base import Decision, RestartPolicy, RoundSignal, State, Step, register
from twophase.rule import OuterRule


@register("auto")
@dataclass(frozen=True, slots=True)
class Auto(RestartPolicy):
    """Average the replicas, and go on along the last update as far as the pseudo-gradient has shrunk. Text form `auto`.

        u <- g + (1 - |g| / M) |g| u / |u|,      x <- x - u,      M = the largest |g| of at least half of the rounds

    with the last update u as the buffer. Of the rule nothing enters, neither learning rate, momentum, look-ahead nor
    form. (An `OuterSGD` made by hand must have a momentum above 0, or it keeps no buffer. A rule without momentum
    becomes such a rule, see `RestartPolicy.effective`.)

    While |g| is near its largest, early in a run or always under a constant inner learning rate, this is plain
    averaging: extrapolation then hurts. Where |g| has shrunk, as under a decaying inner learning rate, the direction of
    the last updates adds up to |g| once more. An update is at most twice as long as that of averaging, whatever came
    before, so that it needs no restarts.

    It comes from trials and is no theorem: docs/restarts-auto.md has the evidence, for and against.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm"})
    takes_steps: ClassVar[bool] = True

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the step of the round."""
        g, m = signal.value("pseudo_gradient_norm"), signal.value("buffer_norm")
        after, largest = self.largest(state, signal)
        along = (1 - g / largest) * g / m if largest > 0 and m > 0 else 0.0
        return after, Step(1.0, along, mix=(along, 1.0))

    @staticmethod
    def largest(state: State, signal: RoundSignal) -> tuple[State, float]:
        """Return the next state and M, the largest |g| of at least half of the rounds."""
        older, newer = state.get("older", 0.0), state.get("newer", 0.0)
        if signal.round & (signal.round - 1) == 0:  # 1, 2, 4, 8, ...: both together cover at least half of the rounds
            older, newer = newer, 0.0
        newer = max(newer, signal.value("pseudo_gradient_norm"))
        return {"older": older, "newer": newer}, max(older, newer)

    def canonical(self, rule: OuterRule) -> OuterRule:
        """Return the same rule for all, also for those without momentum."""
        del rule
        return OuterRule(1.0, 0.5)
