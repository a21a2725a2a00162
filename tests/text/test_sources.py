"""Where text comes from: which files some words name, and their documents."""

from __future__ import annotations

import gzip
import json
import sysconfig
from pathlib import Path

import pytest

from textmaker import paragraph, write_lines
from twophase.errors import RunError, UsageError
from twophase.text import sources
from twophase.text.sources import batches, documents, find_sources, python_documents

# Which files


def test_words_name_files_in_order(tmp_path: Path):
    """Files and folders in the order of the words, these sorted by path; others and hidden ones are left."""
    names = ("b.txt", "a.jsonl.gz", "sub/c.PARQUET", "sub/.hidden.txt", ".git/d.txt", "e.csv", "f [1].md")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x" * len(name))
    found = find_sources([str(tmp_path / "sub"), str(tmp_path / "b.txt")])
    assert [(source.name, source.size) for source in found] == [("c.PARQUET", 13), ("b.txt", 5)]
    assert [source.name for source in find_sources([str(tmp_path)])] == ["a.jsonl.gz", "b.txt", "f [1].md", "c.PARQUET"]


@pytest.mark.parametrize("words", [["absent.txt"], ["a.csv"], ["a.txt", "a.txt"], ["empty"]])
def test_words_that_name_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]):
    """Words without a file of a known kind, and files named twice, are refused by their words."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("a.csv", "a.txt"):
        (tmp_path / name).write_text("")
    with pytest.raises(UsageError, match=words[0]):
        find_sources(words)


# Documents


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz"])
def test_documents_of_a_file(tmp_path: Path, name: str):
    """Lines of JSON, or paragraphs of plain text, are documents, in order; gzip and a mark of UTF-8 are read."""
    texts = [paragraph(i, 200) for i in (0, 1, 2, 1)]
    content = "\n\n".join(texts) if ".txt" in name else write_lines(tmp_path / "x", [*texts, " "]).read_text()
    marked = content.encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(marked) if name.endswith(".gz") else marked)
    assert list(documents(tmp_path / name)) == texts


def test_columns_of_json_and_parquet(tmp_path: Path):
    """The column is chosen by name; rows without a text are skipped, also of categories as pandas writes them."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'data' is not installed")
    from pyarrow import parquet

    texts = ["one", None, " ", "two", "one"]
    for column in (pyarrow.array(texts), pyarrow.array(texts).dictionary_encode()):
        parquet.write_table(pyarrow.table({"body": column, "n": range(5)}), tmp_path / "a.parquet")
        assert list(documents(tmp_path / "a.parquet", "body")) == ["one", "two", "one"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    assert list(documents(tmp_path / "a.jsonl", "body")) == ["one", "two", "one"]


@pytest.mark.parametrize(("joint", "words"), [("\n \t\n\n", 60), ("\n", 20)])
def test_short_pieces_are_gathered(tmp_path: Path, joint: str, words: int):
    """Paragraphs, or the lines of a single one, are joined to 1,000 characters; blank ones between them go."""
    pieces = [paragraph(i, words) for i in range(100)]
    (tmp_path / "a.txt").write_text(joint.join(pieces))
    found = list(documents(tmp_path / "a.txt"))
    plain = "\n\n" if words == 60 else "\n"
    assert plain.join(found) == plain.join(pieces)
    assert min(map(len, found)) >= 1000
    assert len(found) > 5


DAMAGED = {
    "latin.txt": "naïve".encode("latin-1"),
    "cut.txt.gz": gzip.compress(b"some words " * 99)[:-9],
    "line.jsonl": b'{"text": "x"}\n{"text": \n',
    "other.jsonl": b'{"body": "x"}',
    "number.jsonl": b'{"text": 3}',
    "no.parquet": b"PAR1",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, name: str):
    """What is cut, no UTF-8, no JSON lines, or has no such text ends in one line with the file's name."""
    (tmp_path / name).write_bytes(DAMAGED[name])
    with pytest.raises(RunError, match=name) as error:
        list(documents(tmp_path / name))
    assert "\n" not in str(error.value)


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """Batches have few documents and characters; long documents come in parts, and nothing is lost but surrogates."""
    monkeypatch.setattr(sources, "MAX_DOCUMENT", 1000)
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 5000)
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 7)
    texts = [paragraph(1, 3000), *[paragraph(2, 2)] * 20, "a\ud800b"]
    found = list(batches(texts))
    assert "".join(text for batch in found for text in batch) == "".join(texts).replace("\ud800", "?")
    assert max(map(len, found)) == 7
    assert max(sum(map(len, batch)) for batch in found) <= 6000


# Python's library

LINES = [f"    value_{number} = {number}" for number in range(20)]
FILES = {
    "a.py": f'"""{paragraph(1, 40)}"""\n',
    "b/c.py": f'class C:\n    """{paragraph(2, 40)}"""\n    async def f(self):\n        """{paragraph(3, 40)}"""\n',
    "b/short.py": '"""Short."""\n',
    "b/twice.py": f'if 1:\n    def g():\n        """{paragraph(2, 40)}"""\n',
    "b/escape.py": f'"""\\d {paragraph(4, 40)}"""\n',
    "b/syntax.py": f'"""{paragraph(5, 40)}"""\nprint "x"\n',
    "site-packages/d.py": f'"""{paragraph(6, 40)}"""\n',
    "b/tests/d.py": f'"""{paragraph(6, 40)}"""\n',
    "b/raises.py": f'"""{paragraph(7, 40)}"""\nraise SystemExit(3)\n',
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
