"""When the outer momentum forgets: restart policies as values.

A policy is a frozen dataclass that knows nothing of tensors. Once a round it is shown a `RoundSignal`, a few floats
that are the same on every replica, and answers with its next state and `None`, a `Restart` or a `Step`:

    m <- retain m + inject g        Restart; a hard one is retain 0, inject 0: m <- 0
    x <- x - along_g g - along_m m  Step: in the place of the rule's own update, with the m before g is mixed in

on the buffer of the rule's own form. Scheduled policies (`Periodic`, `Cycle`, `AtRounds`, `Soft`) look only at the
round number and restart *after* the ordinary update of that round, which is the paper's timing. Adaptive policies
(`policies.measured`, `policies.probe`; `policies.rivals` are what they must beat) may also look at norms and angles,
which are measured *before* the round's pseudo-gradient is mixed in, and may set `before=True` to act before the mixing.
(After the mixing, everything in the plane of g and the buffer follows from these three numbers, so one measurement
serves both moments.)

To add a policy, write a frozen dataclass that derives from `RestartPolicy` and decorate it with `@register("name")`:
its text form (`name:value:...`), JSON form, state saving, the optimizer and the engine then work unchanged; so do the
sweeps and the command line, if the environment variable `TWOPHASE_POLICIES` names its module.
"""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import import_module
from itertools import accumulate
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

from twophase.rule import Form, OuterRule

State = dict[str, float]
"""A policy's memory: plain numbers under string keys, so that JSON and `torch.save(weights_only)` both carry it."""


@dataclass(frozen=True, slots=True)
class RoundSignal:
    """What a policy may see of a round: plain floats, equal on every replica.

    Args:
        round: number of the round, from 1.
        rounds_since_restart: rounds taken since the last restart, this one included; `round` when there was none.
        pseudo_gradient_norm: Euclidean norm of g; None unless the policy `needs` it.
        buffer_norm: Euclidean norm of the buffer before g is mixed in; None unless needed.
        cosine: cosine of the angle between g and that buffer, 0 when either vanishes; None unless needed.
        extra: further all-reduced values that the caller supplies, such as losses.
        rule: the rule that the policy is used with.
        probes: the losses of the policy's `candidates`, in their order; None unless it needs `"probes"`.
    """

    round: int
    rounds_since_restart: int
    pseudo_gradient_norm: float | None = None
    buffer_norm: float | None = None
    cosine: float | None = None
    extra: Mapping[str, float] | None = None
    rule: OuterRule | None = None
    probes: tuple[float, ...] | None = None

    def value(self, name: str) -> float:
        """One of the numbers by its name, whether measured or supplied.

        Raises:
            KeyError: it is not there.
        """
        found = getattr(self, name) if name in MEASURED else (self.extra or {})[name]
        if found is None:
            raise KeyError(name)
        return found


MEASURED = frozenset({"pseudo_gradient_norm", "buffer_norm", "cosine"})
"""What a policy may need that the optimizer measures by itself."""
PROBES = "probes"
"""What a policy needs that decides by the losses of its candidates."""
AGREEMENT = "agreement"
"""`|g|^2` over the mean of the replicas' own squared norms: 1 if they agree, 1 / replicas if they share nothing. An
engine of at least two replicas measures it."""


LARGEST = 1e30
"""The largest number that a policy may multiply a buffer or a pseudo-gradient with; a float32 holds it."""


@dataclass(frozen=True, slots=True)
class Step:
    """An update in the place of the rule's own: `x <- x - along_g g - along_m m`.

    Here m is the buffer that the signal speaks of, before g is mixed in (but after a restart before the mixing). Plain
    averaging of the replicas is `Step(1, 0)`.

    Args:
        along_g: weight of the pseudo-gradient in the update.
        along_m: weight of the buffer.
        mix: (c, d) of `m <- c m + d g` in the place of the rule's own mixing; None means that the buffer goes on as it
            would.
    """

    along_g: float
    along_m: float
    mix: tuple[float, float] | None = None

    @classmethod
    def of(cls, rule: OuterRule) -> Step:
        """The rule's own update: `lr (w g + b m)` (heavy ball) or `lr ((1 + b) w g + b^2 m)` (Nesterov)."""
        lr, b, w = rule.lr, rule.momentum, rule.injection
        return cls(lr * (1 + b) * w, lr * b * b) if rule.nesterov else cls(lr * w, lr * b)

    def times(self, factor: float) -> Step:
        """The same update, `factor` times as long."""
        return Step(factor * self.along_g, factor * self.along_m, self.mix)


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart event: `m <- retain m + inject g`, after (default) or before g is mixed into the buffer.

    Args:
        retain: share of the buffer that stays.
        inject: weight of the pseudo-gradient.
        before: act before g is mixed in instead of after the round's update.
        opposed: only in the coordinates in which g and m have opposite signs.
        counts: whether it begins a new cycle (`rounds_since_restart`) and is counted and reported as a restart; a mere
            rescaling of the buffer does not.
        step: the update of the round, in the place of the rule's own.
    """

    retain: float = 0.0
    inject: float = 0.0
    before: bool = False
    opposed: bool = False
    counts: bool = True
    step: Step | None = None


HARD = Restart()
Decision = Restart | Step | None
"""What a policy answers."""


class RestartPolicy(ABC):
    """Decides, once a round, whether the outer momentum restarts.

    A subclass is a frozen dataclass of plain numbers. `needs` names what it reads of a `RoundSignal` beyond the round
    counters and the rule: the optimizer measures only those norms and angles that somebody needs, and whoever builds an
    optimizer or an engine must promise to supply the rest. `takes_steps` says whether it ever answers with a `Step`:
    then it also changes a rule without momentum. `reads_rule` says whether its answers depend on the rule, and
    `by_coordinate` whether it ever answers with a restart of the opposed coordinates alone: then nobody knows its
    updates in advance, whatever it needs.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    takes_steps: ClassVar[bool] = False
    reads_rule: ClassVar[bool] = False
    by_coordinate: ClassVar[bool] = False

    def initial_state(self) -> State:
        """The memory before the first round."""
        return {}

    @abstractmethod
    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """The memory after this round, and the restart to perform, the step to take instead of the rule's, or None.

        Called through `ask`, which has seen to it that everything in `needs` is there and finite.
        """

    def candidates(self, rule: OuterRule) -> tuple[Decision, ...]:
        """The decisions whose losses are to be measured, for a policy that needs `"probes"`."""
        del rule
        return ()

    def canonical(self, rule: OuterRule) -> OuterRule:
        """One of the rules that make the same updates with this policy, the same one for all of them."""
        return rule

    def effective(self, rule: OuterRule) -> OuterRule:
        """The rule that an optimizer with this policy is built with: it has a momentum where the policy needs a buffer.

        A policy that brings its own mixing needs one whatever the rule says, and an optimizer keeps none at momentum 0.
        """
        return self.canonical(rule) if rule.momentum == 0 else rule

    def scaled(self, factor: float) -> RestartPolicy:
        """The same policy on a buffer that is `factor` times as large (what a change of form does to it)."""
        del factor
        return self

    def arguments(self) -> list[str]:
        """The words of the text form after the name, in the order of the fields."""
        return [_number(getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]

    @classmethod
    def from_arguments(cls, words: list[str]) -> RestartPolicy:
        """Build the policy from the words of its text form."""
        return cls(*(_parse_number(word) for word in words))

    def __str__(self) -> str:
        return ":".join([self.name, *self.arguments()])


@dataclass(frozen=True, slots=True)
class Answer:
    """What a policy has answered.

    Args:
        state: its memory after the round.
        restart: what happens to the buffer, or None.
        step: the update in the place of the rule's own, or None.
        not_finite: what the policy needs and what was not finite. Then it was not asked, its memory is as it was, and
            the run has diverged: whoever asks must say so.
    """

    state: State
    restart: Restart | None = None
    step: Step | None = None
    not_finite: tuple[str, ...] = ()

    @property
    def restarted(self) -> bool:
        """Whether a new cycle begins."""
        return self.restart is not None and self.restart.counts

    def age(self, age: int) -> int:
        """Rounds since the last restart after this round, where there were `age` with it before."""
        if self.restart is None or not self.restart.counts:
            return age
        return 1 if self.restart.before else 0

    def mixing(self, rule: OuterRule) -> tuple[float, float]:
        """The c and d of the round's `m <- c m + d g`."""
        own = (rule.momentum, rule.injection)
        return own if self.step is None or self.step.mix is None else self.step.mix

    def weights(self, rule: OuterRule) -> tuple[float, float]:
        """A and B of the round's update `A g + B m`, with m the buffer before the round.

        A restart of single coordinates is left out: there are no such two numbers.
        """
        retain, inject = 1.0, 0.0
        if self.restart is not None and self.restart.before and not self.restart.opposed:
            retain, inject = self.restart.retain, self.restart.inject
        step = self.step or Step.of(rule)
        return step.along_g + step.along_m * inject, step.along_m * retain


def ask(policy: RestartPolicy, state: State, signal: RoundSignal) -> Answer:
    """Ask a policy for its decision: the one way for everybody who has one.

    Args:
        policy: the policy.
        state: its memory; what is not there counts as before the first round.
        signal: with everything that it needs.

    Raises:
        KeyError: something that it needs is not there.
    """
    broken = [name for name in policy.needs - {PROBES} if not math.isfinite(signal.value(name))]
    if PROBES in policy.needs and not any(math.isfinite(loss) for loss in signal.probes or ()):
        broken.append(PROBES)  # of several candidates one may blow up; it is not chosen
    if broken:
        return Answer(state, not_finite=tuple(sorted(broken)))
    after, decision = policy.decide(policy.initial_state() | state, signal)
    return answered(after, decision)


def answered(state: State, decision: Decision) -> Answer:
    """A decision as an answer."""
    if isinstance(decision, Step):
        return Answer(state, None, decision)
    return Answer(state, decision, None if decision is None else decision.step)


_REGISTRY: dict[str, type[RestartPolicy]] = {}
_ELSEWHERE = tuple(f"twophase.policies.{name}" for name in ("auto", "measured", "rivals", "probe"))
"""Modules of ours that register policies; loaded when a name is not known yet."""
POLICIES_VARIABLE = "TWOPHASE_POLICIES"
"""Environment variable with the names of other people's modules that register policies, separated by commas; loaded
when a name is not known yet. So the command line and a sweep's workers, processes of their own, know them too."""
P = TypeVar("P", bound=type[RestartPolicy])


def register(name: str) -> Callable[[P], P]:
    """Class decorator: make a policy known under `name` to text, JSON, configs and the command line.

    A class of the same module and name takes the place of the one before, as when a notebook's cell runs again;
    instances of the older one must then be made anew.

    Raises:
        ValueError: the name is another policy's.
    """

    def add(cls: P) -> P:
        before = _REGISTRY.get(name)
        if before is not None and not _is_redefined(before, cls):
            place = f"{before.__module__}.{before.__qualname__}"
            raise ValueError(f"register: a restart policy named {name!r} exists already ({place}); choose another name")
        cls.name = name
        _REGISTRY[name] = cls
        if before is not None:
            _parse_text.cache_clear()  # what has been parsed is of the older class
        return cls

    return add


def _is_redefined(before: type[RestartPolicy], now: type[RestartPolicy]) -> bool:
    """Whether both classes are of the same place in the same module."""
    return (before.__module__, before.__qualname__) == (now.__module__, now.__qualname__)


@register("never")
@dataclass(frozen=True, slots=True)
class Never(RestartPolicy):
    """No restart: ordinary outer momentum. Text form `never`."""

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Always None."""
        del signal
        return state, None


@register("periodic")
@dataclass(frozen=True, slots=True)
class Periodic(RestartPolicy):
    """Hard restart after every round t with t mod period = 0. Text form: the period, for example `3`.

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
        """A hard restart when the round is a multiple of the period."""
        return state, HARD if signal.round % self.period == 0 else None

    def __str__(self) -> str:
        return str(self.period) if type(self) is Periodic else RestartPolicy.__str__(self)


@register("cycle")
@dataclass(frozen=True, slots=True)
class Cycle(RestartPolicy):
    """Hard restarts with a repeating list of periods. Text form `cycle:5,6,10`.

    Args:
        periods: lengths of the successive cycles in rounds, each >= 1; after the last the list starts anew.

    Source: mixed periods, R23 of the theory note (final residuals depend only on the counts of each length).
    """

    periods: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse an empty list and periods that are not whole numbers >= 1."""
        object.__setattr__(self, "periods", tuple(self.periods))
        if not self.periods:
            raise ValueError("Cycle: periods is empty; give at least one, for example cycle:5,6,10")
        object.__setattr__(self, "periods", tuple(check_count("Cycle", "a period", p) for p in self.periods))

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A hard restart when the round ends one of the cycles."""
        place = (signal.round - 1) % sum(self.periods) + 1
        return state, HARD if place in accumulate(self.periods) else None

    def arguments(self) -> list[str]:
        """The periods, separated by commas."""
        return [",".join(map(str, self.periods))]

    @classmethod
    def from_arguments(cls, words: list[str]) -> RestartPolicy:
        """Build from one word of comma-separated periods."""
        return cls(_parse_list(cls.name, words))


@register("at")
@dataclass(frozen=True, slots=True)
class AtRounds(RestartPolicy):
    """Hard restarts after the rounds listed, and no others. Text form `at:4,9`.

    Args:
        rounds: round numbers, counted from 1, strictly increasing.
    """

    rounds: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse an empty list, rounds below 1 and lists out of order."""
        object.__setattr__(self, "rounds", tuple(self.rounds))
        if not self.rounds:
            raise ValueError("AtRounds: rounds is empty; give at least one, for example at:4,9, or use never")
        object.__setattr__(self, "rounds", tuple(check_count("AtRounds", "a round", r) for r in self.rounds))
        if any(b <= a for a, b in zip(self.rounds, self.rounds[1:], strict=False)):
            raise ValueError(f"AtRounds: rounds {self.rounds} must increase strictly; sort them and drop repetitions")

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A hard restart when the round is listed."""
        return state, HARD if signal.round in self.rounds else None

    def arguments(self) -> list[str]:
        """The rounds, separated by commas."""
        return [",".join(map(str, self.rounds))]

    @classmethod
    def from_arguments(cls, words: list[str]) -> RestartPolicy:
        """Build from one word of comma-separated rounds."""
        return cls(_parse_list(cls.name, words))


@register("soft")
@dataclass(frozen=True, slots=True)
class Soft(RestartPolicy):
    """Soft restart after every `period` rounds: `m <- retain m + inject g`. Text form `soft:3:0.2:0.1`.

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
        """Refuse bad periods and coefficients that are not finite, or that a float32 buffer may not hold."""
        object.__setattr__(self, "period", check_count("Soft", "period", self.period))
        for name in ("retain", "inject"):
            value = check_number("Soft", name, getattr(self, name), (-math.inf, math.inf), "soft:3:0.2:0.1")
            if abs(value) > LARGEST:
                raise ValueError(
                    f"Soft: {name} is {value!r}; it must be a number from {-LARGEST:g} to {LARGEST:g}, which a float32 "
                    "holds, for example soft:3:0.2:0.1"
                )
            object.__setattr__(self, name, value)

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A soft restart when the round is a multiple of the period."""
        due = signal.round % self.period == 0
        # Whole numbers stay what they are in text and JSON, of which names of runs are made; but a tensor takes none
        # beyond 64 bits.
        return state, Restart(float(self.retain), float(self.inject)) if due else None

    def scaled(self, factor: float) -> RestartPolicy:
        """The buffer scales and g does not, so the injection scales with the buffer."""
        return replace(self, inject=self.inject * factor)


def _known(name: str) -> type[RestartPolicy] | None:
    """The policy of a name; ours, and then those of `POLICIES_VARIABLE`, are loaded when they are first asked for."""
    if name not in _REGISTRY:
        for module in _ELSEWHERE:
            import_module(module)
    if name not in _REGISTRY:
        for module in filter(None, map(str.strip, os.environ.get(POLICIES_VARIABLE, "").split(","))):
            try:
                import_module(module)
            except Exception as error:
                raise ValueError(
                    f"{POLICIES_VARIABLE}: the module {module!r} cannot be imported ({type(error).__name__}: {error}); "
                    "mend it, put its folder on PYTHONPATH, or unset the variable"
                ) from error
    return _REGISTRY.get(name)


def parse(text: str | int | RestartPolicy) -> RestartPolicy:
    """The policy of a text form; a policy is returned as it is and a whole number is a period.

    `never`, `3`, `cycle:5,6,10`, `at:4,9`, `soft:3:0.2:0.1`, or `name:value:...` of a registered policy. Inverse of
    `str(policy)`.

    Raises:
        ValueError: unknown name, wrong number of values, or values out of range.

    >>> parse("3"), str(parse("soft:3:0.2:0.1"))
    (Periodic(period=3), 'soft:3:0.2:0.1')
    """
    if isinstance(text, RestartPolicy):
        known = _known(text.name)
        if known is not None and known is not type(text) and _is_redefined(known, type(text)):
            raise ValueError(f"restart {text!r} is of an earlier definition of {known.__name__}; make it anew")
        if known is not type(text):  # its text form would be that of another policy, or of none
            raise ValueError(
                f'restart {text!r} has no text form; decorate {type(text).__name__} with @register("name")'
            )
        return text
    return _parse_text(str(text).strip())


@lru_cache(maxsize=1024)
def _parse_text(text: str) -> RestartPolicy:
    if re.fullmatch(r"[+-]?[0-9]+", text):
        return Periodic(int(text))
    name, *words = text.split(":")
    cls = _known(name)
    if cls is None:
        raise ValueError(
            f"restart {text!r} is not known; write never, a period such as 3, cycle:5,6,10, at:4,9, soft:3:0.2:0.1, or "
            f"one of {', '.join(sorted(_REGISTRY))} with its values; {POLICIES_VARIABLE} (an "
            "environment variable) names modules with policies of your own"
        )
    wanted = ":".join([name, *(field.name.upper() for field in fields(cls))])  # type: ignore[arg-type]
    try:
        return cls.from_arguments(words)
    except TypeError:
        raise ValueError(f"restart {text!r} has the wrong number of values; write {wanted}") from None
    except _NotANumberError as error:
        raise ValueError(f"restart {text!r}: {error} is not a number; write {wanted}") from None


def to_json(policy: RestartPolicy) -> dict[str, Any]:
    """The policy as a JSON object: its `kind` and its fields. Inverse of `from_json`.

    >>> to_json(Periodic(3))
    {'kind': 'periodic', 'period': 3}
    """
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}  # type: ignore[arg-type]
    return {"kind": policy.name} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def from_json(data: Mapping[str, Any]) -> RestartPolicy:
    """The policy of a JSON object that `to_json` wrote.

    Raises:
        ValueError: unknown kind, or fields that do not fit it.
    """
    values = dict(data)
    kind = values.pop("kind", None)
    cls = _known(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(f"from_json: kind {kind!r} is not known; use one of {', '.join(sorted(_REGISTRY))}")
    wanted = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if set(values) != wanted:
        raise ValueError(f"from_json: {kind!r} takes {sorted(wanted)}, got {sorted(values)}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def convert(rule: OuterRule, policy: RestartPolicy, form: Form) -> tuple[OuterRule, RestartPolicy]:
    """Rule and policy of the same trajectory in the other form.

    `lr_sum = lr_ema (1 - momentum)` and, for a soft restart, `inject_sum = inject_ema / (1 - momentum)`.

    >>> convert(OuterRule(7, 0.9, form="ema"), Soft(3, 0.2, 0.1), "sum")[1].inject
    1.0000000000000002
    """
    other = rule.to(form)
    return other, policy.scaled(other.injection / rule.injection)


def mean_outer_gain(rule: OuterRule, policy: RestartPolicy, rounds: int) -> float:
    """Mean displacement a round that a constant unit pseudo-gradient would cause over a run.

    `(1/T) sum_t u_t` with g = 1 in every round, u_t the rule's update (or the policy's step), and m under the policy
    from m = 0. The same in both forms. A restart lowers it, so a comparison with and without restarts is
    also a comparison of two step sizes: match this number in a control (R31 of the theory note).

    Args:
        rule: the outer rule.
        policy: the restart policy; one that decides from measured signals has no gain known in advance.
        rounds: T >= 1, the length of the run in rounds.

    Raises:
        ValueError: rounds < 1, or an adaptive policy.

    >>> round(mean_outer_gain(OuterRule(1.0, 0.9), Periodic(3), 60), 2)
    1.87
    """
    check_count("mean_outer_gain", "rounds", rounds)
    if policy.needs or policy.by_coordinate:
        raise ValueError(f"mean_outer_gain: {policy} decides from measured signals; its gain is not known in advance")
    state, buffer, total, age = policy.initial_state(), 0.0, 0.0, 0
    for number in range(1, rounds + 1):
        answer = ask(policy, state, RoundSignal(number, age + 1, rule=rule))
        state, age, restart = answer.state, answer.age(age + 1), answer.restart
        if restart is not None and restart.before:
            buffer = restart.retain * buffer + restart.inject
        step = answer.step or Step.of(rule)
        total += step.along_g + step.along_m * buffer
        kept, added = answer.mixing(rule)
        buffer = kept * buffer + added
        if restart is not None and not restart.before:
            buffer = restart.retain * buffer + restart.inject
    return total / rounds


def check_count(where: str, what: str, value: object, least: int = 1) -> int:
    """`value` as a plain int if it is a whole number >= `least` (NumPy's included); otherwise raise a ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{where}: {what} is {value!r}; it must be a whole number >= {least}")
    return int(value)


def check_number(where: str, what: str, value: object, span: tuple[float, float], example: str) -> float:
    """`value` as a plain finite number (NumPy's included) in a span; otherwise raise a ValueError.

    The ends belong to the span where both are finite; above 0 is `(0, inf)`, any number `(-inf, inf)`.
    """
    low, high = span
    endless = high == math.inf
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # of a whole number that no float can hold
            number = int(value) if isinstance(value, Integral) and math.isfinite(value) else float(value)
    if not (low < number < high if endless else low <= number <= high):
        words = f"a number from {low:g} to {high:g}"
        if endless:
            words = "a finite number" + (f" above {low:g}" if math.isfinite(low) else "")
        raise ValueError(f"{where}: {what} is {value!r}; it must be {words}, for example {example}")
    return number


def _number(value: float) -> str:
    return repr(value if isinstance(value, int) else float(value))  # NumPy's floats would write their type's name


class _NotANumberError(ValueError):
    """The word that is none."""


def _parse_number(word: str) -> float:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        return float(word)
    except ValueError:
        raise _NotANumberError(repr(word)) from None


def _parse_list(name: str, words: list[str]) -> tuple[int, ...]:
    try:
        (word,) = words
        return tuple(int(item) for item in word.split(","))
    except ValueError:
        raise ValueError(
            f"restart {':'.join([name, *words])!r}: write {name}: and whole numbers separated by commas, "
            f"for example {name}:4,9"
        ) from None
