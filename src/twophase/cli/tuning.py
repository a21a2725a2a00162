"""A fair comparison: every arm tuned with the same number of settings, then judged on held-out seeds."""

from __future__ import annotations

import json
import math
import operator
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from twophase.base.config import RunError, UsageError, differences, fingerprint, to_tree, with_values
from twophase.base.files import write_atomic
from twophase.base.progress import duration
from twophase.base.reading import read_json_object
from twophase.cli.sweeping import complete, devices_of, workers_of
from twophase.judge.cells import Paired, pandas
from twophase.judge.decision import Decision, decide
from twophase.recipes.arms import ARMS, CONTROL, Arm
from twophase.report.results import DataFrame, Table
from twophase.runs.folder import check_place, list_some, lock_folder
from twophase.sweeps.bracket import Point, Search
from twophase.sweeps.grid import Sweep
from twophase.sweeps.run import TABLE
from twophase.sweeps.table import ABOVE_ZERO, Row, format_table, measure_of, read_rows, readable, result, with_unit
from twophase.tasks.named import check

SPEC, RESULT, FRESH = "tune.json", "verdict.json", "fresh"
"""Files of a comparison's folder, and the folder of its last sweep."""
BUDGET = 7200.0
"""Seconds for the whole where neither points nor a budget are given."""
_FEWEST_POINTS = 3

_Setting = tuple[Arm, Point]


@dataclass(frozen=True)
class Tuning:
    """Arms and runs of a comparison.

    Args:
        base: configuration of all runs, checked.
        texts: texts of the arms; the control is added.
        points: settings that each arm may try, or None.
        budget: seconds for the whole, from which the first stage finds the number of points, in the place of points.
        seeds: tuning seeds, of which a setting's results are averaged.
        fresh: seeds of the final comparison, at least 2 and none of the tuning seeds.

    Raises:
        UsageError: naming the option, its value and the remedy.
    """

    base: Any
    texts: Sequence[str] = ARMS
    points: int | None = None
    budget: float | None = None
    seeds: Sequence[int] = (0, 1)
    fresh: Sequence[int] = (100, 101, 102, 103, 104)
    arms: tuple[Arm, ...] = field(init=False)
    """The control and the further arms."""

    def __post_init__(self) -> None:
        is_list = isinstance(self.texts, Iterable) and not isinstance(self.texts, str)
        texts = [str(text) for text in (self.texts if is_list else [self.texts])]  # a policy is an arm by its text
        if not is_list or not set(texts) - {CONTROL} or len(set(texts)) < len(texts):
            raise UsageError(
                f"--arms {' '.join(texts)}: give a list of one or more arms, each once; {CONTROL} is always there"
            )
        if self.points is not None:
            object.__setattr__(self, "points", *_whole("points", [self.points]))
        for name in ("seeds", "fresh"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if not isinstance(self.budget, int | float | None):
            raise UsageError(f"--budget is {self.budget!r}; from Python give seconds, such as budget=7200")
        if self.points is not None and self.budget is not None:
            raise UsageError(f"--points {self.points} and --budget {self.budget:g} s: give one of the two")
        if not (self.points is None or self.points >= 1) or not (self.budget is None or 0 < self.budget < math.inf):
            raise UsageError(f"--points {self.points}, --budget {self.budget}: must be 1 or more, or a time above 0")
        for name, seeds in (("seeds", self.seeds), ("fresh", self.fresh)):
            if len(set(seeds)) < max(len(seeds), 1) or not all(0 <= seed < 1 << 63 for seed in seeds):
                raise UsageError(
                    f"--{name} {' '.join(map(str, seeds))}: give one or more seeds from 0 to below 2^63, each once"
                )
        if len(self.fresh) < 2 or set(self.fresh) & set(self.seeds):
            raise UsageError(
                f"--fresh {' '.join(map(str, self.fresh))}: give two or more seeds that are not among --seeds "
                f"{' '.join(map(str, self.seeds))}, which choose the settings"
            )
        texts = [CONTROL, *(text for text in texts if text != CONTROL)]
        object.__setattr__(self, "texts", tuple(texts[1:]))
        object.__setattr__(self, "arms", tuple(Arm(text, self.base.inner.lr) for text in texts))
        texts_by_start: dict[tuple[str, ...], str] = {}
        for arm in self.arms:
            try:
                start = check(self.first(arm, self.seeds[0]))
            except UsageError as error:  # of what the arm has changed
                raise UsageError(f"--arms {arm.text}: {error}") from None
            plain = with_values(start, {"outer": start.outer.plain()})  # 0.90 is 0.9, and the method's own value
            other = texts_by_start.setdefault((*arm.scales, fingerprint(plain)), arm.text)
            if other != arm.text:  # counted twice, an arm would widen all intervals
                why = f"{CONTROL}, which is always there" if other == CONTROL else f"the arm {other}; give it once"
                raise UsageError(f"--arms: {arm.text} is {why}")

    @property
    def comparisons(self) -> int:
        """Number of arms that are held against the control."""
        return len(self.arms) - 1

    def first(self, arm: Arm, seed: int) -> Any:
        """Return the configuration that an arm's search starts from."""
        return arm.cell(self.base, {name: scale.start for name, scale in arm.scales.items()}, seed).config

    def spec(self) -> dict[str, Any]:
        """Return what identifies the comparison."""
        values = {name: list(getattr(self, name)) for name in ("seeds", "fresh")}
        values |= {"points": self.points, "budget": self.budget, "refinements": Search.refinements}
        return {"base": to_tree(self.base), "arms": [arm.text for arm in self.arms], **values}


@dataclass(frozen=True)
class Tuned:
    """Result of an arm.

    Args:
        arm: its text.
        numbers: its best setting; None where every setting diverged.
        interior: True if all neighbours of that were tried, the midpoints too; False if the budget ended the search.
        settings: number of settings tried.
        seconds: duration of all its runs, those of the fresh seeds included.
        tuned: geometric mean of the best setting's results over the tuning seeds; None where every setting diverged.
        results: results of the best setting, one a fresh seed; None where that run diverged, and none without a
            setting.
        decision: verdict against the control; None of the control, and where either has no setting.
    """

    arm: str
    numbers: Mapping[str, float] | None
    interior: bool
    settings: int
    seconds: float
    tuned: float | None
    results: tuple[float | None, ...]
    decision: Decision | None

    @property
    def fresh(self) -> float | None:
        """Mean result over the fresh seeds; None where one diverged."""
        finite = [value for value in self.results if value is not None]
        return math.fsum(finite) / len(finite) if finite and len(finite) == len(self.results) else None

    @property
    def word(self) -> str:
        """`better`, `equivalent`, `worse`, `undecided`, `control`, `all diverged`, or `no control`."""
        if self.numbers is None:
            return "all diverged"
        return self.decision.word if self.decision else "control" if self.arm == CONTROL else "no control"

    def ratios(self) -> tuple[float | None, ...]:
        """Return the control's result over the arm's, above 1 where the arm is better, and its interval's two ends."""
        return self.decision.ratios() if self.decision else (None,) * 3


@dataclass(frozen=True)
class TuneResults:
    """Results of a comparison; as text it is the table that `twophase tune` prints.

    Args:
        path: its folder; `path / "fresh"` is the sweep of the fresh seeds.
        measure: quantity of a result: `perplexity` or `validation loss`.
        fresh: the fresh seeds.
        arms: best first.
    """

    path: Path
    measure: str
    fresh: tuple[int, ...]
    arms: tuple[Tuned, ...]

    def frame(self) -> DataFrame:
        """Return a row an arm as a pandas table, its tuned numbers included."""
        names = dict.fromkeys(name for tuned in self.arms for name in tuned.numbers or {})
        columns: dict[str, Any] = {
            name: [getattr(tuned, name) for tuned in self.arms]
            for name in ("arm", "word", "fresh", "tuned", "settings", "interior", "seconds")
        }
        columns |= dict(zip(("ratio", "low", "high"), zip(*(t.ratios() for t in self.arms), strict=True), strict=True))
        columns |= {name: [(tuned.numbers or {}).get(name) for tuned in self.arms] for name in names}
        return Table(columns).frame()

    def __str__(self) -> str:
        measure = with_unit(self.measure)
        head = ["arm", "best setting", "settings", "time", measure, f"against {CONTROL}", "interval", "word"]
        seeds, others = " ".join(map(str, self.fresh)), len(self.arms) - 1
        lines = [
            format_table(head, map(_cells, self.arms)),
            "",
            "settings, time: how many each arm tried, and what all its runs took, those of the fresh seeds included.",
            f"{measure}: mean over the fresh seeds {seeds}, held out from tuning.",
            f"against {CONTROL}: ratio of the geometric means, above 1 where the arm is better, with its interval",
            f"(Student's t, 95 % for all {others} together). equivalent: surely within 1 %. undecided: these seeds do "
            "not tell.",
        ]
        ended = [tuned.arm for tuned in self.arms if tuned.numbers is not None and not tuned.interior]
        if ended:
            lines.append(
                f"The search of {', '.join(ended)} ended by its budget: its optimum may lie outside the searched range."
            )
        if any(tuned.word == "no control" for tuned in self.arms):
            lines.append(f"{CONTROL} diverged at every setting, so that nothing is held against it.")
        return "\n".join(lines)


def run_tuning(tuning: Tuning, folder: Path, *, workers: int | None = None, quiet: bool = False) -> TuneResults:
    """Tune every arm and compare them; repeating the call resumes it.

    Each stage is a sweep below the folder: the next points of all arms. The settings of a stage follow from the results
    of the earlier ones alone.

    Raises:
        UsageError: arms that cannot be run, a folder of another comparison, or a budget that does not reach.
        RunError: runs failed, and the same call tries them again; or every setting of every arm diverged.
    """
    from twophase.tasks.build import preflight_all

    if workers is not None and not (isinstance(workers, Integral) and workers >= 1):
        raise UsageError(f"--workers is {workers}; a comparison waits for its runs: give 1 or more")
    pandas()
    # All that can be refused is, before there is a folder. Later settings differ from these in their numbers alone.
    seeds = (*tuning.seeds, *tuning.fresh)
    texts = preflight_all(tuning.first(arm, seed) for arm in tuning.arms for seed in seeds)
    check_place(folder, SPEC, "comparison")  # refuse before anything is touched
    # Without this lock a second process would stop in the middle, at a stage that the first one runs.
    lock = lock_folder(folder, "is tuning")
    try:
        return _Stages(tuning, folder, texts, workers, quiet).compare(*_noted(tuning, folder))
    finally:
        os.close(lock)


def _noted(tuning: Tuning, folder: Path) -> tuple[int | None, float | None]:
    """Return the points of each arm and the seconds of the first stage, each None where that stage is to tell."""
    if not check_place(folder, SPEC, "comparison"):
        return tuning.points, None
    here = tuning.spec()
    try:
        there = read_json_object(folder / SPEC)
        points, spent = there.pop("settings"), there.pop("first_stage_seconds")
        if points is None:  # what was too small a budget may be a larger one now
            there |= {name: here[name] for name in ("points", "budget")}
        different = differences(here, there)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"--out {folder}: its {SPEC} is damaged; put it back or choose another --out") from None
    if different:
        raise UsageError(
            f"--out {folder}: holds another comparison: {list_some(different)}; choose another --out, or repeat its "
            "command to resume it"
        )
    return tuning.points if points is None else points, spent


@dataclass(frozen=True)
class _Stages:
    """The sweeps of a comparison, one after the other."""

    tuning: Tuning
    folder: Path
    texts: Mapping[str, str]
    workers: int | None
    quiet: bool

    def compare(self, points: int | None, spent: float | None) -> TuneResults:
        """Run all stages, from what `_noted` returned; return and write what came out."""
        arms, stage = self.tuning.arms, 0
        results: dict[str, dict[Point, float]] = {arm.text: {} for arm in arms}
        seconds = dict.fromkeys(results, 0.0)
        self._note(points, spent)
        while True:
            # The first stage is one setting an arm, for any number of points.
            searches = [(arm, Search(arm.scales, points or 1)) for arm in arms]
            wanted = [(arm, point) for arm, search in searches for point in search.pending(results[arm.text])]
            if not wanted:
                break
            began = time.monotonic()
            for (arm, point), rows in self._sweep(f"stage-{stage:02d}", wanted, self.tuning.seeds).items():
                results[arm.text][point] = math.exp(math.fsum(_logs(rows).values()) / len(rows))
                seconds[arm.text] += _seconds(rows)
            if points is None:
                # Of a stage that was interrupted this process has seen the rest alone.
                workers = self.workers or len(devices_of([self.tuning.base])) or workers_of(None)
                worked = sum(seconds.values()) / min(workers, len(wanted) * len(self.tuning.seeds))
                spent = spent or max(time.monotonic() - began, worked)
                self._note(None, spent)
                points = _affordable(self.tuning, spent)
                if not self.quiet:
                    print(f"the budget is for {points} settings of each arm", file=sys.stderr)
                self._note(points, spent)
            stage += 1
        best = {arm.text: search.best(results[arm.text]) for arm, search in searches}
        chosen = [(arm, point) for arm in arms if (point := best[arm.text]) is not None]
        if not chosen:
            raise RunError(
                f"--out {self.folder}: every setting of every arm diverged; start from a smaller --inner.lr, in "
                "another --out"
            )
        rows_by_arm = {arm.text: rows for (arm, _), rows in self._sweep(FRESH, chosen, self.tuning.fresh).items()}
        tuned = [
            self._judged(arm, search, results[arm.text], seconds[arm.text], rows_by_arm) for arm, search in searches
        ]
        tuned.sort(key=lambda arm: math.inf if arm.fresh is None else arm.fresh)
        measure = measure_of(row for rows in rows_by_arm.values() for row in rows)
        outcome = TuneResults(self.folder, measure, tuple(self.tuning.fresh), tuple(tuned))
        plain = {
            "measure": measure,
            "fresh": list(outcome.fresh),
            "arms": [asdict(t) | {"word": t.word} for t in tuned],
        }
        write_atomic(self.folder / RESULT, json.dumps(plain, indent=1, allow_nan=False) + "\n")
        return outcome

    def _note(self, points: int | None, spent: float | None) -> None:
        """Write what is compared, with the settings that an arm may try and what the first of them took."""
        tree = {**self.tuning.spec(), "settings": points, "first_stage_seconds": spent}
        text = json.dumps(tree, indent=1, allow_nan=False) + "\n"
        write_atomic(self.folder / SPEC, text)

    def _sweep(self, name: str, wanted: Sequence[_Setting], seeds: Sequence[int]) -> dict[_Setting, list[Row]]:
        """Run some settings; return the row of each seed."""
        cells = {
            (arm, point): [arm.cell(self.tuning.base, Search(arm.scales, 1).values(point), seed) for seed in seeds]
            for arm, point in wanted
        }
        place = self.folder / name
        sweep = Sweep(name, self.tuning.base, [cell for group in cells.values() for cell in group])
        complete(sweep, place, texts=self.texts, workers=self.workers, quiet=self.quiet)
        by_run = {row.run: row for row in read_rows(place / TABLE)}
        rows = {setting: [by_run[cell.run_id] for cell in group] for setting, group in cells.items()}
        for row in by_run.values():
            if row.state != "diverged" and row.perplexity != math.inf and result(row) is None:
                raise RunError(
                    f"{place}: run {row.run} is {row.state} with a validation loss of {row.validation_loss}; "
                    f"{ABOVE_ZERO}"
                )
        return rows

    def _judged(
        self,
        arm: Arm,
        search: Search,
        results: Mapping[Point, float],
        seconds: float,
        rows_by_arm: Mapping[str, Sequence[Row]],
    ) -> Tuned:
        """Hold an arm against the control, seed by seed."""
        point = search.best(results)
        if point is None:
            return Tuned(arm.text, None, False, len(results), seconds, None, (), None)
        decision, rows = None, rows_by_arm[arm.text]
        if arm.text != CONTROL and CONTROL in rows_by_arm:
            pairs = Paired.of(_logs(rows), _logs(rows_by_arm[CONTROL]))
            decision = decide(pairs.by_seed, comparisons=self.tuning.comparisons)
        return Tuned(
            arm.text,
            search.values(point),
            search.is_interior(results),
            len(results),
            seconds + _seconds(rows),
            results[point],
            tuple(result(row) for row in rows),
            decision,
        )


def _affordable(tuning: Tuning, seconds: float) -> int:
    """Return the points of each arm that the budget allows, from the seconds that one of each has taken."""
    budget = tuning.budget or BUDGET
    final = seconds * len(tuning.fresh) / len(tuning.seeds)
    points = int((budget - final) / max(seconds, 1e-3))
    if points < _FEWEST_POINTS:
        raise UsageError(
            f"--budget {budget:.0f}s: one setting of each arm took {seconds:.0f} s, so that the fresh seeds leave "
            f"{max(points, 0)} settings an arm. Give at least {math.ceil(final + _FEWEST_POINTS * seconds + 1)}s, or "
            "in another --out fewer arms, seeds or steps"
        )
    return points


def _whole(name: str, values: Any) -> tuple[int, ...]:
    """Return what Python gave for an option as whole numbers, such as those of an array."""
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        value, remedy = (values, "a list of whole numbers") if name != "points" else (values[0], "a whole number")
        raise UsageError(f"--{name} is {value!r}; from Python give {remedy}") from None


def _logs(rows: Sequence[Row]) -> dict[Any, float]:
    """Return the logarithms of some results by seed, infinite where a run diverged."""
    return {row.values["seed"]: math.log(result(row) or math.inf) for row in rows}


def _seconds(rows: Sequence[Row]) -> float:
    return math.fsum(row.seconds or 0.0 for row in rows)


def _cells(tuned: Tuned) -> list[Any]:
    """Return an arm's line of the table."""
    numbers = " ".join(f"{name.removeprefix('method.')}={value:g}" for name, value in (tuned.numbers or {}).items())
    diverged = tuned.results.count(None)
    shown = f"{diverged} of {len(tuned.results)} diverged" if diverged else readable(tuned.fresh)
    mean, *ends = (
        "" if ratio is None else f"{ratio:.3f}" if ratio < 1e4 else f"{ratio:.3g}" for ratio in tuned.ratios()
    )
    interval = " to ".join(filter(None, ends))
    return [tuned.arm, numbers, str(tuned.settings), duration(tuned.seconds), shown, mean, interval, tuned.word]
