"""Check the experiments: figures redrawn from stored rows, numbers computed again, trainings in a tiny size.

    python experiments/check.py [NAME...]

prints a line for each check, and ends with status 1 where one fails. It takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from common import RESULTS, load, plain, save

TOLERANCE = 1e-6
"""Of computed numbers, relative: the last digits differ between processors."""
_FOLDER = Path(__file__).parent
_SECONDS = 600.0
Check = Callable[[Path], str]
"""Checks something in a temporary folder; returns what it did, and raises an exception where that fails."""


def redrawn(name: str) -> Check:
    """Draw the stored rows and numbers; the rows must come back as they are stored."""

    def check(out: Path) -> str:
        paths = save(name, out, load(name), import_module(name).figures)
        if (out / f"{name}.csv").read_bytes() != (RESULTS / f"{name}.csv").read_bytes():
            raise ValueError("the rows written are not those read")
        return f"{_drawn(paths)} figures redrawn"

    return check


def computed(name: str, *, quick: bool = False) -> Check:
    """Compute a table, draw it, and compare its numbers with the stored ones."""

    def check(out: Path) -> str:
        module = import_module(name)
        result = module.table(quick)
        paths = save(name, out, result, module.figures)
        stored = RESULTS / f"{name}{'-quick' if quick else ''}.json"
        apart = list(differences(json.loads(stored.read_text(encoding="utf-8"))["numbers"], plain(result.numbers)))
        if apart:
            raise ValueError(f"{len(apart)} numbers are not those of {stored.name}, the first at {apart[0]}")
        return f"numbers agree, {_drawn(paths)} figures drawn"

    return check


def runs(*words: str) -> Check:
    """Run a script with these words, `{out}` being the folder, and look for files there."""

    def check(out: Path) -> str:
        command = [sys.executable, str(_FOLDER / words[0]), *(word.format(out=out) for word in words[1:])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode:
            raise ValueError(f"status {done.returncode}: {done.stderr.strip()[-1000:]}")
        written = [path for path in out.rglob("*") if path.is_file()]
        if not written:
            raise ValueError("it has written no file")
        return f"ran, {len(written)} files"

    return check


def _tiny(name: str) -> Check:
    return runs(f"{name}.py", "--quick", "--out", "{out}", "--workers", "1")


CHECKS: dict[str, Sequence[Check]] = {
    "blockwise": [
        runs("blockwise/blockwise.py", "--out", "{out}"),
        runs("blockwise/blockwise.py", "--train", "quick", "--workers", "1", "--out", "{out}"),
    ],
    "bench": [
        runs("bench/tables.py", "--out", "{out}"),
        runs("bench/run.py", "averaging outer.filter=orthogonal", "--size", "tiny", "--out", "{out}/bench", "--quiet"),
    ],
    "gpu": [runs("gpu/outer.py", "--tiny", "--out", "{out}"), runs("gpu/step.py", "--tiny", "--out", "{out}")],
    "linear_network": [runs("linear_network.py", "--quick", "--out", "{out}")],
    "trainings": [
        runs(f"{name}.py", "--train", "quick", "--out", "{out}", "--workers", "1")
        for name in ("fig3_heatmaps", "fig4_retuning", "fig5_soft")
    ],
    "compression": [
        runs("compression.py", "--out", "{out}"),
        runs("compression.py", "--train", "quick", "--workers", "1", "--out", "{out}"),
    ],
    "topk": [runs("topk.py", "--out", "{out}")],
    "fig1": [runs("fig1_mechanism.py", "--out", "{out}")],
    "fig2": [runs("fig2_toy.py", "--out", "{out}")],
    "period_criteria": [computed("period_criteria")],
    "mixed_periods": [computed("mixed_periods", quick=True)],
    "outer_schedules": [computed("outer_schedules", quick=True)],
}
"""The checks of each experiment, in one folder and in this order: later ones use runs of earlier ones."""


def differences(stored: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yield the places where numbers differ by more than the tolerance."""
    if isinstance(stored, Mapping) and isinstance(now, Mapping):
        for key in stored.keys() | now.keys():
            yield from differences(stored.get(key), now.get(key), f"{place}/{key}")
    elif isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        for number, pair in enumerate(zip(stored, now, strict=True)):
            yield from differences(*pair, f"{place}/{number}")
    elif isinstance(stored, (int, float)) and isinstance(now, (int, float)):
        if not math.isclose(stored, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"{place}: {now}, stored {stored}"
    elif stored != now:
        yield f"{place}: {now}, stored {stored}"


def _drawn(paths: Sequence[Path]) -> int:
    pictures = [path for path in paths if path.suffix == ".png"]
    if not all(path.read_bytes().startswith(b"\x89PNG") for path in pictures):
        raise ValueError("a figure is no picture")
    return len(pictures)


def main() -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHECKS)} (all)")
    parser.add_argument("--processes", type=int, default=2, help="how many run at a time (%(default)s)")
    options = parser.parse_args()
    names = options.names or list(CHECKS)
    if unknown := set(names) - CHECKS.keys():
        parser.error(f"NAME is {', '.join(sorted(unknown))}; choose from {', '.join(CHECKS)}")
    if len(names) == 1:
        return _check(names[0])
    with ThreadPool(options.processes) as pool:
        statuses = list(pool.imap_unordered(_in_a_process, names))
    return max(statuses)


def _in_a_process(name: str) -> int:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, name], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout, end="", flush=True)
    return done.returncode


def _check(name: str) -> int:
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for check in CHECKS[name]:
            begun = time.perf_counter()
            try:
                word, text = "ok  ", check(Path(folder))
            except Exception as error:
                word, text = "FAIL", f"{type(error).__name__}: {error}"
                failures += 1
            print(f"{word} {name:20} {time.perf_counter() - begun:6.1f} s  {text}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
