"""The one change that `diagnose` ends with: which, for which run, and that its numbers stand in the documentation."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from twophase.advice import change as house
from twophase.advice.change import change
from twophase.policies.base import Never
from twophase.policies.gain import mean_outer_gain
from twophase.recipes.bench import stored
from twophase.rule import Form, OuterRule
from twophase.studies import regimes

NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight")
NESTEROV = OuterRule(0.7, 0.9, nesterov=True)
AVERAGING = {"outer.lr": 1.0, "outer.momentum": 0.0, "outer.nesterov": False, "outer.restart": "never"}
CASES: dict[str, tuple[OuterRule, dict[str, Any], str, dict[str, Any]]] = {
    "too large a momentum": (NESTEROV, {}, "cannot tell", AVERAGING),
    "the same with restarts": (NESTEROV, {"outer.restart": "5"}, "held", AVERAGING),
    "a small step": (OuterRule(1.0, 0.3), {}, "lags", {}),
    "a small gain": (OuterRule(0.7, 0.9, form="ema"), {}, "lags", AVERAGING),
    "averaging that diverges": (OuterRule(1.0, 0.0), {}, "diverges", {}),
    "a larger step without momentum": (OuterRule(1.1, 0.0), {}, "cannot tell", {"outer.filter": "orthogonal"}),
    "diverges": (NESTEROV, {}, "diverges", {"outer.lr": 0.35}),
    "diverges with restarts": (NESTEROV, {"outer.restart": "2"}, "diverges", {"outer.lr": 0.35}),
    "averaging under a cosine": (OuterRule(1.0, 0.0), {}, "cannot tell", {"outer.filter": "orthogonal"}),
    "averaging with inner Muon": (OuterRule(1.0, 0.0), {"inner.method": "muon"}, "cannot tell", {}),
    "no momentum, a large lr": (OuterRule(2.5, 0.0), {}, "cannot tell", {"outer.lr": 1.0}),
    "no momentum, a small lr": (OuterRule(0.5, 0.0), {}, "cannot tell", {"outer.lr": 1.0}),
    "auto": (OuterRule(1.0, 0.5), {"outer.restart": "auto"}, "cannot tell", {}),
    "restarts of fragments": (NESTEROV, {"sync.restart": ["head=3", "rest=never"]}, "held", {}),
    "a policy from elsewhere": (NESTEROV, {"outer.restart": "theirs:3"}, "held", {}),
    "auto that diverges": (OuterRule(1.0, 0.5), {"outer.restart": "auto"}, "diverges", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_which_change(case: str) -> None:
    """Averaging where the gain is large, the filter beside averaging, half the rate after divergence, else none."""
    rule, config, verdict, values = CASES[case]
    advised = change(rule, [verdict], 60, config)
    assert advised is not None
    assert dict(advised.values) == values
    assert advised.words.endswith("without restarts.") == (case == "diverges with restarts")  # these may be the cause
    assert bool(advised.command("runs/one", config)) == bool(values)


def test_a_rising_rate_where_the_map_of_regimes_says_so() -> None:
    """Averaging gets a rising rate beyond the limit; limit and numbers are those of the stored table."""
    rule, config = OuterRule(1.0, 0.0), {"inner.schedule": "wsd"}
    beyond, below = (change(rule, ["cannot tell"], 60, config, house.RISING + d) for d in (0.01, -0.01))
    assert beyond is not None
    assert below is not None
    assert dict(beyond.values) == {"outer.schedule": "linear:final=2"}
    larger = change(OuterRule(1.5, 0.0), ["cannot tell"], 60, config, house.RISING + 0.01)
    assert larger is not None
    assert dict(larger.values) == {"outer.schedule": "linear:final=2", "outer.lr": 1.0}  # from 1 to 2, as it says
    assert dict(below.values) == {"outer.filter": "orthogonal"}
    result = regimes.table()
    facts = result.numbers["rules"]["a rising rate"]
    assert facts["usable"]
    assert facts["rule"] == f"shrunk above {house.RISING:g}"
    assert f"{round(facts['share'] * facts['cells'])} of {facts['cells']} signs" in beyond.size
    best = {place: each["averaging"]["inner.lr"] for place, each in result.numbers["at_best"].items()}
    lines = [line for line in result.rows if line["treatment"] == "a rising rate" and line["shrunk"] > house.RISING]
    judged = [line for line in lines if not line["fitted"]]
    gains = [100 * (line["ratio"] - 1) for line in judged]
    assert f"{min(gains):.0f} to {max(gains):.0f} % in the {len(gains)}" in beyond.size
    below_best = sum(line["inner.lr"] < best[line["place"]] for line in judged)
    assert f"{NUMBERS[below_best]} of these had an inner rate below averaging's best" in beyond.size
    at_best = [line for line in lines if line["inner.lr"] == best[line["place"]]]
    helped = sum(line["ratio"] > 1 for line in at_best)
    assert (
        f"where it was the best one, this helped at {NUMBERS[helped]} of {NUMBERS[len(at_best)]} places" in beyond.size
    )


def test_what_is_said_of_averaging_and_its_filter() -> None:
    """Each at its best inner learning rate, from the stored table of the map of regimes."""
    facts = regimes.table().numbers["at_best"]
    assert len(facts) == 8
    advised = change(OuterRule(1.0, 0.0), ["cannot tell"], 60, {})
    assert advised is not None
    gains = [100 * (each["orthogonal"]["ratio"] - 1) for each in facts.values()]
    assert min(gains) > 0
    assert f"8 of 8 places of the bench's map, by {min(gains):.1f} to {max(gains):.0f} %" in advised.size
    assert advised.command("runs/one", {"recorded": True}).startswith("in your loop: DiLoCo(model, twophase.outer(")
    twice = sum(each["orthogonal"]["inner.lr"] == 2 * each["averaging"]["inner.lr"] for each in facts.values())
    assert f"At {NUMBERS[twice]} of them the rate is twice averaging's" in advised.size
    cells = [cell for cell in regimes.cells_of(stored("regimes.csv")) if cell["inner.lr"] == 2e-3]
    untuned = sorted(100 * math.expm1(cell["orthogonal"]) for cell in cells)
    assert f"at the default of 2e-3 between {untuned[0]:.0f} and {untuned[-1]:.0f} %" in advised.size


def test_nothing_is_said_of_little() -> None:
    """A run of a few rounds, or without a known rule, has no change."""
    assert change(NESTEROV, ["cannot tell"], 7, {}) is None
    assert change(None, ["cannot tell"], 60, {}) is None


def test_a_plan_without_end_is_answered_at_once() -> None:
    """A run is stopped by hand; its plan may be longer than a loop over its rounds would take."""
    advised = change(NESTEROV, ["cannot tell"], 60, {"outer.restart": "5"}, planned=1 << 53)
    assert advised is not None
    assert dict(advised.values) == AVERAGING


def test_the_command_makes_the_changed_run() -> None:
    """The command takes the run's own configuration and changes these values; a recorded loop gets a line of code."""
    advised = change(NESTEROV, ["cannot tell"], 60, {})
    assert advised is not None
    command = advised.command("runs/one", {})
    assert "--config runs/one/config.yaml" in command
    assert "--outer.momentum 0.0 --outer.no-nesterov" in command
    assert "--config 'runs/a b/config.yaml'" in advised.command("runs/a b", {})
    assert advised.command("runs/one", {"recorded": True}).endswith("OuterRule(lr=1, momentum=0)")


@pytest.mark.parametrize("form", ["sum", "ema"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("verdict", "lr", "momentum"), [("diverges", 0.6, 0.9), ("cannot tell", 1.0, 0.0)])
def test_the_code_makes_the_changed_rule(verdict: str, lr: float, momentum: float, nesterov: bool, form: Form) -> None:
    """The line for a recorded loop is the changed rule in the run's own form, with Nesterov momentum if it had that."""
    rule = OuterRule(1.2 if momentum else 12.0 if form == "ema" else 1.2, 0.9, nesterov, form)
    config = {"recorded": True, **{f"outer.{name}": value for name, value in asdict(rule).items()}}
    advised = change(rule, [verdict], 60, config)
    assert advised is not None
    code = advised.command("runs/one", config).removeprefix("in your loop: ")
    printed = eval(code, {"OuterRule": OuterRule})  # noqa: S307 - what a reader would do with it
    assert printed == OuterRule(lr, momentum, nesterov and momentum > 0, form if momentum else "sum")


@pytest.mark.parametrize("nesterov", [True, False])
def test_numbers_stand_in_the_documentation(nesterov: bool) -> None:
    """Each measured number is one of docs/restarts.md."""
    page = (Path(__file__).parents[2] / "docs" / "restarts.md").read_text(encoding="utf-8")
    for number in re.findall(r"\d[\d.]* to [\d.]+|\d+ %|\d\.\d+ times", house._WORTH[nesterov]):
        assert number in page, number


def test_small_gains_on_the_stored_grids() -> None:
    """Averaging is better than every setting with a momentum, no restart and a gain below the limit."""
    ratios = []
    averaging: dict[Any, list[float]] = {}
    settings: dict[Any, list[float]] = {}
    for place, rounds, rule, restart, perplexity in grids():
        if restart == "never" and rule == OuterRule(1.0, 0.0):
            averaging.setdefault(place, []).append(perplexity)
        elif restart == "never" and rule.momentum > 0 and mean_outer_gain(rule, Never(), rounds) < house._SMALL_GAIN:
            settings.setdefault((place, rule), []).append(perplexity)
    ratios = [fmean(values) / fmean(averaging[place]) for (place, _), values in settings.items()]
    assert min(ratios) > 1
    low, high = (100 * (edge(ratios) - 1) for edge in (min, max))
    assert f"all {len(ratios)} settings" in house._OF_SMALL_GAINS
    assert f"by {low:.0f} to {high:.0f} %" in house._OF_SMALL_GAINS


def grids() -> Iterator[tuple[str, int, OuterRule, str, float]]:
    """Place, rounds, rule, restart and perplexity of the demo and of the heatmaps, without gain-matched controls."""
    docs = Path(__file__).parents[2] / "docs"
    with (docs / "demo-cells.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if "gain" not in row["arm"]:
                momentum = float(row["outer.momentum"])
                rule = OuterRule(float(row["outer.lr"]), momentum, momentum > 0 and row["outer.nesterov"] == "true")
                yield "demo", 60, rule, row["outer.restart"], float(row["perplexity"])
    with (docs / "robustness_heatmaps.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["of_lr"]:
                momentum = float(row["momentum"])
                form: Any = row["form"] if momentum > 0 and row["form"] else "sum"
                rule = OuterRule(float(row["lr"]), momentum, row["rule"] == "Nesterov", form)
                yield f"S={row['inner_steps']}", int(row["rounds"]), rule, row["restart"], float(row["perplexity"])
