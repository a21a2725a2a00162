"""What the fork server of `forked.py` loads first: it goes on when a process that asks it for another is killed.

The standard library's server accepts a request and then reads it. A process that is killed between the two, as tests
kill commands that are starting workers, leaves an end of file there, of which the server dies and every later test of
its worker with it. It survives a connection that was aborted, which is what this is.
"""

from __future__ import annotations

import errno
from multiprocessing import reduction
from typing import Any

_receive: Any = reduction.recvfds


def _received(connection: Any, size: int) -> list[int]:
    try:
        return _receive(connection, size)
    except EOFError as error:
        raise ConnectionAbortedError(errno.ECONNABORTED, "the process that asked for another has gone") from error


reduction.recvfds = _received
