"""Several processes: kills and suspensions under torchrun, of replicas that come and go, and of a sweep's worker."""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import elastic
import textmaker
from elastic import HEARTBEAT, check_rounds
from faults import calls
from faults.calls import Fault
from faults.children import Child, Ended, ended, start
from faults.interruptions import bad_end, worker_pids
from faults.scenes import Cases, Scene, Stage, contents, emptied
from forked import places
from twophase.base.config import dump_yaml, with_values
from twophase.runs.folder import RunFolder
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training.train import train

PERIOD, ROUNDS, HOLD = 3, 16, 45
"""Rounds between restarts, rounds, and the inner step at which survivors wait for the one that was killed."""
GROUPS = {
    "killed at a call": 5,
    "killed at a time": 3,
    "suspended": 2,
    "suspended for long": 1,
    "worker suspended": 1,
}
ELASTIC = {"one of two": 4, "one of three": 4, "two of three": 2, "suspended": 2, "suspended for long": 2}
"""Shares of the cases."""
MOMENTS = ("inner", "reduce", "vote", "counted")


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


class _Run(elastic.Run):
    """Replicas in forked children of this process."""

    def start(self, name: str, command: Sequence[str], **env: str) -> Any:
        """Start the driver that command names."""

        def call() -> int:
            os.environ.update(env, OMP_NUM_THREADS="1")
            sys.argv = list(command[1:])
            runpy.run_path(command[1], run_name="__main__")
            return 0

        child = Child(call, self.folder / f"{name}.out", self.folder / f"{name}.err")
        self.started.append(child)  # type: ignore[arg-type]
        return child


class Elastic(Cases):
    """Plays replicas that come and go; measures how long the survivors of a kill stand still."""

    def __init__(self, stage: Stage, place: Path) -> None:
        super().__init__(stage, place)
        values = {"steps": 4 * ROUNDS, "inner_steps": 4, "checkpoint_every": 3, "outer.restart": str(PERIOD)}
        self.config = textmaker.small_run(stage.text, 8, **values)

    def play(self, name: str, seed: int) -> dict[str, Any]:
        """Play a case; returns also `stalls`, in seconds."""
        rng = random.Random(seed)
        size = 3 if "three" in name else 2
        victims = list(range(1, size)) if name.startswith("two") else [1]
        moment, count = rng.choice(MOMENTS), rng.randint(3, 8)
        moment_text = f"{moment}:{4 * count + rng.randint(1, 3) if moment == 'inner' else count}"
        suspended = name.startswith("suspended")
        how = f"{'stop' if suspended else 'kill'}@{moment_text}"
        config = with_values(self.config, {"replicas": size})
        whole = self._undisturbed(config, size)
        folder = emptied(self.place / "elastic")
        (folder / "config.yaml").write_text(dump_yaml(config))
        light, url = self._lighthouse(folder)
        options = ["--sync-timeout", "6"] if suspended else []
        try:
            with _Run(folder / "replicas", folder / "config.yaml", url, *options, alone=size) as run:
                survivors = [number for number in range(size) if number not in victims]
                first = {n: run.replica(n, f"hold=back@inner:{HOLD}") for n in survivors}
                harmed = {n: run.replica(n, how) for n in victims}
                stalls = []
                if suspended:
                    (process,) = harmed.values()
                    elastic.until("stopped", lambda: elastic.stopped(process) or process.poll() is not None)
                    time.sleep(rng.uniform(0.2, 0.5) if name == "suspended" else HEARTBEAT + rng.uniform(1, 3))
                    elastic.wake(process)
                    run.touch("back")
                else:
                    for number, process in harmed.items():
                        run.ended(str(number), process, -signal.SIGKILL)
                    for survivor in survivors:
                        elastic.until("a round after it", lambda s=survivor: self._stall(run, victims, s) is not None)
                        stalls.append(self._stall(run, victims, survivor))
                    harmed = {number: run.replica(number, f"touch=again-{number}@up:1") for number in victims}
                    for number in victims:
                        elastic.until("it is up", (run.folder / f"again-{number}").exists)
                    run.touch("back")
                for number, process in (first | harmed).items():
                    run.ended(str(number), process)
                always = range(size) if name == "suspended" else survivors
                check_rounds(run, range(size), always=always, like=whole, period=PERIOD)
        except AssertionError as error:
            return {"how": how, "failed": f"{str(error)[-1200:]}"}
        finally:
            light.kill()
            light.wait()
        return {"how": how, "failed": "", "stalls": stalls}

    def _stall(self, run: _Run, victims: Sequence[int], survivor: int) -> float | None:
        """Seconds from the last kill to a survivor's next round that counts; None before it."""
        killed = max(e["time"] for number in victims for e in run.events(number) if e["what"].startswith("kill"))
        later = (e["time"] for e in run.events(survivor) if e["what"] == "round" and e["time"] > killed)
        return next((then - killed for then in later), None)

    def _undisturbed(self, config: TrainConfig, size: int) -> Path:
        path = self.place / f"undisturbed-{size}"
        if not (path / "summary.json").exists():
            with RunFolder.claim(path, config) as folder:
                train(LanguageTask(config), config, folder)
        return path

    def _lighthouse(self, folder: Path) -> tuple[Child, str]:
        """Start a lighthouse in a child: this process, which forks, must have no threads."""

        def call() -> int:
            with elastic.lighthouse() as url:
                (folder / "url.part").write_text(url)
                (folder / "url.part").rename(folder / "url")
                signal.pause()
            return 0

        child = Child(call, folder / "light.out", folder / "light.err")
        elastic.until("a lighthouse", (folder / "url").exists)
        return child, (folder / "url").read_text()
