"""The bench: its protocol can be run, and docs/bench.md shows what the stored tables say."""

from __future__ import annotations

import csv
import math
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from modules import load

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "experiments" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Return the modules that need no policy of the experiments."""
    monkeypatch.setattr(sys, "path", [str(BENCH), str(BENCH.parent), *sys.path])
    return {name: import_module(name) for name in ("protocol", "against", "tables", "regimes")}


def words(text: str) -> str:
    """Return a text without its line breaks and the widths of its columns."""
    return re.sub(r"\s+", " ", text)


def test_the_page_shows_the_tables(bench: dict[str, ModuleType]) -> None:
    """Both tables of docs/bench.md are printed from the stored rows."""
    page = words((ROOT / "docs" / "bench.md").read_text(encoding="utf-8"))
    tables = bench["tables"]
    for text in (tables.answer(tables.table()), bench["regimes"].answer()):
        assert words(text) in page


def test_families_are_those_of_the_registration(bench: dict[str, ModuleType]) -> None:
    """Their sizes are those that intervals are widened for, and every comparison has its stored runs."""
    tables, judge = bench["tables"], bench["against"]
    families = tables.families()
    assert [len(pairs) for pairs in families.values()] == [24, 144, 162, 56, 28]
    results = judge.results_of(tables.stored("reference.csv"))
    stored = set(results.index)
    assert {(place, arm) for pairs in families.values() for place, *arms in pairs for arm in arms} <= stored


def test_words_by_hand(bench: dict[str, ModuleType]) -> None:
    """Ratios are of geometric means; a run without a result diverged, an arm without a seed diverged everywhere."""
    judge = bench["against"]
    rows = [{"place": "p", "arm": arm, "seed": str(seed), "result": str(result)} for arm, results in (
        ("good", [1.0, 1.02, 0.99]), ("control", [2.0, 2.01, 2.03]), ("zero", [0.0, 1.0, 1.0])
    ) for seed, result in enumerate(results)]  # fmt: skip
    rows += [{"place": "p", "arm": "lost", "seed": "", "result": ""}]
    rows[-2]["result"] = ""
    results = judge.results_of(rows)
    against = judge.Against.of(results, "p", "good", "control", 2)
    assert against.word == "better"
    assert against.ratio == pytest.approx((2.0 * 2.01 * 2.03 / (1.0 * 1.02 * 0.99)) ** (1 / 3))
    assert judge.Against.of(results, "p", "lost", "control", 2).word == "all diverged"
    assert list(results.loc[("p", "zero")]) == [0.0, 1.0, math.inf]
    behind = judge.behind(results.drop(index=("p", "zero")), ["p"], ["control", "lost"])
    assert behind["control"] == [pytest.approx(100 * (against.ratio - 1))]
    assert behind["lost"] == [math.inf]


POLICIES = """
import sys
sys.path[:0] = sys.argv[1:]
from protocol import PLACES
import policies
from twophase.tuning.tune import Tuning
for place in PLACES:
    Tuning(place.base(), place.arms, 4)
"""


@pytest.mark.slow
def test_every_arm_can_be_run() -> None:
    """The arms of the protocol go together with each place, and no two of them are the same."""
    folders = [str(BENCH), str(BENCH.parent)]  # in a process without tests/, which has a module policies, too
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", POLICIES, *folders], check=True, env=environment)


@pytest.mark.slow
@pytest.mark.usefixtures("bench", "forked_workers")
def test_a_tiny_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An arm and averaging are tuned and judged at one place; a repeated call says the same without a run."""
    monkeypatch.setitem(sys.modules, "policies", SimpleNamespace(share_with_workers=lambda: None))
    run = load(BENCH / "run.py")
    words = ["averaging outer.filter=orthogonal", "--size", "tiny", "--quiet", "--workers", "1", "--out", str(tmp_path)]
    said = []
    for _ in range(2):
        assert run.main(words) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["place"], row["arm"], row["seed"]) for row in rows] == [
        ("trial", arm, seed) for arm in ("averaging", "averaging outer.filter=orthogonal") for seed in ("100", "101")
    ]
    logs = [math.log(float(row["result"])) for row in rows]
    with (tmp_path / "against.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert float(line["ratio"]) == pytest.approx(math.exp((logs[0] + logs[1] - logs[2] - logs[3]) / 2))
