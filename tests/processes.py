"""Processes that a test starts, kills and starts again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from forked import Program

PATIENCE = 100.0
"""Seconds that a test waits for anything, on a machine that has much else to do."""


def until(event: str, true: Callable[[], Any]) -> None:
    """Wait for something."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"in {PATIENCE:g} s: not {event}"
        time.sleep(0.02)


@contextmanager
def lighthouse(replicas: int) -> Iterator[str]:
    """torchft's, in this process, with a heartbeat timeout of a second; its URL."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        "127.0.0.1:0", replicas, join_timeout_ms=30000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    yield f"http://127.0.0.1:{urlsplit(server.address()).port}"
    server.shutdown()


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Processes:
    """Processes of a test, which all end with it.

    Args:
        folder: of all that they write.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.started: list[subprocess.Popen[bytes] | Program] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        for process in self.started:
            process.kill()
            process.wait()

    def start(self, name: str, command: Sequence[str], **env: str) -> Any:
        """Start one, whose words go to a file of its name; Python's need not import torch again."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        if command[0] == sys.executable:
            forked = Program(command[1:], self.folder / f"{name}.out", self.folder / f"{name}.err", env)
            self.started.append(forked)
            return forked
        with (self.folder / f"{name}.out").open("ab") as out, (self.folder / f"{name}.err").open("ab") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, env=env)
        self.started.append(process)
        return process

    def said(self, name: str) -> list[str]:
        """The lines of its standard error."""
        return (self.folder / f"{name}.err").read_text().splitlines()

    def ended(self, name: str, process: subprocess.Popen[bytes], status: int = 0) -> None:
        """Wait for its end, which must be this one."""
        ended_with = process.wait(timeout=PATIENCE)
        assert ended_with == status, (name, ended_with, self.said(name)[-12:])
