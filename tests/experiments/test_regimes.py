"""The answers of the study of regimes, on tables with a known answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from modules import load

ROOT = Path(__file__).parents[2] / "experiments" / "regimes"
METHODS = [
    f"{name}{k}" for name in ("usual", "heavy ball", "nesterov") for k in ("", ", K = 3", ", K = 7", ", K tuned")
]
METHODS += [
    "usual, K of the theory",
    "heavy ball, K of the theory",
    "nesterov, K of the theory",
    "rising",
    "auto",
    "filter",
]


def table(answers: Any, *, flipped: bool) -> pd.DataFrame:
    """Momentum doubles averaging where doubling the inner rate costs more than 1.5; on the judging half, or not."""
    rows = []
    for task in ("rings", "linear", "digits", "deep"):
        for number in range(6):
            pays = (number >= 3) != (flipped and task in ("digits", "deep"))
            place = dict.fromkeys(answers.PLACE, 1) | {"task": task, "batch": number, "decided": number < 5}
            signals = dict.fromkeys(answers.SIGNALS, 0.5) | {"sigma": 0.1 * pays}
            for method in METHODS:
                gain = 2.0 if pays and method.startswith(("heavy", "nest", "usual, K")) else 1.0
                row = {"method": method, "doubled": 1.0 + 0.2 * number, "gain": gain, "tuned": 1 / gain}
                rows.append(place | signals | row | {"word": "better" if gain > 1 else "undecided"})
    return pd.DataFrame(rows)


@pytest.mark.parametrize("flipped", [False, True])
def test_answers(monkeypatch: pytest.MonkeyPatch, flipped: bool) -> None:
    """H1 fails where the judging half goes the other way; undecided workloads count in none."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delitem(sys.modules, "run", raising=False)
    answers = load(ROOT / "answers.py")
    monkeypatch.delitem(sys.modules, "run")
    found = answers.answers(table(answers, flipped=flipped))
    said = found["hypotheses"].set_index("hypothesis")
    assert said["holds"].to_dict() == {"H1": not flipped, "H2": True, "H3a": True, "H3b": True, "H4": True}
    assert said["share"]["H1"] == (0 if flipped else 1)
    assert said["of"].to_dict() == {"H1": 10, "H2": 10} | dict.fromkeys(("H3a", "H3b"), 10 if flipped else 8) | {
        "H4": 10 if flipped else 12
    }


def test_follow_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workloads are counted by name, one that is undecided against; the theory's K is that of the better rule."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delitem(sys.modules, "run", raising=False)
    answers = load(ROOT / "answers.py")
    monkeypatch.delitem(sys.modules, "run")
    of_first: Any = table(answers, flipped=False)
    gains = {"rings": (1.0, 1.0, 1.3), "linear": (1.2, 1.4, 1.3), "modular": (1.0, 1.0, 1.2)}
    replicas = [
        {"task": task, "method": "nesterov", "gain": gain, "decided": task != "modular"}
        | dict(zip(("replicas", "batch"), arm, strict=True))
        for task, of_task in gains.items()
        for arm, gain in zip(((2, 16), (2, 64), (8, 16)), of_task, strict=True)
    ]
    paying = of_first[(of_first["method"] == "heavy ball") & (of_first["gain"] > 1)][answers.PLACE]
    periods = [
        paying.assign(method=f"{rule}, K of the theory", sigma=0.3, gain=gain, tuned=1 / gain)
        for rule, gain in (("heavy ball", 1.9), ("nesterov", 1.5))
    ]
    found = answers.follow_up(of_first, pd.DataFrame(replicas), pd.concat(periods))["registration 3"]
    assert found["workloads"].tolist() == [2, 2, 1, 1, 8]
    assert found["hypothesis"].iloc[-1].endswith("of 8")
