"""Folders of token shards for tests: any ids in, what `twophase data prepare` would have left out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from twophase.base.files import file_sha256
from twophase.text.meta import TOKEN_BYTES, TRAIN, VALIDATION, Meta, Shard, write_meta

SHA256 = "0123456789abcdef" * 4
"""Of a tokenizer that does not exist."""


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
    dtype = (*train, *validation)[0].dtype
    splits = {}
    for split, arrays in ((TRAIN, train), (VALIDATION, validation)):
        shards = []
        for number, array in enumerate(arrays):
            name, content = f"{split}-{number:05}.bin", array.astype(dtype.newbyteorder("<")).tobytes()
            (folder / name).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            shards.append(Shard(name, len(array), 1, len(array), int(array.max(initial=0)), digest))
        splits[split] = tuple(shards)
    np.save(folder / TOKEN_BYTES, np.arange(vocabulary_size, dtype=np.uint32))
    sizes, source = file_sha256(folder / TOKEN_BYTES), {"kind": "made up"}
    write_meta(folder, Meta("toy", SHA256, vocabulary_size, end_of_text, dtype.name, source, splits, sizes))
    return folder
