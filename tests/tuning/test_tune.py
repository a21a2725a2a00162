"""`twophase tune`: the stages by made-up results, and the command killed and resumed with real runs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import madeup
from forked import Forked, call
from twophase.cli.train import RunOptions, parse_run
from twophase.errors import RunError, UsageError
from twophase.runs.config import RunConfig
from twophase.sweeps.grid import Sweep, write_spec
from twophase.sweeps.runner import Outcome
from twophase.tasks.registry import config_class
from twophase.tuning.methods import METHODS
from twophase.tuning.results import TuneResults, train_command
from twophase.tuning.search import Point, Results, Scale
from twophase.tuning.tune import Tuning, run_tuning

FRESH = (100, 101, 102, 103, 104, 105, 106)
FACTORS = {"averaging": 1.0, "nesterov": 0.9, "heavy-ball": 1.0, "adamw": 1.2}
"""A method's best result, in that of averaging."""
STEPS = (0, 1, -1, 2, -2, 3, 4, 5, 6, 7, 8)


def zigzag(scales: Mapping[str, Scale], results: Results, count: int) -> list[Point]:
    """In place of Optuna: all numbers go up and down together."""
    factors = [2.0**step for step in STEPS[len(results) : len(results) + count]]
    return [tuple(scale.start * factor for scale in scales.values()) for factor in factors]


def bowl(config: RunConfig) -> float:
    """A loss with one minimum, at twice the default inner learning rate."""
    rate = math.exp(math.log(config.inner.lr / 0.004) ** 2)
    return FACTORS[config.outer.method] * rate * (1 + 1e-4 * (config.seed % 7))


class MadeUp:
    """Comparisons with results by a formula, in the place of `run_sweep`."""

    def __init__(self, folder: Path) -> None:
        self.loss: Callable[[RunConfig], float] = bowl
        self.folder, self.stages, self.stop_after, self.seconds = folder, list[str](), math.inf, 1.0

    def run_sweep(self, sweep: Sweep, folder: Path, **_: Any) -> Outcome:
        """Return the rows of a sweep; stop in the place of the one after `stop_after`."""
        write_spec(sweep, folder)
        if len(self.stages) >= self.stop_after:
            raise KeyboardInterrupt
        self.stages.append(folder.name)
        return Outcome(madeup.rows(sweep, lambda cell: self.loss(cell.config), self.seconds), 1.0, {})

    def tune(self, *texts: str, steps: int = 64, out: str = "tune", **options: Any) -> TuneResults:
        """Compare methods, by default all, with 5 settings each."""
        values: dict[str, Any] = {"points": 5, "fresh": FRESH, "texts": texts or tuple(FACTORS)[1:]}
        tuning = Tuning(config_class("digits")(steps=steps), **values | options)
        return run_tuning(tuning, self.folder / out, quiet=True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MadeUp:
    made = MadeUp(tmp_path)
    monkeypatch.setattr("twophase.tuning.tune.run_sweep", made.run_sweep)
    monkeypatch.setattr("twophase.tuning.tune.propose", zigzag)
    return made


def test_each_method_at_its_own_best(made: MadeUp, tmp_path: Path) -> None:
    """Each is found at its own best, compared on fresh seeds, best first, and written and printed."""
    outcome = made.tune()
    assert [tuned.method for tuned in outcome.methods] == ["nesterov", "averaging", "heavy-ball", "adamw"]
    assert [tuned.word for tuned in outcome.methods] == ["better", "control", "equal", "worse"]
    assert [tuned.fresh for tuned in outcome.methods] == sorted(tuned.fresh for tuned in outcome.methods)
    for tuned in outcome.methods:
        assert (tuned.settings, tuned.open, tuned.seconds) == (5, False, 2 * 5 + len(FRESH))
        assert tuned.numbers["inner.lr"] == 0.004
        assert f"\n{tuned.command}  # {tuned.method}" in str(outcome)
    written = json.loads((tmp_path / "tune" / "comparison.json").read_text())
    assert [row["word"] for row in written["methods"]] == outcome.frame()["word"].tolist()
    row = written["methods"][-1]
    assert row["low"] <= row["ratio"] <= row["high"] < 1
    assert len(row["results"]) == len(FRESH)


@pytest.mark.parametrize("points", [1, 3])
def test_an_untried_neighbour_is_named(made: MadeUp, points: int) -> None:
    """Where a better setting may be left, nothing is undecided, equal or worse for good."""
    outcome = made.tune(points=points)
    assert all(tuned.open and tuned.settings == points for tuned in outcome.methods)
    assert {tuned.word for tuned in outcome.methods} == {"better", "control", "open"}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"points": 5}, {"points": None, "budget": 1e4}])
def test_interrupted_anywhere(made: MadeUp, tmp_path: Path, limit: Mapping[str, Any]) -> None:
    """Wherever a comparison stops, the same call goes on and ends with the same file; more points go on from there."""
    made.tune("nesterov", **limit, out="whole")
    names = list(made.stages)
    for stop in range(len(names)):
        made.stop_after, made.stages = stop, []
        with pytest.raises(KeyboardInterrupt):
            made.tune("nesterov", **limit, out=f"cut-{stop}")
        made.stop_after, made.stages = math.inf, []
        made.tune("nesterov", **limit, out=f"cut-{stop}")
        assert made.stages == names
        whole, cut = (tmp_path / folder / "comparison.json" for folder in ("whole", f"cut-{stop}"))
        assert cut.read_bytes() == whole.read_bytes()
    if limit["points"]:
        assert made.tune("nesterov", points=7, out="whole").methods[0].settings == 7


def test_the_budget_is_spent(made: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many settings are tried as the time is for, the fresh seeds included; too little is refused with the least."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def loss(config: RunConfig) -> float:
        clock[0] += 10  # 2 methods, 2 seeds: 40 s a setting, and 140 s for the fresh seeds
        return bowl(config)

    made.loss = loss
    with pytest.raises(UsageError, match=r"--budget.*261s"):
        made.tune("nesterov", points=None, budget=240.0)
    assert {tuned.settings for tuned in made.tune("nesterov", points=None, budget=439.0).methods} == {7}
    assert clock[0] == 40 + 40 * 7 + 140  # the second call makes the first setting's results again
    made.loss, made.seconds, made.stop_after, made.stages = bowl, 10.0, 0, []
    with pytest.raises(KeyboardInterrupt):
        made.tune("nesterov", points=None, budget=240.0, out="cut")
    made.stop_after = math.inf  # the rest of the stage takes no time, its runs have
    with pytest.raises(UsageError, match=r"--budget.*261s"):
        made.tune("nesterov", points=None, budget=240.0, out="cut")


CHANGES: list[dict[str, Any]] = [{"seeds": (0, 1, 2)}, {"fresh": (5, 6)}, {"steps": 72}, {"texts": ("adamw",)}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_another_comparison_in_the_folder(made: MadeUp, change: dict[str, Any]) -> None:
    """It is refused, by the option that differs."""
    made.tune("nesterov")
    (option,) = change
    changed: dict[str, Any] = {"texts": ("nesterov",)} | change
    with pytest.raises(UsageError, match=f"--{option.replace('texts', 'methods')}"):
        made.tune(**changed)


IMPOSSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("points", {"points": 0}),
    ("budget", {"budget": 0.0}),
    ("budget", {"points": 3, "budget": 5.0}),
    ("seeds", {"seeds": ()}),
    ("seeds", {"seeds": (1, 1)}),
    ("fresh", {"fresh": (5,)}),
    ("fresh", {"fresh": (0, 5)}),
    ("methods", {"texts": ("averaging",)}),
    ("methods", {"texts": ("nesterov", "nesterov outer.restart=never")}),
    ("methods", {"texts": ("averaging outer.filter=none",)}),
]


@pytest.mark.parametrize(("option", "values"), IMPOSSIBLE, ids=str)
def test_impossible_comparisons(option: str, values: dict[str, Any]) -> None:
    """What cannot be compared is refused by the name of its option; a method counts once, however it is written."""
    with pytest.raises(UsageError, match=f"--{option}"):
        Tuning(config_class("digits")(), **values)


def test_divergence(made: MadeUp) -> None:
    """A method without a setting that survives is last; averaging without any is an error."""
    made.loss = lambda config: math.inf if config.outer.method == "adamw" else bowl(config)
    assert made.tune("adamw").methods[-1].word == "all diverged"
    made.loss = lambda config: math.inf if config.outer.method == "averaging" else bowl(config)
    with pytest.raises(RunError, match=r"--inner\.lr"):
        made.tune("adamw", out="diverged")


def test_muon_needs_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model has no hidden one, it is none of the methods that nobody has asked for."""
    task = SimpleNamespace(model=lambda _: nn.Linear(2, 2))
    monkeypatch.setattr("twophase.tuning.tune.users_task", lambda _: task)
    assert [method.text for method in Tuning(config_class("digits")()).methods] == [*METHODS[:-1]]


def test_rows_are_commands() -> None:
    """The command of a setting gives its configuration again."""
    text = "nesterov outer.restart=K inner.betas=0.9,0.95 outer.form=ema deterministic=true"
    method = Tuning(config_class("digits")(steps=64), (text,)).methods[1]
    made = method.config(tuple(scale.high for scale in method.scales.values()))
    program, train, *words = train_command(made).split()
    assert (program, train) == ("twophase", "train")
    assert parse_run(RunOptions, words, "train")[1] == made


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_the_command_killed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real runs, a command that is killed in a stage ends as an undisturbed one."""
    monkeypatch.chdir(tmp_path)
    words = "tune digits --steps 4 --inner-steps 2 --points 3 --seeds 0 --fresh 5 6 --workers 1 --quiet".split()
    words += ["--methods", "nesterov outer.restart=2"]
    process = Forked(*words, "--out", "cut")
    while process.poll() is None and not any(Path("cut").glob("stage-01/runs/*/rounds.jsonl")):
        time.sleep(0.01)
    process.kill()
    process.communicate(60)
    ends = []
    for folder in ("cut", "whole"):
        done = call(*words, "--out", folder)
        assert done.returncode == 0, done.stderr
        ends.append(json.loads((Path(folder) / "comparison.json").read_text()))
        for row in ends[-1]["methods"]:
            del row["seconds"]
    assert ends[0] == ends[1]
