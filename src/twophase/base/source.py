"""A few digits of source code: replicas that run unlike code must not train together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path


def source_digest(places: Iterable[Path]) -> str:
    """Return twelve hexadecimal digits of Python files, which change with every byte and every name.

    Args:
        places: files, and folders whose files are taken, without those of folders inside; at least one exists.
    """
    return _digest(tuple(sorted(places)))


@cache
def _digest(places: tuple[Path, ...]) -> str:
    code = hashlib.sha256()
    for place in places:
        for path in [place] if place.is_file() else sorted(place.glob("*.py")):
            code.update(f"{place.name}/{path.name}\n".encode() + path.read_bytes())
    return code.hexdigest()[:12]
