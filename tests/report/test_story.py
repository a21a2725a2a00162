"""The demo's page: the arrows are those of the rounds, and a browser plays them, in any scheme and width."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from browser import Watched
from madeup import rows
from pages import data_of, read
from runmaker import NESTEROV, SUM, config_of, write_run, write_summary
from twophase.recipes.demo import demo
from twophase.report.story import arrows, story
from twophase.rule import OuterRule
from twophase.runs.record import read_record
from twophase.theory import rollout

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SIGMA = (0.95, 0.6, 0.3)


def page_of(folder: Path, runs: int = 2, refresh: int = 0, **options: Any) -> str:
    """The page of a demo of which some of the pair's runs have ended; others diverged, or are missing."""
    sweep = demo(quick=True, **options)
    for cell in sweep.cells[:runs]:
        path = write_run(folder / "runs" / cell.run_id, SUM, SIGMA, 12, cell.config.outer.restart)
        write_summary(path, cell.config, 8.0)
    values = {(0.9, 1.1): "diverged", (0.9, 0.3): None if refresh else 12.0}
    results = rows(
        sweep,
        lambda c: values.get((c.values["outer.momentum"], c.values["outer.lr"]), 8.0 + c.config.outer.numbers()["lr"]),
    )
    text = story(results, sweep, folder, refresh=refresh)
    read(text)
    return text


@pytest.mark.parametrize("rule", [SUM, NESTEROV, OuterRule(7.0, 0.9, form="ema"), OuterRule(7.0, 0.9, True, "ema")])
def test_arrows_add_up_to_the_outer_step(tmp_path: Path, rule: OuterRule) -> None:
    """The outer step's length is that of the anchor's move in the theory, whatever the rule and the form."""
    for restart in ("never", "3"):
        path = write_run(tmp_path / restart, rule, SIGMA, 12, restart)
        write_summary(path, config_of(rule, restart, 12), 8.0)
        record = read_record(path)
        moved = rollout(rule, list(SIGMA), 12, restart).residual
        expected = np.linalg.norm(moved[1:] - moved[:-1], axis=-1)
        steps = [np.hypot(line["x"] or 0.0, line["y"] or 0.0) for line in arrows(record)]
        np.testing.assert_allclose(steps, expected, rtol=2e-3)
        record.blocks[0].cosine[5] = np.nan  # diverged: there is nothing to draw any more
        assert len(list(arrows(record))) == 5


@pytest.mark.parametrize("runs", [0, 1, 2])
def test_the_page_fills_while_runs_end(tmp_path: Path, runs: int) -> None:
    """Before a run of the pair has ended there is no picture; while runs are missing, the map comes first."""
    text = page_of(tmp_path, runs, refresh=5)
    assert 'data-refresh="5"' in text
    assert text.index(">Your map<") < text.index(">What a replica is<")
    assert ('class="rounds"' in text) == (runs > 0)
    if runs:
        moving: Any
        moving, losses = data_of(text)
        names = ["no restart", "restart every 3 rounds"][:runs]
        assert [run["name"] for run in moving] == [curve["name"] for curve in losses["series"]] == names


def test_the_whole_page(tmp_path: Path) -> None:
    """The finished page loads no more, has the map behind its explanation, and stays small."""
    text = page_of(tmp_path)
    assert 'data-refresh="' not in text
    assert text.index(">Your map<") > text.index(">What a restart does<")
    assert "plain averaging" in text
    assert "plain averaging" not in page_of(tmp_path / "alone", 0, controls=False)


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_in_a_browser(browser: Browser, watched: Watched, tmp_path: Path, width: int, scheme: Any) -> None:
    """The picture plays and heeds keys, its round outlives a reload, nothing is wider than the page; WCAG holds."""
    path = tmp_path / "story.html"
    path.write_text(page_of(tmp_path), encoding="utf-8")
    under_policy = Watched(browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme))
    shown = under_policy.page
    shown.goto(path.as_uri())
    output, slider = shown.locator(".rounds output"), shown.locator(".rounds input")
    shown.get_by_role("button", name="Play").click()
    shown.get_by_role("button", name="Pause").wait_for()
    shown.locator(".rounds output", has_text=re.compile("^([789]|1.) of 12")).wait_for()
    slider.focus()
    slider.press("End")
    assert output.text_content() == "12 of 12"
    labels = [svg.get_attribute("aria-label") or "" for svg in shown.locator(".views svg").all()]
    assert [label.partition(":")[0] for label in labels] == ["no restart, round 12", "restart every 3 rounds, round 12"]
    assert shown.locator("figure.plot .place").text_content() == "round 12"
    slider.press("ArrowLeft")
    shown.reload()
    shown.locator(".rounds output", has_text="11 of 12").wait_for()
    assert under_policy.troubles == []
    shown.close()
    watched.check(path, width, scheme)
