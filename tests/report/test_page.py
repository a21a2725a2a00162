"""The shell of a report: everything from a file is text, and a browser can neither run nor load anything."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.report.page import LONGEST, clean, counted, link, minus, notes, page, table, tag, with_options


@given(st.text())
@pytest.mark.slow
def test_text_stays_text(text: str) -> None:
    """Whatever a text holds, an element of it has no other element and no attribute than its own."""
    made = tag("p", text, title=text)
    assert re.fullmatch(r'<p title="[^"<>]*">[^<>]*</p>', made)


def test_odd_characters() -> None:
    """Characters that cannot be seen or written, or turn the direction of text, are shown as such; long texts end."""
    assert clean("a\x00b\u202ec\ud800") == "a?b?c?".replace("?", "\N{REPLACEMENT CHARACTER}")
    assert clean("x" * (LONGEST + 7)).endswith("(7 more characters)")
    assert page("\ud800", "x").encode("utf-8")


def test_links_are_escaped() -> None:
    """A path is never read as another scheme, and never ends its attribute."""
    assert link("x", "javascript:alert(1)") == '<a href="javascript%3Aalert%281%29">x</a>'
    assert link("x", 'runs/a"b/') == '<a href="runs/a%22b">x</a>'
    assert link("<b>", None) == "&lt;b&gt;"


def test_what_the_policy_allows() -> None:
    """It forbids every source but the page's own scripts, each by its hash, which no text of a file changes."""
    assert "script" not in page("t", "s", tag("p", "x")).partition("<style>")[0]
    texts = ("<script>y</script>", "z")
    watched = [page("t", "s", kind="run", problems=[text], refresh=5, scripts=["let a"]) for text in texts]
    for made in watched:
        assert "default-src 'none'" in made.replace("&#x27;", "'")
        assert not re.search(r"\son\w+=|https?:|src=|http-equiv=.refresh|unsafe-eval|script-src[^;]*unsafe", made)
    first, second = (re.findall(r"<script>(.*?)</script>", made, re.DOTALL) for made in watched)
    assert first == second
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in first]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert len(digests) == 2
    assert re.findall(r"script-src ([^;\"]*)", watched[0].replace("&#x27;", "'")) == [allowed]


def test_elements() -> None:
    """A table names its columns and rows for screen readers and scrolls by keyboard; a download is in the page."""
    made = table(["a", "b", "c"], [["<x>", -1, "-1 to 2"], ["y", None, "z"]], caption="c")
    assert '<th scope="col">a</th>' in made
    assert '<th scope="row">&lt;x&gt;</th><td class="n">\N{MINUS SIGN}1</td><td>-1 to 2</td>' in made
    assert 'tabindex="0"' in made
    assert notes([]) is None
    assert with_options("try (--outer.lr 1.5), or --x.") == "try (<code>--outer.lr 1.5</code>), or <code>--x</code>."


def test_signs_and_counts_in_words() -> None:
    """Numbers have true minus signs and words keep their hyphens; one thing is not several."""
    assert minus("-0.5 1e-03 [-4, -.5]") == "-0.5 1e-03 [-4, -.5]".replace("-", "\N{MINUS SIGN}")
    assert minus("momentum-free K-3 a-1 2026-11-22") == "momentum-free K-3 a-1 2026-11-22"
    assert [counted(number, "round") for number in (0, 1, 2000)] == ["0 rounds", "1 round", "2,000 rounds"]
