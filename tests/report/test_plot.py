"""Charts: what others wrote is unchanged, and a browser draws the data of a page, by pointer and by keyboard."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import Watched, axe_violations
from twophase.report.page import page
from twophase.report.plot import MOST_POINTS, Chart, Curve, figure, script

if TYPE_CHECKING:
    from playwright.sync_api import Page

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


def data_of(made: str | None) -> dict[str, Any]:
    """Return the data that a chart carries."""
    return json.loads(re.findall(r'<script type="application/json">(.*?)</script>', made or "")[0])


def drawn(values: list[float], *, x: Any = None, **options: Any) -> str:
    curve = Curve("=</script>", range(len(values)) if x is None else x, values)
    made = figure(Chart("n", "Title <t>", "x", "y", [curve], **options))
    assert made is not None
    return made


def opened(watched: Watched, folder: Path, *charts: Chart, width: int = 1280, scheme: str = "light") -> Page:
    """Show a page of charts."""
    (folder / "page.html").write_text(page("charts", "", *map(figure, charts), scripts=[script()]), encoding="utf-8")
    return watched.show(folder / "page.html", width, scheme)


@pytest.mark.parametrize("boom", [[1e150], [1e150] * 2 * MOST_POINTS, []])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_curve_without_a_number_has_its_place(boom: list[float], index: int) -> None:
    """The buttons of a page choose curves by their places, those of runs that exploded among them."""
    names = ["a", "c"]
    names.insert(index, "boom")
    curves = [Curve(name, *((range(len(boom)), boom) if name == "boom" else ([0, 1], [1.0, 2.0]))) for name in names]
    made = figure(Chart("n", "t", "x", "y", curves, shown=[2]))
    data = data_of(made)
    assert ([series["name"] for series in data["series"]], data["shown"]) == (names, [2])
    assert "x" in data["series"][0]
    assert (f"{names[2]}: from 1" in (made or "")) == (index < 2)
    assert [series["name"] for series in data_of(figure(Chart("n", "t", "x", "y", curves)))["series"]] == ["a", "c"]


def test_charts() -> None:
    """A chart has a title, words for screen readers, a table and gaps at nan; text is text; no numbers, no chart."""
    nan = float("nan")
    made = drawn([1.0, nan, 3.0, 4.0], restarts=[2], syncs=[1], level=("l", 2.0))
    assert made.count("</script>") == 1
    assert "Title &lt;t&gt;" in made
    assert "from 1 at 0 to 4 at 3" in made
    assert "Marked: 1 restart." in made
    assert '<td class="n">3</td>' in made
    data = data_of(made)
    assert data["series"] == [{"name": "=</script>", "x": [0, 1, 2, 3], "y": [1, None, 3, 4]}]
    assert (data["restarts"], data["syncs"], data["level"]) == ([2], [1], ["l", 2.0])
    assert data_of(drawn([1.0, 0.0, -1.0], log=True))["series"][0]["y"] == [1, None, None]
    two = data_of(figure(Chart("n", "t", "x", "y", [Curve(name, [1, 2], [3, 4]) for name in "ab"])))["series"]
    assert [sorted(curve) for curve in two] == [["name", "x", "y"], ["name", "y"]]  # the places of the curve before
    assert figure(Chart("n", "t", "x", "y", [Curve("c", [1.0], [nan])])) is None
    assert figure(Chart("n", "t", "x", "y", [])) is None


def test_long_curves_are_thinned() -> None:
    """Of a hundred thousand points about six hundred are drawn, the highest and lowest among them, and it is said."""
    values = [0.0] * 100_000
    values[77_777] = 5.0
    made = drawn(values, syncs=range(100_000))
    (curve,) = data_of(made)["series"]
    assert len(curve["x"]) <= MOST_POINTS
    assert curve["y"][curve["x"].index(77_777)] == 5
    assert len(data_of(made)["syncs"]) <= MOST_POINTS
    assert "Of 100,000 points the extremes" in made


def test_a_thinned_curve_keeps_its_gaps() -> None:
    """Missing values as wide as a stretch interrupt a long curve; single ones within a stretch do not."""
    nan = float("nan")
    values = [nan if 40_000 <= x < 50_000 or x % 50 == 7 else 1.0 + x % 3 for x in range(100_000)]
    (curve,) = data_of(drawn(values))["series"]
    assert len(curve["x"]) <= MOST_POINTS
    gap = [x for x, y in zip(curve["x"], curve["y"], strict=True) if y is None]
    assert 28 <= len(gap) <= 31
    assert (min(gap) >= 40_000, max(gap) < 50_000) == (True, True)


def test_the_axis_ends_with_the_bulk() -> None:
    """Few points far away do not flatten the others: the axis ends before them and they are counted; else not."""
    values = [1.0 + 0.1 * (x % 3) for x in range(40)]
    made = drawn([*values, 30.0, -70.0], bulk=True)
    assert "Beyond the axis: 2 of 42 points, as far as \N{MINUS SIGN}70." in made
    assert data_of(made)["bulk"] == [1, 1.2]
    assert "Beyond the axis" not in drawn(values, bulk=True)
    assert "Beyond the axis" not in drawn([*[1.0] * 40, 2.5], bulk=True)  # a little further out is no reason


@settings(max_examples=25)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=20), st.booleans(), st.booleans())
def test_any_numbers_can_be_drawn(values: list[float], log: bool, bulk: bool) -> None:
    """No number, however large, small or absent, breaks a chart or makes JSON that a browser refuses."""
    level = None if log else ("l", 0.0)
    made = figure(Chart("n", "t", "x", "y", [Curve("c", range(len(values)), values)], log=log, level=level, bulk=bulk))
    assert made is None or not re.search(r"NaN|Infinity", made.split("</script>")[0])


@pytest.mark.browser
def test_numbers_of_a_chart_keep_their_digits(watched: Watched, tmp_path: Path) -> None:
    """Four figures of any value, all of a step's: neither ticks a thousandth apart nor steps become one text."""
    chart = Chart("n", "t", "step", "y", [Curve("c", [1_234_566, 1_234_567], [0.0015, 0.012345])])
    view = opened(watched, tmp_path, chart)
    texts = {0.0015: "0.0015", 0.012345: "0.01235", 12345: "12,345", -2.34567: "−2.346", 2e7: "2e7", 1.23e-5: "1.23e−5"}
    assert view.evaluate("values => values.map(plots.text)", list(texts)) == list(texts.values())
    box = view.locator("figure.plot > div")
    box.press("End")
    assert box.locator("[aria-live]").text_content() == "step 1,234,567: c 0.01235"


@pytest.mark.browser
def test_the_legend_says_of_which_marks_some_are_drawn(watched: Watched, tmp_path: Path) -> None:
    """Of more restarts or syncs than a chart has room for some are drawn, and a reader can see that by the legend."""
    chart = Chart("n", "t", "round", "y", [Curve("c", range(101), range(101))], restarts=range(61), syncs=range(60))
    view = opened(watched, tmp_path, chart)
    marks = view.locator(".legend li:not(.place):not(:has(button))").all_text_contents()
    assert marks == ["sync (outer step)", "restart, some of them"]


@pytest.mark.browser
def test_keys_move_over_what_is_in_view(watched: Watched, tmp_path: Path) -> None:
    """In a part of a chart that the reader has drawn out, keys read that part: from its first place to its last."""
    view = opened(watched, tmp_path, Chart("n", "t", "round", "y", [Curve("c", range(101), range(101))]))
    area, box = view.locator(".u-over").bounding_box(), view.locator("figure.plot > div")
    assert area is not None
    x, y = area["x"], area["y"] + 50
    view.mouse.move(x + 0.402 * area["width"], y)
    view.mouse.down()
    view.mouse.move(x + 0.598 * area["width"], y, steps=4)
    view.mouse.up()
    keys = {"Home": 41, "ArrowRight": 42, "End": 59, "Escape": None, "ArrowRight ": 41, "End ": 59}
    for key, index in keys.items():
        box.press(key.strip())
        if index:
            assert box.locator("[aria-live]").text_content() == f"round {index}: c {index}"
    for key in ("Alt+ArrowLeft", "Control+Home", "Meta+ArrowRight"):  # the browser's own
        box.press(key)
        assert box.locator("[aria-live]").text_content() == "round 59: c 59"


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_charts_in_a_browser(watched: Watched, tmp_path: Path, width: int, scheme: str) -> None:
    """A chart is drawn, tells its values by arrow keys, hides a curve, follows the scheme, and breaks no WCAG rule."""
    rounds, nan = list(range(1, 9)), float("nan")
    losses = [Curve("<b>", rounds, [2.0, nan, *[2.5] * 6]), Curve("b", [4, 8], [1, 3])]
    norms, dots = [Curve("g", rounds, [10.0**-k for k in rounds])], [Curve("seed 0", [0, 1], [8, 9], dots=True)]
    charts = [
        Chart("loss", "Loss </script>", "round", "loss", losses),
        Chart("norm", "Norm", "round", "norm", norms, log=True, restarts=[3]),
        Chart("dots", "Dots", "restart", "perplexity", dots, names=["never", "3"]),
    ]
    view = opened(watched, tmp_path, *charts, width=width, scheme=scheme)
    boxes = view.locator("figure.plot > div")
    assert view.locator("canvas").count() == 3
    for _ in range(4):
        boxes.first.press("ArrowRight")
    assert boxes.first.locator("[aria-live]").text_content() == "round 4: <b> 2.5; b 1"
    assert view.locator("figure.plot").first.locator("output").all_text_contents() == ["2.5", "1"]
    boxes.last.press("End")
    assert boxes.last.locator("[aria-live]").text_content() == "3: seed 0 9"
    boxes.first.hover()
    assert all(view.locator("figure.plot").first.locator("output").all_text_contents())
    toggle = view.get_by_role("button", name="<b>")
    before = view.locator("canvas").first.screenshot()
    toggle.click()
    assert toggle.get_attribute("aria-pressed") == "false"
    hidden = view.locator("canvas").first.screenshot()
    view.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    view.wait_for_timeout(100)
    assert len({before, hidden, view.locator("canvas").first.screenshot()}) == 3
    numbers = view.evaluate("decodeURIComponent(document.querySelector('a[download]').href)")
    assert "<b>,2,\n<b>,3,2.5\n" in numbers
    assert axe_violations(view) == []
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    assert view.pdf().startswith(b"%PDF")
    assert view.locator("canvas").count() == 3
    assert watched.troubles == []
