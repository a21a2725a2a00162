"""Processes played by threads, for code that needs no more of them than the exchange of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from twophase.diloco.comm import SingleProcess

PATIENCE = 20.0
"""Seconds until a wait in vain ends."""


class Member(SingleProcess):
    """One of several processes; refuses collectives of threads that a process has started."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def exchange_bytes(self, sent: bytes, *, in_replica: bool = False) -> list[bytes]:
        """As of a process group whose processes are replicas."""
        assert threading.current_thread().name.startswith("member-"), "a collective in another thread"
        if in_replica:
            return [sent]
        self._shared[self.rank] = sent
        self._barrier.wait(PATIENCE)
        values = list(self._shared)
        self._barrier.wait(PATIENCE)
        return values


def together(size: int, work: Callable[[Member], Any]) -> list[Any]:
    """Do the work of several processes; return each one's result, or its exception."""
    shared: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size, thread_name_prefix="member-") as pool:
        futures = [pool.submit(work, Member(rank, shared, barrier)) for rank in range(size)]
        return [future.exception() or future.result() for future in futures]
