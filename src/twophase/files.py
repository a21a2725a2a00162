"""Writing files so that a crash leaves either the old file or the new one, never half of one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

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
    # Not tempfile's, whose mode 0600 would hide results from colleagues: here the umask decides, as for any file.
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
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
