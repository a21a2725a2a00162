"""All figures of the package are of one style: read off the source, and off what is drawn."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import twophase
from twophase.figures import style as figure
from twophase.figures.style import look, new_figure, rendered, styled

ROOT = Path(twophase.__file__).parent
SOURCES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
HOME = "figures/style.py"
DRAWS = re.compile(
    r"\b(new_figure|new_page|rendered|look)\(|\b(axes|panel)\.(plot|barh?|text|axhline|errorbar|vlines)\("
)
DRAWING = sorted(name for name, text in SOURCES.items() if name != HOME and DRAWS.search(text))
NAMED = {"black", "white", "none", "inherit"}


def texts(source: str) -> Iterator[str]:
    """Every text constant of a module that is no docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_where_figures_are_drawn() -> None:
    """Only the style's own module makes a figure or writes one; nobody uses pyplot, styles of their own or LaTeX."""
    assert {"figures/heatmaps.py", "figures/period.py", "studies/restart_mechanism.py"} <= set(DRAWING)
    for name, text in SOURCES.items():
        assert not re.search(r"pyplot|\.style\.use|usetex", text), name
        if name != HOME:
            assert not re.search(r"\.savefig\(|rcParams|[^\w.]Figure\(", text), name


def test_colours_are_the_palettes() -> None:
    """A colour in a drawing module is one of the palette that all eyes tell apart, or a grey."""
    palette = {look(number)["color"] for number in range(8)}
    for name in (*DRAWING, HOME):
        for text in texts(SOURCES[name]):
            if re.fullmatch(r"#[0-9a-fA-F]{6}", text):
                grey = text[1:3] == text[3:5] == text[5:7]
                assert grey or text.lower() in palette, f"{name}: {text}"
    for name in DRAWING:
        for word in re.findall(r"\bcolor=\"([a-z]+)\"", SOURCES[name]):
            assert word in NAMED, f"{name}: {word}"


def test_every_figure_has_its_csv() -> None:
    """Whoever renders a figure writes the table of what it shows beside it."""
    for name, text in SOURCES.items():
        if name != HOME and re.search(r"\brendered\(", text):
            assert '".csv"' in text, name


def test_fonts_are_embedded_as_text() -> None:
    """A PDF holds its fonts as TrueType (type 42), which stays text; none is left to the reader's machine."""
    pytest.importorskip("matplotlib")
    with styled():
        page, axes = new_figure(2.0)
        axes[0, 0].plot([0, 1], [0, -1], **look(1, every=1), label="σ = −0.5")
        axes[0, 0].legend()
        axes[0, 0].set_title(r"$\mathbf{(a)}$ title")
        pdf = rendered(page)[".pdf"]
    assert b"/CIDFontType2" in pdf
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf


def test_the_users_own_style_does_not_show() -> None:
    """Whatever matplotlib is told elsewhere, figures come out the same, byte for byte."""
    mpl = pytest.importorskip("matplotlib")

    def picture() -> bytes:
        with styled():
            page, axes = new_figure(2.0)
            axes[0, 0].plot([0, 1], [0, 1], **look(0))
            return rendered(page)[".png"]

    plain = picture()
    with mpl.rc_context({"font.size": 20, "text.usetex": True, "axes.facecolor": "red", "pdf.fonttype": 3}):
        assert picture() == plain


def test_readable_in_grey() -> None:
    """Neighbouring looks differ in stroke, and the heatmaps' colours differ by lightness alone in one direction."""
    strokes = [str(look(number)["linestyle"]) for number in range(8)]
    markers = [look(number, every=1)["marker"] for number in range(8)]
    assert all(one != other for one, other in itertools.pairwise(strokes))
    assert len(set(markers)) == 8
    pytest.importorskip("matplotlib")
    from twophase.figures.heatmaps import Scale, colours_of

    colours = colours_of(Scale(1.0, 3.0, 1.25)).to_rgba(np.geomspace(1, 3, 64))[:, :3]  # type: ignore[index]
    luminance = colours @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(luminance) < 0).all()
    assert figure._STYLE["pdf.fonttype"] == 42
