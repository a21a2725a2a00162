"""The shell of a report: elements that escape their text by construction, and one self-contained page.

A report shows text from files of unknown origin. `tag` escapes every text that it gets; only `Html` made here stays
unchanged. By the page's content security policy a browser loads nothing, and runs only the page's scripts, each by its
hash. No text of a file can change them. The looks are `page.css`; those of charts, and all colours, are `plot.css`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import os
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

STYLES = ("uplot/uPlot.min.css", "plot.css", "page.css")
DOCTYPE = "<!doctype html>"
"""What a page begins with."""
LONGEST = 4000
"""Characters of a text that are shown."""
# Characters that have no picture, or turn the direction of those after them; a lone surrogate cannot be written at all.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff]"
)
_MINUS = re.compile(r"(?<![\w.-])-(?=\.?\d)|(?<=\de)-(?=\d)")
_NUMBER = re.compile(r"([-\N{MINUS SIGN}+]?[\d.,]+(e[-\N{MINUS SIGN}+]?\d+)?( ?%)?( \(\d+/\d+\))?|\[\S+, \S+\])?")
"""Nothing, a number, a share with its counts, or an interval."""
_OPTION = re.compile(r"(--[a-z][a-z-]*(?:\.[a-z-]+)*(?: [\w.]+(?<!\.))?)")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


class Html(str):
    """Text that is HTML already: made by this package, never read from a file."""

    __slots__ = ()


# -------------------------------------------------------------------------------------------------------------- text


def clean(text: object) -> str:
    """Make a text fit to be shown: no invisible characters, and no more than `LONGEST`."""
    cleaned = str(text)
    if len(cleaned) > LONGEST:
        cleaned = f"{cleaned[:LONGEST]}… ({len(cleaned) - LONGEST:,} more characters)"
    return _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", cleaned)


def minus(text: str) -> str:
    """Give the numbers in a text true minus signs; hyphens in words and names stay.

    >>> minus("-0.5, 1e-3, momentum-free, K-3")
    '−0.5, 1e−3, momentum-free, K-3'
    """
    return _MINUS.sub("\N{MINUS SIGN}", text)


def written(value: float, spec: str, unit: str = "") -> str:
    """Write a number with a true minus sign and its unit; nothing for one that is not finite.

    >>> written(-0.123, ".2g"), written(5.2, ".0f", " %"), written(float("nan"), "g")
    ('−0.12', '5 %', '')
    """
    return f"{minus(format(value, spec))}{unit}" if math.isfinite(value) else ""


def counted(number: int, thing: str) -> str:
    """Count a thing in words.

    >>> counted(1, "round"), counted(2000, "round")
    ('1 round', '2,000 rounds')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def relative(target: Path, page_folder: Path) -> str:
    """Return the path of a file as seen from the folder of a page."""
    # pathlib's relative paths do not go up before Python 3.12
    return Path(os.path.relpath(target.resolve(), page_folder.resolve())).as_posix()


# ---------------------------------------------------------------------------------------------------------- elements


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Make an element. Children that are not `Html` are escaped; so is every attribute.

    Args:
        name: name of the element, from our own code.
        children: texts, numbers and elements; None is left out.
        attributes: `class_`, `aria_label` and so on; None and False are left out, True has no value.

    >>> tag("p", "a < b", class_="x")
    '<p class="x">a &lt; b</p>'
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        word = key.rstrip("_").replace("_", "-")
        parts.append(word if value is True else f'{word}="{html.escape(clean(value))}"')
    start = f"<{' '.join(parts)}>"
    return Html(start if name in ("input", "meta") else f"{start}{join(children)}</{name}>")


def join(children: Iterable[object], separator: str = "") -> Html:
    """Join children, escaped where they are not `Html`; None is left out."""
    parts = (child if isinstance(child, Html) else html.escape(clean(child)) for child in children if child is not None)
    return Html(separator.join(parts))


def link(text: object, target: str | None) -> Html:
    """Return a link to a file by its relative path, or only the text without one."""
    if target is None:
        return join([text])
    # Every part is quoted, the colon too, so that no path can be read as an address of another kind.
    return tag("a", text, href="/".join(quote(os.fsencode(part), safe="") for part in PurePosixPath(target).parts))


def table(
    header: Sequence[object], rows: Sequence[Sequence[object]], *, caption: str, hide_caption: bool = False
) -> Html:
    """Return a table with a caption; the first column heads its rows, and columns of numbers are set to the right.

    Args:
        header: names of the columns.
        rows: their cells; None is an empty one.
        caption: caption of the table.
        hide_caption: leave the caption to screen readers, where the heading above says the same.
    """
    columns = zip(*rows, strict=True) if rows else [("-",)] * len(header)
    numeric = [all(map(_reads_as_number, column)) for column in columns]

    def cell(name: str, index: int, content: object, **scope: str) -> Html:
        # A column of long texts needs a least width, or it would become a tower.
        is_long = not isinstance(content, Html) and len(str(content)) > 14
        looks = "n" if numeric[index] else "t" if is_long else None
        text = minus(str(content)) if numeric[index] and content is not None else content
        return tag(name, text, **scope, class_=looks)

    heads = (
        tag("th", title, scope="col", class_="n" if right else None)
        for title, right in zip(header, numeric, strict=True)
    )
    body = (
        tag("tr", cell("th", 0, row[0], scope="row"), *(cell("td", index, row[index]) for index in range(1, len(row))))
        for row in rows
    )
    title = tag("caption", caption, class_="quiet" if hide_caption else None)
    return scroll(tag("table", title, tag("thead", tag("tr", *heads)), tag("tbody", *body)), caption)


def _reads_as_number(cell: object) -> bool:
    return cell is None or (not isinstance(cell, Html) and bool(_NUMBER.fullmatch(str(cell))))


def scroll(element: Html, label: str) -> Html:
    """Put an element that may be wider than a phone in a box that scrolls by finger and by keyboard."""
    return tag("div", element, class_="wide", role="region", aria_label=label, tabindex="0")


def section(title: str, *children: object, anchor: str) -> Html:
    """Return a part of the page under a heading."""
    return tag("section", tag("h2", title, id=anchor), *children, aria_labelledby=anchor)


def notes(texts: Sequence[object]) -> Html | None:
    """Return a list of sentences; None for no sentences."""
    return tag("ul", *(tag("li", text) for text in texts)) if texts else None


def with_options(text: str) -> Html:
    """Return a sentence with its command-line options set as code, which a line does not break."""
    return join(tag("code", part) if number % 2 else part for number, part in enumerate(_OPTION.split(text)))


def image(png: bytes, alt: str) -> Html:
    """Return a picture that lies in the page itself; `tag` would cut its bytes off as a text that is too long."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return Html(f'<img src="{source}" alt="{html.escape(clean(alt))}" style="max-width:100%;height:auto">')


def details(summary: str, *children: object) -> Html:
    """Return a part that is folded up until it is opened."""
    return tag("details", tag("summary", summary), *children)


# -------------------------------------------------------------------------------------------------------- whole page


def page(
    title: str,
    subtitle: object,
    *children: object,
    kind: str = "",
    problems: Sequence[str] = (),
    refresh: float = 0,
    scripts: Sequence[str] = (),
    framed: Sequence[str] = (),
    style: str = "",
) -> str:
    """Return the whole document.

    Args:
        title: title of the page.
        subtitle: the line below it.
        children: the sections.
        kind: "run" or "sweep", for the notice at the top.
        problems: sentences about what is missing or wrong in the folder, for that notice.
        refresh: seconds after which the page is written again and shows its newest self; 0 without a watch.
        scripts: scripts that the page runs at its end, our own code alone; `plot.script()` draws its charts.
        framed: scripts of our own pages that are shown in a frame of this one, which its policy must allow, too.
        style: further looks.
    """
    scripts = [*scripts, *([asset("watch.js")] if refresh else [])]
    allowed = [*scripts, *framed]
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in allowed)
    policy = "; script-src ".join(
        [_POLICY, *([" ".join(f"'sha256-{digest}'" for digest in digests)] if allowed else [])]
    )
    head = join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", name="generator", content="twophase"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", title),
            tag("style", Html("".join(map(asset, STYLES)) + style)),
        ]
    )
    watch = _watch(kind, refresh) if refresh else None
    notice = tag("div", watch, notes(problems), class_="notice", role="note") if watch or problems else None
    body = tag(
        "body",
        tag("header", tag("h1", title), tag("p", subtitle, class_="lead")),
        tag("main", notice, *children),
        tag(
            "footer",
            tag("p", "Written by twophase. The file is complete in itself and asks for nothing from elsewhere."),
        ),
        *(tag("script", Html(script)) for script in scripts),
    )
    return f'{DOCTYPE}\n<html lang="en"><head>{head}</head>{body}</html>\n'


def _watch(kind: str, refresh: float) -> Html:
    """Say when the page was written; `watch.js` shows the checkbox, which without script has nothing to stop."""
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    text = f"The {kind} is in progress. This page was written at {now}, and is written again every {refresh:g} s. "
    box = tag("input", type="checkbox", id="again", checked=True, autocomplete="off", data_seconds=f"{refresh:g}")
    label = tag("label", box, f" Show the newest by itself every {refresh:g} s")
    return join([tag("p", text, tag("a", "Show the newest", href="")), tag("p", label, hidden=True)])


@cache
def asset(name: str) -> str:
    """Return a text file of this module's folder."""
    return files("twophase.report").joinpath(name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- templates


class Link(NamedTuple):
    """A cell of a table that leads somewhere: its text, and the address that `href` made; None for no link."""

    text: str
    href: str | None


def render(
    template: str, *, scripts: Sequence[str] = (), styles: Sequence[str] = (), framed: Sequence[str] = (), **values: Any
) -> str:
    """Return a page: one file with its styles, scripts and data inside, which loads nothing.

    Whatever a value holds is shown as text: a template escapes it, and the page's content security policy lets a
    browser load nothing and run these scripts alone.

    Args:
        template: name of a file in `templates/` that extends `base.html`.
        scripts: names of further files of this folder; uPlot and `charts.js` are always there.
        styles: the same of styles; `page.css` is always there.
        framed: texts of the scripts of a page of ours that is shown in a frame of this one.
        values: what the template shows: `title`, `problems` (sentences for the notice at the top), `refresh` (seconds
            after which a browser loads the page again; 0 for never), and its own.
    """
    script = "".join(map(asset, ("uplot/uPlot.iife.min.js", "charts.js", *scripts)))
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, *framed)]
    shell = {
        "script": Markup(script),  # noqa: S704 - our own files
        "style": Markup("".join(map(asset, (*STYLES, *styles)))),  # noqa: S704
        "policy": "; script-src ".join([_POLICY, " ".join(f"'sha256-{digest}'" for digest in hashes)]),
        "now": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        "refresh": 0,
        "problems": (),
    }
    return _templates().get_template(template).render(shell | values)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
    )
    environment.filters["number"] = number
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _shown(value: object) -> object:
    """Return what stands on the page for a value of a template."""
    return value if isinstance(value, Markup) else "" if value is None else clean(value)


def number(value: float | None, spec: str = ".4g") -> str:
    """Write a number with a true minus sign, a whole one in full; nothing for one that is missing or not finite.

    >>> number(-0.123, ".2g"), number(12345), number(float("nan"))
    ('−0.12', '12,345', '')
    """
    if value is None or not math.isfinite(value):
        return ""
    spec = ",.0f" if value % 1 == 0 and abs(value) < 1e9 else spec
    return format(value, spec).replace("-", "\N{MINUS SIGN}")


def href(target: Path, page_folder: Path) -> str:
    """Return the address of a file as seen from the folder of a page."""
    # every part is quoted, the colon too, so that no name of a file is read as an address of another kind
    return quote(os.fsencode(relative(target, page_folder)))
