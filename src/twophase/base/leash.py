"""The end of a process whose launcher has been killed; torchrun's workers would else train on, and hold its ports."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

GRACE = 5.0
"""Seconds to reach a round's end and a checkpoint; what comes later is lost since the checkpoint before."""
_POLL = 0.5


def follow_torchrun() -> None:
    """End this process soon after the torchrun agent that started it; without torchrun, do nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_follow, args=(os.getppid(),), daemon=True, name="twophase leash").start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:  # an orphan has another parent; a pipe's end would need torchrun's help
        time.sleep(_POLL)
    with suppress(OSError):  # nothing may read any more
        os.write(2, b"twophase: torchrun has been killed; this process ends, too. Repeat the command to resume\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)  # not by a signal: a thread that waits for a peer in C code handles none
