"""Several processes: kills and suspensions under torchrun, and of a sweep's worker."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from faults import calls
from faults.calls import Fault
from faults.children import Child, Ended, ended, start
from faults.interruptions import bad_end, worker_pids
from faults.scenes import Cases, Scene, contents, emptied
from forked import places

GROUPS = {
    "killed at a call": 5,
    "killed at a time": 3,
    "suspended": 2,
    "suspended for long": 1,
    "worker suspended": 1,
}
"""Shares of the cases."""


class Groups(Cases):
    """Plays processes under torchrun, of which a fault meets one."""

    def play(self, name: str, seed: int) -> dict[str, Any]:
        """Play a case; returns what was done (`how`), and `failed` where it did not end well."""
        rng = random.Random(seed)
        if name == "worker suspended":
            return self._worker(rng)
        scene = self.stage.scene(f"train {rng.choice(('plain', 'streaming'))}")
        wanted, out = self._wanted(scene), emptied(self.place / "out")
        victim, options, first = rng.randrange(2), ["--sync-timeout", "30", "--start-timeout", "10"], {}
        how = f"{scene.name}, rank {victim} {name}"
        if name == "killed at a call":
            fault = Fault(out, rng.choice((calls.KILL, calls.HALF)), rng.randint(1, 60 if victim else 190))
            first[victim] = lambda: calls.install(fault)
            how += f" {fault.number}"
        members = self._start(
            scene, out, [*options, *(["--sync-timeout", "2"] if name == "suspended for long" else [])], first
        )
        if name != "killed at a call":
            time.sleep(rng.uniform(0.1, 1.5))
            members[victim].send_signal(signal.SIGKILL if name == "killed at a time" else signal.SIGSTOP)
        if name == "suspended":
            time.sleep(rng.uniform(0.1, 1.5))
            members[victim].send_signal(signal.SIGCONT)
        other = self._end(members[1 - victim], 1 - victim)
        members[victim].kill()
        self._end(members[victim], victim)
        failed = f"the other: {other.fault}: {other.err[-600:]}" if other.fault else ""
        if not failed and name == "suspended" and other.status:
            failed = f"a short suspension ends the run: {other.err[-600:]}"
        if not failed:
            ends = [self._end(child, rank) for rank, child in enumerate(self._start(scene, out, options, {}))]
            failed = "".join(bad_end(end, out, wanted) for end in ends)
        return {"how": how, "failed": failed}

    def _worker(self, rng: random.Random) -> dict[str, Any]:
        """Suspend a sweep's worker; the sweep waits, or its others go on, and nothing is done twice."""
        scene = self.stage.scene("sweep 2")
        wanted, out, log = self.stage.wanted(scene), emptied(self.place / "out"), self.place / "log"
        child = start(scene.words(out), log, scene.first)
        time.sleep(rng.uniform(0.3, 1.5))
        pids = worker_pids(out)
        for pid in pids[:1]:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0.2, 2.0))
        for pid in pids[:1]:
            os.kill(pid, signal.SIGCONT)
        return {"how": f"{len(pids)} workers, one suspended", "failed": bad_end(ended(child, log), out, wanted)}

    def _wanted(self, scene: Scene) -> dict[str, bytes]:
        """The outputs of an undisturbed group of two."""
        pair = Scene(f"group {scene.name}", scene.words)
        if pair.name not in self.stage.known_outputs:
            out = emptied(self.place / "counted")
            ends = [self._end(child, rank) for rank, child in enumerate(self._start(scene, out, [], {}))]
            assert [end.status for end in ends] == [0, 0], ends
            self.stage.known_outputs[pair.name] = contents(out)
        return self.stage.known_outputs[pair.name]

    def _start(
        self, scene: Scene, out: Path, options: Sequence[str], first: dict[int, Callable[[], Any]]
    ) -> list[Child]:
        words = [*scene.words(out), *options]
        return [
            start(words, self.place / f"rank-{rank}", first.get(rank), place) for rank, place in enumerate(places(2))
        ]

    def _end(self, child: Child, rank: int) -> Ended:
        return ended(child, self.place / f"rank-{rank}")
