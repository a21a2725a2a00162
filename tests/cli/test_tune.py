"""`twophase tune`: the search by made-up results, and the command killed and resumed with real runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import madeup
from forked import Forked, call
from twophase.base.config import RunError, UsageError
from twophase.cli import tuning as room
from twophase.cli.tuning import TuneResults, Tuning, run_tuning
from twophase.restart import Periodic
from twophase.runs.method import numbers_of
from twophase.sweeps.grid import Sweep
from twophase.sweeps.table import read_rows, write_rows
from twophase.tasks.named import config_class
from twophase.training.config import OuterConfig, RunConfig

FRESH = (100, 101, 102, 103, 104, 105, 106)
RATE = "averaging:lr=~1"
FACTORS = {"averaging": 1.0, "nesterov": 0.9, RATE: 1.0, "adamw": 1.2}
"""What an arm's best result is, in that of the control."""


def base(steps: int = 64) -> RunConfig:
    """Not made at the import: other tests forget the classes of tasks."""
    return config_class("digits")(steps=steps, inner_steps=8)


def bowl(config: RunConfig) -> float:
    """A loss with one minimum: inner.lr 0.016, and lr and momentum of the method at twice and half their starts."""
    name, now = config.outer.method, config.outer.numbers()
    start = numbers_of({"method": name})
    lr, momentum = 0.5 * start["lr"] if name == "averaging" else start["lr"], start["momentum"]
    away = [math.log(config.inner.lr / 0.016), math.log(now["lr"] / (2 * lr))]
    away += [math.log((1 - now["momentum"]) / (2 * (1 - momentum)))] if momentum else []
    return FACTORS[name] * math.exp(sum(x * x for x in away)) * (1 + 1e-4 * (config.seed % 7))


@dataclass
class Stages:
    """In place of the sweeps: results by a formula, in a table as a sweep writes it."""

    loss: Callable[[RunConfig], float] = bowl
    seconds: float = 1.0
    stop_after: float = math.inf
    names: list[str] = field(default_factory=list)

    def complete(self, sweep: Sweep, folder: Path, **_: Any) -> None:
        """Write the table of a sweep; die in place of the one after `stop_after`."""
        if len(self.names) >= self.stop_after:
            raise KeyboardInterrupt
        self.names.append(folder.name)
        folder.mkdir(exist_ok=True)
        write_rows(folder / "cells.csv", madeup.rows(sweep, lambda cell: self.loss(cell.config), self.seconds))


Run = Callable[..., TuneResults]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    """The made-up sweeps."""
    made = Stages()
    monkeypatch.setattr(room, "complete", made.complete)
    monkeypatch.setattr("os.fsync", lambda _: None)  # hundreds of small files that no power cut will meet
    monkeypatch.setattr(
        "twophase.tasks.build.preflight_all", lambda configs: dict.fromkeys(map(str, list(configs)[:0]))
    )
    return made


@pytest.fixture
def tune(stages: Stages, tmp_path: Path) -> Run:
    """A comparison with made-up results."""
    assert stages.names == []

    def run(*arms: str, **options: Any) -> TuneResults:
        values = {"points": 40, "fresh": FRESH} | options
        values["base"] = base(values.pop("steps", 64))
        return run_tuning(Tuning(texts=arms or tuple(FACTORS)[1:], **values), tmp_path / "tune", workers=1)

    return run


def test_each_arm_at_its_own_best(tune: Run, tmp_path: Path) -> None:
    """Each arm is found within half a step of its own best, judged on fresh seeds by its own factor, best first."""
    outcome = tune()
    assert [(tuned.arm, tuned.word) for tuned in outcome.arms] == [
        ("nesterov", "better"),
        ("averaging", "control"),
        (RATE, "equivalent"),
        ("adamw", "worse"),
    ]
    half = math.log(2) / 4 + 1e-3
    for tuned in outcome.arms:
        assert tuned.interior
        assert tuned.numbers is not None
        assert abs(math.log(tuned.numbers["inner.lr"] / 0.016)) <= half
        assert abs(math.log((1 - tuned.numbers.get("method.momentum", 0.8)) / 0.2)) <= half
        assert tuned.results == pytest.approx([FACTORS[tuned.arm] * (1 + 1e-4 * (seed % 7)) for seed in FRESH], rel=0.3)
        assert tuned.settings <= 40
        assert tuned.seconds == 2 * tuned.settings + len(FRESH)
    ratio, low, high = outcome.arms[-1].ratios()
    assert ratio is not None
    assert low is not None
    assert high is not None
    assert low <= ratio <= high < 1
    written = json.loads((tmp_path / "tune" / "verdict.json").read_text())
    assert [(arm["arm"], arm["word"], arm["numbers"]) for arm in written["arms"]] == [
        (tuned.arm, tuned.word, tuned.numbers) for tuned in outcome.arms
    ]
    frame = outcome.frame()
    assert frame["arm"].tolist() == [tuned.arm for tuned in outcome.arms]
    assert frame["inner.lr"].notna().all()
    assert frame["method.momentum"].notna().sum() == 2
    assert all(tuned.arm in str(outcome) for tuned in outcome.arms)


@pytest.mark.parametrize("points", [1, 3, 5])
def test_the_same_number_of_settings(tune: Run, points: int) -> None:
    """No arm tries more settings than another may; a search that this ends says so."""
    outcome = tune(points=points)
    assert {tuned.settings for tuned in outcome.arms} == {points}
    assert not any(tuned.interior for tuned in outcome.arms)


def test_a_search_that_more_points_would_go_on_with_is_named(tune: Run, tmp_path: Path) -> None:
    """The last line names the arms that try more where they may, those between whole steps and midpoints too."""
    whole = {tuned.arm: tuned.settings for tuned in tune(RATE).arms}
    assert max(whole.values()) < 40
    for points in range(1, max(whole.values()) + 1):
        shutil.rmtree(tmp_path / "tune")
        outcome = tune(RATE, points=points)
        ended = {arm for arm, settings in whole.items() if settings > points}
        assert {tuned.arm for tuned in outcome.arms if not tuned.interior} == ended
        (line,) = [line for line in str(outcome).splitlines() if "by its budget" in line] or [""]
        assert set(filter(None, line.removeprefix("The search of ").partition(" ended")[0].split(", "))) == ended


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"points": 12}, {"points": None, "budget": 500.0}])
def test_interrupted_anywhere(tune: Run, stages: Stages, tmp_path: Path, limit: Mapping[str, Any]) -> None:
    """Wherever a comparison stops, the same call goes on and ends with the same file."""
    tune("nesterov", **limit)
    whole, names = (tmp_path / "tune" / "verdict.json").read_bytes(), list(stages.names)
    for stop in range(len(names)):
        shutil.rmtree(tmp_path / "tune")
        stages.stop_after, stages.names = stop, []
        with pytest.raises(KeyboardInterrupt):
            tune("nesterov", **limit)
        stages.stop_after, stages.names = math.inf, []
        tune("nesterov", **limit)
        assert stages.names == names
        assert (tmp_path / "tune" / "verdict.json").read_bytes() == whole


def test_a_budget_is_a_number_of_settings(tune: Run, stages: Stages, tmp_path: Path) -> None:
    """What one setting of each arm takes says how many there may be; one that is too small may be made larger."""
    stages.seconds = 10.0  # 2 arms, 2 seeds: 40 s a setting, and 140 s for the fresh seeds
    with pytest.raises(UsageError, match="--budget"):
        tune("nesterov", points=None, budget=240.0)
    stages.seconds = 1.0  # the first stage is there already
    assert {tuned.settings for tuned in tune("nesterov", points=None, budget=440.0).arms} == {7}
    assert json.loads((tmp_path / "tune" / "tune.json").read_text())["settings"] == 7
    assert {tuned.settings for tuned in tune("nesterov", points=None, budget=440.0).arms} == {7}


def test_a_resumed_budget_counts_the_workers_that_had_work(stages: Stages, tmp_path: Path) -> None:
    """The first stage has four runs; more workers than these have not shortened it."""
    stages.seconds, tuning = 60.0, Tuning(base(), ("nesterov",), budget=3600.0, fresh=FRESH)
    stages.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        run_tuning(tuning, tmp_path / "tune", workers=64)
    noted = json.loads((tmp_path / "tune" / "tune.json").read_text())
    assert noted["first_stage_seconds"] == pytest.approx(60, abs=5)


CHANGES: list[dict[str, Any]] = [
    {"points": 4},
    {"points": None, "budget": 3600.0},
    {"seeds": (0, 1, 2)},
    {"fresh": (5, 6)},
    {"steps": 72},
    {"texts": ("nesterov", "adamw")},
]


@pytest.mark.parametrize("change", CHANGES, ids=[next(iter(change)) for change in CHANGES])
def test_a_changed_comparison(tune: Run, tmp_path: Path, change: dict[str, Any]) -> None:
    """Another comparison in the same folder is refused, and nothing of it is changed."""
    tune("nesterov", points=3)
    before = {path: path.read_bytes() for path in (tmp_path / "tune").rglob("*.*") if path.is_file()}
    changed = {"texts": ("nesterov",), "points": 3} | change
    with pytest.raises(UsageError, match="--out"):
        tune(*changed.pop("texts"), **changed)
    assert before == {path: path.read_bytes() for path in before}


def test_other_folders(tune: Run, tmp_path: Path) -> None:
    """A folder of something else, and a damaged file, are refused by name."""
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "config.yaml").touch()
    with pytest.raises(UsageError, match=r"config\.yaml"):
        tune("nesterov")
    (tmp_path / "tune" / "tune.json").write_text('{"points": 3')
    with pytest.raises(UsageError, match=r"tune\.json"):
        tune("nesterov")


IMPOSSIBLE: list[dict[str, Any]] = [
    {"budget": 0.0},
    {"points": None, "budget": "10m"},
    {"seeds": ()},
    {"seeds": (1, 1)},
    {"fresh": (5,)},
    {"fresh": (5, 5)},
    {"texts": ("nesterov", "nesterov")},
    {"texts": "nesterov"},
    {"texts": ("nesterov:momentum=1",)},
    {"texts": ("nesterov+readout=tail",)},
    {"texts": (Periodic(3),)},
    {"texts": 3},
    {"points": 1.0},
    {"seeds": 0},
    {"seeds": ["0"]},
    {"fresh": (5, 6.5)},
    {"fresh": (-1, 5)},
]


@pytest.mark.parametrize("options", IMPOSSIBLE, ids=str)
def test_impossible_comparisons(options: dict[str, Any]) -> None:
    """What cannot be compared is refused by the name of its option."""
    with pytest.raises(UsageError, match=r"--(points|budget|seeds|fresh|arms)"):
        Tuning(base(), **options)


def test_arrays_and_generators() -> None:
    """From Python lists may be anything with values in an order, and whole numbers those of arrays."""
    plain = Tuning(base(), ["nesterov", "auto"], 3, seeds=[0, 1], fresh=[5, 6])
    options: dict[str, Any] = {"points": np.int64(3), "seeds": np.arange(2), "fresh": np.arange(5, 7)}
    arrays = Tuning(base(), **options, texts=(text for text in ("nesterov", "auto")))  # type: ignore[arg-type]
    assert json.dumps(arrays.spec()) == json.dumps(plain.spec())


def test_divergence_is_shown(tune: Run, stages: Stages) -> None:
    """An arm without a setting, one that diverges on a fresh seed, and an absent control are said to be so."""

    def loss(config: RunConfig) -> float:
        outer = config.outer
        is_rate = outer.method == "averaging" and outer.lr is not None
        fails = outer.method == "adamw" or (is_rate and config.seed == 103) or config.inner.lr > 0.0005
        return math.inf if fails else bowl(config)

    stages.loss = loss
    outcome = tune(points=12, fresh=FRESH[:5])  # too few for a word where one diverges
    by_arm = {tuned.arm: tuned for tuned in outcome.arms}
    assert by_arm["adamw"].word == "all diverged"
    assert by_arm["adamw"].settings == 12
    assert by_arm[RATE].results.count(None) == 1
    assert by_arm[RATE].fresh is None
    assert by_arm[RATE].word == "undecided"
    assert by_arm["nesterov"].numbers is not None
    assert by_arm["nesterov"].numbers["inner.lr"] <= 0.0005
    for words in ("all diverged", "1 of 5 diverged"):
        assert words in str(outcome)
    assert outcome.frame()["inner.lr"].isna().sum() == 1


def test_without_a_control(tune: Run, stages: Stages) -> None:
    """Where averaging diverges everywhere no arm is called better or worse; where all do, that is the error."""
    stages.loss = lambda config: math.inf if config.outer.plain() == OuterConfig().plain() else bowl(config)
    outcome = tune("nesterov", points=6)
    assert [tuned.word for tuned in outcome.arms] == ["no control", "all diverged"]
    stages.loss = lambda _: math.inf
    shutil.rmtree(outcome.path)
    with pytest.raises(RunError, match="diverged"):
        tune("nesterov", points=6)


def test_losses_that_have_no_ratio(tune: Run, stages: Stages) -> None:
    """A loss that is not above 0 is an error, not a divergence."""
    stages.loss = lambda _: -1.0
    with pytest.raises(RunError, match="above 0"):
        tune("nesterov")


@pytest.mark.parametrize(
    ("arm", "other"),
    [
        ("nesterov", "nesterov@never"),
        ("nesterov@3", "nesterov@periodic:3"),
        ("nesterov:momentum=0.9", "nesterov:momentum=0.90"),
        ("nesterov:lr=0.7:momentum=0.9", "nesterov:momentum=0.9:lr=0.70"),
        ("averaging", "averaging@never"),
        ("averaging", "averaging+filter=none"),
    ],
)
def test_one_arm_in_two_texts(arm: str, other: str) -> None:
    """An arm counts once, however it is written: twice, it would widen every interval."""
    remedy = "which is always there" if arm == "averaging" else "give it once"
    with pytest.raises(UsageError, match=re.escape(f"--arms: {other} is ") + f".*{re.escape(arm)}[,;] {remedy}"):
        Tuning(base(), ("adamw", *{arm: None, other: None}))


def test_arms_that_begin_alike() -> None:
    """Arms are others where they tune other numbers, also where their searches begin with the same run."""
    texts = ("nesterov", "nesterov@3", "nesterov@K", "nesterov:momentum=0.9:lr=0.7", "nesterov:momentum=~0.6")
    assert [arm.text for arm in Tuning(base(), texts).arms[1:]] == list(texts)
    filtered = replace(base(), outer=replace(base().outer, filter="orthogonal"))
    assert len(Tuning(filtered, ("averaging+filter=none+schedule=linear:1", "averaging+filter=orthogonal")).arms) == 3


RINGS = (Path(__file__).parents[2] / "examples" / "rings.py").read_text(encoding="utf-8")


def verdict(folder: Path) -> dict[str, Any]:
    """What a comparison has written, without times."""
    written = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    for arm in written["arms"]:
        del arm["seconds"]
    return written


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_killed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is killed again and again ends as an undisturbed one; its last sweep is one as any other."""
    monkeypatch.chdir(tmp_path)
    Path("rings.py").write_text(RINGS, encoding="utf-8")
    options = "--steps 4 --inner-steps 2 --points 2 --seeds 0 --fresh 5 6 --workers 1 --quiet".split()
    words = ["tune", "rings.py:Rings", *options, "--arms", "averaging+filter=orthogonal", "auto"]
    done = call(*words, "--out", "whole")
    assert done.returncode == 0, done.stderr
    kills = 0
    for name in ("tune.json", "stage-00/cells.csv", "stage-01/runs/*/rounds.jsonl", "fresh/plan.json"):
        process = Forked(*words, "--out", "cut")
        while process.poll() is None and not any(Path("cut").glob(name)):
            time.sleep(0.01)  # the process needs the processor
        kills += process.poll() is None
        process.kill()
        process.communicate(60)
    assert kills >= 3
    resumed = call(*words, "--out", "cut")
    assert resumed.returncode == 0, resumed.stderr
    assert verdict(Path("cut")) == verdict(Path("whole"))
    again = (Path("cut") / "verdict.json").read_bytes()
    assert call(*words, "--out", "cut").returncode == 0
    assert (Path("cut") / "verdict.json").read_bytes() == again

    assert {row.arm for row in read_rows(Path("cut/fresh/cells.csv"))} == {"averaging", *words[-2:]}
    report = call("report", "cut/fresh")
    assert report.returncode == 0, report.stderr

    Path("rings.py").write_text(RINGS.replace("noise: float = 0.2", "noise: float = 0.1"), encoding="utf-8")
    assert call(*words, "--out", "cut").returncode == 2
    Path("rings.py").write_text(f"{RINGS}\n# changed\n", encoding="utf-8")
    assert call(*words, "--out", "cut").returncode == 2
