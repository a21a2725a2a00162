"""`twophase` with faults: this process kills, stops or holds itself at a given moment, and writes down what it does.

    python tests/faulty.py [WORD ...] -- train ...

    unpickle=never             fail where anything is unpickled
    grace=SECONDS              how long a process may live on after its torchrun
    cd=FOLDER                  begin there, as on a machine with other files
    ACTION@MOMENT:COUNT        do this when the moment comes for the COUNT-th time

Actions: `kill` and `stop` (SIGKILL, SIGSTOP to itself), `hold=FILE` (wait until it exists).

Nothing in the product knows of this: the moments are functions of it that are wrapped here.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from twophase.base import leash
from twophase.diloco.fragment import Fragment
from twophase.training.trainer import Trainer

MOMENTS = {
    "meeting": "when the processes of a group know the first one's address, before they connect",
    "met": "when they have connected, before the first collective",
    "inner": "before an inner step",
    "reduce": "before a reduction",
}


class Faults:
    """What is to be done when."""

    def __init__(self) -> None:
        self.due: dict[tuple[str, int], tuple[str, str]] = {}
        self.seen: dict[str, int] = {}

    def add(self, word: str) -> None:
        """One word of the command line."""
        name, _, value = word.partition("=")
        if name == "grace":
            leash.GRACE = float(value)
        elif name == "cd":
            os.chdir(value)
        elif name == "unpickle":
            pickle.load = pickle.loads = pickle.Unpickler = distributed_c10d._unpickler = None  # type: ignore[assignment]
        else:
            action, _, moment = word.rpartition("@")
            moment, _, count = moment.partition(":")
            assert moment in MOMENTS, f"{word}: no such moment"
            what, _, file = action.partition("=")
            self.due[moment, int(count)] = what, file

    def at(self, moment: str) -> None:
        """The moment has come."""
        count = self.seen[moment] = self.seen.get(moment, 0) + 1
        what, file = self.due.pop((moment, count), ("", ""))
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)  # another thread may take the signal, somewhat later
        elif what == "hold":
            while not Path(file).exists():
                time.sleep(0.01)


def wrap(owner: Any, name: str, before: Callable[[], Any] | None = None, after: Callable[[], Any] | None = None):
    """Call something before or after a function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        if before is not None:
            before()
        result = original(*args, **options)
        if after is not None:
            after()
        return result

    setattr(owner, name, wrapped)


def prepare(faults: Faults) -> None:
    """Wrap what marks the moments."""
    wrap(Trainer, "inner_step", before=lambda: faults.at("inner"))
    wrap(distributed_c10d, "_new_process_group_helper", before=lambda: faults.at("meeting"))
    wrap(distributed_c10d, "_update_default_pg", after=lambda: faults.at("met"))
    wrap(Fragment, "launch", before=lambda: faults.at("reduce"))


if __name__ == "__main__":
    cut = sys.argv.index("--")
    made = Faults()
    for word in sys.argv[1:cut]:
        made.add(word)
    prepare(made)
    sys.argv = ["twophase", *sys.argv[cut + 1 :]]
    from twophase.__main__ import run

    run()
