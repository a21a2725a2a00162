"""What tests of torchft need besides processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

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
