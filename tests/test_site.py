"""The documentation site: it builds without a warning or a broken link, and loads nothing from elsewhere.

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

import twophase
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
        pytest.skip(f"{name} is not installed; the group docs brings it")
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


def pages_of(nav: object) -> list[str]:
    """The pages that a navigation names, in its order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages_of(entry)]  # type: ignore[union-attr]


def test_navigation_has_every_page() -> None:
    """Every page under docs/ is in the navigation of mkdocs.yml once, and nothing else is."""
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    named = pages_of(CONFIG["nav"])
    assert sorted(named) == sorted(there), f"not in both: {sorted(set(named) ^ there)}; write them into mkdocs.yml"


LOADED = re.compile(
    r"<link[^>]+rel=.?(?:stylesheet|icon|preload)[^>]+href=[\"']?([^\"' >]+)|<[^>]+ src=[\"']?([^\"' >]+)"
)
"""What a browser loads by itself."""


@pytest.mark.slow
def test_site_is_sound(site: Path) -> None:
    """Zensical builds it strictly, without a broken link, and no page loads anything that is no file of the site."""
    pages = sorted(site.rglob("*.html"))
    for page in pages:
        for address in filter(None, (a or b for a, b in LOADED.findall(page.read_text(encoding="utf-8")))):
            is_there = (page.parent / address.split("?")[0]).exists() or page.name == "404.html"
            assert address.startswith("data:") or is_there, f"{page.name} loads {address}"
    built = {page.relative_to(site).with_suffix(".md").as_posix() for page in pages}
    assert built - {"404.md", "assets/explore.md", "assets/demo.md"} == set(pages_of(CONFIG["nav"]))


def modules_shown() -> dict[str, list[str] | None]:
    """The modules that the pages of the reference name, with the members that are chosen, if any are."""
    members_by_module = {}
    for path in (DOCS / "api").glob("*.md"):
        entry = r"^::: (\S+)(?:\n    options: \{members: \[([^\]]*)\]\})?"
        for module, members in re.findall(entry, path.read_text(encoding="utf-8"), re.MULTILINE):
            members_by_module[module] = members.split(", ") if members else None
    return members_by_module


@pytest.mark.slow
def test_reference_has_every_public_name(site: Path) -> None:
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
    texts = [path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html")]
    entries = {name for text in texts for name in re.findall(r'\bid="?([\w.]+)', text)}
    assert wanted <= entries, sorted(wanted - entries)
    assert len(wanted) > 150
