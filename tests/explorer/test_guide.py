"""The guided steps in headless Chromium: by keyboard and by mouse, in words that the theory confirms."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from browser import axe_violations
from explorerview import PAPER, SIX, View, number
from twophase.explorer.page import State
from twophase.rule import OuterRule
from twophase.theory.periods import log_final_loss
from twophase.theory.rollout import rollout

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

ROUNDS = 60


def rule_at(page: Page) -> OuterRule:
    """The rule that the guide's sliders have set: EMA form, learning rate 1."""
    return OuterRule(1.0, float(page.input_value("#field-momentum")), False, "ema")


def loss_of(rule: OuterRule, period: int = ROUNDS) -> float:
    """Loss after the guide's rounds."""
    return math.exp(float(log_final_loss(rule, SIX, ROUNDS, period)))


def said(view: View) -> str:
    """What the step says of the state now."""
    view.drawn()
    return view.page.inner_text("#guide-said")


def check_first(view: View) -> None:
    """Step 1: the round in which the mode passes zero, and how far it swings."""
    words = said(view)
    residual = rollout(rule_at(view.page), SIX, ROUNDS).residual[:, 3]  # of the mode that is drawn in bold
    match = re.search(r"It oscillates: it passes 0 in round (\d+) and swings to (\S+),", words)
    assert match, words
    assert int(match[1]) == np.argmax(residual < 0)
    assert number(match[2]) == pytest.approx(residual.min(), rel=0.05)
    assert view.page.inner_text("#guide-next") == "Next: Now restart it"


def check_second(view: View) -> None:
    """Step 2: both losses, their ratio, and the rounds that are saved."""
    words, rule = said(view), rule_at(view.page)
    period = int(view.page.input_value("#field-restart"))
    match = re.search(
        r"Restarted every (\d+) rounds: loss (\S+) after 60 rounds, and (\S+) without. "
        r"That is ([\d,]+) times lower, or as low (\d+) rounds sooner",
        words,
    )
    assert match, words
    assert int(match[1]) == period
    with_restarts, without = loss_of(rule, period), loss_of(rule)
    assert number(match[2]) == pytest.approx(with_restarts, rel=0.06)
    assert number(match[3]) == pytest.approx(without, rel=0.06)
    assert float(match[4].replace(",", "")) == pytest.approx(without / with_restarts, rel=0.06)
    loss = rollout(rule, SIX, ROUNDS, period).loss
    late = np.flatnonzero(loss > without)[-1] + 1
    assert int(match[5]) == ROUNDS - late


def check_third(view: View) -> None:
    """Step 3: the loss without restarts, and that no period would save a tenth of the rounds."""
    words, rule = said(view), rule_at(view.page)
    match = re.search(r"At β = (\S+) the loss after 60 rounds is (\S+) without restarts; the best K would save", words)
    assert match, words
    assert 0 < rule.momentum < 0.6
    assert number(match[2]) == pytest.approx(loss_of(rule), rel=0.06)
    best = min(range(1, ROUNDS + 1), key=lambda period: loss_of(rule, period))
    loss = rollout(rule, SIX, ROUNDS, best).loss
    assert np.flatnonzero(loss > loss_of(rule)).max(initial=-1) + 1 >= 0.9 * ROUNDS
    assert "Restarts at β = " in words


def test_the_steps_by_keyboard(view: View) -> None:
    """Arrow keys and Enter lead through all steps; each says when it is done, aloud too, and leads to the next."""
    page = view.open(State(), guided=True)
    assert page.inner_text("#guide-title") == "1 of 3: Make it oscillate"
    assert said(view) == "It falls to 0 and does not pass it."
    assert page.inner_text("#guide-next") == "Skip this step"
    page.focus("#slider-momentum")
    view.press("PageUp")
    assert "more momentum" in said(view)
    view.press("PageUp", "PageUp", *["ArrowRight"] * 3)
    check_first(view)
    view.settled()
    assert "It oscillates" in page.inner_text("#live")
    page.focus("#guide-next")
    view.press("Enter")
    assert page.inner_text("#guide-title") == "2 of 3: Now restart it"
    assert "Now restart it" in page.inner_text("#live")
    assert page.evaluate("document.activeElement.id") == "guide-next"
    assert page.get_attribute(".asked", "data-name") == "restart"
    assert said(view) == "No restart yet: both curves are one."
    page.focus("#slider-restart")
    view.press("ArrowRight")
    assert "Try another K." in said(view)  # every round: no momentum at all
    view.press(*["ArrowRight"] * 6)
    check_second(view)
    page.focus("#guide-next")
    view.press("Enter")
    assert page.inner_text("#guide-title") == "3 of 3: Find a momentum that needs no restart"
    assert "would still save" in said(view)
    page.focus("#slider-momentum")
    view.press("PageDown", "PageDown", *["ArrowLeft"] * 8)
    check_third(view)
    view.press(*["ArrowLeft"] * 8)
    assert "no momentum, nothing to restart" in said(view)
    assert page.inner_text("#guide-next") == "Next: What you have seen"  # what was done stays done
    page.focus("#guide-next")
    view.press("Enter")
    assert "tune the momentum first" in page.inner_text("#guide-task")
    assert re.search(r"made the loss [\d,]+ times lower", said(view))
    assert page.evaluate("document.activeElement.id") == "guide-close"
    view.press("Enter")
    assert not page.is_visible("#guide-title")
    assert page.input_value("#field-momentum") == "0"  # the view stays
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"


def drag(view: View, slider: str, until: str) -> None:
    """Drag a slider to its farther end until the step says something."""
    box = view.page.locator(slider).bounding_box()
    assert box
    y, mouse = box["y"] + box["height"] / 2, view.page.mouse
    at = view.page.evaluate("s => document.querySelector(s).value / 1000", slider)
    mouse.move(box["x"] + 8 + at * (box["width"] - 16), y)
    mouse.down()
    for move in range(1, 26):
        share = at + ((1.0 if at < 0.2 else 0.0) - at) * move / 25
        mouse.move(box["x"] + 8 + share * (box["width"] - 16), y)
        if until in said(view):
            break
    mouse.up()
    assert until in said(view)


def test_the_steps_by_mouse(view: View) -> None:
    """Dragging the sliders and pressing the buttons does the same; what is to be moved is marked."""
    page = view.open(State(), guided=True)
    drag(view, "#slider-momentum", "swings to −0.5")
    check_first(view)
    view.act("click", "#guide-next")
    drag(view, "#slider-restart", "That is")
    check_second(view)
    view.act("click", "#guide-next")
    assert page.get_attribute(".asked", "data-name") == "momentum"
    drag(view, "#slider-momentum", "Restarts at")
    view.act("click", "#guide-next")
    view.act("click", "#guide-close")
    assert page.locator(".asked").count() == 0


def test_showing_and_skipping(view: View) -> None:
    """Show me does every step, a skipped step is done for the reader, and leaving returns to the view from before."""
    page = view.open(State(), guided=True)
    for check in (check_first, check_second, check_third):
        view.act("click", "#guide-show")
        check(view)
        view.act("click", "#guide-next")
    view.act("click", "#guide-close")
    view.act("click", "#guide > summary")  # once more
    assert page.input_value("#field-momentum") == "0"
    view.act("click", "#guide-next")
    view.act("click", "#guide-next")
    assert "3 of 3" in page.inner_text("#guide-title")
    assert page.input_value("#field-restart") == "7"
    page = view.open(State(), guided=True)
    view.act("click", "#guide-show")
    view.act("click", "#guide-close")
    assert page.input_value("#field-momentum") == "0.9"  # the default view's: Nesterov, lr 0.7
    assert page.input_value("#field-lr") == "0.7"


def test_shared_views_open_without_the_steps(view: View) -> None:
    """An address with a state, and a page that was asked for with options, open straight into the instrument."""
    page = view.open(PAPER)
    assert not page.is_visible("#guide-title")
    fragment = page.evaluate("state => '#' + store.toFragment(state)", page.evaluate("app.state"))
    page = view.open(State(), fragment, guided=True)
    assert not page.is_visible("#guide-title")
    assert page.input_value("#field-rounds") == "120"


def test_the_steps_are_for_everyone(browser: Browser, tmp_path: Path) -> None:
    """At both widths and themes, in every step: no violation of WCAG, nothing too wide, no button that moves."""
    for scheme, width, height in (("dark", 1280, 900), ("light", 390, 800)):
        view = View(browser, tmp_path, color_scheme=scheme, reduced_motion="reduce")
        page = view.open(State(), guided=True)
        view.sized(width, height)
        boxes = []
        for momentum in (0, 0.5, 0.9):
            page.evaluate("momentum => app.change({momentum})", momentum)
            view.drawn()
            boxes.append(page.locator("#guide-next").bounding_box())
        assert len({(box["x"], box["y"]) for box in boxes if box}) == 1
        for step in (1, 2, 3, 4):
            assert page.inner_text("#guide-title").startswith(f"{step} of 3" if step < 4 else "What you have seen")
            page.evaluate("scrollTo(0, 0)")  # half under the sliders that stay on top, a target is too small
            parts = ["#guide", "#most"] if step in (2, 3) else []  # what these steps change, beside the figures
            assert axe_violations(page, *parts) == [], (scheme, width, step)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            if step < 4:
                view.act("click", "#guide-show")
                view.act("click", "#guide-next")
        caption = page.locator("#residual figcaption").bounding_box()
        assert caption
        assert width > 900 or caption["height"] < 40  # on a phone the curve is close below the steps
        view.blameless()
        page.close()
