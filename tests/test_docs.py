"""What the documentation shows works: its Python runs, its files exist, its commands are known."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """Page and text of every fenced block of a language."""
    return [
        (str(page.relative_to(ROOT)), text)
        for page in PAGES
        for kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if kind == language
    ]


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_blocks(page: str, code: str, tmp_path: Path) -> None:
    """Each Python block runs by itself, in a fresh interpreter; what it prints is what its last comments claim."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, f"{page}: {done.stderr}"
    claimed = re.findall(r"^# prints: (.*)$", code, re.MULTILINE)
    if claimed:
        assert done.stdout.splitlines() == claimed, page


EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    for path in (ROOT / "src").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_examples(name: str) -> None:
    """Each example in a docstring prints what it says."""
    outcome = doctest.testmod(import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0


@cache
def help_of(*command: str) -> str:
    """What a command says to --help; asked once, for starting it takes most of the time."""
    words = [sys.executable, "-m", "twophase", *command, "--help"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("page", "text"), blocks("console"))
def test_console_blocks(page: str, text: str) -> None:
    """Each command, option and make target that is shown exists."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in text.splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["make"]:
            for target in (word for word in words[1:] if "=" not in word):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: no make target {target}"
        if words[:1] == ["twophase"]:
            command = words[1:3] if words[1] == "data" else words[1:2]
            shown = help_of(*command)
            for option in (word for word in words if word.startswith("--")):
                assert option.replace(".no-", ".") in shown, f"{page}: {words[1]} has no option {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Every relative link and picture leads to a file of the repository."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    for target in targets:
        assert re.match(r"https?://", target) or (page.parent / target).exists(), f"{page.name}: {target} is missing"


SHOWN = [
    (str(page.relative_to(ROOT)), command, output)
    for page in PAGES
    for command, output in re.findall(
        r"^```console\n(?:\$ )?(twophase period [^\n]*)\n```\n+```text\n(.*?)^```",
        page.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
]


@pytest.mark.parametrize(("page", "command", "output"), SHOWN)
def test_shown_output(page: str, command: str, output: str) -> None:
    """What a page shows below a `twophase period` command is what the command prints."""
    words = shlex.split(command)[1:]
    done = subprocess.run([sys.executable, "-m", "twophase", *words], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == output.split("\n"), page


@pytest.mark.slow
def test_counts_of_the_performance_page() -> None:
    """The table of inner steps in docs/performance.md is what the benchmark counts."""
    words = [sys.executable, str(ROOT / "benchmarks" / "forest.py"), "--count"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"```console\npython benchmarks/forest.py --count\n```\n\n```text\n{done.stdout}```\n" in text


def test_theory_page_names_what_exists() -> None:
    """Every result R1 to R31 has a row in docs/theory.md whose functions and tests exist; so has every paper error."""
    text = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (R[0-9]+) \| (.*) \|$", text, re.MULTILINE))
    assert list(rows) == [f"R{n}" for n in range(1, 32)]
    assert re.findall(r"^\| (E[0-9]+) \|", text, re.MULTILINE) == [f"E{n}" for n in range(1, 19)]
    homes = [import_module(name) for name in ("twophase.theory", "twophase.restart", "twophase")]
    for number, row in rows.items():
        *_, functions, tests = row.split(" | ")
        names = re.findall(r"`(?:[a-z]+\.)?([A-Za-z_]+)(?:\.[a-z]+)?`", functions)
        assert names, number
        for name in names:
            assert any(hasattr(home, name) for home in homes), f"{number}: no function {name}"
        places = re.findall(r"\[([a-z0-9_]+)\]\(\.\./(tests/[^)]+)\)", tests)
        assert places, number
        for name, path in places:
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{number}: no test {name} in {path}"
