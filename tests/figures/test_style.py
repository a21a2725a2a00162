"""What every figure shares: looks that differ, one style (read off the source), and files that stay the same."""

from __future__ import annotations

import ast
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import twophase
from twophase.base.config import UsageError
from twophase.base.files import table_text
from twophase.figures.style import (
    headline,
    in_words,
    look,
    name_panels,
    new_figure,
    new_page,
    rendered,
    signed,
    styled,
    write_files,
)

ROOT = Path(twophase.__file__).parent
SOURCES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
HOME = "figures/style.py"
DRAWS = re.compile(
    r"\b(new_figure|new_page|rendered|look)\(|\b(axes|panel)\.(plot|barh?|text|axhline|errorbar|vlines)\("
)
DRAWING = sorted(name for name, text in SOURCES.items() if name != HOME and DRAWS.search(text))


def test_looks_differ_in_colour_stroke_and_marker() -> None:
    """Eight curves differ in each of the three, so that grey paper and every kind of colour vision tell them apart."""
    looks = [look(k, every=5) for k in range(8)]
    for key in ("color", "linestyle", "marker"):
        assert len({str(each[key]) for each in looks}) >= (8 if key != "linestyle" else 7)
    assert all(str(a["linestyle"]) != str(b["linestyle"]) for a, b in itertools.pairwise(looks))
    assert "marker" not in look(0)
    assert look(8) == look(0)
    assert look(1, every=(3, 7))["markevery"] == (3, 7)


def test_texts() -> None:
    """Tables have 12 digits and nothing without a number; negative numbers bear a minus sign, not a hyphen."""
    rows = [{"a": 1 / 3, "b": None}, {"b": float("nan"), "c": True}, {"a": np.int64(7), "c": "x, y"}]
    assert table_text(rows) == 'a,b,c\n0.333333333333,,\n,,true\n7,,"x, y"\n'
    assert (signed(-3.96), signed(2.5, 0)) == ("\N{MINUS SIGN}4.0", "2")


# ------------------------------------------------------------------------------------------------- read off the source


def texts(source: str) -> Iterator[str]:
    """Yield every text constant of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_one_module_makes_figures() -> None:
    """Only the style's own module makes a figure or writes one; none uses pyplot, other styles or LaTeX; csv beside."""
    assert {"figures/heatmaps.py", "figures/period.py", "studies/restart_mechanism.py"} <= set(DRAWING)
    for name, text in SOURCES.items():
        assert not re.search(r"pyplot|\.style\.use|usetex", text), name
        if name != HOME:
            assert not re.search(r"\.savefig\(|rcParams|[^\w.]Figure\(", text), name
            assert '".csv"' in text or not re.search(r"\brendered\(", text), name


def test_every_figure_has_a_headline() -> None:
    """A module that makes a page gives it the title that states what its numbers say."""
    for name in DRAWING:
        if re.search(r"\bnew_(figure|page)\(", SOURCES[name]):
            assert "headline(" in SOURCES[name], name


def test_colours_are_the_palettes() -> None:
    """A colour in a drawing module is of the palette that all eyes tell apart, or a grey."""
    palette = {look(number)["color"] for number in range(8)}
    for name in (name for name in (*DRAWING, HOME) if re.search("#[0-9a-fA-F]{6}", SOURCES[name])):
        for text in texts(SOURCES[name]):
            if re.fullmatch(r"#[0-9a-fA-F]{6}", text):
                assert text[1:3] == text[3:5] == text[5:7] or text.lower() in palette, f"{name}: {text}"
    words = {word for name in DRAWING for word in re.findall(r"\bcolor=\"([a-z]+)\"", SOURCES[name])}
    assert words <= {"black", "white", "none", "inherit"}


# ------------------------------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize(
    ("pairs", "word"),
    [([(1, 2), (3, 3)], "more"), ([(2, 1)], "fewer"), ([(1, 2), (2, 1)], "both"), ([(1, 1)], "same"), ([], "same")],
)
def test_words_follow_the_numbers(pairs: list[tuple[int, int]], word: str) -> None:
    """What a title says of pairs of numbers depends on nothing but which of them is larger."""
    assert in_words(pairs, more="more", fewer="fewer", both="both", same="same") == word


@pytest.mark.parametrize("count", [1, 12, 40])
def test_headline_stays_on_the_page(count: int) -> None:
    """Title and reading of any length lie inside the page, one below the other and above the panels."""
    pytest.importorskip("matplotlib")
    with styled():
        figure, axes = new_figure(4.0)
        headline(figure, "restart widens " * count, "lower is better " * count)
        figure.draw_without_rendering()
        words: Any = figure.artists[0]
        page, title, panel = figure.bbox, words.xycoords.get_window_extent(), axes[0][0].get_tightbbox()
        reading = words.get_window_extent()
    assert page.x0 <= min(title.x0, reading.x0) < max(title.x1, reading.x1) <= page.x1
    assert panel.y1 <= title.y0 + 1
    assert reading.y0 >= title.y0 - 1


def picture(draw: Any = lambda panels: panels[0].plot([0, 1], [0, -1], **look(1, every=1)), **options: Any) -> Any:
    """Return the files of a figure with two panels, on which something is drawn."""
    pytest.importorskip("matplotlib")
    with styled():
        figure, axes = new_figure(3.0, 1, 2)
        draw(axes[0])
        return rendered(figure, **options)


@pytest.mark.slow
def test_pages_and_panels() -> None:
    """Figures are as wide as the page, panels are lettered in order, and fonts are embedded as text (TrueType)."""
    pytest.importorskip("matplotlib")
    with styled():
        figure, axes = new_figure(3.0, 1, 2, sharey=True)
        name_panels(axes[0], ["one", "two"])
        pdf = rendered(figure, [".pdf"])[".pdf"]
    assert tuple(figure.get_size_inches()) == (6.75, 3.0) == tuple(new_page(3.0).get_size_inches())
    assert [panel.get_title(loc="left") for panel in axes[0]] == [r"$\mathbf{(a)}$ one", r"$\mathbf{(b)}$ two"]
    assert b"/CIDFontType2" in pdf
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf


@pytest.mark.slow
def test_the_users_own_style_does_not_show() -> None:
    """Whatever matplotlib is set to elsewhere, figures come out the same, byte for byte."""
    mpl = pytest.importorskip("matplotlib")
    plain = picture()
    with mpl.rc_context({"font.size": 20, "text.usetex": True, "axes.facecolor": "red", "pdf.fonttype": 3}):
        assert picture() == plain


@pytest.mark.slow
def test_last_digits_of_the_layout_do_not_reach_the_files() -> None:
    """Places that differ in their last digits, as the layout's solver leaves them, make the same bytes.

    Of a part of the figure as well: a number on its way into the PDF may be a tie in decimal writing.
    """
    pytest.importorskip("matplotlib")

    def nudged(nudge: float) -> dict[str, bytes]:
        with styled():
            figure = new_page(4.0)
            for part in figure.subfigures(2, 1, squeeze=False)[:, 0]:
                part.subplots().set_title("one")
            engine: Any = figure.get_layout_engine()
            lay_out = engine.execute

            def laid_out(figure: Any) -> None:
                lay_out(figure)
                for part in figure.subfigs:
                    part.bbox_relative.set_points(part.bbox_relative.get_points() + nudge)
                for axes in figure.axes:
                    x, y, width, height = axes.get_position().bounds
                    axes.set_position((x + nudge, y + nudge, width, height))

            engine.execute = laid_out
            return rendered(figure)

    plain = nudged(0.0)
    assert plain == nudged(1e-9)
    assert plain != nudged(1e-3)


@pytest.mark.slow
def test_palette_keeps_the_curves_colours() -> None:
    """Reduced to 256 colours a picture keeps those of thin curves beside a large gradient, and shrinks."""

    def draw(panels: Any) -> None:
        panels[0].imshow(np.arange(10000).reshape(100, 100))
        for k in range(8):
            panels[1].plot([0, 1], [k, k + 1], **look(k))

    full, small = picture(draw), picture(draw, palette=True)
    assert full[".pdf"] == small[".pdf"]
    assert len(small[".png"]) < len(full[".png"])
    image = pytest.importorskip("PIL.Image")
    before, after = (np.asarray(image.open(io.BytesIO(each[".png"])).convert("RGB"), int) for each in (full, small))
    assert np.abs(before - after).max(axis=2).mean() < 3
    for k in range(8):
        colour = [int(look(k)["color"][i : i + 2], 16) for i in (1, 3, 5)]
        places = (before == colour).all(axis=2)
        assert places.any()
        assert np.abs(after[places] - colour).max() <= 16


@pytest.mark.slow
def test_palette_keeps_pale_tiles() -> None:
    """Reduced to 256 colours the pale tiles of a heatmap keep theirs, beside a large gradient and under text."""
    tiles = 0.9 + np.arange(48).reshape(4, 4, 3) / 480

    def draw(panels: Any) -> None:
        panels[0].imshow(np.arange(10000).reshape(100, 100), cmap="plasma")
        panels[1].imshow(tiles)
        for i in range(16):
            panels[1].text(i % 4, i // 4, "+1.5", ha="center", fontsize=5, color=look(i % 8)["color"])

    image = pytest.importorskip("PIL.Image")
    pictures = (picture(draw, palette=palette, endings=(".png",))[".png"] for palette in (False, True))
    before, after = (np.asarray(image.open(io.BytesIO(png)).convert("RGB"), int) for png in pictures)
    for colour in (255 * tiles).reshape(-1, 3):
        places = (np.abs(before - colour) <= 1).all(axis=2)
        assert places.any()
        assert np.abs(before - after)[places].max() <= 3


def test_unwritable_folder(tmp_path: Path) -> None:
    """A figure that cannot be written says where."""
    with pytest.raises(UsageError, match="the figure cannot be written"):
        write_files(tmp_path / "missing" / "f", {".csv": "a\n"})
