"""Folders of token shards for tests: any ids in, what `twophase data prepare` would have left out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from twophase.files import sha256
from twophase.text.shards import TOKEN_BYTES, TRAIN, VALIDATION, Meta, Shard, write_meta

SHA256 = "0123456789abcdef" * 4
"""Of a tokenizer that does not exist."""


def counting(start: int, tokens: int, dtype: str = "uint16") -> np.ndarray:
    """Return ids that count up, so that every window is known by its first token."""
    return np.arange(start, start + tokens).astype(dtype)


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file, or flip it back; size and time of change stay."""
    data, status = bytearray(path.read_bytes()), path.stat()
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def prepared(
    folder: Path,
    train: Sequence[np.ndarray],
    validation: Sequence[np.ndarray],
    vocabulary_size: int,
    end_of_text: int = 0,
) -> Path:
    """Write a finished folder of these shards, in the type of their ids; id i of the tokenizer `toy` has i bytes."""
    folder.mkdir(exist_ok=True)
    splits: dict[str, list[Shard]] = {TRAIN: [], VALIDATION: []}
    for split, arrays in ((TRAIN, train), (VALIDATION, validation)):
        for number, array in enumerate(arrays):
            path = folder / f"{split}-{number:05}.bin"
            array.tofile(path)
            splits[split].append(Shard(path.name, len(array), sha256(path)))
    np.save(folder / TOKEN_BYTES, np.arange(vocabulary_size))
    write_meta(folder, Meta("toy", SHA256, vocabulary_size, end_of_text, train[0].dtype.name, {"kind": "made"}, splits))
    return folder
