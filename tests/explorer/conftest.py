"""One open page for all tests of the explorer: a start of it costs more than most tests do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from explorerview import View

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[View]:
    """The page that `view` hands out."""
    view = View(browser, tmp_path_factory.mktemp("explorer"))
    yield view
    view.page.close()


@pytest.fixture
def view(opened: View, request: pytest.FixtureRequest) -> Iterator[View]:
    """A page on a desk, as high as the file's HEIGHT and perhaps as another test left it: `open` or `show` a state."""
    opened.complaints.clear()
    opened.requests.clear()
    opened.sized(1280, getattr(request.module, "HEIGHT", 900))
    yield opened
    opened.blameless()
