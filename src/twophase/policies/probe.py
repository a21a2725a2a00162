"""Choose by trial: compare the losses of candidate anchors on a small probe batch.

At the sync, before the outer step, the loss is evaluated (forward only) at the anchor that each candidate would lead
to, by every replica on its share of the data; the mean over all replicas decides, so all decide alike. The cost is
candidates x probe batch forward passes a round.

An engine needs a `probe` function for it; the trainer has one.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from twophase.policies.base import (
    AVERAGING,
    LARGEST,
    PROBES,
    Decision,
    Restart,
    RestartPolicy,
    RoundSignal,
    State,
    Step,
)
from twophase.policies.text import register
from twophase.rule import OuterRule

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
        choices: two or more of the words above, in the order of preference among equals; they are kept as text, in
            which equal numbers are written alike.

    Limits: it judges by one round, which favours short steps.
    """

    choices: tuple[str, ...]

    needs: ClassVar[frozenset[str]] = frozenset({PROBES})
    takes_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse words that name no candidate, and fewer than two."""
        object.__setattr__(self, "choices", tuple(map(_word, self.choices)))
        for word in self.choices:
            _decision(word)
        if len(set(self.choices)) < 2 or len(set(self.choices)) < len(self.choices):
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

    def arguments(self) -> list[str]:
        """List the words as one word, separated by commas."""
        return [",".join(self.choices)]

    @classmethod
    def from_arguments(cls, words: list[str]) -> RestartPolicy:
        """Build from one word of comma-separated candidates."""
        if len(words) != 1:
            raise ValueError(f"restart probe: write its candidates, for example probe:keep,average, not {words}")
        return cls(tuple(words[0].split(",")))


def _word(choice: object) -> str:
    """Return a candidate as text; text stays as it is, since run ids are made of it."""
    if isinstance(choice, Real) and not isinstance(choice, bool):
        with suppress(OverflowError):  # of a whole number that no float can hold
            return repr(float(choice)).removesuffix(".0")
    return str(choice)


def _decision(word: str) -> Decision:
    if word in _WORDS:
        return _WORDS[word]
    try:
        gain = float(word)
    except ValueError:
        gain = math.nan
    if not 0 < gain <= LARGEST:
        raise ValueError(
            f"Probe: candidate {word!r} is not known; choose from {', '.join(_WORDS)}, or a gain above 0 such as 1.3"
        )
    return Step(gain, 0.0)
