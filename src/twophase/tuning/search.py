"""The next settings to try, proposed by Optuna's Gaussian process from the results so far, and from these alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.files import replacing

Point = tuple[float, ...]
"""A setting: a place on each scale."""
Results = Mapping[Point, float]
"""Logarithm of the result of each setting; infinite where it diverged."""
_CLIP = 1.0
"""For the sampler no result is further than this behind the best: one divergence would make all others look alike."""


def rounded(x: float) -> float:
    """Return a number to four digits, which are read and typed more easily."""
    return float(f"{x:.4g}")


@dataclass(frozen=True)
class Scale:
    """Scale of a tuned number, on which factors count alike.

    Args:
        start: where the search begins.
        low, high: its range, which follows the best result beyond them; of a whole number it does not.
        is_odds: whether the number is x / (1 + x), as a momentum, for x on the scale.
        is_whole: whether the number is a whole one.
        template: the value that the number is a part of; `~` stands for the number.
    """

    start: float
    low: float
    high: float
    is_odds: bool = False
    is_whole: bool = False
    template: str = "~"

    def text(self, x: float) -> str:
        """Write the value at a place on the scale, as an option has it."""
        return self.template.replace("~", f"{x / (1 + x) if self.is_odds else x:.4g}")


def propose(scales: Mapping[str, Scale], results: Results, count: int) -> list[Point]:
    """Return the next settings, at most so many: the start, then those of the largest expected improvement.

    They follow from scales and results alone.
    """
    if not results:
        return [tuple(scale.start for scale in scales.values())]
    import optuna  # noqa: PLC0415 - an extra, and slow to import

    best = min(results.values())
    worst = best + _CLIP if math.isfinite(best) else 0.0
    sampler = optuna.samplers.GPSampler(seed=len(results), n_startup_trials=1)
    study = _study(scales, {point: min(value, worst) for point, value in results.items()}, sampler=sampler)
    distributions, points = study.trials[0].distributions, list[Point]()
    for _ in range(count + 8 if scales else 0):  # a few are known, rounded; all are where a period is all there is
        if len(points) < count:
            trial = study.ask(distributions)  # it stays open, so that the next one keeps away from it
            point = tuple(rounded(trial.params[path]) for path in scales)
            points += [point] if point not in {*results, *points} else []
    return points


def has_untried(scales: Mapping[str, Scale], results: Results, best: Point) -> bool:
    """Return whether the best setting has a neighbour that was not tried: the optimum may lie outside or between.

    A neighbour on one side of a scale is a setting that is larger, or smaller, there and within a factor of 2 on all.
    """
    steps = [[math.log2(x / b) for x, b in zip(point, best, strict=True)] for point in results]
    near = [step for step in steps if max(map(abs, step), default=0.0) <= 1 + 1e-9]
    return any(
        not any(step[index] * side > 1e-6 for step in near)
        for index, scale in enumerate(scales.values())
        for side in (-1, 1)
        if not (scale.is_whole and best[index] + side < 1)
    )


def write_studies(path: Path, studies: Mapping[str, tuple[Mapping[str, Scale], Results]]) -> None:
    """Write a study for each name as a journal that optuna-dashboard opens; settings that diverged have failed."""
    from optuna.storages import JournalStorage  # noqa: PLC0415
    from optuna.storages.journal import JournalFileBackend  # noqa: PLC0415

    with replacing(path) as temporary:
        storage = JournalStorage(JournalFileBackend(str(temporary)))
        for name, (scales, results) in studies.items():
            _study(scales, results, storage=storage, study_name=name)


def _study(scales: Mapping[str, Scale], results: Results, **options: Any) -> Any:
    """Return an Optuna study of some results, whose ranges reach a factor of 4 beyond the best on both sides."""
    import optuna  # noqa: PLC0415
    from optuna.distributions import FloatDistribution, IntDistribution  # noqa: PLC0415

    best, ranges = min(results, key=lambda point: results[point]), {}
    for (path, scale), x, xs in zip(scales.items(), best, zip(*results, strict=True), strict=True):
        if scale.is_whole:
            ranges[path] = IntDistribution(int(scale.low), int(scale.high), log=True)
        else:
            ranges[path] = FloatDistribution(min(scale.low, x / 4, *xs), max(scale.high, x * 4, *xs), log=True)
    study = optuna.create_study(**options)
    for point, value in results.items():
        ends: dict[str, Any] = {"value": value} if math.isfinite(value) else {"state": optuna.trial.TrialState.FAIL}
        params = dict(zip(scales, point, strict=True))
        study.add_trial(optuna.trial.create_trial(params=params, distributions=ranges, **ends))
    return study
