"""Writing files so that a crash leaves either the old file or the new one, never half of one."""

from __future__ import annotations

import csv
import io
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DIGITS = 12
"""Significant digits of a number in a table: the last ones of a double differ between processors."""
TEMPORARY = ".tmp-"
"""Prefix of files that are being written; whatever bears it was left by a crash and means nothing."""


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write `content` to `path` in one indivisible step.

    The bytes go to a temporary file in the same folder, reach the disk, and take the name only then.

    Args:
        path: the file.
        content: text or bytes.
        durable: whether it must survive a power cut; False spares waiting for the disk, twice.

    Raises:
        OSError: the folder cannot be written or the disk is full; `path` is then as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, durable=durable) as temporary, temporary.open("xb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the same folder; the file that the block writes there then takes the name `path`.

    Args:
        path: the file; it stays as it was if the block raises.
        durable: whether the name must survive a power cut; the block itself syncs the bytes.
    """
    # Not tempfile's, whose mode 0600 would hide results from colleagues: here the umask decides, as for any file.
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable (a rename lives in the folder, not in the file)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; columns in the order in which they first appear, empty where a row has no number."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in columns])
    return buffer.getvalue()


def _cell(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value  # NumPy's scalars
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)
