"""The runs of a sweep as Optuna trials: each once, with its parameters, value and state, by Optuna's public names."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest

from twophase.base.config import UsageError
from twophase.sweeps.grid import Axis, Sweep, product
from twophase.sweeps.trials import TRIALS, Trials, open_storage


@dataclass(frozen=True)
class Config:
    """Values of every kind that an axis has."""

    lr: float = 0.7
    restart: str = "never"
    nesterov: bool = False
    fragments: tuple[str, ...] = ()


def sweep_of(*rates: float) -> Sweep:
    axes = [Axis("lr", rates), Axis("restart", ("never", "3")), Axis("nesterov", (False, True))]
    axes += [Axis("fragments", ((), ("a=1", "b=2")))]
    return Sweep("fake", Config(), product(Config(), axes, "arm"))


SMALL = sweep_of(0.3)
FIRST, SECOND, THIRD, *_ = SMALL.runs


def summary(loss: float | None) -> dict[str, Any]:
    perplexity = None if loss is None else math.exp(loss)
    return {"validation_loss": loss, "perplexity": perplexity, "tokens": 8, "seconds": 2.0, "diverged": loss is None}


def study(folder: Path, sweep: Sweep = SMALL) -> optuna.Study:
    """The study as any reader opens it; the folder has no other."""
    (name,) = optuna.get_all_study_names(open_storage(folder))
    assert name == f"twophase-{sweep.identity}-perplexity"
    return optuna.load_study(study_name=name, storage=open_storage(folder))


def test_runs_are_trials(tmp_path: Path) -> None:
    """The data frame has a row a run: axes, perplexity, state, duration; the best trial is the best run."""
    Trials(SMALL, tmp_path).record({FIRST: summary(3.0), SECOND: summary(None)}, {THIRD: "no data"})
    frame = study(tmp_path).trials_dataframe()
    assert list(frame["user_attrs_run"]) == [FIRST, SECOND, THIRD]
    assert list(frame["user_attrs_state"]) == ["finished", "diverged", "failed"]
    assert list(frame["state"]) == ["COMPLETE", "FAIL", "FAIL"]
    assert frame["value"][0] == math.exp(3.0)
    assert frame["user_attrs_validation_loss"][0] == 3.0
    assert frame["value"][1:].isna().all()  # a run without a perplexity has no value, and none is infinite
    assert list(frame["params_lr"]) == [0.3] * 3
    assert list(frame["params_nesterov"]) == [False, False, True]
    assert list(frame["params_fragments"]) == ["none", "a=1,b=2", "none"]
    assert frame["duration"][0].total_seconds() == 2.0
    best = study(tmp_path).best_trial
    assert (best.user_attrs["run"], best.user_attrs["arm"], best.params["restart"]) == (FIRST, "arm", "never")
    assert study(tmp_path).trials[2].user_attrs["error"] == "no data"


def test_axes_of_numbers_are_lines(tmp_path: Path) -> None:
    """Optuna's figures draw numbers on an axis, words as choices; a task without perplexity has its loss as value."""
    sweep = sweep_of(0.3, 0.9)
    Trials(sweep, tmp_path).record({next(iter(sweep.runs)): {"validation_loss": 3.0, "diverged": False}}, {})
    (trial,) = study(tmp_path, sweep).trials
    lr, *words = (trial.distributions[name] for name in ("lr", "restart", "nesterov", "fragments"))
    assert lr == optuna.distributions.FloatDistribution(0.3, 0.9)
    assert all(isinstance(choices, optuna.distributions.CategoricalDistribution) for choices in words)
    assert trial.value == 3.0


def test_another_study_in_the_journal_stays(tmp_path: Path) -> None:
    """A study that a user has put into the journal is not deleted with those of the sweep."""
    optuna.create_study(study_name="mine", storage=open_storage(tmp_path))
    Trials(SMALL, tmp_path)
    assert set(optuna.get_all_study_names(open_storage(tmp_path))) == {"mine", f"twophase-{SMALL.identity}-perplexity"}


def test_a_torn_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line that a crash has left costs no trial, and a lock of an earlier version no second.

    Other damage is refused.
    """
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the lock is waited for"))
    (tmp_path / f"{TRIALS}.lock").touch()
    Trials(SMALL, tmp_path).record({FIRST: summary(3.0)}, {})
    with (tmp_path / TRIALS).open("a") as file:
        file.write('{"op_code":4,"worker_')
    for _ in range(2):
        Trials(SMALL, tmp_path).record(dict.fromkeys((FIRST, SECOND), summary(3.0)), {})
    assert [trial.user_attrs["run"] for trial in study(tmp_path).trials] == [FIRST, SECOND]
    sound = (tmp_path / TRIALS).read_text()
    for damaged in ("hello\n\nworld\n", sound.replace('"op_code":4', '"op_code":99'), sound.replace("value", "\0", 1)):
        (tmp_path / TRIALS).write_text(damaged)
        with pytest.raises(UsageError, match=r"trials\.journal: is damaged .*; remove it"):
            Trials(SMALL, tmp_path)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be used names --out; without Optuna the error says what to install."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--out .*file/sweep: cannot be used .*choose another --out"):
        open_storage(tmp_path / "file" / "sweep")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install 'twophase\[sweep\]'"):
        open_storage(tmp_path)
