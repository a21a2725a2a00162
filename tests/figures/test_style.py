"""What every figure shares: looks that can be told apart, tables, and files that keep their colours."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from twophase.base.config import UsageError
from twophase.base.files import table_text
from twophase.figures.style import look, name_panels, new_figure, new_page, rendered, signed, styled
from twophase.figures.style import write_files as write


def test_looks_differ_in_colour_stroke_and_marker() -> None:
    """Eight curves differ in each of the three, so that grey paper and every kind of colour vision tell them apart."""
    looks = [look(k, every=5) for k in range(8)]
    for key in ("color", "linestyle", "marker"):
        assert len({str(each[key]) for each in looks}) >= (8 if key != "linestyle" else 7)
    assert "marker" not in look(0)
    assert look(8) == look(0)
    assert look(1, every=(3, 7))["markevery"] == (3, 7)


def test_table_text() -> None:
    """Columns in the order in which they appear, 12 digits, nothing where there is no number."""
    rows = [{"a": 1 / 3, "b": None}, {"b": float("nan"), "c": True}, {"a": np.int64(7), "c": "x, y"}]
    assert table_text(rows) == 'a,b,c\n0.333333333333,,\n,,true\n7,,"x, y"\n'


def test_signed() -> None:
    """Negative numbers bear a minus sign, not a hyphen."""
    assert signed(-3.96) == "\N{MINUS SIGN}4.0"
    assert signed(2.5, 0) == "2"


def test_pages_and_panels() -> None:
    """Figures are as wide as the page, and panels are lettered in their order."""
    pytest.importorskip("matplotlib")
    with styled():
        figure, axes = new_figure(3.0, 1, 2, sharey=True)
        name_panels(axes[0], ["one", "two"])
    assert tuple(figure.get_size_inches()) == (6.75, 3.0) == tuple(new_page(3.0).get_size_inches())
    assert [panel.get_title(loc="left") for panel in axes[0]] == [r"$\mathbf{(a)}$ one", r"$\mathbf{(b)}$ two"]


def test_last_digits_of_the_layout_do_not_reach_the_files() -> None:
    """Places that differ in their last digits, as the layout's solver leaves them, make the same bytes.

    Of a part of the figure as well: a number on its way into the PDF may be a tie in decimal writing.
    """
    pytest.importorskip("matplotlib")

    def picture(nudge: float) -> dict[str, bytes]:
        with styled():
            figure = new_page(4.0)
            for part in figure.subfigures(2, 1, squeeze=False)[:, 0]:
                part.subplots(1, 2)[0].set_title("one")
            lay_out = figure.draw_without_rendering

            def laid_out() -> None:
                lay_out()
                for part in figure.subfigs:
                    part.bbox_relative.set_points(part.bbox_relative.get_points() + nudge)
                for axes in figure.axes:
                    x, y, width, height = axes.get_position().bounds
                    axes.set_position((x + nudge, y + nudge, width, height))

            figure.draw_without_rendering = laid_out
            return rendered(figure)

    assert picture(0.0) == picture(1e-9)
    assert picture(0.0) != picture(1e-3)


def test_palette_keeps_the_curves_colours() -> None:
    """Reduced to 256 colours a picture keeps those of thin curves beside a large gradient, and shrinks."""
    pytest.importorskip("matplotlib")
    from PIL import Image

    def picture(palette: bool) -> dict[str, bytes]:
        with styled():
            figure, axes = new_figure(3.0, 1, 2)
            axes[0, 0].imshow(np.arange(10000).reshape(100, 100))
            for k in range(8):
                axes[0, 1].plot([0, 1], [k, k + 1], **look(k))
            return rendered(figure, palette=palette)

    full, small = picture(False), picture(True)
    assert full[".pdf"] == small[".pdf"]
    assert len(small[".png"]) < len(full[".png"])
    before, after = (np.asarray(Image.open(io.BytesIO(each[".png"])).convert("RGB"), int) for each in (full, small))
    assert np.abs(before - after).max(axis=2).mean() < 3
    for k in range(8):
        wanted = [int(look(k)["color"][i : i + 2], 16) for i in (1, 3, 5)]
        there = (before == wanted).all(axis=2)
        assert there.any()
        assert np.abs(after[there] - wanted).max() <= 16


def test_unwritable_folder(tmp_path: Path) -> None:
    """A figure that cannot be written says where."""
    with pytest.raises(UsageError, match="the figure cannot be written"):
        write(tmp_path / "missing" / "f", {".csv": "a\n"})
