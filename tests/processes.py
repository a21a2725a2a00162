"""A lighthouse for processes that a test starts and kills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

PATIENCE = 100.0
"""Seconds that a test waits for a process's end, on a machine that has much else to do."""


@contextmanager
def lighthouse(replicas: int) -> Iterator[str]:
    """torchft's, in this process, with a heartbeat timeout of a second; its URL."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        "127.0.0.1:0", replicas, join_timeout_ms=30000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    yield f"http://127.0.0.1:{urlsplit(server.address()).port}"
    server.shutdown()
