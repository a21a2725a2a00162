"""Running a sweep: long-lived worker processes, a queue, and a folder from which the same command resumes.

A sweep's folder holds `sweep.json` (what it is; written first), `runs/<run id>/` (one run folder each), `cells.csv`
(the table, rewritten as runs end), `figures/`, and `worker-<n>.log` (what the workers said on stderr).

The workers live as long as the sweep, so that importing what trains is paid once a worker and not once a run. Parent
and worker exchange lines of JSON:

    parent -> worker, stdin:   {"run": "1f0c...", "folder": "/abs/runs/1f0c...", "config": {...}}
    worker -> parent, stdout:  {"run": "1f0c...", "status": "finished"}   or   {..., "status": "failed", "error": "..."}

Other lines on stdout are ignored. A worker ends at the end of its stdin; on SIGTERM it saves what it has and ends.
Whether a run is finished is decided by its folder alone, never by what a worker said or failed to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from twophase.config import UsageError, to_tree
from twophase.experiment.grid import Sweep, extends, spec_differences
from twophase.experiment.run import check_place, list_some, lock_folder, read_summary
from twophase.experiment.table import rows_of, write_rows
from twophase.files import write_atomic

SPEC, TABLE, RUNS, FIGURES = "sweep.json", "cells.csv", "runs", "figures"
ATTEMPTS = 3
"""How often a run is handed out before a worker's death under it counts as the run's failure."""
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_TABLE_SECONDS = 1.0
_END_SECONDS = 10.0
"""How long a worker may take to end by itself after its last run, and again after SIGTERM."""

Happening = Literal["begun", "finished", "diverged", "failed", "retried"]


@dataclass(frozen=True, slots=True)
class Status:
    """How far a sweep is; runs that several cells share count once.

    Args:
        total: runs of the sweep.
        finished: ended normally in this call.
        diverged: ended early by divergence in this call.
        failed: could not be run in this call.
        skipped: had ended before this call.
        seconds: since the call began.
        run: id of the run that this report is about; empty at the start.
        event: what has just happened: the sweep began, this run ended so, or it is tried again.
        error: why it failed or is tried again.
    """

    total: int
    finished: int
    diverged: int
    failed: int
    skipped: int
    seconds: float
    run: str
    event: Happening
    error: str

    @property
    def done(self) -> int:
        """Runs that need no more work in this call."""
        return self.finished + self.diverged + self.failed + self.skipped


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call of `run_sweep` did; the counts are of runs and add up to the runs of the sweep.

    Args:
        finished: ended normally in this call.
        diverged: ended early by divergence in this call.
        failed: could not be run; `errors` says why. Repeating the command tries them again.
        skipped: had ended before this call.
        seconds: duration of the call.
        errors: from run id to reason.
    """

    finished: int
    diverged: int
    failed: int
    skipped: int
    seconds: float
    errors: Mapping[str, str]


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    workers: int,
    command: Sequence[str] = (sys.executable, "-P", "-m", "twophase", "sweep-worker"),
    progress: Callable[[Status], None] | None = None,
    threads: int = 1,
    grace_seconds: float = 20.0,
) -> Outcome:
    """Run what is not finished yet of a sweep; repeating the call resumes it.

    Args:
        sweep: what to run.
        folder: the sweep's folder (`--out`).
        workers: worker processes, >= 1; no more are started than there are runs to do.
        command: the words that start a worker.
        progress: called in the calling thread at the start and whenever a run ends or is tried again.
        threads: CPU threads a worker, by environment variables that its libraries read when they are loaded.
        grace_seconds: how long a worker may take to save and end when the call is interrupted.

    Returns:
        What this call did. A run whose worker was killed is handed out at most three times; one that its worker reports
        as failed, once.

    Raises:
        UsageError: workers < 1, or a folder of another sweep, in use, or not writable; nothing is overwritten.
        RuntimeError: the workers cannot be started, or end at once.
        KeyboardInterrupt: after the workers have been told to stop and have ended.
    """
    if workers < 1:
        raise UsageError(f"--workers is {workers}; it must be a whole number >= 1")
    folder = Path(folder).absolute()
    check_place(folder, SPEC, "sweep")  # refuse before anything is touched
    lock = lock_folder(folder, "is running a sweep")
    try:
        _claim(sweep, folder)
        return _Call(sweep, folder, progress).work(list(command), workers, threads, grace_seconds)
    finally:
        os.close(lock)


def read_summaries(sweep: Sweep, folder: Path) -> dict[str, dict[str, Any]]:
    """The summaries of the runs that are finished in a sweep's folder, by run id."""
    found = {run: read_summary(folder / RUNS / run, run) for run in sweep.runs}
    return {run: summary for run, summary in found.items() if summary is not None}


def _claim(sweep: Sweep, folder: Path) -> None:
    """Write `sweep.json`, or make sure that it is this sweep's."""
    spec = json.loads(json.dumps(sweep.spec()))
    try:
        if not check_place(folder, SPEC, "sweep"):
            write_atomic(folder / SPEC, json.dumps(spec, indent=1) + "\n")
        saved = json.loads((folder / SPEC).read_text(encoding="utf-8"))
        different = spec_differences(spec, saved)
        if different and extends(spec, saved):  # more seeds or values: what is there stays and counts
            write_atomic(folder / SPEC, json.dumps(spec, indent=1) + "\n")
            different = []
        if not different:
            (folder / RUNS).mkdir(exist_ok=True)
            (folder / FIGURES).mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be used ({error.strerror}); choose another --out") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"--out {folder}: its {SPEC} is damaged; put it back or choose another --out") from None
    if different:
        raise UsageError(
            f"--out {folder}: belongs to another sweep: {list_some(different)}; "
            "choose another --out, or repeat that sweep's command to resume it"
        )


@dataclass(frozen=True, slots=True)
class _Event:
    """What a worker's thread reports: a run ended or is tried again, the thread is over, or nothing works."""

    run: str = ""
    kind: Literal["ended", "failed", "retried", "over", "broken"] = "over"
    error: str = ""


@dataclass(slots=True)
class _Crew:
    """What the worker threads share."""

    command: list[str]
    environment: dict[str, str]
    folder: Path
    jobs: queue.SimpleQueue[tuple[str, bytes]]
    events: queue.SimpleQueue[_Event] = field(default_factory=queue.SimpleQueue)
    stopping: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
    """Whether any worker has ever answered: until then, a worker that ends by itself is a broken command."""


class _Call:
    """One call of `run_sweep`: counts, table and crew."""

    def __init__(self, sweep: Sweep, folder: Path, progress: Callable[[Status], None] | None) -> None:
        self.sweep, self.folder, self.progress = sweep, folder, progress
        self.began = time.monotonic()
        self.summaries: dict[str, Any] = read_summaries(sweep, folder)
        self.skipped = len(self.summaries)
        self.errors: dict[str, str] = {}
        self.finished = self.diverged = 0
        self.table_at = 0.0

    def work(self, command: list[str], workers: int, threads: int, grace_seconds: float) -> Outcome:
        """Hand out what is left, keep the table up to date, and stop the crew whatever happens."""
        left = [run for run in self.sweep.runs if run not in self.summaries]
        crew = _Crew(
            command,
            os.environ | dict.fromkeys(_THREAD_VARIABLES, str(threads)),
            self.folder,
            queue.SimpleQueue(),
        )
        for run in left:
            job = {"run": run, "folder": str(self.folder / RUNS / run), "config": to_tree(self.sweep.runs[run])}
            crew.jobs.put((run, json.dumps(job).encode() + b"\n"))
        self._report("begun")
        hands = [_Worker(number, crew) for number in range(min(workers, len(left)))]
        try:
            for hand in hands:
                hand.start()
            over = 0
            while over < len(hands):
                event = crew.events.get()
                over += event.kind == "over"
                self._take(event)
        except BaseException:
            _stop(hands, crew, grace_seconds)
            self.summaries = read_summaries(self.sweep, self.folder)  # some have ended meanwhile
            raise
        finally:
            self._write_table()
        return Outcome(
            self.finished,
            self.diverged,
            len(self.errors),
            self.skipped,
            time.monotonic() - self.began,
            dict(self.errors),
        )

    def _take(self, event: _Event) -> None:
        if event.kind == "broken":
            raise RuntimeError(event.error)
        if event.kind == "over":
            return
        summary = read_summary(self.folder / RUNS / event.run, event.run)
        if event.kind == "retried":
            self._report("retried", event.run, event.error)
        elif summary is None:
            self.errors[event.run] = event.error or "the worker reported it as finished, but it left no valid summary"
            self._report("failed", event.run, self.errors[event.run])
        else:
            self.summaries[event.run] = summary
            self.diverged += summary["diverged"]
            self.finished += not summary["diverged"]
            self._report("diverged" if summary["diverged"] else "finished", event.run)
        if time.monotonic() - self.table_at > _TABLE_SECONDS:
            self._write_table()

    def _write_table(self) -> None:
        write_rows(self.folder / TABLE, rows_of(self.sweep, self.summaries, self.errors))
        self.table_at = time.monotonic()

    def _report(self, event: Happening, run: str = "", error: str = "") -> None:
        if self.progress is not None:
            counts = (len(self.sweep.runs), self.finished, self.diverged, len(self.errors), self.skipped)
            self.progress(Status(*counts, time.monotonic() - self.began, run, event, error))


class _Worker(threading.Thread):
    """A thread that keeps one worker process busy and replaces it when it dies."""

    def __init__(self, number: int, crew: _Crew) -> None:
        super().__init__(name=f"sweep-worker-{number}", daemon=True)
        self.number, self.crew = number, crew
        self.process: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()
        self._code = 0

    def run(self) -> None:
        """Take jobs until there are none, then let the process end."""
        try:
            while not self.crew.stopping.is_set():
                try:
                    run, line = self.crew.jobs.get_nowait()
                except queue.Empty:
                    break
                self._attempt(run, line)
            self._end(_END_SECONDS)
        except Exception as error:  # whatever it is, the call must hear of it instead of waiting for this thread
            words = " ".join(self.crew.command)
            self.crew.events.put(_Event(kind="broken", error=f"a worker cannot be run with {words!r}: {error}"))
        finally:
            self.crew.events.put(_Event(kind="over"))

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal, if there is one (from another thread)."""
        with self._guard:
            if self.process is not None:
                self.process.send_signal(number)

    def _attempt(self, run: str, line: bytes) -> None:
        """Have one run done, however many processes it takes, up to the limit."""
        for attempt in range(1, ATTEMPTS + 1):
            answer = self._converse(run, line)
            if self.crew.stopping.is_set() and answer is None:
                return
            if answer is not None:
                self.crew.answered.set()
                failed = answer["status"] == "failed"
                error = str(answer.get("error") or "the worker gave no reason") if failed else ""
                self.crew.events.put(_Event(run, "failed" if failed else "ended", error))
                return
            # Killed between writing its summary and saying so: the folder knows better.
            if read_summary(self.crew.folder / RUNS / run, run) is not None:
                self.crew.events.put(_Event(run, "ended"))
                return
            error = f"{self._death()} (attempt {attempt} of {ATTEMPTS}); see {self._log_path().name}"
            if attempt == ATTEMPTS and self._code >= 0 and not self.crew.answered.is_set():
                # A crash in one run is answered, not died of: a worker that exits before any answer never worked.
                self.crew.events.put(_Event(kind="broken", error=f"{error}: {self._last_words()}"))
                return
            self.crew.events.put(_Event(run, "failed" if attempt == ATTEMPTS else "retried", error))

    def _converse(self, run: str, line: bytes) -> dict[str, Any] | None:
        """The process's answer about a run, or None when it died first."""
        process = self._living()
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
            for reply in process.stdout:
                answer = _answer(reply, run)
                if answer is not None:
                    return answer
        self._end(1.0)
        return None

    def _living(self) -> subprocess.Popen[bytes] | None:
        """The process, started if need be; None when the sweep is being stopped."""
        with self._guard:  # so that `send` never misses a process that is just being started
            if self.crew.stopping.is_set():
                return None
            if self.process is None:
                with self._log_path().open("ab") as log:
                    self.process = subprocess.Popen(  # noqa: S603 - the command is the caller's own
                        self.crew.command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        env=self.crew.environment,
                        # Ctrl-C on the terminal reaches the parent only, which then stops the workers in good order.
                        process_group=0,
                    )
            return self.process

    def _end(self, patience: float) -> None:
        """Close the process's stdin and see it out: by itself, then by SIGTERM, then by SIGKILL."""
        process = self.process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # what was not sent stays in the buffer, and closing tries to send it again
            process.stdin.close()
        for act in (process.terminate, process.kill, lambda: None):
            try:
                self._code = process.wait(timeout=patience)
                break
            except subprocess.TimeoutExpired:
                act()
        process.stdout.close()
        with self._guard:
            self.process = None

    def _death(self) -> str:
        how = f"was killed by signal {-self._code}" if self._code < 0 else f"ended with status {self._code}"
        return f"worker {self.number} {how} before it answered"

    def _log_path(self) -> Path:
        return self.crew.folder / f"worker-{self.number}.log"

    def _last_words(self) -> str:
        lines = self._log_path().read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _stop(hands: Sequence[_Worker], crew: _Crew, grace_seconds: float) -> None:
    """Ask all processes to end, wait, and end those that do not."""
    crew.stopping.set()
    deadline = time.monotonic() + grace_seconds
    try:
        for hand in hands:
            hand.send(signal.SIGTERM)
        for hand in hands:
            if hand.ident is not None:
                hand.join(max(deadline - time.monotonic(), 0.0))
    finally:
        for hand in hands:
            hand.send(signal.SIGKILL)
        for hand in hands:
            if hand.ident is not None:
                hand.join(5.0)


def _answer(line: bytes, run: str) -> dict[str, Any] | None:
    """A line of a worker's stdout, if it is the answer about this run."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    if isinstance(answer, dict) and answer.get("run") == run and answer.get("status") in {"finished", "failed"}:
        return answer
    return None
