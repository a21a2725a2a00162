"""A page: everything from a file is text, and a browser can neither run nor load anything of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pages import EVIL, read
from twophase.report.page import Link, href, number, render


def shown(text: object, **values: object) -> str:
    """Return a page that has a text in every place: `overlay.html`, for it has the most of them."""
    return render(
        "overlay.html",
        **{"title": text, "problems": [text], "names": [text], "charts": [], "settings": 1}
        | {"results": [[Link(str(text), "a"), text, Link(str(text), None)]], "differences": [[text, text]]}
        | values,
    )


@settings(max_examples=30)
@given(st.text())
def test_text_stays_text(text: str) -> None:
    """Whatever a text holds, the page has the elements and links that it has for another text."""
    page, other = read(shown(text)), read(shown("x"))
    assert (page.tags, page.links, page.ids) == (other.tags, other.links, other.ids)


def test_odd_texts() -> None:
    """Markup is shown; what cannot be seen, written or turns the direction is marked; long texts end; None is empty."""
    page = shown(EVIL)
    read(page)
    assert "&lt;script&gt;alert(1)" in page
    assert page.encode("utf-8")
    assert "a?b?c?" in shown("a\x00b\u202ec\ud800").replace("\N{REPLACEMENT CHARACTER}", "?")
    assert len(shown("x" * 100_000)) < len(shown("x")) + 60_000
    assert "<td></td>" in shown(None)


def test_a_page_that_loads_again() -> None:
    """It says so, and how often; another one does not."""
    assert '<meta http-equiv="refresh" content="5">' in shown("x", refresh=5)
    assert "refresh" not in shown("x").partition("<style>")[0]


@pytest.mark.parametrize(
    ("path", "address"),
    [("javascript:alert(1)", "javascript%3Aalert%281%29"), ('runs/a"b/', "runs/a%22b"), ("../up", "../up")],
)
def test_addresses_are_quoted(tmp_path: Path, path: str, address: str) -> None:
    """A path is never read as another scheme, and never ends its attribute."""
    assert href(tmp_path / path, tmp_path) == address


def test_numbers() -> None:
    """Numbers have true minus signs and their digits; what is no number is empty."""
    values = (-0.12345, 12_345, 2.0, 1e-7, math.nan, math.inf, None)
    assert [number(value) for value in values] == [
        "\N{MINUS SIGN}0.1235",
        "12,345",
        "2",
        "1e\N{MINUS SIGN}07",
        "",
        "",
        "",
    ]
