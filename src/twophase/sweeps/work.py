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
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError, fingerprint, values_of
from twophase.base.errors import message_of
from twophase.base.files import write_atomic
from twophase.base.reading import check_regular, read_json_object
from twophase.runs.folder import RUN_ID, BusyError, read_summary
from twophase.sweeps.grid import Sweep
from twophase.sweeps.plan import Forest, Job, Node, Plan
from twophase.sweeps.queue import Claim, Queue

PLAN, RUNS, STATES, DONE_LOG = "plan.json", "runs", "forest", "jobs.jsonl"
_FORMAT = 2
_PAUSE_SECONDS = 0.3
"""Between two looks at a queue in which everything is taken; it grows to `_LONGEST_PAUSE_SECONDS`."""
_LONGEST_PAUSE_SECONDS = 3.0


@dataclass(frozen=True)
class Work:
    """A sweep's plan as its folder holds it.

    Args:
        folder: the sweep's folder.
        forest: shared stretches of the runs.
        jobs: the pieces that workers take.
        spec: the sweep's `identity`.
        merge: True if runs that are the same in exact arithmetic were merged.
        counts: cells and steps of the plan, for people.
        texts: fingerprints of the runs' training texts, by the trainer's names; a worker with another text is refused.
        base: the base configuration's tree.
        runs: values in which a canonical run differs from the base, by run id and dotted path.
        stands_for: canonical run that is done in the place of a cell's run, by run id.
    """

    folder: Path
    forest: Forest
    jobs: Mapping[str, Job]
    spec: str
    merge: bool
    counts: Mapping[str, int]
    texts: Mapping[str, str]
    base: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, Any]]
    stands_for: Mapping[str, str]
    _ended: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, folder: Path, sweep: Sweep, made: Plan, *, merge: bool, most: int, texts: Mapping[str, str]) -> Work:
        """Return the work of a sweep's plan, cut into jobs of at most `most` inner steps."""
        usual = values_of(sweep.base)
        return cls(
            folder,
            made.forest,
            {job.id: job for job in made.forest.jobs(most)},
            spec=sweep.identity,
            merge=merge,
            counts=made.counts,
            texts=texts,
            base=sweep.spec()["base"],
            runs={
                run: {path: value for path, value in values_of(config).items() if value != usual[path]}
                for run, config in made.runs.items()
            },
            stands_for=made.stands_for,
        )

    @classmethod
    def read(cls, folder: Path) -> Work | None:
        """Return what `write` left in a sweep's folder, None when there is nothing; refuse what is damaged."""
        try:
            data = read_json_object(folder / PLAN)
            if data["format"] != _FORMAT:
                raise ValueError(f"its format is {data['format']}, this version reads {_FORMAT}")
            if data.pop("fingerprint", "") != fingerprint(data):
                raise ValueError("it has changed since it was written, or an earlier version wrote it")
            forest = Forest(
                Node(name, parent, start, stop, tuple(runs)) for name, parent, start, stop, runs in data["nodes"]
            )
            jobs = [Job(name, node, deep, forest.nodes[node].runs, after) for name, node, deep, after in data["jobs"]]
            values: dict[str, Any] = {name: data[name] for name in _PLAIN}
            _check_names(folder, {*forest.nodes, *(job.id for job in jobs)}, values)
            return cls(folder, forest, {job.id: job for job in jobs}, **values)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UsageError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise unusable(folder, error) from None

    def write(self) -> None:
        """Write `plan.json`, atomically."""
        data = {"format": _FORMAT} | {name: getattr(self, name) for name in _PLAIN}
        data["nodes"] = [
            [node.id, node.parent, node.start, node.stop, node.runs] for node in self.forest.nodes.values()
        ]
        data["jobs"] = [[job.id, job.node, job.deep, job.after] for job in self.jobs.values()]
        data["fingerprint"] = fingerprint(data)
        write_atomic(self.folder / PLAN, json.dumps(data, separators=(",", ":")) + "\n")

    def run_folder(self, run: str) -> Path:
        """Return the folder of a canonical run."""
        return self.folder / RUNS / run

    def finished(self, run: str) -> bool:
        """Return whether a canonical run is finished, which it then stays."""
        if run not in self._ended and read_summary(self.run_folder(run), run) is not None:
            self._ended.add(run)
        return run in self._ended

    def state(self, node: str) -> Path:
        """Return the file of the state at a node's end."""
        return state_file(self.folder / STATES, node, "end")

    def ready(self) -> list[str]:
        """List the jobs that can be done now and are not done yet."""
        return [name for name, job in self.jobs.items() if self.is_ready(job)]

    def is_ready(self, job: Job) -> bool:
        """Return whether a job can be done now and is not done yet."""
        parent = self.forest.nodes[job.node].parent
        if parent is not None and not self.state(parent).exists():
            return False
        if not job.deep and self.state(job.node).exists():
            return False
        return not all(map(self.finished, job.runs))


def unusable(folder: Path, error: Exception) -> UsageError:
    """Return the error of a damaged plan."""
    return UsageError(
        f"--out {folder}: its {PLAN} cannot be used ({error}); remove that file and repeat the sweep's command, "
        "finished runs stay"
    )


def _check_names(folder: Path, pieces: Collection[str], values: Mapping[str, Any]) -> None:
    """Refuse a plan in which a run, node or job has a name that leads out of the sweep's folder."""
    runs = {*values["runs"], *values["stands_for"], *values["stands_for"].values()}
    for name in (*runs, *pieces):
        if not (isinstance(name, str) and RUN_ID.fullmatch(name)):
            raise ValueError(f"{str(name)[:80]!r} is no name of a run, node or job")
    for run in sorted(runs):
        if (folder / RUNS / run).is_symlink():
            raise UsageError(
                f"--out {folder}: {RUNS}/{run} is a link, and runs are written in the sweep's folder alone. Put the "
                "folder itself there, or remove the link"
            )


_PLAIN = ("spec", "merge", "counts", "texts", "base", "runs", "stands_for")
"""Fields of `Work` that `plan.json` holds as they are."""


def state_file(folder: Path, node: str, kind: str) -> Path:
    """Return the file of a state at a node's end (`end`) or inside the node (`part`)."""
    return folder / f"{node}.{kind}.safetensors"


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
    """Take jobs of a sweep and do them, until nothing is left or the worker is stopped; return how many it has done.

    As long as other workers have jobs it stays, because a job comes back if its worker dies.

    Args:
        folder: the sweep's folder, which `twophase sweep` made.
        execute: does a job; it raises `Stopped` when `stopped` became true, `BusyError` when another process has a run.
        stopped: function that returns True once the worker has been asked to end.
        prepare: function of the plan, called before any job is taken. It refuses jobs that this machine cannot do, so
            that a misplaced worker does not fail one job after the other.

    Raises:
        UsageError: no sweep's folder.
    """
    folder = Path(folder).absolute()
    queue, done, pause = Queue(folder), 0, _PAUSE_SECONDS
    version, plan = None, None
    while not stopped():
        newest = _version(folder)
        if plan is None or newest != version:  # at first, and when the sweep has been extended
            plan, version = Work.read(folder), newest
            if plan is None:
                raise UsageError(
                    f"--out {folder}: holds no {PLAN}; start the sweep there first, with twophase sweep --out"
                )
            prepare(plan)
        standings = queue.look(plan.ready())
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
            if not stopped() and plan.is_ready(plan.jobs[claim.job]):
                done += _do(plan, claim, execute)
    return done


def _do(plan: Work, claim: Claim, execute: Execute) -> bool:
    """Do a job that was taken; return whether it is done now."""
    job = plan.jobs[claim.job]
    try:
        execute(plan, job)
        missing = [run for run in job.runs if not plan.finished(run)]
        if missing and (job.deep or not plan.state(job.node).exists()):
            raise RuntimeError(f"the worker left no valid summary of {', '.join(missing[:3])}")
    except Stopped:
        return False
    except BusyError:  # a worker that seemed dead still trains this run
        claim.release()
        time.sleep(_LONGEST_PAUSE_SECONDS)
        return False
    except Exception as error:  # one bad job must not end the worker
        with suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        claim.fail(f"{type(error).__name__}: {message_of(error)}{notes}")
        return False
    return True


def _version(folder: Path) -> tuple[int, ...]:
    """Return a stamp that changes when `plan.json` is rewritten."""
    with suppress(FileNotFoundError, NotADirectoryError):
        check_regular(folder / PLAN)
        with (folder / PLAN).open("rb") as file:  # opened: NFS then asks the server
            status = os.fstat(file.fileno())
            return status.st_ino, status.st_mtime_ns, status.st_size
    return ()
