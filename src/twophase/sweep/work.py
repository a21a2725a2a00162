"""What a sweep's workers share with the process that started it: `plan.json`, and the loop that takes jobs.

Whether work is done is decided by files alone: a run by its `summary.json`, the end of a shared stretch by its state in
`forest/`. The queue only keeps two workers from doing the same at the same time. It may be lost, or hand out a job
twice, without harm.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError, fingerprint, to_tree, values_of
from twophase.base.files import write_atomic
from twophase.runs.folder import BusyError, read_summary
from twophase.sweep.plan import Forest, Job, Plan, from_json, to_json
from twophase.sweep.queue import Claim, Queue

PLAN, RUNS, STATES, DONE_LOG = "plan.json", "runs", "forest", "jobs.jsonl"
_FORMAT = 2
"""In format 1 an Optuna study handed out the jobs; only the study's name has changed its meaning."""
_PAUSE_SECONDS = 0.3
"""Between two looks at a queue in which everything is taken; it grows to `_LONGEST_PAUSE_SECONDS`."""
_LONGEST_PAUSE_SECONDS = 3.0


@dataclass(frozen=True)
class Work:
    """A sweep's plan as its folder holds it.

    Args:
        folder: the sweep's folder.
        spec: fingerprint of the sweep's `spec()`.
        merge: whether runs that are the same in exact arithmetic were merged.
        study: name of the Optuna study that shows the runs.
        base: the base configuration's tree.
        runs: from canonical run id to the values in which it differs from the base, by dotted path.
        stands_for: from a cell's run id to the canonical run that is done in its place.
        forest: what the runs share.
        jobs: the pieces that workers take.
        counts: cells and steps of the plan, for people.
        texts: fingerprints of the texts that the runs train on, by a name that the trainer knows; a worker that sees
            another text must not take part.
    """

    folder: Path
    spec: str
    merge: bool
    study: str
    base: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, Any]]
    stands_for: Mapping[str, str]
    forest: Forest
    jobs: Mapping[str, Job]
    counts: Mapping[str, int]
    texts: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path, made: Plan, *, spec: str, merge: bool, study: str, most: int, base: Any,
           texts: Mapping[str, str]) -> Work:  # fmt: skip
        """The work of a plan, cut into jobs of at most `most` inner steps."""
        tree = to_tree(base)
        usual = values_of(base)
        runs = {
            run: {path: value for path, value in values_of(config).items() if value != usual[path]}
            for run, config in made.runs.items()
        }
        counts = {
            "cells": made.cells,
            "runs": len(made.runs),
            "steps_asked": made.steps_asked,
            "steps": made.steps,
            "steps_algebra": made.steps_algebra,
        }
        jobs = {job.id: job for job in made.forest.jobs(most)}
        return cls(folder, spec, merge, study, tree, runs, made.stands_for, made.forest, jobs, counts, texts)

    @classmethod
    def read(cls, folder: Path) -> Work | None:
        """What `write` left in a sweep's folder, or None when there is nothing.

        Raises:
            UsageError: it cannot be read, or is damaged.
        """
        path = folder / PLAN
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] not in (1, _FORMAT):
                raise ValueError(f"its format is {data['format']}, this version reads {_FORMAT}")
            forest = from_json(data["nodes"])
            jobs = [Job(name, node, deep, forest.nodes[node].runs, after) for name, node, deep, after in data["jobs"]]
            return cls(
                folder=folder,
                forest=forest,
                jobs={job.id: job for job in jobs},
                study=data["study"] if data["format"] == _FORMAT else f"{data['study']}-runs",
                **{key: data[key] for key in ("spec", "merge", "base", "runs", "stands_for", "counts")},
                texts=data.get("texts", {}),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--out {folder}: its {PLAN} cannot be used ({error}); remove that file and repeat the sweep's "
                "command, finished runs stay"
            ) from None

    def write(self) -> None:
        """Write `plan.json`, atomically."""
        data = {
            "format": _FORMAT,
            "spec": self.spec,
            "merge": self.merge,
            "study": self.study,
            "counts": dict(self.counts),
            "texts": dict(self.texts),
            "base": dict(self.base),
            "runs": {run: dict(values) for run, values in self.runs.items()},
            "stands_for": dict(self.stands_for),
            "nodes": to_json(self.forest),
            "jobs": [[job.id, job.node, job.deep, job.after] for job in self.jobs.values()],
        }
        write_atomic(self.folder / PLAN, json.dumps(data, separators=(",", ":")) + "\n")

    def run_folder(self, run: str) -> Path:
        """The folder of a canonical run."""
        return self.folder / RUNS / run

    def finished(self, run: str) -> bool:
        """Whether a canonical run is finished."""
        return read_summary(self.run_folder(run), run) is not None

    def state(self, node: str) -> Path:
        """The file of the state at a node's end."""
        return self.folder / STATES / f"{node}.end.pt"

    def ready(self, finished: Callable[[str], bool]) -> list[str]:
        """The jobs that can be done now and are not done yet; `finished` says whether a run is."""
        return [name for name, job in self.jobs.items() if self.is_ready(job, finished)]

    def is_ready(self, job: Job, finished: Callable[[str], bool]) -> bool:
        """Whether a job can be done now and is not done yet."""
        parent = self.forest.nodes[job.node].parent
        if parent is not None and not self.state(parent).exists():
            return False
        if not job.deep and self.state(job.node).exists():
            return False
        return not all(map(finished, job.runs))


Execute = Callable[[Work, Job], None]
"""Does a job: afterwards its runs are finished, or (not deep) the state at its node's end is on disk."""


class Stopped(Exception):  # noqa: N818 - no error: it was asked for
    """The worker was asked to stop; what it had is on disk."""


def work(
    folder: Path,
    execute: Execute,
    *,
    stopped: Callable[[], bool],
    prepare: Callable[[Work], None] = lambda _: None,
) -> int:
    """Take jobs of a sweep and do them, until nothing is left or the worker is stopped.

    As long as other workers have jobs it stays, because a job comes back if its worker dies.

    Args:
        folder: the sweep's folder, which `twophase sweep` made.
        execute: does a job; it raises `Stopped` when `stopped` became true, `BusyError` when another process has a run.
        stopped: whether the worker has been asked to end.
        prepare: called with the plan before any job is taken; it refuses what this machine cannot do, so that a worker
            in a wrong place takes no job, instead of failing one after the other.

    Returns:
        The number of jobs done.

    Raises:
        UsageError: no sweep's folder.
    """
    folder = Path(folder).absolute()
    version = _version(folder)
    plan = _plan(folder)
    prepare(plan)
    queue, done, pause = Queue(folder), 0, _PAUSE_SECONDS
    ended: set[str] = set()

    def finished(run: str) -> bool:
        if run not in ended and plan.finished(run):
            ended.add(run)
        return run in ended

    while not stopped():
        if (newer := _version(folder)) != version:  # the sweep has been extended
            plan, version = _plan(folder), newer
            prepare(plan)
        standings = queue.look(plan.ready(finished))
        claim = queue.take(standings)
        if claim is None:
            if all(standing.state == "failed" for standing in standings.values()):
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            continue
        pause = _PAUSE_SECONDS
        with claim:
            # Meanwhile another worker may have done this job, or been stopped and given it back.
            if not stopped() and plan.is_ready(plan.jobs[claim.job], finished):
                done += _do(plan, claim, execute)
    return done


def _do(plan: Work, claim: Claim, execute: Execute) -> bool:
    """Do a job that was taken; whether it is done now."""
    job = plan.jobs[claim.job]
    try:
        execute(plan, job)
        missing = unfinished(plan, job.runs)
        if missing and (job.deep or not plan.state(job.node).exists()):
            raise RuntimeError(f"the worker left no valid summary of {', '.join(missing[:3])}")
    except Stopped:
        return False
    except BusyError:  # a worker that seemed dead goes on with a run after all
        claim.release()
        time.sleep(_LONGEST_PAUSE_SECONDS)
        return False
    except Exception as error:  # one bad job must not take the others with it
        with suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        claim.fail(f"{type(error).__name__}: {error}{notes}")
        return False
    return True


def _plan(folder: Path) -> Work:
    plan = Work.read(folder)
    if plan is None:
        raise UsageError(f"--out {folder}: holds no {PLAN}; start the sweep there first, with twophase sweep --out")
    return plan


def _version(folder: Path) -> tuple[int, ...]:
    """What changes when `plan.json` is written anew."""
    with suppress(FileNotFoundError), (folder / PLAN).open("rb") as file:  # opened: NFS then asks the server
        status = os.fstat(file.fileno())
        return status.st_ino, status.st_mtime_ns, status.st_size
    return ()


def spec_id(spec: Mapping[str, Any]) -> str:
    """What `plan.json` remembers of the sweep that it is the plan of."""
    return fingerprint(dict(spec))


def executed(folder: Path) -> Iterator[Mapping[str, Any]]:
    """What workers have reported in `jobs.jsonl`: a line a piece of work, with its inner steps and seconds."""
    try:
        lines = (folder / DONE_LOG).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # a line that a kill has cut
            continue
        if isinstance(record, dict):
            yield record


def report(folder: Path, record: Mapping[str, Any]) -> None:
    """Append a line to `jobs.jsonl`."""
    # One unbuffered write of a whole line: workers of several processes do not mix theirs.
    with (folder / DONE_LOG).open("ab", buffering=0) as file:
        file.write((json.dumps(record) + "\n").encode())


def unfinished(work: Work, runs: Iterable[str]) -> list[str]:
    """Those of the runs that are not finished."""
    return [run for run in runs if not work.finished(run)]
