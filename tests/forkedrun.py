"""torchrun whose workers are forked from it: they need not import torch again.

A worker has what a new process has: default signals, its own session, and no open file of torchrun's but its output.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from forked import Signalled


class Worker(Signalled):
    """In place of the `subprocess.Popen` of a worker."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _work(command, env)

    def poll(self) -> int | None:
        """Its exit status if it has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, seconds: float) -> None:
        """Wait for its end, but no longer."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.05)


def _work(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        os.closerange(3, 1024)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        assert command[:2] == (sys.executable, "-u")
        sys.argv = list(command[2:])
        runpy.run_path(command[2], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    SubprocessHandler._popen = Worker  # type: ignore[assignment]
    run.main()
