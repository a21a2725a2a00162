"""The running Python's library as documents: collected without running anything, and cached."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.text import library as module
from twophase.text.library import fingerprint, library_documents


def words(number: int) -> str:
    """Return a text of 40 words, each with this number."""
    return " ".join([f"word{number}"] * 40)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library, and an empty cache."""
    root = tmp_path / "lib"
    files = {
        "a.py": f'"""{words(1)}"""\n',
        "b/c.py": f'class C:\n    """{words(2)}"""\n    async def f(self):\n        """{words(3)}"""\n',
        "b/short.py": '"""Short."""\n',
        "b/twice.py": f'def g():\n    """{words(2)}"""\n',
        "b/escape.py": f'"""\\d {words(4)}"""\n',
        "b/syntax.py": f'"""{words(5)}"""\nprint "x"\n',
        "b/zero.py": f'"""{words(5)}"""\n\x00\n',
        "site-packages/d.py": f'"""{words(6)}"""\n',
        "b/tests/d.py": f'"""{words(6)}"""\n',
        "b/raises.py": f'"""{words(7)}"""\nraise SystemExit(3)\n',
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "nowhere.py").symlink_to(root / "missing")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(root))
    monkeypatch.setattr(module, "_topics", lambda: ["topic"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


def forbid_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_docstrings", lambda _: pytest.fail("the cache was not used"))


def last_words(texts: list[str]) -> list[str]:
    return [text.split()[-1] for text in texts]


@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
def test_fingerprints_tell_texts_and_borders_apart(a: list[str], b: list[str]):
    """Fingerprints are equal exactly for equal lists: the borders between texts count, too."""
    assert (fingerprint(a) == fingerprint(b)) == (a == b)
    assert fingerprint(["".join(a), "x"]) != fingerprint(["".join(a) + "x"])


@pytest.mark.usefixtures("library")
def test_docstrings_are_collected_without_running_anything():
    """Long docstrings come by sorted path, each once; excluded folders and files that do not parse are left out."""
    assert last_words(library_documents("python")) == ["topic", "word1", "word2", "word3", "word4", "word7"]


def test_code_without_its_docstrings(library: Path):
    """`python-code` holds functions and classes that are long enough, less their docstrings and decorators."""
    lines = [f"    value_{number} = {number}" for number in range(20)]
    docstring = ['    """A docstring', "    of two lines.", '    """']
    code = ["import os", "@wrapped", "def f():", *docstring, *lines, "class C:", '    """One."""', *lines, "def g(): 1"]
    (library / "code.py").write_text("\n".join(code))
    (library / "latin.py").write_bytes("\n".join(["# coding: latin-1, é", *code]).encode("latin-1"))  # no UTF-8
    expected = ["\n".join(["def f():", *lines]), "\n".join(["class C:", *lines])]
    assert library_documents("python-code") == expected == library_documents("python-code")  # from the cache
    assert library_documents("python") != expected  # which is another one


def test_cache_serves_the_second_time(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second call reads one cache file and parses nothing; a changed library is read anew into the same file."""
    first = library_documents("python")
    with monkeypatch.context() as patch:
        forbid_parsing(patch)
        assert library_documents("python") == first
    (library / "e.py").write_text(f'"""{words(8)}"""\n')
    assert last_words(library_documents("python"))[-1] == "word8"
    assert len(list((tmp_path / "cache" / "twophase").iterdir())) == 1


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[1, 2]", b"[" * 50_000, b'{"key": 1}', "cut", "altered", "types"], ids=repr
)
@pytest.mark.usefixtures("library")
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | str):
    """Whatever the cache file holds, the documents are right, and the cache is whole again afterwards."""
    expected = library_documents("python")
    (file,) = (tmp_path / "cache" / "twophase").iterdir()
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    else:
        stored = json.loads(file.read_text())
        stored["texts"] = ["other", *stored["texts"][1:]] if content == "altered" else [1, None]
        file.write_text(json.dumps(stored))
    assert library_documents("python") == expected
    forbid_parsing(monkeypatch)
    assert library_documents("python") == expected


def test_where_the_cache_is(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without an absolute XDG_CACHE_HOME it is ~/.cache/twophase; where none can be written, there is none."""
    expected = library_documents("python")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert library_documents("python") == expected
        (file,) = (tmp_path / "home" / ".cache" / "twophase").iterdir()
        file.unlink()
    monkeypatch.setenv("HOME", "nowhere")
    monkeypatch.chdir(library)
    before = sorted(library.rglob("*"))
    assert library_documents("python") == expected
    assert sorted(library.rglob("*")) == before
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    assert library_documents("python") == expected


@pytest.mark.slow
def test_the_python_corpus_is_large_and_real():
    """Docstrings as `inspect` shows them and help topics, over a million characters, nothing of installed packages."""
    texts = library_documents("python")
    assert len(texts) > 2000
    assert sum(map(len, texts)) > 1_000_000
    assert {inspect.getdoc(thing) for thing in (json.dump, textwrap.dedent, subprocess.Popen.communicate)} <= set(texts)
    topics = module._topics()
    assert any(text.startswith('The "assert" statement') for text in topics)
    assert set(topics) <= set(texts)
    assert inspect.getdoc(np.linspace) not in texts
    assert {"idlelib", "antigravity", "turtle"}.isdisjoint(sys.modules)
