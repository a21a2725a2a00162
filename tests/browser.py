"""One headless Chromium for all tests of pages, and axe-core's verdict on what it shows.

Playwright drives the Chromium that the machine has (`make setup-dev` installs Debian's where it can). Where either is
missing, tests that ask for `browser` are skipped with the reason.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
"""The rules of axe-core that stand for WCAG's levels A and AA."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium, started once; a page of it is `browser.new_page()`, closed by the test that opened it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make setup-dev installs it")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = os.environ.get("TWOPHASE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no chromium: apt-get install chromium, or set TWOPHASE_CHROMIUM to one")
    with playwright.sync_playwright() as driver:
        # No sandbox: root, as in a container, may not have one; the pages are our own.
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def axe_violations(page: Page, *parts: str) -> list[str]:
    """What axe-core finds against WCAG's levels A and AA on an open page, or in its parts: a line a fault."""
    package = pytest.importorskip("axe_playwright_python", reason="no axe-playwright-python: make setup-dev brings it")
    if not page.evaluate("'axe' in window"):
        page.evaluate((Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    # Without the preloading of style sheets, which none of these rules reads, and of sounds.
    options = {"runOnly": {"type": "tag", "values": LEVELS}, "resultTypes": ["violations"], "preload": False}
    faults: list[dict[str, Any]] = page.evaluate(
        "([include, options]) => axe.run(include.length ? {include} : document, options).then(r => r.violations)",
        [parts, options],
    )
    return [
        f"{fault['id']} ({fault['impact']}): {fault['help']}: {[node['html'][:120] for node in fault['nodes'][:5]]}"
        for fault in faults
    ]


class Watched:
    """A page, and what goes wrong on it: requests for anything but its files, errors, messages, dialogs."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.troubles: list[str] = []
        page.set_default_timeout(20_000)
        page.on("request", lambda request: self._note(request.url, request.url.startswith(("file:", "data:"))))
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("console", lambda message: self._note(message.text, message.type != "error"))
        page.on("dialog", lambda dialog: self._note(dialog.message))

    def _note(self, text: str, is_harmless: bool = False) -> None:
        self.troubles += [] if is_harmless else [text]

    def show(self, file: Path, width: int = 1280, scheme: Any = "light") -> Page:
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.emulate_media(color_scheme=scheme)
        self.page.goto(file.as_uri())
        return self.page

    def check(self, file: Path, width: int, scheme: str) -> Page:
        """Show a file, all of it opened: no violation of WCAG A or AA, nothing wider than the window, no trouble."""
        page = self.show(file, width, scheme)
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert axe_violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert self.troubles == []
        return page


@pytest.fixture(scope="session")
def _open_page(browser: Browser) -> Iterator[Watched]:
    """The page of `watched`, opened once, for that takes a third of a second."""
    watched = Watched(browser.new_page(bypass_csp=True))
    yield watched
    watched.page.close()


@pytest.fixture
def watched(_open_page: Watched) -> Iterator[Watched]:
    """A page to `show` files in, past whose own policy a test's scripts run."""
    yield _open_page
    _open_page.page.goto("about:blank")
    _open_page.troubles.clear()
