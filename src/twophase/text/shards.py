"""Folders of token shards, which `twophase data prepare` writes and runs read through memory maps.

DIR/meta.json               written last: a folder is finished when it is there
DIR/train-00000.bin …       token ids, little-endian, nothing else; one file a source file
DIR/validation-00000.bin …
DIR/token_bytes.npy         (vocabulary_size,) UTF-8 bytes that each id stands for; 0 for the end of a text
DIR/tokenizer/              the tokenizer, as a Hugging Face folder
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.errors import RunError, UsageError
from twophase.files import sha256, write_atomic

META, TOKEN_BYTES, TOKENIZER = "meta.json", "token_bytes.npy", "tokenizer"
TRAIN, VALIDATION = "train", "validation"
_SAMPLED_IDS = 1 << 20

TokenIds = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Shard:
    """One file of token ids."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Meta:
    """What a folder holds: the request, and the shards of `train` and `validation` in order."""

    tokenizer: str
    tokenizer_sha256: str
    vocabulary_size: int
    end_of_text: int
    dtype: str
    request: Mapping[str, Any]
    splits: Mapping[str, Sequence[Shard]]

    def tokens(self, split: str) -> int:
        """Return number of token ids of a split."""
        return sum(shard.tokens for shard in self.splits.get(split, ()))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what a run sees of the folder: the tokenizer and every shard's content, in order."""
        shards = {split: [shard.sha256 for shard in shards] for split, shards in sorted(self.splits.items())}
        return hashlib.sha256(json.dumps([self.tokenizer_sha256, self.end_of_text, shards]).encode()).hexdigest()


def write_meta(folder: Path, meta: Meta) -> None:
    """Write `meta.json`, which marks the folder as finished."""
    write_atomic(folder / META, json.dumps(asdict(meta), indent=1) + "\n")


def read_meta(folder: Path) -> Meta:
    """Return what a finished folder holds; a UsageError for another folder."""
    try:
        record = json.loads((folder / META).read_text())
    except FileNotFoundError:
        raise UsageError(f"{folder}: holds no {META}, which `twophase data prepare` writes at its end") from None
    record["splits"] = {split: [Shard(**shard) for shard in shards] for split, shards in record["splits"].items()}
    return Meta(**record)


def nanogpt_meta(folder: Path, vocabulary_size: int) -> Meta:
    """Return the same of nanoGPT's `train.bin` and `val.bin`, which name neither their tokenizer nor its ids."""
    splits = {}
    for split, name in ((TRAIN, "train.bin"), (VALIDATION, "val.bin")):
        ids = _mapped(folder / name, "uint16")
        # Reading 17 GB of OpenWebText at each start would take longer than the first steps: its ends have to do.
        ends = b"%d:" % len(ids) + ids[:_SAMPLED_IDS].tobytes() + ids[-_SAMPLED_IDS:].tobytes()
        splits[split] = [Shard(name, len(ids), hashlib.sha256(ends).hexdigest())]
    return Meta("unknown", "", vocabulary_size, -1, "uint16", {}, splits)


def damaged(folder: Path) -> list[str]:
    """Read all shards of a finished folder; return the names of those whose SHA-256 is not that of `meta.json`."""
    shards = [shard for shards in read_meta(folder).splits.values() for shard in shards]
    return [s.file for s in shards if not (folder / s.file).exists() or sha256(folder / s.file) != s.sha256]


class Windows:
    """The windows of T tokens of a split, numbered from the first file's first to the last file's last.

    A window and the target of its last token are T+1 neighbours of one file; windows overlap in that one token only.
    """

    def __init__(self, folder: Path, meta: Meta, split: str, length: int) -> None:
        self._meta, self._length = meta, length
        self._files = []
        for shard in meta.splits.get(split, ()):
            ids = _mapped(folder / shard.file, meta.dtype)
            if len(ids) != shard.tokens:
                raise RunError(f"{folder / shard.file}: damaged; delete it and repeat `twophase data prepare`")
            # Rows that overlap in one id and share their memory with the file, whose rest is not read.
            shape, strides = (max(len(ids) - 1, 0) // length, length + 1), (length * ids.itemsize, ids.itemsize)
            self._files.append(np.lib.stride_tricks.as_strided(ids, shape, strides, writeable=False))
        self._first = np.cumsum([0, *map(len, self._files)])
        """The number of the first window of each file, and at the end the number of all."""

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, numbers: NDArray[np.integer[Any]]) -> TokenIds:
        """Return windows by their numbers, (n, T + 1); a RunError for an id beyond the vocabulary."""
        files = np.searchsorted(self._first, numbers, side="right") - 1
        windows = np.empty((len(numbers), self._length + 1), self._meta.dtype)
        for file in np.unique(files).tolist():
            chosen = files == file
            windows[chosen] = self._files[file][numbers[chosen] - self._first[file]]
        if (largest := windows.max(initial=0)) >= self._meta.vocabulary_size:
            raise RunError(f"--data.corpus: has the id {largest}, and a vocabulary of {self._meta.vocabulary_size} ids")
        return windows


def _mapped(path: Path, dtype: str) -> TokenIds:
    kind = np.dtype(dtype).newbyteorder("<")
    tokens = path.stat().st_size // kind.itemsize  # no memory map can be empty
    # A plain array over the map: what is cut out of a np.memmap would be one as well, to no use.
    return np.asarray(np.memmap(path, kind, "r", shape=(tokens,))) if tokens else np.empty(0, kind)


@lru_cache(maxsize=8)  # the next batches, and the other replicas of the process, read the same order
def epoch_order(seed: int, epoch: int, windows: int) -> NDArray[np.int64]:
    """Return the order in which an epoch reads windows, a permutation of 0 … windows - 1.

    It sorts raw words of Philox, a hash of (seed, epoch) and a counter, which NumPy keeps the same over its versions:
    0.2 s and 13 MB for the paper's 1.6 million windows.
    """
    words = np.random.Philox(key=seed % 2**64 + (epoch << 64)).random_raw(windows)
    return np.argsort(words, kind="stable")
