"""Figures: what they show, how the scale is chosen, and that they come out the same every time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.figures import heatmaps as plot
from twophase.figures import overview
from twophase.figures.heatmaps import Heatmaps, Panel, Scale, scale_of
from twophase.figures.style import log_ticks
from twophase.sweeps.table import Row, State, settings

LABELS: dict[str, Any] = {
    "x_label": "outer lr",
    "y_label": "momentum",
    "colour_label": "perplexity",
    "title": "A figure",
}
PANEL = Panel(
    "one",
    [0.3, 0.7, 1.1],
    [0.1, 0.9],
    [
        [("finished", 8.0), ("finished", 10.0), ("finished", 10.1)],
        [("finished", 99.0), ("diverged", None), ("missing", None)],
    ],
)


def panel(*rows: Sequence[float | State]) -> Panel:
    """A panel with whole numbers on its axes, of numbers and of states without one."""
    cells: Any = [[(value, None) if isinstance(value, str) else ("finished", value) for value in row] for row in rows]
    return Panel("p", list(range(1, len(rows[0]) + 1)), list(range(1, len(rows) + 1)), cells)


@pytest.mark.slow
def test_the_files(tmp_path: Path) -> None:
    """A figure is a PNG of the promised size, a PDF, and a CSV with a line a cell."""
    pytest.importorskip("matplotlib")
    paths = Heatmaps([[PANEL, PANEL]], note="outlined: good", **LABELS).write(tmp_path / "a.b")
    assert [path.name for path in paths] == ["a.b.png", "a.b.pdf", "a.b.csv"]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths}
    png, pdf, table = (path.read_bytes() for path in paths)
    assert int.from_bytes(png[16:20]) == round(6.75 * 200)
    assert pdf.startswith(b"%PDF")
    lines = [
        "panel,outer lr,momentum,value,state,outlined",
        "one,0.3,0.1,8.0,finished,true",
        "one,0.7,0.1,10.0,finished,true",
        "one,1.1,0.1,10.1,finished,false",
        "one,0.3,0.9,99.0,finished,false",
        "one,0.7,0.9,,diverged,false",
        "one,1.1,0.9,,missing,false",
    ]
    assert table.decode().splitlines() == [*lines, *lines[1:]]


@pytest.mark.slow
def test_other_shapes() -> None:
    """Many cells, panels of different shapes, and figures without a single number are drawn without a warning."""
    pytest.importorskip("matplotlib")
    big = panel(*([8.0 + i + j for i in range(11)] for j in range(9)))
    for panels in ([[big, PANEL], [PANEL, panel([8.0], [9.0])]], [[panel(["diverged", "missing", "failed"])]]):
        with plot.styled():
            Heatmaps(panels, **LABELS).draw().draw_without_rendering()


def shown(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_cells_say_what_they_are() -> None:
    """Values, 'div.', 'missing' and 'failed' are written in the cells, and only diverged cells are hatched."""
    pytest.importorskip("matplotlib")
    cells = panel([7.671, 15.38], ["diverged", "failed"])
    figure, _ = plot._draw([[cells]], scale_of([7.671, 15.38]), "x", "y")
    assert shown(figure) == ["7.67", "15.4", "div.", "failed"]
    axes = figure.axes[0]
    assert [patch.get_hatch() is not None for patch in axes.patches] == [False, False, True, False]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2"]


@pytest.mark.parametrize(
    ("values", "title"),
    [
        ((8.0, 9.0, 30.0), "Best 8.00 at lr 0; 2 of 3 settings are within 25 % of it"),
        ((9.0, 8.0, "diverged"), "Best 8.00 at lr 1; 2 of 3 settings are within 25 % of it, 1 diverged"),
        (("missing", "missing", "missing"), "No setting has finished yet"),
    ],
)
def test_title_of_a_sweep_is_its_result(values: Sequence[Any], title: str) -> None:
    """The title names the best setting and counts what is near it, from the settings alone."""
    rows = []
    for lr, value in enumerate(values):
        state, number = (value, None) if isinstance(value, str) else ("finished", value)
        rows.append(Row("a", str(lr), {"outer.lr": lr}, cast("State", state), number))
    assert overview._finding(settings(rows)) == title


def test_losses_below_0_are_said() -> None:
    """A sweep of a task whose loss is not above 0 has no result, and says why and what to do."""
    rows = [Row("", str(lr), {"outer.lr": lr}, "finished", None, loss) for lr, loss in ((1, -3.0), (2, 0.0), (3, 0.5))]
    words = overview.describe(rows)
    assert "best 1 of 3 settings, 2 missing." in words
    assert "validation loss of 0 or below, and so without a result: 2;" in words
    assert words.endswith("the task's loss must be above 0: add a constant to it.")
    assert "validation loss of 0" not in overview.describe(rows[2:])


@pytest.mark.parametrize("path", ["a", "c"])
def test_dollar_signs_are_no_mathtext(path: str) -> None:
    """Dollar signs in an axis value, such as a pattern of parameters, are drawn literally."""
    pytest.importorskip("matplotlib")
    pattern = r"ends=bias$|\bad{$,b=."
    rows = [
        Row("", f"{a}{c}", {"a": a, "b": 1, "c": c}, "finished", 8.0)
        for a in ("1", pattern if path == "a" else "2")
        for c in ("1", pattern if path == "c" else "2")
    ]
    figure = overview.figure(rows, "sum form")
    assert figure is not None
    with plot.styled():
        figure.draw_without_rendering()
    texts = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]  # type: ignore[attr-defined]
    assert [text for text in texts if "bias" in text and "bias\\$" not in text] == []
    assert sum("bias" in text for text in texts) >= 1


def test_scale() -> None:
    """The scale starts at the best, bounds 25 % above it, and never has zero width."""
    assert scale_of([10.0, 8.0, 12.0]) == Scale(8.0, 12.0, 10.0)
    assert scale_of([8.0], within=0.5) == Scale(8.0, 8.4, 12.0)
    assert scale_of([]).low < scale_of([]).high


@given(st.floats(1e-3, 1e6), st.floats(1.05, 1e4))
def test_ticks_lie_inside_the_scale(low: float, ratio: float) -> None:
    """There are always a few ticks, increasing, inside the scale up to their rounding."""
    ticks = log_ticks(low, low * ratio)
    assert 2 <= len(ticks) <= 14
    assert ticks == sorted(set(ticks))
    assert ticks[0] >= low * 0.99
    assert ticks[-1] <= low * ratio * 1.01
