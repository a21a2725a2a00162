"""Sources: which files words name, their documents in every format, going on from any place, and what goes wrong."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.base.config import UsageError
from twophase.text import paragraphs, sources
from twophase.text.sources import File, ahead, batches, find

datasets = pytest.importorskip("datasets", reason="the extra 'data' is not installed")

TEXTS = [f"document {i} \u2028 with\x85 odd\nlines \u6f22 {'x' * (i * 37 % 900)}" for i in range(60)]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch):
    """Whoever opens a connection in these tests fails them."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write_json(path: Path, texts: list[str], column: str = "text") -> Path:
    """C4's schema: one object a line, packed if the name says so."""
    lines = [json.dumps({column: text, "timestamp": "2019-04-25T12:57:54Z", "url": "http://x"}) for text in texts]
    data = "".join(line + "\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def write_parquet(path: Path, texts: list, column: str = "text") -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), path, row_group_size=7)
    return path


def read(*words: object, column: str = "text", file: int = 0, record: int = 0) -> list[str]:
    files, own = find([str(word) for word in words])
    assert not own
    return list(itertools.chain.from_iterable(b.texts for b in batches(files, column, file=file, record=record)))


# Formats


@pytest.mark.parametrize("name", ["c4-train.00000-of-01024.json.gz", "a.jsonl", "a.json", "odd [1] *name?.jsonl"])
def test_json_lines_give_their_texts_in_order(tmp_path: Path, name: str):
    """Every text of C4's schema comes out as it went in, whatever it holds and whatever the file is called."""
    assert read(write_json(tmp_path / ".hidden" / name, TEXTS)) == TEXTS


def test_parquet_gives_its_texts_in_order(tmp_path: Path):
    """Every text of a Parquet file comes out, over row groups, by the column that is named; empty ones are left out."""
    path = write_parquet(tmp_path / "a.parquet", [*TEXTS, None, " "], column="content")
    assert read(path, column="content") == TEXTS


def test_json_lines_of_any_shape_are_read(tmp_path: Path):
    """Other columns may change their types, texts may look like dates, lines may be blank, and halves of pairs heal."""
    path = tmp_path / "a.jsonl"
    entries = [
        {"text": "2019-04-25T12:57:54Z", "other": 1},
        {"other": "x", "text": "one"},
        {"text": "two \ud83d three", "other": [1]},
        {"text": None},
        {"text": "  "},
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(json.dumps(entry) for entry in entries).encode())
    assert read(path) == ["2019-04-25T12:57:54Z", "one", "two \ufffd three"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_text_is_cut_into_documents(tmp_path: Path, name: str):
    """Paragraphs of a text file are gathered, its byte order mark and line ends made uniform."""
    parts = [f"{i} " + "word " * 100 for i in range(10)]
    data = b"\xef\xbb\xbf" + "\r\n\r\n".join(parts).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    texts = read(tmp_path / name)
    assert "\n\n".join(texts) == "\n\n".join(parts)
    assert len(texts) == 5


@given(st.lists(st.integers(1, 2500), min_size=1, max_size=30), st.sampled_from(["\n\n", "\n \n", "\n\n\t\n"]))
def test_paragraphs_are_gathered_to_documents(sizes: list[int], blank: str):
    """Every paragraph is in one document, in order; each has 1,000 characters, and would not without its last."""
    parts = [f"{i:02d}" + "x" * size for i, size in enumerate(sizes)]
    texts = list(paragraphs.documents(io.StringIO(blank.join(parts))))
    assert "\n\n".join(texts).split("\n\n") == parts
    if len(texts) > 1:
        assert min(map(len, texts)) >= 1000
        assert all(len("".join(text.split("\n\n")[:-1])) < 1000 for text in texts[:-1])


@pytest.mark.parametrize("text", ["word " * 40_000, "x" * 100_000, "a line of words\n" * 20_000])
def test_text_without_blank_lines_stays_in_bounds(text: str):
    """A file without blank lines, or without ends of lines, or without blanks, comes in pieces, without loss."""
    found = list(paragraphs.documents(io.StringIO(text)))
    assert len(found) > 5
    assert max(map(len, found)) <= 3 * paragraphs.MAX_PARAGRAPH
    assert "".join("".join(found).split()) == "".join(text.split())


def test_a_huge_record_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A text of more characters than a document may have becomes several, cut at blanks, without loss."""
    monkeypatch.setattr(sources, "MAX_DOCUMENT", 1000)
    text = "word " * 1000 + "y" * 2500
    texts = read(write_json(tmp_path / "a.jsonl", [text]))
    assert "".join(texts) == text
    assert len(texts) >= 5
    assert max(map(len, texts)) <= 1000


# Places


@pytest.mark.parametrize("kind", ["json", "parquet", "text"])
def test_reading_goes_on_from_any_place(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    """From the place after each batch, the rest of all files is read, no document twice and none left out."""
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 7)
    for number, part in enumerate((TEXTS[:25], TEXTS[25:26], TEXTS[26:])):
        if kind == "json":
            write_json(tmp_path / f"{number}.json.gz", [*part, ""])
        elif kind == "parquet":
            write_parquet(tmp_path / f"{number}.parquet", [None, *part])
        else:
            (tmp_path / f"{number}.txt").write_text("\n\n".join(text + " word" * 150 for text in part))
    files, _ = find([str(tmp_path)])
    every = list(batches(files))
    whole = list(itertools.chain.from_iterable(batch.texts for batch in every))
    assert len(whole) == 60 if kind != "text" else len(whole) > 45
    assert len(every) >= 9
    for number, batch in enumerate(every):
        rest = list(
            itertools.chain.from_iterable(b.texts for b in batches(files, file=batch.file, record=batch.record))
        )
        assert rest == list(itertools.chain.from_iterable(b.texts for b in every[number + 1 :]))


def test_sizes_are_utf8_bytes(tmp_path: Path):
    """The sizes of a batch are the bytes of its texts."""
    files, _ = find([str(write_json(tmp_path / "a.jsonl", TEXTS))])
    for batch in batches(files):
        assert batch.sizes == [len(text.encode()) for text in batch.texts]


# Words


def test_words_name_files_folders_and_patterns(tmp_path: Path):
    """The order of words is kept; files of one word are sorted; other files of a folder are left alone."""
    for name in ("b.jsonl", "a.jsonl", "sub/c.parquet", "note.pdf", "z.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    files, _ = find([str(tmp_path / "z.txt"), str(tmp_path / "*.jsonl")])
    assert [(file.name, file.kind) for file in files] == [("z.txt", "text"), ("a.jsonl", "json"), ("b.jsonl", "json")]
    files, _ = find([str(tmp_path)])
    assert [file.name for file in files] == ["a.jsonl", "b.jsonl", "c.parquet", "z.txt"]
    assert [file.kind for file in find([str(tmp_path / "note.pdf")], "text")[0]] == ["text"]


def test_equal_names_in_two_folders_are_told_apart(tmp_path: Path):
    """Two files of one name have their paths as names, so that a record can hold both."""
    for folder in ("x", "y"):
        write_json(tmp_path / folder / "a.jsonl", TEXTS)
    files, _ = find([str(tmp_path)])
    assert [file.name for file in files] == [str(tmp_path / "x" / "a.jsonl"), str(tmp_path / "y" / "a.jsonl")]


def test_links_are_what_their_names_say(tmp_path: Path):
    """Of links to nameless files, as in the hub's cache, the links' names count; two names of one file are told."""
    (tmp_path / "snapshot").mkdir()
    for number, name in enumerate(("c4-train.00000-of-01024.json.gz", "c4-validation.00000-of-00008.json.gz")):
        write_json(tmp_path / name, TEXTS)
        (tmp_path / name).rename(tmp_path / f"blob{number}")
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / f"blob{number}")
    train, own = find([str(tmp_path / "snapshot")])
    assert [file.name for file in own] == ["c4-validation.00000-of-00008.json.gz"]
    assert [text for batch in batches(train) for text in batch.texts] == TEXTS
    (tmp_path / "again.json.gz").symlink_to(tmp_path / "blob0")
    with pytest.raises(UsageError, match=r"again\.json\.gz is named twice"):
        find([str(tmp_path / "snapshot"), str(tmp_path / "again.json.gz")])


def test_c4s_own_validation_files_are_set_apart(tmp_path: Path):
    """Of a folder with C4's files, those of its validation split are no training text; on the hub as well."""
    for name in ("c4-train.00000-of-01024.json.gz", "c4-validation.00000-of-00008.json.gz"):
        write_json(tmp_path / name, TEXTS)
    train, own = find([str(tmp_path)])
    assert [file.name for file in train + own] == [train[0].name, "c4-validation.00000-of-00008.json.gz"]
    train, own = find(["c4"])
    assert (len(train), len(own)) == (1024, 8)
    assert train[1].path == "hf://datasets/allenai/c4/en/c4-train.00001-of-01024.json.gz"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("absent.jsonl", "there is no such file"),
        ("*.jsonl", "matches no file"),
        ("empty", "the folder holds no file that ends in"),
        ("note.pdf", "ends in none of .*--kind"),
    ],
)
def test_words_that_name_nothing(tmp_path: Path, word: str, message: str):
    """Each is told with its name and what to do."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.pdf").write_text("x")
    with pytest.raises(UsageError, match=message) as told:
        find([str(tmp_path / word)])
    assert word in str(told.value)
    with pytest.raises(UsageError, match="is named twice"):
        find([str(tmp_path / "note.pdf")] * 2, "text")


# Damage


def damaged(tmp_path: Path, case: str) -> Path:
    """A file with one fault."""
    path = write_json(tmp_path / "a.json.gz", TEXTS)
    data = path.read_bytes()
    packed = {
        "latin": '{"text": "na\u00efve"}\n'.encode("latin-1"),
        "line": gzip.decompress(data) + b'{"text": \n',
        "list": b'[{"text": "a"}]',
        "number": b'{"text": 1}\n',
    }
    if case == "cut":
        path.write_bytes(data[:-40])
    elif case == "flipped":
        path.write_bytes(data[:200] + bytes(20) + data[220:])
    elif case == "unpacked":
        path.write_bytes(gzip.decompress(data))
    elif case == "column":
        write_json(path, TEXTS, column="content")
    elif case in packed:
        path.write_bytes(gzip.compress(packed[case]))
    elif case == "parquet":
        path = tmp_path / "a.parquet"
        path.write_bytes(b"PAR1 and then something else")
    elif case == "parquet column":
        path = write_parquet(tmp_path / "a.parquet", TEXTS, column="content")
    elif case == "parquet number":
        path = write_parquet(tmp_path / "a.parquet", [1, 2])
    elif case == "text":
        path = tmp_path / "a.txt"
        path.write_bytes(b"caf\xe9")
    elif case == "text cut":
        path = tmp_path / "a.txt.gz"
        path.write_bytes(gzip.compress(b"some words" * 1000)[:-9])
    return path


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("cut", r"a\.json\.gz: is not a whole gzip file .*fetch it again"),
        ("flipped", r"a\.json\.gz: is not a whole gzip file .*fetch it again"),
        ("unpacked", r"a\.json\.gz: is not a whole gzip file"),
        ("latin", r"a\.json\.gz: is not UTF-8; convert it"),
        ("line", r"a\.json\.gz: line 61 is not a JSON object .*write one object a line"),
        ("list", r"a\.json\.gz: is one JSON list, not JSON lines"),
        ("column", r"a\.json\.gz: line 1 has no 'text', but 'content', 'timestamp', 'url'; choose with --column"),
        ("number", r"a\.json\.gz: line 1: 'text' is int, not text"),
        ("parquet", r"a\.parquet: cannot be read as parquet"),
        ("parquet column", r"a\.parquet: has no column 'text', but id, content; choose with --column"),
        ("parquet number", r"a\.parquet: the column 'text' is int64, not text"),
        ("text", r"a\.txt: is not UTF-8"),
        ("text cut", r"a\.txt\.gz: is not a whole gzip file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, case: str, message: str, capfd: pytest.CaptureFixture[str]):
    """One message names the file, the place, and the remedy; nothing else is printed."""
    with pytest.raises(UsageError, match=message):
        read(damaged(tmp_path, case))
    assert capfd.readouterr().err == ""


def test_a_hub_out_of_reach_is_told():
    """C4 without a network gives one message that names the file and both remedies."""
    file = File("hf://datasets/allenai/c4/en/c4-train.00000-of-01024.json.gz", "allenai/c4 en/x", "json", -1)
    with pytest.raises(
        UsageError, match=r"allenai/c4 en/x: cannot be read from the hub .*or fetch C4's .json.gz files"
    ):
        list(batches([file]))


# Reading ahead


def test_reading_ahead_changes_nothing():
    """The same items in the same order; an error comes after the items before it; stopping early ends the thread."""
    assert list(ahead(iter(range(100)))) == list(range(100))

    def faulty():
        yield 1
        raise UsageError("told")

    items = ahead(faulty())
    assert next(items) == 1
    with pytest.raises(UsageError, match="told"):
        next(items)
    closed: list[bool] = []

    def endless():
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    items = ahead(endless())
    assert next(items) == 0
    items.close()
    assert closed == [True]
