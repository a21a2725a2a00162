"""The page in headless Chromium for everyone: WCAG, both themes, roles, and the order of the Tab key on a phone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browser import axe_violations
from explorerview import View

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def test_everyone_can_use_it(browser: Browser, tmp_path: Path) -> None:
    """At every width and in both themes, with a mistake and all settings in sight: no violation of WCAG AA."""
    view = View(browser, tmp_path, color_scheme="dark", reduced_motion="reduce")
    page = view.open()
    page.wait_for_selector("#forms tbody tr")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"  # the system's until it is chosen
    for theme, width in (("dark", 1280), ("dark", 360), ("light", 768)):
        view.sized(width, 800)
        if page.evaluate("document.documentElement.dataset.theme") != theme:
            view.act("click", "#theme")
        if not page.evaluate("document.getElementById('more').open"):
            view.act("click", "summary")
        page.fill("#field-restart", "x")
        view.press("Tab")
        page.evaluate("app.say('The link is damaged.')")
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        assert page.is_visible("#field-restart-wrong")
        assert axe_violations(page) == [], (theme, width)
    view.blameless()
    page.close()


def test_tables_are_tables_on_a_phone(view: View) -> None:
    """The rows of the two forms look like cards, yet have the roles of a table, which some browsers take away then."""
    page = view.open()
    view.sized(360, 740)
    page.wait_for_selector("#forms tbody tr")
    view.drawn()
    assert page.evaluate("getComputedStyle(document.querySelector('#forms tr')).display") == "block"
    assert page.evaluate("getComputedStyle(document.querySelector('#forms thead')).display") != "none"
    count = {role: page.locator(f"#forms [role={role}]").count() for role in ("row", "rowheader", "columnheader")}
    assert count == {"row": 11, "rowheader": 10, "columnheader": 3}
    heads = page.locator("#forms [role=columnheader]").all_text_contents()
    for row in page.locator("#forms tbody tr").all():
        shown = row.locator("td").evaluate_all("all => all.map(td => td.dataset.head)")
        assert shown == (heads if len(shown) == 3 else ["sum and EMA form", heads[2]])


def test_tab_goes_down_the_phones_page(view: View) -> None:
    """The order of the Tab key is that of the eye; neither sliders on top nor a message below hide the focus."""
    page = view.open()
    view.sized(360, 740)
    page.evaluate("app.say('The link is damaged.')")
    view.drawn()
    page.focus("#theme")
    code = """() => {
        const node = document.activeElement, box = node.getBoundingClientRect(),
            at = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
        return [node.id || node.className || node.textContent, box.top + scrollY,
            at !== null && (node.contains(at) || at.contains(node)), node.closest("#most") !== null];
    }"""
    stops = []
    for _ in range(30):
        view.press("Tab")
        stops.append(page.evaluate(code))
    names = [name for name, *_ in stops]
    assert names[:2] + names[3:6:2] == ["example", "slider-lr", "slider-momentum", "slider-restart"]
    assert "handle" in names
    assert all(seen for _, _, seen, _ in stops), stops
    tops = [top for _, top, _, sticks in stops if not sticks]
    assert all(low <= high + 40 for low, high in pairwise(tops)), stops
