"""The shell of a report: everything from a file is text, and a browser can neither run nor load anything."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twophase.report.charts import MOST_POINTS, Chart, Curve, figure
from twophase.report.page import (
    LONGEST,
    clean,
    counted,
    download,
    link,
    minus,
    notes,
    page,
    table,
    tag,
    with_options,
)


@given(st.text())
def test_text_stays_text(text: str) -> None:
    """Whatever a text holds, an element of it has no other element and no attribute than its own."""
    made = tag("p", text, title=text)
    assert re.fullmatch(r'<p title="[^"<>]*">[^<>]*</p>', made)


def test_odd_characters() -> None:
    """Characters that cannot be seen or written, or turn the direction of text, are shown as such; long texts end."""
    assert clean("a\x00b\u202ec\ud800") == "a?b?c?".replace("?", "\N{REPLACEMENT CHARACTER}")
    assert clean("x" * (LONGEST + 7)).endswith("(7 more characters)")
    assert page("\ud800", "x").encode("utf-8")


def test_links_lead_nowhere_else() -> None:
    """No path can be read as an address of another kind, or leave its attribute."""
    assert link("x", "javascript:alert(1)") == '<a href="javascript%3Aalert%281%29">x</a>'
    assert link("x", 'runs/a"b/') == '<a href="runs/a%22b">x</a>'
    assert link("<b>", None) == "&lt;b&gt;"


def test_what_the_policy_allows() -> None:
    """It forbids every source, but for a watched page's one script by its hash, which no text of a file changes."""
    plain = page("t", "s", tag("p", "x"))
    watched = [page("t", "s", what="run", problems=[text], refresh=5) for text in ("<script>y</script>", "z")]
    for made in (plain, *watched):
        assert "default-src 'none'" in made.replace("&#x27;", "'")
        assert not re.search(r"\son\w+=|https?:|src=|http-equiv=.refresh|unsafe-eval|script-src[^;]*unsafe", made)
    assert "<script" not in plain
    assert "script-src" not in plain
    scripts = {tuple(re.findall(r"<script>(.*?)</script>", made, re.DOTALL)) for made in watched}
    ((script,),) = scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert re.findall(r"script-src ([^;\"]*)", watched[0].replace("&#x27;", "'")) == [f"'sha256-{digest}'"]


def test_elements() -> None:
    """A table names its columns and rows for screen readers and scrolls by keyboard; a download is in the page."""
    made = table(["a", "b", "c"], [["<x>", -1, "-1 to 2"], ["y", None, "z"]], caption="c")
    assert '<th scope="col">a</th>' in made
    assert '<th scope="row">&lt;x&gt;</th><td class="n">\N{MINUS SIGN}1</td><td>-1 to 2</td>' in made
    assert 'tabindex="0"' in made
    assert notes([]) is None
    assert with_options("try (--outer.lr 1.5), or --x.") == "try (<code>--outer.lr 1.5</code>), or <code>--x</code>."
    assert csv_of(download("csv", "a.csv", "x,y\n1,2\n")) == "x,y\n1,2\n"


def test_signs_and_counts_in_words() -> None:
    """Numbers have true minus signs and words keep their hyphens; one thing is not several."""
    assert minus("-0.5 1e-03 [-4, -.5]") == "-0.5 1e-03 [-4, -.5]".replace("-", "\N{MINUS SIGN}")
    assert minus("momentum-free K-3 a-1 2026-11-22") == "momentum-free K-3 a-1 2026-11-22"
    assert [counted(number, "round") for number in (0, 1, 2000)] == ["0 rounds", "1 round", "2,000 rounds"]


# -------------------------------------------------------------------------------------------------------------- charts


def csv_of(made: str) -> str:
    """Return the csv that an element carries."""
    return base64.b64decode(re.findall(r"base64,([A-Za-z0-9+/=]+)", made)[0]).decode()


def drawn(values: list[float], *, x: Any = None, **options: Any) -> str:
    made = figure(
        Chart("n", "Title <t>", "x", "y", [Curve("=one", range(len(values)) if x is None else x, values)], **options)
    )
    assert made is not None
    return made


def test_charts() -> None:
    """A chart has a title, a legend and words for screen readers, gaps at nan, and none without numbers."""
    made = drawn([1.0, float("nan"), 3.0, 4.0], restarts=[2], log=True)
    assert made.count('role="img"') == 1
    assert "Title &lt;t&gt;" in made
    assert "<t>" not in made
    assert "from 1 at 0 to 4 at 3" in made
    assert re.search(
        r'class="l k0" d="M0.0,([\d.]+)M[\d.,]+L[\d.,]+"/><path class="d k0" d="M0.0,\1h0"', made
    )  # a dot, a line
    assert csv_of(made).startswith("series,x,y\n'=one,0,1\n")  # no formula for a spreadsheet
    assert csv_of(made).endswith("restart,2,\n")
    assert re.search(r'<ul class="legend">.*=one</li>.*restart</li></ul>', made)
    assert figure(Chart("n", "t", "x", "y", [Curve("c", [1.0], [float("nan")])])) is None
    assert figure(Chart("n", "t", "x", "y", [])) is None


def test_long_curves_are_thinned() -> None:
    """Of a hundred thousand points about six hundred are drawn, the highest and lowest among them, and it is said."""
    values = [0.0] * 100_000
    values[77_777] = 5.0
    made = drawn(values, syncs=range(100_000))
    path = re.search(r'class="l k0" d="([^"]*)"', made)
    assert path is not None
    assert path[1].count("L") < MOST_POINTS
    heights = {float(place.split(",")[1]) for place in re.findall(r"[ML]([-\d.]+,[-\d.]+)", path[1])}
    assert len(heights) == 2
    assert csv_of(made).count("\n") == 1 + 5_000
    assert made.count(",1000v-25") <= 60
    for words in ("Of 100,000 points the extremes", "Only so many marks are drawn", "The csv has one point in 20"):
        assert words in made


def ticks_of(made: str, axis: str) -> list[str]:
    return re.findall(rf'<span class="{axis}"[^>]*>([^<]*)<', made)


@pytest.mark.parametrize("rounds", [[1], [1, 2], [1, 2, 3]])
def test_what_is_counted_has_whole_ticks(rounds: list[int]) -> None:
    """No axis of rounds or steps has a fraction, nor has one whose numbers are all whole."""
    made = drawn([2.0] * len(rounds), x=rounds)
    assert ticks_of(made, "x") == list(map(str, rounds if len(rounds) > 1 else range(3)))
    assert ticks_of(made, "y") == ["1", "2", "3"]


def test_the_axis_ends_with_the_bulk() -> None:
    """Few points far away do not flatten the others: they are cut off, counted and kept in the csv; else nothing is."""
    values = [1.0 + 0.1 * (x % 3) for x in range(40)]
    made = drawn([*values, 30.0, -70.0], bulk=True)
    assert "Beyond the axis: 2 of 42 points, as far as \N{MINUS SIGN}70; the csv has them." in made
    assert all(0.9 < float(tick) < 1.3 for tick in ticks_of(made, "y"))
    assert "one,41,-70" in csv_of(made)
    assert "Beyond the axis" not in drawn(values, bulk=True)
    assert "Beyond the axis" not in drawn([*[1.0] * 40, 2.5], bulk=True)  # a little further out is no reason


@settings(max_examples=25)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=20), st.booleans(), st.booleans())
def test_any_numbers_can_be_drawn(values: list[float], log: bool, bulk: bool) -> None:
    """No number, however large, small or absent, breaks a chart or makes a place that is none."""
    level = None if log else ("l", 0.0)
    made = figure(Chart("n", "t", "x", "y", [Curve("c", range(len(values)), values)], log=log, level=level, bulk=bulk))
    assert made is None or not re.search(r'[ ",]-?(nan|inf)', made.split("aria-label")[0])
