"""Kills at the n-th call that writes, and a full disk: the command repeated ends as an undisturbed one.

A few calls of each command are tried; `FAULTS=all pytest tests/faults` (`make faults`) tries every one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import textmaker
from forked import Program

TINY = (
    "--model.layers 1 --model.hidden-size 8 --model.intermediate-size 8 --data.sequence-length 8 --data.batch-size 2 "
    "--data.validation-windows 4 --inner-steps 2 --checkpoint-every 1 --log-every 5 --quiet"
).split()
SWEEP = "--steps 4 --axis outer.lr 0.3 0.7 --axis outer.restart never 2 --workers 1".split()
DATA = "--tokenizer bytes --held-out 0.1 --quiet".split()
PROGRAM = str(Path(__file__).with_name("interrupted.py"))
TIMES = re.compile(r".*seconds?|.*per_second.*|engine_share|peak_memory_bytes")
"""Keys of JSON that differ between equal runs: durations and speeds."""
UNLIKE = re.compile(r"\.lock|\.claim-.*|env\.json|manifest-.*\.json")
TEMPORARY = re.compile(r".*\.tmp")
FEW = {"train": 3, "sweep": 3, "data": 3, "export": 1}
"""Calls at which a command is killed where FAULTS is not `all`; export imports transformers, for seconds each time."""


@dataclass
class Stage:
    """A folder with texts and what undisturbed commands have made of them."""

    folder: Path
    counts: dict[str, int] = field(default_factory=dict)

    def commands(self, scene: str, out: Path) -> list[list[str]]:
        train = ["train", *TINY, "--steps", "12", "--data.corpus", f"file:{self.folder / 'text.txt'}"]
        sweep = ["sweep", *TINY, "--data.corpus", f"file:{self.folder / 'text.txt'}", *SWEEP, "--out", str(out)]
        records = [str(self.folder / f"records-{number}.jsonl") for number in range(3)]
        return {
            "train": [[*train, "--sync.fragments", "2", "--outer.restart", "2", "--out", str(out)]],
            "sweep": [sweep],
            "data": [["data", "prepare", *records, *DATA, "--out", str(out)]],
            "export": [["export", str(self.folder / "train" / "out"), str(out)]],
        }[scene]

    def run(self, scene: str, folder: Path, kind: str = "count", number: int = 0) -> tuple[int, str, str]:
        """Run a scene; return its status and what it said on both outputs."""
        folder.mkdir(exist_ok=True)
        logs = folder.parent / f"{folder.name}.out", folder.parent / f"{folder.name}.err"
        for log in logs:
            log.write_text("")
        words = folder.parent / f"{folder.name}.json"
        words.write_text(json.dumps(self.commands(scene, folder / "out")))
        process = Program([PROGRAM, str(folder), kind, str(number), str(words)], *logs, os.environ)
        try:
            status = process.wait(60)
        finally:
            process.kill()
        return status, logs[0].read_text(), logs[1].read_text()

    def wanted(self, scene: str) -> dict[str, bytes]:
        """Return what an undisturbed scene writes, and count its calls."""
        if scene == "export":
            self.wanted("train")
        folder = self.folder / scene
        if scene not in self.counts:
            status, out, err = self.run(scene, folder)
            assert status == 0, err
            self.counts[scene] = int(out.rpartition("calls: ")[2])
        return contents(folder)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    folder = tmp_path_factory.mktemp("stage")
    textmaker.write(folder / "text.txt", documents=20)
    texts = [textmaker.text(documents=1, words=30 + n % 7, seed=n) for n in range(80)]
    for number in range(3):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[number::3])
        (folder / f"records-{number}.jsonl").write_text(lines)
    return Stage(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Return every output without its times, and the newest checkpoint alone."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    newest = max((path.parent for path in paths if path.parent.name.startswith("step-")), default=None)
    result = {}
    for path in sorted(paths):
        is_old = path.parent.name.startswith("step-") and path.parent != newest
        if not is_old and not any(UNLIKE.fullmatch(part) for part in path.relative_to(folder).parts):
            result[str(path.relative_to(folder))] = timeless(path)
    return result


def timeless(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        lines = data.splitlines() if path.suffix == ".jsonl" else [data]
        return json.dumps([without_times(json.loads(line)) for line in lines]).encode()
    if path.suffix == ".pt":  # pickle's bytes depend on which objects are one
        return repr(without_times(torch.load(path, weights_only=True))).encode()
    return re.sub(rb"(finished|diverged),[0-9.e+-]+", rb"\1", data) if path.name == "cells.csv" else data


def without_times(value: Any) -> Any:
    """Return a tree without the keys of times, in one order, with the bytes of its tensors."""
    if isinstance(value, dict):
        return {key: without_times(value[key]) for key in sorted(value, key=str) if not TIMES.fullmatch(str(key))}
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    return [without_times(item) for item in value] if isinstance(value, list | tuple) else value


def each_call(count: int, few: int) -> range:
    step = 1 if os.environ.get("FAULTS") == "all" else max(1, count // few)
    return range(step // 2 + 1, count + 1, step)


SCENES = pytest.mark.parametrize("scene", ["train", "sweep", "data", "export"])
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 if "FAULTS" in os.environ else 300)]


@SCENES
def test_killed(tmp_path: Path, stage: Stage, scene: str) -> None:
    """After SIGKILL at any call the repeated command ends with the same bytes, and leaves nothing half written."""
    interrupt(tmp_path, stage, scene, "kill", lambda status, _: status in (0, -signal.SIGKILL))


@SCENES
def test_full_disk(tmp_path: Path, stage: Stage, scene: str) -> None:
    """On a full disk a command ends with status 1 and a message; repeated, it ends with the same bytes."""
    interrupt(tmp_path, stage, scene, "full", lambda status, err: status in (0, 1, 2) and "Traceback" not in err)


def interrupt(folder: Path, stage: Stage, scene: str, kind: str, good: Callable[[int, str], bool]) -> None:
    """Interrupt a command at one call after the other, and repeat it undisturbed each time."""
    wanted = stage.wanted(scene)
    for number in each_call(stage.counts[scene], FEW[scene] if kind == "kill" else 1):
        place = folder / scene
        shutil.rmtree(place, ignore_errors=True)
        status, _, err = stage.run(scene, place, kind, number)
        where = f"{scene}: {kind} at call {number}: {err[-900:]}"
        assert good(status, err), f"status {status}: {where}"
        if scene != "export" or not (place / "out").exists():  # that is refused where all is there
            for path in place.rglob("*.tmp"):  # in a sweep's folder another worker may be writing them
                os.utime(path, (0, 0))
            status, _, err = stage.run(scene, place)
            assert status == 0, f"repeated: {err[-900:]}: {where}"
        left = contents(place)
        assert {name for name in left.keys() | wanted.keys() if left.get(name) != wanted.get(name)} == set(), where
        assert not [path for path in place.rglob("*") if TEMPORARY.fullmatch(path.name)], where
