"""What a run subtracts from its anchor, written out: the coefficient of every pseudo-gradient, in exact fractions.

The oracle of `sweep.history` and of merging: it shares no code with them. Restarts come from the definition of each
policy, not from its `decide`, and Nesterov's step in EMA form is the paper's `(1 + b) m - b m_old`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar

from twophase.restart import (
    REGISTRY,
    AtRounds,
    Cycle,
    Never,
    Periodic,
    Restart,
    RestartPolicy,
    RoundSignal,
    Soft,
    State,
    register,
)
from twophase.rule import OuterRule

Vector = tuple[Fraction, ...]
"""c_t1 ... c_tt of an update."""


@dataclass(frozen=True, slots=True)
class Early(RestartPolicy):
    """A soft restart every `period` rounds, before the round's pseudo-gradient is mixed in."""

    period: int
    retain: float
    inject: float

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        """A restart when the round is a multiple of the period."""
        return state, Restart(self.retain, self.inject, before=True) if signal.round % self.period == 0 else None


@dataclass(frozen=True, slots=True)
class Twice(RestartPolicy):
    """Hard restarts when the momentum is `age` rounds old, two in all: it has memory and looks at the counter."""

    age: int
    before: int

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        """A restart when the momentum is old enough, twice."""
        if state.get("left", 2) == 0 or signal.rounds_since_restart < self.age:
            return state, None
        return {"left": state.get("left", 2) - 1}, Restart(before=bool(self.before))


@dataclass(frozen=True, slots=True)
class Measured(RestartPolicy):
    """Restarts when the buffer is more than `limit` times as long as the pseudo-gradient: only a run can tell."""

    limit: float

    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Restart | None]:
        """A restart when the buffer is long."""
        too_long = signal.value("buffer_norm") > self.limit * signal.value("pseudo_gradient_norm")
        return state, Restart() if too_long else None


@contextmanager
def registered() -> Iterator[None]:
    """The policies above have text forms: `early:2:0.5:1`, `twice:2:0`, `measured:1.5`."""
    for cls in (Early, Twice, Measured):
        register(cls.__name__.lower())(cls)
    try:
        yield
    finally:
        for cls in (Early, Twice, Measured):
            del REGISTRY[cls.__name__.lower()]


def decimal(value: float) -> Fraction:
    """The number that a float prints as: 0.7 is 7/10."""
    return Fraction(Decimal(str(float(value))))


def due(policy: RestartPolicy, number: int) -> tuple[float, float, bool] | None:
    """(retain, inject, before) of round `number`, from the definition of the policy; None for no restart."""
    hard = (0.0, 0.0, False)
    match policy:
        case Never():
            return None
        case Periodic(period):
            return hard if number % period == 0 else None
        case Cycle(periods):
            ends = itertools.accumulate(itertools.cycle(periods))
            return hard if number in itertools.takewhile(lambda end: end <= number, ends) else None
        case AtRounds(rounds):
            return hard if number in rounds else None
        case Soft(period, retain, inject):
            return (retain, inject, False) if number % period == 0 else None
        case Early(period, retain, inject):
            return (retain, inject, True) if number % period == 0 else None
        case Twice(age, before):
            # A restart before the mixing leaves a momentum of age 1, one after it none.
            second = max(2 * age - 1, age + 1) if before else 2 * age
            return (0.0, 0.0, bool(before)) if number in (age, second) else None
    raise AssertionError(policy)


def coefficients(rule: OuterRule, policy: RestartPolicy, rounds: int) -> list[Vector]:
    """The coefficients of each round's update, by direct simulation on coefficient vectors."""
    lr, b = decimal(rule.lr), decimal(rule.momentum)

    def mixed(retain: Fraction, m: list[Fraction], inject: Fraction | int) -> list[Fraction]:
        """`retain m + inject g`, for the round's pseudo-gradient g, whose coefficient is the last."""
        return [*(retain * x for x in m[:-1]), retain * m[-1] + inject]

    buffer, updates = list[Fraction](), []
    for t in range(rounds):
        buffer = [*buffer, Fraction(0)]
        restarted = due(policy, t + 1) if b else None
        if restarted and restarted[2]:
            buffer = mixed(decimal(restarted[0]), buffer, decimal(restarted[1]))
        old = buffer
        if rule.form == "sum":
            buffer = mixed(b, old, 1)
            step = mixed(b, buffer, 1) if rule.nesterov else buffer
        else:
            buffer = mixed(b, old, 1 - b)
            step = [(1 + b) * x - b * y for x, y in zip(buffer, old, strict=True)] if rule.nesterov else buffer
        updates.append(tuple(lr * c for c in step))
        if restarted and not restarted[2]:
            buffer = mixed(decimal(restarted[0]), buffer, decimal(restarted[1]))
    return updates
