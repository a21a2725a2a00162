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
from faults.children import WORKERS, Ended, begin, ended, start
from faults.scenes import Cases, Scene, Stage, differences, emptied, prepare_pictures, temporary
from processes import state_of

STUDY = "study period_criteria"
SCENES = {
    "train plain": 5,
    "train streaming": 3,
    "train auto": 2,
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


class Interruptions(Cases):
    """Plays a command that is interrupted, and then repeated."""

    def __init__(self, stage: Stage, place: Path) -> None:
        super().__init__(stage, place)
        self._counts: dict[str, tuple[int, int]] = {}

    def play(self, test: str, name: str, seed: int) -> dict[str, Any]:
        """Play a case; returns what was done (`how`), and `failed` where it did not end well."""
        if name == STUDY:
            prepare_pictures(name.partition(" ")[2])
        scene = self.stage.scene(name)
        wanted, out = self.stage.wanted(scene), emptied(self.place / "out")
        how, failed = getattr(self, f"_{test}")(scene, out, random.Random(seed))
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
                fault = Fault(out, kind, rng.randint(1, self._count(scene)[0]))
                if scene.name.startswith("sweep") and rng.random() < 0.7:
                    WORKERS[:] = [lambda fault=fault: calls.install(fault)]  # in the first worker that is started
                    child = start(scene.words(out), self.place / "log", scene.first)
                else:
                    child = self._start_with(fault, scene, out, steps=False)
                WORKERS.clear()
                parts.append(f"{kind} at call {fault.number}")
            else:
                child = start(scene.words(out), self.place / "log", scene.first)
                seconds = rng.uniform(0, 1.2) * self.stage.seconds[scene.name]
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
        count, late = self._count(scene)[0], rng.random() < 0.5
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
        fault = Fault(out, kind, rng.randint(1, self._count(scene)[0]), rng.randrange(1 << 20))
        how = f"{kind} at call {fault.number}, seed {fault.seed}"
        end = ended(self._start_with(fault, scene, out), self.place / "log")
        return how, end.fault and f"{end.fault}: {end.err[-900:]}"

    def _memory(self, scene: Scene, out: Path, rng: random.Random) -> tuple[str, str]:
        """An allocation of torch's fails."""
        number = rng.randint(1, self._count(scene)[1])

        def whole() -> int:
            with Allocations(number):
                return scene.whole(out)

        end = self._call(whole)
        if end.status == 0:  # it went on in smaller micro-batches, which round otherwise
            emptied(out)
        return f"allocation {number} fails", end.fault and f"{end.fault}: {end.err[-900:]}"

    def _start_with(self, fault: Fault, scene: Scene, out: Path, *, steps: bool = True) -> Any:
        def whole() -> int:
            calls.install(fault)
            return scene.whole(out) if steps else Scene("", scene.words, None, scene.first).whole(out)

        return begin(whole, self.place / "log")

    def _call(self, whole: Callable[[], int]) -> Ended:
        return ended(begin(whole, self.place / "log"), self.place / "log")

    def _count(self, scene: Scene) -> tuple[int, int]:
        """Calls and allocations of an undisturbed command."""
        if scene.name not in self._counts:
            out, note = emptied(self.place / "counted"), self.place / "count"

            def whole() -> int:
                fault = Fault(out)
                undo = calls.install(fault)
                with Allocations(0) as allocations:
                    status = scene.whole(out)
                undo()
                note.write_text(f"{fault.count} {allocations.count}")
                return status

            end = self._call(whole)
            assert end.status == 0, (scene.name, end)
            count, allocations = map(int, note.read_text().split())
            self._counts[scene.name] = max(1, count), max(1, allocations)
        return self._counts[scene.name]


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
            if str((process / "fd" / "1").readlink()).startswith(log) and state_of(int(process.name)) != "Z":
                pids.append(int(process.name))
        except OSError:
            continue
    return pids
