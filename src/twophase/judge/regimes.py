"""Predict the sign of what a change of the outer optimizer gives from one number that averaging's own run measures.

A rule is a threshold on a single quantity: the change helps above it, or below it. It is chosen on one half of the
places and judged on the other. With few cells anything richer would fit what is there by chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Cell = Mapping[str, float]
"""What a run measured, by name; a quantity that it cannot measure is missing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Predict that a change helps where `quantity` is above the threshold, or where it is at most that.

    Args:
        quantity: its name; empty for a rule that says the same everywhere.
        threshold: value of the quantity at which the prediction changes.
        above: True if the change helps above it; for a constant rule, whether the change helps.
    """

    quantity: str
    threshold: float
    above: bool

    def helps(self, cell: Cell) -> bool:
        """Predict whether the change helps."""
        if not self.quantity:
            return self.above
        return (cell[self.quantity] > self.threshold) == self.above

    def __str__(self) -> str:
        if not self.quantity:
            return "always" if self.above else "never"
        return f"{self.quantity} {'above' if self.above else 'at most'} {self.threshold:.3g}"


def fit(cells: Sequence[Cell], gains: Sequence[float], quantities: Sequence[str]) -> Rule:
    """Return the rule with the most right signs; of equals the one with the widest gap at its threshold.

    Args:
        cells: measured quantities, at least one.
        gains: gains of the change, natural logarithms, positive where it helped.
        quantities: names to choose from; those that are missing in a cell are left out.
    """
    majority = Rule("", 0.0, sum(gain > 0 for gain in gains) * 2 > len(gains))
    best, most, widest = majority, right(majority, cells, gains), 0.0
    for quantity in quantities:
        if any(quantity not in cell or not math.isfinite(cell[quantity]) for cell in cells):
            continue
        values = sorted({cell[quantity] for cell in cells})
        spread = (values[-1] - values[0]) or 1.0
        for low, high in itertools.pairwise(values):
            for above in (True, False):
                rule = Rule(quantity, (low + high) / 2, above)
                count, gap = right(rule, cells, gains), (high - low) / spread
                if count > most or (count == most and best.quantity and gap > widest):
                    best, most, widest = rule, count, gap
    return best


def right(rule: Rule, cells: Sequence[Cell], gains: Sequence[float]) -> int:
    """Return how many signs a rule has right; a gain of exactly 0 does not help."""
    return sum(rule.helps(cell) == (gain > 0) for cell, gain in zip(cells, gains, strict=True))
