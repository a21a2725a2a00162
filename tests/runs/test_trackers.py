"""Trackers show what the run's own logs say, and never touch the run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from twophase.errors import UsageError
from twophase.files import read_jsonl
from twophase.runs.folder import METRICS, ROUNDS, RunFolder
from twophase.runs.trackers import call_each, open_trackers

CONFIG = {"outer": {"lr": 0.7}}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mock]:
    """Makes a stand-in for wandb or trackio, of which one function fails."""

    def make(name: str, failing: str = "") -> Mock:
        module = Mock()
        if failing:
            function = module.init if failing == "init" else getattr(module.init.return_value, failing)
            function.side_effect = ConnectionError("the server is gone")
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def lines(module: Mock) -> list[tuple[int, dict[str, float]]]:
    """What a stand-in has got, with the steps."""
    return [(call.kwargs["step"], call.args[0]) for call in module.init.return_value.log.call_args_list]


def run(path: Path, *names: str, steps: range = range(1, 4)) -> None:
    with RunFolder.claim(path, CONFIG) as folder:
        folder.trackers = open_trackers(names, path, CONFIG)
        for step in steps:
            folder.log(METRICS, {"step": step, "train_loss": 1 / step, "perplexity": math.nan})
            folder.log(ROUNDS, {"step": step, "restarted": True, "seconds": {"outer": 0.5}, "checksum": "0f"})
        call_each(folder.trackers, "close")


def test_all_get_the_same_lines(stand_in: Callable[..., Mock], tmp_path: Path) -> None:
    """Each gets the finite numbers of every line at its step, true and false as 1 and 0, and is closed once."""
    wandb, trackio = stand_in("wandb"), stand_in("trackio")
    run(tmp_path, "wandb", "trackio", "wandb", "none")
    metrics = [(step, {"metrics/step": step, "metrics/train_loss": 1 / step}) for step in (1, 2, 3)]
    rounds = [(step, {"rounds/step": step, "rounds/restarted": 1, "rounds/seconds/outer": 0.5}) for step in (1, 2, 3)]
    assert lines(wandb) == lines(trackio) == [line for both in zip(metrics, rounds, strict=True) for line in both]
    for module in (wandb, trackio):
        module.init.return_value.finish.assert_called_once()
        assert module.init.call_args.kwargs["config"] == CONFIG


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("trackio", "name")])
def test_a_resumed_run_is_the_same(stand_in: Callable[..., Mock], tmp_path: Path, name: str, key: str) -> None:
    """The folder keeps the id under which a tracker knows the run; another folder has another id."""
    backend = stand_in(name)
    for folder in ("a", "a", "b"):
        run(tmp_path / folder, name)
    first, again, other = (call.kwargs[key] for call in backend.init.call_args_list)
    assert first == again != other


def test_tensorboard_reads_the_logs(tmp_path: Path) -> None:
    """Its own reader finds the numbers at their steps; a resumed run that repeats steps shows each once."""
    module = "tensorboard.backend.event_processing.event_accumulator"
    events = pytest.importorskip(module, reason="the extra tensorboard is not installed")
    run(tmp_path, "tensorboard")
    run(tmp_path, "tensorboard", steps=range(2, 5))
    logged = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in logged.Scalars("metrics/train_loss")]
    assert losses == [(step, pytest.approx(1 / step)) for step in (1, 2, 3, 4)]
    assert [event.step for event in logged.Scalars("rounds/seconds/outer")] == [1, 2, 3, 4]


@pytest.mark.parametrize("function", ["init", "log", "finish"])
def test_one_that_fails_is_dropped(stand_in: Callable[..., Mock], tmp_path: Path, function: str) -> None:
    """One warning names it; the run's logs and the other tracker are as without it."""
    stand_in("wandb", function)
    trackio = stand_in("trackio")
    with pytest.warns(RuntimeWarning, match="the server is gone") as warned:
        run(tmp_path, "wandb", "trackio")
    assert len(warned) == 1
    assert len(lines(trackio)) == 6
    trackio.init.return_value.finish.assert_called_once()
    assert [len(read_jsonl(tmp_path / name)) for name in (METRICS, ROUNDS)] == [3, 3]


@pytest.mark.parametrize("name", ["no-such", "wandb"])
def test_one_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An unknown name, and a package that is not installed, before the run begins."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="--track"):
        open_trackers([name], tmp_path, CONFIG)
