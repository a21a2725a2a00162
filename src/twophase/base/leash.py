"""The end of a process whose launcher has been killed; torchrun's workers would else train on, and hold its ports."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

GRACE = 5.0
"""Seconds to reach a round's end and a checkpoint; what comes later is lost since the checkpoint before."""
_POLL = 0.5


def follow_torchrun() -> None:
    """End this process soon after the torchrun agent that started it; without torchrun, do nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()  # before the look at it: the agent may be killed at any moment
        parent = parent if _has_agent(parent) else -1
        threading.Thread(target=_follow, args=(parent,), daemon=True, name="twophase leash").start()


def _has_agent(process: int) -> bool:
    """Tell whether a process or an ancestor of it may be an agent; true where they cannot be seen.

    An agent that was killed before this process could look is no ancestor any more: init or the like has adopted this
    process. The parent's number is no evidence: an agent may be process 1 of a container, and a script may be in
    between.
    """
    seen = False
    try:
        while process:
            entry = Path(f"/proc/{process}")
            if _may_be_agent(entry):
                return True
            process, seen = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]), True
    except (OSError, ValueError):
        return True
    return not seen  # a parent outside of this container has no number


def _may_be_agent(entry: Path) -> bool:
    """Tell whether a process has torch loaded, or, where that is hidden, as init's is, may be a program of Python."""
    try:
        return b"libtorch" in (entry / "maps").read_bytes()
    except PermissionError:
        command = (entry / "cmdline").read_bytes()
        return b"python" in command or b"torch" in command


def _follow(parent: int) -> None:
    while os.getppid() == parent:  # an orphan has another parent; a pipe's end would need torchrun's help
        time.sleep(_POLL)
    with suppress(OSError):  # nothing may read any more
        os.write(2, b"twophase: torchrun has been killed; this process ends, too. Repeat the command to resume\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)  # not by a signal: a thread that waits for a peer in C code handles none
