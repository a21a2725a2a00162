"""Reading token files: what is checked before the first token, and the windows that are cut."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import shardmaker
from twophase.base.config import UsageError
from twophase.text.meta import META, TOKEN_BYTES, TRAIN, VALIDATION, read_meta, write_meta
from twophase.text.shards import VERIFIED, open_bin, open_shards

VOCABULARY = 500


def ids(seed: int, tokens: int, dtype: str = "uint16") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens).astype(dtype)


def prepared(folder: Path, train: Sequence[np.ndarray], validation: Sequence[np.ndarray]) -> Path:
    return shardmaker.prepared(folder, train, validation, VOCABULARY)


def folder_of_two(tmp_path: Path) -> Path:
    return prepared(tmp_path / "toy", [ids(0, 101), ids(1, 50)], [ids(2, 60)])


def headed(tokens: np.ndarray, *, magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """A file as modded-nanogpt writes it: 256 int32 (magic, version, number of ids, zeros), then the ids."""
    words = [magic, version, len(tokens) if count is None else count, *[0] * 253]
    return struct.pack("<256i", *words) + tokens.tobytes()


def slow_windows(arrays: Sequence[np.ndarray], length: int) -> list[list[int]]:
    """All windows, cut with a loop that stops where the next window would leave its file."""
    windows = []
    for array in arrays:
        values, start = array.tolist(), 0
        while start + length + 1 <= len(values):
            windows.append(values[start : start + length + 1])
            start += length
    return windows


# Windows


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("length", [1, 2, 7, 16, 100, 101, 300])
def test_windows_are_those_of_a_plain_loop(tmp_path: Path, length: int, dtype: str):
    """Every window of every file in order, none across a border, whatever of the files is shorter than a window."""
    arrays = [ids(i, tokens, dtype) for i, tokens in enumerate([101, 1, 2, 64, 0, 8, 300])]
    shards = open_shards(prepared(tmp_path / "toy", arrays, [ids(9, 40, dtype)]))
    windows, slow = shards.windows(TRAIN, length), slow_windows(arrays, length)
    assert len(windows) == len(slow)
    assert windows.read(np.arange(len(slow))).tolist() == slow
    some = np.random.default_rng(0).integers(0, max(len(slow), 1), 50 if slow else 0)
    assert windows.read(some).tolist() == [slow[number] for number in some]
    assert windows.read(some).dtype == dtype
    assert shards.windows(VALIDATION, length).length == length


@pytest.mark.parametrize("number", [-1, 16])
def test_window_numbers_out_of_range_are_refused(tmp_path: Path, number: int):
    """A negative number would silently read from the end."""
    windows = open_shards(folder_of_two(tmp_path)).windows(TRAIN, 9)  # 11 + 5
    with pytest.raises(ValueError, match=rf"numbers are in \[.*{number}.*\]; they must be in \[0, 15\]"):
        windows.read(np.array([3, number]))


def test_what_is_read_is_a_copy(tmp_path: Path):
    """Changing a batch changes neither the file nor the next batch."""
    folder = folder_of_two(tmp_path)
    before = (folder / "train-00000.bin").read_bytes()
    windows = open_shards(folder).windows(TRAIN, 10)
    first = windows.read(np.arange(2))
    first[:] = 0
    assert windows.read(np.arange(2)).any()
    assert (folder / "train-00000.bin").read_bytes() == before


def test_ids_outside_the_vocabulary_are_refused_when_read(tmp_path: Path):
    """The message names file, token, id and vocabulary; windows without such an id are read."""
    bad = ids(1, 50)
    bad[37] = VOCABULARY
    folder = prepared(tmp_path / "toy", [ids(0, 101), bad], [ids(2, 60)])
    meta = read_meta(folder)
    shards = tuple(dataclasses.replace(shard, largest=0) for shard in meta.splits[TRAIN])  # a meta that does not know
    write_meta(folder, dataclasses.replace(meta, splits={**meta.splits, TRAIN: shards}))
    windows = open_shards(folder).windows(TRAIN, 10)  # token 37 of the second shard is in its window 3, number 13
    assert windows.read(np.array([0, 12, 11])).max() < VOCABULARY
    with pytest.raises(UsageError, match=r"train-00001.bin: token 37 is the id 500, and the vocabulary has 500 ids"):
        windows.read(np.array([0, 12, 13]))


# What a folder says of itself


def test_a_folder_is_opened_as_it_was_declared(tmp_path: Path):
    """Tokens, vocabulary, bytes of tokens and fingerprint are the folder's, wherever it lies."""
    shards = open_shards(folder_of_two(tmp_path))
    assert (shards.tokens(TRAIN), shards.tokens(VALIDATION)) == (151, 60)
    assert shards.vocabulary_size == VOCABULARY
    assert shards.token_bytes is not None
    assert shards.token_bytes.tolist() == list(range(VOCABULARY))
    shutil.copytree(tmp_path / "toy", tmp_path / "moved")
    assert open_shards(tmp_path / "moved").fingerprint == shards.fingerprint == read_meta(tmp_path / "toy").fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-2]), "is truncated: 200 bytes, where 202 are expected"),
        (lambda p: p.write_bytes(p.read_bytes() + b"\0\0"), "is too long: 204 bytes, where 202 are expected"),
        (lambda p: p.unlink(), r"is not there, and meta\.json names it"),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_files_of_another_size_are_refused(tmp_path: Path, change, message: str, verify: bool):
    """The message names the file and its bytes and says what to do, also where hashes are not compared."""
    folder = folder_of_two(tmp_path)
    change(folder / "train-00000.bin")
    with pytest.raises(UsageError, match=rf"train-00000\.bin {message}.*(copy|prepare)"):
        open_shards(folder, verify=verify)


def test_a_flipped_bit_is_found(tmp_path: Path):
    """One bit in one shard: the hash says so; without comparing hashes the folder opens."""
    folder = folder_of_two(tmp_path)
    path = folder / "validation-00000.bin"
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        UsageError, match=r"validation-00000\.bin: its SHA-256 is .* and meta\.json says .* copy it again"
    ):
        open_shards(folder)
    assert open_shards(folder, verify=False).tokens(VALIDATION) == 60


def test_hashes_are_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was found right is not read again until its size or time of change is another; equal content then passes."""
    folder = folder_of_two(tmp_path)
    read: list[str] = []
    from twophase.text import shards

    whole = shards._sha256
    monkeypatch.setattr(shards, "_sha256", lambda path, show: (read.append(path.name), whole(path, show))[1])
    open_shards(folder)
    assert read == ["train-00000.bin", "train-00001.bin", "validation-00000.bin"]
    open_shards(folder)
    assert len(read) == 3
    os.utime(folder / "train-00001.bin", (1, 1))
    open_shards(folder)
    assert read[3:] == ["train-00001.bin"]
    open_shards(folder)
    assert len(read) == 4
    shutil.copytree(folder, tmp_path / "moved", ignore=shutil.ignore_patterns(VERIFIED))
    open_shards(tmp_path / "moved")
    assert len(read) == 7


def test_changed_content_with_another_time_is_found_after_all(tmp_path: Path):
    """A folder that was found right, changed since: refused; put back: accepted; and the mistake is not remembered."""
    folder = folder_of_two(tmp_path)
    open_shards(folder)
    path = folder / "train-00000.bin"
    right, status = path.read_bytes(), path.stat()
    path.write_bytes(bytes(len(right)))
    os.utime(path, (2, 2))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"train-00000\.bin: its SHA-256 is"):
            open_shards(folder)
    path.write_bytes(right)
    os.utime(path, (2, 2))  # even with the time of the wrong one
    assert open_shards(folder).tokens(TRAIN) == 151
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_shards(folder).tokens(TRAIN) == 151


@pytest.mark.parametrize(
    "damage", ["", "[1, 2]", '{"train-00000.bin": 3}', '{"train-00000.bin": {"sha256": 5}}', "\xff"]
)
def test_a_damaged_memory_means_reading_again(tmp_path: Path, damage: str):
    """`.verified.json` is a convenience: whatever stands in it, the folder opens and the file is made anew."""
    folder = folder_of_two(tmp_path)
    (folder / VERIFIED).write_bytes(damage.encode("latin-1"))
    open_shards(folder)
    record = json.loads((folder / VERIFIED).read_text())
    assert record["train-00000.bin"]["sha256"] == read_meta(folder).splits[TRAIN][0].sha256


def test_a_memory_of_other_content_proves_nothing(tmp_path: Path):
    """Files that were found right are refused once meta.json asks for others of the same size."""
    folder = folder_of_two(tmp_path)
    open_shards(folder)
    meta = read_meta(folder)
    other = tuple(dataclasses.replace(shard, sha256="cd" * 32) for shard in meta.splits[TRAIN])
    write_meta(folder, dataclasses.replace(meta, splits={**meta.splits, TRAIN: other}))
    with pytest.raises(UsageError, match=r"train-00000\.bin: its SHA-256 is .* and meta\.json says cdcdcdcdcdcdcdcd"):
        open_shards(folder)


def test_a_folder_that_cannot_be_written_is_read_each_time(tmp_path: Path):
    """Nothing is remembered and nothing is said; checks are made all the same."""
    folder = folder_of_two(tmp_path)
    (folder / VERIFIED).mkdir()  # refuses the name even to root
    before = sorted(path.name for path in folder.iterdir())
    for _ in range(2):
        assert open_shards(folder).tokens(TRAIN) == 151
    assert sorted(path.name for path in folder.iterdir()) == before
    (folder / "train-00000.bin").write_bytes(bytes(202))
    with pytest.raises(UsageError, match="SHA-256"):
        open_shards(folder)


def test_an_unfinished_folder_is_refused(tmp_path: Path):
    """Without meta.json a folder is no folder of shards, and its shards are not mistaken for nanoGPT's."""
    folder = folder_of_two(tmp_path)
    (folder / META).unlink()
    for call in (lambda: open_shards(folder), lambda: open_bin(folder, VOCABULARY)):
        with pytest.raises(UsageError, match=r"holds no meta\.json; .*twophase data prepare"):
            call()


def test_ids_above_the_vocabulary_are_refused_at_once(tmp_path: Path):
    """meta.json knows each shard's largest id: nothing needs to be read to refuse it."""
    bad = ids(0, 101)
    bad[5] = VOCABULARY
    folder = prepared(tmp_path / "toy", [bad], [ids(2, 60)])
    with pytest.raises(
        UsageError, match=r"train-00000\.bin: its largest id is 500 and the vocabulary of toy has 500 ids"
    ):
        open_shards(folder)


@pytest.mark.parametrize("split", [TRAIN, VALIDATION])
def test_a_folder_needs_both_splits(tmp_path: Path, split: str):
    """Without tokens to train on, or to validate on, the message says which and how to make them."""
    arrays = {TRAIN: [ids(0, 101)], VALIDATION: [ids(2, 60)]} | {split: []}
    with pytest.raises(UsageError, match=rf"holds no {split} tokens; prepare it again"):
        open_shards(prepared(tmp_path / "toy", arrays[TRAIN], arrays[VALIDATION]))


@pytest.mark.parametrize("make", [None, np.arange(VOCABULARY - 1), np.ones(VOCABULARY), b"no array"])
def test_token_bytes_must_fit(tmp_path: Path, make):
    """Absent, of another length, not whole numbers, or not an array at all: the message names the file."""
    folder = folder_of_two(tmp_path)
    path = folder / TOKEN_BYTES
    if make is None:
        path.unlink()
    elif isinstance(make, bytes):
        path.write_bytes(make)
    else:
        np.save(path, make)
    with pytest.raises(UsageError, match=r"token_bytes\.npy cannot be used \(.*copy it again, or prepare"):
        open_shards(folder)


# Files that say nothing of themselves


def test_nanogpt_files(tmp_path: Path):
    """train.bin and val.bin, bare uint16, by their folder or by the training file: the same tokens."""
    train, val = ids(0, 90), ids(1, 33)
    train.tofile(tmp_path / "train.bin")
    val.tofile(tmp_path / "val.bin")
    by_folder, by_file = open_bin(tmp_path, VOCABULARY), open_bin(tmp_path / "train.bin", VOCABULARY)
    assert by_folder.splits == by_file.splits
    assert by_folder.fingerprint == by_file.fingerprint
    assert by_folder.meta is by_folder.token_bytes is None
    for split, array in ((TRAIN, train), (VALIDATION, val)):
        windows = by_folder.windows(split, 8)
        assert windows.read(np.arange(len(windows))).tolist() == slow_windows([array], 8)
    assert by_folder.windows(TRAIN, 89).read(np.array([0])).tolist() == [train.tolist()]


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_headed_files(tmp_path: Path, magic: int, version: int, dtype: str):
    """Several training files in the order of their names, without their headers; other files in the folder are left."""
    arrays = [ids(i, tokens, dtype) for i, tokens in enumerate([70, 40])]
    for number, array in enumerate(arrays, 1):
        (tmp_path / f"fineweb_train_{number:06}.bin").write_bytes(headed(array, magic=magic, version=version))
    (tmp_path / "fineweb_val_000000.bin").write_bytes(headed(ids(5, 30, dtype), magic=magic, version=version))
    (tmp_path / "interval.bin").write_bytes(b"odd")
    shards = open_bin(tmp_path, VOCABULARY)
    windows = shards.windows(TRAIN, 8)
    assert (shards.tokens(TRAIN), shards.tokens(VALIDATION)) == (110, 30)
    assert windows.read(np.arange(len(windows))).tolist() == slow_windows(arrays, 8)
    one = open_bin(tmp_path / "fineweb_train_000002.bin", VOCABULARY)
    assert (one.tokens(TRAIN), one.tokens(VALIDATION)) == (40, 30)
    assert one.fingerprint != shards.fingerprint


def test_fingerprint_is_of_the_content(tmp_path: Path):
    """Moved files keep it; one other id, or the splits exchanged, change it; an outdated hash is not used."""
    train, val = ids(0, 90), ids(1, 90)
    prints = []
    for name, (first, second) in {"a": (train, val), "b": (train, val), "c": (val, train)}.items():
        (tmp_path / name).mkdir()
        first.tofile(tmp_path / name / "train.bin")
        second.tofile(tmp_path / name / "val.bin")
        prints.append(open_bin(tmp_path / name, VOCABULARY).fingerprint)
    assert prints[0] == prints[1] != prints[2]
    train[3] += 1
    train.tofile(tmp_path / "a" / "train.bin")
    os.utime(tmp_path / "a" / "train.bin", (3, 3))
    assert open_bin(tmp_path / "a", VOCABULARY).fingerprint != prints[0]


def test_a_bare_file_is_checked_when_read(tmp_path: Path):
    """The caller's vocabulary is the bound."""
    np.full(20, 50_256, np.uint16).tofile(tmp_path / "train.bin")
    ids(1, 33).tofile(tmp_path / "val.bin")
    with pytest.raises(UsageError, match=r"train\.bin: token 0 is the id 50256, and the vocabulary has 50,256 ids"):
        open_bin(tmp_path, 50_256).windows(TRAIN, 4).read(np.array([0]))
    assert open_bin(tmp_path, 50_257).windows(TRAIN, 4).read(np.array([0])).min() == 50_256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            headed(ids(0, 90), count=91),
            r"train\.bin is truncated: 1,204 bytes, where 1,206 are expected .*says 91 uint16",
        ),
        (headed(ids(0, 90), count=89), r"train\.bin is too long: 1,204 bytes, where 1,202 are expected"),
        (headed(ids(0, 90))[:600], r"train\.bin is truncated: 600 bytes"),
        (headed(ids(0, 90), version=2), r"train\.bin: its header is of version 2; .*20240520 version 1 is read"),
        (b"abc", r"train\.bin is 3 bytes, which is no whole number of uint16 ids"),
        (b"", r"train\.bin is 0 bytes"),
    ],
)
def test_damaged_bin_files_are_refused(tmp_path: Path, content: bytes, message: str):
    """The message names the file and what it is and should be."""
    (tmp_path / "train.bin").write_bytes(content)
    ids(1, 33).tofile(tmp_path / "val.bin")
    with pytest.raises(UsageError, match=message):
        open_bin(tmp_path, VOCABULARY)


def test_what_is_absent_or_mistaken_is_named(tmp_path: Path):
    """No file for training or validation, the wrong one of two, a shard of a prepared folder, no .bin file."""
    with pytest.raises(UsageError, match=r"holds no train\.bin"):
        open_bin(tmp_path, VOCABULARY)
    ids(0, 90).tofile(tmp_path / "train.bin")
    with pytest.raises(UsageError, match=r"holds no val\.bin"):
        open_bin(tmp_path, VOCABULARY)
    ids(0, 90).tofile(tmp_path / "val.bin")
    with pytest.raises(UsageError, match=r"val\.bin is for validation, by its name"):
        open_bin(tmp_path / "val.bin", VOCABULARY)
    with pytest.raises(UsageError, match="there is no such file or folder"):
        open_bin(tmp_path / "test.bin", VOCABULARY)
    (tmp_path / "train.txt").write_text("text")
    with pytest.raises(UsageError, match=r"train\.txt is no \.bin file"):
        open_bin(tmp_path / "train.txt", VOCABULARY)
    with pytest.raises(UsageError, match=r"train-00000\.bin is a shard of a prepared folder; name the folder: tokens:"):
        open_bin(folder_of_two(tmp_path) / "train-00000.bin", VOCABULARY)
