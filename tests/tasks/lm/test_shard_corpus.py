"""The corpus of token shards: who reads which window when, and what is refused before a run begins."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
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
from twophase.tasks.lm.shard_corpus import ShardCorpus, build_shards

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


def starts(corpus: ShardCorpus, replica: int, samples: int, seed: int = 0) -> list[int]:
    """First tokens of a replica's first windows, in the order in which a run reads them."""
    steps = -(-samples // corpus.batch_size)
    return [int(row[0]) for step in range(steps) for row in corpus.batch(seed, step, replica)[0]][:samples]


# Who reads which window when


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 32])
@pytest.mark.parametrize("batch", [1, 3, 50])
def test_each_replica_reads_its_own_windows_once_an_epoch(folder: Path, replicas: int, batch: int):
    """In each epoch a replica reads each window of its contiguous share once, whatever the batches, and no other."""
    corpus = build_shards(data(folder, batch_size=batch), replicas, 0)
    own = 32 // replicas
    for replica in range(replicas):
        read = starts(corpus, replica, 3 * own)
        for epoch in range(3):
            seen = read[epoch * own : (epoch + 1) * own]
            assert sorted(seen) == FIRST_TOKENS[replica * own : (replica + 1) * own]


def test_rows_are_whole_windows(folder: Path):
    """Every row counts up from its first token, and its targets are one place on: nothing crosses a shard."""
    corpus = build_shards(data(folder), 2, 0)
    for step in range(12):
        tokens, targets = corpus.batch(7, step, 1)
        assert tokens.shape == targets.shape == (3, T)
        assert (tokens == tokens[:, :1] + np.arange(T)).all()
        assert (targets == tokens + 1).all()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_batches_are_what_torch_takes(tmp_path: Path, dtype: str):
    """int64 without gaps, the caller's own, from ids of either size."""
    train = counting(0, 100, dtype)
    corpus = build_shards(data(prepared(tmp_path / "toy", [train], [counting(0, 46)])), 2, 0)
    for array in (*corpus.batch(0, 0, 0), *corpus.validation()):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
        assert array.flags.owndata
    assert corpus.description["dtype"] == dtype
    corpus.batch(0, 0, 0)[0][:] = 0
    assert corpus.batch(0, 0, 0)[0].any()


def test_a_batch_is_a_pure_function(folder: Path):
    """Reopened, asked for in another order, for one replica alone or in another process, a batch is the same."""
    corpus = build_shards(data(folder), 2, 0)
    whole = {(step, replica): corpus.batch(11, step, replica) for step in range(15) for replica in range(2)}
    for step, replica in [(14, 1), (0, 0), (7, 1), (5, 0), (6, 0)]:
        again = build_shards(data(folder), 2, 0).batch(11, step, replica)
        assert np.array_equal(again, whole[step, replica])
    program = f"""
from twophase.tasks.lm.config import DataConfig
from twophase.tasks.lm.shard_corpus import build_shards
corpus = build_shards(DataConfig("tokens:{folder}", sequence_length=5, batch_size=3, validation_windows=4), 2, 0)
print(corpus.batch(11, 9, 1)[0].tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == whole[9, 1][0].tolist()


def test_order_depends_on_seed_epoch_and_replica(folder: Path):
    """Two seeds, two epochs and two replicas (relative to their shares) all read in different orders."""
    corpus = build_shards(data(folder), 2, 0)
    share = [FIRST_TOKENS[:16], FIRST_TOKENS[16:]]
    orders = set()
    for seed in (0, 1):
        for replica in (0, 1):
            read = [share[replica].index(start) for start in starts(corpus, replica, 32, seed)]
            orders |= {tuple(read[:16]), tuple(read[16:])}
    assert len(orders) == 8
    assert tuple(range(16)) not in orders


def test_the_order_stays_over_versions(folder: Path):
    """The first windows of a run, printed once: no version may read another order. They are windows of the share."""
    golden = [0, 65, 35, 45, 20, 40]
    assert set(golden) < set(FIRST_TOKENS[:16])
    assert len(set(golden)) == 6
    assert starts(build_shards(data(folder), 2, 0), 0, 6, seed=5) == golden


def test_windows_are_read_in_no_order_of_the_text(tmp_path: Path):
    """A batch takes windows from all of a share: each quarter of it is hit about equally often by the first samples."""
    folder = prepared(tmp_path / "toy", [counting(0, 40_001)], [counting(0, 46)])
    read = starts(build_shards(data(folder, batch_size=50), 1, 0), 0, 1000)  # of 8,000
    quarters = Counter(start // 10_000 for start in read)
    assert all(abs(quarters[quarter] - 250) < 60 for quarter in range(4))  # 4.5 standard deviations


# Validation


@pytest.mark.parametrize(("windows", "expected"), [(1, [0]), (2, [0, 8]), (3, [0, 4, 8]), (9, list(range(9)))])
def test_validation_is_spread_over_the_split(folder: Path, windows: int, expected: list[int]):
    """From the first window to the last, none twice, the same at every call."""
    corpus = build_shards(data(folder, validation_windows=windows), 2, 0)
    tokens, targets = corpus.validation()
    assert tokens[:, 0].tolist() == [1000 + T * number for number in expected]
    assert (targets == tokens + 1).all()
    assert np.array_equal(corpus.validation()[0], tokens)


def test_too_few_validation_windows_are_refused(folder: Path):
    """The message says how many there are, and the option with that value is accepted."""
    with pytest.raises(
        UsageError, match=r"46 validation tokens are 9 windows .*use --data\.validation-windows 9 or less"
    ):
        build_shards(data(folder, validation_windows=10), 2, 0)
    with pytest.raises(UsageError, match=r"0 windows of --data\.sequence-length 46.*lower --data\.sequence-length"):
        build_shards(data(folder, sequence_length=46), 2, 0)


# Enough tokens


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_run_longer_than_its_tokens_is_refused(folder: Path, replicas: int):
    """The bound is exact: up to it nothing is read twice; one more step is refused, naming those that are possible."""
    corpus = build_shards(data(folder), replicas, 0)
    possible = 32 // replicas // 3
    corpus.check_enough(possible)
    assert max(Counter(starts(corpus, 0, possible * 3)).values()) == 1
    with pytest.raises(UsageError) as refusal:
        corpus.check_enough(possible + 1)
    message = str(refusal.value)
    assert f"takes {(possible + 1) * 3 * replicas * T:,} training tokens" in message
    assert f"there are {32 // replicas * replicas * T:,} in whole windows" in message
    assert f"--steps {possible}," in message
    assert "--repeat" in message


def test_a_batch_larger_than_a_share_is_refused(folder: Path):
    """No number of steps helps then; the message offers a batch that does."""
    with pytest.raises(UsageError, match=r"use --data\.batch-size 16 or less, or"):
        build_shards(data(folder, batch_size=17), 2, 0).check_enough(1)
    build_shards(data(folder, batch_size=16), 2, 0).check_enough(1)


def asked_for(corpus: ShardCorpus, steps: int) -> int:
    """The number of tokens that the refusal says to prepare."""
    with pytest.raises(UsageError) as refusal:
        corpus.check_enough(steps)
    found = re.search(r"--tokens (\d+)", str(refusal.value))
    assert found
    return int(found[1])


@pytest.mark.parametrize("size", [26, 205, 1001, 1005])
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_tokens_that_are_asked_for_are_enough(tmp_path: Path, size: int, replicas: int):
    """In shards of the size that the folder has they hold the windows of the run, whatever the shards leave unread."""
    folder = prepared(tmp_path / "few", [counting(0, size)], [counting(0, 46)])
    corpus = build_shards(data(folder), replicas, 0)
    for steps in range(70, 3000, 7):
        count = asked_for(corpus, steps)
        windows = count // size * ((size - 1) // T) + max(count % size - 1, 0) // T
        assert windows // replicas >= 3 * steps
        assert count < 3 * steps * replicas * T * size / (size - T) + 1006


def test_a_folder_of_the_tokens_that_are_asked_for_admits_the_run(tmp_path: Path):
    """The same once with files."""
    few = build_shards(data(prepared(tmp_path / "few", [counting(0, 1003)], [counting(0, 46)])), 2, 0)
    count = asked_for(few, 700)
    train = [counting(0, min(1003, count - start)) for start in range(0, count, 1003)]
    build_shards(data(prepared(tmp_path / "more", train, [counting(0, 46)])), 2, 0).check_enough(700)


def test_every_replica_needs_a_window(folder: Path):
    """More replicas than windows, or windows longer than the shards, are refused with numbers and options."""
    assert build_shards(data(folder), 32, 0).windows_per_replica == 1
    with pytest.raises(
        UsageError, match=r"169 training tokens are 32 windows of --data\.sequence-length 5.*replicas 33"
    ):
        build_shards(data(folder), 33, 0)
    with pytest.raises(UsageError, match="0 windows"):
        build_shards(data(folder, sequence_length=101), 1, 0)


# Vocabulary and tokenizer


def test_the_vocabulary_is_the_tokenizers(folder: Path):
    """Size and bytes are those of the folder, also when the model has more rows than ids."""
    for rows in (0, VOCABULARY, VOCABULARY + 64):
        vocabulary = build_shards(data(folder), 2, rows).vocabulary
        assert (vocabulary.name, vocabulary.size) == ("toy", VOCABULARY)
        assert vocabulary.token_bytes is not None
        assert vocabulary.token_bytes.dtype == np.int64
        assert vocabulary.token_bytes[[3, 255, 256]].tolist() == [3, 255, 256]


def test_a_model_with_too_few_rows_is_refused(folder: Path):
    """The message names the option, its value and the least value."""
    with pytest.raises(UsageError, match=rf"--model\.vocabulary-size is {VOCABULARY - 1}, .* at least {VOCABULARY}"):
        build_shards(data(folder), 2, VOCABULARY - 1)


@pytest.mark.parametrize("wanted", ["", "toy", SHA256, SHA256[:8], SHA256[:20].upper()])
def test_the_expected_tokenizer_is_accepted(folder: Path, wanted: str):
    """By name, by the beginning of its hash, or not asked for."""
    assert build_shards(data(folder, tokenizer=wanted), 2, 0).description["tokenizer"] == "toy"


@pytest.mark.parametrize("wanted", ["mistral", SHA256[:7], SHA256[1:20], "to", "TOY"])
def test_another_tokenizer_is_refused(folder: Path, wanted: str):
    """Another name, too few digits or others: the message names both and what to do."""
    with pytest.raises(
        UsageError, match=rf"--data\.tokenizer is '{wanted}', .* made with 'toy' \(SHA-256 0123456789ab"
    ):
        build_shards(data(folder, tokenizer=wanted), 2, 0)


# Files that say nothing of themselves


def test_nanogpt_files_are_a_corpus(tmp_path: Path):
    """By folder or by file; the vocabulary is the model's, and what nobody knows is None."""
    counting(0, 101).tofile(tmp_path / "train.bin")
    counting(500, 46).tofile(tmp_path / "val.bin")
    for path in (tmp_path, tmp_path / "train.bin"):
        corpus = build_shards(data(path), 2, 50_304)
        assert sorted(starts(corpus, 1, 10)) == list(range(50, 100, 5))
        assert corpus.validation()[0][0, 0] == 500
        assert corpus.vocabulary.size == 50_304
        assert corpus.vocabulary.token_bytes is None
        assert corpus.description["vocabulary"] == "unknown"
        with pytest.raises(UsageError, match=r"use a larger file, use --steps 3"):
            corpus.check_enough(4)
    with pytest.raises(UsageError, match=r"do not say how many ids .*--model\.vocabulary-size"):
        build_shards(data(tmp_path), 2, 0)
    with pytest.raises(UsageError, match=r"--data\.tokenizer is 'gpt2', and the \.bin files .*leave it out"):
        build_shards(data(tmp_path, tokenizer="gpt2"), 2, 50_304)


# What is recorded, and what is no corpus


def test_the_description_is_for_the_record(folder: Path, tmp_path: Path):
    """Plain values that JSON keeps, with what a record needs; a moved folder has the same fingerprint."""
    description = build_shards(data(folder), 3, 0).description
    assert json.loads(json.dumps(description)) == description
    assert description["corpus"] == f"tokens:{folder}"
    assert description["text"] == "token shards: 169 training tokens, 46 for validation, tokenizer toy"
    assert (description["vocabulary"], description["tokenizer_sha256"]) == ("toy", SHA256)
    assert (description["training_windows"], description["windows_per_replica"]) == (32, 10)
    assert description["source"] == {"kind": "made up"}
    shutil.copytree(folder, tmp_path / "moved")
    assert build_shards(data(tmp_path / "moved"), 3, 0).description["fingerprint"] == description["fingerprint"]


def test_what_is_no_corpus_of_tokens_is_refused(folder: Path, tmp_path: Path):
    """Another form, a path that is not there, a folder without tokens: each message says what to do."""
    for corpus in ("tokens:", "file:x"):
        with pytest.raises(UsageError, match=r"must be tokens:PATH, for example"):
            build_shards(replace(data(folder), corpus=corpus), 2, 0)
    with pytest.raises(UsageError, match=r"absent: there is no such file or folder .*; make one with `twophase"):
        build_shards(data(tmp_path / "absent"), 2, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no meta\.json.*twophase data prepare"):
        build_shards(data(tmp_path / "empty"), 2, 0)


def test_home_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """`tokens:~/toy` is the folder in the user's home."""
    monkeypatch.setenv("HOME", str(folder.parent))
    corpus = build_shards(replace(data(folder), corpus="tokens:~/toy"), 2, 0)
    assert corpus.description["training_windows"] == 32


def test_parts_of_a_prepared_folder_are_told_from_bare_files(tmp_path: Path):
    """An unfinished folder and a single shard are refused for what they are, not for a vocabulary that is missing."""
    (tmp_path / ".tmp-train-00000.bin").write_bytes(b"ab")
    with pytest.raises(UsageError, match=r"holds no meta\.json; .*repeat the command if it was interrupted"):
        build_shards(replace(data(tmp_path), corpus=f"tokens:{tmp_path}"), 2, 0)
    (tmp_path / "train-00000.bin").write_bytes(b"ab")
    with pytest.raises(UsageError, match="is a part of a prepared folder; name the folder"):
        build_shards(replace(data(tmp_path), corpus=f"tokens:{tmp_path}/train-00000.bin"), 2, 0)
