"""Choose the outer step by `auto`, which needs neither learning rate nor momentum nor restart period."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from twophase.policies.base import Decision, RestartPolicy, RoundSignal, State, Step
from twophase.policies.text import register
from twophase.rule import OuterRule


@register("auto")
@dataclass(frozen=True, slots=True)
class Auto(RestartPolicy):
    """Average the replicas, and go on along the last update as far as the pseudo-gradient has shrunk. Text form `auto`.

        u <- g + (1 - |g| / M) |g| u / |u|,      x <- x - u,      M = the largest |g| of at least half of the rounds

    with the last update u as the buffer. Of the rule nothing enters, neither learning rate, momentum, look-ahead nor
    form. (An `OuterSGD` that is built by hand must have a momentum above 0, or it keeps no buffer; a rule without
    momentum becomes one with it, see `RestartPolicy.effective`.)

    While |g| is as large as ever, as it is early in a run and all along under a constant inner learning rate, this is
    plain averaging: to extrapolate then hurts. Where |g| has shrunk, as under a decaying inner learning rate, the
    direction of the last updates adds up to |g| once more. An update is at most twice as long as that of averaging,
    whatever came before, so that it needs no restarts.

    It comes from trials and is no theorem: docs/restarts.md has the evidence, for and against.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm"})
    takes_steps: ClassVar[bool] = True

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the step of the round."""
        g, m = signal.value("pseudo_gradient_norm"), signal.value("buffer_norm")
        older, newer = state.get("older", 0.0), state.get("newer", 0.0)
        if signal.round & (signal.round - 1) == 0:  # 1, 2, 4, 8, ...: both together cover at least half of the rounds
            older, newer = newer, 0.0
        newer = max(newer, g)
        largest = max(older, newer)
        along = (1 - g / largest) * g / m if largest > 0 and m > 0 else 0.0
        return {"older": older, "newer": newer}, Step(1.0, along, mix=(along, 1.0))

    def canonical(self, rule: OuterRule) -> OuterRule:
        """Return the same rule for all, also for those without momentum."""
        del rule
        return OuterRule(1.0, 0.5)
