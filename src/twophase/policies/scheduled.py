"""Restart by the round number alone: `Periodic`, `Cycle`, `AtRounds`, `Soft`.

They act *after* the ordinary update of a round, which is the paper's timing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from twophase.policies.base import HARD, Decision, Restart, RestartPolicy, RoundSignal, State, register
from twophase.policies.checks import LARGEST, check_count, check_number


@register("periodic")
@dataclass(frozen=True, slots=True)
class Periodic(RestartPolicy):
    """Restart (hard) after every round t with t mod period = 0. Text form: the period, for example `3`.

    Args:
        period: K, in rounds, a whole number >= 1. Period 1 is momentum-free; a period at or above the number of
            rounds never shows.

    Source: paper section 3, `m <- 0 every K rounds`; timing R4 of the theory note.

    >>> [t for t in range(1, 8) if Periodic(3).decide({}, RoundSignal(t, t))[1]]
    [3, 6]
    """

    period: int

    def __post_init__(self) -> None:
        """Refuse periods that are not whole numbers >= 1."""
        object.__setattr__(self, "period", check_count("Periodic", "period", self.period))

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart when the round is a multiple of the period."""
        return state, HARD if signal.round % self.period == 0 else None

    def __str__(self) -> str:
        return str(self.period) if type(self) is Periodic else RestartPolicy.__str__(self)


@register("cycle")
@dataclass(frozen=True, slots=True)
class Cycle(RestartPolicy):
    """Restart (hard) with a repeating list of periods. Text form `cycle:5,6,10`.

    Args:
        periods: lengths of the successive cycles in rounds, each >= 1; after the last the list starts anew.

    Source: mixed periods, R23 of the theory note (final residuals depend only on the counts of each length).
    """

    periods: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse an empty list and periods that are not whole numbers >= 1."""
        periods = tuple(check_count("Cycle", "a period", period) for period in self.periods)
        if not periods:
            raise ValueError("Cycle: periods is empty; give at least one, for example cycle:5,6,10")
        object.__setattr__(self, "periods", periods)

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart when the round ends one of the cycles."""
        position = (signal.round - 1) % sum(self.periods) + 1
        return state, HARD if position in accumulate(self.periods) else None


@register("at")
@dataclass(frozen=True, slots=True)
class AtRounds(RestartPolicy):
    """Restart (hard) after the rounds listed, and no others. Text form `at:4,9`.

    Args:
        rounds: round numbers, counted from 1, strictly increasing.
    """

    rounds: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse an empty list, rounds below 1 and lists out of order."""
        rounds = tuple(check_count("AtRounds", "a round", number) for number in self.rounds)
        if not rounds:
            raise ValueError("AtRounds: rounds is empty; give at least one, for example at:4,9, or use never")
        if any(b <= a for a, b in pairwise(rounds)):
            raise ValueError(f"AtRounds: rounds {rounds} must increase strictly; sort them and drop repetitions")
        object.__setattr__(self, "rounds", rounds)

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart when the round is listed."""
        return state, HARD if signal.round in self.rounds else None


@register("soft")
@dataclass(frozen=True, slots=True)
class Soft(RestartPolicy):
    """Restart softly after every `period` rounds: `m <- retain m + inject g`. Text form `soft:3:0.2:0.1`.

    `g` is the pseudo-gradient that the round has just used. The coefficients act on the buffer of the rule's own
    form: the same soft restart in the other form has `inject_sum = inject_ema / (1 - momentum)` (see `convert`).
    `Soft(K, 0, 0)` is `Periodic(K)`.

    Args:
        period: K, in rounds, a whole number >= 1.
        retain: share of the buffer that stays, any number up to 1e30 in size (the paper's alpha, in [0, 1]; the optimum
            may be negative).
        inject: weight of the pseudo-gradient, any number up to 1e30 in size (the paper's beta of the soft restart).

    Source: paper appendix on soft restarts; R26 and R27 of the theory note.
    """

    period: int
    retain: float
    inject: float

    def __post_init__(self) -> None:
        """Refuse bad periods, and coefficients that are not finite or that a float32 buffer may not hold."""
        object.__setattr__(self, "period", check_count("Soft", "period", self.period))
        for name in ("retain", "inject"):
            value = check_number("Soft", name, getattr(self, name), (-LARGEST, LARGEST), "soft:3:0.2:0.1")
            object.__setattr__(self, name, value)

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart softly when the round is a multiple of the period."""
        due = signal.round % self.period == 0
        # Whole numbers stay ints in text and JSON, which run ids are made of; but a tensor takes no int beyond 64 bits.
        return state, Restart(float(self.retain), float(self.inject)) if due else None

    def scaled(self, factor: float) -> RestartPolicy:
        """Scale the injection with the buffer, since g stays as large as it is."""
        return replace(self, inject=self.inject * factor)
