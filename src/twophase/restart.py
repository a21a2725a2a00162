"""Restart policies: when the outer momentum begins anew.

A policy is a small frozen dataclass that knows nothing of tensors. Once a round it reads a `RoundSignal`, a few floats
that are equal on every rank, and answers with its next memory and one of

    None                       the rule's own update
    Restart(retain, inject)    after the update (or before g is mixed in)   m <- retain m + inject g
    Step(lr, momentum)         in place of the rule's update                m <- momentum m + g,  x <- x - lr m

A hard restart is `Restart()`: m <- 0. Norms and the cosine are measured before the round's g is mixed into m. The
policies below restart after the ordinary update of their round, which is the paper's timing.

A policy of your own is a frozen dataclass with `decide`, registered by name for text, configs and the command line
(docs/policies.md).

Source: Topollai et al. (2026), section 3 and the appendix on soft restarts.
"""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, ClassVar, TypeVar

from twophase.rule import OuterRule, whole_number

State = dict[str, float]
"""A policy's memory: numbers by name, which JSON and `torch.load(weights_only=True)` carry."""
MEASURED = frozenset({"pseudo_gradient_norm", "buffer_norm", "cosine"})
"""What a policy may need that the optimizer measures; anything else the caller passes as a signal."""
POLICIES_VARIABLE = "TWOPHASE_POLICIES"
"""Environment variable: modules, separated by commas, that register policies; imported when a name is unknown."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart of the buffer, `m <- retain m + inject g`; before g is mixed in if `before`, else after the update."""

    retain: float = 0.0
    inject: float = 0.0
    before: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Update of a round in place of the rule's: `m <- momentum m + g, x <- x - lr m`."""

    lr: float
    momentum: float = 0.0


Decision = Restart | Step | None


@dataclass(frozen=True, slots=True)
class RoundSignal:
    """What a policy may see of a round: plain floats, equal on every rank.

    Args:
        round: number of the round, from 1.
        rounds_since_restart: rounds since the last restart, this one included.
        pseudo_gradient_norm, buffer_norm: Euclidean norms of g, and of m before g is mixed in; None unless needed.
        cosine: cosine between the two, 0 when either is zero; None unless needed.
        extra: values that the caller supplies, averaged over the replicas.
    """

    round: int
    rounds_since_restart: int
    pseudo_gradient_norm: float | None = None
    buffer_norm: float | None = None
    cosine: float | None = None
    extra: Mapping[str, float] | None = None

    def value(self, name: str) -> float:
        """Return a measured or supplied number by its name; a KeyError if it is missing."""
        value = getattr(self, name) if name in MEASURED else (self.extra or {}).get(name)
        if value is None:
            raise KeyError(f"the restart policy needs {name!r}; pass it to step(signals=...)")
        return value


class RestartPolicy(ABC):
    """Decides, once a round, whether the outer momentum restarts; subclasses are frozen dataclasses of plain values.

    `needs` names what it reads of a `RoundSignal` beyond the counters. `takes_steps` says that it answers with a
    `Step`: then nothing of the rule enters.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    takes_steps: ClassVar[bool] = False

    @abstractmethod
    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the memory after this round ({} before the first), and what happens in it."""

    def __str__(self) -> str:
        """Return the text form, `name:value:...`; tuples are written with commas."""
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return ":".join([self.name, *(",".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)])


def ask(policy: RestartPolicy, state: State, signal: RoundSignal) -> tuple[State, Decision, tuple[str, ...]]:
    """Return a policy's next memory, its decision, and those of its needs that are not finite.

    With one that is not finite the run has diverged: the policy is not asked, and the caller reports it.

    A KeyError says that a value which it needs is missing, a TypeError that it answers something else than None, a
    `Restart` or, if it `takes_steps`, a `Step`.
    """
    if broken := tuple(sorted(name for name in policy.needs if not math.isfinite(signal.value(name)))):
        return state, None, broken
    state, decision = policy.decide(dict(state), signal)
    if not isinstance(decision, Restart | Step | None):
        raise TypeError(f"restart policy {policy}: decide() must return None, a Restart or a Step, got {decision!r}")
    if isinstance(decision, Step) and not policy.takes_steps:  # at momentum 0 it would have no buffer
        raise TypeError(f"restart policy {policy}: takes_steps must be True for decide() to return a Step")
    return state, decision, ()


def age_after(decision: Decision, age: int) -> int:
    """Return the rounds since the last restart after a round, where there were `age` with it before the decision."""
    return int(decision.before) if isinstance(decision, Restart) else age


REGISTRY: dict[str, type[RestartPolicy]] = {}
P = TypeVar("P", bound=type[RestartPolicy])


def register(name: str) -> Callable[[P], P]:
    """Make a policy known under a name that no other class has, to text, configs and commands; a class decorator."""

    def add(cls: P) -> P:
        before = REGISTRY.get(name, cls)
        if (before.__module__, before.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"register: the name {name!r} is taken by {before.__module__}.{before.__qualname__}")
        cls.name = name
        REGISTRY[name] = cls
        return cls

    return add


@register("never")
@dataclass(frozen=True)
class Never(RestartPolicy):
    """Ordinary outer momentum. Text form `never`."""

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return None."""
        del signal
        return state, None


@register("periodic")
@dataclass(frozen=True)
class Periodic(RestartPolicy):
    """Restart (hard) after every `period` rounds, >= 1; 1 is momentum-free. Text form: the period, `3`."""

    period: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", whole_number("Periodic: period", self.period))

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart when the round is a multiple of the period."""
        return state, Restart() if signal.round % self.period == 0 else None

    def __str__(self) -> str:
        return str(self.period)


@register("cycle")
@dataclass(frozen=True)
class Cycle(RestartPolicy):
    """Restart (hard) by a repeating list of periods, each in rounds and >= 1. Text form `cycle:5,6,10`."""

    periods: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "periods", tuple(whole_number("Cycle: periods", period) for period in self.periods))
        if not self.periods:
            raise ValueError("Cycle: periods is empty")

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart when the round ends one of the cycles."""
        position = (signal.round - 1) % sum(self.periods) + 1
        return state, Restart() if position in accumulate(self.periods) else None


@register("at")
@dataclass(frozen=True)
class AtRounds(RestartPolicy):
    """Restart (hard) after the rounds listed, numbered from 1, strictly increasing. Text form `at:4,9`."""

    rounds: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", tuple(whole_number("AtRounds: rounds", number) for number in self.rounds))
        if not self.rounds or any(b <= a for a, b in pairwise(self.rounds)):
            raise ValueError(f"AtRounds: rounds must increase strictly and not be empty, got {self.rounds}")

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart when the round is listed."""
        return state, Restart() if signal.round in self.rounds else None


@register("soft")
@dataclass(frozen=True)
class Soft(RestartPolicy):
    """Restart softly after every `period` rounds: `m <- retain m + inject g`. Text form `soft:3:0.2:0.1`.

    The coefficients act on the buffer of the rule's own form; in the other form `inject_sum = inject_ema /
    (1 - momentum)`. `Soft(K, 0, 0)` is `Periodic(K)`.

    Args:
        period: K, in rounds, >= 1.
        retain: share of the buffer that stays (the paper's alpha; the optimum may be negative).
        inject: weight of the pseudo-gradient that the round has just used (the paper's beta of the soft restart).
    """

    period: int
    retain: float
    inject: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", whole_number("Soft: period", self.period))
        for name in ("retain", "inject"):  # NumPy's scalars become plain numbers: the text form is exact
            value: Any = getattr(self, name)
            object.__setattr__(self, name, value.item() if hasattr(value, "item") else value)
        if not max(abs(self.retain), abs(self.inject)) <= 1e30:  # also refuses NaN; a float32 buffer holds it
            raise ValueError(f"Soft: retain and inject must be at most 1e30 in size, got {self.retain}, {self.inject}")

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart softly when the round is a multiple of the period."""
        due = signal.round % self.period == 0
        return state, Restart(float(self.retain), float(self.inject)) if due else None


@register("auto")
@dataclass(frozen=True)
class Auto(RestartPolicy):
    """Average the replicas, and go on along the last update as far as the pseudo-gradient has shrunk. Text form `auto`.

        u <- g + (1 - |g| / M) |g| u / |u|,      x <- x - u,      M = the largest |g| of at least half of the rounds

    with the last update u as buffer; of the rule nothing enters. While |g| is near its largest this is plain averaging;
    an update is at most twice as long as that of averaging. It is not recommended (docs/restarts.md).
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
        return {"older": older, "newer": newer}, Step(1.0, along)


def parse(value: str | int | RestartPolicy) -> RestartPolicy:
    """Return the policy of a text form, of a period, or a policy itself; the inverse of `str(policy)`.

    >>> parse("3"), str(parse("soft:3:0.2:0.1"))
    (Periodic(period=3), 'soft:3:0.2:0.1')
    """
    if isinstance(value, RestartPolicy):
        if not vars(type(value)).get("name"):  # of a subclass the text would be its parent's
            raise ValueError(f"restart {value!r} has no text form; decorate its class with @register('name')")
        return value
    text = str(value).strip()
    name, *words = ["periodic", text] if re.fullmatch("-?[0-9]+", text) else text.split(":")
    if name not in REGISTRY:
        for module in filter(None, os.environ.get(POLICIES_VARIABLE, "").split(",")):
            import_module(module.strip())
    if name not in REGISTRY:
        raise ValueError(f"restart {text!r} is not known; write a period or one of {', '.join(sorted(REGISTRY))}")
    cls = REGISTRY[name]
    kinds = [str(field.type) for field in fields(cls)]  # type: ignore[arg-type]
    usage = ":".join([name, *(field.name.upper() for field in fields(cls))])  # type: ignore[arg-type]
    if len(words) != len(kinds):
        raise ValueError(f"restart {text!r}: write {usage}")
    try:
        return cls(*(_value(word, kind) for word, kind in zip(words, kinds, strict=True)))
    except ValueError as error:
        raise ValueError(f"restart {text!r}: {error}; write {usage}") from None


def _value(word: str, kind: str) -> Any:
    if "tuple" in kind:
        return tuple(_value(item, "") for item in word.split(",") if item)
    if "str" in kind:
        return word
    try:
        return int(word)  # whole numbers stay ints in text and JSON, which run ids are made of
    except ValueError:
        return float(word)


def mean_outer_gain(rule: OuterRule, policy: RestartPolicy, rounds: int) -> float:
    """Return the mean displacement a round that a constant unit pseudo-gradient would cause over a run.

    A restart lowers it, so that a comparison with and without restarts is also one of two step sizes: match this number
    in a control. The same in both forms.

    Args:
        rule: the outer rule.
        policy: a policy that decides by the round alone.
        rounds: T >= 1.

    >>> round(mean_outer_gain(OuterRule(1.0, 0.9), Periodic(3), 60), 2)
    1.87
    """
    whole_number("mean_outer_gain: rounds", rounds)
    if policy.needs:
        raise ValueError(f"mean_outer_gain: {policy} decides from measured signals; its gain is not known in advance")
    state: State = {}
    along_g, along_m = rule.weights
    buffer, total, age = 0.0, 0.0, 0
    for number in range(1, rounds + 1):
        state, decision = policy.decide(state, RoundSignal(number, age + 1))
        age = age_after(decision, age + 1)
        if isinstance(decision, Step):
            buffer = decision.momentum * buffer + 1
            total += decision.lr * buffer
            continue
        if decision and decision.before:
            buffer = decision.retain * buffer + decision.inject
        total += along_g + along_m * buffer
        buffer = rule.momentum * buffer + rule.injection
        if decision and not decision.before:
            buffer = decision.retain * buffer + decision.inject
    return total / rounds
