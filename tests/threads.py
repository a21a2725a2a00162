"""Ranks played by threads, for code that needs no more of them than the exchange of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from twophase.diloco.group import ProcessGroup

PATIENCE = 20.0
"""Seconds until a wait in vain ends."""


class Member(ProcessGroup):
    """One of several ranks; refuses collectives of threads that a rank has started."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.sharded = rank, len(shared), False
        self._shared, self._barrier = shared, barrier

    def gather_bytes(self, data: bytes) -> list[bytes]:
        assert threading.current_thread().name.startswith("member-"), "a collective in another thread"
        self._shared[self.rank] = data
        self._barrier.wait(PATIENCE)
        values = list(self._shared)
        self._barrier.wait(PATIENCE)
        return values


def together(size: int, work: Callable[[Member], Any]) -> list[Any]:
    """Do the work of several ranks; return each one's result, or its exception."""
    shared: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size, thread_name_prefix="member-") as pool:
        futures = [pool.submit(work, Member(rank, shared, barrier)) for rank in range(size)]
        return [future.exception() or future.result() for future in futures]
