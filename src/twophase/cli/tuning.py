"""A fair comparison: every arm tuned with the same number of settings, then judged on seeds that took no part."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twophase.base.config import RunError, UsageError, fingerprint, to_tree
from twophase.base.files import write_atomic
from twophase.cli.sweeping import devices_of, watched, workers_of
from twophase.judge.decision import Decision, decide
from twophase.recipes.arms import CONTROL, Arm
from twophase.sweeps.bracket import Point, Search
from twophase.sweeps.grid import Sweep
from twophase.sweeps.run import TABLE, run_sweep
from twophase.sweeps.table import format_table, read_rows, readable, result
from twophase.tasks.named import check

SPEC, RESULT, FRESH = "tune.json", "verdict.json", "fresh"
"""Files of a comparison's folder, and the folder of its last sweep."""


@dataclass(frozen=True)
class Tuning:
    """What is compared, and by how many runs.

    Args:
        base: configuration of all runs.
        arms: without the control, which is added.
        points: settings that each arm may try; 0 until the first stage has shown what fits into the budget.
        seeds: tuning seeds, of which a setting's results are averaged.
        fresh: seeds of the final comparison, at least 2 and none of the tuning seeds.
        refinements: how often the steps are halved once the best is interior.
    """

    base: Any
    arms: tuple[Arm, ...]
    points: int
    seeds: tuple[int, ...]
    fresh: tuple[int, ...]
    refinements: int = 1

    def __post_init__(self) -> None:
        if len(self.fresh) < 2 or set(self.fresh) & set(self.seeds):
            raise UsageError(
                f"--fresh {' '.join(map(str, self.fresh))}: give two or more seeds that are not among --seeds "
                f"{' '.join(map(str, self.seeds))}, which choose the settings"
            )
        if len({arm.text for arm in self.arms}) < len(self.arms):
            raise UsageError("--arms names an arm twice; give each once")

    def spec(self) -> dict[str, Any]:
        """Return what identifies the comparison, without the number of points."""
        values = {name: list(getattr(self, name)) for name in ("seeds", "fresh")}
        arms = [{"arm": arm.text, "scales": {n: asdict(s) for n, s in arm.scales.items()}} for arm in self.arms]
        return {"base": fingerprint(to_tree(self.base)), "arms": arms, "refinements": self.refinements, **values}


@dataclass(frozen=True)
class Tuned:
    """What became of an arm.

    Args:
        arm: its text.
        numbers: its best setting; None where every setting diverged.
        interior: whether no neighbour of that was better: False where the budget ended the search.
        points: settings tried.
        tuned: mean result over the tuning seeds.
        fresh: mean result over the fresh seeds; None where one did not finish.
        decision: against the control; None of the control, and where there is no setting.
    """

    arm: str
    numbers: Mapping[str, float] | None
    interior: bool
    points: int
    tuned: float | None
    fresh: float | None
    decision: Decision | None


def tune(
    tuning: Tuning, folder: Path, *, budget: float = 0.0, workers: int | None = None, quiet: bool = False
) -> list[Tuned]:
    """Tune every arm and compare them; repeating the call resumes it.

    Each stage is a sweep of its own below the folder: what all arms want to know next. The settings of a stage follow
    from the results of the earlier ones alone.

    Args:
        tuning: what to compare.
        folder: of all sweeps, `tune.json` and `verdict.json`.
        budget: seconds for the whole, from which the first stage finds the number of points; only where that is 0.
        workers: worker processes; None is one a core.
        quiet: show no progress.

    Raises:
        UsageError: a folder of another comparison, or a budget that does not reach.
        RunError: runs failed; the same call tries them again.
    """
    points = _known_points(tuning, folder)
    results: dict[str, dict[Point, float]] = {arm.text: {} for arm in tuning.arms}
    stage = 0
    # The first stage is one setting an arm, whatever the points: where a budget decides, it is not known before.
    while wanted := _wanted(tuning, results, points if stage else 1):
        began = time.monotonic()
        for (arm, point), by_seed in _stage(
            tuning, wanted, folder / f"stage-{stage:02d}", workers, quiet=quiet
        ).items():
            results[arm.text][point] = math.exp(math.fsum(map(math.log, by_seed)) / len(by_seed))
        stage += 1
        if not (folder / SPEC).is_file():
            points = points or _affordable(tuning, time.monotonic() - began, budget)
            write_atomic(folder / SPEC, json.dumps({**tuning.spec(), "points": points}, indent=1))
    best = [(arm, _search(tuning, arm, points).best(results[arm.text])) for arm in tuning.arms]
    chosen = [(arm, point) for arm, point in best if point is not None]
    if not chosen:
        raise RunError(f"{folder}: every setting of every arm diverged; start from a smaller --inner.lr")
    fresh = {
        arm.text: by_seed for (arm, _), by_seed in _stage(tuning, chosen, folder / FRESH, workers, quiet=quiet).items()
    }
    outcome = [_judged(tuning, _search(tuning, arm, points), arm, results[arm.text], fresh) for arm in tuning.arms]
    plain = [{**asdict(tuned), "arm": tuned.arm} for tuned in outcome]
    write_atomic(folder / RESULT, json.dumps(plain, indent=1, allow_nan=False))
    return outcome


def _known_points(tuning: Tuning, folder: Path) -> int:
    """Return the points of a comparison that was begun, or those asked for; 0 where the first stage is to tell."""
    path = folder / SPEC
    if not path.is_file():
        return tuning.points
    there = json.loads(path.read_text(encoding="utf-8"))
    points = there.pop("points")
    if there != json.loads(json.dumps(tuning.spec())) or tuning.points not in (0, points):
        raise UsageError(f"--out {folder}: holds another comparison; choose another --out, or repeat its command")
    return points


def _affordable(tuning: Tuning, seconds: float, budget: float) -> int:
    """Return the points of each arm that a budget allows, from what one of each has taken."""
    final = seconds * len(tuning.fresh) / len(tuning.seeds)
    points = int((budget - final) / seconds) if seconds > 0 else 1
    if points < 3:
        raise UsageError(
            f"--budget {budget:.0f} s: one setting of each arm took {seconds:.0f} s, so that the fresh seeds leave "
            f"{max(points, 0)} settings an arm; give at least {final + 3 * seconds:.0f} s, or fewer arms or steps"
        )
    return points


def _search(tuning: Tuning, arm: Arm, points: int) -> Search:
    return Search(arm.scales, points, tuning.refinements)


def _wanted(tuning: Tuning, results: Mapping[str, Mapping[Point, float]], points: int) -> list[tuple[Arm, Point]]:
    return [(arm, point) for arm in tuning.arms for point in _search(tuning, arm, points).pending(results[arm.text])]


def _stage(
    tuning: Tuning, wanted: Sequence[tuple[Arm, Point]], place: Path, workers: int | None, *, quiet: bool
) -> dict[tuple[Arm, Point], list[float]]:
    """Run the settings of a stage; return the results of each, one a seed, infinite where a run diverged."""
    from twophase.tasks.build import preflight_all

    seeds = tuning.fresh if place.name == FRESH else tuning.seeds
    numbers = {(arm, point): _search(tuning, arm, 1).values(point) for arm, point in wanted}
    cells = {
        (arm, point): [arm.cell(tuning.base, numbers[arm, point], seed) for seed in seeds] for arm, point in wanted
    }
    sweep = Sweep(place.name, tuning.base, [cell for group in cells.values() for cell in group])
    for config in sweep.runs.values():
        check(config)
    devices = devices_of(sweep)
    with watched(place.name, quiet=quiet) as progress:
        outcome = run_sweep(
            sweep,
            place,
            workers=workers or len(devices) or workers_of(None),
            threads=tuning.base.threads,
            devices=devices,
            texts=preflight_all(sweep.runs.values()),
            progress=progress,
        )
    for run, error in outcome.errors.items():
        raise RunError(f"{place}: {len(outcome.errors)} runs failed, {run} with: {error}")
    by_run = {row.run: result(row) for row in read_rows(place / TABLE)}
    results = {key: [by_run[cell.run_id] for cell in group] for key, group in cells.items()}
    return {key: [math.inf if value is None else value for value in values] for key, values in results.items()}


def _judged(
    tuning: Tuning,
    search: Search,
    arm: Arm,
    results: Mapping[Point, float],
    fresh: Mapping[str, Sequence[float]],
) -> Tuned:
    """Hold an arm against the control, seed by seed."""
    point = search.best(results)
    if point is None:
        return Tuned(arm.text, None, False, len(results), None, None, None)
    own, control = fresh[arm.text], fresh.get(CONTROL)
    decision = None
    if arm.text != CONTROL and control is not None:
        pairs = [(a, b) for a, b in zip(own, control, strict=True) if math.isfinite(a) or math.isfinite(b)]
        decision = decide([math.log(b) - math.log(a) for a, b in pairs], comparisons=len(tuning.arms) - 1)
    mean = math.fsum(own) / len(own)
    return Tuned(
        arm.text,
        search.values(point),
        search.is_interior(results),
        len(results),
        results[point],
        mean if math.isfinite(mean) else None,
        decision,
    )


def describe(outcome: Sequence[Tuned], tuning: Tuning, measure: str) -> str:
    """Return the table of a comparison, best arm first, and how to read it."""
    order = sorted(outcome, key=lambda tuned: math.inf if tuned.fresh is None else tuned.fresh)
    head = ["arm", "best setting", "settings", measure, f"against {CONTROL}", "interval", "word"]
    lines = [format_table(head, [_row(tuned) for tuned in order]), ""]
    lines += [
        f"{measure}: mean over the fresh seeds {' '.join(map(str, tuning.fresh))}, which took no part in tuning.",
        f"against {CONTROL}: ratio of the geometric means, above 1 where the arm is better, with the 95 % interval",
        f"(Student's t, corrected for {len(tuning.arms) - 1} comparisons). equivalent: surely within 1 %.",
    ]
    ended = [tuned.arm for tuned in outcome if tuned.numbers is not None and not tuned.interior]
    if ended:
        lines.append(f"The search of {', '.join(ended)} ended by its budget: its best may be beyond what was tried.")
    return "\n".join(lines)


def _row(tuned: Tuned) -> list[str]:
    if tuned.numbers is None:
        return [tuned.arm, "all diverged", str(tuned.points), "", "", "", ""]
    numbers = " ".join(f"{name.removeprefix('method.')}={value:g}" for name, value in tuned.numbers.items())
    decision = tuned.decision
    ratio = interval = ""
    if decision is not None and decision.mean is not None:
        ratio = f"{math.exp(decision.mean):.3f}"
        interval = f"{math.exp(decision.low or 0):.3f} to {math.exp(decision.high or 0):.3f}"
    words = "control" if decision is None else decision.word
    return [tuned.arm, numbers, str(tuned.points), readable(tuned.fresh), ratio, interval, words]
