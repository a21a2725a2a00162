"""The runs of a sweep as Optuna trials: each once, with its parameters, value and state, by Optuna's public names."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest

from twophase.base.config import UsageError
from twophase.sweep.grid import Axis, Sweep, product
from twophase.sweep.trials import TRIALS, Trials, hide_password, open_storage


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


def summary(loss: float | None) -> dict[str, Any]:
    return {"validation_loss": loss, "perplexity": loss, "tokens": 8, "seconds": 2.0, "diverged": loss is None}


@pytest.fixture(params=["journal", "database"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Where the study lies."""
    return None if request.param == "journal" else f"sqlite:///{tmp_path}/trials.db"


def study(folder: Path, url: str | None, name: str = "test") -> optuna.Study:
    """The study as any reader opens it."""
    return optuna.load_study(study_name=name, storage=open_storage(folder, url))


def test_runs_are_trials(tmp_path: Path, url: str | None) -> None:
    """The data frame has a row a run: axes, loss, state, duration; the best trial is the best run."""
    sweep = sweep_of(0.3, 0.7)
    first, second, third, *_ = sweep.runs
    Trials(sweep, tmp_path, url, "test").record({first: summary(3.0), second: summary(None)}, {third: "no data"})
    frame = study(tmp_path, url).trials_dataframe()
    assert list(frame["user_attrs_run"]) == [first, second, third]
    assert list(frame["user_attrs_state"]) == ["finished", "diverged", "failed"]
    assert list(frame["state"]) == ["COMPLETE", "FAIL", "FAIL"]
    assert frame["value"][0] == 3.0
    assert list(frame["params_lr"]) == [0.3] * 3
    assert list(frame["params_nesterov"]) == [False, False, True]
    assert list(frame["params_fragments"]) == ["none", "a=1,b=2", "none"]
    assert frame["duration"][0].total_seconds() == 2.0
    best = study(tmp_path, url).best_trial
    assert (best.user_attrs["run"], best.user_attrs["arm"], best.params["restart"]) == (first, "arm", "never")
    assert study(tmp_path, url).trials[2].user_attrs["error"] == "no data"


def test_each_run_is_recorded_once(tmp_path: Path, url: str | None) -> None:
    """However often a sweep is repeated, a run has one trial; one that failed and then ended has both."""
    sweep = sweep_of(0.3)
    first, second, *_ = sweep.runs
    for _ in range(2):
        trials = Trials(sweep, tmp_path, url, "test")
        for _ in range(2):
            trials.record({first: summary(3.0)}, {second: "no data"})
    Trials(sweep, tmp_path, url, "test").record({first: summary(3.0), second: summary(2.0)}, {})
    states = [(trial.user_attrs["run"], trial.state.name) for trial in study(tmp_path, url).trials]
    assert states == [(first, "COMPLETE"), (second, "FAIL"), (second, "COMPLETE")]


def test_an_extended_sweep_has_a_study_of_its_own(tmp_path: Path, url: str | None) -> None:
    """New values on an axis are new choices, which Optuna takes in a new study only; the former one is deleted."""
    small, large = sweep_of(0.3), sweep_of(0.3, 0.9)
    Trials(small, tmp_path, url, "small").record(dict.fromkeys(small.runs, summary(3.0)), {})
    Trials(large, tmp_path, url, "large", replaces="small").record(dict.fromkeys(large.runs, summary(3.0)), {})
    names = optuna.get_all_study_names(open_storage(tmp_path, url))
    assert names == ["large"]
    assert len(study(tmp_path, url, "large").trials) == len(large.runs) == 2 * len(small.runs)
    Trials(large, tmp_path, url, "large", replaces="small")


def test_a_torn_journal_is_written_anew(tmp_path: Path) -> None:
    """Half a line that a crash has left costs no trial: the study is a view of the folder. Other damage is refused."""
    sweep = sweep_of(0.3)
    runs = list(sweep.runs)
    Trials(sweep, tmp_path, None, "test").record({runs[0]: summary(3.0)}, {})
    with (tmp_path / TRIALS).open("a") as file:
        file.write('{"op_code":4,"worker_')
    for _ in range(2):
        Trials(sweep, tmp_path, None, "test").record(dict.fromkeys(runs[:2], summary(3.0)), {})
    assert [trial.user_attrs["run"] for trial in study(tmp_path, None).trials] == runs[:2]
    (tmp_path / TRIALS).write_text("hello\n\nworld\n")
    with pytest.raises(UsageError, match=r"trials\.journal: is damaged .*; remove it"):
        open_storage(tmp_path, None)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nonsense", "not the URL of a database"),
        ("redis://user:hunter2@host/0", "not the URL of a database"),
        ("postgresql+psycopg2://user:{hunter2}@127.0.0.1:1/x", "not the URL of a database"),
        ("sqlite:////nonexistent/folder/queue.db", "unable to open database file"),
        ("postgresql+psycopg2://user:hunter2@127.0.0.1:1/x", "psycopg2"),
        ("mysql+pymysql://user:hunter2@127.0.0.1:1/x", "pymysql"),
    ],
)
def test_unusable_storage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, reason: str) -> None:
    """One line names the option, the URL without its password, and the reason."""
    for driver in ("psycopg2", "pymysql"):
        monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(UsageError, match=rf"^--storage .*{reason}") as error:
        open_storage(tmp_path, url)
    message = str(error.value)
    assert "hunter2" not in message
    assert "\n" not in message
    assert url.replace("{hunter2}", "***").replace("hunter2", "***") in message
    assert list(tmp_path.iterdir()) == []


def test_unusable_folder_is_refused(tmp_path: Path) -> None:
    """A folder that cannot be used names --out."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--out .*file/sweep: cannot be used .*choose another --out"):
        open_storage(tmp_path / "file" / "sweep", None)


def test_optuna_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Optuna the error says what to install."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install 'twophase\[sweep\]'"):
        open_storage(tmp_path, None)


def test_passwords_are_hidden() -> None:
    """The password of a URL is hidden wherever it stands, and nothing else is changed."""
    assert hide_password("x mysql://me:a:b@host/x y") == "x mysql://me:***@host/x y"
    assert hide_password("mysql://me:a/@b@host/x") == "mysql://me:***@host/x"
    assert hide_password("mysql://me@host/x?password=a&b=1") == "mysql://me@host/x?password=***&b=1"
    plain = "sqlite:////tmp/a:b.db postgresql://me@host/x"
    assert hide_password(plain) == plain
