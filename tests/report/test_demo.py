"""The demo: its runs, its controls, its figures, and a verdict that says what the rows say."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from madeup import Value, rows
from twophase.config import update
from twophase.errors import UsageError
from twophase.figures import heatmaps, thresholds
from twophase.recipes.demo import demo
from twophase.report.demo import draw, findings, terminal_maps, verdict
from twophase.runs.config import InnerConfig
from twophase.sweeps.grid import Cell
from twophase.tasks.lm.config import TrainConfig

MAIN = ["heavy ball, never", "heavy ball, K=3", "Nesterov, never", "Nesterov, K=3"]
MATCHED = ["heavy ball, never, gain of K=3", "Nesterov, never, gain of K=3"]


def made_up(cell: Cell) -> float:
    """Heavy ball without restarts is bad at momentum 0.9; all else is 8, the momentum-free runs 8.5."""
    if cell.arm == "momentum-free":
        return 8.5 + abs(cell.values["outer.lr"] - 1.0)
    bad = cell.arm == "heavy ball, never" and cell.values["outer.momentum"] == 0.9
    return (10.0 + cell.config.seed) if bad else 8.0


def test_runs() -> None:
    """A main grid of 4 arms, 5 momenta x 3 learning rates; 4 momentum-free, 18 gain-matched, and `auto`."""
    sweep = demo()
    arms = Counter(cell.arm for cell in sweep.cells)
    assert arms == dict.fromkeys(MAIN, 15) | {"momentum-free": 4, "auto": 1} | dict.fromkeys(MATCHED, 9)
    assert len(sweep.runs) == 83
    assert sweep.base == TrainConfig(inner=InnerConfig(schedule="cosine"))
    assert {cell.config.outer.form for cell in sweep.cells} == {"sum"}
    for cell in sweep.cells:
        assert update(sweep.base, cell.values).plain() == cell.config
        assert cell.arm.startswith("Nesterov") == (cell.config.outer.method == "nesterov") or cell.arm == "auto"
        policy = {"auto": "auto"}.get(cell.arm, "never")
        assert cell.config.outer.restart == ("3" if cell.arm.endswith(", K=3") else policy)
    free = [cell.config.outer for cell in sweep.cells if cell.arm == "momentum-free"]
    assert [(outer.lr, outer.momentum) for outer in free] == [(lr, 0.0) for lr in (0.3, 0.7, 1.0, 1.1)]
    main = demo(controls=False)
    assert main.cells == sweep.cells[:60]
    values = [{cell.values[path] for cell in main.cells} for path in ("outer.lr", "outer.momentum")]
    assert (sorted(values[0]), sorted(values[1])) == ([0.3, 0.7, 1.1], [0.1, 0.3, 0.5, 0.7, 0.9])
    never, restarted = sweep.cells[:2]  # the pair that is shown round by round
    assert {**never.values, "outer.restart": "3"} == restarted.values
    assert (never.values["outer.momentum"], never.values["outer.lr"], never.arm) == (0.9, 0.7, "heavy ball, never")


def test_quick_form_is_small_and_short() -> None:
    """The quick form is 24 to 36 runs at half the steps, with every arm and control in it."""
    sweep = demo(quick=True)
    assert 24 <= len(sweep.runs) <= 36
    assert {(cell.config.steps, cell.config.inner.lr) for cell in sweep.cells} == {(480, 4e-3)}
    assert {cell.arm for cell in sweep.cells} == {*MAIN, "momentum-free", *MATCHED, "auto"}
    assert sweep.name != demo().name


def test_seeds_repeat_every_run_and_the_base_is_kept() -> None:
    """Each seed adds one full set of runs; what the grid does not vary comes from the base."""
    single, three = demo(), demo(seeds=(0, 1, 2))
    assert len(three.runs) == 3 * len(single.runs)
    assert set(single.runs) <= set(three.runs)
    assert Counter(cell.config.seed for cell in three.cells) == {0: 83, 1: 83, 2: 83}
    for seeds in ((), (0, 0)):
        with pytest.raises(UsageError, match="--axis seed"):
            demo(seeds=seeds)
    values = {"data.corpus": "file:x.txt", "model.layers": 3}
    cells = demo(base=update(TrainConfig(), values)).cells
    assert {(cell.config.data.corpus, cell.config.model.layers) for cell in cells} == {("file:x.txt", 3)}


def figure(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures empty: they take longer than all the rest, and nothing here reads them."""
    for module in (heatmaps, thresholds):
        monkeypatch.setattr(module, "rendered", lambda _: {".png": b"", ".pdf": b""})


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_figures_show_every_cell(tmp_path: Path) -> None:
    """`demo` shows the 60 cells of the main grid, `controls` each gain-matched run at its restarted cell's place."""
    sweep = demo()
    by_run = {cell.run_id: cell for cell in sweep.cells}

    def numbered(cell: Cell) -> float:
        of = by_run[cell.control_of] if cell.control_of else cell
        momentum, lr = (of.values[name] or 0.0 for name in ("outer.momentum", "outer.lr"))  # `auto` has neither
        return 8 + momentum + lr / 100 + (cell.control_of is not None) / 1000

    paths = draw(rows(sweep, numbered), sweep, tmp_path)
    assert [path.name for path in paths] == [
        f"{name}.{e}" for name in ("demo", "controls", "demo_thresholds") for e in ("png", "pdf", "csv")
    ]
    main, controls = figure(tmp_path / "demo.csv"), figure(tmp_path / "controls.csv")
    assert (len(main), len(controls)) == (60, 36)
    assert [line["panel"] for line in main[::15]] == [
        "Heavy ball, no restart",
        "Heavy ball, restart every 3 rounds",
        "Nesterov, no restart",
        "Nesterov, restart every 3 rounds",
    ]
    for line in [*main, *controls]:
        expected = 8 + float(line["outer momentum"]) + float(line["outer learning rate"]) / 100
        expected += ("mean gain" in line["panel"]) / 1000
        assert float(line["value"]) == pytest.approx(expected, rel=1e-12)
        assert line["state"] == "finished"


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_without_controls(tmp_path: Path) -> None:
    """A sweep without controls draws and judges without them."""
    sweep = demo(quick=True, controls=False)
    results = rows(sweep, made_up)
    names = [f"{name}.{end}" for name in ("demo", "demo_thresholds") for end in ("png", "pdf", "csv")]
    assert [path.name for path in draw(results, sweep, tmp_path)] == names
    assert "control" not in verdict(results, sweep).lower()


@pytest.mark.parametrize(
    ("never", "restarted", "shown", "answer"),
    [
        (9.6, 8.0, "1.200", "yes"),
        (9.5, 8.0, "1.188", "no"),
        ("diverged", 8.0, "never div.", "yes"),
        (9.6, "diverged", "K=3 div.", "no"),
        ("diverged", "diverged", "K=3 div.", "no"),
        (None, 8.0, "missing", "not known yet"),
        (9.6, None, "missing", "not known yet"),
    ],
)
def test_claim_is_computed(never: float | str | None, restarted: float | str | None, shown: str, answer: str) -> None:
    """One cell decides whether the claim holds, fails or is open when all others hold it; ratios are per seed."""
    sweep = demo(seeds=(3, 4))

    def value(cell: Cell) -> float | str | None:
        if (cell.values["outer.momentum"], cell.values["outer.lr"], cell.config.seed) != (0.9, 0.7, 4):
            return made_up(cell)
        return {"heavy ball, never": never, "heavy ball, K=3": restarted}.get(cell.arm, 8.0)

    *_, header, three, four, last = verdict(rows(sweep, value), sweep).splitlines()
    assert header.split() == ["seed", "lr", "0.3", "lr", "0.7", "lr", "1.1"]
    assert three.split() == ["3", "1.625", "1.625", "1.625"]
    assert four.split() == ["4", "1.750", *shown.split(), "1.750"]
    assert last == f"At least 1.2 at every learning rate and seed: {answer}."


def test_a_ratio_below_the_bound_outweighs_what_is_missing() -> None:
    """It answers the question even while other runs are missing."""
    sweep = demo()
    results = rows(sweep, lambda cell: None if cell.values["outer.lr"] == 0.3 else 8.0)
    assert verdict(results, sweep).endswith("every learning rate and seed: no.")


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_nothing_run_yet(tmp_path: Path) -> None:
    """Before any run has ended, figures and verdict say so instead of failing."""
    sweep = demo(quick=True)
    results = rows(sweep, lambda _: None)
    assert verdict(results, sweep)
    draw(results, sweep, tmp_path)
    assert {line["state"] for line in figure(tmp_path / "demo.csv")} == {"missing"}


def test_recipe_needs_no_torch() -> None:
    """Planning, judging and drawing the demo load no torch."""
    imports = "import sys, twophase.report.demo, twophase.recipes.demo as d; d.demo()"
    script = f"{imports}; assert not {{'torch', 'matplotlib', 'pandas'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


# ----------------------------------------------------------------------------------------------------------- the story


def lowered(by: float) -> Callable[[Cell], float]:
    """Multiply the perplexity of restarted runs; the others have 8, or 16 at momentum 0.9."""

    def value(cell: Cell) -> float:
        high = cell.values["outer.momentum"] == 0.9 and cell.arm in MAIN
        return (16.0 if high else 8.0) * (by if cell.arm.endswith(", K=3") else 1.0)

    return value


def diverging(arms: str) -> Callable[[Cell], float | str]:
    return lambda cell: "diverged" if cell.arm.endswith(arms) else 8.0


@pytest.mark.parametrize(
    ("options", "value"),
    [
        *(({}, value) for value in (lowered(0.6), lowered(1.5), lowered(1.0), made_up, lambda _: None)),
        *(({}, diverging(arms)) for arms in ("K=3", "never", "")),
        *((options, made_up) for options in ({"quick": True}, {"seeds": (0, 1)}, {"controls": False})),
    ],
)
def test_findings_hold_for_any_result(options: dict[str, Any], value: Value) -> None:
    """Three paragraphs, whichever side is better, diverged or missing; none with a number that is none."""
    sweep = demo(**options)
    paragraphs = findings(rows(sweep, value), sweep)
    assert [text.split()[0] for text in paragraphs][:2] == ["Compared:", "Changed:"]
    assert len(paragraphs) == 3
    assert not {"nan", "None", "inf"} & set(" ".join(paragraphs).replace(",", " ").replace(".", " ").split())


def test_terminal_maps_fill_in() -> None:
    """The map has a number for a finished cell, a dot for one to come, a word for a diverged one, in 40 columns."""
    sweep = demo()

    def value(cell: Cell) -> float | str | None:
        place = (cell.values["outer.momentum"], cell.values["outer.lr"])
        return {(0.9, 0.7): "diverged", (0.9, 1.1): 123.4}.get(place, 8.26 if place[0] == 0.1 else None)

    text = terminal_maps(rows(sweep, value))
    lines = text.plain.replace("\N{MIDDLE DOT}", ".").splitlines()
    assert max(map(len, lines[:-2])) == 40
    assert lines[2:5] == [
        "lr    0.3  0.7  1.1  lr    0.3  0.7  1.1",
        "0.9     . div.  123  0.9     . div.  123",
        "0.7     .    .    .  0.7     .    .    .",
    ]
    assert lines[7] == "0.1  8.26 8.26 8.26  0.1  8.26 8.26 8.26"
    grounds = {str(span.style) for span in text.spans if " on rgb(" in str(span.style)}
    assert len(grounds) == 2
