"""The documentation can be read: pages are short, sentences too, words are explained, answers are two clicks away.

A word is what stands between two spaces and holds a letter or a digit. Fenced code and the targets of links do not
count; code inside a line and the cells of tables do.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
README_WORDS, PAGE_WORDS, SENTENCE_WORDS = 700, 1200, 25
FENCED = re.compile(r"^```.*?^```\n?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)[^)]*\)")
SOURCE = ROOT / "src" / "twophase"
SECTION = re.compile(r"^(?:Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)
EXAMPLE = re.compile(r"^>>>.*\n?(?:.+\n?)*", re.MULTILINE)
TO_DO: set[str] = set()
"""Pages whose first sentence and special words are still to be seen to."""


def sections() -> dict[str, list[str]]:
    """Pages of each part of the navigation."""

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        assert isinstance(entry, list | dict)
        return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in pages(each)]

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return {title: pages(entry) for part in nav for title, entry in part.items()}


SHORT = [page for part, pages in sections().items() for page in pages if part != "Appendix"]
TUTORIALS = ["index.md", *sections()["Tutorials"]]
EXPLAINED = [README] + [DOCS / page for page in [*TUTORIALS, *sections()["How-to guides"]] if page not in TO_DO]
PROSE = [page for page in (*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))) if page.name != "log.md"]
"""Pages whose sentences are short; docs/log.md is a record of its days."""

GENERATED = re.compile(r"^<!-- \w+ -->\n(\|.*\n)+", re.MULTILINE)
"""A table of `twophase methods --into FILE`."""


def read(path: Path) -> str:
    """Read a page without its fenced code."""
    return FENCED.sub("", path.read_text(encoding="utf-8"))


def words(text: str) -> int:
    """Count words, those of the targets of links left out."""
    return sum(bool(re.search(r"\w", word)) for word in LINK.sub(r"\1", text).split())


def sentences(text: str, *, tables: bool = False) -> list[str]:
    """Cut paragraphs and items of lists into sentences; headings are none, and rows of tables only where wanted."""
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(\|.*)$", r"\n\1\n" if tables else "", text, flags=re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", text)
    cut = [re.split(r"(?<=[.?!])[*_)]*\s+(?=[A-Z0-9*_`(\[S])", " ".join(block.split())) for block in blocks]
    return [sentence for block in cut for sentence in block if words(sentence)]


# --- length -------------------------------------------------------------------------------------------------------


def test_readme_is_short() -> None:
    """The README has at most 700 words: a screen and a half."""
    count = words(read(README))
    print(f"README.md: {count} words of {README_WORDS}")
    assert count <= README_WORDS


@pytest.mark.parametrize("page", SHORT)
def test_page_is_short(page: str) -> None:
    """A page outside of the appendix has at most 1,200 words, without tables that a command fills in."""
    count = words(GENERATED.sub("", read(DOCS / page)))
    print(f"docs/{page}: {count} words of {PAGE_WORDS}")
    assert count <= PAGE_WORDS


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_sentences_are_short(path: Path) -> None:
    """A sentence has at most 25 words; a piece of code in it is one word."""
    text = re.sub(r"`[^`]*`", "`code`", read(path))
    assert [sentence for sentence in sentences(text) if words(sentence) > SENTENCE_WORDS] == []


def docstrings(path: Path) -> list[str]:
    """Return the docstrings of a module, its classes, functions and attributes."""
    bodies = [getattr(node, "body", None) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    lines = [line for body in bodies if isinstance(body, list) for line in body if isinstance(line, ast.Expr)]
    texts = [line.value.value for line in lines if isinstance(line.value, ast.Constant)]
    return [inspect.cleandoc(text) for text in texts if isinstance(text, str)]


def prose(docstring: str) -> str:
    """Return a docstring without examples, equations and names of arguments; code is one word, an entry a block."""
    text = re.sub(r"`[^`]*`", "`code`", EXAMPLE.sub("", docstring))
    head, *sections = SECTION.split(text)
    entries = [re.sub(r"^ {4}(?! )(?:[*\w][\w*, ]*: )?", "\n", section, flags=re.MULTILINE) for section in sections]
    return "\n\n".join([re.sub(r"^ {4}.*$", "\n", head, flags=re.MULTILINE), *entries])


def messages(path: Path) -> list[str]:
    """Return the strings of a module: a value in one is a word, a line a block."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    strings = [node.values if isinstance(node, ast.JoinedStr) else [node] for node in nodes]
    texts = ["".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts) for parts in strings]
    return [re.sub(r"`[^`]*`", "`code`", text).replace("\n", "\n\n") for text in texts]


ROOMS = sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")})


@pytest.mark.parametrize("room", ROOMS)
def test_sentences_of_source_are_short(room: str) -> None:
    """A sentence of a docstring or message has at most 25 words; equations, tables, captions may be long."""
    paths = [path for path in (SOURCE / room, *sorted((SOURCE / room).rglob("*.py"))) if path.is_file()]
    texts = [prose(text) for path in paths for text in docstrings(path)]
    texts += [text for path in paths for text in messages(path) if room != "studies"]
    assert [sentence for text in texts for sentence in sentences(text) if words(sentence) > SENTENCE_WORDS] == []


@pytest.mark.parametrize("page", [page for page in SHORT if not page.startswith("api/") and page not in TO_DO])
def test_page_says_what_its_reader_will_know(page: str) -> None:
    """The first lines of a page tell what its reader will know or can do after it."""
    first = " ".join(sentences(read(DOCS / page))[:3])
    assert re.search(r"After this page (you|your)\b", first), page


# --- words --------------------------------------------------------------------------------------------------------


@cache
def glossary() -> dict[str, tuple[re.Pattern[str], str]]:
    """Read pattern and meaning of each term of docs/glossary.md, by its anchor."""
    terms = {}
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    for name, meaning, others in re.findall(r"^## (.+)\n\n\*(.+)\.\*(?: Also: (.+?)\.)?", text, re.MULTILINE):
        forms = "|".join(re.escape(form).replace(r"\ ", r"[\s-]") for form in [name, *others.split(", ")] if form)
        pattern = re.compile(rf"(?<![\w-])(?:{forms})(?:s|es)?(?![\w-])", re.IGNORECASE)
        terms[anchor(name)] = pattern, plain(re.sub("^(An?|The) ", "", meaning))
    assert len(terms) == len(re.findall("^## ", text, re.MULTILINE))
    return terms


def plain(text: str) -> str:
    """Lower case without emphasis, code and line breaks."""
    return " ".join(re.sub(r"`[^`]*`|[*_]", "", text).lower().split())


def unexplained(text: str) -> list[str]:
    """List the terms whose first sentence on a page neither links to the glossary nor holds their meaning."""
    waiting = dict(glossary())
    faults = []
    for sentence in sentences(text, tables=True):
        linked = {target.partition("glossary.md#")[2] for _, target in LINK.findall(sentence)}
        bare = LINK.sub("", re.sub(r"`[^`]*`", "", sentence))
        for term, (pattern, meaning) in list(waiting.items()):
            if term in linked or meaning in plain(sentence):
                del waiting[term]
            elif pattern.search(bare):
                faults.append(f"{term}: {sentence}")
                del waiting[term]
    return faults


@pytest.mark.parametrize("path", EXPLAINED, ids=lambda path: path.name)
def test_terms_are_explained_at_first_use(path: Path) -> None:
    """A term of the glossary is explained, or leads to it, in the first sentence of a page that uses it.

    Code, headings and the texts of links to other pages are no use.
    """
    assert unexplained(GENERATED.sub("", read(path))) == []


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Replicas meet.", ["replica"]),
        ("[Replicas](glossary.md#replica) meet. A replica is back.", []),
        ("A replica is a copy of the\nmodel that trains on its *own*.", []),
        ("`replica` and [its replica](other.md)\n\n## Replica", []),
        ("| a | b |\n|---|---|\n| one | mode |", ["mode"]),
        ("It meets. A replica waits. [Replica](glossary.md#replica).", ["replica"]),
    ],
)
def test_unexplained_terms_are_seen(text: str, terms: list[str]) -> None:
    """The check sees a term that is used before it is explained, and no other."""
    assert [fault.partition(":")[0] for fault in unexplained(text)] == terms


# --- clicks -------------------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """Make the address of a heading as the site does."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", LINK.sub(r"\1", heading)).strip().lower())


def anchors(path: Path) -> set[str]:
    """Return the addresses of all headings of a page."""
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", read(path), re.MULTILINE)}


PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *(ROOT / "examples").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """A relative link or picture leads to a file of the repository, and one to a place on a page to a heading there."""
    for _, target in LINK.findall(read(page)):
        path, _, place = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert "://" in target or other.exists(), f"{page.name}: {target} is missing"
        if place and "://" not in target and other.suffix == ".md" and "api" not in other.parts:
            assert place in anchors(other), f"{page.name}: {target}"


TASKS = re.findall(
    r"^\| (.+) \| (\[README\].+) \|$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.mark.parametrize(("task", "clicks"), TASKS, ids=[task for task, _ in TASKS])
def test_tasks_are_two_clicks_away(task: str, clicks: str) -> None:
    """Each page in a task's row is linked from the one before, and the last one has the heading."""
    targets = [target for _, target in LINK.findall(clicks)]
    assert targets[0] == "README.md"
    assert 1 <= len(targets) - 1 <= 2, task
    here = README
    for target in targets[1:]:
        path, _, place = target.partition("#")
        linked = {
            ((here.parent / t.partition("#")[0]).resolve(), t.partition("#")[2]) for _, t in LINK.findall(read(here))
        }
        there = (ROOT / path).resolve()
        assert (there, place) in linked, f"{task}: {here.name} has no link to {target}"
        assert place in anchors(there), f"{task}: {target}"
        here = there


def test_all_tasks_are_listed() -> None:
    """CONTRIBUTING.md names the five tasks of a newcomer."""
    assert len(TASKS) == 5
