"""Restart policies that decide from what a round measures.

`gradient`, `cosine:0.2`, `norm:1.5`, `speed`, `loss` and `opposed` (each coordinate for itself), all before the round's
g is mixed in; and `tracked`, a period that follows the effective progress which the rounds show.

Every policy sees one group of parameters: the whole model, or a block with an optimizer group (or a fragment) of its
own. None knows tensors; `needs` says what has to be measured or supplied.

Source: theory notes R29 to R31; the rules are compared in docs/restarts.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from twophase.restart import (
    MEASURED,
    Decision,
    Restart,
    RestartPolicy,
    RoundSignal,
    State,
    check_count,
    check_number,
    register,
)
from twophase.rule import OuterRule


@register("gradient")
@dataclass(frozen=True, slots=True)
class Gradient(RestartPolicy):
    """Restart when the pseudo-gradient points against the buffer: `<g, m> < 0`. Text form `gradient`.

    Not in the first round after a restart. Without noise the first choice of the adaptive rules; in language models
    pseudo-gradients stay positively correlated even in failing runs, so that it hardly ever fires.

    Source: theory note R30; O'Donoghue and Candes (2015), the gradient scheme.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"cosine"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A hard restart before the mixing when the cosine is negative."""
        return state, _drop_if(signal.value("cosine") < 0, signal)


@register("cosine")
@dataclass(frozen=True, slots=True)
class Cosine(RestartPolicy):
    """Restart when the cosine between pseudo-gradient and buffer is below a threshold. Text form `cosine:0.2`.

    Args:
        threshold: in [-1, 1]; 0 is `gradient`.
    """

    threshold: float

    needs: ClassVar[frozenset[str]] = frozenset({"cosine"})

    def __post_init__(self) -> None:
        """Refuse what no cosine can be below, or above."""
        value = check_number("Cosine", "threshold", self.threshold, (-1, 1), "cosine:0.2")
        object.__setattr__(self, "threshold", value)

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A hard restart before the mixing when the cosine is below the threshold."""
        return state, _drop_if(signal.value("cosine") < self.threshold, signal)


@register("norm")
@dataclass(frozen=True, slots=True)
class NormRatio(RestartPolicy):
    """Restart when the buffer has outgrown the pseudo-gradient: `|m| > ratio |g|`. Text form `norm:1.5`.

    Args:
        ratio: above 0, for the buffer of the rule's own form (an EMA buffer is 1 - momentum times a sum buffer).
    """

    ratio: float

    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm"})

    def __post_init__(self) -> None:
        """Refuse ratios that are not positive."""
        value = check_number("NormRatio", "ratio", self.ratio, (0, math.inf), "norm:1.5")
        object.__setattr__(self, "ratio", value)

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A hard restart before the mixing when the buffer is too long."""
        return state, _drop_if(signal.value("buffer_norm") > self.ratio * signal.value("pseudo_gradient_norm"), signal)

    def scaled(self, factor: float) -> RestartPolicy:
        """The ratio scales with the buffer."""
        return NormRatio(self.ratio * factor)


@register("speed")
@dataclass(frozen=True, slots=True)
class Speed(RestartPolicy):
    """Restart when the buffer has become shorter than it was a round ago, since the last restart. Text form `speed`.

    Source: theory note R30, where it shows no clear gain; Su, Boyd and Candes (2016), the speed restart.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"buffer_norm"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A hard restart before the mixing when the buffer has shrunk."""
        now = signal.value("buffer_norm")
        decision = _drop_if(now < state.get("norm", 0.0), signal)
        return ({"norm": now} if decision is None else {}), decision


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
        """Refuse a share that is none."""
        if not (isinstance(self.retain, Real) and not isinstance(self.retain, bool) and 0 <= self.retain < 1):
            raise ValueError(
                f"LossTest: retain is {self.retain!r}; it must lie in [0, 1), for example loss or loss:0.5"
            )
        object.__setattr__(self, "retain", float(self.retain))

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A restart before the mixing when the outer step before has raised the loss."""
        worse = signal.value("loss_start") > state.get("end", math.inf)
        after: State = {"end": signal.value("loss_end")}
        return after, Restart(self.retain, before=True) if worse else None


@register("opposed")
@dataclass(frozen=True, slots=True)
class Opposed(RestartPolicy):
    """Every coordinate forgets for itself: `m_i <- 0` where `g_i m_i < 0`, before the mixing. Text form `opposed`.

    It acts in every round, and counts no restarts. It depends on the coordinates (theory note R30: rotated ones gain
    less), and the theory of modes does not cover it.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm"})  # no NaN has a sign
    by_coordinate: ClassVar[bool] = True

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """The partial restart of every round."""
        del signal
        return state, Restart(before=True, opposed=True, counts=False)


@register("tracked")
@dataclass(frozen=True, slots=True)
class Tracked(RestartPolicy):
    """A period that follows the effective progress which the rounds themselves show. Text form `tracked`.

    The next cycle's length is the rounded first cancellation time `K_0(sigma)` of the theory, at least 2; none where
    sigma lies at or below the oscillatory interval, for then a restart can only lose. With m the buffer after a round,
    the mode model gives `<g_t, m> - <g_{t+1}, m> = sigma <x_t - x_{t+1}, m> + noise`, whose ratio of sums over a cycle
    estimates sigma along the buffer from three numbers a round; what is not positive leaves the period as it is. Noise
    is taken for progress, so that with noise the period comes out too short.

    Args:
        first: length of the first cycle, a whole number >= 2: a restart in every round leaves nothing to estimate from.

    Source: theory notes R7, R13 and R29 (there with vectors; here along the buffer, as `theory.observed`).
    """

    first: int = 3

    needs: ClassVar[frozenset[str]] = MEASURED

    def __post_init__(self) -> None:
        """Refuse lengths that are not whole numbers >= 2."""
        object.__setattr__(self, "first", check_count("Tracked", "first", self.first, least=2))

    def initial_state(self) -> State:
        """The first period, and no sums."""
        return {"period": float(self.first), "progress": 0.0, "distance": 0.0}

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """A hard restart after the round that ends the cycle."""
        rule = signal.rule
        assert rule is not None
        g, m, cosine = (signal.value(name) for name in ("pseudo_gradient_norm", "buffer_norm", "cosine"))
        after = dict(state)
        if "along" in state:  # the round before, unless it ended with a restart
            after["progress"] = state["progress"] + state["along"] - g * m * cosine
            after["distance"] = state["distance"] + state["step"]
        along = rule.momentum * g * m * cosine + rule.injection * g * g
        old, new = rule.momentum * m, rule.injection * g  # products, for a power of floats raises where it overflows
        square = old * old + 2 * old * new * cosine + new * new
        taken = rule.injection * along + rule.momentum * square if rule.nesterov else square  # <update, m> / lr
        after |= {"along": along, "step": rule.lr * taken}
        if 0 < after["distance"] < math.inf and 0 < after["progress"] < math.inf:
            sigma = min(after["progress"] / after["distance"], 1.0)
            after["next"] = first_cancellation(rule, sigma)
        else:
            after.pop("next", None)  # of a part of the cycle, which the whole does not bear out
        # Where nothing ought to restart, what a later round shows may end the cycle.
        length = after["period"] if after["period"] > 0 else after.get("next", 0.0)
        if length == 0 or signal.rounds_since_restart < length:
            return after, None
        after["period"] = after.pop("next", after["period"])
        del after["along"], after["step"]
        after["progress"] = after["distance"] = 0.0
        return after, Restart()


def first_cancellation(rule: OuterRule, sigma: float) -> float:
    """The rounded first cancellation time of a mode, at least 2; 0 where the mode does not oscillate.

    `K_0 = floor((theta + pi/2) / phi + 1/2)` with the phase phi and lag theta of the transition (theory notes R6, R7,
    R13). Above the oscillatory interval every other round overshoots: 2.

    Args:
        rule: the outer rule.
        sigma: effective progress, in [0, 1].

    >>> first_cancellation(OuterRule(1.0, 0.9, form="ema"), 0.22)
    13.0
    """
    b, s = rule.momentum, rule.lr * rule.injection * sigma
    if b == 0 or s == 0:
        return 0.0
    a, trace, determinant = (
        (1 - (1 + b) * s, (1 + b) * (1 - s), b * (1 - s)) if rule.nesterov else (1 - s, 1 + b - s, b)
    )
    square = determinant - trace * trace / 4
    if square <= 0:  # two real roots
        return 0.0 if trace > 0 else 2.0
    # By the roots' imaginary part: next to the interval's ends their cosine rounds to 1, whose angle has no sine.
    height = math.sqrt(square)
    phase, lag = math.atan2(height, trace / 2), math.atan((a - b) / (2 * height))
    return float(max(2, math.floor((lag + math.pi / 2) / phase + 0.5)))


def _drop_if(fires: bool, signal: RoundSignal) -> Decision:
    """A hard restart before the mixing, unless the buffer holds one round only."""
    return Restart(before=True) if fires and signal.rounds_since_restart > 1 else None
