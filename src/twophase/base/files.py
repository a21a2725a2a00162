"""Writing files so that a crash leaves either the old file or the new one, never half of one."""

from __future__ import annotations

import csv
import errno
import fcntl
import glob
import hashlib
import io
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from twophase.base.reading import check_regular

DIGITS = 12
"""Significant digits of a number in a table: the last ones of a double differ between processors."""
TEMPORARY = ".tmp-"
"""Prefix of files that are being written; whatever bears it was left by a crash and means nothing."""
_LEFTOVER = re.compile(re.escape(TEMPORARY) + r".+-\d+-[0-9a-f]{8}")


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write `content` to `path` in one indivisible step.

    The bytes go to a temporary file in the same folder, reach the disk, and take the name only then.

    Args:
        path: the file.
        content: text or bytes.
        durable: whether it must survive a power cut; False spares waiting for the disk, twice.

    Raises:
        OSError: the folder cannot be written, the disk is full, or a folder, pipe or device has the name; `path` is
            then as it was.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))  # `.`, which an empty text means
    if not path.is_dir():  # of which the rename says it
        with suppress(FileNotFoundError):
            check_regular(path)  # a rename would put a file in the place of a device: `--out /dev/null` as root
    data = content.encode() if isinstance(content, str) else content
    remove_leftovers(path.parent, path.name)
    temporary, descriptor = locked_temporary(path)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            temporary.replace(path)  # under the lock: without one, the old name is that of a leftover
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder beside `path`; what the block writes there then takes its name, durably.

    The folder also holds what a library writes on its way: safetensors, too, writes under another name first.

    Args:
        path: a file, or an empty or missing folder; it stays as it was if the block raises. The block syncs the bytes.
    """
    remove_leftovers(path.parent, path.name)
    folder, descriptor = locked_temporary(path, is_folder=True)
    try:
        yield folder / path.name
        (folder / path.name).replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
    sync_folder(path.parent)


def locked_temporary(path: Path, *, is_folder: bool = False) -> tuple[Path, int]:
    """Create a file or folder under a temporary name beside `path`, locked until the returned descriptor is closed."""
    while True:
        # Not tempfile's, whose mode 0600 would hide results from colleagues: here the umask decides, as for any file.
        temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        if is_folder:
            temporary.mkdir()
        flags = os.O_RDONLY if is_folder else os.O_RDWR | os.O_CREAT | os.O_EXCL
        descriptor = os.open(temporary, flags, 0o666)
        lock(descriptor, wait=True)
        if temporary.exists():
            return temporary, descriptor
        os.close(descriptor)  # another process took it for a leftover in the moment before the lock


def lock(file: int, *, wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file or folder until it is closed; False if another process has it, or there are no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Remove the temporary files and folders that killed processes left in a folder; those of live ones stay.

    A process holds a lock on what it writes under a temporary name, and the system frees that lock at its death. So a
    free lock proves a death, on any machine. A process id does not: it is reused, and means nothing elsewhere. Nor does
    an age: a suspended process may resume at any time. Without locks nothing is removed.

    Args:
        folder: may be missing.
        name: only what was to become a file or folder of that name; empty means everything.
    """
    for path in folder.glob(f"{TEMPORARY}{glob.escape(name)}*"):
        if not _LEFTOVER.fullmatch(path.name):
            continue  # an open shard of `data prepare`, whose state says what of it counts
        with suppress(OSError):
            is_folder = path.is_dir()
            file = os.open(path, os.O_NOFOLLOW | (os.O_RDONLY if is_folder else os.O_RDWR))
            try:
                if lock(file):
                    shutil.rmtree(path) if is_folder else path.unlink()
            finally:
                os.close(file)


def append_line(path: Path, line: bytes) -> None:
    """Append a whole line to a file, or nothing; half a line that a crash or a full disk has left is cut off first.

    Args:
        path: the file; made if it is missing.
        line: ends with a newline.

    Raises:
        OSError: the disk is full, or the file cannot be written; the error names it.
    """
    try:
        with path.open("a+b", buffering=0) as file:
            lock(file.fileno(), wait=True)  # several workers share a log of jobs: none may cut what another one writes
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                end = end_of_lines(path.read_bytes())
                file.truncate(end)
            try:
                written = os.write(file.fileno(), line)
                if written < len(line):
                    written += os.write(file.fileno(), line[written:])  # the system now says why: full, quota, limit
                if written < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):  # else the next line cuts it
                    file.truncate(end)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def end_of_lines(data: bytes) -> int:
    """Return number of bytes up to the end of the last whole line."""
    return data.rfind(b"\n") + 1


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, durably: a power cut must not take a run with its folder."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable (a rename lives in the folder, not in the file)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, hexadecimal."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
