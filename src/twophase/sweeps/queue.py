"""The queue of a sweep: files in `claims/` of its folder say which worker has which job.

A worker takes a job by creating `claims/JOB.N`, where N follows the last claim on that job. Creation is exclusive, also
on NFS, so exactly one of several workers gets the job. The claim ends in one of three ways:

* the worker removes the file: the job is done, as the sweep's folder shows, or was given back;
* the worker writes an `error` into it: the job has failed;
* the worker dies: the file stays, the next claim is N + 1, and the third death is the job's failure.

A living worker holds a lock on its claim and refreshes the file's time. A claim counts as dead when

* worker and observer run on one host and the lock is free: the system frees it at the instant of death; or
* the observer has watched the file for two minutes without a refresh: the only evidence from another host, and against
  a suspended process. Only the observer's clock is read, because the clocks of two machines differ.

Repeating the sweep's command removes failed and dead claims. The queue only prevents duplicate work: results never
depend on it, so the folder `claims/` may be lost.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from twophase.base.files import lock
from twophase.base.reading import check_regular, json_object

CLAIMS = "claims"
ATTEMPTS = 3
"""Deaths of workers under a job that make it fail."""
BEAT_SECONDS, STALE_SECONDS = 10.0, 120.0
"""Time between two refreshes of a claim, and the silence that counts as a death."""
_REASON_LENGTH = 2000
_KINDS = {"host": str, "pid": int, "locked": bool}


@cache
def host() -> str:
    """Identify this machine, or this container on it, since its last start."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux: after a restart the old claims only fall silent
        boot = "unknown"
    return f"{socket.gethostname()} {boot}"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a job stands; `running` is in a live worker, and only a failure has an `error`."""

    state: Literal["waiting", "running", "failed"]
    last: int = 0
    """Number of the last claim, 0 before the first."""
    error: str = ""


class Claim:
    """A job that this process has taken; leaving the context gives it back, unless `fail` was called.

    Raises:
        FileExistsError: another worker was faster.
        OSError: the folder cannot be written.
    """

    def __init__(self, job: str, path: Path) -> None:
        self.job = job
        self.path = path
        self._ended = threading.Event()
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._thread = threading.Thread(target=self._beat, args=(self._file,), name="sweep-beat", daemon=True)
        try:
            # The lock comes first: an observer trusts a free lock only where the record says `locked`.
            self._record = {"host": host(), "pid": os.getpid(), "locked": lock(self._file)}
            self._write()
            self._thread.start()
        except BaseException:
            self.release()
            raise

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """End the claim; safe to repeat."""
        if self._file is not None:
            # Removed before the lock is freed: a free lock on a file that is still there means death. After a long
            # suspension the claim may have been removed, and its name may be another worker's.
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._file), self.path.stat()):
                    self.path.unlink()
            self._close()

    def fail(self, error: str) -> None:
        """End the claim with a reason; the job waits until the sweep's command is repeated."""
        self._record["error"] = error[:_REASON_LENGTH]
        with suppress(OSError):  # a full disk: the claim then counts as a worker's death
            self._write()
        self._close()

    def _write(self) -> None:
        assert self._file is not None
        # In place, not by a rename: this needs no space on a full disk. A reader judges half a record by its age.
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, (json.dumps(self._record, indent=1) + "\n").encode(), 0)

    def _beat(self, file: int) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):  # an unreachable file server: the next beat tries again
                os.utime(file)  # without times: the server puts its own

    def _close(self) -> None:
        assert self._file is not None
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()  # it must not refresh the next file with this descriptor
        os.close(self._file)
        self._file = None


class Queue:
    """The claims of the sweep in a folder, as one process sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).absolute() / CLAIMS
        self._silences: dict[Path, tuple[float, float, float]] = {}
        """From a claim to the time of its file, when it was first seen so, and the last look (on this clock)."""

    def begin_call(self, *, failed_only: bool = False) -> None:
        """Forget failures and deaths so far, because the sweep's command is repeated; or failures alone."""
        for job, numbers in self._claims().items():
            standing = self._standing(job, numbers)
            if failed_only and standing.state != "failed":
                continue
            # A claim that has gone meanwhile may be another worker's by now.
            for number in numbers:
                if number <= standing.last - (standing.state == "running"):
                    self._path(job, number).unlink(missing_ok=True)

    def look(self, jobs: Iterable[str]) -> dict[str, Standing]:
        """Return where each of these jobs stands."""
        claims = self._claims()
        return {job: self._standing(job, claims.get(job, [])) for job in jobs}

    def take(self, standings: Mapping[str, Standing]) -> Claim | None:
        """Take the first job that waits by what `look` has returned just now; None when no job does any more."""
        self.folder.mkdir(exist_ok=True)
        for job, standing in standings.items():
            if standing.state == "waiting":
                with suppress(FileExistsError):  # another worker was faster
                    return Claim(job, self._path(job, standing.last + 1))
        return None

    def _path(self, job: str, number: int) -> Path:
        return self.folder / f"{job}.{number}"

    def _claims(self) -> dict[str, list[int]]:
        """Return the numbers of the claims on each job, in ascending order."""
        claims: dict[str, list[int]] = {}
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                job, _, number = path.name.rpartition(".")
                if number.isdecimal():
                    claims.setdefault(job, []).append(int(number))
        return {job: sorted(numbers) for job, numbers in claims.items()}

    def _standing(self, job: str, numbers: list[int]) -> Standing:
        if not numbers:
            return Standing("waiting")
        last, path = numbers[-1], self._path(job, numbers[-1])
        try:
            check_regular(path)  # a pipe would be waited for
            with path.open("rb") as file:  # on NFS, opening also fetches the file's present time from the server
                record = _record(file.read())
                death = "" if "error" in record else self._death(path, file.fileno(), record)
        except FileNotFoundError:  # it has just ended
            return Standing("waiting", last - 1)
        if "error" in record:
            return Standing("failed", last, record["error"])
        if not death:
            return Standing("running", last)
        if len(numbers) >= ATTEMPTS:  # of the former claims only those of dead workers are still there
            return Standing("failed", last, f"{death} (attempt {len(numbers)} of {ATTEMPTS})")
        return Standing("waiting", last)

    def _death(self, path: Path, file: int, record: Mapping[str, Any]) -> str:
        """Say how the worker of a claim has died; nothing if it may be alive."""
        worker = f"worker {record['pid']} on {record['host'].split()[0]}" if record else "an unknown worker"
        # A shared lock, so that two observers do not take each other for the worker.
        if record.get("locked") and record.get("host") == host() and lock(file, shared=True):
            # The claim may have ended in good order since it was opened, and another worker's may have its name.
            return f"{worker} was killed" if os.path.samestat(os.fstat(file), path.stat()) else ""
        touched, now = os.fstat(file).st_mtime, time.monotonic()
        before, since, looked = self._silences.get(path, (touched, now, now))
        # After a pause of the observer or of the file server every claim looks old for a moment.
        if touched != before or now - looked > BEAT_SECONDS:
            since = now
        self._silences[path] = touched, since, now
        return f"{worker} gave no sign of life for {now - since:.0f} s" if now - since >= STALE_SECONDS else ""


def _record(data: bytes) -> dict[str, Any]:
    """Parse a claim; it is empty where the worker died before it had written it, or where it holds anything odd."""
    with suppress(ValueError):
        record = json_object(data)
        kinds = {name: type(value) for name, value in record.items()}
        if kinds == _KINDS | ({"error": str} if "error" in record else {}) and record["host"].strip():
            return record
    return {}
