"""Reading files and JSON that may hold anything, or be no files at all."""

from __future__ import annotations

import errno
import json
import stat
from itertools import chain
from pathlib import Path
from typing import Any

_LEVELS = 100
_DEEP = f"it is nested more than {_LEVELS} levels deep"


def check_regular(path: Path) -> int:
    """Return the size of a regular file in bytes; a folder, pipe, socket or device might block or never end.

    Raises:
        OSError: it is none, is missing, or cannot be looked at.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
    return status.st_size


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: it is no regular file, is missing, or cannot be read.
    """
    check_regular(path)
    return path.read_bytes()


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; see `json_object`.

    Raises:
        OSError: it is no regular file, is missing, or cannot be read.
        ValueError: it holds no such object.
    """
    return json_object(read_bytes(path))


def json_object_or_none(path: Path) -> dict[str, Any] | None:
    """Return the JSON object that a file holds; None where it is missing, cannot be read, or holds no such object."""
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return None


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return the object that JSON writes, of at most 100 levels, so that what reads it may recurse.

    Raises:
        ValueError: no JSON, no object, or more levels.
    """
    try:
        record = json.loads(text)
    except RecursionError:
        raise ValueError(_DEEP) from None
    if not isinstance(record, dict):
        raise ValueError(f"it holds {type(record).__name__} and not a JSON object")
    level: list[Any] = [record]
    depth = 0
    while level:
        depth += 1
        if depth > _LEVELS:
            raise ValueError(_DEEP)
        inner = chain.from_iterable(part.values() if isinstance(part, dict) else part for part in level)
        level = [part for part in inner if isinstance(part, (dict, list))]
    return record
