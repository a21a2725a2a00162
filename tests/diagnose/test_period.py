"""`twophase period`: what the model cannot tell first, then the best restart beside the best setting without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twophase import theory
from twophase.cli.main import main
from twophase.diagnose.period import Question, Rule, answer, describe, to_json
from twophase.rule import OuterRule

NESTEROV = OuterRule(0.7, 0.9, nesterov=True)
TEN = "--sigma-range 0.05 0.95 10 --rounds 60".split()
Capture = pytest.CaptureFixture[str]


def said(capsys: Capture, *words: Any) -> str:
    """What the command prints; status 0, nothing on stderr."""
    assert main(["period", *map(str, words)]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    return done.out


def test_the_best_restart_stands_beside_the_best_setting_without(capsys: Capture) -> None:
    """Both have their rates, and a control that diverges is called so, without a number that looks like a rate."""
    lines = said(capsys, *TEN).splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith("best restart: --outer.restart 7 ")]
    sigma = np.linspace(0.05, 0.95, 10)
    restart, tuned = (line.split()[-2] for line in lines[place : place + 2])
    assert float(restart) == pytest.approx(float(np.min(theory.restart_rate(NESTEROV, sigma, 7))), abs=1e-4)
    assert float(tuned) == pytest.approx(list(theory.controls(NESTEROV, sigma, 7, 60).values())[-1], abs=1e-4)
    (gain,) = [line for line in lines if "the same mean gain" in line]
    assert "diverges" in gain
    assert "-0." not in gain


@pytest.mark.parametrize(
    ("words", "sigma"),
    [
        ("--sigma 0.9 0.5", [0.9, 0.5]),
        ("--sigma-range 0.3 0.95", np.linspace(0.3, 0.95, 33)),
        ("--sigma-range 0.3 0.95 5", np.linspace(0.3, 0.95, 5)),
        ("--sigma-range 0.4 0.4 2", [0.4, 0.4]),
    ],
)
def test_modes(words: str, sigma: Any, capsys: Capture) -> None:
    """The numbers are those of `advise`, from either option and from Python."""
    facts = json.loads(said(capsys, *words.split(), "--json"), parse_constant=pytest.fail)
    assert facts == json.loads(to_json(theory.advise(NESTEROV, sigma)))


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("", "--sigma"),
        ("--sigma 1.5", "--sigma"),
        ("--sigma 0", "--sigma"),
        ("--sigma 0.5 --sigma-range 0.1 0.5", "--sigma"),
        ("--sigma-range 0.5", "--sigma-range"),
        ("--sigma-range 0.5 0.1", "--sigma-range"),
        ("--sigma-range 0.1 0.9 1001", "--sigma-range"),
        ("--sigma 0.5 --outer.lr 0", "--outer.lr"),
        ("--sigma 0.5 --outer.momentum 1", "--outer.momentum"),
        ("--sigma 0.5 --rounds 0", "--rounds"),
        ("--sigma 0.5 --plot figure.svg", "--plot"),
    ],
)
def test_mistakes(words: str, option: str, capsys: Capture) -> None:
    """Each ends with status 2 and one line that begins with the option."""
    assert main(["period", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"twophase period: {option}")


EXTREMES = [
    Question(outer=Rule("nesterov", 2.0, 0.5, "ema"), sigma=(1.0,), rounds=20),  # gone after two rounds
    Question(outer=Rule("heavy-ball", 1.0, 0.5), sigma=(1.0, 0.3), rounds=3),
    Question(outer=Rule("nesterov", 1e29, 0.5), sigma=(1.0, 0.3), rounds=100),
    Question(outer=Rule("nesterov", 1.0, 0.9), sigma=(1e-12,), rounds=100),
    Question(outer=Rule("nesterov", 0.5, 0.0), sigma=(0.5,)),
]


@pytest.mark.parametrize("question", EXTREMES, ids=str)
def test_extreme_answers(question: Question, tmp_path: Path) -> None:
    """Infinite rates and losses are null in JSON; text and figure are made, and nothing warns on the way."""
    from twophase.figures.period import draw

    advice = answer(question)
    json.loads(to_json(advice), parse_constant=pytest.fail)
    assert "nan" not in describe(advice).split()
    draw(advice, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
