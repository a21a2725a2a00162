"""The search: it follows from its results, finds a minimum also beyond its range, and knows what is untried."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from twophase.tuning.search import Point, Scale, has_untried, propose, write_studies

LR, PERIOD = Scale(1.0, 1 / 8, 8.0), Scale(3.0, 1.0, 12.0, is_whole=True)
ODDS = Scale(9.0, 9 / 16, 144.0, is_odds=True)


def run(scales: dict[str, Scale], loss: Callable[[Point], float], points: int) -> dict[Point, float]:
    results: dict[Point, float] = {}
    while len(results) < points and (new := propose(scales, results, min(2, points - len(results)))):
        assert not set(new) & set(results)
        results |= {point: loss(point) for point in new}
    return results


def test_begins_at_the_start_and_repeats() -> None:
    """The first setting is the start; the same results give the same settings again."""
    scales = {"lr": LR, "momentum": ODDS}
    assert propose(scales, {}, 2) == [(1.0, 9.0)]
    results = {(1.0, 9.0): 0.5, (2.0, 4.0): 0.3, (4.0, 2.0): math.inf}
    assert propose(scales, results, 2) == propose(scales, dict(results), 2)
    assert len(propose(scales, results, 2)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("optimum", [0.3, 40.0])
def test_finds_the_minimum(optimum: float) -> None:
    """The best of a bowl is near its minimum, also where that lies beyond the range, next to divergence."""
    results = run({"lr": LR}, lambda x: 0.1 * math.log(x[0] / optimum) ** 2 if x[0] < 3 * optimum else math.inf, 14)
    best = min(results, key=lambda point: results[point])
    assert abs(math.log2(best[0] / optimum)) < 0.5
    assert len(results) == 14


def test_ends_where_nothing_is_left() -> None:
    """A period alone has as many settings as values; without a scale there is one."""
    assert len(run({"period": Scale(2.0, 1.0, 3.0, is_whole=True)}, lambda x: x[0], 9)) == 3
    assert run({}, lambda _: 1.0, 9) == {(): 1.0}


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        ([(1.0, 3.0)], True),
        ([(1.0, 3.0), (0.5, 3.0), (2.0, 3.0), (1.0, 2.0), (1.1, 4.0)], False),
        ([(1.0, 3.0), (0.4, 3.0), (2.0, 3.0), (1.0, 2.0), (1.1, 4.0)], True),  # over a factor of 2 away
        ([(1.0, 3.0), (0.6, 2.0), (1.7, 4.0)], False),
        ([(1.0, 3.0), (0.6, 2.0), (1.7, 2.0)], True),  # no longer period
        ([(1.0, 1.0), (0.6, 2.0), (1.7, 2.0)], False),
    ],
)
def test_neighbours(tried: list[Point], expected: bool) -> None:
    """Every side of every scale wants a setting within a factor of 2; below a period of 1 there is nothing."""
    assert has_untried({"lr": LR, "period": PERIOD}, dict.fromkeys(tried, 0.0), tried[0]) is expected


def test_the_file_is_a_journal_of_optuna(tmp_path: Path) -> None:
    """Optuna reads a study for each method, with what diverged as failed."""
    studies = {"a": ({"lr": LR}, {(1.0,): 0.5, (40.0,): math.inf}), "b k=3": ({"period": PERIOD}, {(3.0,): 0.2})}
    for _ in range(2):
        write_studies(tmp_path / "trials.log", studies)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(tmp_path / "trials.log")))
    assert optuna.get_all_study_names(storage) == ["a", "b k=3"]
    study = optuna.load_study(study_name="a", storage=storage)
    assert (study.best_value, study.best_params) == (0.5, {"lr": 1.0})
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL"]
