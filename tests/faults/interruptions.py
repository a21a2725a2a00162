"""Kills, power cuts, failing calls and failing allocations: afterwards the same command ends as an undisturbed one."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import calls
from faults.calls import Allocations, Fault
from faults.children import WORKERS, Ended, ended, start
from faults.scenes import Scene, Stage, differences, prepare_pictures, temporary

STUDY = "study period_criteria"
SCENES = {
    "train plain": 5,
    "train streaming": 3,
    "train probing": 2,
    "tokens": 1,
    "task digits": 1,
    "tune digits": 1,
    "sweep 1": 3,
    "sweep 2": 3,
    "data bytes": 2,
    "data bpe:300": 2,
    STUDY: 1,
    "page explore": 1,
    "page report": 1,
}
"""Shares of the cases."""


def cases(seed: int, count: int, test: str) -> list[tuple[str, int]]:
    """Return the scenes and seeds of the cases of a test."""
    names, shares = list(SCENES), list(SCENES.values())
    rng = random.Random(f"{test} {seed}")
    return [(rng.choices(names, shares)[0], rng.randrange(1 << 30)) for _ in range(count)]


class Interruptions:
    """Plays the cases of one process.

    Args:
        stage: the texts and finished outputs.
        place: a folder of its own for the outputs.
    """

    def __init__(self, stage: Stage, place: Path) -> None:
        self.stage, self.place = stage, place
        self._counts: dict[tuple[str, str], int] = {}
        self._seconds: dict[str, float] = {}

    def play(self, test: str, name: str, seed: int) -> dict[str, Any]:
        """Play a case; returns what was done (`how`), and `failed` where it did not end well."""
        if name == STUDY:
            prepare_pictures(name.partition(" ")[2])
        scene = self.stage.scene(name)
        out = self.place / "out"
        wanted = self.stage.wanted(scene)
        rng = random.Random(seed)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        how, failed = getattr(self, f"_{test}")(scene, out, rng)
        if not failed:
            end = scene.run(out, self.place / "log")
            failed = bad_end(end, out, wanted, refusal=test == "power")
        return {"how": how, "failed": failed}

    def _kills(self, scene: Scene, out: Path, rng: random.Random) -> tuple[str, str]:
        """SIGKILL at a call, in the middle of a write or at a time, once to three times."""
        parts = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            if rng.random() < 0.6:
                kind = rng.choice((calls.KILL, calls.HALF))
                fault = Fault(out, kind, rng.randint(1, self._count(scene, calls.KILL)))
                if scene.name.startswith("sweep") and rng.random() < 0.7:
                    WORKERS[:] = [lambda fault=fault: calls.install(fault)]  # in the first worker that is started
                    child = start(scene.words(out), self.place / "log", scene.first)
                else:
                    child = self._start_with(fault, scene, out, steps=False)
                WORKERS.clear()
                parts.append(f"{kind} at call {fault.number}")
                end = ended(child, self.place / "log")
            else:
                child = start(scene.words(out), self.place / "log", scene.first)
                seconds = rng.uniform(0, 1.2) * self._time(scene)
                parts.append(f"kill after {seconds:.3f} s")
                time.sleep(seconds)
                child.kill()
                end = ended(child, self.place / "log")
            _await_workers(out)
            if end.status not in (0, -signal.SIGKILL):
                return "; ".join(parts), f"status {end.status}: {end.err[-600:]}"
        return "; ".join(parts), ""

    def _power(self, scene: Scene, out: Path, rng: random.Random) -> tuple[str, str]:
        """Writes that were not synced are gone, in a part of the cases renames in unsynced folders, too."""
        count, late = self._count(scene, calls.POWER), rng.random() < 0.5
        fault = Fault(out, calls.POWER, rng.randint(1, count), rng.randrange(1 << 20), late)
        how = f"power cut at call {fault.number} of {count}, seed {fault.seed}, renames {'late' if late else 'at once'}"
        cut = out.with_name("out.cut")
        shutil.rmtree(cut, ignore_errors=True)
        end = ended(self._start_with(fault, scene, out), self.place / "log")
        if cut.exists():
            shutil.rmtree(out)
            cut.rename(out)
        return how, "" if end.status in (0, -signal.SIGKILL) else f"status {end.status}: {end.err[-600:]}"

    def _io_errors(self, scene: Scene, out: Path, rng: random.Random) -> tuple[str, str]:
        """One call fails, or all from then on, or a write is short and the next ones fail: one message, status 1."""
        kind = rng.choice((calls.ERROR, calls.FULL, calls.SHORT))
        fault = Fault(out, kind, rng.randint(1, self._count(scene, calls.ERROR)), rng.randrange(1 << 20))
        how = f"{kind} at call {fault.number}, seed {fault.seed}"
        end = ended(self._start_with(fault, scene, out), self.place / "log")
        return how, end.fault and f"{end.fault}: {end.err[-900:]}"

    def _memory(self, scene: Scene, out: Path, rng: random.Random) -> tuple[str, str]:
        """An allocation of torch's fails."""
        number = rng.randint(1, self._count(scene, "memory"))

        def whole() -> int:
            with Allocations(number):
                return scene.whole(out)

        end = self._call(whole)
        if end.status == 0:  # it went on in smaller micro-batches, which round otherwise
            shutil.rmtree(out)
            out.mkdir()
        return f"allocation {number} fails", end.fault and f"{end.fault}: {end.err[-900:]}"

    def _start_with(self, fault: Fault, scene: Scene, out: Path, *, steps: bool = True) -> Any:
        def whole() -> int:
            calls.install(fault)
            return scene.whole(out) if steps else Scene("", scene.words, None, scene.first).whole(out)

        return self._child(whole)

    def _child(self, whole: Callable[[], int]) -> Any:
        from faults.children import Child

        paths = [(self.place / "log").with_suffix(ending) for ending in (".out", ".err")]
        for path in paths:
            path.unlink(missing_ok=True)
        return Child(whole, *paths)

    def _call(self, whole: Callable[[], int]) -> Ended:
        return ended(self._child(whole), self.place / "log")

    def _count(self, scene: Scene, kind: str) -> int:
        """Calls, or allocations, of an undisturbed command."""
        what = "memory" if kind == "memory" else "calls"
        if (scene.name, what) not in self._counts:
            out, note = self.place / "counted", self.place / "count"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()

            def whole() -> int:
                fault, mode = Fault(out), Allocations(0)
                undo = calls.install(fault)
                if what == "memory":
                    with mode:
                        status = scene.whole(out)
                else:
                    status = scene.whole(out)
                undo()
                note.write_text(str(mode.count if what == "memory" else fault.count))
                return status

            end = self._call(whole)
            assert end.status == 0, (scene.name, end)
            self._counts[scene.name, what] = max(1, int(note.read_text()))
        return self._counts[scene.name, what]

    def _time(self, scene: Scene) -> float:
        if scene.name not in self._seconds:
            out = self.place / "counted"
            shutil.rmtree(out, ignore_errors=True)
            began = time.monotonic()
            scene.run(out, self.place / "log")
            self._seconds[scene.name] = time.monotonic() - began
        return self._seconds[scene.name]


def bad_end(end: Ended, out: Path, wanted: dict[str, bytes], *, refusal: bool = False) -> str:
    """Say why a repeated command has not ended as an undisturbed one."""
    if end.status != 0 and refusal and not end.fault:
        return ""
    if end.status != 0:
        return f"repeated: {end.fault or f'status {end.status}'}: {end.err[-900:]}"
    different = differences(out, wanted)
    if different:
        return f"byte differences: {different}"
    remains = temporary(out)
    return f"temporary files: {', '.join(remains[:4])}" if remains else ""


def _await_workers(out: Path) -> None:
    """Wait until the workers of a killed sweep have ended, as their leash demands."""
    end = time.monotonic() + 20
    while worker_pids(out):
        if time.monotonic() > end:
            raise RuntimeError(f"workers of a killed sweep go on: {worker_pids(out)}")
        time.sleep(0.02)


def worker_pids(out: Path) -> list[int]:
    """Processes that have a log of this folder open."""
    log = str(out / "worker-")
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "fd" / "1").readlink()).startswith(log) and "Z" not in _state(process):
                pids.append(int(process.name))
        except OSError:
            continue
    return pids


def _state(process: Path) -> str:
    return (process / "stat").read_text().rpartition(")")[2].split()[0]
