"""What a sweep's table says: each arm on its own, and each arm against the controls, with several seeds.

A verdict counts and compares: in how many seeds an arm was better, with intervals. It has no rule for the size that
matters. `twophase.judge.bootstrap` says what intervals of a few seeds are worth.

Three kinds of arms are controls: arms with cells linked to the cells that they control (`control_of`), arms named as
controls, and momentum-free SGD. The last has `outer.momentum` 0 throughout, and no restart policy with its own steps.
Every other arm is compared with every control.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twophase.config import coerce
from twophase.errors import UsageError
from twophase.judge.bootstrap import LEVEL
from twophase.judge.cells import outcomes
from twophase.judge.comparison import Arm, Comparison, compare
from twophase.restart import parse
from twophase.sweeps.table import Row, Setting, arm_name, cell_text, settings, without_ratio

WITHIN = (0.01, 0.02, 0.05, 0.1, 0.25)
"""Distances from the best of all, relative, that robustness areas are given for."""


@dataclass(frozen=True, slots=True)
class Area:
    """The robustness area of an arm: how much of it works."""

    within: float
    """x, relative: a setting works when its mean perplexity is at most (1 + x) times the best of all."""
    near: int
    """Settings that work."""
    share: float | None
    """`near / settings`, diverged and missing settings counting as outside; None when nothing has finished."""


@dataclass(frozen=True, slots=True)
class ArmVerdict:
    """One arm alone.

    Args:
        control: reason for being a control (`paired`, `named`, `momentum-free`), else empty.
        settings: number of settings: finished + diverged + missing.
        finished: settings in which every seed has finished; means cover no others.
        diverged: settings in which a seed has diverged.
        missing: settings without a diverged seed in which a seed is missing or could not be run.
        seeds: seeds of any setting.
        best: the finished setting of the lowest mean perplexity, the first of equals; None when nothing has finished.
        held_out: mean over its seeds of the perplexity at the setting that is best on the other seeds. None for fewer
            than three seeds, and if a needed run has no perplexity.
        geometric_mean: geometric mean of the mean perplexities of its finished settings.
        worst: the finished setting of the highest mean perplexity; each diverged one is worse than that.
        varied: the dotted paths of the values that vary within the arm.
    """

    arm: str
    control: str
    settings: int
    finished: int
    diverged: int
    missing: int
    seeds: tuple[Any, ...]
    best: Setting | None
    held_out: float | None
    areas: tuple[Area, ...]
    geometric_mean: float | None
    worst: Setting | None
    varied: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a sweep's table says.

    Args:
        level: nominal coverage of every interval.
        best: the setting of the lowest mean perplexity of all arms; None when nothing has finished.
        arms: arms in order of appearance.
        comparisons: comparisons by control, then by arm.
    """

    within: tuple[float, ...]
    level: float
    best: Setting | None
    arms: tuple[ArmVerdict, ...]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]


def verdict(rows: Sequence[Row], within: Sequence[float] = WITHIN, controls: Collection[str] = ()) -> Verdict:
    """Judge the arms of a sweep, alone and against the controls.

    Perplexities are arithmetic means over the seeds of a setting; B is the lowest of ALL settings of ALL arms. The
    robustness area of an arm is #{settings with mean <= (1 + x) B} / #{settings}. Comparisons go seed by seed;
    `twophase.judge.comparison` defines them.

    Args:
        rows: rows of the whole sweep, in any order.
        within: distances x for the areas, relative, >= 0; at least one.
        controls: names of further arms that serve as controls.

    Raises:
        UsageError: an x that is negative or not finite, none at all, or a control that is no arm.
    """
    distances = tuple(dict.fromkeys(float(x) for x in within))
    if not distances or not all(0 <= x < math.inf for x in distances):
        raise UsageError(f"--within {list(within)}: give distances >= 0, relative, such as 0.05 for 5 %")
    every = settings(rows)
    groups: dict[str, list[Setting]] = {}
    for setting in every:
        groups.setdefault(setting.arm, []).append(setting)
    # As the tables write them, or as cells.csv does.
    written = {arm_name(name): name for name in groups}
    controls = [written.get(name, name) for name in controls]
    unknown = [name for name in controls if name not in groups]
    if unknown:
        names = ", ".join(map(repr, groups)) or "none"
        raise UsageError(f"--controls {unknown[0]!r}: there is no such arm; the arms are: {names}")
    links: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        if row.control_of is not None:
            links.setdefault(row.arm, {}).setdefault(row.run, set()).add(row.control_of)
    why = {name: _why_control(group, name in links, name in controls) for name, group in groups.items()}
    arms = {name: Arm.of(group) for name, group in groups.items()}
    finished = [setting for setting in every if setting.result is not None]
    best = min(finished, key=lambda setting: setting.result or 0, default=None)
    bests = {seed: lowest for seed, lowest in outcomes(every).min().items() if lowest < math.inf}
    comparisons = tuple(
        compare(arms[name], arms[control], links.get(control, {}), bests, distances)
        for control in arms
        for name in arms
        if why[control] and not why[name]
    )
    judged = tuple(_judge(arm, why[name], best, distances) for name, arm in arms.items())
    return Verdict(distances, LEVEL, best, judged, comparisons, (*_notes(judged), *without_ratio(rows)))


def select(rows: Sequence[Row], where: Mapping[str, str]) -> list[Row]:
    """Select the rows with some values; a number is equal however it is written."""
    chosen = list(rows)
    for path, text in where.items():
        there = list(dict.fromkeys(row.values[path] for row in rows if path in row.values))
        if not there:
            paths = ", ".join(rows[0].values) if rows else "none"
            raise UsageError(f"--where {path}={text}: the sweep does not vary {path}; it varies {paths}")
        wanted = {value for value in there if cell_text(value) == text or _as_number(value) == _as_number(text)}
        if not wanted:
            values = ", ".join(map(cell_text, there))
            raise UsageError(f"--where {path}={text}: no cell has that value; there are {values}")
        chosen = [row for row in chosen if row.values.get(path) in wanted]
    if not chosen:
        raise UsageError(f"--where: no cell has all of {', '.join(f'{path}={text}' for path, text in where.items())}")
    return chosen


def _as_number(value: Any) -> float | str:
    try:
        return float(str(value))
    except ValueError:
        return f"no number: {value}"


def _why_control(group: Sequence[Setting], paired: bool, named: bool) -> str:
    momentum_free = all(
        setting.values.get("outer.momentum") == 0
        and setting.values.get("outer.filter", "none") == "none"
        and setting.values.get("outer.schedule", "constant") == "constant"
        and not _takes_steps(setting.values)
        for setting in group
    )
    reasons = {"paired": paired, "named": named, "momentum-free": momentum_free}
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def _takes_steps(values: Mapping[str, Any]) -> bool:
    """Return whether a restart policy takes its own steps; an unknown policy may."""
    words = values.get("sync.restart") or ()  # a blank cell of a table is None
    texts = [word.partition("=")[2] for word in coerce(tuple[str, ...], words)]
    try:
        return any(parse(str(text)).takes_steps for text in texts or [values.get("outer.restart") or "never"])
    except ValueError:
        return True


def _judge(arm: Arm, control: str, best: Setting | None, within: Sequence[float]) -> ArmVerdict:
    group, states = arm.settings, [setting.state for setting in arm.settings]
    finished = [setting for setting in group if setting.result is not None]
    values = [setting.result for setting in finished if setting.result is not None]
    areas = []
    for x in within:
        near = sum(value <= (best.result or 0) * (1 + x) for value in values) if best else 0
        areas.append(Area(x, near, near / len(group) if best else None))
    return ArmVerdict(
        group[0].arm,
        control,
        settings=len(group),
        finished=len(finished),
        diverged=states.count("diverged"),
        missing=states.count("missing"),
        seeds=arm.seeds,
        best=finished[values.index(min(values))] if values else None,
        held_out=arm.held_out_perplexity,
        areas=tuple(areas),
        geometric_mean=statistics.geometric_mean(values) if values else None,
        worst=finished[values.index(max(values))] if values else None,
        varied=arm.varied,
    )


def _notes(arms: Sequence[ArmVerdict]) -> tuple[str, ...]:
    """Write sentences on the limits of these comparisons."""
    seeds = {arm.seeds for arm in arms}
    controls = [arm for arm in arms if arm.control]
    missing, diverged = sum(arm.missing for arm in arms), sum(arm.diverged for arm in arms)
    lines = []
    if not arms:
        lines.append("The table has no cells.")
    elif len(arms) == 1:
        lines.append("One arm only: nothing to compare it with.")
    elif not controls:
        lines.append("No controls: nothing is linked to the cells it controls, named as a control, or momentum-free.")
    elif len(controls) == len(arms):
        lines.append("Every arm is a control: nothing to compare with them.")
    if len(seeds) > 1:
        lines.append("The arms have different seeds; comparisons use the seeds that both sides have.")
    elif arms and len(arms[0].seeds) == 1:
        lines.append("One seed: no spread and no interval; what another seed would give is not known.")
    for count, words in (
        (diverged, "with a diverged run: in no mean, outside of every area, worse than any number."),
        (
            missing,
            "with a missing run: in no mean and outside of every area. Shares may still grow or, with a new best, "
            "shrink. Repeat the sweep's command to run them.",
        ),
    ):
        if count:
            lines.append(f"{count} setting{'s' * (count > 1)} {words}")
    return tuple(lines)
