"""The page's layout in headless Chromium: nothing overlaps, nothing scrolls sideways, nothing moves away."""

from __future__ import annotations

import dataclasses

import pytest

from explorerview import PAPER, View
from twophase.explorer.page import State

pytestmark = pytest.mark.browser


def test_ticks_keep_their_distance(view: View) -> None:
    """At the ends of what can be chosen, no two numbers on an axis of the map overlap, on a phone neither."""
    for width in (1280, 360):
        view.sized(width, 900)
        for state in (State(momentum=0.999999, lr=1e-6), State(momentum=0.9999), State(lr=1e6), PAPER):
            page = view.show(state)
            boxes = page.eval_on_selector_all(
                "#map svg:first-of-type g text",
                "all => all.filter(t => /^[0-9]/.test(t.textContent)).map(t => {"
                " const b = t.getBoundingClientRect(); return [b.left, b.right, b.top + 2, b.bottom - 2]; })",
            )
            assert len(boxes) > 10
            for i, (start, end, top, bottom) in enumerate(boxes):
                for other in boxes[:i]:
                    assert start >= other[1] or end <= other[0] or top >= other[3] or bottom <= other[2], (state, width)
    labels = page.eval_on_selector_all("input[type=radio]", "all => all.map(r => r.getBoundingClientRect().height)")
    assert min(labels) >= 24


KINDS = {
    "usual": State(),
    "paper": PAPER,
    "mean": State(mode=-1, restart=1),
    "many": State(spectrum="range", count=64, low=0.001, mode=0, restart=0),
    "unstable": State(3.0, 0.9, True, "sum", 2, 40, sigmas=(1.0, 0.4, 0.1), mode=0),
    "all diverge": State(lr=50.0, restart=1),
    "no momentum": State(momentum=0.0, mode=1),
    "hardly any": State(momentum=1e-300, restart=60),
    "grows": State(0.78, 0.95, False, "sum", 3, 60, "one", sigma=1, mode=0),
    "slow": State(1e-6, 0.9, True, "sum", 3, 10_000, "one", sigma=0.001, mode=0),
    "long": State(1.234e-5, 0.999999, False, "ema", 9_999, 10_000, "one", sigma=0.999, mode=0),
    "nothing moves": State(sigmas=(0, 0), mode=0),
}


def test_nothing_moves_away(view: View) -> None:
    """Whatever the values and warnings are, all that can be pressed stays where it is, and nothing is too wide."""
    page = view.open()
    # Left out are the settings below the modes, of which another kind brings other fields, by choice.
    code = """states => states.map(state => {
        app.take(state);
        app.render();
        stage.showRest();
        const all = document.querySelectorAll("button, summary, input, select, .plot, figure, #forms, #most");
        const places = [...all].filter(node => !node.closest("#more")).map((node, i) => {
            const box = node.getBoundingClientRect();
            return [i, node.id || node.tagName, Math.round(box.left), Math.round(box.top)];
        });
        return [document.documentElement.scrollWidth, places];
    })"""
    states = [dataclasses.asdict(state) for state in KINDS.values()]
    for width in (1280, 920, 768, 360):
        view.sized(width, 7000)  # every panel is in sight, so every panel is drawn
        results = page.evaluate(code, states)
        first = [tuple(place) for place in results[0][1]]
        assert len(first) > 40
        for name, (wide, places) in zip(KINDS, results, strict=True):
            assert wide <= width, (name, width)
            assert set(map(tuple, places)) - set(first) == set(), (name, width)


def test_messages_move_nothing(view: View) -> None:
    """A message at the foot of the window, a copied link and another theme: no control moves."""
    page = view.open()
    where = """() => [...document.querySelectorAll("button, input, select, figure")].map(node => {
        const box = node.getBoundingClientRect(); return [box.left, box.top, box.width]; })"""
    before = page.evaluate(where)
    page.evaluate("app.say('The low end of the range is above its high end.')")
    view.drawn()
    assert page.is_visible("#notice")
    assert page.evaluate(where) == before
    view.act("click", "#copy")
    assert page.evaluate(where) == before
    view.act("click", "#theme")
    assert page.evaluate(where) == before
    view.act("click", "#reset")
    assert not page.is_visible("#notice")


def test_sliders_stay_over_every_figure(view: View) -> None:
    """On a phone the sliders for rate, momentum and period stay in sight with any figure below them, and move it."""
    page = view.open()
    for width in (360, 768):
        view.sized(width, 740)
        assert not page.is_visible("#field-rounds")  # folded away
        for name in ("residual", "rate", "gain"):
            page.evaluate("name => document.getElementById(name).scrollIntoView()", name)
            view.drawn()
            knobs, plot = page.locator("#most").bounding_box(), page.locator(f"#{name} .plot").bounding_box()
            assert knobs
            assert plot
            assert 0 <= knobs["y"] < knobs["y"] + knobs["height"] < 200
            assert knobs["y"] + knobs["height"] <= plot["y"] < plot["y"] + plot["height"] <= 740
            before = page.inner_html(f"#{name} .plot")
            page.focus("#slider-momentum")
            view.press("ArrowLeft")
            assert page.inner_html(f"#{name} .plot") != before
    view.sized(700, 360)  # a phone on its side has no height for both
    assert page.locator("#most").evaluate("node => getComputedStyle(node).position") == "static"


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
