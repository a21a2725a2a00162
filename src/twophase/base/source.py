"""A few digits of source code: replicas that run unlike code must not train together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path


def source_digest(paths: Iterable[Path]) -> str:
    """Return twelve hexadecimal digits of Python files, which change with every byte and every name.

    Args:
        paths: files, and folders whose files are taken, without those of folders inside; at least one exists.
    """
    return _digest(tuple(sorted(paths)))


@cache
def _digest(paths: tuple[Path, ...]) -> str:
    code = hashlib.sha256()
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.glob("*.py")):
            code.update(f"{path.name}/{file.name}\n".encode() + file.read_bytes())
    return code.hexdigest()[:12]
