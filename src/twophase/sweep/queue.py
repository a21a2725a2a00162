"""The queue of a sweep's jobs: an Optuna study that workers on one or many machines share.

A job is a short text; what it stands for, and whether its work is really done, is not known here. The study says:

* which jobs there are: lists in the study's user attributes, each written once under a name of its own;
* who has taken a job: one trial a claim, with job and worker in its user attributes, RUNNING until the claim ends, then
  COMPLETE (done) or FAIL;
* why a claim failed, in the trial's user attributes: `error` (for good), `death` (of its worker; `ATTEMPTS` of them are
  for good), or neither (it was given back);
* which ends of claims no longer count, because the sweep's command was repeated: again lists of their own.

A job that was offered *waits* unless its trials say otherwise. That is derived and nowhere stored, so no crash between
two writes can lose a job. A job is taken by a single write: the worker creates a RUNNING trial that bears its name, and
then looks whether a trial of the same job was there before. All storages put trials in one order that everybody sees,
so of several workers exactly one finds none and has the job; the others withdraw. (Optuna's own `enqueue_trial` and
`ask` need two writes, between which a trial runs under nobody's name, and hand a worker that comes second a random
trial; and a database would read thousands of waiting trials at each claim.)
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from twophase.sweep.beat import Beat, Watch
from twophase.sweep.storage import open_study, short_reason, shown

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

ATTEMPTS = 3
"""How often a job is handed out before a worker's death under it counts as the job's failure."""
JOB_LENGTH = 100
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between attempts at an operation of the storage: enough for a database to be restarted."""
_LIST_LENGTH = 500
"""Entries of a list in the study; with `JOB_LENGTH` it keeps a list within the 64 KB of a text in MySQL."""
_REASON_LENGTH = 2000

_RUNNING, _COMPLETE = 0, 1
"""Of Optuna's TrialState, which is an IntEnum: looked at for every trial at every claim, and not worth its import."""

State = Literal["waiting", "running", "complete", "failed"]
P = ParamSpec("P")
R = TypeVar("R")


class QueueError(RuntimeError):
    """The queue's storage cannot be read or written, though it could be before."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of the jobs that were offered are in which state; every job is in exactly one."""

    waiting: int
    running: int
    complete: int
    failed: int

    @property
    def left(self) -> int:
        """Jobs that need more work: while there are any, a worker without a job has reason to ask again."""
        return self.waiting + self.running


@dataclass(frozen=True, eq=False)
class Claim:
    """A job that this worker has taken. It ends with one of `done`, `failed` and `release`, or with the worker.

    Args:
        job: what was offered.
        trial: id of the trial that stands for the claim.
        queue: where it was taken from.
    """

    job: str
    trial: int = field(repr=False)
    queue: Queue = field(repr=False)

    def done(self, value: float | None = None) -> bool:
        """Report the job as done.

        Args:
            value: what the study minimises, such as the validation loss; None, or what is no number, counts as
                infinite.

        Returns:
            Whether the report counts: False when the job had been taken away, because this worker seemed dead.

        Raises:
            QueueError: the storage does not answer; the job is handed out again.
        """
        return self.queue._done(self.trial, math.inf if value is None or math.isnan(value) else float(value))

    def failed(self, error: str) -> bool:
        """Report that the job cannot be done: nobody tries it again before `Queue.reset_failures`.

        Returns, raises: as `done`.
        """
        return self.queue._fail(self.trial, error=error)

    def release(self) -> bool:
        """Give the job back, because this worker was asked to stop; that is no attempt.

        Returns, raises: as `done`.
        """
        return self.queue._fail(self.trial)

    def held(self) -> bool:
        """Whether the job is still this worker's, and was not taken away.

        Raises:
            QueueError: the storage does not answer.
        """
        return self.queue._held(self.trial)


class Queue:
    """The jobs of one sweep, as one process sees them. Use `Queue.open`, which also serves as a context manager.

    Not for several threads at once; a worker opens one queue and ends it before its `Beat`.
    """

    def __init__(self, study: Study, storage: BaseStorage, folder: Path, place: str) -> None:
        self.study = study
        self.place = place
        self._storage = storage
        self._study_id = study._study_id
        self._watch = Watch(folder)
        self._mine: set[int] = set()
        """Trials of the claims that this object has handed out and that have not ended."""

    @classmethod
    def open(cls, folder: Path, storage: str | None, name: str) -> Queue:
        """Create the queue of a sweep, or open it where it exists.

        Args:
            folder: the sweep's folder, which all its workers see.
            storage: SQLAlchemy URL of a database that all workers reach (`--storage`); None keeps the queue in the
                folder, which serves well up to some tens of workers.
            name: of the study; in a database that several sweeps share, it is what tells them apart.

        Raises:
            UsageError: Optuna or the database's driver is not installed, the URL is malformed or does not work, or the
                folder cannot be used.
        """
        folder = Path(folder).absolute()
        return cls(*open_study(folder, storage, name), folder, shown(folder, storage))

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to a database; safe to repeat."""
        engine = getattr(self._storage, "engine", None)
        if engine is not None:
            engine.dispose()

    def offer(self, jobs: Iterable[str]) -> None:
        """Add jobs, which workers take in about this order; those that were offered before stay as they are.

        Raises:
            ValueError: a job that is no text of 1 to 100 characters.
            QueueError: the storage does not answer.
        """
        jobs = list(dict.fromkeys(jobs))
        for job in jobs:
            if not isinstance(job, str) or not 0 < len(job) <= JOB_LENGTH:
                raise ValueError(f"Queue.offer: the job {job!r} is not a text of 1 to {JOB_LENGTH} characters")
        known = dict.fromkeys(self._listed("jobs"))
        self._list("jobs", [job for job in jobs if job not in known], len(known))

    def claim(self, worker: Beat) -> Claim | None:
        """Take a job; jobs of dead workers are put back first.

        Args:
            worker: the caller's sign of life, entered.

        Returns:
            The claim; None when nothing waits now. That may change while other workers are at work: as long as
            `counts().left` is not 0, ask again after a few seconds.

        Raises:
            QueueError: the storage does not answer.
        """
        while True:
            self.recover(worker)
            board = self._look()
            states = board.states()
            waiting = [job for job, (state, _) in states.items() if state == "waiting"]
            if not waiting:
                return None
            # In order; but where many ask at once, each has a place of its own to look at, most of the time.
            busy = sum(state == "running" for state, _ in states.values())
            claim = self._take(random.choice(waiting[: 1 + busy]), worker)
            if claim is not None:
                return claim
            time.sleep(random.uniform(0.0, 0.05))

    def recover(self, worker: Beat) -> None:
        """Put back the jobs of dead workers, and end claims that an error kept this process from ending.

        Raises:
            QueueError: the storage does not answer.
        """
        from optuna.trial import TrialState  # noqa: PLC0415 - an extra, see storage.py

        running = self._call(self.study.get_trials, deepcopy=False, states=(TrialState.RUNNING,))
        owners = {trial._trial_id: str(trial.user_attrs.get("worker")) for trial in running}
        deaths = {}
        with suppress(OSError):  # a folder that cannot be used now shows who is dead another time
            deaths = self._watch.deaths(list(owners.values()), worker)
        for trial, owner in owners.items():
            if owner == worker.name and trial not in self._mine:
                self._fail(trial)
            elif owner in deaths:
                self._fail(trial, death=deaths[owner])

    def counts(self) -> Counts:
        """How many jobs are in which state.

        Raises:
            QueueError: the storage does not answer.
        """
        states = [state for state, _ in self._look().states().values()]
        return Counts(*(states.count(state) for state in ("waiting", "running", "complete", "failed")))

    def errors(self) -> dict[str, str]:
        """Why jobs failed for good: from job to reason.

        Raises:
            QueueError: the storage does not answer.
        """
        return {job: reason for job, (state, reason) in self._look().states().items() if state == "failed"}

    def reset_failures(self) -> None:
        """Forget failures and deaths so far: what failed waits again, and attempts count anew.

        Raises:
            QueueError: the storage does not answer.
        """
        board = self._look()
        self._forgive(board, [trial for trials in board.jobs.values() for trial in trials if _failure(trial)])

    def reopen(self, jobs: Iterable[str]) -> None:
        """Let jobs wait again whatever became of them, because their work is known to be missing.

        Jobs that a worker has now, and texts that were never offered, stay as they are.

        Raises:
            QueueError: the storage does not answer.
        """
        board = self._look()
        trials = [trial for job in set(jobs) for trial in board.jobs.get(job, [])]
        self._forgive(board, [trial for trial in trials if trial.state.is_finished()])

    def _forgive(self, board: _Board, trials: list[FrozenTrial]) -> None:
        numbers = {trial.number for trial in trials} - board.forgiven
        self._list("forgiven", sorted(numbers), len(board.forgiven))

    def _take(self, job: str, worker: Beat) -> Claim | None:
        """Try to take a job; None when somebody else has it, or had it meanwhile."""
        from optuna.trial import TrialState, create_trial  # noqa: PLC0415 - an extra, see storage.py

        template = create_trial(state=TrialState.RUNNING, user_attrs={"job": job, "worker": worker.name})
        trial = self._call(self._storage.create_new_trial, self._study_id, template)
        board = self._look()
        earlier = [other for other in board.jobs[job] if other._trial_id < trial]
        if board.state(earlier)[0] == "waiting" and self._held(trial):
            self._mine.add(trial)
            return Claim(job, trial, self)
        self._fail(trial)
        return None

    def _held(self, trial: int) -> bool:
        return self._call(self._storage.get_trial, trial).state.name == "RUNNING"

    def _done(self, trial: int, value: float) -> bool:
        from optuna.trial import TrialState  # noqa: PLC0415 - an extra, see storage.py

        if self._end(trial, TrialState.COMPLETE, [value], {}):
            return True
        # The trial has ended already. Only its owner completes it: an operation that seemed to fail, and was repeated.
        return self._call(self._storage.get_trial, trial).state == TrialState.COMPLETE

    def _fail(self, trial: int, **reason: str) -> bool:
        from optuna.trial import TrialState  # noqa: PLC0415 - an extra, see storage.py

        return self._end(trial, TrialState.FAIL, None, reason)

    def _end(self, trial: int, state: Any, values: list[float] | None, notes: Mapping[str, str]) -> bool:
        from optuna.exceptions import UpdateFinishedTrialError  # noqa: PLC0415 - an extra, see storage.py

        self._mine.discard(trial)  # first: if the storage fails now, the next recover() ends the trial
        try:
            for key, text in notes.items():  # before the state, since a finished trial takes no notes
                self._call(self._storage.set_trial_user_attr, trial, key, text[:_REASON_LENGTH])
            self._call(self._storage.set_trial_state_values, trial, state, values)
        except UpdateFinishedTrialError:
            return False
        return True

    def _look(self) -> _Board:
        forgiven = frozenset(self._listed("forgiven"))  # before the trials that they are numbers of
        board = _Board({job: [] for job in self._listed("jobs")}, forgiven)
        for trial in self._call(self.study.get_trials, deepcopy=False):
            trials = board.jobs.get(trial.user_attrs.get("job", ""))
            if trials is not None:
                trials.append(trial)
        return board

    def _listed(self, kind: str) -> list[Any]:
        """All entries of one kind that any process has written, in about the order of writing."""
        attributes = self._call(self._storage.get_study_user_attrs, self._study_id)
        keys = sorted(key for key in attributes if key.startswith(f"{kind}:"))
        return [entry for key in keys for entry in attributes[key]]

    def _list(self, kind: str, entries: list[Any], known: int) -> None:
        """Add entries. Several processes may do so at once, since each list has a name that nobody else uses."""
        for start in range(0, len(entries), _LIST_LENGTH):
            key = f"{kind}:{known + start:08d}:{secrets.token_hex(8)}"
            chunk = entries[start : start + _LIST_LENGTH]
            self._call(self._storage.set_study_user_attr, self._study_id, key, chunk)

    def _call(self, operation: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation of the storage, repeated when it fails; all of them can be repeated without harm."""
        from optuna.exceptions import StorageInternalError  # noqa: PLC0415 - an extra, see storage.py
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

        faults = (OSError, ValueError, LookupError, StorageInternalError, SQLAlchemyError)
        for pause in _PAUSES:
            try:
                return operation(*args, **kwargs)
            except faults:
                time.sleep(pause * random.uniform(0.75, 1.25))
        try:
            return operation(*args, **kwargs)
        except faults as error:
            raise QueueError(
                f"{self.place}: cannot be read or written any more ({short_reason(error)}); "
                "when it can again, repeat the command: nothing that is finished is lost"
            ) from error


@dataclass(frozen=True, slots=True)
class _Board:
    """What the study says at one moment: the trials of each job, oldest first, and the numbers that do not count."""

    jobs: dict[str, list[FrozenTrial]]
    forgiven: frozenset[int]

    def states(self) -> dict[str, tuple[State, str]]:
        """From job to state and, if it failed, the reason."""
        return {job: self.state(trials) if trials else ("waiting", "") for job, trials in self.jobs.items()}

    def state(self, trials: list[FrozenTrial]) -> tuple[State, str]:
        """State and reason of a job with these trials."""
        trials = [trial for trial in trials if trial.number not in self.forgiven]
        states = [trial.state for trial in trials]
        if _COMPLETE in states:
            return "complete", ""
        if _RUNNING in states:
            return "running", ""
        notes = [trial.user_attrs for trial in trials]
        # Who died between the note and the end of a failure has not reported it: that is a death like others.
        errors = [note["error"] for note in notes if "error" in note and "death" not in note]
        if errors:
            return "failed", errors[-1]
        deaths = [note["death"] for note in notes if "death" in note]
        if len(deaths) >= ATTEMPTS:
            return "failed", f"{deaths[-1]} (attempt {len(deaths)} of {ATTEMPTS})"
        return "waiting", ""


def _failure(trial: FrozenTrial) -> bool:
    """Whether a trial ended with a failure or a death, and was not just given back."""
    return trial.state.name == "FAIL" and ("error" in trial.user_attrs or "death" in trial.user_attrs)
