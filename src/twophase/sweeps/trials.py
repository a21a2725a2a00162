"""The runs of a sweep as an Optuna study, for `study.trials_dataframe()`, optuna-dashboard and Optuna's analyses.

Each run that has ended is a trial. Parameters are its values on the sweep's axes; the value is its validation
perplexity (or the loss of the task). User attributes name the run. A run that diverged or failed is a trial of state
FAIL. The study is a view of the sweep's folder: only the process that runs the sweep writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.base.config import UsageError
from twophase.base.files import append_line
from twophase.base.reading import check_regular
from twophase.sweeps.grid import Sweep, text_of

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

TRIALS = "trials.journal"
VALUE = "perplexity"
"""Quantity of a trial's value; it ends the study's name."""


class Trials:
    """The study in a sweep's folder, open for writing.

    Args:
        sweep: the sweep. The study of the sweep before it was extended is deleted: Optuna does not let the choices of a
            parameter grow.
        folder: its folder.

    Raises:
        UsageError: Optuna is not installed, or the journal cannot be used.
    """

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        storage, optuna, name = open_storage(folder), _optuna(), f"twophase-{sweep.identity}-{VALUE}"
        with _damage_named(folder / TRIALS):
            for other in optuna.get_all_study_names(storage):
                if other != name and other.startswith("twophase-"):  # not one that the package did not write
                    optuna.delete_study(study_name=other, storage=storage)
            self.study = optuna.create_study(study_name=name, storage=storage, load_if_exists=True)
            trials = self.study.get_trials(deepcopy=False)
            self._recorded = {(trial.user_attrs.get("run"), trial.user_attrs.get("state")) for trial in trials}
        self._arms = {cell.run_id: cell.arm for cell in reversed(sweep.cells)}
        self._params = {
            # Optuna takes no tuple for a choice.
            cell.run_id: {
                path: text_of(value) if isinstance(value, tuple) else value
                for path, value in sweep.values(cell).items()
            }
            for cell in sweep.cells
        }
        self._distributions: dict[str, Any] = {
            path: _distribution(optuna, list(dict.fromkeys(params[path] for params in self._params.values())))
            for path in sweep.paths
        }

    def record(self, summaries: Mapping[str, Mapping[str, Any]], errors: Mapping[str, str]) -> None:
        """Add the runs that are not in the study yet: those that have ended, and why others have failed, by run id.

        A run that failed, was tried again and ended has a trial of each.
        """
        for run, summary in summaries.items():
            self._add(run, "diverged" if summary["diverged"] else "finished", summary)
        for run, error in errors.items():
            self._add(run, "failed", {}, error=error)

    def _add(self, run: str, state: str, summary: Mapping[str, Any], **notes: str) -> None:
        if (run, state) in self._recorded:
            return
        from optuna.trial import TrialState, create_trial  # noqa: PLC0415 - an extra

        value = summary.get(VALUE, summary.get("validation_loss"))
        complete = state == "finished" and value is not None and math.isfinite(value)
        numbers = {
            key: summary[key] for key in ("validation_loss", VALUE, "tokens", "seconds") if summary.get(key) is not None
        }
        trial = create_trial(
            state=TrialState.COMPLETE if complete else TrialState.FAIL,
            value=value if complete else None,
            params=self._params[run],
            distributions=self._distributions,
            user_attrs={"run": run, "arm": self._arms[run], "state": state} | numbers | notes,
        )
        if trial.datetime_complete is not None:  # so that Optuna's own `duration` is the run's
            trial.datetime_start = trial.datetime_complete - timedelta(seconds=summary.get("seconds") or 0.0)
        self.study.add_trial(trial)
        self._recorded.add((run, state))


def _distribution(optuna: Any, values: list[Any]) -> Any:
    """Return where a parameter's values lie: numbers on a line, so that figures have an axis, and others as choices."""
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return optuna.distributions.IntDistribution(min(values), max(values))
    if kinds == {float}:
        return optuna.distributions.FloatDistribution(min(values), max(values))
    return optuna.distributions.CategoricalDistribution(values)


def open_storage(folder: Path) -> BaseStorage:
    """Open the journal in a sweep's folder; refuse it where Optuna is missing, or folder or journal cannot be used."""
    _optuna()
    from optuna.storages import journal  # noqa: PLC0415 - an extra

    path = folder / TRIALS

    class Journal(journal.JournalFileBackend):
        """A journal whose lock the system frees at its writer's death, and that cuts off half a line of a crash."""

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            """Append the lines under that lock."""
            append_line(path, "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode())

    try:
        if path.exists():
            check_regular(path)  # a pipe would block
        with _damage_named(path):
            return journal.JournalStorage(Journal(str(path)))
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be used ({error.strerror}); choose another --out") from None


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn Optuna's own errors about a journal into one that names the file."""
    try:
        yield
    except (UsageError, OSError):
        raise
    except Exception as error:  # it trusts what it reads: an odd value fails anywhere, also in an assertion
        text = f"{path}: is damaged ({error or type(error).__name__}); remove it and repeat the sweep's command"
        raise UsageError(text) from None


def check_optuna() -> None:
    """Refuse a sweep where Optuna is not installed, without loading it."""
    if find_spec("optuna") is None:
        raise UsageError("a sweep needs optuna, which is not installed; pip install 'twophase[sweep]'")


def _optuna() -> Any:
    check_optuna()
    import optuna  # noqa: PLC0415 - an extra, and a second that `import twophase` should not cost

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
