"""Checks a built documentation site: links that lead nowhere, and whatever a page would load from elsewhere.

    python tests/sitecheck.py site

The pages are read as a browser without network reads them. Links to other sites are fine; styles, scripts, pictures and
fonts must be files of the site. Prints a line for each fault and ends with status 1 where there is one.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

LOADING = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}
"""Kinds of `<link>` for which a browser asks for something."""
SCHEME = re.compile(r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*:|//)")
IN_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


@dataclass
class Page(HTMLParser):
    """What a page has and wants."""

    ids: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)
    in_style: bool = False

    def __post_init__(self) -> None:
        """The parser wants to be begun."""
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Sort the addresses of an element by what a browser does with them."""
        have = {name: value for name, value in attrs if value is not None}
        self.in_style = tag == "style"
        self.tags.add(tag)
        if "id" in have:
            self.ids.append(have["id"])
        if tag in ("a", "area") and "href" in have:
            self.links.append(have["href"])
        if tag == "link" and set(have.get("rel", "").split()) & LOADING:
            self.loaded.append(have["href"])
        elif tag == "link" and "href" in have and have.get("rel") != "canonical":
            self.links.append(have["href"])
        self.loaded += [have[name] for name in ("src", "data", "poster") if name in have]
        self.loaded += [each.split()[0] for each in have.get("srcset", "").split(",") if each.strip()]
        self.loaded += wanted_by_style(have.get("style", ""))

    def handle_data(self, data: str) -> None:
        """Styles inside a page load too."""
        if self.in_style:
            self.loaded += wanted_by_style(data)

    def handle_endtag(self, tag: str) -> None:
        """The end of a style."""
        self.in_style = self.in_style and tag != "style"


def wanted_by_style(text: str) -> list[str]:
    """What a style sheet loads."""
    return [first or second for first, second in IN_STYLE.findall(text)]


def read(path: Path) -> Page:
    """A page of the site."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


def pages_of(site: Path) -> dict[Path, Page]:
    """Every page of a site, by its resolved path."""
    return {path: read(path) for path in sorted(site.resolve().rglob("*.html"))}


def faults(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Everything that is wrong with a site of these pages, a line each."""
    site = site.resolve()
    lines = [] if pages else [f"{site}: no pages"]
    for path, page in pages.items():
        here = path.relative_to(site)
        lines += [
            f"{here}: two elements are called {name!r}" for name in sorted(set(page.ids)) if page.ids.count(name) > 1
        ]
        if here.name == "404.html":  # is shown for any missing address, so its links begin at the root of the server
            continue
        lines += [f"{here}: {fault}" for link in page.links if (fault := bad_link(link, path, pages, site))]
        lines += [f"{here}: {fault}" for address in page.loaded if (fault := bad_load(address, path, site))]
    for path in sorted(site.rglob("*.css")):
        wanted = wanted_by_style(path.read_text(encoding="utf-8"))
        lines += [
            f"{path.relative_to(site)}: {fault}" for address in wanted if (fault := bad_load(address, path, site))
        ]
    return lines


def bad_link(link: str, path: Path, pages: dict[Path, Page], site: Path) -> str | None:
    """What is wrong with a link on a page, if it is one within the site."""
    if SCHEME.match(link):
        return None
    address, anchor = urldefrag(link)
    target = (path.parent / unquote(address.split("?")[0])).resolve() if address else path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return f"link to {link}, which is not there"
    if not target.is_relative_to(site):
        return f"link to {link}, which is outside of the site"
    if anchor and target in pages and unquote(anchor) not in pages[target].ids:
        return f"link to {link}, where no element is called {unquote(anchor)!r}"
    return None


def bad_load(address: str, path: Path, site: Path) -> str | None:
    """What is wrong with an address that a browser loads by itself."""
    if address.startswith(("data:", "#")):
        return None
    if SCHEME.match(address):
        return f"loads {address} from elsewhere"
    target = (path.parent / unquote(address.split("?", maxsplit=1)[0].split("#", maxsplit=1)[0])).resolve()
    if not target.exists():
        return f"loads {address}, which is not there"
    return None if target.is_relative_to(site) else f"loads {address}, which is outside of the site"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/sitecheck.py FOLDER")
    lines = faults(Path(sys.argv[1]), pages_of(Path(sys.argv[1])))
    print("\n".join(lines) or f"{sys.argv[1]}: every link leads somewhere, nothing is loaded from elsewhere")
    sys.exit(1 if lines else 0)
