"""Charts: what others wrote is unchanged, and a browser draws the data of a page, by pointer and by keyboard."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser import Watched, axe_violations
from twophase.report.page import page
from twophase.report.plot import Chart, Curve, figure, script

if TYPE_CHECKING:
    from playwright.sync_api import Browser

UPLOT = files("twophase.report").joinpath("uplot")


def test_the_library_is_unchanged() -> None:
    """Each of uPlot's files has the SHA-256 that the page beside them names."""
    sums = dict(
        re.findall(r"^\| `(\S+)` \| `([0-9a-f]{64})` \|$", UPLOT.joinpath("README.md").read_text(), re.MULTILINE)
    )
    assert sums == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in UPLOT.iterdir() if file.name != "README.md"
    }
    assert {"uPlot.iife.min.js", "uPlot.min.css", "LICENSE"} == set(sums)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_charts_in_a_browser(browser: Browser, tmp_path: Path, width: int, scheme: Any) -> None:
    """A chart is drawn, tells its values by arrow keys, hides a curve, follows the scheme, and breaks no WCAG rule."""
    rounds, nan = list(range(1, 9)), float("nan")
    charts = [
        Chart(
            "loss",
            "Loss </script>",
            "round",
            "loss",
            [Curve("<b>", rounds, [2.0, nan, *[2.5] * 6]), Curve("b", [4, 8], [1, 3])],
        ),
        Chart(
            "norm", "Norm", "round", "norm", [Curve("g", rounds, [10.0**-k for k in rounds])], log=True, restarts=[3]
        ),
        Chart(
            "dots", "Dots", "restart", "perplexity", [Curve("seed 0", [0, 1], [8, 9], dots=True)], names=["never", "3"]
        ),
    ]
    (tmp_path / "page.html").write_text(page("charts", "", *map(figure, charts), scripts=[script()]), encoding="utf-8")
    view: Any = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    watched = Watched(browser.new_page(**view, bypass_csp=True))
    shown = watched.page
    shown.goto((tmp_path / "page.html").as_uri())
    boxes = shown.locator("figure.plot > div")
    assert shown.locator("canvas").count() == 3
    for _ in range(4):
        boxes.first.press("ArrowRight")
    assert boxes.first.locator("[aria-live]").text_content() == "round 4: <b> 2.5; b 1"
    assert shown.locator("figure.plot").first.locator("output").all_text_contents() == ["2.5", "1"]
    boxes.last.press("End")
    assert boxes.last.locator("[aria-live]").text_content() == "3: seed 0 9"
    toggle = shown.get_by_role("button", name="<b>")
    before = shown.locator("canvas").first.screenshot()
    toggle.click()
    assert toggle.get_attribute("aria-pressed") == "false"
    hidden = shown.locator("canvas").first.screenshot()
    shown.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    shown.wait_for_timeout(100)
    assert len({before, hidden, shown.locator("canvas").first.screenshot()}) == 3
    numbers = shown.evaluate("decodeURIComponent(document.querySelector('a[download]').href)")
    assert "<b>,2,\n<b>,3,2.5\n" in numbers
    assert axe_violations(shown) == []
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert watched.troubles == []
    shown.close()
