"""Two arms of a sweep compared seed by seed: an arm against a control.

Every comparison is one number a seed, positive where the arm is better, because a seed sets the data order and the
initialisation of both arms. p is a perplexity, s a seed, S the seeds that both arms have:

* tuned best: each arm at its own best setting over all its seeds, d_s = log p_control,s - log p_arm,s. Its setting was
  chosen on the seeds that judge it, which flatters the arm that had more settings to choose from.
* held out: the same, but for every seed both settings are chosen on the other seeds of S alone and judged on this one.
  It takes three seeds. The choices of two seeds share data, so that the d_s are only nearly independent.
* cells: the mean of log p_control,s - log p_arm,s over matched cells, which is the log ratio of the two geometric means
  over these cells. A control is matched with the cell that it controls; without such links, cells that agree on every
  axis that varies within either arm are matched.
* area: the share of the arm's matched cells within x of the best of ALL arms on that seed, minus the control's share.

A setting can be chosen when all its runs on the choosing seeds have finished; an arm in which every setting diverged
there counts as diverged. The mean over cells is over those that finished on every seed of S on both sides, so that all
seeds judge the same cells; the others are counted by what became of them. For areas a diverged cell is outside, and
only cells that are missing are left out. Cells with the same runs in both arms differ by exactly 0 and are no evidence:
they are counted, and left out as long as there are others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from twophase.judge.cells import ARM, BOTH, CONTROL, MISSING, SAME, Remark, fate
from twophase.judge.difference import Difference, SeedDifference, summary
from twophase.sweep.table import Setting, State

Matching = Literal["paired", "same place", ""]
HELD_OUT_SEEDS = 3
"""The fewest seeds for holding one out: with two, each choice would rest on a single run."""


@dataclass(frozen=True, slots=True)
class Cells:
    """What became of the cells of two arms; from `same` on, the counts say how many are in no mean and why.

    Args:
        matching: `paired` by `control_of`, `same place` on the grid, or empty when nothing matches.
        arm_alone: settings of the arm without a partner.
        control_alone: settings of the control without a partner.
        matched: cells with a partner; a pair of runs that several cells share is there once.
        same: the same runs on both sides.
        arm_diverged: diverged on some seed in the arm only.
        control_diverged: diverged in the control only.
        both_diverged: diverged in both.
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
    """An arm against a control.

    Args:
        arm: the arm.
        control: the control.
        seeds: that both have, the only ones that are compared.
        cells: what became of matched cells.
        differences: one a measure; measures that do not exist here (nothing matches) are left out.
    """

    arm: str
    control: str
    seeds: tuple[Any, ...]
    cells: Cells
    differences: tuple[Difference, ...]


class _Run(NamedTuple):
    """One seed of a setting."""

    state: State
    perplexity: float | None
    canonical: str


_NO_RUN, _DIVERGED = _Run("missing", None, ""), _Run("diverged", None, "")
_Pair = tuple[Setting, Setting]


def compare(
    arm: Sequence[Setting],
    control: Sequence[Setting],
    controlled: Mapping[str, Collection[str]],
    bests: Mapping[Any, float],
    within: Sequence[float],
) -> Comparison:
    """Compare an arm with a control on the seeds that both have, by every measure of the module's text.

    Args:
        arm: settings of the arm, at least one.
        control: settings of the control, at least one.
        controlled: from the control's run ids to those of the runs that they control; empty for a control of no cell.
        bests: for each seed, the lowest perplexity of all arms.
        within: the relative distances x of the areas.
    """
    seeds = ordered(
        {seed for setting in arm for seed in setting.seeds} & {seed for setting in control for seed in setting.seeds}
    )
    differences = [_tuned(arm, control, seeds), _held_out(arm, control, seeds)]
    matching, pairs = _matched(arm, control, controlled, seeds)
    alone = [len(side) - len({id(pair[i]) for pair in pairs}) for i, side in enumerate((arm, control))]
    # Pairs of the same runs in several places are one comparison.
    pairs = list(
        {
            tuple(_run(setting, s).canonical or setting.runs for setting in pair for s in seeds): pair for pair in pairs
        }.values()
    )
    kinds = [_kind(pair, seeds) for pair in pairs]
    counts = [kinds.count(kind) for kind in (SAME, ARM, CONTROL, BOTH, MISSING)]
    cells = Cells(matching, *[*alone, len(pairs), *counts])
    if pairs:
        # When all are the same runs, they stay: that the difference is exactly 0 is then what there is to say.
        wanted = {SAME} if set(kinds) == {SAME} else {"", ARM, CONTROL, BOTH}
        present = [pair for pair, kind in zip(pairs, kinds, strict=True) if kind in wanted]
        finished = [pair for pair, kind in zip(pairs, kinds, strict=True) if kind in wanted & {"", SAME}]
        differences.append(_over_cells(finished, seeds, _cells_note(cells)))
        differences += [_area(present, seeds, bests, x) for x in within]
    return Comparison(arm[0].arm, control[0].arm, tuple(seeds), cells, tuple(differences))


def best_setting(settings: Sequence[Setting]) -> Setting | None:
    """The finished setting with the lowest mean perplexity; the first of equals; None when nothing has finished."""
    return min(
        (setting for setting in settings if setting.perplexity is not None),
        key=lambda setting: setting.perplexity or 0,
        default=None,
    )


def held_out_perplexity(settings: Sequence[Setting], seeds: Sequence[Any]) -> float | None:
    """The mean over seeds of the perplexity on a seed at the setting that is best on the other ones.

    Unlike the perplexity of the best setting it is not flattered by having chosen it. None for fewer than
    `HELD_OUT_SEEDS` seeds, and when a run that it needs has diverged or is missing.
    """
    values = [_judged(settings, seed, seeds)[1].perplexity for seed in seeds]
    ended = [value for value in values if value is not None]
    return math.fsum(ended) / len(ended) if len(ended) == len(seeds) >= HELD_OUT_SEEDS else None


def ordered(seeds: Collection[Any]) -> list[Any]:
    """Seeds in ascending order, whatever they are."""
    return sorted(
        seeds, key=lambda seed: (isinstance(seed, str), seed if isinstance(seed, (int, float)) else 0, str(seed))
    )


def _run(setting: Setting, seed: Any) -> _Run:
    if seed not in setting.seeds:
        return _NO_RUN
    index = setting.seeds.index(seed)
    return _Run(setting.states[index], setting.perplexities[index], setting.canonical[index])


def _between(mine: _Run, other: _Run, seed: Any) -> SeedDifference:
    """The log ratio log p_control - log p_arm on one seed."""
    if mine.perplexity is not None and other.perplexity is not None:
        if mine.canonical == other.canonical:
            return SeedDifference(seed, 0.0, SAME)
        return SeedDifference(seed, math.log(other.perplexity) - math.log(mine.perplexity))
    return SeedDifference(seed, None, fate(mine.state, other.state))


def _fate(mine: Sequence[_Run], other: Sequence[_Run]) -> Remark:
    """Say what keeps some runs of an arm and of a control from being compared; empty when nothing does."""
    return fate(_worst(mine), _worst(other))


def _worst(runs: Sequence[_Run]) -> State:
    """A missing run makes a setting incomparable even where another one has diverged."""
    states = {run.state for run in runs}
    return "missing" if "missing" in states else "diverged" if "diverged" in states else "finished"


def _tuned(arm: Sequence[Setting], control: Sequence[Setting], seeds: Sequence[Any]) -> Difference:
    best, other = best_setting(arm), best_setting(control)
    if best is None or other is None:
        empty = [name for name, chosen in (("the arm", best), ("the control", other)) if chosen is None]
        return summary("tuned best", [], f"nothing finished in {' and '.join(empty)}")
    if not seeds:
        return summary("tuned best", [], "no seed in common")
    return summary("tuned best", [_between(_run(best, seed), _run(other, seed), seed) for seed in seeds])


def _held_out(arm: Sequence[Setting], control: Sequence[Setting], seeds: Sequence[Any]) -> Difference:
    if len(seeds) < HELD_OUT_SEEDS:
        have = f"{len(seeds)} in common" if seeds else "none in common"
        return summary("held out", [], f"needs {HELD_OUT_SEEDS} seeds, {have}")
    sides = ((arm, best_setting(arm)), (control, best_setting(control)))
    differences, others = [], 0
    for seed in seeds:
        (mine, our_run), (other, their_run) = (_judged(side, seed, seeds) for side, _ in sides)
        differences.append(_between(our_run, their_run, seed))
        others += mine is not sides[0][1] or other is not sides[1][1]
    note = (
        f"other settings than tuned best in {others} of {len(seeds)} seeds" if others else "the settings of tuned best"
    )
    return summary("held out", differences, note if all(best for _, best in sides) else "")


def _judged(settings: Sequence[Setting], held_out: Any, seeds: Sequence[Any]) -> tuple[Setting | None, _Run]:
    """The setting that is best on the other seeds, among those that finished on all of them, and its held-out run.

    When every setting diverged on the other seeds there is nothing to choose, and the arm counts as diverged.
    """
    best, lowest, fate = None, math.inf, _DIVERGED
    for setting in settings:
        runs = [_run(setting, seed) for seed in seeds if seed != held_out]
        ended = [run.perplexity for run in runs if run.perplexity is not None]
        if len(ended) == len(runs) and math.fsum(ended) < lowest:
            best, lowest = setting, math.fsum(ended)
        elif all(run.state != "diverged" for run in runs):
            fate = _NO_RUN
    return best, fate if best is None else _run(best, held_out)


def _matched(
    arm: Sequence[Setting], control: Sequence[Setting], controlled: Mapping[str, Collection[str]], seeds: Sequence[Any]
) -> tuple[Matching, list[_Pair]]:
    """Cells of the arm with their partners in the control."""
    if not seeds:
        return "", []
    if controlled:
        matching: Matching = "paired"
        targets = [{of for run in setting.runs for of in controlled.get(run, ())} for setting in control]
        pairs = [(a, c) for c, of in zip(control, targets, strict=True) for a in arm if of.intersection(a.runs)]
    else:
        matching = "same place"
        axes = [path for path in arm[0].values if any(_varies(path, side) for side in (arm, control))]
        there = {tuple(setting.values.get(path) for path in axes): setting for setting in control}
        places = [tuple(setting.values.get(path) for path in axes) for setting in arm]
        pairs = [(setting, there[place]) for setting, place in zip(arm, places, strict=True) if place in there]
    return (matching if pairs else ""), pairs


def _varies(path: str, side: Sequence[Setting]) -> bool:
    return any(setting.values.get(path) != side[0].values.get(path) for setting in side)


def _kind(pair: _Pair, seeds: Sequence[Any]) -> Remark:
    """Whether a pair of cells can be compared on all seeds, and if not why."""
    mine, other = ([_run(setting, seed) for seed in seeds] for setting in pair)
    if all(a.canonical == c.canonical != "" for a, c in zip(mine, other, strict=True)):
        return SAME
    return _fate(mine, other)


def _over_cells(pairs: Sequence[_Pair], seeds: Sequence[Any], note: str) -> Difference:
    differences = []
    for seed in seeds if pairs else ():
        pair_differences = [_between(_run(a, seed), _run(c, seed), seed) for a, c in pairs]
        values = [each_pair.value for each_pair in pair_differences if each_pair.value is not None]
        mean = math.fsum(values) / len(values) if values else None
        remarks = {each_pair.remark for each_pair in pair_differences}
        differences.append(SeedDifference(seed, mean, pair_differences[0].remark if len(remarks) == 1 else ""))
    return summary("cells", differences, note)


def _area(pairs: Sequence[_Pair], seeds: Sequence[Any], bests: Mapping[Any, float], within: float) -> Difference:
    differences = []
    for seed in seeds if pairs else ():
        if seed not in bests:
            # Nothing has finished, so that nothing is near the best.
            differences.append(SeedDifference(seed, None, BOTH))
            continue
        bound = bests[seed] * (1 + within)
        runs = [(_run(a, seed), _run(c, seed)) for a, c in pairs]
        mine, other = (sum((run[side].perplexity or math.inf) <= bound for run in runs) for side in (0, 1))
        same = all(a.canonical == c.canonical for a, c in runs)
        differences.append(SeedDifference(seed, (mine - other) / len(pairs), SAME if same else ""))
    many = "1 cell" if len(pairs) == 1 else f"{len(pairs)} cells"
    return summary("area", differences, many if pairs else "no cell is there in both", within)


def _cells_note(cells: Cells) -> str:
    """How many cells a mean is over, and what became of the others."""
    out = {
        "the same runs": cells.same if cells.same < cells.matched else 0,
        "diverged in the arm only": cells.arm_diverged,
        "diverged in the control only": cells.control_diverged,
        "diverged in both": cells.both_diverged,
        "missing": cells.missing,
    }
    remarks_left = ", ".join(f"{count} {text}" for text, count in out.items() if count)
    used = cells.matched - sum(out.values())
    how = "paired cells" if cells.matching == "paired" else "cells"
    alone = [
        f"{count} settings of {side}" if count > 1 else f"1 setting of {side}"
        for side, count in (("the arm", cells.arm_alone), ("the control", cells.control_alone))
        if count
    ]
    return "; ".join(
        [f"{used} of {cells.matched} {how}"]
        + ([f"left out: {remarks_left}"] if remarks_left else [])
        + ([f"without a partner: {', '.join(alone)}"] if alone else [])
    )
