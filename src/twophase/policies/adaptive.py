"""Restart or step by what a round measures, by losses, or by trial: `Auto`, `LossTest` and `Probe`."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from twophase.number import number, shortened
from twophase.policies.base import (
    AVERAGING,
    PROBES,
    Decision,
    Restart,
    RestartPolicy,
    RoundSignal,
    State,
    Step,
    register,
)
from twophase.policies.checks import LARGEST, check_number
from twophase.rule import OuterRule


@register("auto")
@dataclass(frozen=True, slots=True)
class Auto(RestartPolicy):
    """Average the replicas, and go on along the last update as far as the pseudo-gradient has shrunk. Text form `auto`.

        u <- g + (1 - |g| / M) |g| u / |u|,      x <- x - u,      M = the largest |g| of at least half of the rounds

    with the last update u as the buffer. Of the rule nothing enters, neither learning rate, momentum, look-ahead nor
    form. (An `OuterSGD` made by hand must have a momentum above 0, or it keeps no buffer. A rule without momentum
    becomes such a rule, see `RestartPolicy.effective`.)

    While |g| is near its largest, early in a run or always under a constant inner learning rate, this is plain
    averaging: extrapolation then hurts. Where |g| has shrunk, as under a decaying inner learning rate, the direction of
    the last updates adds up to |g| once more. An update is at most twice as long as that of averaging, whatever came
    before, so that it needs no restarts.

    It comes from trials and is no theorem: docs/restarts-auto.md has the evidence, for and against.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"pseudo_gradient_norm", "buffer_norm"})
    takes_steps: ClassVar[bool] = True

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the step of the round."""
        g, m = signal.value("pseudo_gradient_norm"), signal.value("buffer_norm")
        after, largest = self.largest(state, signal)
        along = (1 - g / largest) * g / m if largest > 0 and m > 0 else 0.0
        return after, Step(1.0, along, mix=(along, 1.0))

    @staticmethod
    def largest(state: State, signal: RoundSignal) -> tuple[State, float]:
        """Return the next state and M, the largest |g| of at least half of the rounds."""
        older, newer = state.get("older", 0.0), state.get("newer", 0.0)
        if signal.round & (signal.round - 1) == 0:  # 1, 2, 4, 8, ...: both together cover at least half of the rounds
            older, newer = newer, 0.0
        newer = max(newer, signal.value("pseudo_gradient_norm"))
        return {"older": older, "newer": newer}, max(older, newer)

    def canonical(self, rule: OuterRule) -> OuterRule:
        """Return the same rule for all, also for those without momentum."""
        del rule
        return OuterRule(1.0, 0.5)


@register("loss")
@dataclass(frozen=True, slots=True)
class LossTest(RestartPolicy):
    """Restart when the anchor is worse than what the replicas had reached. Text form `loss`, or `loss:0.5`.

    Fires before the mixing when the mean loss at the start of a round exceeds that at the end of the round before. The
    outer step between the two did harm. Needs `loss_start` and `loss_end`, the mean training loss over the first and
    the last quarter of a round's inner steps and over the replicas. A fragment's round goes from one of its own outer
    steps to the next.

    Args:
        retain: share of the buffer that stays, in [0, 1).
    """

    retain: float = 0.0

    needs: ClassVar[frozenset[str]] = frozenset({"loss_start", "loss_end"})

    def __post_init__(self) -> None:
        """Refuse shares outside [0, 1)."""
        retain = check_number("LossTest", "retain", self.retain, (0, math.nextafter(1.0, 0.0)), "loss:0.5")
        object.__setattr__(self, "retain", float(retain))

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Restart before the mixing when the outer step before has raised the loss."""
        worse = signal.value("loss_start") > state.get("end", math.inf)
        after: State = {"end": signal.value("loss_end")}
        return after, Restart(self.retain, before=True) if worse else None


_WORDS: dict[str, Decision] = {
    "keep": None,
    "drop": Restart(before=True),
    "half": Restart(0.5, before=True),
    "average": AVERAGING,
    "fresh": Restart(before=True, step=AVERAGING),
}


@register("probe")
@dataclass(frozen=True, slots=True)
class Probe(RestartPolicy):
    """Take the candidate with the lowest probe loss. Text form `probe:keep,drop`.

    At the sync, before the outer step, every replica evaluates the loss (forward only) at each candidate's anchor, on
    its share of the data. The mean over all replicas decides, so all decide alike. The cost is candidates x probe batch
    forward passes a round. An engine needs a `probe` function; the trainer has one.

    | candidate | update of the round | buffer |
    |-----------|---------------------|--------|
    | `keep`    | the rule's own      | goes on |
    | `drop`    | the rule's own, after the restart | restarted before g is mixed in |
    | `half`    | the rule's own, after the restart | half of it stays |
    | `average` | plain averaging of the replicas   | goes on |
    | `fresh`   | plain averaging                   | restarted before g is mixed in |
    | a number  | that many times g                 | goes on |

    `probe:keep,average` is the probed gate. Of equal losses the first wins; a loss that is not finite never does.

    Args:
        choices: two or more of the words above, in the order of preference among equals; stored as text, in which
            equal numbers are written alike.

    Limits: it judges by one round, which favours short steps.
    """

    choices: tuple[str, ...]

    needs: ClassVar[frozenset[str]] = frozenset({PROBES})
    takes_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse words that name no candidate, and fewer than two."""
        object.__setattr__(self, "choices", tuple(map(_word, self.choices)))
        self.candidates(OuterRule(1.0, 0.0))
        if len(set(self.choices)) < max(2, len(self.choices)):
            raise ValueError(
                f"Probe: candidates are {','.join(self.choices) or 'empty'}; give at least two different ones, for "
                "example probe:keep,average"
            )

    def candidates(self, rule: OuterRule) -> tuple[Decision, ...]:
        """Return the decisions that the words stand for."""
        del rule
        return tuple(_decision(word) for word in self.choices)

    def decide(self, state: State, signal: RoundSignal) -> tuple[State, Decision]:
        """Return the candidate of the lowest loss."""
        losses = [loss if math.isfinite(loss) else math.inf for loss in signal.probes or ()]
        return state, _decision(self.choices[losses.index(min(losses))])


def _word(choice: object) -> str:
    """Return a candidate as text; text stays as it is, since run ids are made of it."""
    if isinstance(choice, Real) and not isinstance(choice, bool):
        with suppress(OverflowError):  # of a whole number that no float can hold
            return repr(float(choice)).removesuffix(".0")
    return str(choice)


def _decision(word: str) -> Decision:
    if word in _WORDS:
        return _WORDS[word]
    gain = math.nan
    with suppress(ValueError):
        gain = float(number(word))
    if not 0 < gain <= LARGEST:
        raise ValueError(
            f"Probe: candidate {shortened(word)!r} is not known; choose from {', '.join(_WORDS)}, or a gain above 0 "
            "such as 1.3"
        )
    return Step(gain, 0.0)
