"""Differences of two arms seed by seed, and what they come to over the seeds: counts, mean and intervals.

A run that diverged has no number but is worse than any number: its seed counts for the other side, and takes the mean
and the intervals away, because an average without it would flatter. A seed in which both diverged, or in which a run
is missing, says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twophase.judge.bootstrap import Interval, percentile_interval, t_interval
from twophase.judge.cells import ARM, BOTH, CONTROL, MISSING, SAME, Remark

Measure = Literal["tuned best", "held out", "cells", "area"]


@dataclass(frozen=True, slots=True)
class SeedDifference:
    """One seed's difference.

    Args:
        seed: the seed; None in a sweep without an axis of seeds.
        value: positive where the arm is better; None when there is none.
        remark: why there is none, or `same run` where the arm and the control are one run.
    """

    seed: Any
    value: float | None
    remark: Remark = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """One measure of an arm against a control.

    Args:
        measure: what is compared; see the module.
        within: x of `area`, relative; None for the other measures.
        by_seed: one difference a seed; natural logarithms of perplexity ratios, for `area` shares from -1 to 1.
        better: seeds in which the arm is better, those in which only the control diverged included.
        worse: likewise for the control.
        equal: seeds with no difference.
        mean: over the seeds; None when there is none, or when a run diverged in one arm only.
        bootstrap: 95 % percentile interval of the mean over seeds; None for one seed or without any spread.
        t: Student's 95 % interval of it, for areas cut off at -1 and 1, beyond which there is none.
        note: what a reader must know, such as why there is no interval; may be empty.
    """

    measure: Measure
    within: float | None
    by_seed: tuple[SeedDifference, ...]
    better: int
    worse: int
    equal: int
    mean: float | None
    bootstrap: Interval | None
    t: Interval | None
    note: str

    @property
    def seeds(self) -> int:
        """How many seeds could be compared."""
        return self.better + self.worse + self.equal

    @property
    def ratio(self) -> float | None:
        """The control's perplexity over the arm's, exp(mean); above 1 the arm is better. None for an area."""
        return None if self.mean is None or self.measure == "area" else ratio_of(self.mean)


def summary(
    measure: Measure, differences: Sequence[SeedDifference], note: str = "", within: float | None = None
) -> Difference:
    """Summarize differences, one a seed.

    Args:
        measure: what is compared.
        differences: one a seed, in any order; empty when nothing can be compared.
        note: words that stand before those on the seeds.
        within: x of an area.
    """
    remarks: list[Remark] = [difference.remark for difference in differences]
    values = [difference.value for difference in differences if difference.value is not None]
    one_sided = {ARM, CONTROL} & set(remarks)
    spread = max(values) > min(values) if values and not one_sided else False
    notes = [note]
    for remark, words in _WORDS.items():
        count = remarks.count(remark)
        if count:
            notes.append(words if count == len(remarks) else f"{words} in {count} of {len(remarks)} seeds")
    if one_sided:
        notes.append("no mean")
    elif values and not spread and remarks.count(SAME) < len(values):
        notes.append("one seed: no interval" if len(values) == 1 else "no spread over seeds: no interval")
    student = t_interval(values) if spread else None
    if student and measure == "area":
        student = Interval(max(student.low, -1), min(student.high, 1))
    return Difference(
        measure,
        within,
        tuple(differences),
        better=sum(value > 0 for value in values) + remarks.count(CONTROL),
        worse=sum(value < 0 for value in values) + remarks.count(ARM),
        equal=sum(value == 0 for value in values),
        mean=math.fsum(values) / len(values) if values and not one_sided else None,
        bootstrap=percentile_interval(values) if spread else None,
        t=student,
        note="; ".join(filter(None, notes)),
    )


_WORDS: dict[Remark, str] = {
    SAME: "same runs", ARM: "arm diverged", CONTROL: "control diverged", BOTH: "both diverged", MISSING: "missing",
}  # fmt: skip
"""What befell some of the seeds."""


def ratio_of(log_ratio: float) -> float:
    """exp(log_ratio), kept within what a float holds: t intervals over two seeds of a wild arm reach far."""
    return math.exp(max(-700.0, min(log_ratio, 700.0)))
