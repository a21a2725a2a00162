"""What every page keeps to, read as a browser without network reads it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import dataclass, field
from typing import Any

from sitecheck import Page

EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\ud800=cmd|' /C calc'!A0"
"""A text that would be markup, a script, an attribute, a formula, or turned round, if it were not escaped."""


@dataclass
class Reader(Page):
    """The elements and links of a page; refuses event handlers and elements that are not closed."""

    open: list[str] = field(default_factory=list)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        super().handle_starttag(tag, attrs)
        assert not any(name.startswith("on") for name, _ in attrs)
        self.open += [tag] if tag not in ("meta", "input") else []

    def handle_endtag(self, tag: str) -> None:
        """Match the end of an element with its beginning."""
        super().handle_endtag(tag)
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    """Return a page's elements; refuses a page that is not well formed, loads something, or is above 600 kB."""
    assert len(text.encode()) < 600_000
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert not {"img", "iframe", "object", "embed", "link", "base", "form"} & reader.tags
    assert all(re.fullmatch(r"[\w./%-]+", target) for target in reader.links + reader.loaded)
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    ]
    policy = html.unescape(re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[0])
    assert policy.startswith("default-src 'none';")
    assert policy.partition("script-src ")[2].split() == [f"'sha256-{each}'" for each in hashes]
    return reader


def data_of(text: str) -> list[dict[str, Any]]:
    """Return the data of the charts of a page."""
    return [json.loads(data) for data in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)]
