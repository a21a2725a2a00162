"""The work of a sweep: `plan.json` survives a round trip, files decide what is ready, and the loop does all of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakerun import Config, finish, grid, work_of
from twophase.base.config import UsageError, fingerprint, from_tree, with_values
from twophase.runs.folder import BusyError
from twophase.sweeps import work as module
from twophase.sweeps.grid import Axis, Sweep, product
from twophase.sweeps.plan import Job, plan
from twophase.sweeps.queue import Queue
from twophase.sweeps.work import Stopped, Work, work


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(module, "_LONGEST_PAUSE_SECONDS", 0.001)


SHARED = grid(lr=(0.3, 0.5, 0.7), momentum=(0.5, 0.9), restart=("never", "2", "3"))


def written(folder: Path, sweep: Sweep = SHARED, *, most: int = 20) -> Work:
    made = Work.of(folder, sweep, plan(sweep), merge=True, most=most, texts={"a": "1"})
    made.write()
    return made


def unfinished(plan: Work, runs: Sequence[str] | None = None) -> list[str]:
    return [run for run in runs or plan.runs if not plan.finished(run)]


HOSTILE = ("../../elsewhere", "/etc", "..", "", "a/b", "a\n")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", ["runs", "stands_for", "nodes", "jobs"])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str, place: str) -> None:
    """A plan in which a run, node or job is called so is refused before anything is written."""
    written(tmp_path)
    path = tmp_path / "plan.json"
    plan = json.loads(path.read_text())
    del plan["fingerprint"]
    if place == "runs":
        plan["runs"][name] = {}
    elif place == "stands_for":
        plan["stands_for"]["0" * 12] = name
    else:
        plan[place].append([name, *plan[place][0][1:]])
    path.write_text(json.dumps(plan | {"fingerprint": fingerprint(plan)}))
    with pytest.raises(UsageError, match=r"its plan\.json cannot be used .*no name of a run, node or job.*remove that"):
        Work.read(tmp_path)


@pytest.mark.parametrize("name", ["merge", "counts", "texts", "runs"])
def test_a_changed_value(tmp_path: Path, name: str) -> None:
    """A plan in which any value has changed, or has another type, is refused by its fingerprint."""
    written(tmp_path)
    path = tmp_path / "plan.json"
    plan = json.loads(path.read_text())
    run = next(iter(plan["runs"]))
    plan[name] = {"counts": {**plan["counts"], "cells": 99}, "runs": plan["runs"] | {run: [1]}}.get(name, 1.5)
    path.write_text(json.dumps(plan))
    with pytest.raises(UsageError, match=r"its plan\.json cannot be used \(it has changed"):
        Work.read(tmp_path)


def test_a_link_in_the_place_of_a_run(tmp_path: Path) -> None:
    """A run's folder that is a link is refused by its name; the folder of all runs may be one, as in experiments."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "sweep").mkdir()
    made = written(tmp_path / "sweep")
    (tmp_path / "sweep" / "runs").symlink_to(tmp_path / "shared")
    work_of(tmp_path / "sweep")
    run = next(iter(made.runs))
    (tmp_path / "shared" / run).symlink_to(tmp_path)
    with pytest.raises(UsageError, match=f"runs/{run} is a link"):
        Work.read(tmp_path / "sweep")


class Hands:
    """Leaves the files of jobs, and remembers which."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __call__(self, plan: Work, job: Job) -> None:
        """Do a job."""
        self.done.append(job.id)
        if not job.deep:
            plan.state(job.node).parent.mkdir(exist_ok=True)
            plan.state(job.node).touch()
        for run in unfinished(plan, job.runs) if job.deep else ():
            finish(plan, run)


def never() -> bool:
    return False


def errors(folder: Path) -> dict[str, str]:
    standings = Queue(folder).look(work_of(folder).jobs)
    return {job: standing.error for job, standing in standings.items() if standing.state == "failed"}


LATER = Config(schedule="wsd")
"""A base that is not at the default of a value which configurations leave out there."""


@pytest.mark.parametrize(
    "sweep",
    [
        grid(momentum=(0.0, 0.9), restart=("never", "2")),
        Sweep("fake", LATER, product(LATER, [Axis("schedule", ("cosine", "wsd"))])),
    ],
)
def test_plan_survives_the_disk(tmp_path: Path, sweep: Sweep) -> None:
    """`read` gives back what `write` wrote; each run's configuration is the base with its values."""
    made = written(tmp_path, sweep)
    again = work_of(tmp_path)
    assert replace(again, forest=made.forest) == made
    assert again.forest.nodes == made.forest.nodes
    configs = {run: with_values(from_tree(Config, again.base), again.runs[run]) for run in again.runs}
    assert configs == dict(plan(sweep).runs)


def test_no_plan(tmp_path: Path) -> None:
    """A folder without a plan holds None; working there is refused with the remedy, and leaves nothing."""
    assert Work.read(tmp_path) is None
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match=r"holds no plan\.json; start the sweep there first"):
            work(folder, Hands(), stopped=never)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(3))
def test_any_order_completes_the_sweep(tmp_path: Path, seed: int) -> None:
    """At first the roots are ready; doing ready jobs in any order, with states lost on the way, ends with all done."""
    generator = random.Random(seed)
    made, hands = written(tmp_path, most=generator.choice([1, 13, 20, 40])), Hands()
    made.state("").parent.mkdir()
    for job in made.jobs.values():
        if job.deep:
            made.state(job.node).touch()  # by a worker that was stopped behind it
    assert made.ready() == [job.id for job in made.jobs.values() if job.after is None]
    while ready := made.ready():
        hands(made, made.jobs[generator.choice(ready)])
        if generator.random() < 0.1:
            generator.choice(list(made.state("").parent.iterdir())).unlink()
    assert unfinished(made) == []


@pytest.mark.parametrize("when", ["while it works", "while it claims"])
def test_stopped_worker_gives_its_job_back(tmp_path: Path, when: str) -> None:
    """A job that was stopped is neither done nor failed, however often: the next worker takes it."""
    made, hands = written(tmp_path), Hands()

    def stop(*_: object) -> None:
        raise Stopped

    for _ in range(4):
        calls = iter((False, False) if when == "while it works" else (False,))
        assert work(tmp_path, stop, stopped=lambda calls=calls: next(calls, True)) == 0
    assert errors(tmp_path) == {}
    assert work(tmp_path, hands, stopped=never) == len(made.jobs)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "MemoryError: the memory is full (no more is known). Give a smaller model, fewer --replicas"),
        (ValueError("too small"), "ValueError: too small"),
    ],
)
def test_a_failed_job_says_what_to_do(tmp_path: Path, error: Exception, words: str) -> None:
    """A job that runs out of memory fails with the remedy that the command line gives; others with their message."""

    def execute(*_: object) -> None:
        raise error

    written(tmp_path)
    assert work(tmp_path, execute, stopped=never) == 0
    reasons = set(errors(tmp_path).values())
    assert len(reasons) == 1
    assert reasons.pop().startswith(words)


def test_busy_run_is_waited_for(tmp_path: Path) -> None:
    """Another process that has a run is no failure: the job is given back and comes again."""
    made, hands, busy = written(tmp_path), Hands(), [5]

    def execute(plan: Work, job: Job) -> None:
        if busy[0]:
            busy[0] -= 1
            raise BusyError("another process is training in this folder")
        hands(plan, job)

    assert work(tmp_path, execute, stopped=never) == len(made.jobs)
    assert (busy, errors(tmp_path)) == ([0], {})


def test_bad_job_does_not_take_others_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that raises, or leaves no result, has failed with its reason; the others are done; a log tells where."""
    made, hands = written(tmp_path, grid(lr=(0.1, 0.2, 0.3, 0.4)), most=1), Hands()
    bad, lazy, *_ = (job.id for job in made.jobs.values() if job.deep)

    def execute(plan: Work, job: Job) -> None:
        if job.id == bad:
            raise ZeroDivisionError("by nought")
        if job.id != lazy:
            hands(plan, job)

    assert work(tmp_path, execute, stopped=never) == len(made.jobs) - 2
    reasons = errors(tmp_path)
    assert reasons[bad] == "ZeroDivisionError: by nought"
    assert f"no valid summary of {made.jobs[lazy].runs[0]}" in reasons[lazy]
    assert len(reasons) == 2
    assert "ZeroDivisionError: by nought" in capsys.readouterr().err
    assert sorted(unfinished(made)) == sorted({*made.jobs[bad].runs, *made.jobs[lazy].runs})


def test_work_by_others_is_seen(tmp_path: Path) -> None:
    """While another worker has the last job a worker stays, and takes it over when the other gives it back."""
    made, hands = written(tmp_path, grid(lr=(0.3,))), Hands()
    looks = iter(range(1000))
    queue = Queue(tmp_path)
    claim = queue.take(queue.look(made.jobs))
    assert claim is not None

    def stopped() -> bool:
        if next(looks) == 5:
            claim.release()
        return False

    assert work(tmp_path, hands, stopped=stopped) == 1
    assert hands.done == list(made.jobs)
    assert next(looks) > 5


def test_a_job_that_another_worker_has_just_done_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker looks again after it has taken a job: between its look and its claim another may have done it."""
    made, hands = written(tmp_path, grid(lr=(0.3,))), Hands()
    take: Callable[..., Any] = Queue.take

    def late(queue: Queue, standings: Any) -> Any:
        for run in unfinished(made):
            finish(made, run)
        return take(queue, standings)

    monkeypatch.setattr(Queue, "take", late)
    assert work(tmp_path, hands, stopped=never) == 0
    assert hands.done == []


def test_plan_that_changes_under_a_worker(tmp_path: Path) -> None:
    """A worker reads the plan again when the sweep has been extended; jobs of the former plan are dropped."""
    small, large = grid(lr=(0.3, 0.5, 0.7)), grid(lr=(0.3, 0.5, 0.7, 0.9))
    old, hands = written(tmp_path, small, most=14), Hands()
    assert len(old.jobs) > 1

    def execute(plan: Work, job: Job) -> None:
        hands(plan, job)
        if len(hands.done) == 1:  # meanwhile the command is repeated with more values
            written(tmp_path, large, most=14)

    work(tmp_path, execute, stopped=never)
    assert unfinished(work_of(tmp_path)) == []
    assert errors(tmp_path) == {}
