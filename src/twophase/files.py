"""Files that survive a kill: written whole or not at all, and logs of JSON lines."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_ON_WINDOWS = os.name == "nt"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, for a file or a folder of files; an error removes it.

    It takes the name of `path`, a file or an empty folder, when the block ends. What killed writers of `path` left goes
    as well, once it is two minutes old: until then they may live.
    """
    for old in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > 120:
                _remove(old)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        for written in (*temporary.glob("*"), temporary):
            _sync(written)
        temporary.replace(path)
        _sync(path.parent)  # names lie in the folder, not in the files
    finally:
        if temporary.exists():
            _remove(temporary)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if _ON_WINDOWS and path.is_dir():  # which opens no folders, and flushes only what it may write
        return
    descriptor = os.open(path, os.O_RDWR if _ON_WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, and a crash, sees the old content or the new, never a part."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finite(value: Any) -> Any:
    """Return a value as strict JSON can hold it: arrays as lists, numbers that are not finite as None."""
    if hasattr(value, "tolist"):  # of NumPy's scalars, too
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line in one write; half a line that a kill has left before it is closed first."""
    line = json.dumps(finite(record), allow_nan=False).encode() + b"\n"
    with path.open("a+b", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        if (written := file.write(line)) < len(line):  # a full disk: the second write says so
            file.write(line[written:])


def read_jsonl(path: Path) -> list[Row]:
    """Return the records of a log, without a line that a kill has torn; a missing file is empty."""
    rows = []
    with suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]
