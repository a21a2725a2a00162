"""Define what a restart policy sees of a round, what it may answer, and how it is asked.

A policy is a frozen dataclass that knows nothing of tensors. Once a round it reads a `RoundSignal`: a few floats, the
same on every replica. It answers with its next state and `None`, a `Restart` or a `Step`:

    m <- retain m + inject g        Restart; a hard restart is retain 0, inject 0: m <- 0
    x <- x - along_g g - along_m m  Step: in the place of the rule's own update, with the m before g is mixed in

on the buffer of the rule's own form. Norms and angles are measured *before* the round's g is mixed in. After the
mixing, everything in the plane of g and m follows from these three numbers: a single measurement serves both moments.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from twophase.rule import OuterRule

State = dict[str, float]
"""A policy's memory: plain numbers under string keys, so that JSON and `torch.save(weights_only)` both carry it."""
MEASURED = frozenset({"pseudo_gradient_norm", "buffer_norm", "cosine"})
"""What a policy may need that the optimizer measures by itself."""


@dataclass(frozen=True, slots=True)
class RoundSignal:
    """Hold what a policy may see of a round: plain floats, equal on every replica.

    Args:
        round: number of the round, from 1.
        rounds_since_restart: rounds taken since the last restart, this round included; `round` when there was none.
        pseudo_gradient_norm: Euclidean norm of g; None unless the policy `needs` it.
        buffer_norm: Euclidean norm of the buffer before g is mixed in; None unless needed.
        cosine: cosine of the angle between g and that buffer, 0 when either vanishes; None unless needed.
        extra: further all-reduced values that the caller supplies, such as losses.
        rule: the rule that the policy is used with.
    """

    round: int
    rounds_since_restart: int
    pseudo_gradient_norm: float | None = None
    buffer_norm: float | None = None
    cosine: float | None = None
    extra: Mapping[str, float] | None = None
    rule: OuterRule | None = None

    def value(self, name: str) -> float:
        """Return a measured or supplied number by its name; raise KeyError if it is missing."""
        value = getattr(self, name) if name in MEASURED else (self.extra or {})[name]
        if value is None:
            raise KeyError(name)
        return value


@dataclass(frozen=True, slots=True)
class Step:
    """Take an update in the place of the rule's own: `x <- x - along_g g - along_m m`.

    Here m is the buffer that the signal speaks of, before g is mixed in (but after a restart before the mixing). Plain
    averaging of the replicas is `Step(1, 0)`.

    Args:
        along_g: weight of the pseudo-gradient in the update.
        along_m: weight of the buffer.
        mix: (c, d) of `m <- c m + d g` in the place of the rule's own mixing; None keeps the rule's.
    """

    along_g: float
    along_m: float
    mix: tuple[float, float] | None = None

    @classmethod
    def of(cls, rule: OuterRule) -> Step:
        """Return the rule's own update: `lr (w g + b m)` (heavy ball) or `lr ((1 + b) w g + b^2 m)` (Nesterov)."""
        lr, b, w = rule.lr, rule.momentum, rule.injection
        return cls(lr * (1 + b) * w, lr * b * b) if rule.nesterov else cls(lr * w, lr * b)


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the buffer: `m <- retain m + inject g`, after (default) or before g is mixed into it.

    Args:
        retain: share of the buffer that stays.
        inject: weight of the pseudo-gradient.
        before: act before g is mixed in instead of after the round's update.
        step: the update of the round, in the place of the rule's own.
    """

    retain: float = 0.0
    inject: float = 0.0
    before: bool = False
    step: Step | None = None


HARD = Restart()
Decision = Restart | Step | None
"""What a policy answers."""


class RestartPolicy(ABC):
    """Decide, once a round, whether the outer momentum restarts.

    A subclass is a frozen dataclass of plain numbers and tuples. Class variables say what it asks:

    * `needs`: what it reads of a `RoundSignal` beyond the round counters and the rule. The optimizer measures only
      needed norms and angles; the caller of an optimizer or an engine must promise to supply the rest.
    * `takes_steps`: whether it ever answers with a `Step`; then it also changes a rule without momentum.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    takes_steps: ClassVar[bool] = False

    def initial_state(self) -> State:
        """Return the memory before the first round."""
        return {}

    @abstractmethod
    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the memory after this round, and the restart to perform, the step to take, or None.

        Called through `ask`, which has checked that everything in `needs` is there and finite.
        """

    def canonical(self, rule: OuterRule) -> OuterRule:
        """Choose a representative of the rules that make the same updates with this policy, the same for all."""
        return rule

    def effective(self, rule: OuterRule) -> OuterRule:
        """Return the rule to build an optimizer with: it has a momentum where the policy needs a buffer.

        A policy that brings its own mixing needs a buffer whatever the rule says; at momentum 0 an optimizer has none.
        """
        return self.canonical(rule) if rule.momentum == 0 else rule

    def own_rule(self) -> OuterRule:
        """Return the rule to build an optimizer with where nothing of a rule enters the policy's updates.

        Raises:
            ValueError: the rule matters.
        """
        rules = {self.canonical(OuterRule(lr, momentum)) for lr, momentum in ((1.0, 0.9), (0.7, 0.0))}
        if len(rules) > 1:
            raise ValueError(
                f"restart policy {self} restarts the momentum of a rule, and there is none. Give OuterSGD an lr, such "
                "as lr=0.7, and DiLoCo an OuterRule(0.7, 0.9, nesterov=True), or take auto, which needs none"
            )
        return rules.pop()

    def scaled(self, factor: float) -> RestartPolicy:
        """Return the same policy for a buffer that is `factor` times as large (as a change of form makes it)."""
        del factor
        return self

    def __str__(self) -> str:
        """Return the text form: the name and the values of the fields, in their order."""
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return ":".join([self.name, *(",".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)])


REGISTRY: dict[str, type[RestartPolicy]] = {}
"""The policies by name."""
P = TypeVar("P", bound=type[RestartPolicy])


def register(name: str) -> Callable[[P], P]:
    """Make a policy known under `name` to text, configs and the command line; a class decorator.

    A class of the same module and name replaces the earlier definition, as when a notebook's cell runs again. Instances
    of the earlier class must then be remade.

    Raises:
        ValueError: the name belongs to another policy.
    """

    def add(cls: P) -> P:
        check_name("restart policy", name, REGISTRY.get(name), cls)
        cls.name = name
        REGISTRY[name] = cls
        return cls

    return add


def check_name(kind: str, name: str, before: type | None, now: type) -> None:
    """Refuse the name of another registered class; `now` may be a new definition of `before`."""
    if before is not None and not is_redefined(before, now):
        owner = f"{before.__module__}.{before.__qualname__}"
        raise ValueError(f"register: a {kind} named {name!r} exists already ({owner}); choose another name")


def is_redefined(before: type, now: type) -> bool:
    """True if both are classes of the same place, as of a notebook's cell that runs again."""
    return (before.__module__, before.__qualname__) == (now.__module__, now.__qualname__)


@register("never")
@dataclass(frozen=True, slots=True)
class Never(RestartPolicy):
    """Never restart: ordinary outer momentum. Text form `never`."""

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return None in every round."""
        del signal
        return state, None


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold what a policy has answered.

    Args:
        state: its memory after the round.
        restart: what happens to the buffer, or None.
        step: the update in the place of the rule's own, or None.
        not_finite: what the policy needs and what was not finite. Then it was not asked and its memory is unchanged;
            the run has diverged, which the caller must report.
    """

    state: State
    restart: Restart | None = None
    step: Step | None = None
    not_finite: tuple[str, ...] = ()

    @property
    def restarted(self) -> bool:
        """True if a new cycle begins."""
        return self.restart is not None

    def age(self, age: int) -> int:
        """Return the rounds since the last restart after this round, where there were `age` with it before."""
        return age if self.restart is None else int(self.restart.before)

    def mixing(self, rule: OuterRule) -> tuple[float, float]:
        """Return the c and d of the round's `m <- c m + d g`."""
        if self.step is not None and self.step.mix is not None:
            return self.step.mix
        return rule.momentum, rule.injection

    def weights(self, rule: OuterRule) -> tuple[float, float]:
        """Return A and B of the round's update `A g + B m`, with m the buffer before the round."""
        retain, inject = 1.0, 0.0
        if self.restart is not None and self.restart.before:
            retain, inject = self.restart.retain, self.restart.inject
        step = self.step or Step.of(rule)
        return step.along_g + step.along_m * inject, step.along_m * retain


def ask(policy: RestartPolicy, state: State, signal: RoundSignal) -> Answer:
    """Ask a policy for its decision; every caller of a policy goes through here.

    Args:
        policy: the policy.
        state: its memory; missing keys count as before the first round.
        signal: the round, with everything that the policy needs.

    Raises:
        KeyError: something that it needs is missing.
        ValueError: the answer is none; a memory that no checkpoint can hold would be lost when the run resumes.
    """
    broken = sorted(name for name in policy.needs if not math.isfinite(signal.value(name)))
    if broken:
        return Answer(state, not_finite=tuple(broken))
    answer = policy.decide(policy.initial_state() | state, signal)
    try:
        memory, decision = answer
        valid = all(isinstance(key, str) and not math.isnan(value) for key, value in memory.items())
    except (AttributeError, TypeError, ValueError):
        memory, decision, valid = {}, None, False
    if valid and isinstance(decision, Step):
        return Answer(memory, step=decision)
    if valid and isinstance(decision, Restart | None):
        return Answer(memory, decision, decision and decision.step)
    raise ValueError(
        f"restart policy {policy} answers {answer!r} in round {signal.round}. Its decide() must return a memory of "
        "numbers under names, such as {}, and None, a Restart or a Step"
    )
