"""Corpora of text and of token shards: what is held out, which windows each replica reads, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

import shardmaker
from shardmaker import counting
from textmaker import paragraph, write_lines
from twophase.config import update
from twophase.errors import UsageError
from twophase.tasks.lm.config import DataConfig, TrainConfig
from twophase.tasks.lm.data import Corpus, build
from twophase.tasks.registry import task_of
from twophase.text.tokenizers import CHARACTERS

T = 5
VOCABULARY = 60_000


def numbered(path: Path) -> Path:
    return write_lines(path, [paragraph(i, 20) for i in range(50)])


def text_corpus(path: Path, replicas: int = 1, **options: Any) -> Corpus:
    """The corpus of a file, read in small windows."""
    values: dict[str, Any] = {"sequence_length": 16, "batch_size": 4, "validation_windows": 8} | options
    return build(DataConfig(corpus=f"file:{path}", **values), replicas)


def stream(windows: object) -> np.ndarray:
    """The tokens whose windows begin at every token."""
    rows = np.asarray(windows)
    return np.concatenate([rows[:, 0], rows[-1, 1:]])


def text_of(ids: Iterable[int]) -> str:
    return "".join(CHARACTERS[number] for number in ids)


# Text


def test_a_relative_path_is_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In one process, too: another folder's file of the same name is another corpus."""
    prints = set()
    for name, letter in (("a", "x"), ("b", "y")):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "text.jsonl", [f"{i} {letter * 900}" for i in range(50)])
        monkeypatch.chdir(tmp_path / name)
        task = task_of(update(TrainConfig(), {"data.corpus": "file:text.jsonl"}))
        prints |= {task.describe()["fingerprint"]}
    assert len(prints) == 2


@pytest.mark.parametrize(("share", "apart"), [(0.08, 4), (0.001, 1), (0.999, 49)])
def test_whole_documents_are_held_out(tmp_path: Path, share: float, apart: int):
    """The held-out share counts documents, at least one and at most all but one; all others are trained on, once."""
    path = write_lines(tmp_path / "a.jsonl", [paragraph(i, 20) for i in (*range(50), 0)])
    built = text_corpus(path, held_out=share)
    held_out, training = (text_of(stream(rows)).split("\n\n") for rows in (built.held_out, built.training))
    assert len(held_out) == apart == built.description["held_out_documents"]
    assert sorted(held_out + training) == sorted(paragraph(i, 20) for i in range(50))


def test_splits_have_the_same_held_out_documents(tmp_path: Path):
    """Other replicas, windows and splits hold out the same; of a non-iid split the others stay in their order."""
    path = numbered(tmp_path / "a.jsonl")
    built = [text_corpus(path), text_corpus(path, 3, sequence_length=8), text_corpus(path, 2, split="non-iid")]
    first, *others = (stream(each.held_out).tolist() for each in built)
    assert others == [first, first]
    assert set(text_of(first).split()) != {f"word{i}" for i in range(4)}
    mixed, _, apart = ([int(t.split()[0][4:]) for t in text_of(stream(c.training)).split("\n\n")] for c in built)
    assert sorted(mixed) == apart != mixed


@pytest.mark.parametrize("replicas", [1, 2, 7])
def test_replicas_share_the_text_equally(tmp_path: Path, replicas: int):
    """The shares are equal, contiguous and disjoint, and leave out fewer tokens than there are replicas."""
    built = text_corpus(numbered(tmp_path / "a.jsonl"), replicas, batch_size=4000)
    whole = stream(built.training)
    share = len(whole) // replicas
    assert built.windows_per_replica == share - 16
    for replica in range(replicas):
        part = sliding_window_view(whole[replica * share : (replica + 1) * share], 16)
        assert set(map(bytes, built.batch(0, 0, replica)[0])) <= set(map(bytes, part.astype(np.int64)))


def ready(training: np.ndarray, length: int, batch: int = 4, windows: int = 8) -> Corpus:
    """A corpus of given tokens, (replicas, tokens), which validates on the first replica's."""
    rows = sliding_window_view(training.ravel(), length + 1), sliding_window_view(training[0], length + 1)
    data = DataConfig(sequence_length=length, batch_size=batch, validation_windows=windows)
    return Corpus(1 << 16, None, *rows, data, len(training), {})


GOLDEN = [
    (0, 0, 0, [731, 338, 281, 796, 387, 285]),
    (5, 7, 3, [757, 601, 869, 32, 144, 172]),
    (2**64 - 1, 2**40, 1, [9, 579, 213, 306, 204, 674]),
]


@pytest.mark.parametrize(("seed", "step", "replica", "starts"), GOLDEN)
def test_batches_of_a_text_are_a_pure_function(seed: int, step: int, replica: int, starts: list[int]):
    """The windows of a share are those of versions before, whose starts were printed once."""
    training = (np.arange(1000) + 2000 * np.arange(4)[:, None]).astype(np.uint16)
    tokens, targets = ready(training, 8, 6).batch(seed, step, replica)
    assert tokens.dtype == targets.dtype == np.int64
    assert np.array_equal(tokens, 2000 * replica + np.array(starts)[:, None] + np.arange(8))
    assert np.array_equal(targets, tokens + 1)


@given(st.integers(2, 30), st.integers(1, 40), st.integers(0, 200))
def test_validation_windows_are_spread_evenly(windows: int, length: int, extra: int):
    """The first window starts the held-out text, the last one ends it, and the gaps differ by at most one token."""
    tokens, targets = ready(np.arange(length + 1 + extra, dtype=np.uint16)[None], length, windows=windows).validation()
    starts = tokens[:, 0]
    assert np.array_equal(tokens, starts[:, None] + np.arange(length))
    assert np.array_equal(targets, tokens + 1)
    assert (starts[0], targets[-1, -1]) == (0, length + extra)
    assert np.ptp(np.diff(starts)) <= 1


def test_what_is_refused_of_a_text(tmp_path: Path):
    """Fewer than two documents, letters that `char` lacks, a share shorter than a window, too few rows of the model."""
    (tmp_path / "single.txt").write_text("only one line")
    letters = write_lines(tmp_path / "letters.jsonl", [f"{i} " + "\u043e\u043a\u043d\u043e " * 50 for i in range(20)])
    # One held-out document of 20 tokens, nine training documents of 20 with eight separators of 2: 196 tokens.
    short = write_lines(tmp_path / "short.jsonl", [chr(97 + i) * 20 for i in range(10)])
    refused: list[tuple[Path, int, dict[str, Any], str]] = [
        (tmp_path / "single.txt", 1, {}, "corpus"),
        (letters, 1, {}, "vocabulary"),
        (short, 10, {"sequence_length": 19}, "sequence-length"),
        (short, 1, {"sequence_length": 20}, "sequence-length"),
    ]
    for path, replicas, options, option in refused:
        with pytest.raises(UsageError, match=rf"--data\.{option}"):
            text_corpus(path, replicas, **options)
    assert text_corpus(letters, vocabulary="bytes").description["replaced_share"] == 0
    rare = write_lines(tmp_path / "rare.jsonl", [f"{i:03}?\u043e\t" * 2 + "x" * 988 for i in range(20)])
    # 40 of 20,000 characters, of which the separators of 19 and 0 neighbours are no part.
    assert text_corpus(rare).description["replaced_share"] == 40 / (20_000 + 2 * 18)
    built = text_corpus(short, 9, sequence_length=19)
    assert built.batch(0, 0, 8)[0].shape == (4, 19)
    with pytest.raises(UsageError, match=r"--model\.vocabulary-size"):
        build(built.data, 1, 95)


# Token shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Training shards of 20, 11 and 1 windows of 5 tokens, 32 in all, each with a rest; 9 windows to validate on."""
    train = [counting(0, 101), counting(200, 60), counting(300, 8)]
    return shardmaker.prepared(tmp_path / "toy", train, [counting(1000, 46)], VOCABULARY)


FIRST_TOKENS = [*range(0, 100, T), *range(200, 255, T), 300]
"""Of the 32 windows of `folder`."""


def data(folder: Path, **options: Any) -> DataConfig:
    values: dict[str, Any] = {"sequence_length": T, "batch_size": 3, "validation_windows": 4} | options
    return DataConfig(corpus=f"tokens:{folder}", **values)


def starts(corpus: Corpus, replica: int, samples: int, seed: int = 0) -> list[int]:
    """First tokens of a replica's first windows, in the order in which a run reads them."""
    steps = -(-samples // corpus.data.batch_size)
    return [int(row[0]) for step in range(steps) for row in corpus.batch(seed, step, replica)[0]][:samples]


@pytest.mark.parametrize("replicas", [1, 2, 3, 32])
@pytest.mark.parametrize("batch", [1, 3, 50])
def test_replicas_read_each_window_once_an_epoch(folder: Path, replicas: int, batch: int):
    """In each epoch no window is read twice, by whichever replica; at most a rest is left; epochs have other orders."""
    corpus = build(data(folder, batch_size=batch), replicas)
    share = 32 // replicas
    read = [starts(corpus, replica, 3 * share) for replica in range(replicas)]
    for epoch in range(3):
        found = [start for part in read for start in part[epoch * share : (epoch + 1) * share]]
        assert len(set(found)) == len(found) == share * replicas
        assert set(found) <= set(FIRST_TOKENS)
    assert share == 1 or read[0][:share] != read[0][share : 2 * share]


def test_a_batch_of_shards_is_a_pure_function(folder: Path):
    """Reopened, in another order or for one replica alone, a batch is the same; and as in versions before."""
    corpus = build(data(folder), 2)
    whole = {(step, replica): corpus.batch(11, step, replica) for step in range(15) for replica in range(2)}
    for step, replica in [(14, 1), (0, 0), (7, 1), (5, 0), (6, 0)]:
        assert np.array_equal(build(data(folder), 2).batch(11, step, replica), whole[step, replica])
    for tokens, targets in (*whole.values(), corpus.validation()):
        assert (tokens == tokens[:, :1] + np.arange(T)).all()
        assert (targets == tokens + 1).all()
        assert tokens.dtype == targets.dtype == np.int64
    assert starts(corpus, 0, 6, seed=5) == [300, 205, 60, 45, 235, 50]  # printed once


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_run_longer_than_its_tokens_is_refused(folder: Path, replicas: int):
    """The bound is exact: up to it nothing is read twice; one more step is refused."""
    corpus = build(data(folder), replicas)
    possible = 32 // replicas // 3
    corpus.check_enough(possible)
    assert max(Counter(starts(corpus, 0, possible * 3)).values()) == 1
    with pytest.raises(UsageError, match=f"--steps.* {possible},"):
        corpus.check_enough(possible + 1)


def test_facts_of_a_prepared_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The tokenizer goes by name; the record is of plain values; a moved folder has its fingerprint."""
    corpus = build(data(folder, tokenizer="toy"), 3, VOCABULARY + 64)
    assert corpus.vocabulary_size == VOCABULARY
    assert corpus.token_bytes is not None
    assert corpus.token_bytes[[3, 255, 256]].tolist() == [3, 255, 256]
    description = corpus.description
    assert json.loads(json.dumps(description)) == description
    assert (description["vocabulary"], description["tokenizer_sha256"]) == ("toy", shardmaker.SHA256)
    shutil.copytree(folder, tmp_path / "moved")
    monkeypatch.setenv("HOME", str(tmp_path))
    moved = build(replace(data(folder), corpus="tokens:~/moved"), 3)
    assert moved.description["fingerprint"] == description["fingerprint"]


REFUSED: list[tuple[dict[str, Any], int, int, str]] = [
    ({"corpus": "c4"}, 2, 0, "--data.corpus"),
    ({"tokenizer": "mistral"}, 2, 0, "--data.tokenizer"),
    ({"validation_windows": 10}, 2, 0, "--data.validation-windows"),
    ({"sequence_length": 101}, 1, 0, "--replicas"),
    ({}, 33, 0, "--replicas"),
    ({}, 2, VOCABULARY - 1, "--model.vocabulary-size"),
]


@pytest.mark.parametrize(("options", "replicas", "rows", "option"), REFUSED)
def test_what_is_refused_of_shards(folder: Path, options: dict[str, Any], replicas: int, rows: int, option: str):
    """Windows that do not fit, too few rows, another tokenizer, and what is no corpus of tokens, by option."""
    with pytest.raises(UsageError, match=option):
        build(replace(data(folder), **options), replicas, rows)


def test_nanogpt_files_are_a_corpus(tmp_path: Path):
    """The vocabulary is the model's, which must be given; what is unknown is None; changes are noticed."""
    counting(0, 101).tofile(tmp_path / "train.bin")
    counting(500, 46).tofile(tmp_path / "val.bin")
    with pytest.raises(UsageError, match=r"--model\.vocabulary-size"):
        build(data(tmp_path), 2)
    corpus = build(data(tmp_path), 2, 50_304)
    assert sorted(starts(corpus, 0, 10) + starts(corpus, 1, 10)) == list(range(0, 100, 5))
    assert corpus.validation()[0][0, 0] == 500
    assert (corpus.vocabulary_size, corpus.token_bytes) == (50_304, None)
    shardmaker.flip(tmp_path / "train.bin")
    assert build(data(tmp_path), 2, 50_304).description["fingerprint"] != corpus.description["fingerprint"]
