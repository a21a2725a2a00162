"""The page in headless Chromium under its own policy: controls, address, map, steps, and use by everyone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser import Watched, axe_violations
from twophase import theory
from twophase.explorer.page import State, build
from twophase.rule import OuterRule

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

SIX = State().sigmas
DAMAGED = ("v=1&lr=1", "v=2&lr=1", "x", "v=2" + "&lr=<script>" * 9, "%E0%A4%A")


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Iterator[Watched]:
    """A page of the default state without the steps, which in the end has complained of nothing."""
    (tmp_path / "page.html").write_text(build(State()), encoding="utf-8")
    (tmp_path / "guided.html").write_text(build(State(), guided=True), encoding="utf-8")
    watched = Watched(browser.new_page())
    watched.show(tmp_path / "page.html")
    yield watched
    assert watched.troubles == []
    watched.page.close()


def settle(page: Page) -> Page:
    """Wait until what has been done is to be seen, in the address too."""
    page.wait_for_timeout(450)
    return page


def state(page: Page) -> dict[str, Any]:
    return page.evaluate("app.state")


def readout(page: Page, name: str) -> float:
    text = page.locator("#readouts div", has=page.get_by_text(name, exact=True)).locator("dd").inner_text()
    return float(text.replace("−", "-").split()[0])


def test_controls_change_the_state_and_its_numbers(shown: Watched) -> None:
    """Sliders by arrow keys, fields, choices and examples; what a field does not take is said beside it."""
    page = shown.page
    page.focus("#slider-restart")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("PageUp")
    page.fill("#field-lr", "0.5")
    page.check("input[value=ema]")
    page.check("input[name=nesterov][value=no]")
    page.fill("#field-sigmas", "0.1:0.9:3")
    page.select_option("#mode", "2")
    page.fill("#field-sigma", "0.8")
    page.fill("#field-retain", "2")
    page.fill("#field-retain", "0")
    page.fill("#field-momentum", "1.5")
    page.keyboard.press("Tab")
    assert "0.999999" in settle(page).inner_text("#field-momentum-wrong")
    now = state(page)
    assert now["sigmas"] == [0.1, 0.5, 0.8]
    assert (now["lr"], now["momentum"], now["form"], now["nesterov"]) == (0.5, 0.9, "ema", False)
    assert (now["restart"], now["mode"], now["retain"]) == (14, 2, 0)
    rule, ten = OuterRule(0.5, 0.9, form="ema"), math.log(10)
    for name, period in {"log₁₀ loss, no restart": 60, "log₁₀ loss, restarted": 14}.items():
        true = float(theory.log_final_loss(rule, now["sigmas"], 60, period)) / ten
        assert readout(page, name) == pytest.approx(true, rel=1e-3)
    assert readout(page, "Best K by final loss") == theory.best_period(rule, now["sigmas"], max_period=60, rounds=60)
    page.select_option("#example", "A soft restart")
    assert settle(page).input_value("#field-inject") == "0.253"
    assert page.input_value("#example") == "A soft restart"


def test_a_copied_address_shows_the_same_view(shown: Watched) -> None:
    """The address after # holds the whole state; any damaged one gives the default view, and says so."""
    page = shown.page
    page.fill("#field-sigmas", "0.9, 0.4")
    page.fill("#field-momentum", "0.8")
    before, url = state(settle(page)), page.url
    page.goto("about:blank")
    page.goto(url)
    assert state(page) == before
    assert page.input_value("#field-momentum") == "0.8"
    for fragment in DAMAGED:
        page.goto("about:blank")
        page.goto(f"{url.split('#')[0]}#{fragment}")
        assert state(page)["momentum"] == 0.9
        assert page.is_visible("#notice")


def test_the_map_moves_the_point(shown: Watched) -> None:
    """Arrow keys, a press and a drag on either map set learning rate and momentum, and never leave their limits."""
    page = shown.page
    page.focus("#map-none .u-over")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("ArrowUp")
    now = state(settle(page))
    assert now["lr"] > 0.7
    assert now["momentum"] > 0.9
    box = page.locator("#map-restart .u-over").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 3 / 4)
    page.mouse.up()
    now = state(page)
    assert now["lr"] == pytest.approx(10**-0.5, rel=0.05)  # the middle of 0.01 to 10
    assert now["momentum"] == pytest.approx(1 - 10**-0.5, abs=0.02)
    page.locator("#map-none .u-over").press("Shift+ArrowDown")
    for _ in range(9):
        page.keyboard.press("Shift+ArrowDown")
    assert state(page)["momentum"] == 0
    page.locator("#factor .u-over").click()
    assert state(page)["restart"] == 30


def test_the_three_steps_by_keyboard(shown: Watched, tmp_path: Path) -> None:
    """Arrow keys and Enter lead through all steps; the losses that a step names are the theory's."""
    page, said, rule = shown.show(tmp_path / "guided.html"), list[str](), OuterRule(0.3, 0)
    moves = [("momentum", ["PageUp"] * 3 + ["ArrowRight"] * 4), ("restart", ["ArrowRight"] * 3)]
    for name, keys in (*moves, ("momentum", ["PageDown"] * 2)):
        page.focus(f"#slider-{name}")
        for key in keys:
            page.keyboard.press(key)
        said.append(settle(page).inner_text("#guide-said"))
        if name == "restart":
            rule = OuterRule(0.3, state(page)["momentum"])
        page.focus("#guide-next")
        page.keyboard.press("Enter")
    assert all("✓" in words for words in said)
    true = [math.exp(float(theory.log_final_loss(rule, SIX, 60, period))) for period in (3, 60)]
    found = [float(word.rstrip(",").replace("−", "-")) for word in said[1].split() if word[0].isdigit()]
    assert found == pytest.approx(true, rel=0.06)
    assert page.evaluate("document.activeElement.id") == "guide-close"
    momentum = state(page)["momentum"]
    page.keyboard.press("Enter")
    assert not page.is_visible("#guide-title")
    assert state(page)["momentum"] == momentum


def test_steps_can_be_shown_and_skipped(shown: Watched, tmp_path: Path) -> None:
    """Show me does each step, a skipped one is done for the reader, and leaving returns to the view from before."""
    page = shown.show(tmp_path / "guided.html")
    for _ in range(3):
        page.click("#guide-show")
        assert "✓" in settle(page).inner_text("#guide-said")
        page.click("#guide-next")
    page.click("#guide-close")
    page.click("#guide > summary")
    page.click("#guide-next")
    page.click("#guide-next")
    assert page.inner_text("#guide-title").startswith("3 of 3")
    assert settle(page).input_value("#field-restart") == "3"
    page.click("#guide-close")
    assert settle(page).input_value("#field-lr") == "0.3"  # that of the view before, in which the steps had ended
    page = shown.show(tmp_path / "page.html")
    assert not page.is_visible("#guide-title")
    url = page.url + settle(page).evaluate("'#' + store.toFragment(app.state)")
    page.goto("about:blank")
    page.goto(url.replace("page.html", "guided.html"))
    assert not page.is_visible("#guide-title")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light"), (768, "dark")])
def test_everyone_can_use_it(watched: Watched, tmp_path: Path, width: int, scheme: str) -> None:
    """With all settings, a mistake and the steps in sight: WCAG AA, nothing too wide, nothing that a label lacks."""
    (tmp_path / "page.html").write_text(build(State(), guided=True), encoding="utf-8")
    page = watched.show(tmp_path / "page.html", width, scheme)
    for _ in range(2):  # the system's theme, and the other one
        page.evaluate("document.getElementById('more').open = true")
        page.fill("#field-restart", "x")
        page.keyboard.press("Tab")
        settle(page)
        assert page.is_visible("#field-restart-wrong")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.evaluate("scrollTo(0, 0)")
        assert axe_violations(page) == []
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.click("#theme")
        scheme = "light" if scheme == "dark" else "dark"
    assert watched.troubles == []
