"""Reading token files: what is checked before the first token, and the windows that are cut."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import shardmaker
from twophase.base.config import UsageError
from twophase.text import shards as module
from twophase.text.meta import META, TOKEN_BYTES, TRAIN, VALIDATION, read_meta, write_meta
from twophase.text.shards import VERIFIED, open_bin, open_shards

VOCABULARY = 500


def ids(seed: int, tokens: int, dtype: str = "uint16") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens).astype(dtype)


def prepared(folder: Path, train: Sequence[np.ndarray], validation: Sequence[np.ndarray]) -> Path:
    return shardmaker.prepared(folder, train, validation, VOCABULARY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A prepared folder of two training shards and one for validation."""
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


def damage_meta(folder: Path, **changes: object) -> None:
    """Change what `meta.json` says of the training shards."""
    meta = read_meta(folder)
    train = tuple(dataclasses.replace(shard, **changes) for shard in meta.splits[TRAIN])  # type: ignore[arg-type]
    write_meta(folder, dataclasses.replace(meta, splits={**meta.splits, TRAIN: train}))


# Windows


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("length", [1, 2, 7, 16, 100, 101, 300])
def test_windows_are_those_of_a_plain_loop(tmp_path: Path, length: int, dtype: str):
    """Every window of every file in order, none across a border, whatever of the files is shorter than a window."""
    arrays = [ids(i, tokens, dtype) for i, tokens in enumerate([101, 1, 2, 64, 0, 8, 300])]
    shards = open_shards(prepared(tmp_path / "toy", arrays, [ids(9, 40, dtype)]))
    windows, slow = shards.windows(TRAIN, length), slow_windows(arrays, length)
    assert len(windows) == len(slow)
    assert windows[np.arange(len(slow))].tolist() == slow
    some = np.random.default_rng(0).integers(0, max(len(slow), 1), 50 if slow else 0)
    assert windows[some].tolist() == [slow[number] for number in some]
    assert windows[some].dtype == dtype
    assert shards.windows(VALIDATION, length).length == length


def test_ids_outside_the_vocabulary_are_refused_when_read(tmp_path: Path):
    """The message names file, token, id and vocabulary; windows without such an id are read."""
    bad = ids(1, 50)
    bad[37] = VOCABULARY
    windows = open_shards(prepared(tmp_path / "toy", [ids(0, 101), bad], [ids(2, 60)])).windows(TRAIN, 10)
    assert windows[np.array([0, 12, 11])].max() < VOCABULARY  # token 37 of the second shard is in its window 3
    with pytest.raises(UsageError, match=r"train-00001.bin: token 37 is the id 500, and the vocabulary has 500 ids"):
        windows[np.array([0, 12, 13])]


# What a folder says of itself


def change(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(edit((folder / name).read_bytes()))


def no_split(split: str) -> Callable[[Path], object]:
    arrays = {TRAIN: [ids(0, 101)], VALIDATION: [ids(2, 60)]} | {split: []}
    return lambda folder: prepared(folder, arrays[TRAIN], arrays[VALIDATION])


def flip_a_bit(data: bytes) -> bytes:
    return data[:17] + bytes([data[17] ^ 1]) + data[18:]


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (change("train-00000.bin", lambda d: d[:-2]), r"train-00000\.bin: its SHA-256 is .* copy it again"),
    "absent": (lambda f: (f / "train-00000.bin").unlink(), r"train-00000\.bin cannot be read .*copy it again"),
    "flipped": (change("validation-00000.bin", flip_a_bit), r"validation-00000\.bin: its SHA-256 is .* copy it again"),
    "other hash": (lambda f: damage_meta(f, sha256="cd" * 32), r"and meta\.json says cdcdcdcdcdcdcdcd"),
    "no meta": (lambda f: (f / META).unlink(), r"holds no meta\.json: .*twophase data prepare"),
    "unreadable": (lambda f: ((f / META).unlink(), (f / META).mkdir()), r"meta\.json cannot be read \(it is a folder"),
    "deep": (lambda f: (f / META).write_text(101 * '{"a": ' + "1" + 101 * "}"), r"meta\.json is damaged .*100 levels"),
    "elsewhere": (lambda f: damage_meta(f, file="../train-00000.bin"), r"'\.\./train-00000\.bin' is no file of the"),
    "no object": (lambda f: (f / META).write_text("[]"), r"meta\.json is damaged"),
    "a digit": (change(META, lambda d: d.replace(b'"largest": ', b'"largest": 1')), r"meta\.json is damaged"),
    "newer": (change(META, lambda d: d.replace(b'"format": 1', b'"format": 2')), "install a newer twophase"),
    "no training": (no_split(TRAIN), r"holds no train tokens; prepare it again"),
    "no validation": (no_split(VALIDATION), r"holds no validation tokens; prepare it again"),
    "no token bytes": (lambda f: (f / TOKEN_BYTES).unlink(), r"token_bytes\.npy cannot be used"),
    "other token bytes": (
        change(TOKEN_BYTES, flip_a_bit),
        r"token_bytes\.npy cannot be used \(its SHA-256 is not that",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_folders_are_refused(folder: Path, case: str):
    """The message names the file and what it is and should be, and says what to do."""
    open_shards(folder)  # what is remembered of the whole folder does not hide the damage
    damage, message = DAMAGED[case]
    damage(folder)
    with pytest.raises(UsageError, match=message):
        open_shards(folder)


def test_hashes_are_taken_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """What was right is not read again until its size or time of change is another; equal content then passes."""
    read: list[str] = []
    whole = module.file_sha256
    monkeypatch.setattr(module, "file_sha256", lambda path: (read.append(path.name), whole(path))[1])
    names = ["train-00000.bin", "train-00001.bin", "validation-00000.bin"]
    for touched, expected in ((None, names), (None, []), (names[1], [names[1]]), (None, [])):
        if touched:
            os.utime(folder / touched, (1, 1))
        open_shards(folder)
        assert read == [*expected, TOKEN_BYTES]
        read.clear()


def test_changed_content_with_another_time_is_refused(folder: Path):
    """A folder that was right, changed since: refused; put back: accepted; and the mistake is not remembered."""
    open_shards(folder)
    path = folder / "train-00000.bin"
    right = path.read_bytes()
    path.write_bytes(bytes(len(right)))
    os.utime(path, (2, 2))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"train-00000\.bin: its SHA-256 is"):
            open_shards(folder)
    path.write_bytes(right)
    os.utime(path, (2, 2))  # even with the time of the wrong one
    assert open_shards(folder).tokens(TRAIN) == 151


@pytest.mark.parametrize(
    "damage", ["", "[1, 2]", '{"train-00000.bin": 3}', '{"train-00000.bin": {"sha256": 5}}', "\xff"]
)
def test_a_damaged_memory_means_reading_again(folder: Path, damage: str):
    """`.verified.json` is a convenience: whatever stands in it, the folder opens and the file is made anew."""
    (folder / VERIFIED).write_bytes(damage.encode("latin-1"))
    open_shards(folder)
    record = json.loads((folder / VERIFIED).read_text())
    assert record["train-00000.bin"]["sha256"] == read_meta(folder).splits[TRAIN][0].sha256


def test_a_folder_that_cannot_be_written_is_read_each_time(folder: Path):
    """Nothing is remembered and nothing is said; checks are made all the same."""
    (folder / VERIFIED).mkdir()  # refuses the name even to root
    before = sorted(path.name for path in folder.iterdir())
    for _ in range(2):
        assert open_shards(folder).tokens(TRAIN) == 151
    assert sorted(path.name for path in folder.iterdir()) == before
    (folder / "train-00000.bin").write_bytes(bytes(202))
    with pytest.raises(UsageError, match="SHA-256"):
        open_shards(folder)


# Files that say nothing of themselves


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_headed_files(tmp_path: Path, magic: int, version: int, dtype: str):
    """Several training files in the order of their names, without their headers; other files of the folder stay out."""
    arrays = [ids(i, tokens, dtype) for i, tokens in enumerate([70, 40])]
    for number, array in enumerate(arrays, 1):
        (tmp_path / f"fineweb_train_{number:06}.bin").write_bytes(headed(array, magic=magic, version=version))
    (tmp_path / "fineweb_val_000000.bin").write_bytes(headed(ids(5, 30, dtype), magic=magic, version=version))
    (tmp_path / "interval.bin").write_bytes(b"odd")
    shards = open_bin(tmp_path, VOCABULARY)
    windows = shards.windows(TRAIN, 8)
    assert (shards.tokens(TRAIN), shards.tokens(VALIDATION)) == (110, 30)
    assert windows[np.arange(len(windows))].tolist() == slow_windows(arrays, 8)
    second = open_bin(tmp_path / "fineweb_train_000002.bin", VOCABULARY)
    assert (second.tokens(TRAIN), second.tokens(VALIDATION)) == (40, 30)
    assert second.fingerprint != shards.fingerprint


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


GOOD = headed(ids(0, 90))
BAD_FILES: list[tuple[dict[str, bytes], str, str]] = [
    ({"train.bin": headed(ids(0, 90), count=91)}, "", r"is truncated: 1,204 bytes, where 1,206 are .*says 91 uint16"),
    ({"train.bin": headed(ids(0, 90), count=89)}, "", r"train\.bin is too long: 1,204 bytes, where 1,202 are expected"),
    ({"train.bin": GOOD[:600]}, "", r"train\.bin is truncated: 600 bytes"),
    ({"train.bin": headed(ids(0, 90), version=2)}, "", r"header is of version 2; .*20240520 version 1 is read"),
    ({"train.bin": b"abc"}, "", r"train\.bin is 3 bytes, which is no whole number of uint16 ids"),
    ({"train.bin": b""}, "", r"train\.bin is 0 bytes"),
    ({}, "", r"holds no train\.bin"),
    ({"train.bin": GOOD, "val.bin": b""}, "val.bin", r"val\.bin is for validation, by its name"),
    ({"train.txt": b"text"}, "train.txt", r"train\.txt is no \.bin file"),
]


@pytest.mark.parametrize(("files", "opened", "message"), BAD_FILES, ids=[message for *_, message in BAD_FILES])
def test_bad_bin_files_are_refused(tmp_path: Path, files: dict[str, bytes], opened: str, message: str):
    """Damaged, missing and mistaken files: the message names the file, what it is and what it should be."""
    for name, content in ({"val.bin": ids(1, 33).tobytes()} | files).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        open_bin(tmp_path / opened, VOCABULARY)
    (tmp_path / "val.bin").unlink()
    (tmp_path / "train.bin").write_bytes(GOOD)
    with pytest.raises(UsageError, match=r"holds no val\.bin"):
        open_bin(tmp_path, VOCABULARY)
