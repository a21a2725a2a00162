"""Runs a sweep: any number of workers, here and on other machines that see the folder, claim its nodes one by one.

There is no queue. A worker takes the first node that can be trained and that no other has claimed; a run is finished
when its folder says so. A run that fails leaves its traceback in `error.txt`, and the same command tries it again.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.config import fingerprint, update
from twophase.errors import RunError, UsageError
from twophase.files import write_atomic
from twophase.progress import meter
from twophase.runs.config import RunConfig
from twophase.runs.folder import CHECKPOINTS, BusyError, RunFolder, require_locks
from twophase.runs.record import read_summary
from twophase.sweeps.fork import Node, tree
from twophase.sweeps.grid import RUNS, SPEC, Sweep, write_spec
from twophase.sweeps.table import ABOVE_ZERO, TABLE, Row, measure_of, place_words, readable, rows_of, write_rows
from twophase.tasks.registry import users_task

ERROR = "error.txt"
"""The traceback of a run that failed, in its folder."""
_LOOK_SECONDS = 0.3


class Nodes:
    """The nodes of a sweep by name, parents before children, as they stood in its folder at the last `pending`."""

    def __init__(self, runs: Mapping[str, RunConfig], folder: Path) -> None:
        self.folder, self.nodes = folder, tree(runs)
        self.summaries: dict[str, dict[str, Any]] = {}
        """Of those that have ended by themselves; a shared beginning may, by divergence."""
        self.needed: set[str] = set()
        """Those that are still to be trained."""
        self.errors: dict[str, str] = {}
        """Why some of these cannot be trained: their own failure, or that of what they fork from."""
        self._fingerprints = {name: fingerprint(node.config) for name, node in self.nodes.items()}

    def path(self, name: str) -> Path:
        """Return a node's run folder."""
        return self.folder / RUNS / name

    def end(self, node: Node) -> Path:
        """Return the checkpoint that a shared beginning leaves for its children."""
        return self.path(node.name) / CHECKPOINTS / f"step-{node.stop or 0:08d}"

    def pending(self) -> list[Node]:
        """Return the nodes that are still to be trained and have not failed.

        States from which nothing is still to fork or resume are removed.
        """
        for name in self.nodes.keys() - self.summaries.keys():
            if summary := read_summary(self.path(name), self._fingerprints[name]):
                self.summaries[name] = summary
                shutil.rmtree(self.path(name) / CHECKPOINTS, ignore_errors=True)
        self.needed, forked = set(), set[str | None]()
        for name, node in reversed(self.nodes.items()):
            if node.stop is not None and name not in forked:
                shutil.rmtree(self.path(name), ignore_errors=True)
            elif name not in self.summaries and not (node.stop and (self.end(node) / "manifest-000.json").exists()):
                self.needed.add(name)
                forked.add(node.parent)
        self.errors = {}
        for name in filter(self.needed.__contains__, self.nodes):
            with suppress(FileNotFoundError):
                self.errors[name] = (self.path(name) / ERROR).read_text()
            if inherited := self.errors.get(self.nodes[name].parent or ""):
                self.errors.setdefault(name, inherited)
        return [node for name, node in self.nodes.items() if name in self.needed and name not in self.errors]


def work(nodes: Nodes, should_stop: Callable[[], bool], on_end: Callable[[], None] = lambda: None) -> None:
    """Train nodes of a sweep in this process until none is left, or `should_stop`, asked after every step, is true."""
    while (pending := nodes.pending()) and not should_stop():
        for node in pending:
            if node.parent not in nodes.needed and _train(nodes, node, should_stop):
                on_end()
                break
        else:
            time.sleep(_LOOK_SECONDS)  # others train what this one waits for


def _train(nodes: Nodes, node: Node, should_stop: Callable[[], bool]) -> bool:
    """Train a node; return False where another worker has it."""
    from twophase.diloco.group import SingleProcess  # noqa: PLC0415 - torch
    from twophase.tasks.registry import task_of  # noqa: PLC0415
    from twophase.training import checkpoint  # noqa: PLC0415
    from twophase.training.trainer import Trainer  # noqa: PLC0415

    path, discard = nodes.path(node.name), node.stop is None
    try:
        with RunFolder.claim(path, node.config) as folder:
            if node not in nodes.pending():  # another worker has just ended it
                return False
            # A beginning that has diverged leaves no checkpoint, and its children diverge by themselves.
            start = checkpoint.read(nodes.end(nodes.nodes[node.parent])) if node.parent else None
            trainer = Trainer(task_of(node.config), node.config, SingleProcess())
            trainer.run(path, folder, should_stop=should_stop, start=start, stop=node.stop, discard=discard)
    except BusyError:
        return False
    except Exception as error:
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / ERROR, f"{error or type(error).__name__}\n\n{traceback.format_exc()}")
    return True


def worker(folder: Path) -> int:
    """Be one more worker of the sweep in a folder; return the exit status."""
    from twophase.tasks.registry import config_of  # noqa: PLC0415 - torch
    from twophase.training.distributed import stop_on_signal  # noqa: PLC0415

    spec = json.loads((folder / SPEC).read_bytes())
    base = config_of(spec["base"])
    runs = {run: update(base, changes) for run, changes in spec["runs"].items()}
    with stop_on_signal() as stop:
        work(Nodes(runs, folder), stop.is_set)
        return 128 + stop.number if stop.number else 0


# ----------------------------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Outcome:
    """What became of a sweep: its table, the seconds of this call, the errors of its failed runs by id, the workers."""

    rows: list[Row]
    seconds: float
    errors: Mapping[str, str]
    workers: int = 1

    def check(self, folder: Path) -> None:
        """Raise a RunError if a run has failed."""
        for run, error in self.errors.items():
            line = error.splitlines()[0]
            raise RunError(f"{folder}: {len(self.errors)} runs failed, {run} with: {line}; its {ERROR} has more")


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    workers: int | None = None,
    quiet: bool = False,
    on_rows: Callable[[list[Row]], Any] = lambda _: "",
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run what is left of a sweep, and keep its table up to date; another process may do the same at the same time.

    One worker means this process, None one a GPU, or one for each `threads` cores. What `on_rows` returns, which is
    called with the table whenever it has changed, is shown above the progress. `should_stop` is asked often; True stops
    all workers, whose runs resume later. A UsageError refuses a folder that holds something else.
    """
    require_locks()
    configs = [*sweep.runs.values()]
    if len(seeds := {config.seed for config in configs}) > 1 and (task := users_task(configs[0])):
        task.check_seeds(seeds)
    write_spec(sweep, folder)
    started, nodes = time.monotonic(), Nodes(sweep.runs, folder)
    for name in nodes.nodes:  # failures of an earlier call are tried again
        (nodes.path(name) / ERROR).unlink(missing_ok=True)
    pending, total = nodes.pending(), sum(node.steps for node in nodes.nodes.values())
    rows: list[Row] = []
    drawn: Any = ""
    seen: object = None

    def look() -> None:
        """Write the table and show the progress where a node has ended or failed since the last look."""
        nonlocal rows, drawn, seen
        nodes.pending()
        if seen == (now := (nodes.needed, nodes.errors)):
            return
        before, seen = {row.run: row.state for row in rows}, now
        rows = rows_of(sweep, nodes.summaries, nodes.errors)
        write_rows(folder / TABLE, rows)
        for row in rows:
            if row.state == "finished" and row.outcome is None:
                raise UsageError(f"run {row.run} has the validation loss {row.validation_loss}; {ABOVE_ZERO}")
        drawn = on_rows(rows)
        text = f"{len(nodes.summaries.keys() & sweep.runs)}/{len(sweep.runs)} runs"
        for row in [row for row in rows if row.state not in ("missing", before.get(row.run))][-1:]:
            number = readable(row.outcome)
            text += f"  {place_words(row.values, row.values)}: "
            text += f"{measure_of([row])} {number}" if number else row.state
        show(total - sum(nodes.nodes[name].steps for name in nodes.needed), text)

    with meter(f"{folder.name}, inner steps", total, quiet=quiet, plain_seconds=0.0, picture=lambda: drawn) as show:
        look()
        devices, threads = _gpus(sweep), max(config.threads for config in sweep.runs.values())
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = min(workers or len(devices) or max(1, cores // threads), len(sweep.runs))
        if min(count, len(pending)) <= 1:
            work(nodes, should_stop, look)
        else:
            status = _run_workers(nodes, count, devices, look, should_stop)
            if nodes.pending() and not should_stop():
                raise RunError(f"{folder}: all workers have ended, the last with status {status}")
        look()
    errors = {run: nodes.errors[run] for run in sweep.runs if run in nodes.errors}
    return Outcome(rows, time.monotonic() - started, errors, count)


def _gpus(sweep: Sweep) -> list[str]:
    """Return the GPUs for the workers of a sweep; none where its runs use the CPU or one named GPU."""
    if any(config.device != "cuda" for config in sweep.runs.values()):
        return []
    import torch  # noqa: PLC0415 - seconds

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]


def _run_workers(
    nodes: Nodes, count: int, devices: list[str], look: Callable[[], None], should_stop: Callable[[], bool]
) -> int | None:
    """Start workers, each on a GPU of its own if there are enough, and wait; return the exit status of the last one."""
    command = [sys.executable, "-m", "twophase.sweeps.runner", str(nodes.folder)]
    running: list[subprocess.Popen[bytes]] = []
    status = None
    try:
        for number in range(count):
            gpu = {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if devices else {}
            running.append(subprocess.Popen(command, env={**os.environ, **gpu}, stdin=subprocess.DEVNULL))  # noqa: S603
        while running and not should_stop():
            time.sleep(_LOOK_SECONDS)
            for process in [process for process in running if process.poll() is not None]:
                running.remove(process)
                if status := process.returncode:
                    _blame(nodes, process)
            look()
    finally:
        for process in running:
            process.terminate()  # they write checkpoints
        for process in running:
            process.wait()
    return status


def _blame(nodes: Nodes, process: subprocess.Popen[bytes]) -> None:
    """Write the death of a worker, as by a full memory, into the folder of the run that it had."""
    owner = {"host": socket.gethostname(), "pid": process.pid}  # what a claim holds until it is released
    claims = [claim for node in nodes.pending() for claim in nodes.path(node.name).glob(".claim-*")]
    held = [claim for claim in claims if json.loads(claim.read_bytes() or "{}") == owner]
    if held:  # the newest: the system gives the number of an earlier process again
        error = max(held, key=lambda claim: claim.stat().st_mtime).with_name(ERROR)
        write_atomic(error, f"its worker ended with status {process.returncode}\n")


if __name__ == "__main__":
    sys.exit(worker(Path(sys.argv[1])))
