"""Restart by what a round measures: `loss`, the test of the loss before and after an outer step.

docs/restarts.md compares restart tests. Source: theory note R30.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from twophase.policies.base import Decision, Restart, RestartPolicy, RoundSignal, State
from twophase.policies.text import register


@register("loss")
@dataclass(frozen=True, slots=True)
class LossTest(RestartPolicy):
    """Restart when the anchor is worse than what the replicas had reached. Text form `loss`, or `loss:0.5`.

    Fires before the mixing when the mean loss at the start of the round exceeds the one at the end of the round
    before: the outer step between the two has made things worse. Needs `loss_start` and `loss_end`, the mean training
    loss over the first and the last quarter of a round's inner steps and over the replicas. A fragment's round goes
    from one of its own outer steps to the next.

    Args:
        retain: share of the buffer that stays, in [0, 1).
    """

    retain: float = 0.0

    needs: ClassVar[frozenset[str]] = frozenset({"loss_start", "loss_end"})

    def __post_init__(self) -> None:
        """Refuse shares outside [0, 1)."""
        if not (isinstance(self.retain, Real) and not isinstance(self.retain, bool) and 0 <= self.retain < 1):
            raise ValueError(
                f"LossTest: retain is {self.retain!r}; it must lie in [0, 1), for example loss or loss:0.5"
            )
        object.__setattr__(self, "retain", float(self.retain))

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart before the mixing when the outer step before has raised the loss."""
        worse = signal.value("loss_start") > state.get("end", math.inf)
        after: State = {"end": signal.value("loss_end")}
        return after, Restart(self.retain, before=True) if worse else None
