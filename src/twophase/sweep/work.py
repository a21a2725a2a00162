"""What a sweep's workers share with the one who started it: `plan.json`, and the loop that takes jobs off the queue.

Whether work is done is decided by files alone: a run by its `summary.json`, the end of a shared stretch by its state in
`forest/`. The queue only keeps two workers from doing the same at the same time, so it may be lost, or hand out a job
twice, without harm.
"""

from __future__ import annotations

import json
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
from twophase.sweep.beat import Beat, hide_password
from twophase.sweep.plan import Forest, Job, Plan, from_json, to_json
from twophase.sweep.queue import Claim, Queue

PLAN, RUNS, STATES, DONE_LOG = "plan.json", "runs", "forest", "jobs.jsonl"
_FORMAT = 1
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
        study: name of the queue.
        storage: URL of the queue's database with its password hidden, or None when the queue lies in the folder.
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
    storage: str | None
    base: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, Any]]
    stands_for: Mapping[str, str]
    forest: Forest
    jobs: Mapping[str, Job]
    counts: Mapping[str, int]
    texts: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path, made: Plan, *, spec: str, merge: bool, study: str, storage: str | None, most: int,
           base: Any, texts: Mapping[str, str]) -> Work:  # fmt: skip
        """The work of a plan, cut into jobs of at most `most` inner steps."""
        tree = to_tree(base)
        known = values_of(base)
        runs = {
            run: {path: value for path, value in values_of(config).items() if value != known[path]}
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
        shown = None if storage is None else hide_password(storage)
        return cls(folder, spec, merge, study, shown, tree, runs, made.stands_for, made.forest, jobs, counts, texts)

    @classmethod
    def read(cls, folder: Path) -> Work | None:
        """What `write` left in a sweep's folder, or None when there is nothing.

        Raises:
            UsageError: it cannot be read, or is damaged.
        """
        path = folder / PLAN
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise ValueError(f"its format is {data['format']}, this version reads {_FORMAT}")
            forest = from_json(data["nodes"])
            jobs = [Job(name, node, deep, forest.nodes[node].runs, after) for name, node, deep, after in data["jobs"]]
            return cls(
                folder=folder,
                forest=forest,
                jobs={job.id: job for job in jobs},
                **{key: data[key] for key in ("spec", "merge", "study", "storage", "base", "runs")},
                **{key: data[key] for key in ("stands_for", "counts")},
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
            "storage": self.storage,
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

    def ready(self, finished: Callable[[str], bool], below: str | None = None) -> list[str]:
        """The jobs that can be done now and are not done yet.

        Args:
            finished: whether a run is.
            below: only jobs that come right after this one.
        """
        found = []
        for job in self.jobs.values():
            if below is not None and job.after != below:
                continue
            parent = self.forest.nodes[job.node].parent
            if parent is not None and not self.state(parent).exists():
                continue
            if not job.deep and self.state(job.node).exists():
                continue
            if all(map(finished, job.runs)):
                continue
            found.append(job.id)
        return found


Execute = Callable[[Work, Job], None]
"""Does a job: afterwards its runs are finished, or (not deep) the state at its node's end is on disk."""


class Stopped(Exception):  # noqa: N818 - no error: it was asked for
    """The worker was asked to stop; what it had is on disk."""


def work(
    folder: Path,
    storage: str | None,
    execute: Execute,
    *,
    stopped: Callable[[], bool],
    prepare: Callable[[Work], None] = lambda _: None,
) -> int:
    """Take jobs off a sweep's queue and do them, until nothing is left or the worker is stopped.

    As long as other workers have jobs it stays, because a job comes back if its worker dies.

    Args:
        folder: the sweep's folder, which `twophase sweep` made.
        storage: as the sweep's.
        execute: does a job; it raises `Stopped` when `stopped` became true, `BusyError` when somebody else is at a run.
        stopped: whether the worker has been asked to end.
        prepare: called with the plan before any job is taken; it refuses what this machine cannot do, so that a worker
            in a wrong place takes no job, instead of failing one after the other.

    Returns:
        The number of jobs done.

    Raises:
        UsageError: no sweep's folder, another storage than the sweep's, or a storage that cannot be reached.
        QueueError: the storage has stopped to answer.
    """
    folder = Path(folder).absolute()
    plan = _plan(folder, storage)
    prepare(plan)
    done, pause = 0, _PAUSE_SECONDS
    with Beat(folder) as beat, Queue.open(folder, storage, plan.study) as queue:
        queue.offer(plan.ready(plan.finished))
        while not stopped():
            claim = queue.claim(beat)
            if claim is None:
                queue.offer(plan.ready(plan.finished))
                if queue.counts().left == 0:
                    break
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            if stopped():  # meanwhile: perhaps another worker, stopped as well, has just given this job back
                claim.release()
                break
            pause = _PAUSE_SECONDS
            if claim.job not in plan.jobs:  # the sweep has been extended
                plan = _plan(folder, storage)
                prepare(plan)
            done += _do(plan, claim, queue, execute)
    return done


def _do(plan: Work, claim: Claim, queue: Queue, execute: Execute) -> bool:
    """Do a job that was taken; whether it is done now."""
    job = plan.jobs.get(claim.job)
    if job is None:  # of a plan that is no more
        claim.done()
        return False
    try:
        execute(plan, job)
        missing = unfinished(plan, job.runs)
        if missing and (job.deep or not plan.state(job.node).exists()):
            raise RuntimeError(f"the worker left no valid summary of {', '.join(missing[:3])}")
        # Before the job counts as done: whoever sees that nothing is left must be right.
        below = plan.ready(plan.finished, below=job.id)
        queue.reopen(below)  # they may count as done from before their files were lost
        queue.offer(below)
    except Stopped:
        claim.release()
    except BusyError:  # somebody who was taken for dead goes on with it after all
        claim.release()
        time.sleep(_LONGEST_PAUSE_SECONDS)
    except Exception as error:  # one bad job must not take the others with it
        with suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        claim.failed(f"{type(error).__name__}: {error}{notes}")
    else:
        return claim.done(_best(plan, job))
    return False


def _best(plan: Work, job: Job) -> float | None:
    """The lowest validation loss of a job's runs, for those who look at the study."""
    if not job.deep:
        return None
    summaries = (read_summary(plan.run_folder(run), run) or {} for run in job.runs)
    losses = [summary["validation_loss"] for summary in summaries if summary.get("validation_loss") is not None]
    return min(losses, default=None)


def _plan(folder: Path, storage: str | None) -> Work:
    plan = Work.read(folder)
    if plan is None:
        raise UsageError(f"--out {folder}: holds no {PLAN}; start the sweep there first, with twophase sweep --out")
    given = None if storage is None else hide_password(storage)
    if plan.storage != given:
        wanted = "no --storage (its queue lies in the folder)" if plan.storage is None else f"--storage {plan.storage}"
        raise UsageError(f"--storage is {given or 'not given'}; the sweep in {folder} was started with {wanted}")
    return plan


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
