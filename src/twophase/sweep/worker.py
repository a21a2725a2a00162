"""A sweep's worker: takes jobs off the sweep's queue and walks its part of the forest, in one process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError, from_tree, with_values
from twophase.runs.folder import RunFolder
from twophase.sweep import forest
from twophase.sweep.plan import Job
from twophase.sweep.work import STATES, Stopped, Work, report, work
from twophase.tasks.build import preflight_all
from twophase.tasks.lm.config import TrainConfig
from twophase.training.session import Stop, signals


def serve(folder: Path, *, in_memory: int, leash: bool) -> int:
    """Do jobs of the sweep in a folder until nothing is left, or a signal.

    Args:
        folder: the sweep's folder.
        in_memory: branch states in memory at most.
        leash: end when stdin does, which means that the process that started this one is gone.

    Returns:
        The exit status.
    """
    with signals() as stopped:
        if leash:
            threading.Thread(target=_wait_for_end_of_stdin, args=(stopped,), daemon=True).start()
        work(folder, _Executor(stopped, in_memory), stopped=stopped.is_set, prepare=_check_machine)
    return 128 + stopped.number if stopped.number else 0


def _check_machine(plan: Work) -> None:
    """Refuse to take part where a device or text is missing, or the text is another one.

    Raises:
        UsageError: naming it.
    """
    for name, seen in preflight_all(_configs(plan).values()).items():
        if plan.texts.get(name, seen) != seen:
            raise UsageError(
                f"this machine's text is not the one that the sweep in {plan.folder} was begun with (fingerprint "
                f"{seen[:12]}, there {plan.texts[name][:12]}); give it the same --data.corpus file, or for the corpus "
                "`python` the same version of Python"
            )


def _configs(plan: Work) -> dict[str, TrainConfig]:
    base = from_tree(TrainConfig, plan.base)
    return {run: with_values(base, _as_written(values)) for run, values in plan.runs.items()}


class _Executor:
    """Walks the nodes of a job; replicas and compiled code are kept from one job to the next."""

    def __init__(self, stopped: Stop, in_memory: int) -> None:
        self.stopped = stopped
        self.in_memory = in_memory
        self.plan: Work | None = None
        self.grower: forest.Grower | None = None

    def __call__(self, plan: Work, job: Job) -> None:
        if self.grower is None or self.plan is not plan:
            self.plan = plan
            self.grower = self._grower(plan)
        tally = self.grower.tally
        began, before, seen = time.monotonic(), tally.steps, len(tally.step_seconds)
        try:
            self.grower.grow(job.node, deep=job.deep)
        except Stopped:
            raise
        except BaseException as error:
            self.grower = None  # whatever state it was in
            if isinstance(error, RuntimeError) and "inline_container" in str(error):  # torch's writer does not say why
                raise OSError(f"a state cannot be written into {plan.folder / STATES}; is the disk full?") from error
            raise
        finally:
            spent = tally.step_seconds[seen:]
            record = {"job": job.id, "steps": tally.steps - before, "seconds": time.monotonic() - began}
            middle = sorted(spent)[len(spent) // 2] if spent else None
            words = (
                f"job {job.id}: {len(job.runs)} runs, {record['steps']} inner steps in {record['seconds']:.1f} s; so "
                f"far at most {tally.most_held} states held, {tally.spilled} on disk alone"
            )
            with suppress(OSError):  # these are for people: a full disk must not undo a job that is done
                report(plan.folder, record | {"median_step_seconds": middle, "most_held": tally.most_held})
                print(words, file=sys.stderr, flush=True)
            tally.step_seconds.clear()

    def _grower(self, plan: Work) -> forest.Grower:
        configs = _configs(plan)
        return forest.Grower(
            plan.forest,
            configs,
            _Place(plan, configs),
            plan.folder / STATES,
            in_memory=self.in_memory,
            should_stop=self.stopped.is_set,
            on_progress=lambda text: print(text, file=sys.stderr, flush=True),
        )


class _Place:
    """The run folders of a sweep."""

    def __init__(self, plan: Work, configs: dict[str, TrainConfig]) -> None:
        self.plan = plan
        self.configs = configs
        self._ended: set[str] = set()

    def finished(self, run: str) -> bool:
        """Whether the run is finished, which it then stays."""
        if run not in self._ended and self.plan.finished(run):
            self._ended.add(run)
        return run in self._ended

    @contextmanager
    def claim(self, run: str) -> Iterator[RunFolder]:
        """The run's folder."""
        with RunFolder.claim(self.plan.run_folder(run), self.configs[run]) as folder:
            yield folder


def _as_written(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that have been through JSON, with lists as tuples again."""
    return {path: tuple(value) if isinstance(value, list) else value for path, value in values.items()}


def _wait_for_end_of_stdin(stopped: Stop) -> None:
    while os.read(0, 1 << 16):  # not sys.stdin: the interpreter wants its lock at the end
        pass
    stopped.set()
