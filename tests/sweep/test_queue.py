"""The queue of a sweep: every job is done, by one living worker at a time, whatever is killed when."""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from twophase.base.config import UsageError
from twophase.sweep import queue as queue_module
from twophase.sweep import storage as storage_module
from twophase.sweep.beat import Beat, Watch, hide_password, host
from twophase.sweep.queue import ATTEMPTS, Claim, Counts, Queue, QueueError
from twophase.sweep.storage import JournalLock

JOBS = ["a", "b", "c"]

# Works until nothing is left. A lock on a file of the job's own, which a death frees, tells whether two living workers
# have it at once. `tries` gets a line a try and `done` one a success.
WORKER = r"""
import fcntl, random, sys, time
from pathlib import Path
from twophase.sweep import queue
from twophase.sweep.beat import Beat

folder, storage = Path(sys.argv[1]), sys.argv[2] or None
queue.ATTEMPTS = 1000

def note(name, text):
    with open(folder / name, "a") as file:
        file.write(text + "\n")

with Beat(folder) as beat, queue.Queue.open(folder, storage, "test") as jobs:
    while jobs.counts().left:
        claim = jobs.claim(beat)
        if claim is None:
            time.sleep(0.02)
            continue
        with open(folder / f"busy-{claim.job}", "w") as busy:
            try:
                fcntl.flock(busy, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                note("conflicts", claim.job)
            note("tries", claim.job)
            time.sleep(random.uniform(0.0, 0.2))
            note("done", claim.job)
            fcntl.flock(busy, fcntl.LOCK_UN)
        if not claim.done(1.0):
            note("taken away", claim.job)
"""

# Claims one job and says so; then reports it as done when a line comes, and says what that returned.
HOLDER = r"""
import sys
from pathlib import Path
from twophase.sweep.beat import Beat
from twophase.sweep.queue import Queue

folder = Path(sys.argv[1])
with Beat(folder, beat_seconds=0.05, stale_seconds=0.5) as beat, Queue.open(folder, None, "test") as jobs:
    claim = jobs.claim(beat)
    print(claim.job, flush=True)
    sys.stdin.readline()
    print(claim.held(), claim.done(1.0), flush=True)
"""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Queue]]:
    """Opens the queue of the test's folder, each time as another process would."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Queue.open(tmp_path, None, "test"))


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[], Beat]]:
    """Makes living workers, who end well with the test unless `die` was called."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Beat(tmp_path))


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "_PAUSES", (0.0, 0.0))


def die(beat: Beat) -> None:
    """What a SIGKILL leaves of a worker: its file, without its lock and without fresh times."""
    beat._over.set()
    beat._thread.join()
    assert beat._lock is not None
    os.close(beat._lock)
    beat._lock = None


def taken(queue: Queue, beat: Beat) -> Claim:
    claim = queue.claim(beat)
    assert claim is not None
    return claim


def drain(queue: Queue, beat: Beat) -> list[str]:
    """Do all jobs that wait; their names in the order in which they were handed out."""
    done = []
    while (claim := queue.claim(beat)) is not None:
        assert claim.done()
        done.append(claim.job)
    return done


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_jobs_are_handed_out_in_order_and_once(opened: Any, worker: Any) -> None:
    """One worker gets every job once, in the order of the offer, and then nothing; the counts follow."""
    queue, beat = opened(), worker()
    assert queue.claim(beat) is None
    queue.offer(JOBS)
    assert queue.counts() == Counts(3, 0, 0, 0)
    first = taken(queue, beat)
    assert (first.job, first.held()) == ("a", True)
    assert queue.counts() == Counts(2, 1, 0, 0)
    assert first.done(2.5)
    assert drain(queue, beat) == ["b", "c"]
    assert (queue.counts(), queue.counts().left, queue.errors()) == (Counts(0, 0, 3, 0), 0, {})
    assert queue.study.best_value == 2.5


def test_offers_can_be_repeated_and_extended(opened: Any, worker: Any) -> None:
    """What waits, runs, is complete or has failed is not added again; new jobs come last."""
    queue, beat = opened(), worker()
    queue.offer(["a", "b", "b", "c", "d"])
    taken(queue, beat).done()
    taken(queue, beat).failed("no data")
    running = taken(queue, beat)
    before = queue.counts()
    opened().offer(["d", "c", "b", "a"])
    assert queue.counts() == before == Counts(1, 1, 1, 1)
    opened().offer(["a", "e"])
    running.done()
    assert drain(queue, beat) == ["d", "e"]


@pytest.mark.parametrize("job", ["", "x" * 101, 3])
def test_jobs_are_short_texts(opened: Any, job: Any) -> None:
    """A job that is no short text is refused, and nothing is added."""
    queue = opened()
    with pytest.raises(ValueError, match=r"Queue\.offer: the job .* is not a text of 1 to 100 characters"):
        queue.offer(["a", job])
    assert queue.counts() == Counts(0, 0, 0, 0)


def test_concurrent_offers_are_harmless(tmp_path: Path, worker: Any, opened: Any) -> None:
    """Overlapping offers at the same time add every job once."""
    start = threading.Barrier(4)

    def offer(number: int) -> None:
        with Queue.open(tmp_path, None, "test") as queue:
            start.wait()
            queue.offer(str(job) for job in range(number, number + 20))

    threads = [threading.Thread(target=offer, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened().counts() == Counts(23, 0, 0, 0)
    assert sorted(drain(opened(), worker())) == sorted(str(job) for job in range(23))


def test_long_lists_are_divided(opened: Any, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists stay short enough for every database, and their parts keep the order."""
    monkeypatch.setattr(queue_module, "_LIST_LENGTH", 4)
    queue, jobs = opened(), [str(job) for job in range(11)]
    queue.offer(jobs)
    assert [len(part) for part in queue.study.user_attrs.values()] == [4, 4, 3]
    assert drain(opened(), worker()) == jobs


def test_the_second_of_two_withdraws(opened: Any, worker: Any) -> None:
    """A worker that comes second to a job does not work on it, leaves no trace in the counts, and takes another."""
    one, two, first, second = opened(), opened(), worker(), worker()
    one.offer(["a", "b"])
    create, claims = two._storage.create_new_trial, []

    def overtaken(*args: Any) -> int:
        if not claims:
            claims.append(taken(one, first))
        return create(*args)

    two._storage.create_new_trial = overtaken
    claims.append(taken(two, second))
    assert [claim.job for claim in claims] == ["a", "b"]
    assert two.claim(second) is None
    assert one.counts() == Counts(0, 2, 0, 0)
    assert [claim.done() for claim in claims] == [True, True]
    assert one.errors() == {}


def test_the_second_withdraws_also_when_the_first_has_ended(opened: Any, worker: Any) -> None:
    """A job that was completed, or failed for good, between look and claim is not handed out again."""
    one, two, first, second = opened(), opened(), worker(), worker()
    one.offer(["a", "b"])
    create = two._storage.create_new_trial

    def overtaken(*args: Any) -> int:
        if one.counts().waiting:
            taken(one, first).done()
            taken(one, first).failed("no data")
        return create(*args)

    two._storage.create_new_trial = overtaken
    assert two.claim(second) is None
    assert two.counts() == Counts(0, 0, 1, 1)


def test_failed_jobs_wait_for_a_reset(opened: Any, worker: Any) -> None:
    """A failure is for good, with its reason, until the command is repeated; then the job is tried again."""
    queue, beat = opened(), worker()
    queue.offer(["a", "b"])
    assert taken(queue, beat).failed("no data " * 1000)
    assert drain(queue, beat) == ["b"]
    queue.offer(["a", "b"])
    assert queue.claim(beat) is None
    (reason,) = queue.errors().values()
    assert reason.startswith("no data no data")
    assert len(reason) == 2000
    opened().reset_failures()
    assert (queue.counts(), queue.errors()) == (Counts(1, 0, 1, 0), {})
    assert taken(queue, beat).failed("no data again")
    assert queue.errors() == {"a": "no data again"}
    queue.reset_failures()
    lists = len(queue.study.user_attrs)
    queue.reset_failures()
    assert len(queue.study.user_attrs) == lists
    assert drain(queue, beat) == ["a"]


def test_released_jobs_wait_again(opened: Any, worker: Any) -> None:
    """A job that is given back is handed out again, as often as that happens, and no claim on it counts any more."""
    queue, beat = opened(), worker()
    queue.offer(["a"])
    for _ in range(2 * ATTEMPTS):
        claim = taken(queue, beat)
        assert claim.release()
        assert (claim.held(), claim.done(), claim.failed("x"), claim.release()) == (False, False, False, False)
        assert queue.counts() == Counts(1, 0, 0, 0)
    assert drain(queue, beat) == ["a"]


def test_complete_jobs_can_be_reopened(opened: Any, worker: Any) -> None:
    """When the work of a complete job turns out to be missing, that job alone waits again; a running one stays."""
    queue, beat = opened(), worker()
    queue.offer(JOBS)
    assert drain(queue, beat) == JOBS
    queue.offer(["d"])
    claim = taken(queue, beat)
    queue.reopen(["b", "d", "unknown"])
    queue.reopen([])
    assert queue.counts() == Counts(1, 1, 2, 0)
    assert drain(queue, beat) == ["b"]
    assert claim.done()
    assert queue.counts() == Counts(0, 0, 4, 0)


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_values_that_are_no_numbers_are_the_worst(opened: Any, worker: Any, value: float | None) -> None:
    """A diverged run is complete, and the study's best is another."""
    queue, beat = opened(), worker()
    queue.offer(["a", "b"])
    assert taken(queue, beat).done(value)
    assert taken(queue, beat).done(7.0)
    assert queue.study.best_value == 7.0


def test_a_job_is_tried_three_times(opened: Any, worker: Any) -> None:
    """A job under which worker after worker dies fails for good with the reason; a reset counts anew."""
    queue, alive = opened(), worker()
    queue.offer(["a"])
    for _ in range(2):
        beat = alive
        for _ in range(ATTEMPTS):
            assert queue.counts().left == 1
            beat = worker()
            assert taken(opened(), beat).job == "a"
            die(beat)
        assert queue.claim(alive) is None
        assert queue.counts() == Counts(0, 0, 0, 1)
        assert queue.errors() == {"a": f"worker {beat.name} was killed (attempt 3 of 3)"}
        queue.reset_failures()
    assert drain(queue, alive) == ["a"]


def test_deaths_before_a_reset_do_not_count(opened: Any, worker: Any) -> None:
    """A job that was tried twice before the command was repeated may be tried three times more."""
    queue, alive = opened(), worker()
    queue.offer(["a"])
    for attempt in range(5):
        beat = worker()
        taken(opened(), beat)
        die(beat)
        queue.recover(alive)
        if attempt == 1:
            queue.reset_failures()
        assert queue.counts().failed == (attempt == 4)


def test_living_workers_keep_their_jobs(opened: Any, worker: Any) -> None:
    """However often others ask, and look for the dead, a job stays with its living worker."""
    one, two, first, second = opened(), opened(), worker(), worker()
    one.offer(["a"])
    claim = taken(one, first)
    for _ in range(20):
        assert two.claim(second) is None
    assert claim.held()
    assert claim.done()


@pytest.mark.usefixtures("no_pauses")
def test_a_claim_that_was_lost_in_an_error_is_given_back(opened: Any, worker: Any) -> None:
    """When the storage fails while a job is claimed or reported, its own worker hands the job out again."""
    queue, beat = opened(), worker()
    queue.offer(["a"])
    write, storage = queue._storage.set_trial_state_values, queue._storage
    claim = taken(queue, beat)

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    storage.set_trial_state_values = broken
    with pytest.raises(QueueError, match="disk full"):
        claim.done()
    storage.set_trial_state_values = write
    assert queue.counts() == Counts(0, 1, 0, 0)
    claim = taken(queue, beat)
    assert claim.release()
    look, queue._look = queue._look, broken
    with pytest.raises(OSError, match="disk full"):
        queue._take("a", beat)
    queue._look = look
    assert queue.counts() == Counts(0, 1, 0, 0)
    assert drain(queue, beat) == ["a"]
    assert queue.counts() == Counts(0, 0, 1, 0)


class Crash(BaseException):
    """A SIGKILL, as far as the queue can tell."""


def crash_at(storage: Any, number: int, after: bool) -> list[int]:
    """Let the process die before or after the given write to the storage; returns the running count of writes."""
    count = [0]

    def limited(operation: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any) -> Any:
            mine = count[0] == number
            count[0] += 1
            if mine and not after:
                raise Crash
            result = operation(*args)
            if mine:
                raise Crash
            return result

        return write

    for name in ("create_new_trial", "set_trial_user_attr", "set_trial_state_values", "set_study_user_attr"):
        setattr(storage, name, limited(getattr(storage, name)))
    return count


def test_a_crash_between_any_two_writes_loses_nothing(tmp_path: Path) -> None:
    """Kill a worker before and after every single write that it makes: the next one finds every job and ends all."""
    points, count = 0, [0]
    for number in range(100):
        for after in (False, True):
            folder = tmp_path / f"{number}-{after}"
            with Beat(folder) as dead, Queue.open(folder, None, "test") as queue:
                queue.offer(JOBS[:2])
                taken(queue, dead)
                die(dead)
            with Beat(folder) as beat, Queue.open(folder, None, "test") as queue:
                count = crash_at(queue._storage, number, after)
                crashed = False
                try:
                    queue.offer(JOBS)  # one more than there were
                    taken(queue, beat).done()  # the dead worker's job is put back first
                    taken(queue, beat).failed("no data")
                    taken(queue, beat).release()
                    queue.reset_failures()
                    queue.reopen(["a"])
                except Crash:
                    crashed = True
                    die(beat)
            with Beat(folder) as beat, Queue.open(folder, None, "test") as queue:
                queue.offer(JOBS)
                queue.reset_failures()
                left = drain(queue, beat)
                assert queue.counts() == Counts(0, 0, 3, 0)
                assert set(left) >= {"b", "c"}
                assert len(left) == len(set(left))
        points += crashed
        if not crashed:
            break
    assert points == count[0] >= 10


class QueueMachine(RuleBasedStateMachine):
    """Three workers, any of which may die at any time, against a model in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.states: dict[str, str] = {}
        self.deaths: dict[str, int] = {}
        self.owners: dict[str, Beat] = {}
        self.claims: list[list[Claim]] = [[], [], []]
        self.beats = [Beat(self.folder).__enter__() for _ in range(3)]
        self.queues = [Queue.open(self.folder, None, "test") for _ in range(3)]

    def teardown(self) -> None:
        """Let the workers end."""
        for beat in self.beats:
            beat.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    def recover(self) -> None:
        """What the queue is to do at a claim about jobs whose workers are dead."""
        for job, owner in list(self.owners.items()):
            if owner not in self.beats:
                self.end(job, "waiting")
                self.deaths[job] += 1
                if self.deaths[job] >= ATTEMPTS:
                    self.states[job] = "failed"

    def end(self, job: str, state: str) -> None:
        """A job is nobody's any more."""
        self.states[job] = state
        del self.owners[job]

    @rule(who=st.integers(0, 2), jobs=st.lists(st.sampled_from("abcd"), max_size=4))
    def offer(self, who: int, jobs: list[str]) -> None:
        """Offer any jobs."""
        self.queues[who].offer(jobs)
        for job in jobs:
            self.states.setdefault(job, "waiting")
            self.deaths.setdefault(job, 0)

    @rule(who=st.integers(0, 2))
    def claim(self, who: int) -> None:
        """Take a job: None only when none waits."""
        claim = self.queues[who].claim(self.beats[who])
        self.recover()
        waiting = [job for job, state in self.states.items() if state == "waiting"]
        if claim is None:
            assert not waiting
            return
        assert claim.job in waiting[: 1 + len(self.owners)]
        self.states[claim.job], self.owners[claim.job] = "running", self.beats[who]
        self.claims[who].append(claim)

    @rule(who=st.integers(0, 2), how=st.sampled_from(["done", "failed", "release"]), value=st.floats())
    def end_claim(self, who: int, how: str, value: float) -> None:
        """End the last claim in any way."""
        if self.claims[who]:
            claim = self.claims[who].pop()
            assert {"done": lambda: claim.done(value), "failed": lambda: claim.failed("x"), "release": claim.release}[
                how
            ]()
            self.end(claim.job, {"done": "complete", "failed": "failed", "release": "waiting"}[how])

    @rule(who=st.integers(0, 2))
    def die(self, who: int) -> None:
        """A worker is killed; another takes its place."""
        die(self.beats[who])
        self.beats[who] = Beat(self.folder).__enter__()
        self.queues[who] = Queue.open(self.folder, None, "test")
        self.claims[who] = []

    @rule(who=st.integers(0, 2))
    def reset_failures(self, who: int) -> None:
        """Repeat the command."""
        self.queues[who].reset_failures()
        self.deaths = dict.fromkeys(self.deaths, 0)
        self.states = {job: "waiting" if state == "failed" else state for job, state in self.states.items()}

    @rule(who=st.integers(0, 2), jobs=st.lists(st.sampled_from("abcd"), max_size=2))
    def reopen(self, who: int, jobs: list[str]) -> None:
        """Find the work of any jobs missing."""
        self.queues[who].reopen(jobs)
        for job in set(jobs) & set(self.states):
            self.deaths[job] = 0
            if self.states[job] != "running":
                self.states[job] = "waiting"

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Counts and errors agree in every process's eyes."""
        states = list(self.states.values())
        for queue in self.queues:
            counts = queue.counts()
            for state in ("waiting", "running", "complete", "failed"):
                assert getattr(counts, state) == states.count(state)
            assert set(queue.errors()) == {job for job, state in self.states.items() if state == "failed"}


TestModel = QueueMachine.TestCase
TestModel.__doc__ = """Whatever workers do and whenever they die, every queue agrees with a simple model in memory."""
TestModel.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def start(script: str, *words: object, **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen([sys.executable, "-c", script, *map(str, words)], **options)


def keep_working(folder: Path, storage: str, jobs: int, kills: int, seed: int) -> None:
    """Four workers at a time; now and then one is killed and replaced, until everything is done."""
    generator, deadline = random.Random(seed), time.monotonic() + 120
    with Queue.open(folder, storage or None, "test") as queue:
        queue.offer(f"job-{number}" for number in range(jobs))
        crew = [start(WORKER, folder, storage) for _ in range(4)]
        try:
            while kills and queue.counts().left:
                assert time.monotonic() < deadline
                time.sleep(generator.uniform(0.0, 0.5))
                begun = [process for process in crew if list(folder.glob(f"workers/*-{process.pid}-*"))]
                if begun:
                    victim = generator.choice(begun)
                    victim.kill()
                    victim.wait()
                    kills -= 1
                    crew[crew.index(victim)] = start(WORKER, folder, storage)
            for process in crew:
                assert process.wait(120) == 0
        finally:
            for process in crew:
                process.kill()
                process.wait()
        assert queue.counts() == Counts(0, 0, jobs, 0)
    tries, done = lines(folder / "tries"), lines(folder / "done")
    assert set(done) == {f"job-{number}" for number in range(jobs)}
    assert lines(folder / "conflicts") == []
    assert lines(folder / "taken away") == []
    assert len(tries) >= len(done) >= jobs


@pytest.mark.slow
@pytest.mark.dist
def test_killed_workers_lose_no_job_and_share_none(tmp_path: Path) -> None:
    """With workers killed at random times, every job is done, and none by two living workers at once."""
    keep_working(tmp_path, "", jobs=60, kills=12, seed=2)


@pytest.mark.slow
@pytest.mark.dist
def test_a_database_serves_as_well(tmp_path: Path) -> None:
    """The same with a queue in a database, on which all workers start while it is still empty."""
    keep_working(tmp_path, f"sqlite:///{tmp_path / 'queue.db'}", jobs=12, kills=1, seed=0)


@pytest.mark.dist
def test_a_killed_worker_is_replaced_at_once(tmp_path: Path, opened: Any, worker: Any) -> None:
    """On the same host, the job of a worker that was killed is handed out at the very next claim, and not before."""
    queue, beat = opened(), worker()
    queue.offer(["a"])
    with start(HOLDER, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"a\n"
        assert queue.claim(beat) is None
        process.kill()
        process.wait()
        assert drain(queue, beat) == ["a"]


@pytest.mark.dist
def test_a_suspended_worker_notices(tmp_path: Path, opened: Any, worker: Any) -> None:
    """A worker that sleeps too long loses its job; when it wakes up, its report does not count and does no harm."""
    queue, beat = opened(), worker()
    queue.offer(["a"])
    with start(HOLDER, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"a\n"
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while (claim := queue.claim(beat)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate(b"\n", timeout=60)
        assert said == b"False False\n"
    assert process.returncode == 0
    assert claim.held()
    assert claim.done(3.0)
    assert queue.study.best_value == 3.0


def foreign(beat: Beat, **changes: object) -> None:
    """Make a worker's file look like that of a worker on another host, without the thread that refreshes it."""
    beat._over.set()
    beat._thread.join()
    record = json.loads(beat.path.read_text()) | {"host": "elsewhere", "beat_seconds": 0.01} | changes
    beat.path.write_text(json.dumps(record))


def age(beat: Beat, seconds: float) -> None:
    now = beat.path.stat().st_mtime
    os.utime(beat.path, (now - seconds, now - seconds))


def test_silence_from_another_host_is_death(opened: Any, worker: Any) -> None:
    """A worker elsewhere is believed dead when its file is old, and still as it was two beats later."""
    one, two, first, second = opened(), opened(), worker(), worker()
    one.offer(["a"])
    claim = taken(one, first)
    foreign(first)
    age(first, 100.0)
    assert [two.claim(second) for _ in range(3) if time.sleep(0.03) is None] == [None] * 3
    age(first, 100.0)
    assert two.claim(second) is None  # old enough, but this may be a file server that was away for a while
    os.utime(first.path)
    time.sleep(0.03)
    assert two.claim(second) is None  # so it was
    age(first, 200.0)
    assert two.claim(second) is None
    time.sleep(0.03)
    assert taken(two, second).job == "a"
    assert not claim.done()
    assert two.counts() == Counts(0, 1, 0, 0)


def test_silence_must_last(opened: Any, worker: Any) -> None:
    """An old file is no death before two beats of the observer's own time, and a free lock elsewhere is none at all."""
    one, two, first, second = opened(), opened(), worker(), worker()
    one.offer(["a"])
    claim = taken(one, first)
    foreign(first, beat_seconds=1000.0)
    die(first)
    assert two.claim(second) is None
    age(first, 1000.0)
    assert [two.claim(second) for _ in range(5)] == [None] * 5
    assert claim.held()


def test_observers_do_not_take_each_other_for_the_worker(opened: Any, worker: Any) -> None:
    """A dead worker is seen as dead also while another observer is looking."""
    queue, dead, beat = opened(), worker(), worker()
    queue.offer(["a"])
    taken(opened(), dead)
    die(dead)
    with dead.path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert drain(queue, beat) == ["a"]


def test_only_the_file_servers_clock_counts(opened: Any, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is an hour old by the local clock is fresh where the file server's clock is an hour behind."""
    one, two, first, second = opened(), opened(), worker(), worker()
    one.offer(["a"])
    taken(one, first)
    foreign(first)
    age(first, 3600.0)
    server = first.path.stat().st_mtime
    monkeypatch.setattr(Beat, "touch", lambda _: server + 50.0)
    for _ in range(3):
        assert two.claim(second) is None
        time.sleep(0.03)


def test_a_worker_without_a_file_is_dead(opened: Any, worker: Any) -> None:
    """A worker that ended without a word about its job, or whose file is gone, has lost it."""
    one, two, first, second = opened(), opened(), worker(), worker()
    one.offer(["a"])
    claim = taken(one, first)
    first.path.unlink()
    assert taken(two, second).job == "a"
    assert not claim.held()
    first.touch()
    assert first.path.exists()
    with first.path.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_beats_refresh_and_clean_up(tmp_path: Path) -> None:
    """The file says who the worker is, is refreshed while it lives, and is gone after a good end."""
    with Beat(tmp_path, beat_seconds=0.01, stale_seconds=1.0) as beat:
        record = json.loads(beat.path.read_text())
        assert (record["pid"], record["locked"], beat.path.name) == (os.getpid(), True, f"{beat.name}.json")
        assert str(os.getpid()) in beat.name
        age(beat, 1000.0)
        old = beat.path.stat().st_mtime
        deadline = time.monotonic() + 30
        while beat.path.stat().st_mtime < old + 900.0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert list((tmp_path / "workers").iterdir()) == []


def test_beats_need_a_folder_and_sensible_times(tmp_path: Path) -> None:
    """Times that would make living workers look dead, and folders that cannot be written, are refused."""
    for beat_seconds, stale_seconds in [(0.0, 1.0), (1.0, 2.9)]:
        with pytest.raises(ValueError, match="at least three times as long"):
            Beat(tmp_path, beat_seconds=beat_seconds, stale_seconds=stale_seconds)
    (tmp_path / "workers").touch()
    with pytest.raises(UsageError, match=r"--out .*cannot be written"), Beat(tmp_path):
        pass


def test_evidence_that_cannot_be_read_convicts_nobody(tmp_path: Path, worker: Any) -> None:
    """A damaged file of a worker is judged by its age alone; the observer itself is never judged."""
    one, other = worker(), worker()
    other.path.write_text("{")
    watch = Watch(tmp_path)
    assert watch.deaths([other.name, one.name], one) == {}
    assert watch.deaths([], one) == {}
    assert set(watch.deaths(["nobody", other.name], one)) == {"nobody"}


def test_a_killed_process_does_not_keep_the_journal_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a holder that was killed leaves is removed at once by the next one on the same host."""
    monkeypatch.setattr(storage_module.time, "sleep", lambda _: pytest.fail("nobody needs to wait"))
    journal = tmp_path / "journal"
    journal.touch()
    dead, next_one = JournalLock(journal), JournalLock(journal)
    assert dead.acquire()
    assert dead._local is not None
    os.close(dead._local)  # the system does this at a death
    dead._local = None
    assert next_one.acquire()
    dead.release()
    assert (tmp_path / "journal.lock").is_symlink()  # not the dead one's any more
    next_one.release()
    next_one.release()
    assert not (tmp_path / "journal.lock").is_symlink()


def test_the_journals_lock_excludes(tmp_path: Path) -> None:
    """While one has the lock, nobody else gets it."""
    journal = tmp_path / "journal"
    journal.touch()
    inside, most = [0], [0]

    def work() -> None:
        lock = JournalLock(journal)
        for _ in range(20):
            lock.acquire()
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.0005)
            inside[0] -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_the_journals_lock_is_taken_from_a_silent_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock made on another host is respected for a while and then removed; a suspended local holder as well."""
    monkeypatch.setattr(storage_module, "_PATIENCE_SECONDS", 0.2)
    journal = tmp_path / "journal"
    journal.touch()
    (tmp_path / "journal.lock").symlink_to("elsewhere 12 0000")
    lock, other = JournalLock(journal), JournalLock(journal)
    assert lock.acquire()
    assert other.acquire()  # `lock` seems suspended
    assert not str((tmp_path / "journal.lock").readlink()).startswith(host())  # or the next would think `other` dead
    lock.release()
    assert (tmp_path / "journal.lock").is_symlink()
    other.release()
    assert not (tmp_path / "journal.lock").is_symlink()


def test_a_torn_line_in_the_journal_is_mended(tmp_path: Path, opened: Any, worker: Any) -> None:
    """A process that is killed while it writes leaves half a line, which harms neither readers nor writers."""
    one, two, beat = opened(), opened(), worker()
    one.offer(["a", "b"])
    with (tmp_path / "queue.journal").open("a") as file:
        file.write('{"op_code":4,"worker_')
    assert one.counts() == Counts(2, 0, 0, 0)
    assert drain(two, beat) == ["a", "b"]
    assert one.counts() == opened().counts() == Counts(0, 0, 2, 0)


def test_a_damaged_journal_is_refused(tmp_path: Path, opened: Any) -> None:
    """A journal that is not one is refused with the remedy."""
    (tmp_path / "queue.journal").write_text("hello\n\nworld\n")
    with pytest.raises(UsageError, match=r"queue\.journal is damaged .*remove the file and repeat the command"):
        opened()


@pytest.mark.usefixtures("no_pauses")
def test_storage_that_fails_for_a_moment_is_asked_again(opened: Any, worker: Any) -> None:
    """A storage that fails and comes back is not noticed; one that stays away ends in one clear error."""
    queue, beat = opened(), worker()
    storage = queue._storage
    failures = [2]

    def flaky(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if failures[0]:
                failures[0] -= 1
                raise OSError("connection lost\nmore of it")
            return operation(*args, **options)

        return call

    for name in ("create_new_trial", "set_trial_state_values", "set_study_user_attr", "get_study_user_attrs"):
        setattr(storage, name, flaky(getattr(storage, name)))
    queue.offer(["a"])
    failures[0] = 2
    claim = taken(queue, beat)
    failures[0] = 2
    assert claim.done()
    failures[0] = 100
    with pytest.raises(QueueError, match=r"--out .*queue\.journal: cannot be read .*\(connection lost\); when it can"):
        queue.counts()


@pytest.mark.usefixtures("no_pauses")
def test_reports_that_reached_the_storage_count(opened: Any, worker: Any) -> None:
    """A report that was stored, though the connection broke before the answer, is not taken for a lost job."""
    queue, beat = opened(), worker()
    queue.offer(["a"])
    claim = taken(queue, beat)
    write, broken = queue._storage.set_trial_state_values, [True]

    def stored_but_unanswered(*args: Any) -> bool:
        answer = write(*args)
        if broken.pop() if broken else False:
            raise OSError("connection lost")
        return answer

    queue._storage.set_trial_state_values = stored_but_unanswered
    assert claim.done(4.0)
    assert queue.counts() == Counts(0, 0, 1, 0)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nonsense", "not the URL of a database"),
        ("redis://user:hunter2@host/0", "not the URL of a database"),
        ("postgresql+psycopg2://user:{hunter2}@127.0.0.1:1/x", "not the URL of a database"),
        ("sqlite://", "a database in memory"),
        ("sqlite:///:memory:", "a database in memory"),
        ("sqlite:////nonexistent/folder/queue.db", "unable to open database file"),
        ("postgresql+psycopg2://user:hunter2@127.0.0.1:1/x", "pip install psycopg2-binary"),
        ("mysql+pymysql://user:hunter2@127.0.0.1:1/x", "pip install pymysql"),
    ],
)
def test_unusable_storage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, reason: str) -> None:
    """One line names the option, the URL without its password, the reason and the remedy."""
    for driver in ("psycopg2", "pymysql"):
        monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(UsageError, match=rf"^--storage .*{reason}") as error:
        Queue.open(tmp_path, url, "test")
    message = str(error.value)
    assert "hunter2" not in message
    assert "\n" not in message
    assert url.replace("{hunter2}", "***").replace("hunter2", "***") in message
    assert list(tmp_path.iterdir()) == []


def test_unusable_folder_is_refused(tmp_path: Path) -> None:
    """A folder that cannot be made names --out."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--out .*file/sweep: cannot be used .*choose another --out"):
        Queue.open(tmp_path / "file" / "sweep", None, "test")


def test_optuna_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Optuna the error says what to install."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install 'twophase\[sweep\]'"):
        Queue.open(tmp_path, None, "test")


def test_queues_of_one_database_are_told_apart_by_name(tmp_path: Path, worker: Any) -> None:
    """Two sweeps in one database do not see each other's jobs; values and lists come back as they were."""
    url, beat = f"sqlite:///{tmp_path / 'queue.db'}", worker()
    with Queue.open(tmp_path, url, "one") as one, Queue.open(tmp_path, url, "two") as two:
        one.offer(["a", "b"])
        two.offer(["b"])
        assert taken(one, beat).failed("no data")
        assert taken(one, beat).done(math.inf)
        assert drain(two, beat) == ["b"]
        one.reset_failures()
        one.reopen(["b"])
        assert (one.counts(), two.counts()) == (Counts(2, 0, 0, 0), Counts(0, 0, 1, 0))
        claim = taken(one, beat)
        assert claim.release()
        assert not claim.done()


def test_passwords_are_hidden() -> None:
    """The password of a URL is hidden wherever it stands, and nothing else is changed."""
    assert hide_password("x mysql://me:a:b@host/x y") == "x mysql://me:***@host/x y"
    assert hide_password("mysql://me:a/@b@host/x") == "mysql://me:***@host/x"
    assert hide_password("mysql://me@host/x?password=a&b=1") == "mysql://me@host/x?password=***&b=1"
    assert (
        hide_password("sqlite:////tmp/a:b.db postgresql://me@host/x") == "sqlite:////tmp/a:b.db postgresql://me@host/x"
    )


def test_importing_the_queue_imports_neither_optuna_nor_torch() -> None:
    """The command line must not wait for either."""
    script = (
        "import sys, twophase.sweep.queue, twophase.sweep.slurm\n"
        "sys.exit(bool({'optuna', 'sqlalchemy', 'submitit', 'torch'} & set(sys.modules)))"
    )
    assert start(script).wait(60) == 0
