"""Does averaging's own run say what a momentum, a restart or a rising outer rate would give?

    python experiments/bench/regimes.py           prints what docs/bench.md shows

No run is made here: `regimes.csv` has them. At eight places and four inner learning rates each a treatment is held
against averaging, or a restart against none. A rule is a threshold on one number that averaging's run measures. It is
chosen on half of the places and judged on the other, against the majority sign of the first. `registration-1.md` says
which half, and when a rule may be used.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from against import results_of
from tables import stored
from twophase.judge.cells import DataFrame, means
from twophase.judge.decision import MARGIN
from twophase.sweeps.table import format_table

AVERAGING = "observe"
"""Averaging that measured itself."""
_DILOCO = "nesterov:lr=0.7:momentum=0.9"
TREATMENTS = {
    "momentum": ("heavy-ball:lr=1:momentum=0.3", AVERAGING),
    "DiLoCo's momentum": (_DILOCO, AVERAGING),
    "a restart of it": (f"{_DILOCO}@3", _DILOCO),
    "a rising rate": ("memoryless:lr=1+schedule=linear:final=2", AVERAGING),
    "orthogonal": ("averaging+filter=orthogonal", AVERAGING),
}
"""Changes whose sign is predicted, each with what it is held against."""
FITTED = ("short", "one-replica", "digits", "eight")
"""Places on which rules are chosen; they are judged on the other four."""
QUANTITIES = ("cosine", "early_cosine", "shrunk", "agreement")
"""Median cosine of successive pseudo-gradients in the second and first half of the rounds; 1 - m/M with the mean m of
|g| in the last quarter and its largest value M; |g|^2 over the mean of the replicas' own."""
GOAL = 0.8
"""Share of the signs that a rule must have right, and more than the majority sign has."""
Cell = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """Predict that a change helps where `quantity` is above the threshold, or at most that; without one everywhere."""

    quantity: str
    threshold: float
    above: bool

    def helps(self, cell: Cell) -> bool:
        """Predict whether the change helps."""
        return self.above if not self.quantity else (cell[self.quantity] > self.threshold) == self.above

    def right(self, cells: Sequence[Cell], gains: Sequence[float]) -> int:
        """Return how many signs are right; a gain of exactly 0 does not help."""
        return sum(self.helps(cell) == (gain > 0) for cell, gain in zip(cells, gains, strict=True))

    def __str__(self) -> str:
        if not self.quantity:
            return "always" if self.above else "never"
        return f"{self.quantity} {'above' if self.above else 'at most'} {self.threshold:.3g}"


def fit(cells: Sequence[Cell], gains: Sequence[float], quantities: Sequence[str]) -> Rule:
    """Return the rule with the most right signs; of equals the one with the widest gap at its threshold."""
    best = Rule("", 0.0, sum(gain > 0 for gain in gains) * 2 > len(gains))
    most, widest = best.right(cells, gains), 0.0
    for quantity in quantities:
        values = sorted({cell[quantity] for cell in cells})
        for low, high in itertools.pairwise(values):
            for above in (True, False):
                rule, gap = Rule(quantity, (low + high) / 2, above), (high - low) / (values[-1] - values[0])
                count = rule.right(cells, gains)
                if count > most or (count == most and best.quantity and gap > widest):
                    best, most, widest = rule, count, gap
    return best


def cells_of(rows: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return for each place and inner learning rate what was measured, and the gain of each treatment.

    Both are means over the seeds; a gain is a natural logarithm, infinite where one side alone diverged, and missing
    where both did.
    """
    logs, cells = means(_table(rows).map(math.log)), []
    measured = {name: means(_table(rows, name)) for name in QUANTITIES}
    for place, lr, _ in (key for key in logs if key[-1] == AVERAGING):
        quantities = {name: by_key[place, lr, AVERAGING] for name, by_key in measured.items()}
        cell: dict[str, Any] = {"place": place, "inner.lr": lr}
        cell |= {name: mean for name, mean in quantities.items() if mean < math.inf}
        for treatment, (arm, control) in TREATMENTS.items():
            mine, other = logs[place, lr, arm], logs[place, lr, control]
            if math.isfinite(mine) or math.isfinite(other):
                cell[treatment] = other - mine
        cells.append(cell)
    return cells


def at_best(rows: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Hold averaging's result over each arm's, each at its own best inner learning rate: a line a place."""
    best: dict[tuple[str, str], tuple[float, float]] = {}
    largest: dict[str, float] = {}
    for (place, lr, arm), mean in means(_table(rows).map(math.log)).items():
        if math.isfinite(mean):
            best[place, arm] = min(best.get((place, arm), (math.inf, lr)), (mean, lr))
        largest[place] = max(largest.get(place, lr), lr)
    lines = []
    for place, edge in largest.items():
        control, facts = best[place, AVERAGING], [best[place, arm] for arm, _ in TREATMENTS.values()]
        stars = ["*" * (edge in (lr, control[1])) for _, lr in facts]
        lines.append(
            [place, *(f"{math.exp(control[0] - mean):.3f}{s}" for (mean, _), s in zip(facts, stars, strict=True))]
        )
    return lines


def _table(rows: Sequence[Mapping[str, str]], column: str = "result") -> DataFrame:
    """Arrange a column by place, inner learning rate and arm (lines) and seed, infinite where a run has no number."""
    with_rates = ({**row, "inner.lr": float(row["inner.lr"])} for row in rows)
    return results_of(with_rates, ("place", "inner.lr"), column)


def judged(treatment: str, cells: Sequence[Cell]) -> list[str]:
    """Return a treatment's rule, and how many signs it has right where it was not chosen: a line of the table."""
    there = [cell for cell in cells if treatment in cell]
    half, other = ([cell for cell in there if (cell["place"] in FITTED) == fitted] for fitted in (True, False))
    gains, others = ([cell[treatment] for cell in some] for some in (half, other))
    majority = Rule("", 0.0, sum(gain > 0 for gain in gains) * 2 > len(gains))
    rule = fit(half, gains, [name for name in QUANTITIES if all(name in cell for cell in there)])
    share, by_majority = (each.right(other, others) / len(other) for each in (rule, majority))
    clear = [cell for cell in other if abs(cell[treatment]) > MARGIN]
    of_clear = rule.right(clear, [cell[treatment] for cell in clear]) / len(clear)
    return [
        treatment,
        str(rule),
        f"{share:.0%}",
        f"{by_majority:.0%}",
        f"{of_clear:.0%} of {len(clear)}",
        f"{sum(gain > 0 for gain in others)} of {len(other)}",
        "yes" if share >= GOAL and share > by_majority else "no",
    ]


def answer() -> str:
    """Return the tables of docs/bench.md."""
    rows = stored("regimes.csv")
    cells = cells_of(rows)
    head = ["change", "it helps where", "right", "majority sign", "of clear ones", "helps in", "predicted"]
    return "\n".join(
        [
            format_table(head, [judged(treatment, cells) for treatment in TREATMENTS]),
            "",
            format_table(["place", *TREATMENTS], at_best(rows)),
        ]
    )


if __name__ == "__main__":
    sys.exit(print(answer()))
