"""`auto`: an outer step that needs neither learning rate nor restart period, and hardly a momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from twophase.restart import Decision, RestartPolicy, RoundSignal, State, Step, register
from twophase.rule import OuterRule


@register("auto")
@dataclass(frozen=True, slots=True)
class Auto(RestartPolicy):
    """Average the replicas, and go on in the buffer's direction as far as the pseudo-gradient has shrunk. `auto`.

        x <- x - g - (1 - |g| / M) |g| m / |m|,      M = the largest |g| of at least the last half of the rounds

    with m the buffer before g is mixed in. The learning rate, the look-ahead and the form of the rule do not enter; its
    momentum is only the memory of the direction. While |g| is as large as ever, as it is early in a run and all along
    under a constant inner learning rate, this is plain averaging: to extrapolate then hurts. Where |g| has shrunk, as
    under a decaying inner learning rate, the buffer adds up to |g| once more. The update is at most twice as long as
    that of averaging, whatever the buffer holds, so that nothing has to be forgotten in time.

    It is a rule found by trials and not a theorem: docs/restarts-in-practice.md has the evidence, for and against.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm"})
    takes_steps: ClassVar[bool] = True

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """The step of the round."""
        g, m = signal.value("pseudo_gradient_norm"), signal.value("buffer_norm")
        older, newer = state.get("older", 0.0), state.get("newer", 0.0)
        if signal.round & (signal.round - 1) == 0:  # 1, 2, 4, 8, ...: what is left covers half of the rounds and more
            older, newer = newer, 0.0
        newer = max(newer, g)
        largest = max(older, newer)
        shrunk = 1 - g / largest if largest > 0 else 0.0
        return {"older": older, "newer": newer}, Step(1.0, shrunk * g / m if m > 0 else 0.0)

    def canonical(self, rule: OuterRule) -> OuterRule:
        """Rules of one momentum are one rule here."""
        return OuterRule(1.0, rule.momentum)
