"""Sources: which files words name, their documents in every format, going on from any place, and what goes wrong."""

from __future__ import annotations

import gzip
import io
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras import need
from textmaker import write_lines
from twophase.base.config import UsageError
from twophase.text import sources
from twophase.text.sources import File, ahead, batches, find

need("pyarrow", "the extra 'data' is not installed")

TEXTS = [f"document {i} \u2028 with\x85 odd\nlines \u6f22 {'x' * (i * 37 % 900)}" for i in range(60)]
BOM = b"\xef\xbb\xbf"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch):
    """A connection that is opened in these tests fails them."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write(path: Path, data: bytes) -> Path:
    """Write bytes, packed if the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def write_parquet(path: Path, texts: Any, column: str = "text") -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), path, row_group_size=7)
    return path


def documents(files: list[File], **place: Any) -> list[str]:
    return [text for batch in batches(files, **place) for text in batch.texts]


def read(*words: object, column: str = "text") -> list[str]:
    files, official = find([str(word) for word in words])
    assert not official
    return documents(files, column=column)


# Formats


@pytest.mark.parametrize(
    "name", ["c4-train.00000-of-01024.json.gz", "a.jsonl", "a.ndjson", "a.json", "odd [1] *name?.jsonl"]
)
def test_json_lines_give_their_texts_in_order(tmp_path: Path, name: str):
    """Every text of C4's schema comes out as it went in, with its UTF-8 bytes, whatever the file is called."""
    files, _ = find([str(write_lines(tmp_path / ".hidden" / name, TEXTS))])
    (batch,) = batches(files)
    assert batch.texts == TEXTS
    assert batch.sizes == [len(text.encode()) for text in TEXTS]


def test_json_lines_of_any_shape_are_read(tmp_path: Path):
    """Other columns may change their types, texts may look like dates, lines may be blank, and halves of pairs heal."""
    entries = [
        {"text": "2019-04-25T12:57:54Z", "other": 1},
        {"other": "x", "text": "one"},
        {"text": "two \ud83d three", "other": [1]},
        {"text": None},
        {"text": "  "},
    ]
    path = write(tmp_path / "a.jsonl", BOM + "\r\n\n".join(json.dumps(entry) for entry in entries).encode())
    assert read(path) == ["2019-04-25T12:57:54Z", "one", "two \ufffd three"]


@given(st.lists(st.integers(1, 2500), min_size=1, max_size=30), st.sampled_from(["\n\n", "\n \n", "\n\n\t\n"]))
def test_paragraphs_are_gathered_to_documents(sizes: list[int], blank: str):
    """Every paragraph is in one document, in order; each has 1,000 characters, and would not without its last."""
    parts = [f"{i:02d}" + "x" * size for i, size in enumerate(sizes)]
    texts = list(sources.paragraphs(io.StringIO(blank.join(parts))))
    assert "\n\n".join(texts).split("\n\n") == parts
    if len(texts) > 1:
        assert min(map(len, texts)) >= 1000
        assert all(len("".join(text.split("\n\n")[:-1])) < 1000 for text in texts[:-1])


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_ends_of_lines_are_alike(tmp_path: Path, end: str):
    """A file with another system's ends of lines has the same documents, streamed and read as a whole."""
    text = "\n\n".join(f"{i} " + "word " * 150 for i in range(9))
    path = write(tmp_path / "a.txt", BOM + text.replace("\n", end).encode())
    assert read(path) == sources.documents(path, "a.txt") == list(sources.paragraphs(io.StringIO(text)))


@pytest.mark.parametrize("text", ["words " * 40_000, "x" * 100_000, "some words\n" * 20_000, "x" * 9999 + " y" * 9])
def test_text_without_blank_lines_stays_in_bounds(text: str):
    """A file without blank lines, ends of lines or blanks comes in pieces; nothing is lost or put between words."""
    pieces = list(sources.paragraphs(io.StringIO(text)))
    assert len(pieces) > len(text) // 25_000
    assert max(map(len, pieces)) <= 3 * sources.MAX_PARAGRAPH
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert "\n" in text or not any("\n" in piece for piece in pieces[:-1])  # a short rest joins the last


def test_a_huge_record_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A text of more characters than a document may have becomes several, cut at blanks, without loss."""
    monkeypatch.setattr(sources, "MAX_DOCUMENT", 1000)
    text = "word " * 1000 + "y" * 2500
    texts = read(write_lines(tmp_path / "a.jsonl", [text]))
    assert "".join(texts) == text
    assert len(texts) >= 5
    assert max(map(len, texts)) <= 1000
    assert texts[0].endswith(" ")


# Places


@pytest.mark.parametrize("kind", ["json", "parquet", "text"])
def test_reading_goes_on_from_any_place(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    """From the place after each batch, the rest of all files is read, no document twice and none left out."""
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 7)
    for number, part in enumerate((TEXTS[:25], TEXTS[25:26], TEXTS[26:])):
        if kind == "json":
            write_lines(tmp_path / f"{number}.json.gz", [*part, ""])
        elif kind == "parquet":
            write_parquet(tmp_path / f"{number}.parquet", [None, *part])
        else:
            (tmp_path / f"{number}.txt").write_text("\n\n".join(text + " word" * 150 for text in part))
    files, _ = find([str(tmp_path)])
    every = list(batches(files))
    texts = [text for batch in every for text in batch.texts]
    assert len(texts) == 60 if kind != "text" else len(texts) > 45
    assert len(every) >= 9
    done = 0
    for batch in every:
        done += len(batch.texts)
        assert documents(files, file=batch.file, record=batch.record) == texts[done:]


# Words


def test_words_name_files_folders_and_patterns(tmp_path: Path):
    """The order of words counts; files of one word are sorted; other files of a folder stay out; equal names differ."""
    for name in ("b.jsonl", "a.jsonl", "sub/c.parquet", "sub/a.jsonl", "note.pdf", "z.txt"):
        write(tmp_path / name, b"{}")
    files, _ = find([str(tmp_path / "z.txt"), str(tmp_path / "*.jsonl")])
    assert [(file.name, file.kind) for file in files] == [("z.txt", "text"), ("a.jsonl", "json"), ("b.jsonl", "json")]
    files, _ = find([str(tmp_path)])
    first, second = str(tmp_path / "a.jsonl"), str(tmp_path / "sub" / "a.jsonl")
    assert [file.name for file in files] == [first, "b.jsonl", second, "c.parquet", "z.txt"]
    assert [file.kind for file in find([str(tmp_path / "note.pdf")], "text")[0]] == ["text"]


def test_hidden_folders_and_the_result_are_no_sources(tmp_path: Path):
    """A notebook's checkpoints and git's objects would double a text, and a result below its source would be read."""
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", "tok/tokenizer/tokenizer.json", "tok/b.txt"):
        write(tmp_path / name, b"words")
    (tmp_path / "link").symlink_to(tmp_path / "tok")
    for out in ("tok", "link", "tok/../tok"):
        files, _ = find([str(tmp_path / "a.txt"), str(tmp_path / "tok" / "*")], outside=tmp_path / out)
        assert [file.name for file in files] == ["a.txt"]
    for words in ([str(tmp_path / "a.txt")], [str(tmp_path)], [str(tmp_path / "a.txt"), "c4"]):
        with pytest.raises(UsageError, match=r"a\.txt: lies in --out"):
            find(words, outside=tmp_path)


def test_links_are_what_their_names_say(tmp_path: Path):
    """Of links to nameless files, as in the hub's cache, the links' names count; two names of one file are told."""
    for number, name in enumerate(("c4-train.00000-of-01024.json.gz", "c4-validation.00000-of-00008.json.gz")):
        write_lines(tmp_path / "snapshot" / name, TEXTS).rename(tmp_path / f"blob{number}")
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / f"blob{number}")
    train, official = find([str(tmp_path / "snapshot")])
    assert [file.name for file in official] == ["c4-validation.00000-of-00008.json.gz"]
    assert documents(train) == TEXTS
    (tmp_path / "again.json.gz").symlink_to(tmp_path / "blob0")
    with pytest.raises(UsageError, match=r"again\.json\.gz is named twice"):
        find([str(tmp_path / "snapshot"), str(tmp_path / "again.json.gz")])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("absent.jsonl", "absent.jsonl: there is no such file"),
        ("*.jsonl", r"\*.jsonl: matches no file"),
        ("empty", "empty: the folder holds no file that ends in"),
        ("note.pdf", "note.pdf: ends in none of .*--kind"),
    ],
)
def test_words_that_name_nothing(tmp_path: Path, word: str, message: str):
    """Each is told with its name and what to do."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.pdf").write_text("x")
    with pytest.raises(UsageError, match=message):
        find([str(tmp_path / word)])


# Damage

PACKED = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
GZIP = gzip.compress(PACKED)
DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "cut": ("a.json.gz", GZIP[:-40], r"is not a whole gzip file .*fetch it again"),
    "flipped": ("a.json.gz", GZIP[:200] + bytes(20) + GZIP[220:], r"is not a whole gzip file .*fetch it again"),
    "unpacked": ("a.json.gz", PACKED, r"is not a whole gzip file"),
    "latin": ("a.json", '{"text": "na\u00efve"}\n'.encode("latin-1"), r"is not UTF-8; convert it"),
    "line": ("a.json", PACKED + b'{"text": \n', r"line 61 is not a JSON object .*write one object a line"),
    "list": ("a.json", BOM + b' [{"text": "a"}]', r"is one JSON list, not JSON lines"),
    "column": ("a.json", b'{"content": "a", "url": "b"}', r"line 1 has no 'text', but 'content', 'url'; .*--column"),
    "number": ("a.json", b'{"text": 1}\n', r"line 1: 'text' is int, not text"),
    "parquet": ("a.parquet", b"PAR1 and then something else", r"cannot be read as parquet"),
    "text": ("a.txt", b"caf\xe9", r"is not UTF-8"),
    "text cut": ("a.txt.gz", gzip.compress(b"some words" * 1000)[:-9], r"is not a whole gzip file"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, case: str, capfd: pytest.CaptureFixture[str]):
    """One message names the file, the place, and the remedy; nothing else is printed."""
    name, data, message = DAMAGED[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=f"{name}: {message}"):
        read(tmp_path / name)
    assert capfd.readouterr().err == ""


def test_text_of_parquet_may_be_categories(tmp_path: Path):
    """A column of categories, as pandas writes them, is read like one of text, from any row on."""
    pa = pytest.importorskip("pyarrow")
    column = pa.array(["a b", None, "c", "a b"]).dictionary_encode()
    files, _ = find([str(write_parquet(tmp_path / "a.parquet", column))])
    assert documents(files) == ["a b", "c", "a b"]
    assert documents(files, record=2) == ["c", "a b"]


@pytest.mark.parametrize(
    ("column", "texts", "message"),
    [
        ("content", TEXTS, r"a\.parquet: has no column 'text', but id, content; choose with --column"),
        ("text", [1, 2], r"a\.parquet: the column 'text' is int64, not text"),
    ],
)
def test_parquet_columns_that_are_no_text(tmp_path: Path, column: str, texts: list, message: str):
    """The message names the columns that are there."""
    with pytest.raises(UsageError, match=message):
        read(write_parquet(tmp_path / "a.parquet", texts, column))


def test_a_hub_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch):
    """C4 without a network, or without the hub's client, gives one message that names the file and the remedy."""
    file = File("hf://datasets/allenai/c4/en/c4-train.00000-of-01024.json.gz", "allenai/c4 en/x", "json", -1)
    with pytest.raises(UsageError, match=r"allenai/c4 en/x: cannot be read from the hub .*or fetch C4's .json.gz"):
        list(batches([file]))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"x: is read with the package huggingface_hub; run `pip install 'twophase"):
        list(batches([file]))


# Reading ahead


def test_reading_ahead_changes_nothing():
    """The same items in the same order; an error comes after the items before it; stopping early closes the source."""
    closed: list[bool] = []

    def source(stop: int):
        try:
            yield from range(stop)
            raise UsageError("at the end")
        finally:
            closed.append(True)

    items, endless = ahead(source(100)), ahead(source(10**9))
    assert [next(items) for _ in range(100)] == list(range(100))
    with pytest.raises(UsageError, match="at the end"):
        next(items)
    assert next(endless) == 0
    endless.close()
    assert closed == [True, True]
