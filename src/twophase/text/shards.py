"""Reading token shards: checked once, then mapped into memory and cut into windows.

Every window of T tokens and the target of its last one is T+1 neighbours of one file. Windows overlap in that one token
only and do not cross files. So a file of t tokens has (t-1) // T of them, and its rest is not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.base.config import UsageError
from twophase.base.files import file_sha256, write_atomic
from twophase.base.progress import meter
from twophase.base.reading import check_regular, json_object_or_none
from twophase.text.meta import DTYPES, META, SHARD, TOKEN_BYTES, TRAIN, VALIDATION, Meta, read_meta

VERIFIED = ".verified.json"
"""Beside the token files: size, time of change and SHA-256 of those that were read whole before."""
HEADER_BYTES = 1024
HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""By magic number the version of the headed `.bin` files of llm.c and modded-nanogpt, and the type of their ids."""

_QUIET_BYTES = 1 << 30  # below this, hashing is over before one wonders


@dataclass(frozen=True)
class TokenFile:
    """A file of so many token ids, of a type of `DTYPES`, behind `offset` bytes."""

    path: Path
    tokens: int
    dtype: str
    offset: int = 0

    def array(self) -> NDArray[np.unsignedinteger[Any]]:
        """Return its ids, (tokens,), read from the disk when they are used."""
        if not self.tokens:
            return np.empty(0, self.dtype)  # nothing cannot be mapped
        dtype = np.dtype(self.dtype).newbyteorder("<")
        with _refusal(self.path):
            # A plain array over the map: what is cut out of a np.memmap would be one as well, to no use.
            return np.asarray(np.memmap(self.path, dtype, "r", self.offset, self.tokens))


class Windows:
    """The windows of T tokens of some token files, numbered from the first file's first to the last file's last."""

    def __init__(self, files: Sequence[TokenFile], length: int, vocabulary_size: int) -> None:
        self.length = length
        self.vocabulary_size = vocabulary_size
        self._files = tuple(files)
        self._cut = [_cut(file.array(), length) for file in files]
        # The number of the first window of each file, and at the end the number of all.
        self._first = np.cumsum([0, *map(len, self._cut)])
        self._dtype = np.result_type(np.uint16, *(np.dtype(file.dtype) for file in files))

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.unsignedinteger[Any]]:
        """Return the windows of some numbers in [0, len(self)), (n, length + 1) uint16 or uint32.

        Raises:
            UsageError: an id outside the vocabulary.
        """
        files = np.searchsorted(self._first, numbers, side="right") - 1
        positions = numbers - self._first[files]
        windows = np.empty((len(numbers), self.length + 1), self._dtype)
        for file in np.unique(files).tolist():
            in_file = files == file
            windows[in_file] = self._cut[file][positions[in_file]]
        if windows.size and windows.max() >= self.vocabulary_size:
            row, column = np.argwhere(windows >= self.vocabulary_size)[0]
            raise UsageError(
                f"{self._files[files[row]].path}: token {positions[row] * self.length + column:,} is the id "
                f"{windows[row, column]}, and the vocabulary has {self.vocabulary_size:,} ids. Name the vocabulary "
                "that the file was made with, or make the file again"
            )
        return windows


def _cut(array: NDArray[Any], length: int) -> NDArray[Any]:
    """Return the windows of an array as rows that share their memory with it, (windows, length + 1)."""
    windows, size = max(len(array) - 1, 0) // length, array.itemsize
    return np.lib.stride_tricks.as_strided(array, (windows, length + 1), (length * size, size), writeable=False)


@dataclass(frozen=True)
class Shards:
    """The token files of a folder, checked; get one from `open_shards` or `open_bin`.

    Args:
        splits: files of `train` and `validation`, in order.
        fingerprint: SHA-256 of what a run sees of them, hexadecimal.
        meta: description of the folder; None of `.bin` files without one.
        token_bytes: (vocabulary_size,) int64, UTF-8 bytes of each id; None where unknown.
        trusted: SHA-256 of each file that was not read now, because its size and time of change are those of an earlier
            reading.
    """

    path: Path
    splits: Mapping[str, tuple[TokenFile, ...]]
    vocabulary_size: int
    fingerprint: str
    meta: Meta | None = None
    token_bytes: NDArray[np.int64] | None = None
    trusted: Mapping[Path, str] = field(default_factory=dict)

    def tokens(self, split: str) -> int:
        """Return number of token ids of a split."""
        return sum(file.tokens for file in self.splits[split])

    def windows(self, split: str, length: int) -> Windows:
        """Return the windows of a split, `length` tokens each."""
        return Windows(self.splits[split], length, self.vocabulary_size)


# ------------------------------------------------------------------------------------------- folders with a meta.json


def is_prepared(folder: Path) -> bool:
    """Return whether a folder is one of `twophase data prepare`, finished or not, or holds no bare `.bin` files."""
    names = [file.name for file in _bin_files(folder)]
    return (folder / META).exists() or not names or any(map(SHARD.fullmatch, names))


def open_shards(folder: Path, *, trust: bool = True) -> Shards:
    """Return the shards of a finished folder of `twophase data prepare`.

    Each shard's SHA-256 is compared with that of `meta.json`. Files with the size and time of change of an earlier
    comparison are not read again. `.verified.json` in the folder remembers them, if writable.

    Args:
        folder: folder with `meta.json`.
        trust: True to accept the hashes of `.verified.json`.

    Raises:
        UsageError: no finished folder, a shard that is absent, of another size or of other content, or no split to
            train on or to validate on.
    """
    meta = read_meta(folder)
    splits: dict[str, tuple[TokenFile, ...]] = {}
    for split in (TRAIN, VALIDATION):
        if not meta.tokens(split):
            raise UsageError(
                f"{folder} holds no {split} tokens; prepare it again with more text, or with --validation SOURCE"
            )
        splits[split] = tuple(TokenFile(folder / shard.file, shard.tokens, meta.dtype) for shard in meta.splits[split])
    expected = {shard.file: shard.sha256 for split in splits for shard in meta.splits[split]}
    trusted = digests(folder, expected, trust=trust)[1]
    path = folder / TOKEN_BYTES
    try:
        if meta.token_bytes_sha256 not in ("", file_sha256(path)):
            raise ValueError(f"its SHA-256 is not that in {META}")
        token_bytes = np.load(path).astype(np.int64)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be used ({error}); copy it again, or prepare the folder again") from None
    return Shards(folder, splits, meta.vocabulary_size, meta.fingerprint, meta, token_bytes, trusted)


def digests(folder: Path, expected: Mapping[str, str | None], *, trust: bool) -> tuple[dict[str, str], dict[Path, str]]:
    """Return the SHA-256 of some files of a folder, remembered there as long as size and time of change stay.

    Args:
        folder: folder of the files; if it cannot be written, nothing is remembered.
        expected: hashes by name; None takes any, another one is refused.
        trust: True to accept remembered hashes.

    Returns:
        The hashes by name, and by path those that are remembered ones.
    """
    remembered = (json_object_or_none(folder / VERIFIED) or {}) if trust else {}
    facts: dict[str, dict[str, Any]] = {}
    result: dict[str, str] = {}
    for name, required in expected.items():
        with _refusal(folder / name):
            status, entry = (folder / name).stat(), remembered.get(name)
        facts[name] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        digest = entry.get("sha256") if isinstance(entry, dict) else None
        # A remembered hash that is not the expected one proves nothing: both files may have been put back since.
        if isinstance(digest, str) and entry == facts[name] | {"sha256": digest} and required in (None, digest):
            result[name] = digest
    trusted = {folder / name: digest for name, digest in result.items()}
    sizes = {name: facts[name]["size"] for name in expected if name not in result}
    total, done = sum(sizes.values()), 0
    with meter("checking token files (MB)", total // 10**6, quiet=total < _QUIET_BYTES) as show:
        for name, size in sizes.items():
            show(done // 10**6, name)
            with _refusal(folder / name):
                result[name], required = file_sha256(folder / name), expected[name]
            done += size
            if required not in (None, result[name]):
                raise UsageError(
                    f"{folder / name}: its SHA-256 is {result[name][:16]}… and {META} says {str(required)[:16]}…. The "
                    "file was changed or damaged since it was prepared; copy it again, or prepare the folder again"
                )
            remember(folder / name, facts[name] | {"sha256": result[name]})
        show(done // 10**6, "")
    return result, trusted


def remember(path: Path, entry: Mapping[str, Any] | None) -> None:
    """Note what a file was when it was read; None has it read the next time that its folder is opened."""
    # Several processes may write at once; an entry that one of them overwrites is merely made once more.
    entries = (json_object_or_none(path.parent / VERIFIED) or {}) | {path.name: entry}
    with contextlib.suppress(OSError):  # a folder that cannot be written is checked each time
        write_atomic(path.parent / VERIFIED, json.dumps(entries, indent=1) + "\n", durable=False)


@contextlib.contextmanager
def _refusal(path: Path) -> Iterator[None]:
    """Turn what keeps a file from being read into one message."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); check its permissions, the disk and, where shards are many, "
            f"`ulimit -n`; copy it again, or prepare the folder again"
        ) from None


# ------------------------------------------------------------------------ files that do not name their vocabulary


def open_bin(path: Path, vocabulary_size: int, *, trust: bool = True) -> Shards:
    """Open token files that do not name their vocabulary: nanoGPT's (bare uint16) or modded-nanogpt's (with header).

    Args:
        path: existing path, no part of a prepared folder (`is_prepared`). In a folder, files with the word `train` in
            their name (`train.bin`, `fineweb_train_000001.bin`) are for training, files with `val` for validation. A
            single training file goes with the `val` files of its folder.
        vocabulary_size: ids of the tokenizer that made them, >= 1.
        trust: True to accept the hashes of `.verified.json`.

    Raises:
        UsageError: no such files, or ones that are not what their size or their header says.
    """
    folder = path if path.is_dir() else path.parent
    if path != folder and path.suffix != ".bin":
        raise UsageError(f"{path} is no .bin file; name a .bin file of token ids, or a folder that holds some")
    validation = [file for file in _bin_files(folder) if _word_in(file, "val", "valid", "validation")]
    if path in validation:
        raise UsageError(f"{path} is for validation, by its name; name the file to train on, or the folder {folder}")
    others = [file for file in _bin_files(folder) if file not in validation]
    training = [file for file in others if file == path or (path == folder and _word_in(file, "train"))]
    if not training or not validation:
        raise UsageError(
            f"{folder} holds no {'val.bin' if training else 'train.bin'}; nanoGPT-style token files are train.bin "
            "and val.bin in one folder (or names with the words train and val). To make a folder use `twophase data "
            "prepare`"
        )
    splits = {TRAIN: tuple(map(_bin_file, training)), VALIDATION: tuple(map(_bin_file, validation))}
    names = dict.fromkeys(file.name for file in (*training, *validation))
    hashes, trusted = digests(folder, names, trust=trust)
    seen = {split: [(hashes[f.path.name], f.dtype, f.offset) for f in files] for split, files in splits.items()}
    fingerprint = hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()
    return Shards(path, splits, vocabulary_size, fingerprint, trusted=trusted)


def _bin_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.bin") if not file.name.startswith("."))


def _word_in(path: Path, *words: str) -> bool:
    return not set(words).isdisjoint(re.split(r"[^a-z]+", path.stem.lower()))


def _bin_file(path: Path) -> TokenFile:
    """Return a `.bin` file by what it is: its header if it has one, else bare uint16."""
    with _refusal(path):
        size = check_regular(path)
        header = np.fromfile(path, "<i4", 3)  # magic, version, number of tokens; 253 unused int32 follow
    if len(header) == 3 and header[0] in HEADERS:
        magic, version, tokens = header.tolist()
        readable, dtype = HEADERS[magic]
        if version != readable:
            raise UsageError(
                f"{path}: its header is of version {version}; of files with the magic number {magic} version "
                f"{readable} is read; make it again in that version"
            )
        expected = HEADER_BYTES + tokens * DTYPES[dtype]
        if size != expected:
            raise UsageError(
                f"{path} {'is truncated' if size < expected else 'is too long'}: {size:,} bytes, where {expected:,} "
                f"are expected (its header says {tokens:,} {dtype} ids); copy it again, or make it again"
            )
        return TokenFile(path, tokens, dtype, HEADER_BYTES)
    if size == 0 or size % DTYPES["uint16"]:
        raise UsageError(
            f"{path} is {size:,} bytes, which is no whole number of uint16 ids above 0. It is no nanoGPT-style token "
            "file, or was cut off: copy it again"
        )
    return TokenFile(path, size // DTYPES["uint16"], "uint16")
