"""Heatmaps: what the panels hold, what the colours mean, and figures of every shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.cli.main import main
from twophase.errors import UsageError
from twophase.figures.heatmap import Panel, Scale, Tile, draw_panel, panels_of, scale_of, sweep_figure
from twophase.figures.style import new_figure, styled
from twophase.sweeps.table import Row, Setting, settings

GOOD, BAD, LOST, COMING = (
    Tile("finished", 7.671),
    Tile("finished", 15.38),
    Tile("diverged", None),
    Tile("missing", None),
)


def panel(*rows: Sequence[Tile | None]) -> Panel:
    return Panel("p", "x", "y", list(range(len(rows[0]))), list(range(len(rows))), rows)


def cells(**axes: Sequence[Any]) -> list[Row]:
    """A row for each combination of a method and further values, with different results."""
    points: list[dict[str, Any]] = [{}]
    for name, values in axes.items():
        points = [point | {name.replace("_", "."): value} for point in points for value in values]
    return [
        Row(point.pop("method"), str(number), point, "finished", 8.0 + number) for number, point in enumerate(points)
    ]


@pytest.mark.parametrize(
    ("axes", "shapes"),
    [
        ({"method": ["a"]}, [(1, 1)]),
        ({"method": ["a", "b"], "outer_lr": [0.3, 0.1, 0.2]}, [(3, 2)]),
        ({"method": ["a", "b"], "mu": [0.5, 0.9], "outer_lr": [0.3, 0.1, 0.2]}, [(3, 2), (3, 2)]),
        ({"method": ["a"], "mu": [0.5, 0.9], "outer_lr": [0.3, 0.1], "s": [5, 20], "seed": [0, 1]}, [(2, 2), (2, 2)]),
    ],
)
def test_panels_hold_every_setting_at_its_place(axes: dict[str, Any], shapes: list[tuple[int, int]]) -> None:
    """The learning rate goes across, sorted; each setting stands once, where its own values are those of the axes."""
    every = settings(cells(**axes))
    panels = panels_of(every)
    assert [(len(each.x), len(each.y)) for each in panels] == shapes
    shown = []
    for each in panels:
        assert list(each.x) == sorted(each.x, key=lambda value: value or 0)
        for y, row in zip(each.y, each.cells, strict=True):
            for x, cell in zip(each.x, row, strict=True):
                assert isinstance(cell, Setting)
                assert cell.values.get(each.x_label) == x
                assert (cell.arm if each.y_label == "method" else cell.values[each.y_label]) == y
                shown.append(cell.runs)
    assert sorted(shown) == sorted(cell.runs for cell in every)


def test_paired_controls_have_no_place() -> None:
    """A control that is linked to a run has a learning rate of its own, which is no place of the grid."""
    grid = cells(method=["a"], outer_lr=[0.3, 0.7])
    for control_of, expected in ((None, [0.123, 0.3, 0.7]), (grid[0].run, [0.3, 0.7])):
        control = Row("b", "c", {"outer.lr": 0.123}, "finished", 9.0, control_of=control_of)
        assert [each.x for each in panels_of(settings([*grid, control]))] == [expected]


def test_scale() -> None:
    """The scale starts at the best, bounds 25 % above it, and never has zero width."""
    assert scale_of([10.0, 8.0, 12.0]) == Scale(8.0, 12.0, 10.0)
    assert scale_of([8.0], within=0.5) == Scale(8.0, 8.4, 12.0)
    assert scale_of([]).low < scale_of([]).high


@given(st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=8, unique=True))
def test_lower_is_lighter(values: list[float]) -> None:
    """Of two values the lower one never has a darker colour, and ink has the contrast of WCAG AA on any."""
    scale = scale_of(values)

    def luminance(colour: Sequence[int]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (c / 255 for c in colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lights = [luminance(scale.colour(value)) for value in sorted(values)]
    assert all(a >= b - 1e-3 for a, b in pairwise(lights))
    for value, light in zip(sorted(values), lights, strict=True):
        ink = 1.0 if scale.ink(value) == "#ffffff" else 0.0
        assert (max(ink, light) + 0.05) / (min(ink, light) + 0.05) >= 4.5


@pytest.mark.slow
def test_cells_say_what_they_are() -> None:
    """A number, a word or a dash stands in each cell; only a diverged one is hatched; axes have their values."""
    pytest.importorskip("matplotlib")
    with styled():
        _, grid = new_figure(2.0)
        draw_panel(grid[0, 0], panel([GOOD, BAD], [LOST, None], [COMING, Tile("failed", None)]), scale_of([7.6, 15.4]))
    axes = grid[0, 0]
    assert [text.get_text() for text in axes.texts] == ["7.67", "15.4", "div.", "–", "·", "fail"]
    assert [patch.get_hatch() is not None for patch in axes.patches] == [False, False, True, False, False, False]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]


@pytest.mark.slow
def test_names_are_no_formulas() -> None:
    """Dollar signs in values, such as patterns of parameters, are drawn as they are; long names stand upright."""
    pytest.importorskip("matplotlib")
    pattern = r"ends=bias$|\bad{$,b=."
    with styled():
        figure = sweep_figure(cells(method=["a", pattern], mu=["1", pattern], outer_lr=[pattern, "2"]))
        figure.draw_without_rendering()
    texts = [text.get_text() for axes in figure.axes for text in [*axes.get_xticklabels(), *axes.get_yticklabels()]]
    assert pattern in texts


def test_without_matplotlib_a_sweep_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be drawn at the end is not begun; a plan needs no drawing."""
    monkeypatch.setattr("twophase.figures.style.find_spec", lambda _: None)
    words = ["sweep", "--task", "digits", "--steps", "2", "--axis", "outer.lr", "0.3", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "matplotlib" in line
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="matplotlib"), styled():
        pass
