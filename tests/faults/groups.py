"""Several processes: kills and suspensions under torchrun, of replicas that come and go, and of a sweep's worker."""

from __future__ import annotations

import os
import random
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import elastic
from elastic import HEARTBEAT, check_rounds
from faults import calls
from faults.calls import Fault
from faults.children import Child, Ended, ended, start
from faults.interruptions import bad_end, worker_pids
from faults.scenes import Scene, Stage
from twophase.base.config import dump_yaml, with_values
from twophase.runs.folder import RunFolder
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training.train import train

PERIOD, ROUNDS, HOLD = 3, 16, 45
"""Rounds between restarts, rounds, and the inner step at which survivors wait for the one that was killed."""
_FAULTS = {
    "group": {
        "killed at a call": 5,
        "killed at a time": 3,
        "suspended": 2,
        "suspended for long": 1,
        "worker suspended": 1,
    },
    "elastic": {"one of two": 4, "one of three": 4, "two of three": 2, "suspended": 2, "suspended for long": 2},
}
MOMENTS = ("inner", "reduce", "vote", "counted")


def cases(seed: int, count: int, test: str) -> list[tuple[str, int]]:
    """Return the kinds and seeds of the cases."""
    rng, shares = random.Random(f"{test} {seed}"), _FAULTS[test]
    return [(rng.choices(list(shares), list(shares.values()))[0], rng.randrange(1 << 30)) for _ in range(count)]


class Groups:
    """Plays the cases of one process under torchrun.

    Args:
        stage: the texts and finished outputs.
        place: a folder of its own.
    """

    def __init__(self, stage: Stage, place: Path) -> None:
        self.stage, self.place = stage, place

    def play(self, name: str, seed: int) -> dict[str, Any]:
        """Play a case; returns what was done (`how`), and `failed` where it did not end well."""
        rng = random.Random(seed)
        if name == "worker suspended":
            return self._worker(rng)
        scene = self.stage.scene(f"train {rng.choice(('plain', 'streaming'))}")
        wanted, out = self._wanted(scene), self._empty("out")
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
        wanted, out, log = self.stage.wanted(scene), self._empty("out"), self.place / "log"
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
            out = self._empty("counted")
            ends = [self._end(child, rank) for rank, child in enumerate(self._start(scene, out, [], {}))]
            assert [end.status for end in ends] == [0, 0], ends
            from faults.scenes import contents

            self.stage.known_outputs[pair.name] = contents(out)
        return self.stage.known_outputs[pair.name]

    def _start(
        self, scene: Scene, out: Path, options: Sequence[str], first: dict[int, Callable[[], Any]]
    ) -> list[Child]:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(elastic.free_port())}
        place |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "False"}
        words = [*scene.words(out), *options]
        return [
            start(
                words,
                self.place / f"rank-{rank}",
                first.get(rank),
                place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]

    def _end(self, child: Child, rank: int) -> Ended:
        return ended(child, self.place / f"rank-{rank}")

    def _empty(self, name: str) -> Path:
        out = self.place / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        return out


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


class Elastic:
    """Plays the cases of replicas that come and go; measures how long the survivors of a kill stand still.

    Args:
        stage: the texts.
        place: a folder of its own.
    """

    def __init__(self, stage: Stage, place: Path) -> None:
        self.stage, self.place = stage, place
        config = TrainConfig(
            model=ModelConfig(layers=1, hidden_size=8, intermediate_size=8),
            data=DataConfig(corpus=f"file:{stage.text}", sequence_length=8, batch_size=2, validation_windows=4),
            steps=4 * ROUNDS,
            inner_steps=4,
            checkpoint_every=3,
        )
        self.config = with_values(config, {"outer.restart": str(PERIOD), "outer.nesterov": True})

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
        folder = self.place / "elastic"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "config.yaml").write_text(dump_yaml(config))
        light, url = self._lighthouse(folder)
        options = ["--min-replicas", "1"]
        if suspended:
            options += ["--sync-timeout", "6"]
        try:
            with _Run(folder / "replicas", folder / "config.yaml", url, *options) as run:
                survivors = [number for number in range(size) if number not in victims]
                together = {n: [f"touch=here-{n}@up:1"] for n in range(size)}  # else a run may begin with less
                for n, words in together.items():
                    words += [f"hold=here-{other}@up:1" for other in range(size) if other != n]
                first = {n: run.replica(n, *together[n], f"hold=back@inner:{HOLD}") for n in survivors}
                harmed = {n: run.replica(n, *together[n], how) for n in victims}
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
                    harmed = {number: run.replica(number, f"touch=up-{number}@up:1") for number in victims}
                    for number in victims:
                        elastic.until("it is up", (run.folder / f"up-{number}").exists)
                    run.touch("back")
                for number, process in (first | harmed).items():
                    run.ended(str(number), process)
                always = survivors if not suspended or name != "suspended" else range(size)
                check_rounds(run, list(range(size)), always=list(always), like=whole, period=PERIOD)
        except AssertionError as error:
            return {"how": how, "failed": f"{str(error)[-1200:]}"}
        finally:
            light.kill()
            light.wait()
        return {"how": how, "failed": "", "stalls": stalls}

    def _stall(self, run: _Run, victims: Sequence[int], survivor: int) -> float | None:
        """Seconds from the last kill to a survivor's next round that counts; None before it."""
        kills = [
            event["time"] for number in victims for event in run.events(number) if event["what"].startswith("kill")
        ]
        rounds = [
            event["time"] for event in run.events(survivor) if event["what"] == "round" and event["time"] > max(kills)
        ]
        return min(rounds) - max(kills) if rounds else None

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
