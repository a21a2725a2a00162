"""Corpora of token shards: which replica reads which window when, and what is refused before a run begins."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shardmaker
from shardmaker import SHA256
from twophase.base.config import UsageError
from twophase.tasks.lm.config import DataConfig
from twophase.tasks.lm.corpus import Corpus, build

VOCABULARY = 60_000
T = 5


def counting(start: int, tokens: int, dtype: str = "uint16") -> np.ndarray:
    """Ids that count up, so that every window is known by its first token."""
    return np.arange(start, start + tokens).astype(dtype)


def prepared(folder: Path, train: Sequence[np.ndarray], validation: Sequence[np.ndarray]) -> Path:
    return shardmaker.prepared(folder, train, validation, VOCABULARY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Training shards of 20, 11 and 1 windows of 5 tokens, 32 in all, each with a rest; 9 windows to validate on."""
    train = [counting(0, 101), counting(200, 60), counting(300, 8)]
    return prepared(tmp_path / "toy", train, [counting(1000, 46)])


def data(folder: Path, **options: object) -> DataConfig:
    """A configuration for a folder and small windows."""
    values = {"sequence_length": T, "batch_size": 3, "validation_windows": 4} | options
    return DataConfig(corpus=f"tokens:{folder}", **values)  # type: ignore[arg-type]


FIRST_TOKENS = [*range(0, 100, T), *range(200, 255, T), 300]
"""Of the 32 windows of `folder`."""


def starts(corpus: Corpus, replica: int, samples: int, seed: int = 0) -> list[int]:
    """First tokens of a replica's first windows, in the order in which a run reads them."""
    steps = -(-samples // corpus.data.batch_size)
    return [int(row[0]) for step in range(steps) for row in corpus.batch(seed, step, replica)[0]][:samples]


# Which replica reads which window when


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 32])
@pytest.mark.parametrize("batch", [1, 3, 50])
def test_each_replica_reads_its_share_once_an_epoch(folder: Path, replicas: int, batch: int):
    """In each epoch a replica reads each window of its contiguous share once, whatever the batches, and no other."""
    corpus = build(data(folder, batch_size=batch), replicas)
    share = 32 // replicas
    for replica in range(replicas):
        read = starts(corpus, replica, 3 * share)
        for epoch in range(3):
            assert (
                sorted(read[epoch * share : (epoch + 1) * share])
                == FIRST_TOKENS[replica * share : (replica + 1) * share]
            )


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_batches_are_what_torch_takes(tmp_path: Path, dtype: str):
    """Whole windows and targets one place on, as int64 arrays without gaps that the caller may change."""
    shards = [counting(0, 61, dtype), counting(100, 40, dtype)]
    corpus = build(data(prepared(tmp_path / "toy", shards, [counting(0, 46, dtype)])), 2)
    for tokens, targets in (*(corpus.batch(7, step, 1) for step in range(6)), corpus.validation()):
        assert (tokens == tokens[:, :1] + np.arange(T)).all()
        assert (targets == tokens + 1).all()
        assert tokens.dtype == targets.dtype == np.int64
        assert tokens.flags.c_contiguous
        assert tokens.flags.owndata
    assert corpus.description["dtype"] == dtype
    corpus.batch(0, 0, 0)[0][:] = 0
    assert corpus.batch(0, 0, 0)[0].any()


def test_a_batch_is_a_pure_function(folder: Path):
    """Reopened, asked for in another order or for one replica alone, a batch is the same; and as in versions before."""
    corpus = build(data(folder), 2)
    whole = {(step, replica): corpus.batch(11, step, replica) for step in range(15) for replica in range(2)}
    for step, replica in [(14, 1), (0, 0), (7, 1), (5, 0), (6, 0)]:
        assert np.array_equal(build(data(folder), 2).batch(11, step, replica), whole[step, replica])
    golden = [0, 65, 35, 45, 20, 40]  # printed once
    assert set(golden) < set(FIRST_TOKENS[:16])
    assert starts(corpus, 0, 6, seed=5) == golden


# Enough tokens


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_run_longer_than_its_tokens_is_refused(folder: Path, replicas: int):
    """The bound is exact: up to it nothing is read twice; one more step is refused, naming those that are possible."""
    corpus = build(data(folder), replicas)
    possible = 32 // replicas // 3
    corpus.check_enough(possible)
    assert max(Counter(starts(corpus, 0, possible * 3)).values()) == 1
    with pytest.raises(UsageError) as refusal:
        corpus.check_enough(possible + 1)
    message = str(refusal.value)
    assert f"takes {(possible + 1) * 3 * replicas * T:,} training tokens" in message
    assert f"Whole windows have {32 // replicas * replicas * T:,}." in message
    assert f"--steps {possible}," in message
    assert "--repeat" in message


def test_a_batch_larger_than_a_share_is_refused(folder: Path):
    """No number of steps helps then; the message offers a batch that does."""
    with pytest.raises(UsageError, match=r"use --data\.batch-size 16 or less, or"):
        build(data(folder, batch_size=17), 2).check_enough(1)
    build(data(folder, batch_size=16), 2).check_enough(1)
    with pytest.raises(UsageError, match=r"use --data\.batch-size 5 or less, or"):
        build(data(folder, batch_size=17), 2).check_enough(3)
    build(data(folder, batch_size=5), 2).check_enough(3)
    with pytest.raises(UsageError, match=r"use --steps 16 or less with --data\.batch-size 1, or"):
        build(data(folder, batch_size=17), 2).check_enough(20)
    build(data(folder, batch_size=1), 2).check_enough(16)


# What a corpus says of itself, and what is refused


def test_facts_of_a_prepared_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Size and bytes of ids are the tokenizer's; the record is of plain values; a moved folder has its fingerprint."""
    for rows in (0, VOCABULARY, VOCABULARY + 64):
        corpus = build(data(folder), 3, rows)
        assert corpus.vocabulary_size == VOCABULARY
        assert corpus.token_bytes is not None
        assert corpus.token_bytes[[3, 255, 256]].tolist() == [3, 255, 256]
    description = corpus.description
    assert json.loads(json.dumps(description)) == description
    assert description["corpus"] == f"tokens:{folder}"
    assert description["text"] == "token shards: 169 training tokens, 46 for validation, tokenizer toy"
    assert (description["vocabulary"], description["tokenizer_sha256"]) == ("toy", SHA256)
    assert (description["training_windows"], description["windows_per_replica"]) == (32, 10)
    assert description["source"] == {"kind": "made up"}
    shutil.copytree(folder, tmp_path / "moved")
    monkeypatch.setenv("HOME", str(tmp_path))
    moved = build(replace(data(folder), corpus="tokens:~/moved"), 3)
    assert moved.description["fingerprint"] == description["fingerprint"]


@pytest.mark.parametrize("tokenizer", ["", "toy", SHA256, SHA256[:8], SHA256[:20].upper()])
def test_the_expected_tokenizer_is_accepted(folder: Path, tokenizer: str):
    """By name, by the beginning of its hash, or not asked for."""
    assert build(data(folder, tokenizer=tokenizer), 2).description["tokenizer"] == "toy"


@pytest.mark.parametrize("tokenizer", ["mistral", SHA256[:7], SHA256[1:20], "to", "TOY"])
def test_another_tokenizer_is_refused(folder: Path, tokenizer: str):
    """Another name, too few digits or others: the message names both and what to do."""
    with pytest.raises(UsageError, match=rf"--data\.tokenizer is '{tokenizer}', .*'toy' \(SHA-256 0123456789ab"):
        build(data(folder, tokenizer=tokenizer), 2)


REFUSED: list[tuple[dict[str, object], int, int, str]] = [
    ({"validation_windows": 10}, 2, 0, r"46 validation tokens are 9 windows .*use --data\.validation-windows 9 or"),
    ({"sequence_length": 46}, 2, 0, r"0 windows of --data\.sequence-length 46.*lower --data\.sequence-length"),
    ({"sequence_length": 101}, 1, 0, "0 windows"),
    ({}, 33, 0, r"169 training tokens are 32 windows of --data\.sequence-length 5.*replicas 33"),
    ({}, 2, VOCABULARY - 1, rf"--model\.vocabulary-size is {VOCABULARY - 1}, .* at least {VOCABULARY}"),
    ({"corpus": "tokens:"}, 2, 0, "must be tokens:PATH"),
    ({"corpus": "tokens:absent"}, 2, 0, r"absent: there is no such file or folder .*\. Make one with `twophase"),
    ({"corpus": "tokens:toy/train-00000.bin"}, 2, 0, "is a part of a prepared folder; name the folder"),
    ({"corpus": "tokens:begun"}, 2, 0, r"holds no meta\.json: .*repeat the command if it was interrupted"),
    ({"corpus": "tokens:bare"}, 2, 0, r"do not say how many ids .*--model\.vocabulary-size"),
    ({"corpus": "tokens:bare", "tokenizer": "gpt2"}, 2, 50_304, r"--data\.tokenizer is 'gpt2', .*Leave it out"),
]


@pytest.mark.parametrize(("options", "replicas", "rows", "message"), REFUSED)
def test_what_is_refused(  # noqa: PLR0917 - fixtures and a table's columns
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], replicas: int, rows: int, message: str
):
    """Windows that do not fit, too few rows, and what is no corpus of tokens: each message says what to do."""
    monkeypatch.chdir(folder.parent)
    for name in ("begun", "bare"):
        Path(name).mkdir()
    Path("begun/.tmp-train-00000.bin").write_bytes(b"ab")
    for name in ("train", "val"):
        counting(0, 101).tofile(f"bare/{name}.bin")
    with pytest.raises(UsageError, match=message):
        build(replace(data(folder), **options), replicas, rows)  # type: ignore[arg-type]


def test_nanogpt_files_are_a_corpus(tmp_path: Path):
    """By folder or by file; the vocabulary is the model's, and what is unknown is None."""
    counting(0, 101).tofile(tmp_path / "train.bin")
    counting(500, 46).tofile(tmp_path / "val.bin")
    fingerprints = set()
    for path in (tmp_path, tmp_path / "train.bin"):
        corpus = build(data(path), 2, 50_304)
        fingerprints.add(corpus.description["fingerprint"])
        assert sorted(starts(corpus, 1, 10)) == list(range(50, 100, 5))
        assert corpus.validation()[0][0, 0] == 500
        assert (corpus.vocabulary_size, corpus.token_bytes) == (50_304, None)
        assert corpus.description["vocabulary"] == "unknown"
        with pytest.raises(UsageError, match=r"use a larger file, use --steps 3"):
            corpus.check_enough(4)
    assert len(fingerprints) == 1
