"""Signs of life: how the workers of a sweep, on one machine or many, know which of them are dead.

A living worker holds a lock on a file of its own, `<sweep folder>/workers/<host>-<pid>-<token>.json`, and refreshes the
file's time every few seconds. Another worker counts it as dead when

* the file is gone (a worker removes it when it ends by itself), or
* both are on one host and the lock is free: the system frees it at the instant of death, however that came, or
* the file has not been refreshed for long: the only evidence from another host, and on the same host the evidence
  against a process that is suspended. Times are compared on the file server's clock only, because the clocks of two
  machines differ; and the verdict waits until the file has stayed as it is for two more beats of the observer's own
  time, because a laptop that wakes up, or a file server that comes back, makes everybody look stale for a moment.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from twophase.base.config import UsageError
from twophase.base.files import TEMPORARY

WORKERS = "workers"
BEAT_SECONDS, STALE_SECONDS = 10.0, 120.0


@cache
def host() -> str:
    """This machine, or this container on it, since it was last started: nothing else has the same text."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux: locks there are as certain, and after a restart the old files only look stale
        boot = "unknown"
    return f"{socket.gethostname()} {boot}"


def hide_password(text: str) -> str:
    """The text with the password of every URL in it replaced by three stars."""
    # Up to the last @: a password that should have been percent-encoded, and was not, is hidden as well.
    return re.sub(r"(://[^\s:/@]*):\S*@|([?&]password=)[^&\s]*", _without_password, text)


def _without_password(match: re.Match[str]) -> str:
    return f"{match[1]}:***@" if match[1] is not None else f"{match[2]}***"


class Beat:
    """A worker's sign of life, given from entering the context to leaving it.

    Args:
        folder: the sweep's folder.
        beat_seconds: how often the file is refreshed, > 0.
        stale_seconds: silence after which others may count this worker as dead, at least three beats.

    Attributes:
        name: of the worker, unlike that of any other.
        path: its file, a JSON object with host, pid, start time and command.

    Raises:
        ValueError: times that do not fit.
        UsageError: on entering, when the folder cannot be written.
    """

    def __init__(
        self, folder: Path, *, beat_seconds: float = BEAT_SECONDS, stale_seconds: float = STALE_SECONDS
    ) -> None:
        if not 0 < 3 * beat_seconds <= stale_seconds:
            raise ValueError(
                f"Beat: beat_seconds is {beat_seconds} and stale_seconds {stale_seconds}; "
                "the first must be > 0 and the second at least three times as long"
            )
        readable = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
        self.name = f"{readable}-{os.getpid()}-{secrets.token_hex(4)}"
        self.path = Path(folder).absolute() / WORKERS / f"{self.name}.json"
        self.beat_seconds = beat_seconds
        self._record = {
            "host": host(),
            "pid": os.getpid(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [hide_password(word) for word in sys.argv],
            "beat_seconds": beat_seconds,
            "stale_seconds": stale_seconds,
        }
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._lock: int | None = None
        self._thread = threading.Thread(target=self._beat, name="sweep-beat", daemon=True)

    def __enter__(self) -> Beat:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._publish()
        except OSError as error:
            raise UsageError(
                f"--out {self.path.parent}: cannot be written ({error.strerror}); choose another --out"
            ) from None
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        with suppress(OSError):
            self.path.unlink()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def touch(self) -> float:
        """Give a sign of life now, and learn the time on the file server's clock (seconds).

        Raises:
            OSError: the folder cannot be written at present.
        """
        with self._guard:
            try:
                os.utime(self.path)  # without times: the server puts its own
            except FileNotFoundError:  # somebody tidied up; whoever looked meanwhile took this worker for dead
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._publish()
            return self.path.stat().st_mtime

    def _beat(self) -> None:
        while not self._over.wait(self.beat_seconds):
            with suppress(OSError):  # a file server that is away for a while: the next beat tries again
                self.touch()

    def _publish(self) -> None:
        """Write the file and lock it; it takes its name only when it is locked, so that nobody finds it unlocked."""
        temporary = self.path.with_name(f"{TEMPORARY}{self.path.name}")
        lock = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            locked = True
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # a file system without locks: only the file's time speaks then
                locked = False
            os.write(lock, (json.dumps(self._record | {"locked": locked}, indent=1) + "\n").encode())
            temporary.replace(self.path)
        except BaseException:
            os.close(lock)
            temporary.unlink(missing_ok=True)
            raise
        if self._lock is not None:
            os.close(self._lock)
        self._lock = lock


class Watch:
    """An observer of the workers of a sweep.

    Args:
        folder: the sweep's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).absolute() / WORKERS
        self._doubts: dict[str, tuple[float, float]] = {}
        """From worker to the time of its stale file, and when (on this process's clock) it was first found so."""

    def deaths(self, names: Sequence[str], observer: Beat) -> dict[str, str]:
        """Which of these workers are dead, and how that is known.

        Args:
            names: of workers.
            observer: the caller's own sign of life, whose file's time tells the time.

        Returns:
            From the names of the dead to the reason. A worker that may be alive is not among them.

        Raises:
            OSError: the observer cannot write into the folder, and so cannot tell the time.
        """
        if not names:
            return {}
        now = observer.touch()
        verdicts = {name: self._verdict(name, now) for name in dict.fromkeys(names) if name != observer.name}
        self._doubts = {name: doubt for name, doubt in self._doubts.items() if name in verdicts}
        return {name: reason for name, reason in verdicts.items() if reason is not None}

    def _verdict(self, name: str, now: float) -> str | None:
        path = self.folder / f"{name}.json"
        try:
            file = self._open(path)
        except FileNotFoundError:
            return f"worker {name} has ended or its file was removed"
        except OSError:
            return None  # no evidence at present
        try:
            record = _read_record(file)
            if record["host"] == host() and record["locked"] and _is_free(file):
                return f"worker {name} was killed"
            touched = os.fstat(file).st_mtime
        finally:
            os.close(file)
        return self._judge_silence(name, now, touched, record["beat_seconds"], record["stale_seconds"])

    def _judge_silence(self, name: str, now: float, touched: float, beat: float, stale: float) -> str | None:
        if now - touched <= stale:
            self._doubts.pop(name, None)
            return None
        before, since = self._doubts.get(name, (None, 0.0))
        if before != touched:
            self._doubts[name] = (touched, time.monotonic())
        elif time.monotonic() - since >= 2 * beat:
            return f"worker {name} gave no sign of life for {now - touched:.0f} s"
        return None

    def _open(self, path: Path) -> int:
        """The file opened for reading, which on NFS also fetches its present time from the server."""
        try:
            return os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            # On NFS a machine may remember for half a minute that there was no such name; a change of its own to the
            # folder makes it look again.
            probe = self.folder / f"{TEMPORARY}probe-{secrets.token_hex(8)}"
            probe.touch()
            probe.unlink()
            return os.open(path, os.O_RDONLY)


def _read_record(file: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "host": "",
        "locked": False,
        "beat_seconds": BEAT_SECONDS,
        "stale_seconds": STALE_SECONDS,
    }
    try:
        record = json.loads(os.read(file, 1 << 20))
    except ValueError:
        record = None
    return defaults | record if isinstance(record, dict) else defaults


def _is_free(file: int) -> bool:
    """Whether nobody holds the lock on an open file. Shared, so that two observers do not take each other for it."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
