"""Doing the units of the parts, each in a process of its own, until all are done or the time is over."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch

from bounds import finish
from gpu_parts.records import Record, Settings, Unfinished, short_of_memory
from twophase.base.config import RunError, UsageError
from twophase.base.files import write_atomic

PROGRAM = Path(__file__).resolve().parents[1] / "gpu.py"
PARTS = ("probe", "engine", "run", "nano")
LARGEST_LOG = 1 << 20
LEAST_SECONDS = 30.0
"""No unit is begun with less time left."""
DONE, FAILED, REFUSED, UNFINISHED = 0, 1, 2, 3
"""Exit statuses of a unit's process."""


def part_module(part: str) -> Any:
    """The module of a part: `UNITS`, from name to function of settings and record; `NEED_A_GPU`; `figures`."""
    return import_module(f"gpu_parts.{part}")


def settings_of(options: argparse.Namespace) -> Settings:
    """What a unit has to know of the command line."""
    out = options.out.resolve()
    name = f"twophase-gpu-{os.getuid()}-{hashlib.sha256(str(out).encode()).hexdigest()[:12]}"
    work = (options.work or Path(tempfile.gettempdir()) / name).resolve()
    return Settings(out, work, options.deadline, options.tiny, options.corpus, options.attention, options.seed or 0)


def perform(options: argparse.Namespace) -> int:
    """Do the unit `options.unit`, PART.UNIT, in this process and keep what it measures; return an exit status."""
    part, unit = options.unit.split(".")
    settings = settings_of(options)
    log = settings.out / f"{part}.log"
    name = f"{part} {unit}"
    if options.watched:
        threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        settings.work.mkdir(parents=True, exist_ok=True)
        with short_of_memory(name):
            part_module(part).UNITS[unit](settings, Record(settings.out, part, tiny=settings.tiny))
    except Unfinished as reason:
        print(f"{name}: {reason}", flush=True)
        return UNFINISHED
    except (UsageError, RunError) as error:
        print(f"{name}: {error}", flush=True)
        return REFUSED
    except Exception as error:
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        reason = (str(error).strip().splitlines() or [""])[0]
        print(f"{name}: {type(error).__name__}: {reason} (more in {log}; the next call tries again)", flush=True)
        return FAILED
    return DONE


def end_with_parent() -> None:
    """Wait until the parent has gone, then end this process and its children.

    A call that is killed cannot end its unit, which would take half of the device from the call that follows.
    """
    os.read(0, 1)  # ends when the parent does, for nothing is written; sys.stdin would be locked at our own end
    os.killpg(os.getpgid(0), signal.SIGKILL)


def run(options: argparse.Namespace) -> int:
    """Do what is left of the parts, print the figures of all, and return the exit status."""
    if not (options.tiny or torch.cuda.is_available()):
        print("gpu.py: torch finds no GPU here that it can use; run it on a machine with one, or try it with --tiny")
        return 2
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for part in options.parts:
            (options.out / f"{part}.log").touch()
    except OSError as error:
        print(f"--out {options.out}: cannot be written ({error.strerror}); choose another --out")
        return 2
    figures: dict[str, float | None] = {}
    status, pending = 0, 0
    for part in PARTS:
        try:
            if part in options.parts:
                failed, unfinished = run_part(part, options)
                status, pending = max(status, int(failed > 0)), pending + failed + unfinished
            figures |= figures_of(part, options)
        except UsageError as error:  # a damaged file; the other parts go on
            print(f"{part}: {error}", flush=True)
            status, pending = 1, pending + 1
    figures["units_left"] = pending
    with suppress(OSError):  # it holds what another call goes on from
        settings_of(options).work.rmdir()
    write_atomic(options.out / "figures.json", json.dumps(figures, indent=1) + "\n")
    return max(status, finish("gpu_tiny" if options.tiny else "gpu", figures))


def figures_of(part: str, options: argparse.Namespace) -> dict[str, float]:
    """The figures of a part's record.

    Raises:
        UsageError: it is damaged.
    """
    record = Record(options.out, part, tiny=options.tiny)
    try:
        return part_module(part).figures(record)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise record.damage(error) from None


def run_part(part: str, options: argparse.Namespace) -> tuple[int, int]:
    """Do what is left of a part in its minutes; return how many units failed, and how many are left beside them."""
    end = time.time() + 60 * options.minutes
    module = part_module(part)
    units = [unit for unit in module.UNITS if not (options.tiny and unit in module.NEED_A_GPU)]
    later = 0
    if part == "nano":
        options, units, later = of_one_seed(options, units)
    failed, pending = 0, 0
    for unit in units:
        if unit in Record(options.out, part, tiny=options.tiny).units:
            continue
        if pending or end - time.time() < min(LEAST_SECONDS, 30 * options.minutes):
            pending += 1
            continue
        print(f"== {part} {unit}", flush=True)
        begin = time.time()
        status = launch(part, unit, options, end)
        print(f"== {part} {unit}: {time.time() - begin:.0f} s", flush=True)
        failed += status in (FAILED, REFUSED)
        pending += status == UNFINISHED
    if pending:
        print(f"{part}: {pending} of {len(units)} units are left to another call", flush=True)
    return failed, pending + later


def of_one_seed(options: argparse.Namespace, units: list[str]) -> tuple[argparse.Namespace, list[str], int]:
    """Choose the first unfinished seed, unless one was given.

    Returns:
        The options with that seed, its unit, and the number of seeds that are left to later calls.
    """
    if options.seed is not None:
        return options, [f"seed{options.seed}"], 0
    finished = Record(options.out, "nano", tiny=options.tiny).units
    wanted = [unit for unit in units if unit not in finished]
    seed = int((wanted or units)[0].removeprefix("seed"))
    return argparse.Namespace(**vars(options) | {"seed": seed}), wanted[:1], max(0, len(wanted) - 1)


def launch(part: str, unit: str, options: argparse.Namespace, end: float) -> int:
    """Do a unit in a process of its own, which is killed when the time is over; return its exit status."""
    words = ["--out", options.out, "--unit", f"{part}.{unit}", "--corpus", options.corpus, "--seed", options.seed or 0]
    # A unit that can stop by itself does so a little earlier, to save where it is.
    words += ["--attention", options.attention, "--deadline", end - 0.05 * 60 * options.minutes]
    words += ["--work", options.work] if options.work else []
    words += ["--tiny"] if options.tiny else []
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *map(str, words), "--watched"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # it has children of its own, which must go with it
    )
    assert process.stdin
    assert process.stdout
    echo = threading.Thread(target=copy, args=(process.stdout, options.out / f"{part}.log"), daemon=True)
    echo.start()
    try:
        status = process.wait(max(1.0, end - time.time()))
    except subprocess.TimeoutExpired:
        print(f"{part} {unit}: not done in --minutes {options.minutes:g}; the next call begins it again", flush=True)
        status = UNFINISHED
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        echo.join(5)
        process.stdin.close()
        process.stdout.close()
    if status not in (DONE, FAILED, REFUSED, UNFINISHED):
        print(f"{part} {unit}: its process ended with status {status}; the next call tries again", flush=True)
        status = FAILED
    return status


def copy(stream: IO[str], log: Path) -> None:
    """Copy lines to standard output and to a log, which keeps at most its first mebibyte."""
    with log.open("a", encoding="utf-8") as file:
        for line in stream:
            print(line, end="", flush=True)
            if file.tell() < LARGEST_LOG:
                file.write(line)
                file.flush()
