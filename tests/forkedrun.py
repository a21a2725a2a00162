"""torchrun whose workers are forked from it: they need not import torch again."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler


def _work(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Have what a new process has: its session, default signals, and no open file of torchrun's but the output."""
    os.setsid()
    os.closerange(3, 1024)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = list(command[2:])  # behind the interpreter and -u
    runpy.run_path(sys.argv[0], run_name="__main__")


def _start(command: Sequence[str], env: Mapping[str, str]) -> Any:
    """In place of `subprocess.Popen`, whose `pid`, `poll` and `wait` it has."""
    process: Any = multiprocessing.get_context("fork").Process(target=_work, args=(command, env))
    process.start()
    return process._popen


if __name__ == "__main__":
    SubprocessHandler._popen = staticmethod(_start)  # type: ignore[assignment]
    run.main()
