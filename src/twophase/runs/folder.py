"""A run is a folder: what is in it, which process may write to it, and when it counts as finished.

| file                  | holds                                                            | written            |
|-----------------------|------------------------------------------------------------------|--------------------|
| `config.yaml`         | the resolved configuration; says which run the folder belongs to | first, atomically  |
| `env.json`            | versions, machine and data                                       | once, atomically   |
| `metrics.jsonl`       | a line an evaluation or round                                    | appended           |
| `rounds.jsonl`        | a line a sync                                                    | appended           |
| `steps.jsonl`         | a line every `log_every` steps: loss, speed, memory              | appended           |
| `checkpoint/`         | states to resume from                                            | by the trainer     |
| `weights.safetensors` | the final weights                                                | before the summary |
| `summary.json`        | the outcome; the run is finished if and only if this validates   | last, atomically   |
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, cast

try:
    import fcntl
except ImportError:  # on Windows, where runs can be read
    fcntl = cast("Any", None)

from twophase.config import dump_yaml, flatten, load_yaml, to_tree
from twophase.config import fingerprint as fingerprint_of
from twophase.errors import RunError, UsageError
from twophase.files import append, finite, read_jsonl, write_atomic
from twophase.runs.trackers import Tracker, send

CONFIG, ENV, SUMMARY, WEIGHTS = "config.yaml", "env.json", "summary.json", "weights.safetensors"
METRICS, ROUNDS, STEPS = LOGS = ("metrics.jsonl", "rounds.jsonl", "steps.jsonl")
CHECKPOINTS = "checkpoint"
REPORT, COMPARE = "report.html", "compare.html"
"""Names of the page of a run or sweep in its folder, and of the page of several runs."""
RECORDED = "recorded"
"""In the configuration of a run that a loop of the user's own trained, and its exit reason."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a run may be called in a file; any other name might lead out of its folder."""
TOUCH_SECONDS, STALE_SECONDS = 20.0, 120.0
"""A claim is touched so often while it is held; another host's claim is void when it was not for so long."""
_WRITING_SECONDS = 5.0  # after which the process that has made an empty claim was killed before it wrote its name


def require_locks() -> None:
    """Raise a UsageError where no run can be written."""
    if fcntl is None:
        raise UsageError("runs are written under file locks, which Windows lacks; use Linux, macOS or WSL")


class BusyError(UsageError):
    """Another process is at work in the folder."""


class Claim(AbstractContextManager[Any]):
    """A folder of this process alone, until `release()` or its death; another process raises a BusyError.

    On one host a lock on `.lock` keeps others out. Hosts may share a folder without working locks, so files `.claim-1`,
    `.claim-2`, … do it as well, of which the last counts: of two rivals O_EXCL lets one make the next.
    """

    def __init__(self, path: Path, host: str = "", *, lock: bool = True) -> None:
        require_locks()
        self.path, self._released = path, threading.Event()
        self._owner = {"host": host or socket.gethostname(), "pid": os.getpid()}
        self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            number = self._take(lock=lock)
        except BaseException:
            os.close(self._lock)
            raise
        self._file, self._next = path / f".claim-{number}", path / f".claim-{number + 1}"
        threading.Thread(target=self._touch, daemon=True).start()

    def _take(self, *, lock: bool) -> int:
        """Lock the folder and make the next claim; return its number."""
        is_locked, is_busy = lock, False
        try:
            if lock:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_busy = True
        except OSError:  # a file system without locks
            is_locked = False
        while True:
            number = max((int(file.name.removeprefix(".claim-")) for file in self.path.glob(".claim-*")), default=0)
            last, owner, silence = self.path / f".claim-{number}", {}, math.inf
            os.utime(self._lock)  # silence is measured by the file system's clock: those of hosts differ
            with suppress(FileNotFoundError, ValueError):  # there is none, or its owner is not written yet
                silence = os.fstat(self._lock).st_mtime - last.stat().st_mtime
                owner = json.loads(last.read_bytes())
            if not owner and silence < _WRITING_SECONDS:
                time.sleep(0.1)
                continue
            # Who has the lock knows that no other process of this host lives.
            is_void = not owner or "released" in owner or (is_locked and owner["host"] == self._owner["host"])
            if is_busy or (not is_void and silence < STALE_SECONDS):
                who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
                raise BusyError(f"--out {self.path}: must be free, is in use by {who}")
            with suppress(FileExistsError), (self.path / f".claim-{number + 1}").open("x") as file:  # else a rival's
                json.dump(self._owner, file)
                return number + 1

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            with suppress(OSError):  # the folder was moved, or its server is away
                os.utime(self._file)

    def check(self) -> None:
        """Raise a RunError if the folder is no longer this process's, which may have been suspended for minutes."""
        if self._released.is_set() or self._next.exists():
            raise RunError(f"{self.path}: must be this process's, was released or taken over")

    def release(self, *_: object) -> None:
        """Let other processes claim the folder; safe to repeat."""
        if not self._released.is_set():
            self._released.set()
            with suppress(OSError):  # the folder was moved, or the disk is full
                self._file.write_text(json.dumps(self._owner | {"released": True}))
            os.close(self._lock)

    __exit__ = release


class RunFolder(Claim):
    """One run's folder, claimed by this process until `release()` or its death; use `RunFolder.claim`."""

    fingerprint: str
    trackers: list[Tracker]
    """They get every line of the logs too; who has opened them closes them."""

    @classmethod
    def claim(cls, path: Path, config: Any, *, host: str = "", lock: bool = True) -> RunFolder:
        """Make or reopen the folder of a run, and keep every other process out of it.

        `config` is a tree of frozen dataclasses, or of dictionaries; a folder with the same one is resumed. `host` is
        the name of this host, by default the system's; `lock` is False where the file system has no locks. A UsageError
        refuses a folder of another run, or with other files, which is left as it is, a BusyError one that is in use.
        """
        tree = config if isinstance(config, dict) else to_tree(config)
        _check(path, tree)
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, host, lock=lock)
        folder.fingerprint, folder.trackers = fingerprint_of(tree), []
        try:
            _check(path, tree)  # once more, now that no other process can write
            for leftover in path.glob(".*.tmp"):  # of killed writers
                leftover.unlink(missing_ok=True)
            if not (path / CONFIG).exists():
                write_atomic(path / CONFIG, dump_yaml(tree))
        except BaseException:
            folder.release()
            raise
        return folder

    def log(self, name: str, record: Mapping[str, Any]) -> None:
        """Append a line, which has a `step`, to one of `LOGS`, and send its numbers to the trackers."""
        self.check()
        append(self.path / name, record)
        if self.trackers:
            send(self.trackers, name.removesuffix(".jsonl"), record)

    def truncate(self, step: int) -> None:
        """Drop the lines after an inner step; a run that resumes from there writes them again."""
        self.check()
        for path in [self.path / name for name in LOGS]:
            kept = "".join(json.dumps(line) + "\n" for line in read_jsonl(path) if line["step"] <= step)
            if path.exists() and path.read_text() != kept:  # a line that a kill has torn goes, too
                write_atomic(path, kept)

    def write_env(self, env: Mapping[str, Any]) -> None:
        """Record versions, machine and data in `env.json`, unless the run has done so before."""
        if not (self.path / ENV).exists():
            write_atomic(self.path / ENV, json.dumps(env, indent=2) + "\n")

    def finish(self, summary: Mapping[str, Any], weights: bytes | None = None) -> None:
        """Write the final weights, then `summary.json` with their SHA-256, which makes the run finished."""
        self.check()
        record = finite(summary) | {"config": self.fingerprint}
        if weights is not None:
            write_atomic(self.path / WEIGHTS, weights)
            record["weights_sha256"] = hashlib.sha256(weights).hexdigest()
        write_atomic(self.path / SUMMARY, json.dumps(record, indent=2) + "\n")


def _check(path: Path, tree: Mapping[str, Any]) -> None:
    """Refuse a folder that holds other files or another run."""
    if (path / CONFIG).exists():
        saved, values = flatten(load_yaml(path / CONFIG)), flatten(tree)
        for name in {**saved, **values}:
            if saved.get(name) != values.get(name):
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option}: must be {saved.get(name)} as in {path}, got {values.get(name)}")
    elif path.exists() and (others := [file.name for file in path.iterdir() if not file.name.startswith(".")]):
        raise UsageError(f"--out {path}: must be empty or the folder of a run, holds {min(others)}")
