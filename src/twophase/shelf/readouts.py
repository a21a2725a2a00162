"""Readouts: which point is evaluated and exported."""

from __future__ import annotations

from dataclasses import dataclass

from twophase.policies.checks import check_count
from twophase.shelf.base import Readout, register

_TEST = "tests/optim/test_readouts.py"


@register("last")
@dataclass(frozen=True)
class Last(Readout):
    """The anchor itself; it takes no memory."""

    equation = "r = x"
    test = _TEST


@register("ema")
@dataclass(frozen=True)
class EMA(Readout):
    """An exponential moving average of the anchors, with the bias correction of its beginning.

    Args:
        decay: share of the average that a round keeps, in [0, 1).
    """

    equation = "r <- r + (1-d) / (1-d^t) (x - r)"
    source = "arXiv 1412.6980, section 7.2"
    users = "diffusion models"
    test = _TEST

    decay: float = 0.9

    def __post_init__(self) -> None:
        self.check("decay", 0.0, 1 - 1e-12, "0.9")

    def weight(self, count: int) -> float:
        """Return the weight of the anchor of that number."""
        return (1 - self.decay) / (1 - self.decay**count)


@register("tail")
@dataclass(frozen=True)
class Tail(Readout):
    """A tail average: the mean of the first `rounds` anchors, from then on a moving average of that length.

    Args:
        rounds: its length, >= 1; at or above the run's it is the mean of all anchors.
    """

    equation = "r <- r + (x - r) / min(t, rounds)"
    source = "tail averaging, arXiv 1610.03774"
    users = "modded-nanogpt's optimizer track"
    test = _TEST

    rounds: int = 10

    def __post_init__(self) -> None:
        check_count("readout tail", "rounds", self.rounds)

    def weight(self, count: int) -> float:
        """Return the weight of the anchor of that number."""
        return 1 / min(count, self.rounds)
