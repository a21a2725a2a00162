"""What a restart must beat: rules that change the step or the buffer without forgetting.

`cap:1` (bounded gain), `bound:1.5` (bounded buffer), `slowmo` (buffer in units of the inner learning rate), `reseed:3`
(the buffer begins at g instead of 0), `debiased:3` (no small steps after a restart), `lookahead:0.1:0.1` (no momentum
early and late in the run). Momentum-free SGD and plain averaging are rules of momentum 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from twophase.restart import (
    MEASURED,
    Decision,
    Restart,
    RestartPolicy,
    RoundSignal,
    State,
    Step,
    check_count,
    check_number,
    register,
)
from twophase.rule import OuterRule


@register("cap")
@dataclass(frozen=True, slots=True)
class GainCap(RestartPolicy):
    """Shorten the update until its gain `<update, g> / <g, g>` is at most a bound. Text form `cap:1`.

    The buffer goes on as it would.

    Args:
        gain: the bound, above 0; 1 is the length of plain averaging along g.

    Source: the confound of theory note R31, made a rule: a restart, too, bounds the gain.
    """

    gain: float

    needs: ClassVar[frozenset[str]] = MEASURED
    takes_steps: ClassVar[bool] = True
    reads_rule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse bounds that are not positive."""
        object.__setattr__(self, "gain", check_number("GainCap", "gain", self.gain, (0, math.inf), "cap:1"))

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """The rule's update, shortened where it is too long."""
        rule = signal.rule
        assert rule is not None
        step, gain = Step.of(rule), own_gain(rule, signal)
        return state, step.times(self.gain / gain) if gain > self.gain else None


@register("bound")
@dataclass(frozen=True, slots=True)
class BufferBound(RestartPolicy):
    """Shorten the buffer to `|m| <= ratio |g|` before the mixing; it keeps its direction. Text form `bound:1.5`.

    Args:
        ratio: above 0, for the buffer of the rule's own form.
    """

    ratio: float

    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm"})

    def __post_init__(self) -> None:
        """Refuse ratios that are not positive."""
        value = check_number("BufferBound", "ratio", self.ratio, (0, math.inf), "bound:1.5")
        object.__setattr__(self, "ratio", value)

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A rescaling where the buffer is too long."""
        length, most = signal.value("buffer_norm"), self.ratio * signal.value("pseudo_gradient_norm")
        return state, Restart(most / length, before=True, counts=False) if length > most else None

    def scaled(self, factor: float) -> RestartPolicy:
        """The ratio scales with the buffer."""
        return BufferBound(self.ratio * factor)


@register("slowmo")
@dataclass(frozen=True, slots=True)
class SlowMo(RestartPolicy):
    """Keep the buffer in units of the inner learning rate: `m <- (lr_t / lr_{t-1}) m` before the mixing. `slowmo`.

    Needs `inner_lr`, the inner learning rate at the end of the round. SlowMo divides g by it on the way into the buffer
    and multiplies the buffer by it on the way out, which is this.

    Source: Wang et al. (2020), SlowMo, algorithm 1.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"inner_lr"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A rescaling where the inner learning rate has changed."""
        now, last = signal.value("inner_lr"), state.get("lr", 0.0)
        changed = last > 0 and now != last
        return {"lr": now}, Restart(now / last, before=True, counts=False) if changed else None


@register("reseed")
@dataclass(frozen=True, slots=True)
class Reseed(RestartPolicy):
    """Every `period` rounds the buffer becomes what a constant g would have made it. Text form `reseed:3`.

    `m <- g` in EMA form, `m <- g / (1 - momentum)` in sum form: one trajectory in both. (`soft:3:0:1` is `m <- g` in
    the rule's own form, which is not the same in the two.)

    Args:
        period: K, in rounds, a whole number >= 1.
    """

    period: int

    reads_rule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse periods that are not whole numbers >= 1."""
        object.__setattr__(self, "period", check_count("Reseed", "period", self.period))

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A warm restart when the round is a multiple of the period."""
        assert signal.rule is not None
        due = signal.round % self.period == 0
        return state, Restart(inject=signal.rule.injection / (1 - signal.rule.momentum)) if due else None


@register("debiased")
@dataclass(frozen=True, slots=True)
class Debiased(RestartPolicy):
    """Take out the small steps while the buffer fills: divide the update by `1 - b^j`. Text form `debiased:3`.

    In round j after a restart a constant g has filled the share `1 - b^j` of the buffer, in both forms; of Nesterov's
    update it is `1 - b^(j+1)`.

    Args:
        period: K, in rounds, of the hard restarts that go with it; 0 means none.

    Source: the bias correction of Adam, for the outer momentum.
    """

    period: int = 0

    takes_steps: ClassVar[bool] = True
    reads_rule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse periods that are not whole numbers >= 0."""
        object.__setattr__(self, "period", check_count("Debiased", "period", self.period, least=0))

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """The corrected update, and a hard restart when the round is a multiple of the period."""
        rule = signal.rule
        assert rule is not None
        filled = 1 - rule.momentum ** (signal.rounds_since_restart + rule.nesterov)
        step = Step.of(rule).times(1 / filled)
        due = self.period > 0 and signal.round % self.period == 0
        return state, Restart(step=step) if due else step


@register("lookahead")
@dataclass(frozen=True, slots=True)
class LookAheadGate(RestartPolicy):
    """Plain averaging early and late in the run, the rule in between. Text form `lookahead:0.1:0.1`.

    The buffer goes on while the gate is closed. Needs `progress`, the share of the run that is done with this round.

    Args:
        early: share of the run at its start in which the replicas are only averaged, in [0, 1].
        late: the same at its end.

    Source: EMA-Nesterov (arXiv 2605.25395), whose look-ahead is switched off early and late.
    """

    early: float
    late: float

    needs: ClassVar[frozenset[str]] = frozenset({"progress"})
    takes_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse what is no share."""
        for name in ("early", "late"):
            value = check_number("LookAheadGate", name, getattr(self, name), (0, 1), "lookahead:0.1:0.1")
            object.__setattr__(self, name, value)

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Averaging outside the gate's time."""
        done = signal.value("progress")
        return state, AVERAGING if done <= self.early or done > 1 - self.late else None


AVERAGING = Step(1.0, 0.0)
"""Plain averaging of the replicas."""


def own_gain(rule: OuterRule, signal: RoundSignal) -> float:
    """Gain `<update, g> / <g, g>` that the rule's own update would have; nan when g = 0."""
    norm = signal.value("pseudo_gradient_norm")
    if norm == 0:
        return math.nan
    step = Step.of(rule)
    return step.along_g + step.along_m * signal.value("cosine") * signal.value("buffer_norm") / norm
