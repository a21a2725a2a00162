"""Corpora of text: which documents are held out, and which windows each replica reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from textmaker import write_lines
from twophase.base.config import UsageError
from twophase.tasks.lm.config import DataConfig
from twophase.tasks.lm.corpus import Corpus, build, load_documents
from twophase.tasks.lm.tokens import CHARACTERS
from twophase.text.library import fingerprint


def paragraph(number: int, words: int = 200) -> str:
    """A paragraph that names its number in every word."""
    return " ".join(f"word{number}" for _ in range(words))


def numbered(path: Path, count: int) -> Path:
    return write_lines(path, [paragraph(i, words=20) for i in range(count)])


def text_corpus(path: Path, replicas: int = 1, **options: object) -> Corpus:
    """The corpus of a file, read in small windows."""
    values = {"sequence_length": 16, "batch_size": 4, "validation_windows": 8} | options
    return build(DataConfig(corpus=f"file:{path}", **values), replicas)  # type: ignore[arg-type]


def stream(windows: object) -> np.ndarray:
    """The tokens whose windows begin at every token."""
    rows = np.asarray(windows)
    return np.concatenate([rows[:, 0], rows[-1, 1:]])


def text_of(ids: Iterable[int]) -> str:
    return "".join(CHARACTERS[number] for number in ids)


def ready(training: np.ndarray, length: int = 16, batch: int = 4, windows: int = 8) -> Corpus:
    """A corpus of given tokens, (replicas, tokens), which validates on the first replica's."""
    replicas, share = training.shape
    rows = sliding_window_view(training.ravel(), length + 1), sliding_window_view(training[0], length + 1)
    data = DataConfig(sequence_length=length, batch_size=batch, validation_windows=windows)
    return Corpus(1 << 16, None, *rows, data, replicas, share - length, False, {})


# Documents


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz"])
def test_documents_of_a_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """Lines of JSON, or paragraphs of plain text, are documents, in order, each once; gzip, `~` and a mark are read."""
    texts = [paragraph(i) for i in (0, 1, 2, 1)]
    data = "\n\n".join(texts) if ".txt" in name else write_lines(tmp_path / "x", [*texts, " "]).read_text()
    marked = data.encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(marked) if name.endswith(".gz") else marked)
    monkeypatch.setenv("HOME", str(tmp_path))
    documents, description = load_documents(f"file:~/{name}")
    assert documents == texts[:3]
    assert description == f"text of {name}: 3 documents, {sum(map(len, texts[:3])):,} characters"


def test_text_without_blank_lines_is_gathered_by_lines(tmp_path: Path):
    """One long paragraph, such as a sentence a line, still gives many documents."""
    text = "\n".join(paragraph(i, words=20) for i in range(100))
    (tmp_path / "lines.txt").write_text(text)
    documents, _ = load_documents(f"file:{tmp_path / 'lines.txt'}")
    assert "\n".join(documents) == text
    assert len(documents) > 10


REFUSED: dict[str, tuple[bytes | None, str]] = {
    "file:empty.txt": (b" \n\n \t\n", "holds no text.* or JSON lines"),
    "file:single.txt": (b"only one line", "is a single document of 13 characters.*larger file"),
    "file:latin.txt": ("na\u00efve\n\n".encode("latin-1"), "is not UTF-8; .*iconv"),
    "file:absent.txt": (None, r"cannot be read .*No such file.*name one file that can be read"),
    "file:": (None, "must be python, python-code, file:PATH or tokens:PATH"),
    "c4": (None, "must be python, python-code, file:PATH or tokens:PATH"),
}


@pytest.mark.parametrize("corpus", REFUSED)
def test_unusable_texts_are_refused(tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch):
    """Each is refused with one line that names the option, what is wrong and the remedy."""
    content, message = REFUSED[corpus]
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / corpus.removeprefix("file:")).write_bytes(content)
    with pytest.raises(UsageError, match=f"^--data.corpus .*{message}") as refusal:
        load_documents(corpus)
    assert "\n" not in str(refusal.value)


# Held-out documents and shares


@pytest.mark.parametrize(("count", "share", "apart"), [(50, 0.08, 4), (50, 0.001, 1), (50, 0.999, 49), (2, 0.5, 1)])
def test_whole_documents_are_held_out(tmp_path: Path, count: int, share: float, apart: int):
    """The held-out share counts documents, at least one and at most all but one; all others are trained on."""
    built = text_corpus(numbered(tmp_path / "a.jsonl", count), held_out=share)
    held_out, training = (text_of(stream(rows)).split("\n\n") for rows in (built.held_out, built.training))
    assert len(held_out) == apart == built.description["held_out_documents"]
    assert sorted(held_out + training) == sorted(paragraph(i, words=20) for i in range(count))


def test_held_out_documents_depend_on_the_text_only(tmp_path: Path):
    """Other replicas, window lengths and batches see the same held-out documents; the order is shuffled."""
    path = numbered(tmp_path / "a.jsonl", 50)
    first, *others = (
        stream(text_corpus(path, replicas, **options).held_out).tolist()
        for replicas, options in ((1, {}), (2, {}), (3, {"sequence_length": 8, "batch_size": 2}))
    )
    assert others == [first, first]
    assert set(text_of(first).split()) != {f"word{i}" for i in range(4)}


def test_replicas_of_a_non_iid_split_have_their_own_documents(tmp_path: Path):
    """Documents stay in their order, so that shares differ in kind; the held-out ones are those of the iid split."""
    path = numbered(tmp_path / "a.jsonl", 50)
    mixed, apart = (text_corpus(path, 2, split=split) for split in ("iid", "non-iid"))
    assert stream(mixed.held_out).tolist() == stream(apart.held_out).tolist()
    trained = [[int(text.split()[0][4:]) for text in text_of(stream(c.training)).split("\n\n")] for c in (mixed, apart)]
    assert sorted(trained[0]) == trained[1] != trained[0]


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_replicas_share_the_text_equally(tmp_path: Path, replicas: int):
    """The shares are equal, contiguous and disjoint, and leave out fewer tokens than there are replicas."""
    path = numbered(tmp_path / "a.jsonl", 50)
    tokens = len(stream(text_corpus(path).training))
    built = text_corpus(path, replicas, batch_size=4000)
    share = tokens // replicas
    assert built.windows_per_replica == share - 16
    whole = stream(built.training)
    for replica in range(replicas):
        part = sliding_window_view(whole[replica * share : (replica + 1) * share], 16)
        assert set(map(bytes, built.batch(0, 0, replica)[0])) <= set(map(bytes, part.astype(np.int64)))


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Four words of Philox4x64-10, from the paper's definition."""
    mask, (k0, k1), (c0, c1, c2, c3) = 2**64 - 1, key, counter
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & mask, (p0 >> 64) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def reference_starts(seed: int, step: int, replica: int, batch: int, count: int) -> list[int]:
    """Window starts by Philox in plain Python; NumPy raises the counter before its first word."""
    blocks = [philox((seed, replica), (i + 1, step, 0, 0)) for i in range(-(-batch // 4))]
    return [word % count for block in blocks for word in block][:batch]


@given(
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 3)),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(0, 60),
)
def test_batches_are_those_of_the_counter(call: tuple[int, int, int], batch: int, length: int, extra: int):
    """Starts equal a plain Python Philox of (seed, step, replica); windows lie whole within their replica's share."""
    size = length + 1 + extra
    training = (np.arange(size) + 200 * np.arange(4)[:, None]).astype(np.uint16)
    tokens, targets = ready(training, length, batch).batch(*call)
    assert tokens.shape == targets.shape == (batch, length)
    assert tokens.dtype == targets.dtype == np.int64
    starts = reference_starts(*call, batch, size - length)
    assert tokens.tolist() == [[200 * call[2] + start + i for i in range(length)] for start in starts]
    assert np.array_equal(targets, tokens + 1)


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 200))
def test_validation_windows_are_spread_evenly(windows: int, length: int, extra: int):
    """The first window starts the held-out text, the last one ends it, and the gaps differ by at most one token."""
    tokens, targets = ready(np.arange(length + 1 + extra, dtype=np.uint16)[None], length, windows=windows).validation()
    starts = tokens[:, 0]
    assert np.array_equal(tokens, starts[:, None] + np.arange(length))
    assert np.array_equal(targets, tokens + 1)
    assert starts[0] == 0
    if windows > 1:
        assert targets[-1, -1] == length + extra
        assert np.ptp(np.diff(starts)) <= 1


def test_description_counts_what_there_is(tmp_path: Path):
    """The record holds plain values: corpus, fingerprint, counts that add up, the replaced share and the vocabulary."""
    path = write_lines(tmp_path / "a.jsonl", [paragraph(i) + "\u2014" for i in range(20)])
    built = text_corpus(path, replicas=2)
    description = built.description
    assert json.loads(json.dumps(description)) == description
    texts, _ = load_documents(f"file:{path}")
    characters = description["training_characters"] + description["validation_characters"]
    assert characters == sum(map(len, texts)) + 2 * (20 - 2)  # separators within each of the two streams
    assert description["replaced_share"] == pytest.approx(20 / characters)
    assert description["fingerprint"] == fingerprint(texts)
    assert (description["documents"], description["vocabulary"], built.vocabulary_size) == (20, "char", 96)


def test_a_text_of_other_letters_wants_bytes(tmp_path: Path):
    """More than 1 % of unknown characters are refused under `char`, with the remedy, and kept under `bytes`."""
    path = write_lines(tmp_path / "a.jsonl", [f"{i} " + "\u043e\u043a\u043d\u043e " * 50 for i in range(20)])
    with pytest.raises(UsageError, match=r"7\d\.\d% of its characters .*--data.vocabulary bytes"):
        text_corpus(path)
    built = text_corpus(path, vocabulary="bytes")
    assert built.description["replaced_share"] == 0
    assert len(stream(built.training)) > 1.5 * built.description["training_characters"]


def test_windows_that_do_not_fit_are_refused(tmp_path: Path):
    """A share or a held-out text shorter than a window is refused with numbers and remedies; the longest fits."""
    path = write_lines(tmp_path / "a.jsonl", [chr(97 + i) * 20 for i in range(10)])
    # One held-out document of 20 tokens, nine training documents of 20 with eight separators of 2: 196 tokens.
    with pytest.raises(UsageError, match=r"196 training tokens over --replicas 10 leave 19 to each.* takes 20\. Lower"):
        text_corpus(path, 10, sequence_length=19)
    with pytest.raises(UsageError, match=r"1 of 10 documents are held out, which are 20 tokens.* takes 21\. Lower"):
        text_corpus(path, sequence_length=20)
    built = text_corpus(path, 9, sequence_length=19)
    assert built.batch(0, 0, 8)[0].shape == (4, 19)
    assert built.validation()[0].shape == (8, 19)


@pytest.mark.parametrize(
    ("vocabulary_size", "tokenizer", "message"),
    [(95, "", "--model.vocabulary-size is 95, .* at least 96"), (0, "mistral", "--data.tokenizer is 'mistral', but")],
)
def test_options_that_do_not_fit_a_text(tmp_path: Path, vocabulary_size: int, tokenizer: str, message: str):
    """A model with too few rows, and a tokenizer for text that has a vocabulary, are refused by option."""
    data = DataConfig(corpus=f"file:{numbered(tmp_path / 'a.jsonl', 50)}", tokenizer=tokenizer)
    with pytest.raises(UsageError, match=message):
        build(data, 1, vocabulary_size)
