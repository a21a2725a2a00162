"""The demo's page: the arrows are those of the rounds, and a browser plays them, in any scheme and width."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from browser import Watched, axe_violations
from madeup import rows
from runmaker import NESTEROV, SUM, config_of, write_run, write_summary
from twophase.explorer.page import State
from twophase.explorer.page import build as explorer
from twophase.recipes.demo import demo
from twophase.report import demo as told
from twophase.report import story
from twophase.rule import OuterRule
from twophase.runs.record import RunRecord, read_record
from twophase.theory.rollout import rollout

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SIGMA = (0.95, 0.6, 0.3)


def pair_of(folder: Path, rule: OuterRule, rounds: int = 12) -> list[RunRecord]:
    """A run of the linear theory and its restarted twin, as records."""
    records = []
    for restart in ("never", "3"):
        path = folder / restart
        write_run(path, rule, SIGMA, rounds, restart)
        write_summary(path, config_of(rule, restart, rounds), 8.0)
        records.append(read_record(path))
    return records


def page_of(pair: list[RunRecord], refresh: float = 0, **options: Any) -> str:
    """The page of a demo with made-up results: a diverged run, missing ones, and finished ones."""
    sweep = demo(quick=True, **options)
    values = {(0.9, 1.1): "diverged", (0.9, 0.3): None if refresh else 12.0}
    results = rows(
        sweep,
        lambda c: values.get((c.values["outer.momentum"], c.values["outer.lr"]), 8.0 + c.config.outer.numbers()["lr"]),
    )
    return story.build(
        story.Story(
            sweep.base,
            told.findings(results, sweep),
            told.main_maps(results),
            told.scale(results),
            told.beside(results),
            pair,
            explorer(State(), guided=True),
            told.verdict(results, sweep),
            told.LIMITS,
            {"twophase report runs/demo": "every comparison"},
            refresh,
        )
    )


@pytest.mark.parametrize("rule", [SUM, NESTEROV, OuterRule(7.0, 0.9, form="ema"), OuterRule(7.0, 0.9, True, "ema")])
def test_arrows_add_up_to_the_outer_step(tmp_path: Path, rule: OuterRule) -> None:
    """The outer step's length is that of the anchor's move in the theory, whatever the rule and the form."""
    for record, restart in zip(pair_of(tmp_path, rule), ("never", "3"), strict=True):
        moved = rollout(rule, list(SIGMA), 12, restart).residual
        expected = np.linalg.norm(moved[1:] - moved[:-1], axis=-1)
        steps = [np.hypot(line["x"], line["y"]) for line in story._rounds(record)]
        np.testing.assert_allclose(steps, expected, rtol=2e-3)
        record.blocks[0].cosine[5] = np.nan  # diverged: there is nothing to draw any more
        assert len(list(story._rounds(record))) == 5


def test_a_page_without_its_pair_says_so(tmp_path: Path) -> None:
    """Before the runs have ended there is no picture; the map comes first and shows what is missing."""
    text = page_of([], refresh=5)
    assert 'class="rounds"' not in text
    assert "as soon as they have ended" in text
    assert text.index(">Your map<") < text.index(">What a replica is<")
    assert "The demo is in progress" in text
    first = page_of(pair_of(tmp_path, SUM)[:1], refresh=5)
    assert "Its twin, with or without restarts, follows." in first
    assert 'class="rounds"' in first
    finished = page_of(pair_of(tmp_path, SUM))
    assert finished.index(">Your map<") > finished.index(">What a restart does<")
    assert "in progress" not in finished
    assert len(finished.encode()) < 600_000
    names = [
        run["name"] for run in json.loads(re.findall(r'<script type="application/json">(.*?)</script>', finished)[0])
    ]
    assert names == ["No restart", "Restart every 3 rounds"]


def test_no_controls_leave_no_table_beside_the_map(tmp_path: Path) -> None:
    """Without controls nothing stands beside the map, and nothing says so."""
    assert "beside the map" in page_of(pair_of(tmp_path, SUM))
    assert "beside the map" not in page_of([], controls=False)


@pytest.mark.browser
@pytest.mark.parametrize(
    ("width", "scheme", "motion"),
    [(390, "dark", "reduce"), (1280, "light", "no-preference")],
)
def test_the_page_in_a_browser(
    browser: Browser, watched: Watched, tmp_path: Path, *, width: int, scheme: Any, motion: Any
) -> None:
    """It plays unless motion is reduced, heeds keys, frames the explorer and its curve, clips nothing, obeys WCAG."""
    path = tmp_path / "story.html"
    path.write_text(page_of(pair_of(tmp_path, SUM)), encoding="utf-8")
    view: Any = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme, "reduced_motion": motion}
    under_policy = Watched(browser.new_page(**view))
    shown = under_policy.page
    shown.goto(path.as_uri())
    output, slider = shown.locator(".rounds output"), shown.locator(".rounds input")
    shown.locator(".rounds").scroll_into_view_if_needed()
    if motion == "reduce":
        shown.wait_for_timeout(1000)
        assert output.text_content() == "6 of 12"
    else:
        shown.get_by_role("button", name="Pause").wait_for()
        shown.locator(".rounds output", has_text=re.compile("^([3-9]|1.) of 12")).wait_for()
    slider.focus()
    slider.press("End")
    assert output.text_content() == "12 of 12"
    labels = [svg.get_attribute("aria-label") or "" for svg in shown.locator(".views svg").all()]
    assert [re.sub(r":.*", "", label) for label in labels] == [
        "No restart, round 12",
        "Restart every 3 rounds, round 12",
    ]
    assert shown.locator("figure.plot .place").text_content() == "round 12"
    boxes = shown.locator(".steer, .grids, section > .wide")
    assert boxes.evaluate_all("all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.outerHTML)") == []
    shown.locator("iframe").scroll_into_view_if_needed()
    frame = shown.frame_locator("iframe")
    frame.locator("#panels canvas").first.wait_for()
    if width > 600:  # on a phone the sliders stay above the curve while the frame is scrolled
        curve = frame.locator("#residual .plot")
        assert curve.evaluate("plot => plot.getBoundingClientRect().bottom <= innerHeight")
    frame.locator("#theme").click()
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert under_policy.troubles == []
    shown.close()
    assert axe_violations(watched.show(path, width, scheme)) == []


@pytest.mark.browser
def test_the_picture_goes_on_after_the_page_loads_itself_again(browser: Browser, tmp_path: Path) -> None:
    """A page of a demo that is in progress keeps its round when it is loaded again."""
    path = tmp_path / "story.html"
    path.write_text(page_of(pair_of(tmp_path, SUM), refresh=600), encoding="utf-8")
    watched = Watched(browser.new_page(viewport={"width": 1280, "height": 800}, reduced_motion="reduce"))
    watched.page.goto(path.as_uri())
    watched.page.locator(".rounds input").fill("9")
    watched.page.reload()
    assert watched.page.locator(".rounds output").text_content() == "9 of 12"
    assert watched.troubles == []
    watched.page.close()
