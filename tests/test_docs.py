"""What the documentation shows works: its Python runs, its files exist, its commands are understood, with values."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import shlex
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

from forked import finish
from twophase.cli import main as cli
from twophase.rule import OuterRule

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("**/*.md")), *(ROOT / "examples").glob("*.md")]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """Page and text of every fenced block of a language."""
    return [
        (str(page.relative_to(ROOT)), text)
        for page in PAGES
        for kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if kind == language
    ]


# --- Python -------------------------------------------------------------------------------------------------------

RUN_BLOCKS = """
import contextlib, io, json, pathlib, traceback

def main():
    done = []
    for page, code in json.loads(pathlib.Path("blocks.json").read_text()):
        printed, failed = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page, "exec"), {"__name__": "__main__"})
        except BaseException:
            failed = traceback.format_exc()
        done.append((printed.getvalue(), failed))
    pathlib.Path("done.json").write_text(json.dumps(done))

if __name__ == "__main__":  # forked workers of a block import this file
    main()
"""
NOT_RUN = "# not run here: "


@pytest.mark.slow
def test_python_blocks(tmp_path: Path) -> None:
    """Each Python block runs by itself, with names of its own; what it prints is what its last comments claim.

    All in one process. A block that cannot run here says why in its first line.
    """
    runnable = [(page, code) for page, code in blocks("python") if not code.startswith(NOT_RUN)]
    program = tmp_path / "run_blocks.py"
    program.write_text(RUN_BLOCKS)
    (tmp_path / "blocks.json").write_text(json.dumps(runnable))
    finish(tmp_path, [["-W", "error", str(program)]], [os.environ])
    done = json.loads((tmp_path / "done.json").read_text())
    wrong = []
    for (page, code), (printed, failed) in zip(runnable, done, strict=True):
        claimed = re.findall(r"^# prints: (.*)$", code, re.MULTILINE)
        if failed or (claimed and printed.splitlines() != claimed):
            wrong.append(f"{page}:\n{code}\n--- printed:\n{printed}\n{failed}")
    assert wrong == []
    assert len(runnable) > 20


def test_blocks_are_found_and_run_or_say_why_not() -> None:
    """Fences stand at the margin and name their language; Python that is left out names its reason where it begins."""
    for page in PAGES:
        fences = re.findall(r"^([ \t]*)(?:`{3,}|~{3,})(\S*)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert {*fences[::2]} <= {("", language) for language in ("python", "console", "text", "yaml")}, page
    left_out = [code for _, code in blocks("python") if "not run" in code]
    for code in left_out:
        assert re.match(NOT_RUN + r"(.* )?needs \S+", code), code
        compile(code, "left out", "exec")
    assert len(left_out) <= 5


EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    for path in (ROOT / "src").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_examples(name: str) -> None:
    """Each example in a docstring prints what it says."""
    outcome = doctest.testmod(import_module(name), extraglobs={"OuterRule": OuterRule})
    assert outcome.attempted > 0
    assert outcome.failed == 0


# --- commands -----------------------------------------------------------------------------------------------------


def said(words: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    return status, out.getvalue()


@cache
def help_of(*command: str) -> str:
    return said([*command, "--help", *(["all"] if command in (("train",), ("sweep",), ("tune",)) else [])])[1]


def command_lines() -> list[tuple[str, str]]:
    """Every line of the console blocks, with those that end in a backslash joined."""
    return [
        (page, line.removeprefix("$ "))
        for page, text in blocks("console")
        for line in text.replace("\\\n", "").splitlines()
        if shlex.split(line, comments=True)
    ]


def twophase_words(line: str) -> list[str]:
    """The words after `twophase` of a line that starts it, by itself or under torchrun."""
    words = shlex.split(line, comments=True)
    if words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1 :]
    return words[1:] if words[0] == "twophase" else []


OURS = sorted({(page, line) for page, line in command_lines() if twophase_words(line)})


@pytest.mark.parametrize(("page", "line"), OURS, ids=[f"{page} {line}"[:90] for page, line in OURS])
def test_commands_have_their_options(page: str, line: str) -> None:
    """Each command exists, and so do all its options."""
    words = twophase_words(line)
    text = help_of(*words[: 2 if words[0] == "data" else 1])
    for option in (word.split("=")[0] for word in words if word.startswith("--") and not word.startswith("--task.")):
        assert re.search(rf"{re.escape(option.replace('.no-', '.'))}\b", text), f"{page}: no option {option}"


UNDERSTOOD = sorted({line for _, line in OURS if twophase_words(line)[0] in ("train", "sweep", "tune", "period")})


@pytest.mark.parametrize("line", UNDERSTOOD)
def test_values_are_understood(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The values make a configuration, and axes a grid, up to where work begins; what needs no run ends well."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # of tasks
    words, sweeps = twophase_words(line), []
    if "…" in words:
        pytest.skip("the line leaves something out")
    monkeypatch.setattr("twophase.cli.sweep.run", lambda sweep, *_, **__: sweeps.append(sweep) or 0)
    status, text = said([*words, *["--print-config"] * (words[0] in ("train", "tune"))])
    assert status == 0, text
    assert [bool(sweep.cells) for sweep in sweeps] == [True] * (words[0] == "sweep")


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_oldest_releases_are_those_that_are_allowed() -> None:
    """What `make test-oldest` installs of our requirements is the lower bound of each."""
    listed = dict(
        re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8"), re.MULTILINE)
    )
    (installed,) = re.findall(r"-c constraints-oldest\.txt [^@]*-e '\.\[([a-z,]+)\]'", MAKEFILE)
    packages = [*PROJECT["dependencies"], *(each for extra in installed.split(",") for each in EXTRAS[extra])]
    bounds = dict(word.split(">=") for word in packages if ">=" in word)
    assert {name: listed.get(name) for name in bounds} == bounds


def test_other_commands_name_what_exists() -> None:
    """Make targets, scripts and extras that console blocks name exist; programs of others are known ones."""
    others = {"export", "source", "torchft_lighthouse"}
    for page, line in command_lines():
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        where = f"{page}: {line}"
        for script in (word for word in words if word.endswith(".py")):
            assert (ROOT / script).exists(), where
        for extra in re.findall(r"\[([a-z,]+)\]", line):
            assert set(extra.split(",")) <= set(EXTRAS), where
        if words[0] == "make":
            for target in words[1:]:
                assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), where
        else:
            assert words[0] in others | {"twophase", "torchrun", "python", "pip"}, where


# --- links and names ----------------------------------------------------------------------------------------------

LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)[^)]*\)")


def prose(page: Path) -> str:
    """Read a page without its fenced code."""
    return re.sub(r"^```.*?^```\n?", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """Return the addresses of all headings of a page, as the site makes them."""
    headings = [LINK.sub(r"\1", heading) for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """A relative link or picture leads to a file of the repository, and one to a place on a page to a heading there."""
    for _, target in LINK.findall(prose(page)):
        path, _, place = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert "://" in target or other.exists(), f"{page.name}: {target} is missing"
        if place and "://" not in target and other.suffix == ".md" and "api" not in other.parts:
            assert place in anchors(other), f"{page.name}: {target}"


def test_names_of_the_theory_exist() -> None:
    """What a page calls `theory.NAME` is there; the changelog names what was."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    texts = (page.read_text(encoding="utf-8") for page in pages)
    names = {name for text in texts for name in re.findall(r"`theory\.([a-zA-Z_.]+)\b(?!/)[^`]*`", text)}
    assert len(names) >= 5
    for name in names:
        resolve_name(f"twophase.theory.{name}")
