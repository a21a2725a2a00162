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

from twophase.config import fingerprint
from twophase.errors import RunError
from twophase.files import write_atomic
from twophase.progress import duration, meter
from twophase.runs.folder import CHECKPOINTS, BusyError, RunFolder, read_summary
from twophase.sweeps.fork import Node, tree
from twophase.sweeps.grid import RUNS, SPEC, Sweep, read_spec, write_spec
from twophase.sweeps.table import TABLE, Row, result_words, rows_of, titles, write_rows

ERROR = "error.txt"
"""The traceback of a run that failed, in its folder."""
_LOOK_SECONDS = 0.3


class Nodes:
    """The nodes of a sweep as they stand in its folder."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        self.folder, self.nodes = folder, tree(sweep.runs)
        self.children: dict[str, list[Node]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            if node.parent:
                self.children[node.parent].append(node)
        self.summaries: dict[str, dict[str, Any]] = {}
        self._fingerprints = {name: fingerprint(node.config) for name, node in self.nodes.items()}

    def path(self, node: Node) -> Path:
        """Return the node's run folder."""
        return self.folder / RUNS / node.name

    def end(self, node: Node) -> Path:
        """Return the checkpoint that a shared beginning leaves for its children."""
        return self.path(node) / CHECKPOINTS / f"step-{node.stop:08d}"

    def summary(self, node: Node) -> dict[str, Any] | None:
        """Return the outcome of a node that has ended by itself; a shared beginning may, by divergence."""
        if node.name not in self.summaries:
            found = read_summary(self.path(node), self._fingerprints[node.name])
            if found is None:
                return None
            self.summaries[node.name] = found
        return self.summaries[node.name]

    def error(self, node: Node) -> str | None:
        """Return why a node cannot be trained: its own failure, or that of what it forks from."""
        with suppress(FileNotFoundError):
            return (self.path(node) / ERROR).read_text()
        if node.parent and self._is_needed(self.nodes[node.parent]):
            return self.error(self.nodes[node.parent])
        return None

    def _is_needed(self, node: Node) -> bool:
        if self.summary(node):
            return False
        if node.stop is None:
            return True
        return not self._has_ended(node) and any(self._is_needed(child) for child in self.children[node.name])

    def _has_ended(self, node: Node) -> bool:
        return (self.end(node) / "manifest-000.json").exists()

    def pending(self) -> list[Node]:
        """Return the nodes that are still to be trained and have not failed."""
        return [node for node in self.nodes.values() if self._is_needed(node) and self.error(node) is None]

    def is_ready(self, node: Node) -> bool:
        """Return whether a node can begin, or go on."""
        parent = self.nodes[node.parent] if node.parent else None
        # A beginning that has diverged leaves no checkpoint, and its children diverge by themselves.
        return parent is None or self._has_ended(parent) or bool(self.summary(parent)) or self._has_begun(node)

    def _has_begun(self, node: Node) -> bool:
        return any((self.path(node) / CHECKPOINTS).glob("step-*/manifest-000.json"))

    def remove_used(self) -> None:
        """Remove the shared beginnings from which nothing is still to fork."""
        for name, children in self.children.items():
            if children and not any(map(self._is_needed, children)):
                shutil.rmtree(self.path(self.nodes[name]), ignore_errors=True)

    def steps_done(self) -> int:
        """Return the inner steps of the nodes that need no more work."""
        return sum(node.steps for node in self.nodes.values() if not self._is_needed(node))


def work(
    sweep: Sweep,
    folder: Path,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Train nodes of a sweep until none is left, in this process.

    Args:
        sweep: the sweep.
        folder: its folder, which holds its description.
        should_stop: asked after every step; True writes a checkpoint and returns.
        on_end: called after each node.
    """
    nodes = Nodes(sweep, folder)
    nodes.remove_used()  # of a worker that was killed before it could
    while (pending := nodes.pending()) and not should_stop():
        for node in pending:
            if nodes.is_ready(node) and _train(nodes, node, should_stop):
                nodes.remove_used()
                on_end()
                break
        else:
            time.sleep(_LOOK_SECONDS)  # others train what this one waits for


def _train(nodes: Nodes, node: Node, should_stop: Callable[[], bool]) -> bool:
    """Train a node; return False where another worker has it."""
    from twophase.diloco.group import SingleProcess  # noqa: PLC0415 - torch
    from twophase.tasks.registry import task_of  # noqa: PLC0415
    from twophase.training import checkpoint, loop  # noqa: PLC0415
    from twophase.training.trainer import Trainer  # noqa: PLC0415

    try:
        with RunFolder.claim(nodes.path(node), node.config) as folder:
            if node not in nodes.pending():  # another worker has just ended it
                return False
            start = checkpoint.read(nodes.end(nodes.nodes[node.parent])) if node.parent else None
            trainer = Trainer(task_of(node.config), node.config, SingleProcess())
            loop.run(
                trainer,
                folder.path,
                folder,
                should_stop=should_stop,
                start=start,
                stop=node.stop,
                discard=node.stop is None,
            )
    except BusyError:
        return False
    except Exception as error:
        nodes.path(node).mkdir(parents=True, exist_ok=True)
        write_atomic(nodes.path(node) / ERROR, f"{error or type(error).__name__}\n\n{traceback.format_exc()}")
    return True


def worker(folder: Path) -> int:
    """Be one more worker of the sweep in a folder; return the exit status."""
    from twophase.tasks.registry import config_of  # noqa: PLC0415 - torch
    from twophase.training.distributed import stop_on_signal  # noqa: PLC0415

    spec = json.loads((folder / SPEC).read_bytes())
    with stop_on_signal() as stop:
        work(read_spec(spec, config_of(spec["base"])), folder, should_stop=stop.is_set)
        return 128 + stop.number if stop.number else 0


# ----------------------------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Outcome:
    """What became of a sweep: its table, the seconds of this call, and the errors of its failed runs by id."""

    rows: list[Row]
    seconds: float
    errors: Mapping[str, str]

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
    on_rows: Callable[[list[Row]], Any] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run what is left of a sweep, and keep its table up to date; another process may do the same at the same time.

    Args:
        sweep: the sweep.
        folder: its folder; one that holds this sweep is continued.
        workers: processes that train; one means this process, None one a GPU, or one for each `threads` cores.
        quiet: show no progress.
        on_rows: called with the table whenever it has changed; what it returns is shown above the progress.
        should_stop: asked often; True stops all workers, whose runs resume later.

    Raises:
        UsageError: the folder holds something else.
    """
    write_spec(sweep, folder)
    monitor, started = _Monitor(sweep, folder, on_rows), time.monotonic()
    for node in monitor.nodes.nodes.values():  # failures of an earlier call are tried again
        (monitor.nodes.path(node) / ERROR).unlink(missing_ok=True)
    total = sum(node.steps for node in monitor.nodes.nodes.values())
    with meter(f"{sweep.name}, inner steps", total, quiet=quiet, plain_seconds=0.0, picture=monitor.picture) as show:
        monitor.look(show)
        devices = gpus_of(sweep)
        count = workers or len(devices) or max(1, cores() // max(config.threads for config in sweep.runs.values()))
        if min(count, len(monitor.nodes.pending())) <= 1:
            work(sweep, folder, should_stop=should_stop, on_end=lambda: monitor.look(show))
        else:
            processes = [_start(folder, devices, number) for number in range(count)]
            _watch(processes, monitor, show, should_stop)
            if monitor.nodes.pending() and not should_stop():
                raise RunError(f"{folder}: all workers have ended, the last with status {processes[-1].returncode}")
        monitor.look(show)
    return Outcome(monitor.rows, time.monotonic() - started, monitor.errors())


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus_of(sweep: Sweep) -> list[str]:
    """Return the GPUs for the workers of a sweep; none where its runs use the CPU or one named GPU."""
    if any(config.device != "cuda" for config in sweep.runs.values()):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible.split(",")
    import torch  # noqa: PLC0415 - seconds

    return [str(number) for number in range(torch.cuda.device_count())]


def _start(folder: Path, devices: list[str], number: int) -> subprocess.Popen[bytes]:
    """Start a worker process, on a GPU of its own if there are enough."""
    environment = dict(os.environ)
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
    command = [sys.executable, "-m", "twophase.sweeps.runner", str(folder)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603 - this module


def _watch(
    processes: list[subprocess.Popen[bytes]],
    monitor: _Monitor,
    show: Callable[[int, str], None],
    should_stop: Callable[[], bool],
) -> None:
    """Look at the folder until all workers have ended; what a worker has died of is the error of its run."""
    running = list(processes)
    try:
        while running:
            time.sleep(_LOOK_SECONDS)
            if should_stop():
                break
            for process in [process for process in running if process.poll() is not None]:
                running.remove(process)
                if process.returncode:
                    monitor.blame(process)
            monitor.look(show)
    finally:
        for process in running:
            process.terminate()  # they write checkpoints
        for process in running:
            process.wait()


class _Monitor:
    """The table of a sweep while workers train."""

    def __init__(self, sweep: Sweep, folder: Path, on_rows: Callable[[list[Row]], Any]) -> None:
        self.sweep, self.folder, self.on_rows = sweep, folder, on_rows
        self.nodes, self.titles = Nodes(sweep, folder), titles(sweep)
        self.rows: list[Row] = []
        self._seen: set[str] | None = None
        self._drawn: Any = ""
        self._began, self._done_before = time.monotonic(), self.nodes.steps_done()

    def picture(self) -> Any:
        """Return what `on_rows` has returned last."""
        return self._drawn

    def errors(self) -> dict[str, str]:
        """Return the errors of failed runs by id."""
        errors = {run: self.nodes.error(self.nodes.nodes[run]) for run in self.sweep.runs}
        return {run: error for run, error in errors.items() if error and run not in self.nodes.summaries}

    def look(self, show: Callable[[int, str], None]) -> None:
        """Write the table and show the progress where a run has ended since the last look."""
        nodes = self.nodes.nodes
        ended = {run for run in self.sweep.runs if self.nodes.summary(nodes[run])}
        errors = self.errors()
        if self._seen == ended | errors.keys():
            return
        new = (ended | errors.keys()) - (self._seen or set())
        self._seen = ended | errors.keys()
        self.rows = rows_of(self.sweep, self.nodes.summaries, errors)
        write_rows(self.folder / TABLE, self.rows)
        self._drawn = self.on_rows(self.rows)
        done = self.nodes.steps_done()
        for run in sorted(new, key=list(self.sweep.runs).index)[-1:]:
            row = next(row for row in self.rows if row.run == run)
            show(
                done,
                f"{len(ended)}/{len(self.sweep.runs)} runs  {self.titles[run]}: {result_words(row)}{self._left(done)}",
            )

    def _left(self, done: int) -> str:
        total, seconds = sum(node.steps for node in self.nodes.nodes.values()), time.monotonic() - self._began
        if done <= self._done_before or done >= total:
            return ""
        return f"; about {duration(seconds * (total - done) / (done - self._done_before))} left"

    def blame(self, process: subprocess.Popen[bytes]) -> None:
        """Write the death of a worker, as by a full memory, into the folder of the run that it had."""
        for node in self.nodes.pending():
            for claim in self.nodes.path(node).glob(".claim-*"):
                owner = json.loads(claim.read_bytes() or "{}")
                if (owner.get("host"), owner.get("pid")) == (socket.gethostname(), process.pid):
                    write_atomic(self.nodes.path(node) / ERROR, f"its worker ended with status {process.returncode}\n")


if __name__ == "__main__":
    sys.exit(worker(Path(sys.argv[1])))
