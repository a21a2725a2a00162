"""The queue of a sweep: files in `claims/` of its folder say which worker has which job.

A worker takes a job by creating `claims/JOB.N`, where N follows the last claim on that job. Creation is exclusive, also
on NFS, so exactly one of several workers gets the job. The claim ends in one of three ways:

* the worker removes the file: the job is done, as the sweep's folder shows, or was given back;
* the worker writes an `error` into it: the job has failed until the sweep's command is repeated;
* the worker dies. The file stays, the next claim is N + 1, and the third such death in a row is the job's failure.

A living worker holds a lock on its claim and refreshes the file's time. A claim counts as dead when

* worker and observer run on one host and the lock is free: the system frees it at the instant of death; or
* the file has not been refreshed for long: the only evidence from another host, and against a suspended process. Times
  are compared on the file server's clock, because the clocks of two machines differ. The verdict waits for two more
  beats of the observer's time: after a laptop's sleep or a pause of the file server every claim looks old for a moment.

The queue only prevents duplicate work. Results never depend on it, so the folder `claims/` may be lost.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from twophase.base.files import TEMPORARY, write_atomic

CLAIMS = "claims"
ATTEMPTS = 3
"""Deaths of workers under a job that make it fail."""
BEAT_SECONDS, STALE_SECONDS = 10.0, 120.0
_CALL = "call"
_REASON_LENGTH = 2000


@cache
def host() -> str:
    """This machine, or this container on it, since its last start."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux: after a restart the old claims only look stale
        boot = "unknown"
    return f"{socket.gethostname()} {boot}"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a job stands.

    Args:
        state: waiting for a worker, running in a live worker, or failed.
        last: number of the last claim, 0 before the first.
        error: reason of a failure.
    """

    state: Literal["waiting", "running", "failed"]
    last: int
    error: str = ""


class Claim:
    """A job that this process has taken; leaving the context gives it back, unless `fail` was called.

    Args:
        job: the job's id.
        path: the claim's file, which must not exist.
        record: what the file says of this worker.

    Raises:
        FileExistsError: another worker was faster.
        OSError: the folder cannot be written.
    """

    def __init__(self, job: str, path: Path, record: Mapping[str, Any]) -> None:
        self.job = job
        self.path = path
        self._record = dict(record)
        self._over = threading.Event()
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # Before the record is written: an observer trusts the lock only where the record says `locked`.
            self._record["locked"] = _lock(self._file, fcntl.LOCK_EX)
            self._write()
        except BaseException:
            self._close(remove=True)
            raise
        self._thread = threading.Thread(target=self._beat, name="sweep-beat", daemon=True)
        self._thread.start()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """End the claim; safe to repeat."""
        self._end(remove=True)

    def fail(self, error: str) -> None:
        """End the claim with a reason; the job waits until the sweep's command is repeated."""
        self._record["error"] = error[:_REASON_LENGTH]
        with suppress(OSError):  # a full disk: the claim then counts as a worker's death
            self._write()
        self._end(remove=False)

    def _write(self) -> None:
        assert self._file is not None
        # In place, not by a rename: this needs no space on a full disk. A reader judges half a record by its age.
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, (json.dumps(self._record, indent=1) + "\n").encode(), 0)

    def _beat(self) -> None:
        while not self._over.wait(self._record["beat_seconds"]):
            with suppress(OSError):  # a file server that is away for a while: the next beat tries again
                assert self._file is not None
                os.utime(self._file)  # without times: the server puts its own

    def _end(self, *, remove: bool) -> None:
        if self._file is not None:
            self._over.set()
            self._thread.join()
            self._close(remove=remove)

    def _close(self, *, remove: bool) -> None:
        assert self._file is not None
        # Removed before the lock is freed: a free lock on a file that is still there means death. The file may be gone,
        # or another worker's by now, if `claims/` was removed by hand.
        with suppress(OSError):
            if remove and _is_same_file(self._file, self.path):
                self.path.unlink()
        os.close(self._file)
        self._file = None


class Queue:
    """The claims of one sweep, as one process sees them.

    Args:
        folder: the sweep's folder, which all its workers see.
        beat_seconds: time between two refreshes of a claim, > 0.
        stale_seconds: silence after which other hosts may count a worker as dead, at least three beats.

    Raises:
        ValueError: times that do not fit.
    """

    def __init__(
        self, folder: Path, *, beat_seconds: float = BEAT_SECONDS, stale_seconds: float = STALE_SECONDS
    ) -> None:
        if not 0 < 3 * beat_seconds <= stale_seconds:
            raise ValueError(
                f"Queue: beat_seconds is {beat_seconds} and stale_seconds {stale_seconds}; "
                "the first must be > 0 and the second at least three times as long"
            )
        self.folder = Path(folder).absolute() / CLAIMS
        self._times = {"beat_seconds": beat_seconds, "stale_seconds": stale_seconds}
        self._silences: dict[Path, tuple[float, float]] = {}
        """From a stale claim to the time of its file, and when (on this process's clock) it was first seen so."""

    def begin_call(self) -> None:
        """Forget all failures and deaths so far, because the sweep's command is repeated."""
        self.folder.mkdir(exist_ok=True)
        write_atomic(self.folder / _CALL, f"{self._call() + 1}\n")

    def look(self, jobs: Iterable[str]) -> dict[str, Standing]:
        """Where each of these jobs stands.

        Raises:
            OSError: the folder cannot be read.
        """
        claims: dict[str, list[int]] = {}
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                job, _, number = entry.name.rpartition(".")
                if number.isdecimal():
                    claims.setdefault(job, []).append(int(number))
        call, clock = self._call(), _ServerClock(self.folder)
        return {job: self._standing(job, sorted(claims.get(job, [])), call, clock) for job in jobs}

    def take(self, standings: Mapping[str, Standing]) -> Claim | None:
        """Take the first job that waits.

        Args:
            standings: what `look` has returned just now.

        Returns:
            The claim; None when no job waits any more.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(exist_ok=True)
        worker = {"host": host(), "pid": os.getpid(), "call": self._call(), **self._times}
        for job, standing in standings.items():
            if standing.state == "waiting":
                with suppress(FileExistsError):  # another worker was faster
                    return Claim(job, self._path(job, standing.last + 1), worker)
        return None

    def _path(self, job: str, number: int) -> Path:
        return self.folder / f"{job}.{number}"

    def _call(self) -> int:
        try:
            return int((self.folder / _CALL).read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return 0

    def _standing(self, job: str, numbers: list[int], call: int, clock: _ServerClock) -> Standing:
        if not numbers:
            return Standing("waiting", 0)
        last, path = numbers[-1], self._path(job, numbers[-1])
        try:
            file = os.open(path, os.O_RDONLY)  # on NFS this also fetches its present time from the server
        except FileNotFoundError:  # it has just ended
            return Standing("waiting", last - 1)
        try:
            record = _record(file)
            if "error" in record:
                failed = record.get("call") == call
                return Standing("failed", last, record["error"]) if failed else Standing("waiting", last)
            death = self._death(path, file, record, clock)
        finally:
            os.close(file)
        if death is None:
            return Standing("running", last)
        deaths = sum(self._call_of(self._path(job, number)) == call for number in numbers)
        if deaths >= ATTEMPTS:
            return Standing("failed", last, f"{death} (attempt {deaths} of {ATTEMPTS})")
        return Standing("waiting", last)

    def _call_of(self, path: Path) -> int | None:
        with suppress(OSError, ValueError, AttributeError):
            return json.loads(path.read_bytes()).get("call")
        return None

    def _death(self, path: Path, file: int, record: Mapping[str, Any], clock: _ServerClock) -> str | None:
        """How the worker of a claim has died, None if it may be alive."""
        worker = f"worker {record.get('pid', 'unknown')} on {str(record.get('host', 'unknown host')).split()[0]}"
        if record.get("locked") and record.get("host") == host() and _lock(file, fcntl.LOCK_SH):
            # Seen free, but the claim may have ended in good order since the file was opened.
            return f"{worker} was killed" if _is_same_file(file, path) else None
        touched, now = os.fstat(file).st_mtime, clock.now()
        if now is None or now - touched <= record.get("stale_seconds", STALE_SECONDS):
            self._silences.pop(path, None)
            return None
        before, since = self._silences.get(path, (None, 0.0))
        if before != touched:
            self._silences[path] = (touched, time.monotonic())
        elif time.monotonic() - since >= 2 * record.get("beat_seconds", BEAT_SECONDS):
            return f"{worker} gave no sign of life for {now - touched:.0f} s"
        return None


class _ServerClock:
    """The file server's clock, read at most once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._now: float | None = None

    def now(self) -> float | None:
        """Seconds; None while the folder cannot be written, which is no evidence against any worker."""
        if self._now is None:
            probe = self._folder / f"{TEMPORARY}clock-{secrets.token_hex(8)}"
            with suppress(OSError):
                probe.touch()
                self._now = probe.stat().st_mtime
                probe.unlink()
        return self._now


def _record(file: int) -> dict[str, Any]:
    """What an open claim says; nothing where it is being written, or damaged."""
    with suppress(ValueError):
        record = json.loads(os.pread(file, 1 << 20, 0))
        if isinstance(record, dict):
            return record
    return {}


def _lock(file: int, kind: int) -> bool:
    """Lock an open file without waiting; False where another process has it, or the file system knows no locks.

    An observer asks for a shared lock, so that two observers do not take each other for the worker.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_same_file(file: int, path: Path) -> bool:
    """Whether a name still stands for an open file."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
