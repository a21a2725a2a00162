"""The shell of a report: elements that escape their text by construction, and one self-contained page.

Whatever a report shows comes from files of unknown origin. `tag` escapes every text that it is given, only
`Html` made here is taken as it is, and the page's content security policy lets a browser run and load nothing at all,
except, by its hash, the script that a watched page has (`watch.py`).
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import quote

LONGEST = 4000
"""Characters of a text that are shown."""
# Characters that have no picture, or turn the direction of those after them; a lone surrogate cannot be written at all.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff]"
)
_MINUS = re.compile(r"(?<![\w.-])-(?=\.?\d)|(?<=\de)-(?=\d)")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


class Html(str):
    """Text that is HTML already: made by this package, never read from a file."""

    __slots__ = ()


def clean(text: object) -> str:
    """Make a text fit to be shown: no invisible characters, and no more than `LONGEST`."""
    shown = str(text)
    if len(shown) > LONGEST:
        shown = f"{shown[:LONGEST]}… ({len(shown) - LONGEST:,} more characters)"
    return _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", shown)


def minus(text: str) -> str:
    """Give the numbers in a text true minus signs; hyphens in words and names stay.

    >>> minus("-0.5, 1e-3, momentum-free, K-3")
    '−0.5, 1e−3, momentum-free, K-3'
    """
    return _MINUS.sub("\N{MINUS SIGN}", text)


def counted(number: int, thing: str) -> str:
    """Count a thing in words.

    >>> counted(1, "round"), counted(2000, "round")
    ('1 round', '2,000 rounds')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Make an element. Children that are not `Html` are escaped; so is every attribute.

    Args:
        name: of the element, from our own code.
        children: texts, numbers and elements; None is left out.
        attributes: `class_`, `aria_label` and so on; None and False are left out, True has no value.

    >>> tag("p", "a < b", class_="x")
    '<p class="x">a &lt; b</p>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        word = key.rstrip("_").replace("_", "-")
        words.append(word if value is True else f'{word}="{html.escape(clean(value))}"')
    start = f"<{' '.join(words)}>"
    if name in ("br", "input", "meta"):
        return Html(start)
    return Html(f"{start}{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """Join children, escaped where they are not `Html`."""
    parts = (child if isinstance(child, Html) else html.escape(clean(child)) for child in children if child is not None)
    return Html("".join(parts))


def link(text: object, target: str | None, **attributes: object) -> Html:
    """Return a link to a file by its relative path, or only the text without one."""
    if target is None:
        return join([text])
    # Every part is quoted, the colon too, so that no path can be read as an address of another kind.
    path = PurePosixPath(target)
    return tag("a", text, href="/".join(quote(part, safe="") for part in path.parts), **attributes)


def download(text: str, name: str, content: str) -> Html:
    """Return a link that saves a file which the page itself carries."""
    data = base64.b64encode(content.encode("utf-8", "replace")).decode("ascii")
    return Html(f'<a download="{html.escape(name)}" href="data:text/csv;base64,{data}">{html.escape(text)}</a>')


def table(
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    numbers: Sequence[int] = (),
    hide_caption: bool = False,
) -> Html:
    """Return a table with a caption; the first column heads its rows.

    Args:
        header: names of the columns.
        rows: their cells.
        caption: what the table shows.
        numbers: places of the columns of numbers, which are set to the right.
        hide_caption: leave the caption to screen readers, where the heading above says the same.
    """
    right = dict.fromkeys(numbers, "n")
    head = tag("tr", *(tag("th", cell, scope="col", class_=right.get(i)) for i, cell in enumerate(header)))
    body = []
    for row in rows:
        cells = [tag("td", cell, class_=right.get(i) or _long(cell)) for i, cell in enumerate(row)]
        if row:
            cells[0] = tag("th", row[0], scope="row", class_=right.get(0) or _long(row[0]))
        body.append(tag("tr", *cells))
    caption_element = tag("caption", caption, class_="quiet" if hide_caption else None)
    return scroll(tag("table", caption_element, tag("thead", head), tag("tbody", *body)), caption)


def _long(cell: object) -> str | None:
    """Return the class of a cell of so many words that a narrow column would make it a tower."""
    return "t" if not isinstance(cell, Html) and len(str(cell)) > 14 else None


def scroll(element: Html, label: str) -> Html:
    """Put an element that may be wider than a phone in a box that scrolls by finger and by keyboard."""
    return tag("div", element, class_="wide", role="region", aria_label=label, tabindex="0")


def section(title: str, *children: object, anchor: str) -> Html:
    """Return a part of the page under a heading."""
    return tag("section", tag("h2", title, id=anchor), *children, aria_labelledby=anchor)


def notes(texts: Sequence[object]) -> Html | None:
    """Return a list of sentences; None where there are none."""
    return tag("ul", *(tag("li", text) for text in texts)) if texts else None


_OPTION = re.compile(r"(--[a-z][a-z-]*(?:\.[a-z-]+)*(?: [\w.]+(?<!\.))?)")


def with_options(text: str) -> Html:
    """Return a sentence with its command-line options set as code, which a line does not break."""
    return join(tag("code", part) if place % 2 else part for place, part in enumerate(_OPTION.split(text)))


def details(summary: str, *children: object) -> Html:
    """Return a part that is folded up until it is opened."""
    return tag("details", tag("summary", summary), *children)


def page(title: str, subtitle: object, *children: object, script: str = "") -> str:
    """Return the whole document.

    Args:
        title: of the page.
        subtitle: the line below it.
        children: the sections.
        script: runs at the end of the page; from our own code, the same whatever the files hold.
    """
    run = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{_POLICY}; script-src 'sha256-{run}'" if script else _POLICY
    head = join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", title),
            Html(f"<style>{_STYLE}</style>"),
        ]
    )
    without = "no script but the one that shows the newest" if script else "no script"
    body = tag(
        "body",
        tag("header", tag("h1", title), tag("p", subtitle, class_="lead")),
        tag("main", *children),
        tag("footer", tag("p", f"Written by twophase report. The file is complete in itself: {without}, no network.")),
        Html(f"<script>{script}</script>") if script else None,
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n'


_STYLE = """
:root{--paper:#fdfdfb;--ink:#1b1b1b;--soft:#595959;--rule:#8a8a8a;--hair:#d9d9d4;--panel:#f4f4ef;--link:#0b4f8a;
--warn:#8a3b00;--c0:#000;--c1:#0072b2;--c2:#c65400;--c3:#00805d;--c4:#b0538a;--c5:#9a6a00;--c6:#2a86ba;--c7:#6b6b6b}
@media(prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e6e6e3;--soft:#b0b0ab;--rule:#85857f;--hair:#34383c;
--panel:#1d2125;--link:#8cc4f4;--warn:#ffb27d;--c0:#f0f0f0;--c1:#5fb4e8;--c2:#ff9150;--c3:#35cf9f;--c4:#e59cc7;
--c5:#f2bb3d;--c6:#8fd0f5;--c7:#a8a8a8}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:62rem;padding:1.5rem 1rem 3rem;background:var(--paper);color:var(--ink);
font:1.0625rem/1.55 Charter,"Bitstream Charter","Source Serif 4","Iowan Old Style",Georgia,"DejaVu Serif",serif}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .3rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.6rem 0 .6rem;padding-top:.7rem;border-top:1px solid var(--hair)}
h3{font-size:1.0625rem;margin:1.6rem 0 .4rem}
p,ul,dl{margin:.5rem 0;max-width:44rem}
.lead{color:var(--soft);overflow-wrap:anywhere}
a{color:var(--link)}
:focus-visible{outline:3px solid var(--c1);outline-offset:2px}
li code{white-space:nowrap}
code,pre{font:.875rem/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{background:var(--panel);padding:.7rem .9rem;white-space:pre-wrap;overflow-wrap:anywhere;margin:.5rem 0}
table,figure,dl,.legend,summary,svg text{font-family:system-ui,-apple-system,"Segoe UI","Helvetica Neue",Arial,
"DejaVu Sans",sans-serif}
.wide{overflow-x:auto;margin:.8rem 0}
table{border-collapse:collapse;font-size:.875rem;line-height:1.4;font-variant-numeric:tabular-nums;
border-top:2px solid var(--ink);border-bottom:2px solid var(--ink)}
caption{text-align:left;color:var(--soft);padding:0 0 .4rem;font-size:.875rem;max-width:min(44rem,calc(100vw - 2rem))}
th,td{padding:.28rem .8rem .28rem 0;text-align:left;vertical-align:top;font-weight:400}
thead th{border-bottom:1px solid var(--ink);font-weight:600;vertical-align:bottom}
.n{text-align:right}
.t{min-width:9rem;max-width:30rem;overflow-wrap:anywhere}
.maps,.frames{display:flex;flex-wrap:wrap;gap:0 2.5rem;align-items:flex-start}
.maps>div,.frames>div{max-width:100%}
.maps p{max-width:24rem}
.once{white-space:nowrap}
td ul{margin:0;padding:0;list-style:none;max-width:44rem;overflow-wrap:anywhere}
.quiet{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
dl{display:grid;grid-template-columns:minmax(8rem,max-content) 1fr;gap:.15rem 1.2rem;font-size:.9375rem;
font-variant-numeric:tabular-nums}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
.verdict{border-left:4px solid var(--c1);padding:.1rem 0 .1rem .9rem;margin:1rem 0}
.notice{border-left:4px solid var(--warn);background:var(--panel);padding:.5rem .9rem;margin:1rem 0}
.notice p,.notice ul{margin:.2rem 0}
figure{margin:1.2rem 0 1.6rem;max-width:47rem}
figcaption{font-size:.875rem;color:var(--soft);margin-top:.3rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1.2rem;padding:0;margin:.2rem 0;font-size:.875rem}
.legend svg{width:2.4rem;height:.8rem;vertical-align:-.05rem;margin-right:.4rem}
figure>svg{display:block;width:100%;height:auto}
.narrow{display:none!important}
@media(max-width:34rem){.narrow{display:block!important}.broad{display:none!important}body{padding:1rem 1rem 2rem}
h1{font-size:1.4rem}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.4rem}}
svg text{fill:var(--ink)}
svg .t{fill:var(--soft)}
svg .g{stroke:var(--hair);stroke-width:1}
svg .a{stroke:var(--ink);stroke-width:1;fill:none}
svg .r{stroke:var(--rule);stroke-width:1;stroke-dasharray:1 3}
svg .tri{fill:var(--ink)}
svg .l{fill:none;stroke-width:1.8;stroke-linejoin:round}
.heat td,.heat th{padding:.35rem .55rem;text-align:center;vertical-align:middle;border:2px solid var(--paper)}
.heat tbody th,.heat thead th{border-bottom:2px solid var(--paper);font-weight:400;white-space:nowrap}
.heat{border:0}
.heat td a{color:inherit}
.heat small a{white-space:nowrap}
.heat small{display:block;font-size:.75rem}
.best{outline:3px solid var(--ink);outline-offset:-3px;font-weight:700}
.gone{background:repeating-linear-gradient(45deg,var(--panel) 0 5px,var(--hair) 5px 6px);color:var(--ink)}
.gone span,.void span{background:var(--panel);padding:0 .25rem}
.void{background:var(--panel);color:var(--soft);font-style:italic}
summary{cursor:pointer;font-size:.9375rem;padding:.3rem 0}
footer{margin-top:3rem;border-top:1px solid var(--hair);color:var(--soft);font-size:.875rem}
@media print{body{max-width:none}details>*{display:block}}
""" + "".join(f".k{n}{{stroke:var(--c{n})}}.f{n}{{fill:var(--c{n})}}" for n in range(8))


def relative(target: Path, page_folder: Path) -> str:
    """Return the path of a file as seen from the folder of a page."""
    # pathlib's relative paths do not go up before Python 3.12
    return Path(os.path.relpath(target.resolve(), page_folder.resolve())).as_posix()
