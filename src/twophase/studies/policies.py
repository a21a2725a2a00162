"""Compare restarts with these policies in studies; docs/log.md, 22 November 2026, says why none is recommended.

An example of a module that `TWOPHASE_POLICIES` names:

    TWOPHASE_POLICIES=twophase.studies.policies twophase train --outer.restart gradient

Restart tests: `gradient`, `cosine:0.2` and `norm:1.5`, all before the round's g is mixed in; `tracked`, a period that
follows the effective progress which the rounds show. And `auto` in parts, as its controls: `along:0.5` (its direction
with a fixed gain), `ramp:0.5` (with one that rises over the run), `gain:1` (its gain alone). `observe` averages and
measures.

Source: theory notes R29 and R30.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar

from twophase.policies.base import MEASURED, Decision, Restart, RestartPolicy, RoundSignal, State
from twophase.policies.checks import check_count, check_number
from twophase.policies.text import POLICIES_VARIABLE, register
from twophase.rule import OuterRule
from twophase.studies import _extrapolation  # noqa: F401 - the import registers its policies


def share_with_workers() -> None:
    """Name this module in `TWOPHASE_POLICIES`, so that the workers of a sweep, processes of their own, know it too."""
    modules = [name for name in os.environ.get(POLICIES_VARIABLE, "").split(",") if name]
    os.environ[POLICIES_VARIABLE] = ",".join(dict.fromkeys([*modules, __name__]))


class _Checked(RestartPolicy):
    """Check every number of a policy when the policy is made."""

    check: ClassVar[Callable[..., float]]

    def __post_init__(self) -> None:
        """Refuse what lies outside of the range, and keep plain numbers."""
        for field in fields(self):  # type: ignore[arg-type] - every subclass is a dataclass
            value = self.check(type(self).__name__, field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)


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
        """Restart before the mixing when the cosine is negative."""
        return state, _drop_if(signal.value("cosine") < 0, signal)


@register("cosine")
@dataclass(frozen=True, slots=True)
class Cosine(_Checked):
    """Restart when the cosine between pseudo-gradient and buffer is below a threshold. Text form `cosine:0.2`.

    Args:
        threshold: in [-1, 1]; 0 is `gradient`.
    """

    threshold: float

    check = partial(check_number, span=(-1, 1), example="cosine:0.2")
    needs: ClassVar[frozenset[str]] = frozenset({"cosine"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart before the mixing when the cosine is below the threshold."""
        return state, _drop_if(signal.value("cosine") < self.threshold, signal)


@register("norm")
@dataclass(frozen=True, slots=True)
class NormRatio(_Checked):
    """Restart when the buffer has outgrown the pseudo-gradient: `|m| > ratio |g|`. Text form `norm:1.5`.

    Args:
        ratio: above 0, for the buffer of the rule's own form (an EMA buffer is 1 - momentum times a sum buffer).
    """

    ratio: float

    check = partial(check_number, span=(0, math.inf), example="norm:1.5")
    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm"})

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart before the mixing when the buffer is too long."""
        return state, _drop_if(signal.value("buffer_norm") > self.ratio * signal.value("pseudo_gradient_norm"), signal)

    def scaled(self, factor: float) -> RestartPolicy:
        """Scale the ratio with the buffer."""
        return replace(self, ratio=self.ratio * factor)


@register("tracked")
@dataclass(frozen=True, slots=True)
class Tracked(_Checked):
    """Restart with a period that follows the effective progress of the rounds. Text form `tracked`.

    The next cycle's length is the rounded first cancellation time `K_0(sigma)` of the theory, at least 2; none where
    sigma lies at or below the oscillatory interval, for then a restart can only lose. With m the buffer after a round,
    the mode model gives `<g_t, m> - <g_{t+1}, m> = sigma <x_t - x_{t+1}, m> + noise`; the ratio of sums over a cycle
    estimates sigma along the buffer from three numbers a round; what is not positive leaves the period as it is. Noise
    is taken for progress, so that with noise the period comes out too short.

    Args:
        first: length of the first cycle, a whole number >= 2: a restart in every round leaves nothing to estimate from.

    Source: theory notes R7, R13 and R29 (there with vectors; here along the buffer, as `theory.observed`).
    """

    first: int = 3

    check = partial(check_count, least=2)
    needs: ClassVar[frozenset[str]] = MEASURED

    def initial_state(self) -> State:
        """Return the first period, and no sums."""
        return {"period": float(self.first), "progress": 0.0, "distance": 0.0}

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart after the round that ends the cycle."""
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
    """Return the rounded first cancellation time of a mode, at least 2; 0 where the mode does not oscillate.

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
    # By the roots' imaginary part: next to the interval's ends their cosine rounds to 1, an angle without sine.
    height = math.sqrt(square)
    phase, lag = math.atan2(height, trace / 2), math.atan((a - b) / (2 * height))
    return float(max(2, math.floor((lag + math.pi / 2) / phase + 0.5)))


def _drop_if(fires: bool, signal: RoundSignal) -> Decision:
    """Restart before the mixing if a test fires, unless the buffer holds a single round."""
    return Restart(before=True) if fires and signal.rounds_since_restart > 1 else None
