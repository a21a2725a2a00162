"""Reading token shards: checked once, then mapped into memory and cut into windows.

Every window of T tokens and the target of its last one is T+1 neighbours of one file. Windows do not overlap except in
that one token and do not cross files, so a file of t tokens has (t-1) // T of them and the rest of it is not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.base.config import UsageError
from twophase.base.files import write_atomic
from twophase.base.progress import meter
from twophase.text.meta import DTYPES, META, TOKEN_BYTES, TRAIN, VALIDATION, Meta, read_meta

VERIFIED = ".verified.json"
"""Beside the token files: size, time of change and SHA-256 of those that were read whole before."""
HEADER_BYTES = 1024
HEADERS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""Magic number and version of the headed `.bin` files of llm.c and modded-nanogpt, and the type of their ids."""

_HEADER_WORDS = 3  # magic, version, number of tokens; 253 unused int32 follow
_CHUNK = 1 << 23
_QUIET_BYTES = 1 << 30  # below this, hashing is over before one wonders
_PREPARED = re.compile(r"(train|validation)-\d+\.bin")


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids of the right size.

    Args:
        path: the file.
        tokens: number of ids in it.
        dtype: a key of `DTYPES`.
        offset: bytes before the first id.
    """

    path: Path
    tokens: int
    dtype: str
    offset: int = 0

    def array(self) -> NDArray[np.unsignedinteger[Any]]:
        """Return its ids, (tokens,), read from the disk when they are used."""
        if not self.tokens:
            return np.empty(0, self.dtype)  # nothing cannot be mapped
        dtype = np.dtype(self.dtype).newbyteorder("<")
        try:
            # A plain array over the map: what is cut out of a np.memmap would be one as well, to no use.
            return np.asarray(np.memmap(self.path, dtype, "r", self.offset, self.tokens))
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be mapped into memory ({error.strerror}); check its permissions and, where "
                f"shards are many, `ulimit -n`"
            ) from None


class Windows:
    """The windows of some token files, numbered from the first file's first to the last file's last.

    Args:
        files: in order.
        length: tokens of a window, T >= 1.
        vocabulary_size: ids at or above it are refused when they are read.
    """

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

    def read(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.unsignedinteger[Any]]:
        """Return some windows.

        Args:
            numbers: (n,), in [0, len(self)).

        Returns:
            (n, length + 1) uint16 or uint32: the tokens of each window and the target of its last one.

        Raises:
            ValueError: a number out of range.
            UsageError: an id outside the vocabulary.
        """
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise ValueError(
                f"Windows.read: numbers are in [{numbers.min()}, {numbers.max()}]; they must be in [0, {len(self) - 1}]"
            )
        files = np.searchsorted(self._first, numbers, side="right") - 1
        places = numbers - self._first[files]
        read = np.empty((len(numbers), self.length + 1), self._dtype)
        for file in np.unique(files).tolist():
            here = files == file
            read[here] = self._cut[file][places[here]]
        if read.size and read.max() >= self.vocabulary_size:
            self._refuse(read, files, places * self.length)
        return read

    def _refuse(self, read: NDArray[Any], files: NDArray[Any], starts: NDArray[Any]) -> None:
        row, column = np.argwhere(read >= self.vocabulary_size)[0]
        raise UsageError(
            f"{self._files[files[row]].path}: token {starts[row] + column:,} is the id {read[row, column]}, and the "
            f"vocabulary has {self.vocabulary_size:,} ids; name the vocabulary that the file was made with, or "
            f"make the file again"
        )


@dataclass(frozen=True)
class Shards:
    """The token files of a folder, checked; get one from `open_shards` or `open_bin`.

    Args:
        path: what was opened.
        splits: from `train` and `validation` to their files, in order.
        vocabulary_size: number of ids.
        fingerprint: SHA-256 of what a run sees of them, hexadecimal.
        meta: what the folder says of itself; None of `.bin` files that say nothing.
        token_bytes: (vocabulary_size,) int64, UTF-8 bytes of each id; None where unknown.
    """

    path: Path
    splits: Mapping[str, tuple[TokenFile, ...]]
    vocabulary_size: int
    fingerprint: str
    meta: Meta | None = None
    token_bytes: NDArray[np.int64] | None = None

    def tokens(self, split: str) -> int:
        """Return number of token ids of a split."""
        return sum(file.tokens for file in self.splits[split])

    def windows(self, split: str, length: int) -> Windows:
        """Return the windows of a split, `length` tokens each."""
        return Windows(self.splits[split], length, self.vocabulary_size)


def open_shards(folder: Path, *, verify: bool = True) -> Shards:
    """Return the shards of a finished folder of `twophase data prepare`.

    Args:
        folder: holds `meta.json`.
        verify: compare each shard's SHA-256 with that of `meta.json`. Files of the size and time of change that they
            had when they were found right are not read again; `.verified.json` in the folder remembers, if it can
            be written.

    Raises:
        UsageError: no finished folder, a shard that is absent, of another size or of other content, ids outside the
            vocabulary, or no split to train on or to validate on.
    """
    meta = read_meta(folder)
    if meta.vocabulary_size < 1:
        raise UsageError(f"{folder / META} is damaged (vocabulary_size {meta.vocabulary_size}); prepare it again")
    splits: dict[str, tuple[TokenFile, ...]] = {}
    expected: dict[str, str] = {}
    for split in (TRAIN, VALIDATION):
        if not meta.tokens(split):
            raise UsageError(
                f"{folder} holds no {split} tokens; prepare it again with more text, or with --validation SOURCE"
            )
        files = []
        for shard in meta.splits[split]:
            path = folder / shard.file
            _check_size(path, shard.tokens * DTYPES[meta.dtype], f"{META} says {shard.tokens:,} {meta.dtype} ids")
            if shard.largest >= meta.vocabulary_size:
                raise UsageError(
                    f"{path}: its largest id is {shard.largest} and the vocabulary of {meta.tokenizer} has "
                    f"{meta.vocabulary_size:,} ids; prepare the folder again"
                )
            files.append(TokenFile(path, shard.tokens, meta.dtype))
            expected[shard.file] = shard.sha256
        splits[split] = tuple(files)
    if verify:
        digests(folder, list(expected), expected)
    return Shards(folder, splits, meta.vocabulary_size, meta.fingerprint, meta, _token_bytes(folder, meta))


def is_prepared(folder: Path) -> bool:
    """Return whether a folder is one of `twophase data prepare`, finished or not, or holds no bare `.bin` files."""
    if (folder / META).exists():
        return True
    names = [file.name for file in folder.glob("*.bin") if not file.name.startswith(".")]
    return not names or any(map(_PREPARED.fullmatch, names))


def open_bin(path: Path, vocabulary_size: int) -> Shards:
    """Open token files that do not name their vocabulary: nanoGPT's (bare uint16) or modded-nanogpt's (with header).

    Args:
        path: a folder; its files with the word `train` in their name (`train.bin`, `fineweb_train_000001.bin`) are
            trained on and those with `val` validated on; or one file to train on, with the `val` files beside it.
        vocabulary_size: of the tokenizer that made them, >= 1.

    Raises:
        UsageError: no such files, or ones that are not what their size or their header says.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder; check the path (it is relative to {Path.cwd()})")
    if path != folder and path.suffix != ".bin":
        raise UsageError(f"{path} is no .bin file; name a .bin file of token ids, or a folder that holds some")
    if path != folder and (folder / META).exists():
        raise UsageError(f"{path} is a shard of a prepared folder; name the folder: tokens:{folder}")
    listed = sorted(file for file in folder.glob("*.bin") if not file.name.startswith("."))
    validation = [file for file in listed if _word_in(file, "val", "valid", "validation")]
    training = (
        [file for file in listed if file not in validation and _word_in(file, "train")] if path == folder else [path]
    )
    if path == folder and any(_PREPARED.fullmatch(file.name) for file in listed):
        read_meta(folder)  # says what to do about a folder that is not finished
    if path in validation:
        raise UsageError(f"{path} is for validation, by its name; name the file to train on, or the folder {folder}")
    if not training or not validation:
        wanted = "val.bin" if training else "train.bin"
        raise UsageError(
            f"{folder} holds no {wanted}; nanoGPT-style token files are train.bin and val.bin in one folder (or "
            f"names with the words train and val); a folder that is to be made takes `twophase data prepare`"
        )
    splits = {TRAIN: tuple(map(_bin_file, training)), VALIDATION: tuple(map(_bin_file, validation))}
    hashes = digests(folder, [file.name for file in (*training, *validation)])
    seen = {split: [(hashes[f.path.name], f.dtype, f.offset) for f in files] for split, files in splits.items()}
    fingerprint = hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()
    return Shards(path, splits, vocabulary_size, fingerprint)


def digests(folder: Path, names: Sequence[str], expected: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of some files of a folder, remembered there as long as size and time of change stay.

    Args:
        folder: may be one that cannot be written; then nothing is remembered.
        names: of the files in it.
        expected: hashes that they must have; a file of another hash is neither accepted nor remembered.

    Raises:
        UsageError: a file that cannot be read, or that has another hash than expected.
    """
    remembered = _remembered(folder)
    result: dict[str, str] = {}
    todo: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        status = (folder / name).stat()
        facts = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        entry = remembered.get(name)
        saved = (
            entry.get("sha256")
            if isinstance(entry, dict) and entry == facts | {"sha256": entry.get("sha256")}
            else None
        )
        # A remembered hash that is not the expected one proves nothing: both files may have been put back since.
        if isinstance(saved, str) and (expected is None or saved == expected[name]):
            result[name] = saved
        else:
            todo.append((name, facts))
    total = sum(facts["size"] for _, facts in todo)
    done = 0
    with meter("checking token files (MB)", total // 10**6, quiet=total < _QUIET_BYTES) as show:
        for name, facts in todo:
            result[name] = _sha256(folder / name, lambda size, done=done, name=name: show((done + size) // 10**6, name))
            done += facts["size"]
            if expected is not None and result[name] != expected[name]:
                raise UsageError(
                    f"{folder / name}: its SHA-256 is {result[name][:16]}… and {META} says {expected[name][:16]}…; the "
                    f"file was changed or damaged since it was prepared; copy it again, or prepare the folder again"
                )
            _remember(folder, name, facts | {"sha256": result[name]})
    return result


def _sha256(path: Path, show: Any) -> str:
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                show(size)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk") from None
    return digest.hexdigest()


def _remembered(folder: Path) -> dict[str, Any]:
    try:
        entries = json.loads((folder / VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _remember(folder: Path, name: str, entry: dict[str, Any]) -> None:
    # Several processes may write at once; what one of them loses of another's is merely read once more.
    text = json.dumps(_remembered(folder) | {name: entry}, indent=1) + "\n"
    with contextlib.suppress(OSError):  # a folder that cannot be written is checked each time
        write_atomic(folder / VERIFIED, text, durable=False)


def _cut(array: NDArray[Any], length: int) -> NDArray[Any]:
    """Return the windows of an array as rows that share their memory with it, (windows, length + 1)."""
    windows, size = max(len(array) - 1, 0) // length, array.itemsize
    return np.lib.stride_tricks.as_strided(array, (windows, length + 1), (length * size, size), writeable=False)


def _check_size(path: Path, expected: int, because: str) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise UsageError(
            f"{path} is not there, and {META} names it; copy it again, or prepare the folder again"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    if size != expected:
        state = "is truncated" if size < expected else "is too long"
        raise UsageError(
            f"{path} {state}: {size:,} bytes, where {expected:,} are expected ({because}); copy it again, or "
            f"make it again"
        )


def _token_bytes(folder: Path, meta: Meta) -> NDArray[np.int64]:
    path = folder / TOKEN_BYTES
    try:
        token_bytes = np.load(path, allow_pickle=False)
        if token_bytes.shape != (meta.vocabulary_size,) or not np.issubdtype(token_bytes.dtype, np.integer):
            raise ValueError(f"it is {token_bytes.dtype} {token_bytes.shape}, not integer ({meta.vocabulary_size},)")
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{path} cannot be used ({error}); copy it again, or prepare the folder again") from None
    return token_bytes.astype(np.int64)


def _word_in(path: Path, *words: str) -> bool:
    return not set(words).isdisjoint(re.split(r"[^a-z]+", path.stem.lower()))


def _bin_file(path: Path) -> TokenFile:
    """Return a `.bin` file by what it is: its header if it has one, else bare uint16."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES), np.uint8)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    if len(header) >= 4 * _HEADER_WORDS:
        magic, version, tokens = header[: 4 * _HEADER_WORDS].view("<i4").tolist()
        if magic in {magic for magic, _ in HEADERS}:
            dtype = HEADERS.get((magic, version))
            if dtype is None:
                raise UsageError(
                    f"{path}: its header is of version {version}; of files with the magic number {magic} version "
                    f"{', '.join(str(v) for m, v in HEADERS if m == magic)} is read; make it again in that version"
                )
            _check_size(path, HEADER_BYTES + tokens * DTYPES[dtype], f"its header says {tokens:,} {dtype} ids")
            return TokenFile(path, tokens, dtype, HEADER_BYTES)
    if size == 0 or size % DTYPES["uint16"]:
        raise UsageError(
            f"{path} is {size:,} bytes, which is no whole number of uint16 ids above 0; it is no nanoGPT-style token "
            f"file, or was cut off: copy it again"
        )
    return TokenFile(path, size // DTYPES["uint16"], "uint16")
