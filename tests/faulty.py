"""`twophase` with faults: this process kills, stops or holds itself at a given moment, and writes down what it does.

    python tests/faulty.py [WORD ...] -- train ...

    events=FILE                append a line of JSON for each round that counts, each hold and each fault, with its time
    connect=SECONDS            how long to wait for the first connection to a lighthouse
    unpickle=never             fail where anything is unpickled
    grace=SECONDS              how long a process may live on after its torchrun
    cd=FOLDER                  begin there, as on a machine with other files
    net=FILE                   begin in that network namespace, as on a machine of its own
    ACTION@MOMENT:COUNT        do this when the moment comes for the COUNT-th time

Actions: `kill` and `stop` (SIGKILL, SIGSTOP to itself), `kill=FILE` (only if the file is not there yet), `hold=FILE`
(wait until it exists), `pace=FILE` (from now on each inner step takes a while, until it exists), `touch=FILE`.

Nothing in the product knows of this: the moments are functions of it that are wrapped here.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d
from torchft.process_group import ProcessGroupGloo

import namespaces
from twophase.base import leash
from twophase.diloco.engine import DiLoCo
from twophase.elastic import healing, torchft
from twophase.elastic import parts as torchft_parts
from twophase.runs.folder import ROUNDS, RunFolder
from twophase.training.trainer import Trainer

SETTLE = 0.3
"""Seconds after a hold: replicas that have come meanwhile are known to the lighthouse by then."""
PACE = 0.05

MOMENTS = {
    "meeting": "when the processes of a group know the first one's address, before they connect",
    "met": "when they have connected, before the first collective",
    "inner": "before an inner step",
    "under way": "before an inner step while a reduction is under way",
    "reduce": "after the quorum and the roll call, before the reduction",
    "vote": "after the reduction, before the vote",
    "counted": "after the vote, before the outer step",
    "giving": "when half of a state has been given to a replica that came late",
    "taking": "before a replica that came late reads the state that it is offered",
    "up": "when the lighthouse knows of this process",
    "healed": "when another's state has been loaded",
}


class Faults:
    """What is to be done when."""

    def __init__(self) -> None:
        self.due: dict[tuple[str, int], list[tuple[str, str]]] = {}
        self.seen: dict[str, int] = {}
        self.events: Path | None = None
        self.pace_until: Path | None = None

    def add(self, word: str) -> None:
        """One word of the command line."""
        name, _, value = word.partition("=")
        if name == "events":
            self.events = Path(value)
        elif name == "connect":
            defaults = torchft.TorchFT.__init__.__kwdefaults__
            assert defaults is not None
            defaults["connect_timeout"] = float(value)
        elif name == "grace":
            leash.GRACE = float(value)
        elif name == "cd":
            os.chdir(value)
        elif name == "net":
            namespaces.enter(value)
        elif name == "unpickle":
            pickle.load = pickle.loads = pickle.Unpickler = distributed_c10d._unpickler = None  # type: ignore[assignment]
        else:
            action, _, moment = word.rpartition("@")
            moment, _, count = moment.partition(":")
            assert moment in MOMENTS, f"{word}: no such moment"
            what, _, file = action.partition("=")
            self.due.setdefault((moment, int(count)), []).append((what, file))

    def tell(self, what: str, number: int = 0) -> None:
        """Write an event down; the line is whole even if a kill follows."""
        if self.events is not None:
            line = json.dumps({"what": what, "number": number, "time": time.time(), "process": os.getpid()})
            with self.events.open("ab", buffering=0) as file:
                file.write(f"{line}\n".encode())

    def at(self, moment: str) -> None:
        """The moment has come."""
        count = self.seen[moment] = self.seen.get(moment, 0) + 1
        for what, file in self.due.pop((moment, count), []):
            self.tell(f"{what} at {moment}", count)
            self.act(what, Path(file))
        if moment == "inner" and self.pace_until is not None and not self.pace_until.exists():
            time.sleep(PACE)

    def act(self, what: str, file: Path) -> None:
        """Do it."""
        if what == "kill":
            if file == Path() or self.first(file):
                os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)  # another thread may take the signal, somewhat later
        elif what == "hold":
            while not file.exists():
                time.sleep(0.01)
            time.sleep(SETTLE)
        elif what == "pace":
            self.pace_until = file
        elif what == "touch":
            file.touch()
        else:
            raise AssertionError(f"no such action: {what}")

    def first(self, file: Path) -> bool:
        """Whether this process is the one that makes the file."""
        try:
            file.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def wrap(owner: Any, name: str, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None):
    """Call something before a function with its arguments, or after it with its result."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        if before is not None:
            before(*args, **options)
        result = original(*args, **options)
        if after is not None:
            after(result)
        return result

    setattr(owner, name, wrapped)


def prepare(faults: Faults) -> None:
    """Wrap what marks the moments."""
    give = healing._streaming_save
    torchft._HEAL_MARGIN = 2.0  # timeouts that have to expire may be shorter then

    def step(trainer: Trainer) -> None:
        faults.at("inner")
        if trainer.engine.under_way:
            faults.at("under way")

    def by_halves(state: Any, stream: Any) -> None:
        buffer = io.BytesIO()
        give(state, buffer)
        data = buffer.getvalue()
        stream.write(data[: len(data) // 2])
        stream.flush()
        faults.at("giving")
        stream.write(data[len(data) // 2 :])

    def log(_: Any, name: str, line: Any) -> None:
        if name == ROUNDS:
            faults.tell("round", line["round"])

    wrap(Trainer, "inner_step", before=step)
    wrap(distributed_c10d, "_new_process_group_helper", before=lambda *_, **__: faults.at("meeting"))
    wrap(distributed_c10d, "_update_default_pg", after=lambda _: faults.at("met"))
    wrap(ProcessGroupGloo, "configure", before=lambda *_, **__: faults.at("meeting"))
    wrap(DiLoCo, "_reduce", before=lambda *_: faults.at("reduce"))
    wrap(
        torchft.TorchFT,
        "commit",
        before=lambda group: faults.at("vote") if group._failure is None else None,
        after=lambda counted: faults.at("counted") if counted else None,
    )
    healing._streaming_save = by_halves
    wrap(healing, "_streaming_load", before=lambda *_, **__: faults.at("taking"))
    wrap(torchft_parts, "manager", after=lambda _: faults.at("up"))
    wrap(torchft.TorchFT, "_take", after=lambda _: faults.at("healed"))
    wrap(RunFolder, "log", before=log)


if __name__ == "__main__":
    cut = sys.argv.index("--")
    made = Faults()
    for word in sys.argv[1:cut]:
        made.add(word)
    prepare(made)
    made.tell("begin")
    sys.argv = ["twophase", *sys.argv[cut + 1 :]]
    from twophase.__main__ import run

    run()
