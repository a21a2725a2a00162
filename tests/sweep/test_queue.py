"""The queue of a sweep: a job has one living worker at a time, and none is lost, whatever is killed when."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from twophase.sweep import queue as queue_module
from twophase.sweep.queue import ATTEMPTS, Claim, Queue

JOBS = ["a", "b", "c"]

# Works until all jobs have their file `done-JOB`. A lock on a file of the job's own, which a death frees, tells whether
# two living workers have it at once.
WORKER = r"""
import fcntl, random, sys, time
from pathlib import Path
from twophase.sweep import queue

folder, jobs = Path(sys.argv[1]), [f"job-{number}" for number in range(int(sys.argv[2]))]
queue.ATTEMPTS, queue.STALE_SECONDS, queue.BEAT_SECONDS = 1000, 3.0, 0.5  # of a claim killed before its record
claims = queue.Queue(folder)
while left := [job for job in jobs if not (folder / f"done-{job}").exists()]:
    claim = claims.take(claims.look(left))
    if claim is None:
        time.sleep(0.02)
        continue
    with claim, (folder / f"busy-{claim.job}").open("w") as busy:
        if (folder / f"done-{claim.job}").exists():
            continue
        try:
            fcntl.flock(busy, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (folder / "conflict").touch()
        with (folder / f"tries-{claim.job}").open("a") as tries:
            tries.write("x")
        time.sleep(random.uniform(0.0, 0.2))
        (folder / f"done-{claim.job}").touch()
        fcntl.flock(busy, fcntl.LOCK_UN)
"""

# Takes job `a` and says so; ends its claim when a line comes.
HOLDER = r"""
import sys
from pathlib import Path
from twophase.sweep.queue import Queue

queue = Queue(Path(sys.argv[1]), beat_seconds=0.05, stale_seconds=0.5)
with queue.take(queue.look(["a"])) as claim:
    print(claim.path.name, flush=True)
    sys.stdin.readline()
"""


def take(queue: Queue, jobs: list[str] | None = None) -> Claim:
    claim = queue.take(queue.look(jobs or JOBS))
    assert claim is not None
    return claim


def states(queue: Queue, jobs: list[str] | None = None) -> str:
    """The first letters of the jobs' states."""
    return "".join(standing.state[0] for standing in queue.look(jobs or JOBS).values())


def die(claim: Claim) -> None:
    """What a SIGKILL leaves of a claim: its file, without its lock and without fresh times."""
    claim._over.set()
    claim._thread.join()
    assert claim._file is not None
    os.close(claim._file)
    claim._file = None


def alter(claim: Claim, **changes: object) -> None:
    """Make a claim look like that of a worker on another host, without the thread that refreshes it."""
    claim._over.set()
    claim._thread.join()
    claim._record |= {"host": "elsewhere 1", "beat_seconds": 0.01} | changes
    claim._write()


def age(path: Path, seconds: float) -> None:
    touched = path.stat().st_mtime - seconds
    os.utime(path, (touched, touched))


def names(queue: Queue) -> list[str]:
    return sorted(path.name for path in queue.folder.iterdir())


def test_jobs_are_taken_in_order_and_come_back(tmp_path: Path) -> None:
    """A queue hands out each job once, in order; a claim that ends leaves no file, and its job waits again."""
    one, two = Queue(tmp_path), Queue(tmp_path)
    assert states(one) == "www"
    claims = [take(one), take(two), take(one)]
    assert [claim.job for claim in claims] == JOBS
    assert states(two) == "rrr"
    assert two.take(two.look(JOBS)) is None
    assert names(one) == ["a.1", "b.1", "c.1"]
    for claim in claims[:2]:
        claim.release()
        claim.release()
    assert (states(one), states(two)) == ("wwr", "wwr")
    assert names(one) == ["c.1"]
    assert take(two).path.name == "a.1"


def test_the_faster_of_two_workers_has_the_job(tmp_path: Path) -> None:
    """A worker whose look is out of date cannot take a job that another has, and takes the next."""
    one, two = Queue(tmp_path), Queue(tmp_path)
    stale = two.look(JOBS)
    first = take(one)
    second = two.take(stale)
    assert second is not None
    assert (first.job, second.job) == ("a", "b")


def test_threads_never_share_a_job(tmp_path: Path) -> None:
    """Of many that ask at the same time each gets another job, and there is none for those that are too many."""
    start, jobs = threading.Barrier(6), [str(number) for number in range(4)]
    taken: list[Claim | None] = []

    def race() -> None:
        queue = Queue(tmp_path)
        standings = queue.look(jobs)
        start.wait()
        taken.append(queue.take(standings))

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claim.job if claim else "" for claim in taken) == ["", "", *jobs]


def test_failures_last_until_the_command_is_repeated(tmp_path: Path) -> None:
    """A failed job has its reason and is not taken again, before the next call; then it waits."""
    queue = Queue(tmp_path)
    take(queue).fail("no data " * 1000)
    standing = Queue(tmp_path).look(["a"])["a"]
    assert (standing.state, len(standing.error)) == ("failed", 2000)
    assert standing.error.startswith("no data no data")
    assert take(queue).job == "b"
    queue.begin_call()
    again = take(queue)
    assert again.path.name == "a.2"
    again.fail("no data again")
    assert queue.look(["a"])["a"].error == "no data again"


def test_a_job_fails_at_the_third_death(tmp_path: Path) -> None:
    """A job under which worker after worker dies fails with the reason; releases do not count, a call resets."""
    queue = Queue(tmp_path)
    for _ in range(2):
        for _ in range(ATTEMPTS):
            take(queue, ["a"]).release()
            die(take(queue, ["a"]))
        standing = queue.look(["a"])["a"]
        assert standing.state == "failed"
        assert standing.error.endswith("was killed (attempt 3 of 3)")
        queue.begin_call()
    assert states(queue) == "www"


def test_deaths_before_a_call_do_not_count(tmp_path: Path) -> None:
    """A job that was tried twice before the command was repeated may be tried three times more."""
    queue = Queue(tmp_path)
    for attempt in range(5):
        die(take(queue, ["a"]))
        if attempt == 1:
            queue.begin_call()
        assert states(queue, ["a"]) == ("f" if attempt == 4 else "w")


def test_a_claim_survives_a_new_call(tmp_path: Path) -> None:
    """Repeating the command takes no job from a worker that lives elsewhere."""
    queue = Queue(tmp_path)
    claim = take(queue)
    queue.begin_call()
    assert states(queue) == "rww"
    claim.release()
    assert states(queue) == "www"


def test_silence_from_another_host_is_death(tmp_path: Path) -> None:
    """A worker elsewhere counts as dead when its claim is old, and still as it was two beats later."""
    queue = Queue(tmp_path)
    claim = take(queue)
    alter(claim)
    age(claim.path, 100.0)
    assert [states(queue, ["a"]) for _ in range(3) if time.sleep(0.03) is None] == ["r"] * 3
    age(claim.path, 100.0)
    assert states(queue, ["a"]) == "r"  # old enough, but this may be a file server that was away for a while
    os.utime(claim.path)
    time.sleep(0.03)
    assert states(queue, ["a"]) == "r"  # so it was
    age(claim.path, 200.0)
    assert states(queue, ["a"]) == "r"
    time.sleep(0.03)
    later = take(queue, ["a"])
    assert later.path.name == "a.2"
    claim.release()  # wakes up after all: the other claim stays
    assert states(queue, ["a"]) == "r"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"host": 3}'])
def test_records_that_cannot_be_read_are_judged_by_age(tmp_path: Path, damage: str) -> None:
    """A claim whose worker was killed between two writes holds its job until it is old, and no longer."""
    queue = Queue(tmp_path)
    claim = take(queue)
    die(claim)
    claim.path.write_text(damage)
    assert states(queue, ["a"]) == "r"
    age(claim.path, 200.0)
    assert states(queue, ["a"]) == "r"
    ((path, (touched, _)),) = queue._silences.items()
    queue._silences[path] = (touched, time.monotonic() - 100.0)
    assert states(queue, ["a"]) == "w"


def test_silence_must_last(tmp_path: Path) -> None:
    """An old claim is no death before two beats of the observer's time, and a free lock elsewhere is none at all."""
    queue = Queue(tmp_path)
    claim = take(queue)
    alter(claim, beat_seconds=1000.0)
    die(claim)
    assert states(queue, ["a"]) == "r"
    age(claim.path, 1000.0)
    assert [states(queue, ["a"]) for _ in range(5)] == ["r"] * 5


def test_observers_do_not_take_each_other_for_the_worker(tmp_path: Path) -> None:
    """A dead worker is seen as dead also while another observer is looking."""
    queue = Queue(tmp_path)
    claim = take(queue)
    die(claim)
    with claim.path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert states(queue) == "www"


def test_a_claim_that_ends_under_an_observer_is_no_death(tmp_path: Path) -> None:
    """An observer that opened a claim before its good end does not take the free lock for a death."""
    queue = Queue(tmp_path)
    claim = take(queue)
    with claim.path.open() as file:
        claim.release()
        clock = queue_module._ServerClock(queue.folder)
        assert queue._death(claim.path, file.fileno(), claim._record, clock) is None


@pytest.mark.parametrize("fault", ["the clock is an hour behind", "the folder cannot be written"])
def test_only_the_file_servers_clock_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A claim that is an hour old by the local clock is fresh where the server's is behind; no clock, no verdict."""
    queue = Queue(tmp_path)
    claim = take(queue)
    alter(claim)
    age(claim.path, 3600.0)
    now = claim.path.stat().st_mtime + 50.0 if "behind" in fault else None
    monkeypatch.setattr(queue_module._ServerClock, "now", lambda _: now)
    assert [states(queue, ["a"]) for _ in range(3) if time.sleep(0.03) is None] == ["r"] * 3


def test_claims_are_refreshed(tmp_path: Path) -> None:
    """A claim names its worker and is refreshed while that lives; times that would make it look dead are refused."""
    queue = Queue(tmp_path, beat_seconds=0.01, stale_seconds=1.0)
    with take(queue) as claim:
        record = json.loads(claim.path.read_text())
        assert (record["pid"], record["locked"], record["host"]) == (os.getpid(), True, queue_module.host())
        age(claim.path, 1000.0)
        old, deadline = claim.path.stat().st_mtime, time.monotonic() + 30
        while claim.path.stat().st_mtime < old + 900.0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert names(queue) == []
    for beat_seconds, stale_seconds in [(0.0, 1.0), (1.0, 2.9)]:
        with pytest.raises(ValueError, match="at least three times as long"):
            Queue(tmp_path, beat_seconds=beat_seconds, stale_seconds=stale_seconds)


def test_a_lost_folder_of_claims_costs_nothing(tmp_path: Path) -> None:
    """When `claims/` is removed every job waits again, and a claim from before removes no other's file."""
    queue = Queue(tmp_path)
    old = take(queue)
    shutil.rmtree(queue.folder)
    assert states(queue) == "www"
    take(queue)
    old.release()
    assert states(queue) == "rww"


def test_a_full_disk_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that cannot be written is an error and leaves nothing; a failure that cannot be written is a death."""
    queue = Queue(tmp_path)
    held = take(queue)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            take(queue)
        assert names(queue) == ["a.1"]
        held.fail("the disk is full")
    assert queue.take(queue.look(["b"])) is not None


class QueueMachine(RuleBasedStateMachine):
    """Three workers of one queue against a model in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.queues = [Queue(self.folder) for _ in range(3)]
        self.claims: list[list[Claim]] = [[], [], []]
        self.states = dict.fromkeys("abcd", "waiting")
        self.deaths = dict.fromkeys("abcd", 0)
        self.calls = dict.fromkeys("abcd", 0)
        self.call = 0

    def teardown(self) -> None:
        """Leave nothing behind."""
        for claims in self.claims:
            for claim in claims:
                claim.release()
        shutil.rmtree(self.folder)

    @rule(who=st.integers(0, 2))
    def take(self, who: int) -> None:
        """Take the first job that waits."""
        queue = self.queues[who]
        claim = queue.take(queue.look("abcd"))
        waiting = [job for job, state in self.states.items() if state == "waiting"]
        assert (claim.job if claim else None) == next(iter(waiting), None)
        if claim is not None:
            self.states[claim.job], self.calls[claim.job] = "running", self.call
            self.claims[who].append(claim)

    @rule(who=st.integers(0, 2), failed=st.booleans())
    def end(self, who: int, failed: bool) -> None:
        """End the last claim well or with a failure, which counts in the call of the claim."""
        if self.claims[who]:
            claim = self.claims[who].pop()
            claim.fail("x") if failed else claim.release()
            failed = failed and self.calls[claim.job] == self.call
            self.states[claim.job] = "failed" if failed else "waiting"

    @rule(who=st.integers(0, 2))
    def die(self, who: int) -> None:
        """A worker is killed; another takes its place."""
        for claim in self.claims[who]:
            die(claim)
            self.deaths[claim.job] += self.calls[claim.job] == self.call
            self.states[claim.job] = "failed" if self.deaths[claim.job] >= ATTEMPTS else "waiting"
        self.claims[who], self.queues[who] = [], Queue(self.folder)

    @rule(who=st.integers(0, 2))
    def begin_call(self, who: int) -> None:
        """Repeat the command."""
        self.queues[who].begin_call()
        self.call += 1
        self.deaths = dict.fromkeys(self.deaths, 0)
        self.states = {job: "waiting" if state == "failed" else state for job, state in self.states.items()}

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Every process sees the same."""
        for queue in self.queues:
            assert {job: standing.state for job, standing in queue.look("abcd").items()} == self.states


TestModel = QueueMachine.TestCase
TestModel.__doc__ = """Whatever workers do and whenever they die, every queue agrees with a simple model in memory."""
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def start(script: str, *words: object, **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen([sys.executable, "-c", script, *map(str, words)], **options)


@pytest.mark.slow
@pytest.mark.dist
def test_killed_workers_lose_no_job_and_share_none(tmp_path: Path) -> None:
    """With workers killed at random times every job is done, and none by two living workers at once."""
    generator, deadline, kills, jobs = random.Random(2), time.monotonic() + 120, 12, 60
    crew = [start(WORKER, tmp_path, jobs) for _ in range(4)]
    try:
        while kills and any(process.poll() is None for process in crew):
            assert time.monotonic() < deadline
            time.sleep(generator.uniform(0.0, 0.2))
            pids = {json.loads(text)["pid"] for path in tmp_path.glob("claims/[!.]*.*") if (text := read(path))}
            victims = [process for process in crew if process.pid in pids and process.poll() is None]
            if victims:
                victim = generator.choice(victims)
                victim.kill()
                victim.wait()
                kills -= 1
                crew[crew.index(victim)] = start(WORKER, tmp_path, jobs)
        for process in crew:
            assert process.wait(120) == 0
    finally:
        for process in crew:
            process.kill()
            process.wait()
    assert kills == 0
    assert len(list(tmp_path.glob("done-*"))) == jobs
    assert not (tmp_path / "conflict").exists()
    assert len(list(tmp_path.glob("tries-*"))) == jobs


def read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def holder(folder: Path) -> subprocess.Popen[Any]:
    process = start(HOLDER, folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"a.1\n"
    return process


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.dist
def test_a_killed_worker_is_replaced_at_once(tmp_path: Path) -> None:
    """On the same host the job of a killed worker is handed out at the very next look, and not before."""
    queue = Queue(tmp_path)
    with holder(tmp_path) as process:
        assert states(queue, ["a"]) == "r"
        process.kill()
        process.wait()
        assert take(queue, ["a"]).path.name == "a.2"


@pytest.mark.dist
def test_a_suspended_worker_loses_its_job(tmp_path: Path) -> None:
    """A worker that sleeps too long loses its job; when it wakes up and ends, the next worker's claim stays."""
    queue = Queue(tmp_path)
    with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: states(queue, ["a"]) == "w")
        take(queue, ["a"])
        os.kill(process.pid, signal.SIGCONT)
        process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
    assert names(queue) == ["a.2"]
    assert states(queue, ["a"]) == "r"


def test_importing_the_queue_imports_neither_optuna_nor_torch() -> None:
    """The command line must not wait for either."""
    script = (
        "import sys, twophase.sweep.queue, twophase.sweep.trials, twophase.sweep.slurm\n"
        "sys.exit(bool({'optuna', 'sqlalchemy', 'submitit', 'torch'} & set(sys.modules)))"
    )
    assert start(script).wait(60) == 0
