"""Run the fault tests: kills, power cuts, failing calls, damaged files and odd inputs; a table, and one JSON line last.

    python tests/faults --kills 1000 --inputs 10000 --seed 0 --processes 2 --out runs/faults

Each case that failed stands in `failures.jsonl` of that folder with its test, name and seed; `--only TEST:NAME:SEED`
plays it again. A repeated command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from faults import damage, groups, interruptions, odd
from faults.calls import stop_threads
from faults.children import Child
from faults.scenes import Cases, Stage

_MEMORY = "/dev/shm"  # noqa: S108 - a folder of its own is made in it
RESULTS, FAILURES = "results.jsonl", "failures.jsonl"
PRELOADED = (
    "torch._dynamo twophase.cli.train twophase.cli.sweep twophase.cli.sweeping twophase.cli.sweep_worker "
    "twophase.cli.data twophase.cli.reporting twophase.cli.diagnose twophase.cli.explore twophase.cli.study "
    "twophase.cli.period twophase.sweeps.worker twophase.training.train twophase.training.session twophase.tasks.build "
    "twophase.tasks.lm.task matplotlib.backends.backend_agg "
    "matplotlib.backends.backend_pdf twophase.figures.overview twophase.report.sweep PIL.Image"
).split()
SHARES: dict[str, dict[str, int]] = {
    **dict.fromkeys(("kills", "power", "io_errors", "memory"), interruptions.SCENES),
    "group": groups.GROUPS,
    "damage": damage.SOURCES,
    "odd": odd.FAMILIES,
}
"""Names of each test's cases, and how often each is drawn."""
KILLS = {"kills": 0.75, "power": 0.2, "group": 0.05}
"""Shares of the kills: at a call or a time, power cuts, processes under torchrun."""
INPUTS = {"damage": 0.5, "io_errors": 0.1, "memory": 0.05, "odd": 0.35}
"""Shares of the inputs."""


def plan(kills: int, inputs: int, seed: int) -> list[tuple[str, str, int]]:
    """Return all cases: test, name and seed. Equal arguments give equal cases."""
    counts = {test: max(1, round(share * kills)) for test, share in KILLS.items() if kills}
    counts |= {test: max(1, round(share * inputs)) for test, share in INPUTS.items() if inputs}
    every: list[tuple[str, str, int]] = []
    for test, count in counts.items():
        rng, names, shares = random.Random(f"{test} {seed}"), [*SHARES[test]], [*SHARES[test].values()]
        every += [(test, rng.choices(names, shares)[0], rng.randrange(1 << 30)) for _ in range(count)]
    random.Random(seed).shuffle(every)  # a run that is cut short has tried something of all
    return every


class Player(Cases):
    """Plays the cases of all tests."""

    def __init__(self, stage: Stage, place: Path) -> None:
        super().__init__(stage, place)
        place.mkdir(parents=True, exist_ok=True)
        stop_threads()
        for name in PRELOADED:
            import_module(name)
        interrupted = interruptions.Interruptions(stage, place)
        self._tests: dict[str, Callable[[str, int], dict[str, Any]]] = {
            "damage": damage.Damage(stage, place).play,
            "odd": odd.Odd(stage, place).play,
            "group": groups.Groups(stage, place).play,
        }
        self._tests |= {test: partial(interrupted.play, test) for test in SHARES.keys() - self._tests.keys()}

    def play(self, test: str, name: str, seed: int) -> dict[str, Any]:
        """Play a case; returns what it was, and why it `failed`, if it did."""
        began = time.monotonic()
        try:
            result = self._tests[test](name, seed)
        except Exception:  # a fault of these tests is a failure that must be seen, too
            result = {"how": "", "failed": f"harness: {traceback.format_exc()[-1500:]}"}
        return {"test": test, "name": name, "seed": seed, **result, "took": round(time.monotonic() - began, 3)}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if a case failed."""
    options = _parser().parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    cases = plan(options.kills, options.inputs, options.seed)
    if options.only:
        test, _, rest = options.only.partition(":")
        name, _, number = rest.rpartition(":")
        cases = [case for case in cases if ":".join(case[:2]) == options.only] or [(test, name, int(number))]
    ended = set() if options.only else set(map(_key, _results(options.out)))
    waiting = [case for case in cases if case not in ended]
    shared = Path(tempfile.mkdtemp(prefix="faults-", dir=_MEMORY if Path(_MEMORY).is_dir() else None))
    try:
        lanes = [
            Child(
                lambda number=number: _lane(shared, number, waiting[number :: options.processes], options.out),
                options.out / f"{number}.log",
                options.out / f"{number}.log",
            )
            for number in range(options.processes)
        ]
        statuses = [lane.wait() for lane in lanes]
    finally:
        shutil.rmtree(shared, ignore_errors=True)
    wanted = set(cases)
    results = [result for result in _results(options.out) if _key(result) in wanted]
    print(table(results))
    print(json.dumps(summarize(results)))
    return int(any(result["failed"] for result in results) or any(statuses) or len(results) < len(wanted))


def _lane(shared: Path, number: int, cases: list[tuple[str, str, int]], out: Path) -> int:
    """Play a part of the cases."""
    player = Player(Stage(shared / f"stage-{number}"), shared / str(number))
    for case in cases:
        result = player.play(*case)
        for name in (RESULTS, FAILURES) if result["failed"] else (RESULTS,):
            with (out / name).open("ab", buffering=0) as file:
                file.write((json.dumps(result) + "\n").encode())
    return 0


def _results(out: Path) -> list[dict[str, Any]]:
    path = out / RESULTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _key(result: dict[str, Any]) -> tuple[str, str, int]:
    return result["test"], result["name"], result["seed"]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table: test, cases tried, cases failed, seconds."""
    groups_of: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups_of.setdefault(f"{result['test']}: {result['name']}", []).append(result)
    lines = [f"{'test':28} {'tried':>6} {'failed':>6} {'seconds':>8}"]
    for name, rows in sorted(groups_of.items()):
        seconds = sum(row["took"] for row in rows)
        lines.append(f"{name:28} {len(rows):6} {sum(bool(row['failed']) for row in rows):6} {seconds:8.0f}")
    return "\n".join(lines)


def summarize(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the last line."""
    failed = [result["failed"] for result in results]
    words = {
        "byte_differences": "byte differences",
        "silent": "silent",
        "tracebacks": "traceback",
        "hangs": "hang",
        "temporary_files": "temporary files",
    }
    figures: dict[str, Any] = {
        "kills": sum(result["test"] in KILLS for result in results),
        "inputs": sum(result["test"] in INPUTS for result in results),
        **{name: sum(word in text[:80] for text in failed) for name, word in words.items()},
    }
    figures["other"] = sum(map(bool, failed)) - sum(figures[name] for name in words)
    return figures


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tests/faults", description="Run the fault tests.")
    parser.add_argument("--kills", type=int, default=1000, help="processes that are killed (%(default)s)")
    parser.add_argument(
        "--inputs", type=int, default=10_000, help="failing calls, damaged and odd inputs (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the cases (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="that play cases at the same time (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="folder of the results (%(default)s)")
    parser.add_argument("--only", metavar="TEST:NAME[:SEED]", help="play one case again, or all of a name")
    return parser
