"""Commands in forked children of a process that has imported everything: a whole command takes about 0.1 s."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from faults.calls import INSTALLED
from forked import Signalled
from twophase.cli.main import main
from twophase.sweeps import crew

HANG = 60.0
"""Seconds after which a command counts as hanging."""


class Child(Signalled):
    """A process that was forked to call a function; it has the methods of `subprocess.Popen`."""

    def __init__(self, call: Callable[[], int], out: Path, err: Path, *, stdin: int = -1) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.stdin: Any = None
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(call, out, err, stdin)
        self._descriptor = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Its status if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._descriptor)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its status when it has ended."""
        if self.poll() is None:
            poller = select.poll()
            poller.register(self._descriptor, select.POLLIN)
            poller.poll(None if timeout is None else max(0.0, 1000 * timeout))
        if self.poll() is None:
            raise subprocess.TimeoutExpired("twophase", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


def _be_child(call: Callable[[], int], out: Path, err: Path, stdin: int) -> None:
    """In the new process."""
    status = 1
    try:
        if stdin < 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent; a worker ends by its leash instead
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin < 0 else stdin, 0)
        for number, path in enumerate((out, err), 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.closerange(3, 256)  # leashes and locks of the parent
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False, errors="backslashreplace") for number in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = call()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


WORKERS: list[Callable[[], Any]] = []
"""What the next workers of a sweep do first; one that replaces a dead one has nothing of it."""


def _popen(command: list[str], *, stdin: int, stdout: Any, stderr: Any, env: Mapping[str, str], process_group: int):
    """In place of the `subprocess.Popen` by which a sweep starts its workers."""
    if command[1:4] != ["-P", "-m", "twophase"]:  # a stand-in of another test in this process
        options: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "env": env}
        return subprocess.Popen(command, **options, process_group=process_group)
    assert (stdin, stderr, process_group) == (subprocess.PIPE, stdout, 0)
    first = WORKERS.pop(0) if WORKERS else None
    read, write = os.pipe()

    def call() -> int:
        os.environ.update(env)
        for restore in INSTALLED:
            restore()
        if first is not None:
            first()
        return main(command[4:])

    log = Path(stdout.name)
    child = Child(call, log, log, stdin=read)
    os.close(read)
    child.stdin = os.fdopen(write, "wb")
    return child


crew.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _popen})  # type: ignore[assignment]


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said; `status` is None for one that hung."""

    status: int | None
    out: str
    err: str

    @property
    def fault(self) -> str:
        """Why this is no good end: neither success nor one clear message."""
        if self.status is None:
            return "hang"
        if "Traceback (most recent call last)" in self.err + self.out:
            return "traceback"
        if self.status in (0, 1, 2):
            is_said = bool(self.err.strip()) or "diverged at step" in self.out  # a result, told where results are
            return "" if self.status == 0 or is_said else "no clear message"
        return f"status {self.status}"


def start(
    words: Sequence[str], log: Path, first: Callable[[], Any] | None = None, env: Mapping[str, str] = {}
) -> Child:
    """Start a command; `first` is called in the new process."""

    def call() -> int:
        sys.argv = ["twophase", *words]
        os.environ.update(env)
        if first is not None:
            first()
        return main(words)

    return begin(call, log)


def begin(call: Callable[[], int], log: Path) -> Child:
    """Call a function in a child; LOG.out and LOG.err hold what it says."""
    paths = [log.with_suffix(ending) for ending in (".out", ".err")]
    for path in paths:
        path.unlink(missing_ok=True)
    return Child(call, *paths)


def ended(child: Child, log: Path, patience: float = HANG) -> Ended:
    """Wait for a command, and end it and its children if it hangs."""
    try:
        status = child.wait(patience)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        status = None
    paths = [log.with_suffix(ending) for ending in (".out", ".err")]
    # A child may be killed before it has opened them.
    return Ended(status, *(path.read_text(errors="replace") if path.exists() else "" for path in paths))


def call(words: Sequence[str], log: Path, first: Callable[[], Any] | None = None, patience: float = HANG) -> Ended:
    """Run a whole command."""
    return ended(start(words, log, first), log, patience)
