"""A fair comparison: every method tuned with the same number of settings, then compared on held-out seeds.

Each stage is a sweep below the comparison's folder: the next settings of all methods, which follow from the results so
far. `tune.json` has the settings and seconds of each stage, so that a repeated call repeats nothing. `trials.log` has a
study for each method; optuna-dashboard opens it.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from twophase.compare.compare import compare
from twophase.config import fingerprint, get, require
from twophase.errors import RunError, UsageError
from twophase.files import finite, write_atomic
from twophase.runs.config import OuterConfig, RunConfig
from twophase.runs.folder import Claim, require_locks
from twophase.sweeps.grid import Sweep
from twophase.sweeps.runner import Outcome, run_sweep
from twophase.sweeps.table import Setting, measure_of
from twophase.tasks.registry import users_task
from twophase.tuning.methods import CONTROL, METHODS, Method, read_method
from twophase.tuning.results import Tuned, TuneResults, train_command
from twophase.tuning.search import Point, has_untried, propose, write_studies

STATE, TRIALS, RESULT, FRESH = "tune.json", "trials.log", "comparison.json", "fresh"
"""Files of a comparison's folder, and the beginning of the name of its last sweep."""
BUDGET = 7200.0
"""Seconds for the whole where neither points nor a budget are given."""
_BATCH, _FEWEST_POINTS = 2, 3
"""Settings of each method in a stage; the fewest that a budget must be for."""


@dataclass(frozen=True)
class Tuning:
    """Methods and runs of a comparison; what cannot be compared is refused with a UsageError.

    Args:
        base: configuration of all runs; its `inner.lr` is where searches begin, its outer optimizer does not count.
        texts: texts of the methods (`tuning.methods`); averaging is added.
        points: settings that each method tries.
        budget: seconds for the whole, which decide the number of settings in the place of `points`.
        seeds: tuning seeds, over which a setting's results are averaged.
        fresh: seeds of the final comparison, at least 2 and none of the tuning seeds.
    """

    base: RunConfig
    texts: Sequence[str] = METHODS
    points: int | None = None
    budget: float | None = None
    seeds: Sequence[int] = (0, 1)
    fresh: Sequence[int] = (100, 101, 102, 103, 104)
    methods: tuple[Method, ...] = field(init=False)
    """Averaging and the further methods."""

    def __post_init__(self) -> None:
        require(self.points is None or self.points >= 1, "points", self.points, "at least 1")
        is_time = isinstance(self.budget, int | float) and 0 < self.budget < math.inf
        require(self.budget is None or is_time, "budget", self.budget, "a time above 0, in seconds")
        require(None in (self.points, self.budget), "budget", self.budget, "left out with --points")
        seeds, fresh = (" ".join(map(str, each)) for each in (self.seeds, self.fresh))
        require(0 < len({*self.seeds}) == len(self.seeds), "seeds", seeds, "one or more, each once")
        fits = 1 < len({*self.fresh}) == len(self.fresh) and not {*self.fresh} & {*self.seeds}
        require(fits, "fresh", fresh, f"two or more, each once, none of them among --seeds {seeds}")
        sync = replace(self.base.sync, restart=())  # every method has its own
        object.__setattr__(self, "base", replace(self.base, outer=OuterConfig(), sync=sync, seed=0))
        given = METHODS[:-1] if (*self.texts,) == METHODS and not _takes_muon(self.base) else self.texts
        texts = [CONTROL, *(text for text in (" ".join(text.split()) for text in given) if text != CONTROL)]
        object.__setattr__(self, "methods", tuple(read_method(text, self.base) for text in texts))
        different = {(*method.scales, fingerprint(method.config(method.start).plain())) for method in self.methods}
        # Counted twice, one would widen all intervals.
        fits = 1 < len(different) == len(texts)
        require(fits, "methods", ", ".join(texts), f"one or more beside {CONTROL}, each once")


def _takes_muon(base: RunConfig) -> bool:
    """Return whether the model has a hidden matrix, which only that of a user's own task may lack."""
    if not (task := users_task(base)):
        return True
    from twophase.training.inner import hidden_matrices  # noqa: PLC0415 - torch

    return bool(hidden_matrices(task.model(0)))


def run_tuning(
    tuning: Tuning,
    folder: Path,
    *,
    workers: int | None = None,
    quiet: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> TuneResults:
    """Tune every method and compare them; repeating the call resumes it, also with more points or a larger budget.

    Raises:
        UsageError: the folder holds something else, or a budget that does not reach.
        RunError: runs failed, and the same call tries them again; or every setting of averaging diverged.
    """
    require_locks()
    try:
        import optuna  # noqa: PLC0415 - an extra; missing, it is refused before hours of runs
    except ImportError:
        raise UsageError("tune needs optuna; pip install 'twophase[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # no line for every study
    if not (folder / STATE).exists() and folder.is_dir() and any(file.name[0] != "." for file in folder.iterdir()):
        raise UsageError(f"--out {folder}: must be empty or a comparison's folder, holds no {STATE}")
    if task := users_task(tuning.base):
        task.check_seeds([*tuning.seeds, *tuning.fresh])
    folder.mkdir(parents=True, exist_ok=True)
    with Claim(folder):
        stages = _Stages(tuning, folder, partial(run_sweep, workers=workers, quiet=quiet, should_stop=should_stop))
        stages.search()
        if not quiet:
            print(f"{folder}: {stages.points} settings of each method", file=sys.stderr)
        return stages.compare()


class _Stages:
    """The sweeps of a comparison, one after the other."""

    def __init__(self, tuning: Tuning, folder: Path, train: Callable[[Sweep, Path], Outcome]) -> None:
        self.tuning, self.folder, self.train = tuning, folder, train
        # Logarithm of the result of each setting tried, and seconds of all runs, by method.
        self.results: dict[str, dict[Point, float]] = {method.text: {} for method in tuning.methods}
        self.seconds = dict.fromkeys(self.results, 0.0)
        # What identifies the comparison; other values of the runs are refused by its sweeps.
        spec = {"methods": [*self.results], "seeds": [*tuning.seeds], "fresh": [*tuning.fresh]}
        # Of each stage the settings by method, and the seconds that it took once it has ended.
        self.state: dict[str, Any] = spec | {"stages": []}
        if (folder / STATE).exists():
            self.state = json.loads((folder / STATE).read_bytes())
            for option, value in spec.items():
                require(value == self.state[option], option, value, f"{self.state[option]} as in {folder}")

    @property
    def points(self) -> int:
        """The largest number of settings that a method has tried."""
        return max(map(len, self.results.values()))

    def search(self) -> None:
        """Run stages up to the number of settings that points or budget allow."""
        stages, methods = self.state["stages"], self.tuning.methods
        for number in itertools.count():
            began, before = time.monotonic(), math.fsum(self.seconds.values()) if number < len(stages) else math.inf
            if number == len(stages):
                most = self.tuning.points or self._affordable()
                points = {
                    method.text: propose(method.scales, tried, min(_BATCH, most - len(tried)))
                    for method in methods
                    if len(tried := self.results[method.text]) < most
                }
                if not any(points.values()):
                    return
                stages.append({"points": points})
                self._save()
            for method, point, setting in self._run(f"stage-{number:02d}", stages[number]["points"], self.tuning.seeds):
                self.results[method.text][point] = statistics.fmean(map(math.log, setting.by_seed.values()))
            # Of an interrupted stage, the time of earlier calls is in the seconds of its runs alone.
            trained = (math.fsum(self.seconds.values()) - before) / self.workers
            stages[number].setdefault("seconds", max(time.monotonic() - began, trained))
            self._save()
            write_studies(self.folder / TRIALS, {m.text: (m.scales, self.results[m.text]) for m in methods})

    def _affordable(self) -> int:
        """Return the settings of each method that the budget allows, from the seconds of those so far."""
        if not self.points:
            return 1
        budget, final = self.tuning.budget or BUDGET, len(self.tuning.fresh) / len(self.tuning.seeds)
        each = math.fsum(stage["seconds"] for stage in self.state["stages"]) / self.points
        points = max(self.points, int(budget / each - final))
        least = f"at least {math.ceil((final + _FEWEST_POINTS) * each + 1)}s, for {_FEWEST_POINTS} settings"
        require(points >= _FEWEST_POINTS, "budget", f"{budget:.0f}s", least)
        return points

    def compare(self) -> TuneResults:
        """Train the best setting of each method on the fresh seeds, and compare; write and return what came out."""
        best = {text: min(tried, key=tried.__getitem__) for text, tried in self.results.items()}
        points = {text: [point] for text, point in best.items() if math.isfinite(self.results[text][point])}
        if CONTROL not in points:
            raise RunError(f"{self.folder}: {CONTROL} diverged at each setting; use a new --out and smaller --inner.lr")
        fresh, name = tuple(self.tuning.fresh), f"{FRESH}-{self.points}"
        found = {method.text: setting for method, _, setting in self._run(name, points, fresh)}
        tuned = [self._tuned(method, best[method.text], found) for method in self.tuning.methods]
        tuned.sort(key=lambda each: (each.fresh, not each.results))
        outcome = TuneResults(self.folder / name, measure_of(found[CONTROL].rows), self.points, fresh, tuple(tuned))
        plain = {"measure": outcome.measure, "points": self.points, "fresh": fresh}
        plain["methods"] = [each.row() for each in tuned]
        write_atomic(self.folder / RESULT, json.dumps(finite(plain), indent=1) + "\n")
        return outcome

    def _tuned(self, method: Method, best: Point, found: Mapping[str, Setting]) -> Tuned:
        """Return what came out for a method at its best setting, of its results and averaging's on the fresh seeds."""
        text, tried, config = method.text, self.results[method.text], method.config(best)
        if text not in found:
            return Tuned(text, "all diverged", len(tried), self.seconds[text])
        is_open, comparison, word = has_untried(method.scales, tried, best), None, "control"
        if text != CONTROL:
            comparison = compare(found[text].by_seed, found[CONTROL].by_seed, comparisons=len(self.results) - 1)
            word = "open" if is_open and comparison.word != "better" else comparison.word
        numbers = {path: get(config, path) for path in method.scales}
        results, command = tuple(found[text].by_seed.values()), train_command(config)
        about = len(tried), self.seconds[text], is_open, math.exp(tried[best])
        return Tuned(text, word, *about, results, comparison, command, numbers)

    def _run(
        self, name: str, points: Mapping[str, Iterable[Iterable[float]]], seeds: Sequence[int]
    ) -> list[tuple[Method, Point, Setting]]:
        """Run some settings as a sweep; return the method, point and results of each."""
        settings = [(method, tuple(point)) for method in self.tuning.methods for point in points.get(method.text, ())]
        cells = [method.cell(point, seed) for method, point in settings for seed in seeds]
        folder = self.folder / name
        outcome = self.train(Sweep(self.tuning.base, cells), folder)
        outcome.check(folder)
        self.workers = outcome.workers
        for row in outcome.rows:
            if row.state == "missing":
                raise RunError(f"{self.folder}: stopped; the same command resumes it")
            self.seconds[row.arm] += row.seconds or 0.0
        rows = iter(outcome.rows)
        return [(m, p, Setting(m.text, {}, tuple(itertools.islice(rows, len(seeds))))) for m, p in settings]

    def _save(self) -> None:
        write_atomic(self.folder / STATE, json.dumps(self.state, indent=1) + "\n")
