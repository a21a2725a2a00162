"""The shell of a report: everything from a file is text, and a browser can neither run nor load anything."""

from __future__ import annotations

import base64
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from twophase.report.charts import MOST_POINTS, Chart, Curve, figure
from twophase.report.page import LONGEST, Html, clean, download, link, notes, page, table, tag, with_options


@given(st.text())
def test_text_stays_text(text: str) -> None:
    """Whatever a text holds, an element of it has no other element and no attribute than its own."""
    made = tag("p", text, title=text)
    assert made.startswith('<p title="')
    assert re.fullmatch(r'<p title="[^"<>]*">[^<>]*</p>', made)


def test_odd_characters() -> None:
    """Characters that cannot be seen or written, or turn the direction of text, are shown as such; long texts end."""
    assert (
        clean("a\x00b\u202ec\ud800")
        == "a\N{REPLACEMENT CHARACTER}b" + "\N{REPLACEMENT CHARACTER}c\N{REPLACEMENT CHARACTER}"
    )
    assert clean("x" * (LONGEST + 7)).endswith("(7 more characters)")
    assert page("\ud800", "x").encode("utf-8")


def test_links_lead_nowhere_else() -> None:
    """No path can be read as an address of another kind, or leave its attribute."""
    assert link("x", "javascript:alert(1)") == '<a href="javascript%3Aalert%281%29">x</a>'
    assert link("x", 'runs/a"b/') == '<a href="runs/a%22b">x</a>'
    assert link("<b>", None) == "&lt;b&gt;"


def test_the_page_allows_nothing() -> None:
    """The policy forbids every source; there is no script, no event handler and no address in a page."""
    made = page("t", "s", tag("p", "x"), refresh=5)
    assert "default-src 'none'" in made.replace("&#x27;", "'")
    assert not re.search(r"<script|\son\w+=|https?:|src=", made)
    assert '<meta http-equiv="refresh" content="5">' in made
    assert "refresh" not in page("t", "s")


def test_tables_and_lists() -> None:
    """A table names its columns and rows for screen readers, and can be scrolled by keyboard."""
    made = table(["a", "b"], [["<x>", 1]], caption="c", numbers=(1,))
    assert '<th scope="col">a</th>' in made
    assert '<th scope="row">&lt;x&gt;</th><td class="n">1</td>' in made
    assert 'tabindex="0"' in made
    assert notes([]) is None
    assert with_options("try (--outer.lr 1.5), or --x.") == "try (<code>--outer.lr 1.5</code>), or <code>--x</code>."


def test_download_holds_the_numbers() -> None:
    """A figure's csv is in the page itself."""
    made = download("csv", "a.csv", "x,y\n1,2\n")
    data = re.search(r"base64,([A-Za-z0-9+/=]+)", made)
    assert data is not None
    assert base64.b64decode(data[1]) == b"x,y\n1,2\n"


def test_charts() -> None:
    """A chart has a title and words for screen readers, two widths, gaps at nan, and none without numbers."""
    values = [1.0, float("nan"), 3.0, 4.0]
    made = figure(Chart("n", "Title <t>", "x", "y", [Curve("=one", range(4), values)], restarts=[2], log=True))
    assert made is not None
    assert made.count('role="img"') == 2
    assert "Title &lt;t&gt;" in made
    assert "<t>" not in made
    assert "from 1 at 0 to 4 at 3" in made
    assert len(re.findall(r'class="l k0" d="M[^M"]*M[^M"]*"', made)) == 2
    csv = base64.b64decode(re.findall(r"base64,([A-Za-z0-9+/=]+)", made)[0]).decode()
    assert csv.startswith("series,x,y\n'=one,0,1\n")  # no formula for a spreadsheet
    assert figure(Chart("n", "t", "x", "y", [Curve("c", [1.0], [float("nan")])])) is None
    assert figure(Chart("n", "t", "x", "y", [])) is None


def test_long_curves_are_thinned() -> None:
    """Of a hundred thousand points about six hundred are drawn, the highest and lowest among them, and it is said."""
    values = [0.0] * 100_000
    values[77_777] = 5.0
    made = figure(Chart("n", "t", "x", "y", [Curve("c", range(100_000), values)]))
    assert made is not None
    path = re.search(r'class="l k0" d="([^"]*)"', made)
    assert path is not None
    assert path[1].count("L") < MOST_POINTS
    assert "Of 100,000 points the extremes of each stretch are drawn" in made
    heights = {float(place.split(",")[1]) for place in re.findall(r"[ML]([-\d.]+,[-\d.]+)", path[1])}
    assert len(heights) == 2


@settings(max_examples=25)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=20), st.booleans())
def test_any_numbers_can_be_drawn(values: list[float], log: bool) -> None:
    """No number, however large, small or absent, breaks a chart or makes a place that is none."""
    made = figure(Chart("n", "t", "x", "y", [Curve("c", range(len(values)), values)], log=log, levels={"l": 0.0}))
    assert made is None or isinstance(made, Html)
    assert made is None or not re.search(r'[ ",]-?(nan|inf)', made.split("<desc")[0])
