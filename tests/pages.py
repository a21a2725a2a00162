"""What every page keeps to, read as a browser without network reads it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from twophase.cli.main import main

EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\ud800=cmd|' /C calc'!A0"
"""A text that would be markup, a script, an attribute, a formula, or turned round, if it were not escaped."""


class Reader(HTMLParser):
    """The elements and addresses of a page; refuses event handlers and elements that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.tags, self.links, self.ids = list[str](), set[str](), list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attrs)
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "data", "poster", "srcset")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.open += [tag] if tag not in ("meta", "input") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    """Return a page's elements; refuses a page that is not well formed, loads something, or is above 600 kB."""
    assert len(text.encode()) < 600_000
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert not {"img", "iframe", "object", "embed", "link", "base", "form"} & reader.tags
    assert all(re.fullmatch(r"[\w./%-]+", target) for target in reader.links)
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    ]
    policy = html.unescape(re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[0])
    assert policy.startswith("default-src 'none';")
    assert policy.partition("script-src ")[2].split() == [f"'sha256-{each}'" for each in hashes]
    return reader


def data_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(data) for data in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)]


def written(folder: Path, *words: str) -> str:
    """Write the report of a folder by the command; return the page, which `read` takes."""
    assert main(["report", str(folder), *words]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    read(text)
    return text
