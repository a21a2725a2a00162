"""Pages from the templates of this folder: one file each, with styles, scripts and data inside, which loads nothing.

A page shows text from files of unknown origin. Templates escape every value; by its content security policy a browser
loads nothing, and runs only the page's script, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from twophase.runs.folder import REPORT

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "script-src 'sha256-{}'"
)
_LONGEST = 4000
"""Characters of a text that are shown."""
# Characters that have no picture, or turn the direction of those after them; a lone surrogate cannot be written at all.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff]"
)


class Link(NamedTuple):
    """A cell of a table that leads somewhere: its text, and the address that `href` made; None for no link."""

    text: str
    href: str | None


def run_link(name: str, folder: Path | None, page_folder: Path) -> Link:
    """Return the link to a run's own page, or to its folder; without one its name alone."""
    if folder is None:
        return Link(name, None)
    return Link(name, href(folder / REPORT if (folder / REPORT).is_file() else folder, page_folder))


def render(template: str, *, scripts: Sequence[str] = (), styles: Sequence[str] = (), **values: Any) -> str:
    """Return a page.

    Args:
        template: name of a file in `templates/` that extends `base.html`.
        scripts: names of further files of this folder; uPlot and `charts.js` are always there.
        styles: the same of styles; `page.css` is always there.
        values: what the template shows: `title`, `problems` (sentences for the notice at the top), `refresh` (seconds
            after which a browser loads the page again; 0 for never), and its own.
    """
    folder = files("twophase.report")
    script, style = (
        "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)
        for names in (
            ("uplot/uPlot.iife.min.js", "charts.js", *scripts),
            ("uplot/uPlot.min.css", "page.css", *styles),
        )
    )
    shell = {
        "script": Markup(script),  # noqa: S704 - our own files
        "style": Markup(style),  # noqa: S704
        "policy": _POLICY.format(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        "now": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        "refresh": 0,
        "problems": (),
    }
    return _ENVIRONMENT.get_template(template).render(shell | values)


def number(value: float) -> str:
    """Write a number in four digits with a true minus sign, a whole one in full; nothing for one that is not finite.

    >>> number(-0.12345), number(12345), number(float("nan"))
    ('−0.1235', '12,345', '')
    """
    if not math.isfinite(value):
        return ""
    return format(value, ",.0f" if value % 1 == 0 and abs(value) < 1e9 else ".4g").replace("-", "\N{MINUS SIGN}")


def clean(value: object) -> str:
    """Return what stands on a page for a value: no invisible characters, and not too many; markup of ours as it is."""
    if isinstance(value, Markup):
        return value
    text = "" if value is None else str(value)
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text) - _LONGEST:,} more characters)"
    return _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", shown)


def relative(target: Path, page_folder: Path) -> str:
    """Return the path of a file as seen from the folder of a page."""
    # pathlib's relative paths do not go up before Python 3.12
    return Path(os.path.relpath(target.resolve(), page_folder.resolve())).as_posix()


def href(target: Path, page_folder: Path) -> str:
    """Return the address of a file as seen from the folder of a page."""
    # every part is quoted, the colon too, so that no name of a file is read as an address of another kind
    return quote(os.fsencode(relative(target, page_folder)))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    finalize=clean,
    undefined=StrictUndefined,
)
_ENVIRONMENT.filters["number"] = number
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
