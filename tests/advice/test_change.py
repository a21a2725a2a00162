"""The one change that `diagnose` ends with: which, for which run, and that its numbers stand in the documentation."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from twophase.advice import change as house
from twophase.advice.change import change
from twophase.recipes.bench import stored
from twophase.rule import OuterRule
from twophase.studies import regimes

NESTEROV = OuterRule(0.7, 0.9, nesterov=True)
AVERAGING = {"outer.lr": 1.0, "outer.momentum": 0.0, "outer.nesterov": False, "outer.restart": "never"}
CASES: dict[str, tuple[OuterRule, dict[str, Any], str, dict[str, Any]]] = {
    "too large a momentum": (NESTEROV, {}, "cannot tell", AVERAGING),
    "the same with restarts": (NESTEROV, {"outer.restart": "5"}, "held", AVERAGING),
    "a small step": (OuterRule(1.0, 0.3), {}, "lags", {}),
    "EMA form": (OuterRule(0.7, 0.9, form="ema"), {}, "lags", {}),
    "diverges": (NESTEROV, {}, "diverges", {"outer.lr": 0.35}),
    "averaging under a cosine": (OuterRule(1.0, 0.0), {}, "cannot tell", {"outer.filter": "orthogonal"}),
    "no momentum, a small lr": (OuterRule(0.5, 0.0), {}, "cannot tell", {"outer.lr": 1.0}),
    "auto": (OuterRule(1.0, 0.5), {"outer.restart": "auto"}, "cannot tell", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_which_change(case: str) -> None:
    """Averaging where the gain is large, the filter beside averaging, half the rate after divergence, else none."""
    rule, config, verdict, values = CASES[case]
    advised = change(rule, [verdict], 60, config)
    assert advised is not None
    assert dict(advised.values) == values
    assert bool(advised.command("runs/one", config)) == bool(values)


def test_a_rising_rate_where_the_map_of_regimes_says_so() -> None:
    """Averaging gets a rising rate beyond the limit; limit and numbers are those of the stored table."""
    rule, config = OuterRule(1.0, 0.0), {"inner.schedule": "wsd"}
    beyond, below = (change(rule, ["cannot tell"], 60, config, house.RISING + d) for d in (0.01, -0.01))
    assert beyond is not None
    assert below is not None
    assert dict(beyond.values) == {"outer.schedule": "linear:final=2"}
    assert dict(below.values) == {"outer.filter": "orthogonal"}
    result = regimes.table()
    facts = result.numbers["rules"]["a rising rate"]
    assert facts["usable"]
    assert facts["rule"] == f"shrunk above {house.RISING:g}"
    assert f"{round(facts['share'] * facts['cells'])} of {facts['cells']} signs" in beyond.size
    judged = [line for line in result.rows if line["treatment"] == "a rising rate" and not line["fitted"]]
    gains = [100 * (line["ratio"] - 1) for line in judged if line["shrunk"] > house.RISING]
    assert f"{min(gains):.0f} to {max(gains):.0f} % in the {len(gains)}" in beyond.size


def test_what_is_said_of_averaging_and_its_filter() -> None:
    """Each at its best inner learning rate, from the stored table of the map of regimes."""
    ratios = regimes.table().numbers["at_best"]
    assert len(ratios) == 8
    rule, config = OuterRule(1.0, 0.0), {}
    advised = change(rule, ["cannot tell"], 60, config)
    assert advised is not None
    gains = [100 * (each["orthogonal"] - 1) for each in ratios.values()]
    assert min(gains) > 0
    assert f"8 of 8 places of the bench, by {min(gains):.0f} to {max(gains):.0f} %" in advised.size
    assert advised.command("runs/one", {"recorded": True}).startswith("in your loop: DiLoCo(model, twophase.outer(")
    behind = {
        name: [100 * (1 / each[name] - 1) for each in ratios.values()] for name in ("momentum", "DiLoCo's momentum")
    }
    assert min(behind["momentum"]) > 0
    costs = sorted(behind["DiLoCo's momentum"])
    assert f"by {costs[0]:.0f} to {costs[-2]:.0f} % (digits: more)" in house._AVERAGING
    best: dict[tuple[str, str], tuple[float, float]] = {}
    cells = {(row["place"], row["arm"], float(row["inner.lr"])) for row in stored("regimes.csv")}
    for place, arm, lr in cells:
        results = [
            math.log(float(row["result"])) for row in stored("regimes.csv")
            if (row["place"], row["arm"], float(row["inner.lr"])) == (place, arm, lr)
        ]  # fmt: skip
        best[place, arm] = min(best.get((place, arm), (math.inf, 0.0)), (math.fsum(results), lr))
    twice = sum(best[place, "averaging+filter=orthogonal"][1] == 2 * best[place, "observe"][1] for place in ratios)
    assert twice == 5


def test_nothing_is_said_of_little() -> None:
    """A run of a few rounds, or without a known rule, has no change."""
    assert change(NESTEROV, ["cannot tell"], 7, {}) is None
    assert change(None, ["cannot tell"], 60, {}) is None


def test_the_command_makes_the_changed_run() -> None:
    """The command takes the run's own configuration and changes these values; a recorded loop gets a line of code."""
    advised = change(NESTEROV, ["cannot tell"], 60, {})
    assert advised is not None
    command = advised.command("runs/one", {})
    assert "--config runs/one/config.yaml" in command
    assert "--outer.momentum 0.0 --outer.no-nesterov" in command
    assert advised.command("runs/one", {"recorded": True}).endswith("OuterRule(lr=1, momentum=0)")


@pytest.mark.parametrize("nesterov", [True, False])
def test_numbers_stand_in_the_documentation(nesterov: bool) -> None:
    """Each measured number is one of docs/restarts.md."""
    page = (Path(__file__).parents[2] / "docs" / "restarts.md").read_text(encoding="utf-8")
    for number in re.findall(r"\d[\d.]* to [\d.]+|\d+ %|\d\.\d+ times", house._WORTH[nesterov]):
        assert number in page, number
