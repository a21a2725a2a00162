"""A sweep's worker: takes jobs off the sweep's queue and walks its part of the forest, in one process."""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from twophase.base.config import UsageError, with_values
from twophase.base.files import append_line
from twophase.sweeps.forest import Grower
from twophase.sweeps.plan import Job
from twophase.sweeps.work import DONE_LOG, RUNS, STATES, Stopped, Work, unusable, work
from twophase.tasks.build import preflight_all
from twophase.tasks.named import check, config_of
from twophase.training.config import RunConfig
from twophase.training.session import Stop, signals


def serve(folder: Path, *, in_memory: int, leash: bool) -> int:
    """Do jobs of the sweep in a folder until nothing is left, or a signal; return the exit status.

    Args:
        folder: the sweep's folder.
        in_memory: branch states in memory at most.
        leash: end when stdin does, which means that the process that started this one is gone.
    """
    with signals() as stopped:
        if leash:
            threading.Thread(target=_wait_for_end_of_stdin, args=(stopped,), daemon=True).start()
        executor = _Executor(stopped, in_memory)
        work(folder, executor.execute, stopped=stopped.is_set, prepare=executor.prepare)
    return 128 + stopped.number if stopped.number else 0


class _Executor:
    """Walks the nodes of a job; replicas and compiled code stay from one job to the next."""

    def __init__(self, stopped: Stop, in_memory: int) -> None:
        self.stopped = stopped
        self.in_memory = in_memory
        self.configs: dict[str, RunConfig] = {}
        self.grower: Grower | None = None

    def prepare(self, plan: Work) -> None:
        """Read the configurations of a plan; refuse it where a device or text is missing, or the text is another."""
        try:
            base = config_of(plan.base)
        except UsageError as error:
            if str(error).startswith("--task"):  # its file is missing or broken, not the plan
                raise
            raise unusable(plan.folder, error) from None
        self.grower = None
        self.configs = {
            run: check(with_values(base, {path: tuple(v) if isinstance(v, list) else v for path, v in values.items()}))
            for run, values in plan.runs.items()
        }
        for name, text in preflight_all(self.configs.values()).items():
            if plan.texts.get(name, text) != text:
                raise UsageError(
                    f"this machine's text is not the one of the sweep in {plan.folder}, or --task has another file "
                    f"or data (fingerprint {text[:12]}, there {plan.texts[name][:12]}). Give it the same "
                    "--data.corpus or --task file, or for the corpus `python` the same version of Python"
                )

    def execute(self, plan: Work, job: Job) -> None:
        """Do a job, and report it in `jobs.jsonl`."""
        grower = self.grower = self.grower or Grower(
            plan.forest,
            self.configs,
            plan.folder / RUNS,
            plan.folder / STATES,
            in_memory=self.in_memory,
            should_stop=self.stopped.is_set,
            on_progress=lambda text: print(text, file=sys.stderr, flush=True),
        )
        began, tally = time.monotonic(), grower.tally
        steps = tally.steps
        tally.step_seconds.clear()
        try:
            grower.grow(job.node, deep=job.deep)
        except Stopped:
            raise
        except BaseException:
            self.grower = None  # its state is unknown
            raise
        finally:
            record = {
                "job": job.id,
                "steps": tally.steps - steps,
                "seconds": time.monotonic() - began,
                "median_step_seconds": statistics.median_high(tally.step_seconds) if tally.step_seconds else None,
                "most_held": tally.most_held,
            }
            with suppress(OSError):  # these are for people: a full disk must not undo a job that is done
                append_line(plan.folder / DONE_LOG, (json.dumps(record) + "\n").encode())
                print(
                    f"job {job.id}: {len(job.runs)} runs, {record['steps']} inner steps in {record['seconds']:.1f} s; "
                    f"so far at most {tally.most_held} states held, {tally.spilled} on disk alone",
                    file=sys.stderr,
                    flush=True,
                )


def _wait_for_end_of_stdin(stopped: Stop) -> None:
    while os.read(0, 1 << 16):  # not sys.stdin: the interpreter wants its lock at the end
        pass
    stopped.set()
