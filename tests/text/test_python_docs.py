"""The running Python's library as documents, collected without running anything."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from twophase.text.python_docs import python_documents


def words(number: int) -> str:
    """Return a text of 40 words, each with this number."""
    return " ".join([f"word{number}"] * 40)


LINES = [f"    value_{number} = {number}" for number in range(20)]
FILES = {
    "a.py": f'"""{words(1)}"""\n',
    "b/c.py": f'class C:\n    """{words(2)}"""\n    async def f(self):\n        """{words(3)}"""\n',
    "b/short.py": '"""Short."""\n',
    "b/twice.py": f'if 1:\n    def g():\n        """{words(2)}"""\n',
    "b/escape.py": f'"""\\d {words(4)}"""\n',
    "b/syntax.py": f'"""{words(5)}"""\nprint "x"\n',
    "site-packages/d.py": f'"""{words(6)}"""\n',
    "b/tests/d.py": f'"""{words(6)}"""\n',
    "b/raises.py": f'"""{words(7)}"""\nraise SystemExit(3)\n',
    "code.py": "\n".join(["@wrapped", "def f():", '    """A docstring', '    of two."""', *LINES, "def g(): 1"]),
}


def test_documents_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Long docstrings, or long definitions without them, by sorted path, each once; nothing that does not parse."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "nowhere.py").symlink_to(tmp_path / "missing")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    numbers = [text.split()[-1] for text in python_documents("python") if "word" in text.split()[-1]]
    assert numbers == ["word1", "word2", "word3", "word4", "word7"]
    assert python_documents("python-code") == ["\n".join(["def f():", *LINES])]
