"""Reading token shards: windows, their order, nanoGPT's files, and damage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shardmaker
from shardmaker import counting
from twophase.errors import RunError, UsageError
from twophase.text.shards import TRAIN, Windows, damaged, read_meta

VOCABULARY = 60_000


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_are_neighbours_of_one_file(tmp_path: Path, dtype: str):
    """Windows of 5 tokens and the next one, overlapping in that one; rests, and files that are too short, are left."""
    arrays = [counting(0, 101, dtype), counting(0, 5, dtype), counting(200, 12, dtype), counting(0, 0, dtype)]
    folder = shardmaker.prepared(tmp_path / "toy", arrays, [counting(0, 6, dtype)], VOCABULARY)
    windows = Windows(folder, read_meta(folder), TRAIN, 5)
    starts = [*range(0, 100, 5), 200, 205]
    assert len(windows) == len(starts)
    found = windows[np.array([21, 0, 19, 20, 0])]
    assert found.tolist() == [list(range(starts[i], starts[i] + 6)) for i in (21, 0, 19, 20, 0)]
    assert found.dtype == dtype
    found[:] = 0  # a copy, not the file
    assert windows[np.array([1])].tolist() == [[5, 6, 7, 8, 9, 10]]


def test_damage(tmp_path: Path):
    """One flipped bit, and a missing shard, are named by `damaged`; a cut shard, and unknown ids, by reading."""
    train = [counting(0, 101), counting(0, 50), counting(0, 50)]
    folder = shardmaker.prepared(tmp_path / "toy", train, [counting(0, 46)], VOCABULARY)
    meta = read_meta(folder)
    assert damaged(folder) == []
    shardmaker.flip(folder / "train-00001.bin")
    (folder / "validation-00000.bin").unlink()
    assert damaged(folder) == ["train-00001.bin", "validation-00000.bin"]
    (folder / "train-00002.bin").write_bytes(b"ab")
    with pytest.raises(RunError, match=r"train-00002\.bin"):
        Windows(folder, meta, TRAIN, 5)
    with pytest.raises(UsageError, match="absent"):
        read_meta(tmp_path / "absent")
    shardmaker.prepared(folder, train, [counting(0, 46)], VOCABULARY)
    with pytest.raises(RunError, match="vocabulary"):
        Windows(folder, replace(meta, vocabulary_size=100), TRAIN, 5)[np.array([19])]
