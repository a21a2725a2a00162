"""Two arms of a sweep compared seed by seed: an arm against a control.

Every comparison is one number a seed, positive where the arm is better. A seed sets the data order and the
initialisation of both arms. p is a perplexity, s a seed, S the seeds of both arms:

* tuned best: each arm at its own best setting over all its seeds, d_s = log p_control,s - log p_arm,s. Its setting was
  chosen on the seeds that judge it: a selection bias for the arm with more settings.
* held out: the same, but for every seed both settings are chosen on the other seeds of S alone and judged on this one.
  It takes three seeds. The choices of two seeds share data, so that the d_s are only nearly independent.
* cells: the mean of log p_control,s - log p_arm,s over matched cells, the log ratio of their two geometric means. A
  control is matched with the cell that it controls. Without such links, cells match if they agree on every axis that
  varies within either arm.
* area: the share of the arm's matched cells within x of the best of ALL arms on that seed, minus the control's share.

A setting can be chosen when all its runs on the choosing seeds have finished. An arm in which every setting diverged
there counts as diverged. The mean over cells covers cells that finished on every seed of S on both sides, so all seeds
judge the same cells. Excluded cells are counted by reason. A diverged cell is outside every area; missing cells are
excluded. Cells with the same runs in both arms differ by exactly 0 and are no evidence. They are counted, and excluded
if there are other cells.

A diverged run has no number but is worse than any number. Its seed counts for the other side; mean and intervals are
then None, because an average without it would be biased. A seed in which both diverged, or a run is missing, says
nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from twophase.judge.bootstrap import Interval, percentile_interval, t_interval
from twophase.judge.cells import ARM, BOTH, CONTROL, MISSING, SAME, Paired, Remark, fate, outcomes, ratio_of
from twophase.sweeps.table import Setting

Measure = Literal["tuned best", "held out", "cells", "area"]
Matching = Literal["paired", "same place", ""]
HELD_OUT_SEEDS = 3
"""The fewest seeds for holding one out: with two, each choice would rest on a single run."""


@dataclass(frozen=True, slots=True)
class SeedDifference:
    """One seed's difference."""

    seed: Any
    """None in a sweep without an axis of seeds."""
    value: float
    """Positive where the arm is better; infinite where one side alone diverged, NaN where there is none."""
    remark: Remark = ""
    """Reason for such a value, or `same run` where the arm and the control are one run."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One measure of an arm against a control.

    Args:
        measure: compared quantity; see the module.
        within: x of `area`, relative; None for the other measures.
        by_seed: one difference a seed; natural logarithms of perplexity ratios, for `area` shares from -1 to 1.
        better, worse: seeds in which the arm, or the control, is better: that the other alone diverged is included.
        equal: seeds with no difference.
        mean: over the seeds; None when there is none, or when a run diverged in one arm only.
        bootstrap: 95 % percentile interval of the mean over seeds; None for one seed or without any spread.
        t: Student's 95 % interval of it, for areas cut off at -1 and 1, beyond which there is none.
        note: remarks for the reader, such as why there is no interval; may be empty.
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
        """Number of compared seeds."""
        return self.better + self.worse + self.equal

    @property
    def ratio(self) -> float | None:
        """The control's perplexity over the arm's, exp(mean); above 1 the arm is better. None for an area."""
        return None if self.mean is None or self.measure == "area" else ratio_of(self.mean)


@dataclass(frozen=True, slots=True)
class Cells:
    """What became of the cells of two arms; from `same` on, the counts say how many are in no mean and why.

    Args:
        matching: `paired` by `control_of`, `same place` on the grid, or empty when nothing matches.
        arm_alone, control_alone: settings without a partner.
        matched: cells with a partner; a pair of runs that several cells share is there once.
        same: the same runs on both sides.
        arm_diverged, control_diverged, both_diverged: diverged on some seed in that arm only, or in both.
        missing: not there on some seed, on either side.
    """

    matching: Matching
    arm_alone: int
    control_alone: int
    matched: int
    same: int
    arm_diverged: int
    control_diverged: int
    both_diverged: int
    missing: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm against a control, on the seeds that both have."""

    arm: str
    control: str
    seeds: tuple[Any, ...]
    cells: Cells
    differences: tuple[Difference, ...]
    """One a measure; measures that do not exist here (nothing matches) are left out."""


@dataclass(frozen=True, slots=True)
class Arm:
    """The settings of one arm, and for each (lines) and seed (columns) its outcome and the run that this comes from."""

    settings: Sequence[Setting]
    seeds: tuple[Any, ...]
    outcomes: np.ndarray
    runs: np.ndarray

    @classmethod
    def of(cls, settings: Sequence[Setting]) -> Arm:
        """Arrange the settings of one arm, at least one, by their seeds in ascending order."""
        every = {seed for cell in settings for seed in cell.seeds}
        seeds = sorted(every, key=lambda s: (isinstance(s, str), s if isinstance(s, (int, float)) else 0, str(s)))
        by_seed = [dict(zip(cell.seeds, cell.runs, strict=True)) for cell in settings]
        # A setting without a run on a seed shares that with no other setting.
        runs = [[cell.get(seed, f"{settings[0].arm}, no run {k}") for seed in seeds] for k, cell in enumerate(by_seed)]
        return cls(settings, tuple(seeds), outcomes(settings)[seeds].to_numpy(), np.array(runs, dtype=object))

    def on(self, seeds: tuple[Any, ...]) -> Arm:
        """Return the arm with some of its seeds."""
        columns = [self.seeds.index(seed) for seed in seeds]
        return Arm(self.settings, seeds, self.outcomes[:, columns], self.runs[:, columns])

    @property
    def best(self) -> int | None:
        """The finished setting with the lowest mean perplexity; the first of equals; None when nothing has finished."""
        return _lowest([math.inf if cell.result is None else cell.result for cell in self.settings])

    def held_out(self, column: int) -> tuple[int | None, float, str]:
        """Return the setting that is best on the other seeds, its outcome on the held-out one, and the run of that.

        When every setting diverged on the other seeds there is nothing to choose, and the arm counts as diverged.
        """
        others = np.delete(self.outcomes, column, axis=1)
        chosen = _lowest([math.fsum(line) for line in others])
        if chosen is None:
            return None, math.inf if (others == math.inf).any(axis=1).all() else math.nan, ""
        return chosen, self.outcomes[chosen, column], self.runs[chosen, column]

    @property
    def held_out_perplexity(self) -> float | None:
        """The mean over seeds of the outcome on each at the setting that is best on the other seeds.

        Unlike the perplexity of the best setting it has no selection bias. None for fewer than `HELD_OUT_SEEDS` seeds,
        and when a run that it needs has diverged or is missing.
        """
        if len(self.seeds) < HELD_OUT_SEEDS:
            return None
        mean = math.fsum(self.held_out(column)[1] for column in range(len(self.seeds))) / len(self.seeds)
        return mean if math.isfinite(mean) else None

    @property
    def varied(self) -> tuple[str, ...]:
        """The dotted paths of the values that vary within the arm."""
        first = self.settings[0].values
        return tuple(path for path in first if any(cell.values.get(path) != first[path] for cell in self.settings))


def compare(
    arm: Arm,
    control: Arm,
    controlled: Mapping[str, Collection[str]],
    bests: Mapping[Any, float],
    within: Sequence[float],
) -> Comparison:
    """Compare an arm with a control on the seeds that both have, by every measure of the module's text.

    Args:
        arm: the arm under test.
        control: the arm to compare with.
        controlled: run ids of the controlled runs by the control's run ids; empty for a control of no cell.
        bests: lowest perplexity of all arms, by seed.
        within: the relative distances x of the areas.
    """
    seeds = tuple(seed for seed in arm.seeds if seed in control.seeds)
    arm, control = arm.on(seeds), control.on(seeds)
    differences = [_tuned(arm, control), _held_out(arm, control)]
    matching, pairs = _matched(arm, control, controlled) if seeds else ("", [])
    alone = [len(side.settings) - len({pair[k] for pair in pairs}) for k, side in enumerate((arm, control))]
    # Pairs of the same runs in several places are one comparison.
    pairs = list({(*arm.runs[a], *control.runs[c]): (a, c) for a, c in pairs}.values())
    mine, other = [a for a, _ in pairs], [c for _, c in pairs]
    sides = (arm.outcomes[mine], control.outcomes[other], arm.runs[mine] == control.runs[other])
    kinds = [SAME if same.all() else fate(a.max(), c.max()) for a, c, same in zip(*sides, strict=True)]
    counts = Counter(kinds)
    shares: list[int] = [counts[kind] for kind in (SAME, ARM, CONTROL, BOTH, MISSING)]
    cells = Cells(matching, alone[0], alone[1], len(pairs), *shares)
    if pairs:
        # When all are the same runs, they stay: that the difference is exactly 0 is then what there is to say.
        wanted = {SAME} if set(kinds) == {SAME} else {"", ARM, CONTROL, BOTH}
        present, ended = ([kind in group for kind in kinds] for group in (wanted, wanted & {"", SAME}))
        differences.append(_over_cells(seeds, [side[ended] for side in sides], _cells_note(cells)))
        in_both = [side[present] for side in sides]
        differences += [_area(seeds, in_both, x, [bests.get(seed) for seed in seeds]) for x in within]
    return Comparison(arm.settings[0].arm, control.settings[0].arm, seeds, cells, tuple(differences))


def _lowest(values: Sequence[float]) -> int | None:
    """Return the place of the lowest finite number; the first of equals."""
    return min((k for k, value in enumerate(values) if math.isfinite(value)), key=lambda k: values[k], default=None)


def _between(seed: Any, arm: float, control: float, same: bool) -> SeedDifference:
    """Return the log ratio log p_control - log p_arm on one seed."""
    return SeedDifference(seed, math.log(control) - math.log(arm), fate(arm, control) or (SAME if same else ""))


def _tuned(arm: Arm, control: Arm) -> Difference:
    best, other = arm.best, control.best
    if best is None or other is None:
        empty = [name for name, chosen in (("the arm", best), ("the control", other)) if chosen is None]
        return _summary("tuned best", [], f"nothing finished in {' and '.join(empty)}")
    same = arm.runs[best] == control.runs[other]
    pairs = map(_between, arm.seeds, arm.outcomes[best], control.outcomes[other], same)
    return _summary("tuned best", list(pairs), "" if arm.seeds else "no seed in common")


def _held_out(arm: Arm, control: Arm) -> Difference:
    count = len(arm.seeds)
    if count < HELD_OUT_SEEDS:
        return _summary("held out", [], f"needs {HELD_OUT_SEEDS} seeds, {count or 'none'} in common")
    differences, others, bests = [], 0, (arm.best, control.best)
    for column, seed in enumerate(arm.seeds):
        (mine, outcome, run), (other, control_outcome, control_run) = arm.held_out(column), control.held_out(column)
        differences.append(_between(seed, outcome, control_outcome, run == control_run))
        others += (mine, other) != bests
    note = f"other settings than tuned best in {others} of {count} seeds" if others else "the settings of tuned best"
    return _summary("held out", differences, "" if None in bests else note)


def _matched(
    arm: Arm, control: Arm, controlled: Mapping[str, Collection[str]]
) -> tuple[Matching, list[tuple[int, int]]]:
    """Pair the cells of an arm with their partners in a control, by their places in the two tables."""
    if controlled:
        targets = [{of for run in cell.runs for of in controlled.get(run, ())} for cell in control.settings]
        pairs = [
            (a, c) for c, of in enumerate(targets) for a, cell in enumerate(arm.settings) if of.intersection(cell.runs)
        ]
    else:
        varied = {*arm.varied, *control.varied}
        axes = [path for path in arm.settings[0].values if path in varied]
        places, there = ([tuple(map(cell.values.get, axes)) for cell in side.settings] for side in (arm, control))
        at = {place: c for c, place in enumerate(there)}
        pairs = [(a, at[place]) for a, place in enumerate(places) if place in at]
    matching: Matching = "" if not pairs else "paired" if controlled else "same place"
    return matching, pairs


def _over_cells(seeds: Sequence[Any], sides: Sequence[Any], note: str) -> Difference:
    """Average log ratios over cells."""
    differences = []
    for column, seed in enumerate(seeds if len(sides[0]) else ()):
        pairs = [_between(seed, *pair) for pair in zip(*(side[:, column] for side in sides), strict=True)]
        remark = pairs[0].remark if len({pair.remark for pair in pairs}) == 1 else ""
        mean = Paired(tuple(pair.value for pair in pairs)).mean
        differences.append(SeedDifference(seed, math.nan if mean is None else mean, remark))
    return _summary("cells", differences, note)


def _area(seeds: Sequence[Any], sides: Sequence[Any], within: float, bests: Sequence[float | None]) -> Difference:
    count, differences = len(sides[0]), []
    for seed, best, arm, control, same in zip(seeds, bests, *(side.T for side in sides), strict=True):
        if count and best is None:  # nothing has finished, so that nothing is near the best
            differences.append(SeedDifference(seed, math.nan, BOTH))
        elif count and best is not None:
            near, control_near = (int((side <= best * (1 + within)).sum()) for side in (arm, control))
            differences.append(SeedDifference(seed, (near - control_near) / count, SAME if same.all() else ""))
    many = "1 cell" if count == 1 else f"{count} cells"
    return _summary("area", differences, many if count else "no cell is there in both", within)


def _cells_note(cells: Cells) -> str:
    """Say the number of cells in a mean, and the excluded cells by reason."""
    out = {
        "the same runs": cells.same if cells.same < cells.matched else 0,
        "diverged in the arm only": cells.arm_diverged,
        "diverged in the control only": cells.control_diverged,
        "diverged in both": cells.both_diverged,
        "missing": cells.missing,
    }
    how = "paired cells" if cells.matching == "paired" else "cells"
    notes = [f"{cells.matched - sum(out.values())} of {cells.matched} {how}"]
    if any(out.values()):
        notes.append("left out: " + ", ".join(f"{count} {text}" for text, count in out.items() if count))
    alone = [
        f"{count} setting{'s' * (count > 1)} of {side}"
        for side, count in (("the arm", cells.arm_alone), ("the control", cells.control_alone))
        if count
    ]
    if alone:
        notes.append("without a partner: " + ", ".join(alone))
    return "; ".join(notes)


def _summary(
    measure: Measure, differences: Sequence[SeedDifference], note: str = "", within: float | None = None
) -> Difference:
    """Summarize differences, one a seed; `note` stands before the words on the seeds."""
    remarks: list[Remark] = [difference.remark for difference in differences]
    pairs = Paired(tuple(difference.value for difference in differences))
    values, one_sided = pairs.finite, {ARM, CONTROL} & set(remarks)
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
        better=sum(value > 0 for value in pairs.by_seed),
        worse=sum(value < 0 for value in pairs.by_seed),
        equal=values.count(0),
        mean=None if one_sided else pairs.mean,
        bootstrap=percentile_interval(values) if spread else None,
        t=student,
        note="; ".join(filter(None, notes)),
    )


_WORDS: dict[Remark, str] = {
    SAME: "same runs", ARM: "arm diverged", CONTROL: "control diverged", BOTH: "both diverged", MISSING: "missing",
}  # fmt: skip
"""Reasons for excluding a seed."""
