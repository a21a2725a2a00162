"""Trackers show what the run's own logs say, and never touch the run."""

from __future__ import annotations

import copy
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import textmaker
from commands import scalars
from twophase import DiLoCo, OuterRule, record
from twophase.base.config import UsageError, to_tree
from twophase.runs import trackers as tracking
from twophase.runs.folder import ROUNDS, RunFolder, read_lines
from twophase.runs.trackers import Tracker, check, identity, numbers, tracked
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training.train import train


class Backend:
    """A stand-in for wandb and trackio: remembers what it gets, fails or blocks at a place."""

    def __init__(self) -> None:
        self.step = self._next_step = 0
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.arguments: dict[str, Any] = {}
        self.finished = 0
        self.fail_at = ""
        self.block: threading.Event | None = None

    def _meet(self, stage: str) -> None:
        if self.block is not None and stage == self.fail_at:
            self.block.wait()
        elif stage == self.fail_at:
            raise ConnectionError("the server\nis gone")

    def init(self, **arguments: Any) -> Backend:
        """Start a run."""
        print("Welcome! View your run at …")
        self._meet("init")
        self.arguments = arguments
        return self

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take a line."""
        self._meet("log")
        self.lines.append((step, dict(values)))

    def finish(self) -> None:
        """End the run."""
        print("Goodbye!")
        self._meet("finish")
        self.finished += 1


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> Backend:
    backend, module = Backend(), types.ModuleType(name)
    session = types.SimpleNamespace(settings=types.SimpleNamespace(mode="offline"))
    vars(module).update(init=backend.init, Settings=dict, setup=lambda **_: session, login=lambda **_: False)
    vars(module)["session"] = session
    monkeypatch.setitem(sys.modules, name, module)
    return backend


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, Backend]:
    """Stand-ins for the packages, by name."""
    return {name: stand_in(monkeypatch, name) for name in ("wandb", "trackio")}


@pytest.fixture
def wandb(backends: dict[str, Backend]) -> Backend:
    """The one for Weights & Biases."""
    return backends["wandb"]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """A run of a second: 3 rounds, the last one shorter."""
    corpus = textmaker.write(tmp_path / "text.txt")
    return textmaker.small_run(corpus, 8, steps=5, inner_steps=2, checkpoint_every=1, **{"outer.restart": "2"})


def run(config: TrainConfig, path: Path, *names: str, **options: Any) -> dict[str, Any]:
    with (
        RunFolder.claim(path, config) as folder,
        tracked(folder, check(names), run_name=path.name, config=to_tree(config)) as recorder,
    ):
        return train(LanguageTask(config), config, recorder, **options)


def logs(path: Path) -> list[list[dict[str, Any]]]:
    """Both logs, less the times."""
    lines = [read_lines(path / name) for name in ("metrics.jsonl", "rounds.jsonl")]
    return [[{key: value for key, value in line.items() if key != "seconds"} for line in log] for log in lines]


def start(name: str, folder: Path) -> Tracker:
    return Tracker(name, run_name="first", run_id="id0", folder=folder, config={"outer": {"lr": 0.7}})


# --- what is logged -----------------------------------------------------------------------------------------------


def test_tensorboard_reads_the_logs(config: TrainConfig, tmp_path: Path) -> None:
    """TensorBoard's own reader finds the numbers of the logs at their steps, to float32.

    A run that lost its last rounds and takes them again shows every step once.
    """
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    run(replace(config, log_every=1), tmp_path / "run", "tensorboard")
    logged = scalars(tmp_path / "run")
    metrics, rounds = logs(tmp_path / "run")
    for name, key, lines in (
        ("loss/train", "train_loss", metrics),
        ("inner/lr", "inner_lr", metrics),
        ("round/pseudo_gradient_norm", "pseudo_gradient_norm", rounds),
        ("round/restarted", "restarted", rounds),
        ("round/number", "round", rounds),
    ):
        assert logged[name] == [(line["step"], pytest.approx(float(line[key]), rel=1e-6)) for line in lines], name
    assert [step for step, _ in logged["loss/validation"]] == [5]
    assert [step for step, _ in logged["loss/step"]] == [step for step, _ in logged["speed/tokens_per_second"]]
    assert [step for step, _ in logged["loss/step"]] == [1, 2, 3, 4, 5]
    assert [step for step, _ in logged["round/seconds/outer"]] == [2, 4, 5]
    (tmp_path / "run" / "summary.json").unlink()
    for lost in ("step-00000004", "step-00000005"):
        folder = tmp_path / "run" / "checkpoint" / lost
        if folder.exists():
            folder.rename(tmp_path / lost)
    run(replace(config, log_every=1), tmp_path / "run", "tensorboard")
    assert scalars(tmp_path / "run")["loss/train"] == logged["loss/train"]


def test_same_lines_to_all(backends: dict[str, Backend], config: TrainConfig, tmp_path: Path) -> None:
    """Several trackers get the same numbers in the same order, know the run, and are closed once."""
    wandb, trackio = backends.values()
    run(config, tmp_path / "run", "wandb", "trackio", "wandb", "none")
    assert wandb.lines == trackio.lines
    assert [step for step, _ in wandb.lines] == [2, 2, 4, 4, 5, 5]
    assert all(type(value) in (int, float) for _, line in wandb.lines for value in line.values())
    assert (wandb.finished, trackio.finished) == (1, 1)
    name = identity(tmp_path / "run")
    assert (wandb.arguments["id"], wandb.arguments["resume"], wandb.arguments["project"]) == (name, "allow", "twophase")
    assert name in trackio.arguments["name"]
    assert wandb.arguments["config"]["outer"]["restart"] == "2"
    assert wandb.arguments["dir"] == str(tmp_path / "run")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_logged_steps_are_not_sent_again(name: str, backends: dict[str, Backend], tmp_path: Path) -> None:
    """A tracker that has steps below 4 gets only the others of what a resumed run logs again."""
    backends[name].step = backends[name]._next_step = 4
    tracker = start(name, tmp_path)
    for step in (2, 3, 4, 5):
        tracker.log({"x": 1.0}, step)
    tracker.close()
    assert [step for step, _ in backends[name].lines] == [4, 5]


def test_a_loop_that_begins_anew_is_a_run_of_its_own(
    backends: dict[str, Backend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker gets all of its lines under another id, and none among those of the first attempt.

    One that loads its state inside of the block has not begun anew.
    """
    logged: dict[str, list[tuple[int, dict[str, float]]]] = {}

    def init(*, name: str, **_: Any) -> Backend:  # a server, which knows its runs by their names
        backend = Backend()
        backend.lines = logged.setdefault(name, [])
        backend._next_step = max((step + 1 for step, _ in backend.lines), default=0)
        return backend

    assert "trackio" in backends
    monkeypatch.setattr(sys.modules["trackio"], "init", init)
    state: dict[str, Any] = {}
    for loss, steps in ((9.0, 8), (1.0, 12), (2.0, 4)):
        engine = DiLoCo(nn.Linear(2, 2), OuterRule(0.7, 0.9), inner_steps=2)
        with suppress(ZeroDivisionError), record(engine, tmp_path / "run", track="trackio"):
            if loss == 2.0:
                engine.load_state_dict(state)
            for _ in range(steps):
                engine.step({"loss": loss})
            state = copy.deepcopy(engine.state_dict())
            raise ZeroDivisionError
    losses = [[(step, line["loss/train"]) for step, line in lines if "loss/train" in line] for lines in logged.values()]
    second = [*((step, 1.0) for step in range(2, 13, 2)), (14, 2.0), (16, 2.0)]
    assert losses == [[(step, 9.0) for step in range(2, 9, 2)], second]


def test_numbers_only() -> None:
    """Text, nothing, lists, NaN and infinities are left out; nested names are joined; truth becomes 0 or 1."""
    values = {"a": 1, "b": None, "c": "x", "d": [1.0], "e": float("nan"), "f": float("-inf"), "g": {"h": {"i": False}}}
    assert numbers(values) == {"a": 1, "g/h/i": 0}


# --- the run is not touched ---------------------------------------------------------------------------------------


def test_run_is_the_same(
    wandb: Backend, config: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a tracker that works, or fails anywhere, weights and logs are those of a run without one, bit for bit."""
    run(config, tmp_path / "plain")
    for stage in ("none", "init", "log", "finish"):
        wandb.fail_at = stage
        assert run(config, tmp_path / stage, "wandb")["exit_reason"] == "finished"
        assert logs(tmp_path / stage) == logs(tmp_path / "plain")
        weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("plain", stage)]
        assert weights[0] == weights[1]
        message = "tracker wandb failed (the server is gone); the run continues without it\n"
        assert capfd.readouterr() == ("", "" if stage == "none" else message)  # neither welcome nor goodbye


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Short patience; the event lets blocked stand-ins go."""
    monkeypatch.setattr(tracking, "START_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.5)
    release = threading.Event()
    yield release
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("tracker "):
            thread.join(10)
            assert not thread.is_alive()  # it ends when it can


@pytest.mark.parametrize("stage", ["init", "log", "finish"])
def test_blocked(
    backends: dict[str, Backend],
    hurried: threading.Event,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    stage: str,
) -> None:
    """A tracker that never answers holds up neither the run nor another tracker, and is reported once."""
    backends["wandb"].fail_at, backends["wandb"].block = stage, hurried
    folder = types.SimpleNamespace(path=tmp_path, log=lambda *_: None)
    with tracked(folder, ["wandb", "trackio"], run_name="first", config={}) as recorder:
        for step in range(20):
            recorder.log(ROUNDS, {"step": step, "round": step})
    out, err = capfd.readouterr()
    assert [step for step, _ in backends["trackio"].lines] == list(range(20))
    assert out == ""
    assert err.count("tracker wandb failed (it has not finished") == 1


def test_far_behind(
    backends: dict[str, Backend],
    hurried: threading.Event,
    tmp_path: Path,
    *,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    """What a slow tracker may be behind is bounded; then it is dropped, and that is said once."""
    monkeypatch.setattr(tracking, "_WAITING", 5)
    backends["wandb"].fail_at, backends["wandb"].block = "log", hurried
    tracker = start("wandb", tmp_path)
    for step in range(100):
        tracker.log({"x": 1.0}, step)
    tracker.close()
    tracker.close()
    assert capfd.readouterr().err == "tracker wandb failed (it is 5 lines behind); the run continues without it\n"


def test_exception_of_the_run(wandb: Backend, config: TrainConfig, tmp_path: Path) -> None:
    """An error of the run closes the tracker and stays what it was."""

    def fail(_: dict[str, Any]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(config, tmp_path / "run", "wandb", on_round=fail)
    assert wandb.finished == 1


def test_not_logged_in(wandb: Backend, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights & Biases without a key is not asked to start, because it would prompt; the message says what to do."""
    sys.modules["wandb"].session.settings.mode = "online"  # type: ignore[attr-defined]
    start("wandb", tmp_path).close()
    assert wandb.arguments == {}
    assert "WANDB_MODE=offline" in capfd.readouterr().err


# --- before and around a run --------------------------------------------------------------------------------------


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is missing, or a tracker that does not exist, is one message before anything is made."""
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: None)
    for name in ("wandb", "trackio", "tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(UsageError, match=rf"--track {name}: .*pip install 'twophase\[{name}\]'"):
            check(["none", name])
    with pytest.raises(UsageError, match=r"--track mlflow: .*wandb"):
        check(["mlflow"])
    assert check(["none"]) == ()


@pytest.mark.parametrize(("names", "lead"), [((), True), ((), False), (("wandb",), False)])
def test_nothing_tracked(wandb: Backend, tmp_path: Path, names: tuple[str, ...], lead: bool) -> None:
    """Without trackers, and on the processes that do not lead, the folder itself is used and nothing is written."""
    folder = types.SimpleNamespace(path=tmp_path)
    with tracked(folder, names, run_name="first", config={}, lead=lead) as recorder:
        assert recorder is folder
    assert list(tmp_path.iterdir()) == []
    assert wandb.arguments == {}


def test_identity(tmp_path: Path) -> None:
    """A folder keeps its id, also when it moves, and another folder has another one."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    name = identity(first)
    assert identity(first) == name != identity(second)
    first.rename(tmp_path / "moved")
    assert identity(tmp_path / "moved") == name
    for damaged in ("", "{}", "[]"):
        (second / "tracking.json").write_text(damaged)
        assert identity(second) == identity(second) != name


# --- the packages themselves, where they are installed ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_the_real_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The installed package takes lines without a network, prints nothing, and its files are there."""
    if name not in sys.modules and tracking.importlib.util.find_spec(name) is None:
        pytest.skip(f"the extra {name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    tracker = start(name, tmp_path)
    for step in range(5):
        tracker.log({"loss/train": 1.0 / (step + 1)}, step)
    tracker.close()
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.rglob("*.db" if name == "trackio" else "*.wandb"))
