"""The documentation site: it builds without a warning, every link leads somewhere, nothing is loaded from elsewhere.

The site is built once for all workers of a test run, from copies, so that nothing is written into the repository.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

import sitecheck
import twophase
from browser import Watched, axe_violations
from twophase import theory
from twophase.cli.main import main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The built site. Workers of pytest-xdist wait for the one that builds."""
    for package, name in (("zensical", "zensical"), ("mkdocstrings_handlers.python", "mkdocstrings-python")):
        with suppress(ModuleNotFoundError):
            if importlib.util.find_spec(package) is not None:
                continue
        pytest.skip(f"{name} is not installed; the extra docs brings it")
    base = tmp_path_factory.getbasetemp()
    project = (base if worker_id == "master" else base.parent) / "documentation"
    with FileLock(f"{project}.lock"):
        if not (project / "said").exists():
            build(project)
    said = (project / "said").read_text()
    assert "No issues found" in said, said
    return project / "site"


def build(project: Path) -> None:
    """Build in a copy of what the site is made of, and keep what the builder says."""
    for name in ("docs", "src"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", project)
    assert main(["explore", "--out", str(project / "docs/assets/explore.html")]) == 0
    words = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, check=False)
    (project / "said").write_text(f"{done.stdout}{done.stderr}\nstatus {done.returncode}")


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, sitecheck.Page]:
    """The pages of the built site, read once."""
    return sitecheck.pages_of(site)


def pages_of(nav: object) -> list[str]:
    """The pages that a navigation names, in its order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages_of(entry)]  # type: ignore[union-attr]


# --- what needs no build ------------------------------------------------------------------------------------------


def test_navigation_has_every_page() -> None:
    """Every page under docs/ is in the navigation of mkdocs.yml once, and nothing else is."""
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    named = pages_of(CONFIG["nav"])
    assert sorted(named) == sorted(there), f"not in both: {sorted(set(named) ^ there)}; write them into mkdocs.yml"


SOUND = '<html><head><link rel="stylesheet" href="a.css"></head><body><h1 id="top">T</h1><a href="#top">up</a></body>'


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ('<a href="there.html">x</a>', "link to there.html, which is not there"),
        ('<a href="#low">x</a>', "link to #low, where no element is called 'low'"),
        ('<a href="index.html#low">x</a>', "link to index.html#low, where no element is called 'low'"),
        ('<p id="top">x</p>', "two elements are called 'top'"),
        ('<img src="https://example.org/x.png">', "loads https://example.org/x.png from elsewhere"),
        ('<script src="//example.org/x.js"></script>', "loads //example.org/x.js from elsewhere"),
        ('<link rel="preconnect" href="https://example.org">', "loads https://example.org from elsewhere"),
        ("<style>@font-face{src:url(https://example.org/x)}</style>", "loads https://example.org/x from elsewhere"),
        ("<img srcset='x.png 1x'>", "loads x.png, which is not there"),
        ('<a href="../source.py">x</a>', "link to ../source.py, which is outside of the site"),
        ('<img src="../source.py">', "loads ../source.py, which is outside of the site"),
        ('<a href="https://example.org">x</a><img src="data:image/png;base64,AA">', None),
    ],
)
def test_faults_are_found(tmp_path: Path, page: str, message: str | None) -> None:
    """The checker finds each kind of fault in a site that is sound without it, and no more."""
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "source.py").touch()
    (site / "a.css").write_text("p{background:url('data:,')}")
    (site / "index.html").write_text(SOUND)
    assert sitecheck.faults(site, sitecheck.pages_of(site)) == []
    (site / "index.html").write_text(SOUND + page)
    assert sitecheck.faults(site, sitecheck.pages_of(site)) == ([] if message is None else [f"index.html: {message}"])


# --- the built site -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_site_is_sound(site: Path, pages: dict[Path, sitecheck.Page]) -> None:
    """Zensical builds it strictly, without a warning; every link leads somewhere, nothing is loaded from elsewhere."""
    assert sitecheck.faults(site, pages) == []
    built = {path.relative_to(site.resolve()).with_suffix(".md").as_posix() for path in pages}
    assert built - {"404.md", "assets/explore.md"} == set(pages_of(CONFIG["nav"]))


def modules_shown() -> dict[str, list[str] | None]:
    """The modules that the pages of the reference name, with the members that are chosen, if any are."""
    members_by_module = {}
    for path in (DOCS / "api").glob("*.md"):
        for module, members in re.findall(
            r"^::: (\S+)\n    options: \{[^}\n]*?(?:members: \[([^\]]*)\])?\}",
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        ):
            members_by_module[module] = members.split(", ") if members else None
    return members_by_module


@pytest.mark.slow
def test_reference_has_every_public_name(pages: dict[Path, sitecheck.Page]) -> None:
    """Every public name, of the package, of `theory` and of the modules in the reference, has an entry with a text."""
    wanted = {f"{home}.{name}" for name, home in twophase._HOMES.items()}
    wanted |= {f"{getattr(theory, name).__module__}.{name}" for name in theory.__all__}
    for module, members in modules_shown().items():
        # Read, not imported: what some modules are made for is not installed here.
        source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py")
        tree = ast.parse(source.read_text(encoding="utf-8"))
        nodes = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        public = [node.name for node in nodes if node.name[0] != "_"]
        wanted |= {f"{module}.{name}" for name in (public if members is None else members)}
    entries = {name for path, page in pages.items() if path.parent.name == "api" for name in page.ids}
    assert wanted <= entries, sorted(wanted - entries)
    assert len(wanted) > 150


ELEMENTS = set(
    "a article b blockquote body br button circle code div em footer form h1 h2 h3 h4 h5 head header html hr i iframe "
    "img input label li link main meta nav ol p path pre script section small span strong style sub summary sup svg "
    "table tbody td th thead title tr ul var wbr".split()
)


@pytest.mark.slow
def test_markdown_became_html(pages: dict[Path, sitecheck.Page]) -> None:
    """Nothing in angle brackets, such as an inner product, became an element and so vanished, and no list, table,
    fence or doctest was left as text: their marks begin no line of a paragraph.
    """  # noqa: D205
    for path, page in pages.items():
        if path.name == "explore.html":  # has tests of its own
            continue
        assert {tag for tag in page.tags if tag not in ELEMENTS} == set(), path.name
        for paragraph in re.findall(r"<p>(.*?)</p>", path.read_text(encoding="utf-8"), re.DOTALL):
            marks = re.findall(
                r"^(?:\* |- |\| |```|&gt;&gt;&gt; |\d+\. ).*", re.sub(r"<[^>]+>", "", paragraph), re.MULTILINE
            )
            assert marks == [], f"{path.name}: {marks}"


# --- in a browser -------------------------------------------------------------------------------------------------


def open_page(watched: Watched, path: Path, width: int = 1280, scheme: str = "light") -> None:
    """Go to a file of the site; it must open without trouble, and its scripts must have begun."""
    watched.show(path, width, scheme).wait_for_function("document.documentElement.classList.contains('js')")
    assert watched.troubles == [], path.name


@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("index.html", 1280, "light"),
        ("api/blocks.html", 1280, "dark"),
        ("restarts.html", 360, "light"),
        ("explorer.html", 390, "dark"),
    ],
)
def test_pages_are_accessible(site: Path, watched: Watched, name: str, width: int, scheme: str) -> None:
    """axe-core finds no violation of WCAG's levels A and AA, in both colours, on wide and narrow screens."""
    open_page(watched, site / name, width, scheme)
    assert axe_violations(watched.page) == []
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@pytest.mark.parametrize(("name", "width"), [("restarts-when", 360), ("api/theory", 360), ("reproduce", 1280)])
def test_what_scrolls_can_be_reached_by_keyboard(site: Path, watched: Watched, name: str, width: int) -> None:
    """No part of a page with wide tables scrolls and has no way in by keyboard; what fits is no stop."""
    open_page(watched, site / f"{name}.html", width)
    assert watched.page.evaluate(UNREACHED) == []


UNREACHED = """async () => {
    for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame)  // sizes are observed between two pictures
    const way = "a[href], button, input, summary, [tabindex='0']"
    const scrolls = e => e.scrollWidth > e.clientWidth && ["auto", "scroll"].includes(getComputedStyle(e).overflowX)
    const wrong = [...document.querySelectorAll("article *")].filter(
        e => e.checkVisibility() && scrolls(e) && !e.matches(way) && !e.querySelector(way))
    const stops = [...document.querySelectorAll(".md-typeset__scrollwrap[tabindex='0']")].filter(
        e => !scrolls(e) || e.getAttribute("role") !== "region" || !/^Table: ./.test(e.getAttribute("aria-label")))
    return [...wrong, ...stops].map(e => e.outerHTML.slice(0, 120))
}"""


@pytest.mark.browser
def test_options_and_figures_are_as_they_were_written(site: Path, watched: Watched) -> None:
    """No option in a table is broken at its hyphens, and no figure changes its colours on a dark page."""
    for name in ("own-loop.html", "processes.html", "demo.html"):
        open_page(watched, site / name, scheme="dark")
        assert watched.page.evaluate(BROKEN) == [], name
    assert watched.page.evaluate("[...document.images].map(image => getComputedStyle(image).filter)") == ["none"]


BROKEN = """() => {
    const broken = []
    for (const code of document.querySelectorAll("article td code")) {
        for (const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT); walker.nextNode();) {
            const text = walker.currentNode, range = document.createRange()
            for (const option of text.data.matchAll(/--\\S+/g)) {
                range.setStart(text, option.index)
                range.setEnd(text, option.index + option[0].length)
                const tops = [...range.getClientRects()].map(box => Math.round(box.top))
                if (new Set(tops).size > 1) broken.push(option[0])
            }
        }
    }
    return broken
}"""


@pytest.mark.browser
def test_search_works_from_disk(site: Path, watched: Watched) -> None:
    """The search of a site that was opened from disk finds a function by its name, and asks no server."""
    open_page(watched, site / "index.html")
    watched.page.locator(".md-search__button").click()
    watched.page.wait_for_function("document.activeElement.shadowRoot?.querySelector('input')")
    watched.page.keyboard.type("log_final_loss")
    has_result = (
        "document.activeElement.shadowRoot.textContent.includes('Return the logarithm of the loss')"  # its docstring
    )
    watched.page.wait_for_function(has_result)
    assert watched.troubles == []
