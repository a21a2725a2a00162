"""What docs/restarts.md says in sentences, and its table of the usual rule, is in the csv files beside it."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
Setting = tuple[str, bool, float, float, str]
"""Form, Nesterov or not, momentum, learning rate, restart policy."""
AVERAGING: Setting = ("sum", False, 0.0, 1.0, "never")
LRS = (0.3, 0.7, 1.1)
PLACES = {
    "96 rounds of S = 5": ("heatmaps", "5"),
    "24 rounds of S = 20": ("heatmaps", "20"),
    "60 rounds of S = 8": ("confirmation", "8", "32", "python"),
    "30 rounds of S = 16": ("confirmation", "16", "32", "python"),
    "8 rounds of S = 64": ("confirmation", "64", "32", "python"),
    "30 rounds of S = 16, a wider model": ("confirmation", "16", "48", "python"),
    "30 rounds of S = 16, another text": ("confirmation", "16", "32", "python-code"),
    "60 rounds of S = 16 (the demo)": ("demo",),
}


@cache
def runs() -> dict[Any, dict[Setting, dict[str, float]]]:
    """Perplexities by place, setting and seed; where a csv has means over the seeds, these."""
    by_place: dict[Any, dict[Setting, dict[str, float]]] = {}
    for place, setting, seed, perplexity in _rows():
        by_place.setdefault(place, {}).setdefault(setting, {})[seed] = perplexity
    return by_place


def _rows() -> Iterator[tuple[Any, Setting, str, float]]:
    for row in _csv("robustness_heatmaps.csv"):
        if row["of_restart"] in ("", "3"):  # a gain-matched run goes under the learning rate that it stands beside
            form, momentum, lr = row["form"] or "sum", float(row["momentum"]), float(row["of_lr"] or row["lr"])
            restart = "gain of K=3" if row["of_lr"] else row["restart"]
            setting = (form, row["rule"] == "Nesterov", momentum, lr, restart)
            yield ("heatmaps", row["inner_steps"]), setting, f"{row['seeds']} seeds", float(row["perplexity"])
    for row in _csv("demo-cells.csv"):
        if "gain" not in row["arm"]:
            momentum, lr = float(row["outer.momentum"]), float(row["outer.lr"])
            setting = ("sum", momentum > 0 and row["outer.nesterov"] == "true", momentum, lr, row["outer.restart"])
            yield ("demo",), setting, row["seed"], float(row["perplexity"])
    for row in _csv("adaptive_confirmation-cells.csv"):
        momentum, lr = float(row["outer.momentum"]), float(row["outer.lr"])
        nesterov = momentum > 0 and row["outer.nesterov"] == "true"
        place = ("confirmation", row["inner_steps"], row["model.hidden_size"], row["data.corpus"])
        setting = (row["outer.form"], nesterov, momentum, lr, row["outer.restart"])
        yield place, setting, row["seed"], float(row["perplexity"])


def _csv(name: str) -> Iterator[dict[str, str]]:
    with (DOCS / name).open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def ratio(place: Any, setting: Setting, control: Setting) -> float:
    """Geometric mean over the seeds of one setting's perplexity over the other's."""
    treated, untreated = (runs()[place][each] for each in (setting, control))
    assert set(treated) == set(untreated)
    return geometric_mean([treated[seed] / untreated[seed] for seed in treated])


def rule(restart: str, *, form: str = "sum", nesterov: bool = True, lr: float = 0.7) -> Setting:
    return form, nesterov, 0.9, lr, restart


def span(values: Iterator[float] | list[float]) -> tuple[float, float]:
    items = list(values)
    return min(items), max(items)


def percent(values: tuple[float, float]) -> str:
    return " to ".join(f"{100 * value - 100:.0f}" for value in values) + " %"


def times(values: tuple[float, float]) -> str:
    return " to ".join(f"{value:.2f}" for value in values)


def page() -> str:
    """The page on one line, without the blocks that are quoted from others."""
    text = (DOCS / "restarts.md").read_text(encoding="utf-8")
    return " ".join(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).split())


def short() -> list[Any]:
    """The places of 480 inner steps."""
    return [place for place in PLACES.values() if place != ("demo",)]


def test_the_usual_rule_beside_averaging() -> None:
    """Every row of the table is in the csv files, and the last one on the log; so is what other lines make of it."""
    text = (DOCS / "restarts.md").read_text(encoding="utf-8")
    for name, place in PLACES.items():
        seeds = runs()[place][AVERAGING]
        count = int(next(iter(seeds)).split()[0]) if len(seeds) == 1 else len(seeds)
        cells = [ratio(place, setting, AVERAGING) for setting in (rule("never"), rule("3"), rule("3", lr=0.3))]
        assert "| {} | {} | {:.2f} | {:.2f} | {:.2f} |".format(name, count, *cells) in text, name
    log = (DOCS / "log.md").read_text(encoding="utf-8")
    ends = {
        name.strip(): geometric_mean(map(float, values.split()))
        for name, values in re.findall(r"^(long-[a-z-]+(?: 0\.9 \w+)?) +[\d. ]+ end ([\d. ]+)$", log, re.MULTILINE)
    }
    never, three = (ends[f"long-nesterov 0.9 {restart}"] / ends["long-averaging"] for restart in ("never", "3"))
    assert f"| 300 rounds of S = 16 | 3 | {never:.2f} | {three:.2f} | |" in text
    restarted = span([ratio(place, rule("3"), AVERAGING) for place in short()])
    demo = 100 - 100 * ratio(("demo",), rule("3"), AVERAGING)
    assert f"at 480 steps still {percent(restarted)} above averaging, in the demo {demo:.0f} % below it" in page()
    helped = sum(ratio(place, rule("3", lr=0.3), rule("3")) < 1 for place in short())
    assert len(short()) / 2 < helped < len(short())
    assert ratio(("demo",), rule("3", lr=0.3), rule("3")) > 1
    gains = span([ratio(place, rule("never"), rule("3")) for place in PLACES.values()])
    assert f"{times(gains)} times lower perplexity than without restarts" in page()


def test_nesterov_beside_its_gain_matched_control() -> None:
    """At momentum 0.9: worse than a restart at small learning rates, better at the largest."""
    spans = {
        lr: span([ratio(("heatmaps", s), rule("gain of K=3", lr=lr), rule("3", lr=lr)) for s in ("5", "20")])
        for lr in LRS
    }
    said = (
        f"it is {times(spans[0.3])} times worse at lr 0.3 and {times(spans[0.7])} times at 0.7, and better "
        f"({times(spans[1.1])}) at 1.1"
    )
    assert said in page()


def test_auto_beside_averaging_run_by_run() -> None:
    """It is below averaging in every run that had no part in choosing it."""
    gains: dict[int, list[float]] = {}
    for place in PLACES.values():
        if place[0] == "confirmation":
            auto = next(seeds for setting, seeds in runs()[place].items() if setting[4] == "auto")
            for seed, averaging in runs()[place][AVERAGING].items():
                gains.setdefault(int(place[1]), []).append(100 - 100 * auto[seed] / averaging)
    every = [gain for its in gains.values() for gain in its]
    assert len(every) == 21
    assert "in 21 runs of 21, by {:.1f} to {:.1f} %".format(*span(every)) in page()
    small, large = span(gains[8] + gains[16]), span(gains[64])
    words = "by {:.0f} to {:.0f} % at S = 8 and 16, {:.0f} to {:.0f} % at S = 64"
    assert words.format(*small, *large) in page()
