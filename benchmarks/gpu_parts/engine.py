"""The part `engine`: what the outer machinery and checkpoints cost, and that a killed run is resumed bit for bit."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint as checkpoint_benchmark
import engine_overhead
from gpu_parts.records import Figures, Record, Settings, toy, write_csv
from twophase.base.config import RunError, from_tree, to_tree
from twophase.recipes.pretraining import RECIPES
from twophase.runs.folder import RunFolder, read_summary
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training import checkpoint
from twophase.training.train import train

ROOT = Path(__file__).resolve().parents[2]
TESTS = [ROOT / "tests" / name for name in ("diloco", "tasks/lm", "training")]
FOR_TESTS = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis"}


def overhead(settings: Settings, record: Record, *, inner_steps: int) -> None:
    """Tokens a second with the engine over those without, at one S, and the seconds of its phases."""
    seconds, least = (0.1, 1) if settings.tiny else (20.0, 4)
    overheads = engine_overhead.measure(settings.config("paper_150m"), [inner_steps], seconds, least)
    row = {"inner_steps": inner_steps, **overheads[inner_steps].phases}
    units = record.units.values()
    write_csv(settings.out / "engine-phases.csv", [*(unit["phases"] for unit in units if "phases" in unit), row])
    record.done(f"overhead_s{inner_steps}", engine_overhead.figures_of(overheads), phases=row)


def pause(settings: Settings, record: Record) -> None:
    """How long a checkpoint stops training, in steps: benchmarks/checkpoint.py."""
    RECIPES["toy"] = lambda *_, **__: toy(settings.config("nano"))
    words = ["--recipe", "toy", "--saves", "1"] if settings.tiny else ["--device", "cuda", "--saves", "3"]
    said = io.StringIO()
    sys.argv = ["checkpoint.py", *words]
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        checkpoint_benchmark.main()
    print(said.getvalue(), end="", flush=True)
    figures = json.loads(said.getvalue().splitlines()[-1])
    record.done("pause", {f"checkpoint_{name}": value for name, value in figures.items()})


def resume(settings: Settings, record: Record) -> None:
    """A run that is killed and resumed ends with the bits of one that is not, on kernels that repeat theirs."""
    config = settings.config("paper_150m")
    config = replace(
        config,
        data=replace(config.data, validation_windows=4),
        steps=12,
        inner_steps=4,
        outer=replace(config.outer, restart="2"),
        deterministic=True,
        checkpoint_every=1,
        keep_checkpoints=1,
        evaluate_every=0,
        log_every=0,
    )
    # A name of their own for each attempt: what an earlier one left would be resumed.
    folders = [settings.work / f"resume-{time.time_ns()}-{name}" for name in ("whole", "killed")]
    for folder, kill_after, status in ((folders[0], 0, 0), (folders[1], 2, -signal.SIGKILL), (folders[1], 0, 0)):
        words = [str(folder), json.dumps(to_tree(config)), str(kill_after)]
        ended = subprocess.run([sys.executable, "-m", "gpu_parts.engine", *words], check=False).returncode
        if ended != status:
            raise RunError(f"a process of the run that is killed and resumed ended with status {ended}; see above")
    whole, resumed = (read_summary(folder) or {} for folder in folders)
    same = all(whole.get(name) == resumed.get(name) for name in ("checksum", "validation_loss", "restarts"))
    print(f"killed and resumed: {'the same bits' if same else f'other bits: {whole} and {resumed}'}", flush=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # gigabytes
    record.done("resume", {"resume_same_bits": float(same)})


def child(folder: Path, config: TrainConfig, kill_after: int) -> None:
    """Train, and die as a killed process does after some round, when a checkpoint of it is complete."""

    def on_round(line: Mapping[str, Any]) -> None:
        if line["round"] == kill_after:
            end = time.monotonic() + 60
            while checkpoint.latest_step(folder / "checkpoint") is None and time.monotonic() < end:
                time.sleep(0.02)  # a thread is writing it
            os.kill(os.getpid(), signal.SIGKILL)

    with RunFolder.claim(folder, config) as run:
        train(LanguageTask(config), config, run, on_round=on_round)


def tests(settings: Settings, record: Record) -> None:
    """The tests that need a GPU, where pytest is there."""
    absent = [package for name, package in FOR_TESTS.items() if importlib.util.find_spec(name) is None]
    reason = f"not installed: {', '.join(absent)}" if absent else ""
    reason = reason or ("" if all(map(Path.is_dir, TESTS)) else "no tests in this tree")
    if reason:
        print(f"tests left out: {reason}", flush=True)
        record.done("tests", {}, note=reason)
        return
    report = settings.work / "tests.xml"
    words = ["-q", "-p", "no:cacheprovider", "-k", "device or cuda or gpu", f"--junit-xml={report}"]
    words += ["-W", "default"]  # of other versions than those that the tests are made with
    subprocess.run([sys.executable, "-m", "pytest", *map(str, TESTS), *words], check=False, cwd=ROOT)
    if not report.exists():
        raise RunError("pytest ended without a report; see above, or leave the tests out")
    suite = next(ET.parse(report).iter("testsuite")).attrib  # noqa: S314 - pytest wrote it
    failed = int(suite["failures"]) + int(suite["errors"])
    figures = {"gpu_tests": int(suite["tests"]) - int(suite["skipped"]), "gpu_tests_failed": failed}
    record.done("tests", {name: float(value) for name, value in figures.items()})


NEED_A_GPU = {"tests"}
UNITS = {
    "overhead_s1": partial(overhead, inner_steps=1),
    "tests": tests,
    "resume": resume,
    "pause": pause,
    "overhead_s16": partial(overhead, inner_steps=16),
}


def figures(record: Record) -> Figures:
    """Those of the last line."""
    return record.figures


if __name__ == "__main__":
    child(Path(sys.argv[1]), from_tree(TrainConfig, json.loads(sys.argv[2])), int(sys.argv[3]))
