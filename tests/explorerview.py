"""An open page of `twophase explore` for tests in headless Chromium, and how to act on it without racing its frames."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.explorer.page import RunSpectrum, State, build
from twophase.rule import OuterRule

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SIX = (0.95, 0.85, 0.75, 0.6, 0.45, 0.3)
PAPER = State(1.0, 0.9, False, "ema", 7, 120, "list", sigmas=SIX, mode=0)


class View:
    """An open page, and everything that it has complained of or asked the world for."""

    def __init__(self, browser: Browser, folder: Path, **options: Any) -> None:
        self.file = folder / "page.html"
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(
        self, state: State = PAPER, fragment: str = "", run: RunSpectrum | None = None, *, guided: bool = False
    ) -> Page:
        """Write the page for a state and open it."""
        self.file.write_text(build(state, run, guided=guided), encoding="utf-8")
        self.page.goto("about:blank")
        self.page.goto(self.file.as_uri() + fragment)
        return self.page

    def show(self, state: State) -> Page:
        """Show another state in the open page by its address, far quicker than to open one; as if the hand rested."""
        if not self.page.url.startswith("file:"):
            self.open()
        self.page.evaluate("state => { location.hash = store.toFragment(state); }", dataclasses.asdict(state))
        self.drawn()
        assert not self.page.is_visible("#notice"), state
        self.page.evaluate("stage.showRest()")
        return self.page

    def sized(self, width: int, height: int) -> None:
        """Give the window another size."""
        if self.page.viewport_size != {"width": width, "height": height}:
            self.page.set_viewport_size({"width": width, "height": height})
            self.drawn()

    def act(self, action: str, *words: Any) -> None:
        """Do something that changes the state (fill, click, check, …), and wait until it is to be seen.

        The next act then meets no control that is about to move.
        """
        getattr(self.page, action)(*words)
        self.drawn()

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            self.page.keyboard.press(key)
        self.drawn()

    def readouts(self) -> dict[str, str]:
        """The numbers below the first panel."""
        pairs = self.page.eval_on_selector_all(
            "#readouts div", "all => all.map(row => [...row.children].map(c => c.textContent))"
        )
        return dict(pairs)

    def cells(self, selector: str) -> list[list[str]]:
        """The words in the cells of a table's rows."""
        return self.page.eval_on_selector_all(selector, "rows => rows.map(r => [...r.cells].map(c => c.textContent))")

    def drawn(self) -> None:
        """Wait until what has been done is to be seen: a few frames."""
        self.page.evaluate("async () => { for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame); }")

    def settled(self) -> None:
        """Wait until the address and what is read out have followed."""
        self.page.wait_for_timeout(450)

    def blameless(self) -> None:
        """Assert that the page complained of nothing and asked for nothing but its own file."""
        assert self.complaints == []
        asked = {url.split("#")[0] for url in self.requests if not url.startswith(("blob:", "about:"))}
        assert asked <= {self.file.as_uri()}


def number(text: str) -> float:
    """The number that the page writes."""
    return float(text.replace("−", "-").replace("∞", "inf").split()[0].replace("–", "nan"))


def rule_of(state: State) -> OuterRule:
    return OuterRule(state.lr, state.momentum, state.nesterov, state.form)
