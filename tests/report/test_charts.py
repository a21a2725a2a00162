"""Charts: what others wrote is unchanged, and a browser draws the data of a page, by pointer and by keyboard."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import Watched
from twophase.report.charts import MOST_POINTS, Chart, Curve
from twophase.report.page import render
from twophase.report.run import round_charts
from twophase.runs.record import MEASURED

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


def drawn(*curves: Sequence[float], **options: Any) -> dict[str, Any]:
    """What the template shows of curves with these heights over 0, 1, 2, ..., which are named c0, c1, ..."""
    lines = [Curve(f"c{k}", range(len(values)), values) for k, values in enumerate(curves)]
    found = Chart("n", "t", "x", "y", lines, **options).drawn()
    return {} if found is None else found


def test_a_curve_has_gaps_and_words() -> None:
    """A nan is a gap; the words for readers without the picture have the ends, and the rows the numbers."""
    found = drawn([1.0, math.nan, 3.0, 4.5], restarts=[2])
    assert found["data"]["series"] == [{"name": "c0", "x": [0, 1, 2, 3], "y": [1, None, 3, 4.5]}]
    assert found["data"]["restarts"] == [2]
    assert "c0: from 1 to 4.5" in found["label"]
    assert found["rows"][2:] == [("c0", 2.0, 3.0), ("c0", 3.0, 4.5)]
    assert drawn([1.0, 0.0, -1.0], log=True)["data"]["series"][0]["y"] == [1, None, None]


@pytest.mark.parametrize("boom", [[1e150], [1e150] * 2 * MOST_POINTS, [], [math.nan]])
@pytest.mark.parametrize("index", [0, 1])
def test_a_curve_without_a_number_keeps_its_place(boom: list[float], index: int) -> None:
    """The buttons of a page choose curves by their places, exploded runs among them; else it is left out."""
    curves: list[Sequence[float]] = [[1.0, 2.0], [1.0, 2.0]]
    curves.insert(index, boom)
    chosen, every = (drawn(*curves, shown=shown)["data"] for shown in ([2], None))
    assert ([series["name"] for series in chosen["series"]], chosen["shown"]) == (["c0", "c1", "c2"], [2])
    assert [series["name"] for series in every["series"]] == [
        name for name in ("c0", "c1", "c2") if name != f"c{index}"
    ]
    assert drawn() == drawn(boom) == {}


@pytest.mark.parametrize(("length", "curves"), [(MOST_POINTS + 1, 1), (20_000, 5), (10_000, 60), (100, 400)])
def test_a_long_curve_keeps_its_extremes(length: int, curves: int) -> None:
    """At most 600 points of a curve are drawn, fewer of many curves, its extremes among them, in order; it is said."""
    values = np.random.default_rng(0).normal(size=length)
    values[::5] = math.nan
    values[7] = 10.0
    found = drawn(*[values.tolist()] * curves)
    for series in found["data"]["series"]:
        assert len(series["x"]) <= MOST_POINTS
        assert series["x"] == sorted(series["x"])
        heights = [y for y in series["y"] if y is not None]
        assert (min(heights), max(heights)) == pytest.approx((np.nanmin(values), 10.0), rel=1e-4, abs=1e-9)
    assert f"{length:,} points" in found["remarks"]
    assert len(json.dumps(found["data"])) < 300_000


def test_a_long_curve_keeps_its_gaps() -> None:
    """Missing values as wide as a stretch interrupt a long curve; single ones within a stretch do not."""
    values = [math.nan if 40_000 <= x < 50_000 or x % 50 == 7 else 1.0 + x % 3 for x in range(100_000)]
    (curve,) = drawn(values, restarts=range(100_000))["data"]["series"]
    gap = [x for x, y in zip(curve["x"], curve["y"], strict=True) if y is None]
    assert 28 <= len(gap) <= 31
    assert 40_000 <= min(gap) <= max(gap) < 50_000


def test_the_axis_ends_with_the_bulk() -> None:
    """Few points far away do not flatten the others: the axis ends before them and they are counted; else not."""
    values = [1.0 + 0.1 * (x % 3) for x in range(40)]
    found = drawn([*values, 30.0, -70.0], bulk=True)
    assert found["data"]["bulk"] == [1, 1.2]
    assert "2, as far as \N{MINUS SIGN}70" in found["remarks"]
    for near in (values, [*[1.0] * 40, 1.9]):  # a little further out is no reason
        assert "bulk" not in drawn(near, bulk=True)["data"]


@settings(max_examples=50)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20), st.booleans(), st.booleans())
def test_any_numbers_can_be_drawn(values: list[float], log: bool, bulk: bool) -> None:
    """No number, however large, small or absent, breaks a chart or makes JSON that a browser refuses."""
    assert json.dumps(drawn(values, log=log, bulk=bulk).get("data"), allow_nan=False)


def test_a_cosine_without_a_buffer_is_none() -> None:
    """In rounds whose buffer is zero there is nothing to measure a cosine against; levels are beside the curves."""
    columns = {name: np.ones(4) for name in ("round", *MEASURED)} | {"buffer_norm": np.array([0.0, 1, 0, 1])}
    *_, cosine, gain = (chart.drawn() or {} for chart in round_charts({"r": columns}))
    assert cosine["data"]["series"][0]["y"] == [None, 1, None, 1]
    assert [series["y"] for series in gain["data"]["series"]] == [[1] * 4, [1, 1]]


# ----------------------------------------------------------------------------------------------------------- Chromium


def page_of(folder: Path, *charts: Chart) -> Path:
    values = {"title": "charts", "names": [], "results": [], "differences": [], "settings": 0}
    (folder / "page.html").write_text(render("overlay.html", charts=charts, **values), encoding="utf-8")
    return folder / "page.html"


@pytest.mark.browser
def test_keys_read_what_is_in_view(watched: Watched, tmp_path: Path) -> None:
    """Arrow keys read four figures of a value and all of a step's; after a zoom, from its first place to its last."""
    charts = [
        Chart("n", "t", "round", "y", [Curve("c", range(101), [0.012345 * k for k in range(101)])]),
        Chart("m", "t", "step", "y", [Curve("d", [1_234_566, 1_234_567], [-1, -2e7])]),
    ]
    view = watched.show(page_of(tmp_path, *charts))
    first, second = (view.locator("figure.plot > div").nth(k) for k in (0, 1))
    area = view.locator(".u-over").first.bounding_box() or {}
    view.mouse.move(area["x"] + 0.402 * area["width"], area["y"] + 50)
    view.mouse.down()
    view.mouse.move(area["x"] + 0.598 * area["width"], area["y"] + 50, steps=4)
    view.mouse.up()
    for key, index in {"Home": 41, "ArrowRight": 42, "End": 59, "ArrowLeft": 58, "Control+Home": 58}.items():
        first.press(key)
        text = first.locator("[aria-live]").text_content() or ""
        assert text == f"round {index}: c {float(f'{0.012345 * index:.4g}'):g}"
    second.press("End")
    assert second.locator("[aria-live]").text_content() == "step 1,234,567: d \N{MINUS SIGN}20,000,000"


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_charts_in_a_browser(watched: Watched, tmp_path: Path, width: int, scheme: str) -> None:
    """A chart is drawn, tells its values, hides a curve, follows the scheme, prints, and breaks no WCAG rule."""
    rounds = list(range(1, 9))
    losses = [Curve("<b>", rounds, [2.0, math.nan, *[2.5] * 6]), Curve("=b", [4, 8], [1, 3])]
    norms = [Curve("g", rounds, [10.0**-k for k in rounds])]
    charts = [
        Chart("loss", "Loss </script>", "round", "loss", losses),
        Chart("norm", "Norm", "round", "norm", norms, log=True, restarts=[3]),
    ]
    view = watched.check(page_of(tmp_path, *charts), width, scheme)
    box, values = view.locator("figure.plot > div").first, view.locator("figure.plot").first.locator("output")
    assert view.locator("canvas").count() == 2
    for _ in range(4):
        box.press("ArrowRight")
    assert box.locator("[aria-live]").text_content() == "round 4: <b> 2.5; =b 1"
    assert values.all_text_contents() == ["2.5", "1"]
    box.hover()
    assert all(values.all_text_contents())
    toggle = view.get_by_role("button", name="<b>")
    pictures = [view.locator("canvas").first.screenshot()]
    toggle.click()
    assert toggle.get_attribute("aria-pressed") == "false"
    pictures.append(view.locator("canvas").first.screenshot())
    view.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    view.wait_for_timeout(100)
    pictures.append(view.locator("canvas").first.screenshot())
    assert len(set(pictures)) == 3
    numbers = view.evaluate("decodeURIComponent(document.querySelector('a[download]').href)")
    assert '"<b>","2",""\n"<b>","3","2.5"\n' in numbers
    assert '"\'=b","4"' in numbers  # no formula of a spreadsheet
    assert view.pdf().startswith(b"%PDF")
    assert watched.troubles == []
