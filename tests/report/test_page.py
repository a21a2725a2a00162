"""A page: everything from a file is text, and a browser can neither run nor load anything of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pages import EVIL, read
from twophase.report.page import Link, href, number, render


def shown(text: Any, **values: Any) -> str:
    """Return a page that has a text in every place: `overlay.html`, for it has the most of them."""
    results = [[Link(str(text), "a"), text, Link(str(text), None)]]
    values |= {"title": text, "problems": [text], "names": [text], "charts": [], "settings": 1}
    return render("overlay.html", results=results, differences=[[text, text]], **values)


@settings(max_examples=15)
@given(st.text())
def test_text_stays_text(text: str) -> None:
    """Whatever a text holds, the page has the elements and links that it has for another text."""
    page, other = read(shown(text)), read(shown("x"))
    assert (page.tags, page.links, page.ids) == (other.tags, other.links, other.ids)


def test_odd_values() -> None:
    """Markup is shown; what cannot be seen, written or turns the direction is marked; long texts end; None is empty."""
    page = shown(EVIL)
    read(page)
    assert "&lt;script&gt;alert(1)" in page
    assert page.encode("utf-8")
    assert "a?b?c?" in shown("a\x00b\u202ec\ud800").replace("\N{REPLACEMENT CHARACTER}", "?")
    assert len(shown("x" * 100_000)) < len(shown("x")) + 60_000
    assert "<td></td>" in shown(None)
    assert ['data-refresh="' in shown("x", refresh=seconds) for seconds in (0, 5)] == [False, True]


@pytest.mark.parametrize(
    ("path", "address"),
    [("javascript:alert(1)", "javascript%3Aalert%281%29"), ('runs/a"b/', "runs/a%22b"), ("../up", "../up")],
)
def test_addresses_are_quoted(tmp_path: Path, path: str, address: str) -> None:
    """A path is never read as another scheme, and never ends its attribute."""
    assert href(tmp_path / path, tmp_path) == address


def test_numbers() -> None:
    """Numbers have four digits, whole ones all, and true minus signs; what is no number is empty."""
    texts = {-0.12345: "-0.1235", 12_345: "12,345", 2.0: "2", 1e-7: "1e-07", math.nan: "", math.inf: ""}
    assert [number(value).replace("\N{MINUS SIGN}", "-") for value in texts] == list(texts.values())
    assert "-" not in number(-1e-7)
