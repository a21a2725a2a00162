"""Running a sweep: plan, workers, table, and a folder from which the same command resumes.

A sweep's folder holds

| file             | holds                                                                                |
|------------------|--------------------------------------------------------------------------------------|
| `sweep.json`     | what the sweep is; written first                                                     |
| `plan.json`      | which runs are done for which cells, and what they share                             |
| `runs/<run id>/` | one run folder each                                                                  |
| `cells.csv`      | the table, rewritten as runs end                                                     |
| `figures/`       | what is drawn of it                                                                  |
| `forest/`        | states at branches that are still needed; empty at the end                           |
| `claims/`        | which worker has which job; empty at the end                                         |
| `jobs.jsonl`     | inner steps and seconds of each piece of work                                        |
| `worker-<n>.log` | output of a worker that was started here                                              |

Workers are separate processes: the same whether this call starts them, or a user on another machine that sees the
folder. This call starts the requested number, replaces dead workers, and watches the folder. A run is finished
when its folder says so, never because a worker said so.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from twophase.base.errors import RunError, UsageError
from twophase.base.files import remove_leftovers, write_atomic
from twophase.base.reading import read_json_object
from twophase.runs.folder import check_place, list_some, lock_folder, read_summary
from twophase.sweeps.crew import Crew
from twophase.sweeps.grid import Sweep, extends, spec_differences
from twophase.sweeps.plan import plan
from twophase.sweeps.queue import CLAIMS, Queue
from twophase.sweeps.table import LOSS, PERPLEXITY, Row, readable, rows_of, titles, write_rows
from twophase.sweeps.work import RUNS, STATES, Work

SPEC, TABLE, FIGURES = "sweep.json", "cells.csv", "figures"
JOBS_A_WORKER = 8
"""Into about how many jobs a worker's share is cut, so that all end at about the same time."""
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_GRACE_SECONDS = 20.0
"""How long a worker may take to save and end when the call is interrupted."""
_TABLE_SECONDS = 1.0
_LOOK_SECONDS = 0.1
"""Between two looks at the folder; more if a look takes long, so that looking is a fiftieth of the time at most."""
_LONGEST_SECONDS = 5.0
_ERRORS_SECONDS = 2.0

Happening = Literal["begun", "finished", "diverged", "failed", "replaced"]


@dataclass(frozen=True, slots=True)
class Status:
    """Progress of a sweep; runs that several cells share count once.

    Args:
        finished: ended normally in this call.
        diverged: ended early by divergence in this call.
        failed: could not be run in this call.
        skipped: had ended before this call.
        run: id of the run that this report is about; empty at the start and when a worker is replaced.
        event: latest event: the sweep began, this run ended so, or a worker was replaced.
        error: reason why a run failed or a worker was replaced.
        setting: the run's arm and values, for people.
        result: perplexity of a finished run (loss, for a task without perplexity), in words.
        rows: function that returns the present table.
    """

    total: int
    finished: int
    diverged: int
    failed: int
    skipped: int
    run: str = ""
    event: Happening = "begun"
    error: str = ""
    setting: str = ""
    result: str = ""
    rows: Callable[[], list[Row]] = field(default=list, repr=False, compare=False)

    @property
    def done(self) -> int:
        """Runs that need no more work."""
        return self.finished + self.diverged + self.failed + self.skipped


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call of `run_sweep` did; the counts, those of `Status`, add up to the sweep's runs if it waited for them.

    Args:
        seconds: duration of the call.
        errors: reason of each failed run, by run id. Repeating the command tries it again.
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
    merge: bool = True,
    devices: Sequence[str] = (),
    runs: Path | None = None,
    texts: Mapping[str, str] | None = None,
    in_memory: int | None = None,
) -> Outcome:
    """Run what is not finished yet of a sweep; repeating the call resumes it.

    Args:
        sweep: sweep to run.
        folder: the sweep's folder (`--out`).
        workers: worker processes, >= 1; no more are started than there are jobs. With 0 none is started, and the call
            returns when the plan is written: workers may be started elsewhere.
        command: the words that start a worker; `--out` and what else it needs are added.
        progress: called in the calling thread at the start and whenever a run ends or a worker is replaced.
        threads: CPU threads a worker, by environment variables that its libraries read when they are loaded.
        merge: do runs that are the same in exact arithmetic once (see `twophase.sweeps.plan`).
        devices: values of CUDA_VISIBLE_DEVICES for the workers, dealt out in turn.
        runs: folder of the run folders, for sweeps that have runs in common: `runs/` becomes a link to it. None keeps
            them in the sweep's folder.
        texts: fingerprints of what the runs train on, by name, which every worker compares with what it sees; None
            where nothing is left to do.
        in_memory: branch states that a worker holds in memory at most, >= 0; None leaves it to the worker.

    Returns:
        What this call did.

    Raises:
        UsageError: workers < 0, or a folder of another sweep, in use or not writable; nothing is changed.
        RunError: the workers cannot be started, or die one after the other, or the folder was moved.
        KeyboardInterrupt: after the workers have been told to stop and have ended.
    """
    if not isinstance(workers, Integral) or workers < 0:
        raise UsageError(f"--workers is {workers}; it must be a whole number >= 1, or 0 to start none here")
    folder = Path(folder).absolute()
    check_place(folder, SPEC, "sweep")  # refuse before anything is touched
    lock = lock_folder(folder, "is running a sweep")
    try:
        for place in (folder, folder / FIGURES, folder / STATES):
            remove_leftovers(place)
        try:
            old = _work_there(sweep, folder, merge=merge, texts=texts or {})
            work = _planned(sweep, folder, old, merge=merge, workers=workers, runs=runs, texts=texts or {})
        except OSError as error:
            raise UsageError(f"--out {folder}: cannot be used ({error.strerror}); choose another --out") from None
        call = _Call(sweep, work, progress)
        if call.pending:
            queue = Queue(folder)
            if workers == 0:  # failures of workers elsewhere are reported once, before they are forgotten
                call.ask(queue)
                call.write()
            queue.begin_call(failed_only=workers == 0)
            arguments = [*command, "--out", str(folder)]
            arguments += [] if in_memory is None else ["--in-memory", str(in_memory)]
            if workers:
                environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, str(threads))
                call.watch(Crew(folder, arguments, min(workers, len(work.jobs)), environment, devices))
        if len(call.summaries) == len(work.runs):  # of a plan before an extension, or left by killed workers
            for path in (*(folder / STATES).glob("*"), *(folder / CLAIMS).glob("*")):
                with contextlib.suppress(OSError):
                    path.unlink()
        return call.outcome()
    except FileNotFoundError:
        if folder.exists():
            raise
        raise RunError(
            f"{folder}: was moved or removed during the sweep; repeat the command with --out where it is now"
        ) from None
    finally:
        os.close(lock)


def read_plan(sweep: Sweep, folder: Path) -> Work | None:
    """Return the plan in a sweep's folder if it is this sweep's, else None."""
    work = Work.read(Path(folder).absolute())
    return work if work is not None and work.spec == sweep.identity else None


def read_summaries(runs: Collection[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the summaries of the runs that are finished in a sweep's folder, by run id."""
    summaries = {run: read_summary(folder / RUNS / run, run) for run in runs}
    return {run: summary for run, summary in summaries.items() if summary is not None}


def _work_there(sweep: Sweep, folder: Path, *, merge: bool, texts: Mapping[str, str]) -> Work | None:
    """Return the work of a folder of this sweep, or of one that this sweep extends; refuse every other folder."""
    if not check_place(folder, SPEC, "sweep"):
        return None
    spec = sweep.spec()
    try:
        saved = read_json_object(folder / SPEC)
        different = [] if extends(spec, saved) else spec_differences(spec, saved)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"--out {folder}: its {SPEC} is damaged; put it back or choose another --out") from None
    if different:
        raise UsageError(
            f"--out {folder}: belongs to another sweep: {list_some(different)}; "
            "choose another --out, or repeat that sweep's command to resume it"
        )
    work = Work.read(folder)
    if work is not None and work.merge != merge:
        flags = ("with --no-merge there, without here", "without --no-merge there, with it here")[work.merge]
        raise UsageError(f"--out {folder}: the sweep was begun {flags}; repeat its command or choose another --out")
    if work is not None and any(work.texts.get(name, text) != text for name, text in texts.items()):
        raise UsageError(
            f"--out {folder}: the text is not the one that this sweep was begun with, or --task has another file or "
            "data. Put the old one back, or choose another --out"
        )
    return work


def _planned(
    sweep: Sweep,
    folder: Path,
    old: Work | None,
    *,
    merge: bool,
    workers: int,
    runs: Path | None,
    texts: Mapping[str, str],
) -> Work:
    """Prepare the folder; return the plan to follow: another than the old one if the sweep has been extended."""
    path, place = folder / SPEC, folder / RUNS
    text = json.dumps(sweep.spec(), indent=1) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # new, or extended
        write_atomic(path, text)
    (folder / FIGURES).mkdir(exist_ok=True)
    if runs is not None and not place.exists() and (not place.is_symlink() or place.resolve() == runs.resolve()):
        runs.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(os.path.relpath(runs, folder), target_is_directory=True)
    if place.is_symlink() and not place.exists():
        raise UsageError(
            f"--out {folder}: its runs are in {place.resolve()}, which is not there; move that folder along, or this "
            "one back"
        )
    place.mkdir(exist_ok=True)
    if old is not None and old.spec == sweep.identity:
        return old
    made = plan(sweep, merge=merge, finished=set(read_summaries(list(sweep.runs), folder)))
    # At least two runs' length: below that, handing a state from one process to another would not pay.
    longest = max(config.steps for config in sweep.runs.values())
    most = max(2 * longest, made.steps // (JOBS_A_WORKER * max(workers, 2)))
    all_texts = {**(old.texts if old is not None else {}), **texts}
    work = Work.of(folder, sweep, made, merge=merge, most=most, texts=all_texts)
    for node in old.forest.nodes.values() if old is not None else ():
        # The state of a node that has more runs now says nothing about these.
        if node.id in work.forest.nodes and not set(work.forest.nodes[node.id].runs) <= set(node.runs):
            work.state(node.id).unlink(missing_ok=True)
    work.write()
    return work


class _Call:
    """One call of `run_sweep`: counts and table."""

    def __init__(self, sweep: Sweep, work: Work, progress: Callable[[Status], None] | None) -> None:
        self.sweep, self.work, self.progress = sweep, work, progress
        self.began = time.monotonic()
        self.summaries: dict[str, Any] = read_summaries(list(work.runs), work.folder)
        self.skipped = frozenset(self.summaries)
        self.errors: dict[str, str] = {}
        self.table_at, self.tabled = 0.0, 0
        """When the table was last written, and how many runs had ended or failed then."""
        self._titles = titles(sweep)
        self.write()
        self._report("begun")

    @property
    def pending(self) -> list[str]:
        """The runs that have neither ended nor failed."""
        return [run for run in self.work.runs if run not in self.summaries and run not in self.errors]

    @property
    def ended(self) -> int:
        """Runs that have ended or failed, in this call or before."""
        return len(self.summaries) + len(self.errors)

    def watch(self, crew: Crew) -> None:
        """Wait until nothing is left, with the table up to date; stop the crew in any case."""
        queue = Queue(self.work.folder)
        try:
            crew.start()
            asked = time.monotonic()
            while self.pending:
                began = time.monotonic()
                trouble = crew.in_trouble()  # before the look: a worker that finds nothing left may end, too
                self._look()
                if trouble or began - asked > _ERRORS_SECONDS:
                    asked = began
                    self.ask(queue)
                if not self.pending:
                    break
                for death in crew.replace(self.ended - len(self.skipped)) if trouble else ():
                    self._report("replaced", error=death)
                if self.ended != self.tabled and began - self.table_at > _TABLE_SECONDS:
                    self.write()
                now = time.monotonic()
                next_look = now + min(max(_LOOK_SECONDS, 49 * (now - began)), _LONGEST_SECONDS)
                time.sleep(_LOOK_SECONDS)
                # Workers that have all ended left the last results, for which a short sweep would wait seconds more.
                while time.monotonic() < next_look and not crew.in_trouble():
                    time.sleep(_LOOK_SECONDS)
            crew.finish()
        except BaseException:
            crew.stop(_GRACE_SECONDS)
            self._look()  # some have ended meanwhile
            raise
        finally:
            crew.stop(0.0)
            self.write()

    def outcome(self) -> Outcome:
        """Sum up the call."""
        return Outcome(*self._counts(), time.monotonic() - self.began, dict(self.errors))

    def _counts(self) -> tuple[int, int, int, int]:
        """Count the runs that have finished, diverged and failed in this call, and those that had ended before."""
        diverged = [summary["diverged"] for run, summary in self.summaries.items() if run not in self.skipped]
        return diverged.count(False), diverged.count(True), len(self.errors), len(self.skipped)

    def _look(self) -> None:
        """Take note of the runs that have ended."""
        for run, summary in read_summaries(self.pending, self.work.folder).items():
            self.summaries[run] = summary
            self._report("diverged" if summary["diverged"] else "finished", run)

    def ask(self, queue: Queue) -> None:
        """Take note of the jobs that have failed."""
        pending = set(self.pending)
        jobs = {name: job for name, job in self.work.jobs.items() if not pending.isdisjoint(job.runs)}
        failures = {name: standing.error for name, standing in queue.look(jobs).items() if standing.state == "failed"}
        if failures:
            self._look()  # what its jobs had finished before
        for name, reason in failures.items():
            for run in jobs[name].runs:
                if run not in self.summaries and run not in self.errors:
                    self.errors[run] = reason
                    self._report("failed", run, reason)

    def write(self) -> None:
        """Bring the table up to date."""
        write_rows(self.work.folder / TABLE, self._rows())
        self.table_at, self.tabled = time.monotonic(), self.ended

    def _report(self, event: Happening, run: str = "", error: str = "") -> None:
        if self.progress is not None:
            summary = self.summaries.get(run, {})
            measures = {"perplexity": PERPLEXITY, "validation_loss": LOSS}
            results = [f"{name} {readable(summary[key])}" for key, name in measures.items() if summary.get(key)]
            details = (run, event, error, self._titles.get(run, ""), "".join(results[:1]))
            self.progress(Status(len(self.work.runs), *self._counts(), *details, rows=self._rows))

    def _rows(self) -> list[Row]:
        return rows_of(self.sweep, self.summaries, self.errors, self.work.stands_for)
