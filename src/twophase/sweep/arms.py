"""Summaries of a sweep's arms, and controls beside what they control."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twophase.sweep.table import Row, Setting, best_of, geometric_mean, result, settings


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """What one arm reached, over its settings.

    Args:
        arm: the arm.
        settings: how many it has; `diverged` and `missing` of them are counted apart and are in no mean.
        best: the setting with the lowest perplexity, or None.
        geometric_mean: of the perplexities.
        worst: the highest perplexity.
        within: how many settings lie within the tolerance of the best of all arms.
        share: `within / settings`; diverged and missing settings count as outside.
    """

    arm: str
    settings: int
    diverged: int
    missing: int
    best: Setting | None
    geometric_mean: float | None
    worst: float | None
    within: int
    share: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A control and the run that it controls; `ratio` is the control's perplexity over that run's, or None."""

    control: Row
    of: Row
    ratio: float | None


@dataclass(frozen=True, slots=True)
class PairSummary:
    """The controls of one arm against what they control.

    Args:
        arm: the controls' arm.
        pairs: how many of them could be compared; `unpaired` could not (diverged, failed or missing on either side).
        geometric_mean: of the ratios control / controlled; above 1, the controls are worse.
        better: pairs in which the control is better by more than the margin.
        worse: pairs in which it is worse by more than the margin.
    """

    arm: str
    pairs: int
    unpaired: int
    geometric_mean: float | None
    better: int
    worse: int


def arms_summary(rows: Sequence[Row], within: float = 0.25) -> list[ArmSummary]:
    """Each arm's best, geometric mean, worst and share of settings near the best of ALL arms, in order of appearance.

    Args:
        rows: of the whole sweep; with several seeds, settings are compared by their mean over the seeds.
        within: relative distance from the best of all that still counts as near, 0.25 for 25 %.
    """
    best = best_of(rows)
    bound = -math.inf if best is None else best * (1 + within)
    arms: dict[str, list[Setting]] = {}
    for setting in settings(rows):
        arms.setdefault(setting.arm, []).append(setting)
    summaries = []
    for arm, group in arms.items():
        finished = [setting for setting in group if setting.perplexity is not None]
        values = [setting.perplexity for setting in finished if setting.perplexity is not None]
        near = sum(value <= bound for value in values)
        summaries.append(
            ArmSummary(
                arm,
                len(group),
                sum(setting.state == "diverged" for setting in group),
                sum(setting.state == "missing" for setting in group),
                finished[values.index(min(values))] if values else None,
                geometric_mean(values),
                max(values, default=None),
                near,
                near / len(group),
            )
        )
    return summaries


def pairs(rows: Sequence[Row]) -> list[Pair]:
    """Each control beside the run that it controls (one pair a seed), in the order of the controls."""
    by_run = {row.run: row for row in rows}
    return [
        Pair(row, by_run[row.control_of], _ratio(row, by_run[row.control_of]))
        for row in rows
        if row.control_of is not None and row.control_of in by_run
    ]


def pairs_summary(paired: Iterable[Pair], margin: float = 0.05) -> list[PairSummary]:
    """Per arm of controls: the geometric mean of the ratios, and how many controls are clearly better or worse.

    Args:
        paired: the pairs; every seed counts as a pair of its own.
        margin: a ratio above `1 + margin` is worse, one below `1 / (1 + margin)` better.
    """
    arms: dict[str, list[float | None]] = {}
    for pair in paired:
        arms.setdefault(pair.control.arm, []).append(pair.ratio)
    summaries = []
    for arm, ratios in arms.items():
        values = [ratio for ratio in ratios if ratio is not None]
        better = sum(ratio < 1 / (1 + margin) for ratio in values)
        worse = sum(ratio > 1 + margin for ratio in values)
        mean = geometric_mean(values)
        summaries.append(PairSummary(arm, len(values), len(ratios) - len(values), mean, better, worse))
    return summaries


def _ratio(control: Row, of: Row) -> float | None:
    above, below = result(control), result(of)
    return None if above is None or below is None else above / below
