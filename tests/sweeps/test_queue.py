"""The queue of a sweep: a job has one living worker at a time, and none is lost, whatever is killed when."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from commands import wait_until
from twophase.sweeps import queue as queue_module
from twophase.sweeps.queue import ATTEMPTS, Claim, Queue

JOBS = ("a", "b", "c")


def test_a_machine_without_a_boot_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off Linux its name stands alone; after a restart the claims of before fall silent."""

    def refuse(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert queue_module.host.__wrapped__() == f"{socket.gethostname()} unknown"


# Works until all jobs have their file `done-JOB`. A lock on a file of the job's own, which a death frees, tells whether
# two living workers have it at once.
WORKER = r"""
import fcntl, random, sys, time
from pathlib import Path
from twophase.sweeps import queue

folder, jobs = Path(sys.argv[1]), [f"job-{number}" for number in range(int(sys.argv[2]))]
queue.ATTEMPTS, queue.STALE_SECONDS, queue.BEAT_SECONDS = 1000, 3.0, 0.5  # of a claim killed before its record
claims = queue.Queue(folder)
while waiting := [job for job in jobs if not (folder / f"done-{job}").exists()]:
    claim = claims.take(claims.look(waiting))
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
        while claim.job == jobs[-1] and not (folder / "kills-over").exists():
            time.sleep(0.02)
        (folder / f"done-{claim.job}").touch()
        fcntl.flock(busy, fcntl.LOCK_UN)
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let an observer's time pass."""
    now = [0.0]
    monkeypatch.setattr(queue_module.time, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def take(queue: Queue, jobs: Sequence[str] = JOBS) -> Claim:
    claim = queue.take(queue.look(jobs))
    assert claim is not None
    return claim


def states(queue: Queue, jobs: Sequence[str] = JOBS) -> str:
    """The first letters of the jobs' states."""
    return "".join(standing.state[0] for standing in queue.look(jobs).values())


def die(claim: Claim) -> None:
    """What a SIGKILL leaves of a claim: its file, without its lock and without fresh times."""
    claim._ended.set()
    claim._thread.join()
    assert claim._file is not None
    os.close(claim._file)
    claim._file = None


def watch(queue: Queue, clock: Callable[[float], None]) -> None:
    """Two minutes in which job `a` runs, for what an observer can tell."""
    for _ in range(24):
        assert states(queue, ["a"]) == "r"
        clock(5.0)


def names(queue: Queue) -> list[str]:
    return sorted(path.name for path in queue.folder.iterdir())


def test_a_job_that_was_taken_since_the_look_is_passed_over(tmp_path: Path) -> None:
    """Of two workers that saw a job wait the slower one takes the next."""
    queue = Queue(tmp_path)
    standings = queue.look(JOBS)
    with take(Queue(tmp_path)), queue.take(standings) or pytest.fail("no job") as claim:
        assert claim.job == "b"


def test_failures_have_a_reason(tmp_path: Path) -> None:
    """A failure's reason is kept, shortened, until the next call; so is that of the third death under a job."""
    queue = Queue(tmp_path)
    take(queue).fail("no data " * 1000)
    for _ in range(ATTEMPTS):
        take(queue, ["b"]).release()  # which does not count
        die(take(queue, ["b"]))
    die(take(queue, ["c"]))
    running = take(queue)
    first, second, _ = Queue(tmp_path).look(JOBS).values()
    assert (first.state, first.error) == ("failed", ("no data " * 1000)[:2000])
    assert second.state == "failed"
    assert second.error.endswith("was killed (attempt 3 of 3)")
    for failed_only, claims in (True, ["c.1", "c.2"]), (False, ["c.2"]):  # of a look, deaths still count
        queue.begin_call(failed_only=failed_only)
        assert states(queue) == "wwr"  # no job is taken from a worker that lives
        assert sorted(path.name for path in queue.folder.iterdir()) == claims
    running.release()


ODD_RECORDS = [
    *("", "{", "[]", "{}", '{"host": 3}', '{"error": "no pid"}'),
    *('{"host": "", "pid": 3, "locked": true}', '{"host": " ", "pid": 3, "locked": true}'),
    *('{"host": null, "pid": 3, "locked": true}', '{"host": "here", "pid": "3", "locked": 1}'),
    '{"host": "elsewhere 1", "pid": 3, "locked": true, "error": 5}',
]


@pytest.mark.parametrize("record", [*ODD_RECORDS, '{"host": "elsewhere 1", "pid": 3, "locked": true}'])
def test_silence_is_death(tmp_path: Path, clock: Callable[[float], None], record: str) -> None:
    """A claim from elsewhere, torn before it was written, or odd, is dead after two minutes without a refresh."""
    queue = Queue(tmp_path)
    claim = take(queue)
    die(claim)
    claim.path.write_text(record)
    os.utime(claim.path, (0, 0))  # however old it is by any other clock
    watch(queue, clock)
    os.utime(claim.path, (0, 1))  # a sign of life
    watch(queue, clock)
    assert states(Queue(tmp_path), ["a"]) == "r"  # another observer has to watch for itself
    assert states(queue, ["a"]) == "w"


def test_a_pause_of_the_observer_is_no_silence(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """After a laptop's sleep every claim looks old for a moment, and is given its two minutes again."""
    queue = Queue(tmp_path)
    claim = take(queue)
    die(claim)
    claim.path.write_text("")
    for _ in range(3):
        assert states(queue, ["a"]) == "r"
        clock(1000.0)
    watch(queue, clock)
    assert states(queue, ["a"]) == "w"


def test_a_suspended_worker_loses_its_job(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """A worker that lives but gives no sign of life has lost its job after two minutes, for good."""
    queue = Queue(tmp_path)
    claim = take(queue, ["a"])
    claim._ended.set()  # it still has its lock
    claim._thread.join()
    watch(queue, clock)
    queue.begin_call()  # the command is repeated: the claim's name is free
    other = take(queue, ["a"])
    assert other.path == claim.path
    claim.release()
    assert names(queue) == ["a.1"]
    assert states(queue, ["a"]) == "r"
    other.release()


def test_observers_do_not_take_each_other_for_the_worker(tmp_path: Path) -> None:
    """A dead worker is seen as dead also while another observer is looking."""
    queue = Queue(tmp_path)
    claim = take(queue)
    die(claim)
    with claim.path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert states(queue) == "www"


def test_a_claim_that_ends_under_an_observer_is_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer that opened a claim before its good end does not take the free lock for the third death."""
    queue = Queue(tmp_path)
    for _ in range(2):
        die(take(queue, ["a"]))
    claim, parse = take(queue, ["a"]), queue_module._record

    def slow(data: bytes) -> dict[str, Any]:
        claim.release()
        return parse(data)

    monkeypatch.setattr(queue_module, "_record", slow)
    assert queue.look(["a"])["a"].state == "waiting"


def test_claims_are_refreshed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim names its worker and is refreshed while that lives."""
    monkeypatch.setattr(queue_module, "BEAT_SECONDS", 0.01)
    queue = Queue(tmp_path)
    with take(queue) as claim:
        record = json.loads(claim.path.read_text())
        assert (record["pid"], record["locked"], record["host"]) == (os.getpid(), True, queue_module.host())
        os.utime(claim.path, (0, 0))
        wait_until(lambda: claim.path.stat().st_mtime > 0)
    assert names(queue) == []


def test_a_lost_folder_of_claims_costs_nothing(tmp_path: Path) -> None:
    """When `claims/` is removed every job waits again, and a claim from before ends without harm."""
    queue = Queue(tmp_path)
    claim = take(queue)
    shutil.rmtree(queue.folder)
    assert states(queue) == "www"
    claim.release()
    assert take(queue).job == "a"


def test_a_full_disk_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that cannot be written is an error and leaves nothing; a failure that cannot be written is a death."""
    queue = Queue(tmp_path)
    claim = take(queue)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            take(queue)
        assert names(queue) == ["a.1"]
        claim.fail("the disk is full")
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

    def teardown(self) -> None:
        """Leave nothing behind."""
        for claims in self.claims:
            for claim in claims:
                claim.release()
        shutil.rmtree(self.folder)

    @rule(worker=st.integers(0, 2))
    def take(self, worker: int) -> None:
        """Take the first job that waits."""
        queue = self.queues[worker]
        claim = queue.take(queue.look("abcd"))
        waiting = [job for job, state in self.states.items() if state == "waiting"]
        assert (claim.job if claim else None) == next(iter(waiting), None)
        if claim is not None:
            self.states[claim.job] = "running"
            self.claims[worker].append(claim)

    @rule(worker=st.integers(0, 2), failed=st.booleans())
    def end(self, worker: int, failed: bool) -> None:
        """End the last claim well or with a failure."""
        if self.claims[worker]:
            claim = self.claims[worker].pop()
            claim.fail("x") if failed else claim.release()
            self.states[claim.job] = "failed" if failed else "waiting"

    @rule(worker=st.integers(0, 2))
    def die(self, worker: int) -> None:
        """A worker is killed; another takes its place."""
        for claim in self.claims[worker]:
            die(claim)
            self.deaths[claim.job] += 1
            self.states[claim.job] = "failed" if self.deaths[claim.job] >= ATTEMPTS else "waiting"
        self.claims[worker], self.queues[worker] = [], Queue(self.folder)

    @rule(worker=st.integers(0, 2))
    def begin_call(self, worker: int) -> None:
        """Repeat the command."""
        self.queues[worker].begin_call()
        self.deaths = dict.fromkeys(self.deaths, 0)
        self.states = {job: "waiting" if state == "failed" else state for job, state in self.states.items()}

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Every process sees the same."""
        for queue in self.queues:
            assert {job: standing.state for job, standing in queue.look("abcd").items()} == self.states


TestModel = QueueMachine.TestCase
TestModel.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def start(script: str, *words: object, **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen([sys.executable, "-c", script, *map(str, words)], **options)


@pytest.mark.dist
def test_killed_workers_lose_no_job_and_share_none(tmp_path: Path) -> None:
    """With workers killed at random times every job is done, and none by two living workers at once."""
    generator, deadline, kills, jobs = random.Random(2), time.monotonic() + 120, 12, 40
    crew = [start(WORKER, tmp_path, jobs) for _ in range(4)]
    try:
        while kills and any(process.poll() is None for process in crew):
            assert time.monotonic() < deadline
            time.sleep(generator.uniform(0.0, 0.2))
            pids = {json.loads(text)["pid"] for path in tmp_path.glob("claims/*.*") if (text := read(path))}
            victims = [process for process in crew if process.pid in pids and process.poll() is None]
            if victims:
                victim = generator.choice(victims)
                victim.kill()
                victim.wait()
                kills -= 1
                crew[crew.index(victim)] = start(WORKER, tmp_path, jobs)
        (tmp_path / "kills-over").touch()  # the last job was waiting for this, however fast the others went
        for process in crew:
            assert process.wait(120) == 0
    finally:
        for process in crew:
            process.kill()
            process.wait()
    assert kills == 0
    assert len(list(tmp_path.glob("done-*"))) == jobs
    assert not (tmp_path / "conflict").exists()


def read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def test_a_claim_that_was_taken_meanwhile_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the listing and the forgetting a worker may have ended its claim, and another taken the same name."""
    queue = Queue(tmp_path)
    first = take(queue, ["job"])
    standing = queue._standing
    taken: list[Claim] = []

    def slow(job: str, numbers: list[int]) -> Any:
        if not taken:
            first.release()
            seen = standing(job, numbers)
            taken.append(take(Queue(tmp_path), ["job"]))
            return seen
        return standing(job, numbers)

    monkeypatch.setattr(queue, "_standing", slow)
    queue.begin_call()
    assert Queue(tmp_path).take(Queue(tmp_path).look(["job"])) is None
    taken[0].release()
