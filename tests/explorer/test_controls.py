"""The page's controls in headless Chromium: sliders, fields, keys, the map, addresses."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from explorerview import PAPER, SIX, View, number
from twophase.explorer.page import State
from twophase.rule import OuterRule
from twophase.theory.periods import log_final_loss

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def test_sliders_fields_and_keys(view: View) -> None:
    """Dragging a slider, writing into its field and pressing arrow keys move the state, the numbers and the curve."""
    page = view.open()
    before = page.inner_html("#residual .plot")
    box = page.locator("#slider-lr").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    for share in (0.55, 0.6, 0.7):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
    page.mouse.up()
    view.drawn()
    lr = float(page.input_value("#field-lr"))
    assert lr > 1.2
    assert page.inner_html("#residual .plot") != before
    value = number(view.readouts()["log₁₀ loss, no restart"])
    true = log_final_loss(OuterRule(lr, 0.9, False, "ema"), SIX, 120, 120) / math.log(10)
    assert math.isclose(value, true, rel_tol=6e-4)
    view.act("fill", "#field-restart", "11")
    page.focus("#slider-restart")
    view.press("ArrowRight", "ArrowUp")
    assert page.input_value("#field-restart") == "13"
    assert page.locator("#slider-restart").get_attribute("aria-valuetext") == "13"
    view.act("fill", "#field-momentum", "1.5")
    beneath = page.locator("#field-restart").bounding_box()
    view.press("Tab")
    assert page.is_visible("#field-momentum-wrong")
    assert page.locator("#field-restart").bounding_box() == beneath  # else a press of the mouse there would miss it
    assert page.inner_text("#field-momentum-wrong") == "Write a number from 0 to 1."
    assert page.locator("#field-momentum").get_attribute("aria-invalid") == "true"
    assert page.evaluate("document.getElementById('field-momentum').getAttribute('aria-describedby')")
    view.act("click", "#reset")
    assert page.input_value("#field-momentum") == "0.9"
    assert not page.is_visible("#field-momentum-wrong")
    view.act("click", "#choices tbody tr:nth-child(3) button")
    assert page.input_value("#field-restart") == "6"  # the choice of the third criterion
    live = page.locator("#live")
    view.settled()
    assert "Recommended: restart every 7 rounds" in live.inner_text()
    assert live.get_attribute("aria-live") == "polite"


def test_the_point_moves_on_the_map(view: View) -> None:
    """By keyboard, by mouse and by touch; both maps show it, and a screen reader hears where it is."""
    page = view.open()
    handle = page.locator("#map .handle").nth(1)
    handle.scroll_into_view_if_needed()
    handle.focus()
    view.press("ArrowRight", "ArrowUp", "Shift+ArrowLeft", "ArrowDown", "ArrowDown")
    lr, momentum = float(page.input_value("#field-lr")), float(page.input_value("#field-momentum"))
    assert lr < 0.8
    assert momentum < 0.9
    assert f"momentum {momentum:g}" in (handle.get_attribute("aria-valuetext") or "")
    assert page.evaluate("document.activeElement.className") == "handle"
    box = page.locator("#map .plot").first.bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 0.7 * box["height"], steps=4)
    page.mouse.up()
    view.drawn()
    assert float(page.input_value("#field-lr")) > 1.5
    assert float(page.input_value("#field-momentum")) < momentum


def test_touch_moves_the_point(browser: Browser, tmp_path: Path) -> None:
    """A tap on the map of a phone sets learning rate and momentum."""
    view = View(browser, tmp_path, has_touch=True, is_mobile=True)
    page = view.open()
    view.sized(360, 740)
    plot = page.locator("#map .plot").nth(1)
    plot.scroll_into_view_if_needed()
    page.wait_for_timeout(400)
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    page.touchscreen.tap(box["x"] + 0.35 * box["width"], box["y"] + 0.6 * box["height"])
    view.drawn()
    assert float(page.input_value("#field-lr")) < 0.3
    assert view.complaints == []
    page.close()


def test_forms_and_spectra(view: View) -> None:
    """The other form by button is the same trajectory, by radio button other numbers; S and eta act on curvatures."""
    page = view.open()
    loss = view.readouts()["log₁₀ loss, no restart"]
    view.act("click", "#switch")
    assert page.input_value("#field-lr").startswith("0.1") or page.input_value("#field-lr").startswith("0.0999")
    assert page.is_checked("input[name=form][value=sum]")
    assert view.readouts()["log₁₀ loss, no restart"] == loss
    view.act("check", "input[name=form][value=ema]")
    assert view.readouts()["log₁₀ loss, no restart"] != loss
    assert page.is_disabled("#slider-inner_steps")
    view.act("select_option", "#spectrum", "curvature")
    assert page.is_enabled("#field-inner_steps")
    loss = view.readouts()["log₁₀ loss, no restart"]
    view.act("fill", "#field-inner_steps", "200")
    assert view.readouts()["log₁₀ loss, no restart"] != loss
    view.act("fill", "#field-inner_lr", "0")
    assert page.input_value("#slider-inner_lr") == "0"  # a logarithm has no place for it
    view.act("fill", "#field-inner_lr", "0.5")  # times the largest curvature it exceeds 1
    view.press("Tab")
    assert "overshoots" in page.inner_text("#field-inner_lr-wrong")
    view.act("select_option", "#mode", "-1")
    view.act("check", "input[name=view][value=log]")
    assert "mean of all modes" in page.inner_text("#residual figcaption")


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (State(lr=1e-5, momentum=0.99, form="ema"), "lr"),
        (State(lr=2.0, momentum=0.999999), "lr"),
        (State(form="ema", policy="soft:3:0.2:1e30"), "policy"),
    ],
    ids=["small", "large", "soft"],
)
def test_a_rule_without_place_in_the_other_form_stays(view: View, state: State, name: str) -> None:
    """The button says which value would leave the page's limits, and changes nothing."""
    page = view.show(state)
    view.act("click", "#switch")
    assert f"In the other form, {name} would be" in page.inner_text("#notice")
    assert page.evaluate("[app.state.form, app.state.lr, app.state.policy]") == [state.form, state.lr, state.policy]
    view.act("fill", "#field-rounds", "20")
    assert not page.is_visible("#notice")


def test_state_survives_the_address(view: View) -> None:
    """What the address says after changes opens the same view; newer fields may be missing; the link can be copied."""
    page = view.open()
    view.act("fill", "#field-lr", "0.123")
    view.act("select_option", "#spectrum", "range")
    view.act("check", "input[name=nesterov][value=yes]")
    view.act("select_option", "#policy", "cycle:5,6,10")
    view.act("fill", "#field-policy", "cycle:4,7")
    view.act("select_option", "#schedule", "cosine")
    view.act("fill", "#field-noise", "0.05")
    view.act("fill", "#field-seed", "12")
    view.settled()
    fragment = page.evaluate("location.hash")
    assert fragment.startswith("#v=1&lr=0.123&")
    assert fragment.endswith("&policy=cycle:4,7&schedule=cosine&noise=0.05&seed=12")
    readouts = view.readouts()
    page = view.open(State(), fragment)
    assert view.readouts() == readouts
    assert page.input_value("#field-lr") == "0.123"
    assert page.input_value("#field-policy") == "cycle:4,7"
    assert page.input_value("#policy") == "cycle:5,6,10"  # the choice of its kind
    assert not page.is_visible("#notice")
    view.act("click", "#copy")
    assert page.inner_text("#copy").startswith("Cop")
    state = page.evaluate(
        "f => store.fromFragment(f, JSON.parse(document.getElementById('given').textContent)).state", fragment[1:]
    )
    assert State(**state | {"sigmas": tuple(state["sigmas"]), "curvatures": tuple(state["curvatures"])}).lr == 0.123
    page = view.open(State(), fragment.partition("&policy")[0])
    assert page.evaluate("[app.state.policy, app.state.schedule, app.state.noise]") == ["", "constant", 0]
    assert not page.is_visible("#notice")


def test_policies_by_hand(view: View) -> None:
    """A text that is none is refused with what to write, and a period takes the policy's place."""
    page = view.open()
    view.act("select_option", "#policy", "auto")
    view.act("fill", "#field-policy", "automatic")
    view.press("Tab")
    assert "Write auto," in page.inner_text("#field-policy-wrong")
    page.focus("#slider-restart")
    view.press("ArrowRight")  # a period takes the policy's place
    assert page.evaluate("app.state.policy") == ""
    assert not page.is_visible("#field-policy")


DAMAGED = {
    "cut": lambda good: good[: len(good) // 2],
    "end": lambda good: good[:-2],
    "version": lambda good: good.replace("v=1", "v=2"),
    "nan": lambda good: good.replace("lr=1&", "lr=NaN&"),
    "beyond": lambda good: good.replace("momentum=0.9", "momentum=1.9"),
    "fraction": lambda good: good.replace("rounds=120", "rounds=1.5"),
    "script": lambda good: good.replace("lr=1&", "lr=<img src=x onerror=alert(1)>&"),
    "unknown": lambda good: good + "&__proto__=1",
    "run": lambda good: good.replace("spectrum=list", "spectrum=run"),
    "policy": lambda good: good + "&policy=%3Cimg%3E",
    "noise": lambda _good: "%3Cscript%3Ealert(1)%3C/script%3E",
    "many": lambda good: good.replace("sigmas=0.95", "sigmas=" + "0.5," * 70 + "0.95"),
}


def test_damaged_addresses_give_the_default_and_say_so(view: View) -> None:
    """Nothing of a damaged address is used: the default view opens, with a sentence, and no text of it is repeated."""
    page = view.open()
    good = page.evaluate("state => store.toFragment(state)", dataclasses.asdict(PAPER))
    default = view.readouts()
    for name, damage in DAMAGED.items():
        bad = damage(good)
        assert bad != good
        page.evaluate("bad => { location.hash = bad; }", bad)
        view.drawn()
        said = page.inner_text("#notice")
        assert "This is the default view." in said, name
        assert "img" not in said
        assert "proto" not in said
        assert view.readouts() == default, name
    page.evaluate("good => { location.hash = good; }", good.replace("lr=1&", "lr=2&"))
    view.drawn()
    assert page.input_value("#field-lr") == "2"
    assert not page.is_visible("#notice")


def test_many_moves_between_two_frames_are_one_drawing(view: View) -> None:
    """A drag that sends more moves than the screen shows pictures costs one computation and drawing a frame."""
    page = view.open()
    code = """async () => {
        // What follows the opening, such as the observer's first report of sizes, may draw once more on a busy machine.
        for (let i = 0; i < 4; i++) await new Promise(requestAnimationFrame);
        let drawings = 0;
        const render = app.render, slider = document.getElementById("slider-lr");
        app.render = () => { drawings++; render(); };
        for (let i = 0; i < 30; i++) {
            slider.value = 400 + i;
            slider.dispatchEvent(new Event("input"));
        }
        for (let i = 0; i < 4; i++) await new Promise(requestAnimationFrame);
        return [drawings, app.state.lr];
    }"""
    drawings, lr = page.evaluate(code)
    assert drawings == 1
    assert float(page.input_value("#field-lr")) == lr


def test_every_panel_is_drawn_once_the_hand_rests(view: View) -> None:
    """Panels out of sight, and all cells of the map, are there soon after the page opens or a slider stops."""
    page = view.open()
    there = "document.querySelectorAll('figure .plot svg').length"
    for momentum in (0.9, 0.5):
        page.evaluate("momentum => app.change({momentum})", momentum)
        page.wait_for_timeout(450)
        page.evaluate("async () => { while (lossMap.busy()) await new Promise(requestAnimationFrame); }")
        assert page.evaluate(there) == 7
        label = page.get_attribute("#gain svg", "aria-label")
        assert label == page.evaluate("panels.gain.plot(app.model, 600, 'light').getAttribute('aria-label')")
    page.evaluate("app.change({restart: 9}); app.render(); window.dispatchEvent(new Event('beforeprint'));")
    assert page.evaluate("lossMap.busy()") is False
