"""A log of a run: whole lines of JSON, whose length and SHA-256 a checkpoint remembers."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from twophase.base.config import UsageError
from twophase.base.files import append_line, end_of_lines, write_atomic
from twophase.base.reading import read_bytes

Mark = dict[str, Any]
"""`bytes` and `sha256` of a log at some moment; JSON."""
_GAP = {"step", "gap", "sha256"}
"""Keys of the line that marks where a log was lost or altered, with the SHA-256 of all before it."""


class Log:
    """A log that one process writes, with the running SHA-256 of its whole lines.

    Args:
        path: the file, which may be missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = 0
        self._digest: Any = None
        """None until the file is first used: a finished run's logs are read by none of this."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a line; numbers that are not finite become null."""
        self._open()
        if self._bytes:
            self.path.stat()  # a log that was removed meanwhile must not restart in silence
        line = (json.dumps(standard(record), allow_nan=False) + "\n").encode()
        append_line(self.path, line)
        self._bytes += len(line)
        self._digest.update(line)

    def mark(self) -> Mark:
        """Return length and SHA-256 of the whole lines so far."""
        self._open()
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def sync(self) -> None:
        """Bring the lines so far to the disk; another thread may append meanwhile."""
        with suppress(FileNotFoundError):
            file = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def fault(self, mark: Mark | int | None, step: int = 0) -> str | None:
        """Say how the file differs from what was there at a mark; None if it begins with the same bytes.

        Args:
            mark: result of `mark`; a bare length is that of an older checkpoint, None the empty log.
            step: the inner steps at the mark; None is returned also if `mend` has accepted the file for them.
        """
        data = self._read()
        why = _difference(data, mark)
        return None if why is None or _mended(data, step) else why

    def rewind(self, mark: Mark | int | None, step: int = 0) -> None:
        """Cut the file back to a mark that it has no fault against; half a line at the end goes as well."""
        if self.path.exists():
            data = self._read()
            end = _mended(data, step) or _parts(mark)[0]
            os.truncate(self.path, end_of_lines(data[:end]))
        self._digest = None

    def cut(self, step: int, rounds: Mapping[str, int]) -> None:
        """Keep the lines before the first one after an inner step, or after that many rounds of a fragment."""
        newest, end = max(rounds.values(), default=math.inf), 0
        for line in self._read().splitlines(keepends=True):
            record = _record(line)
            if record is None or not record.get("step", 0) <= step:
                break
            parts = record.get("fragments")  # of a round; metrics may have a number of that name
            limits = [(record, newest)]
            if isinstance(parts, list) and parts:
                limits = [(part, rounds.get(part["name"], math.inf)) for part in parts]
            if any(part.get("round", 0) > limit for part, limit in limits):
                break  # of the last, shorter round, which ends without an inner step
            end += len(line)
        self.rewind(end)

    def mend(self, step: int, fault: str) -> None:
        """Keep the lines up to a step that can be read, mark the gap with a line, and keep the old file.

        Args:
            step: the inner steps at which the run resumes.
            fault: result of `fault`.
        """
        data = self._read()
        if data:
            paths = (self.path.with_name(f"{self.path.name}.gap-{number}") for number in itertools.count(1))
            write_atomic(next(path for path in paths if not path.exists()), data)
        text = "".join(json.dumps(line) + "\n" for line in _readable(data, step))
        gap = {"step": step, "gap": fault, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        write_atomic(self.path, f"{text}{json.dumps(gap)}\n")
        self._digest = None

    def _read(self) -> bytes:
        return read_bytes(self.path) if self.path.exists() else b""

    def _open(self) -> None:
        if self._digest is None:
            data = self._read()
            data = data[: end_of_lines(data)]
            self._bytes, self._digest = len(data), hashlib.sha256(data)


def read_log(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the records of a log without a torn last line, and apart from them the lines that mark gaps.

    Raises:
        UsageError: a file that cannot be read, or a whole line that is not a JSON object.
    """
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); put it back, or move it out of the folder"
        ) from None
    records: list[dict[str, Any]] = []
    gaps: list[dict[str, Any]] = []
    for number, line in enumerate(data[: end_of_lines(data)].splitlines(), start=1):
        record = _record(line)
        if record is None:
            raise UsageError(
                f"{path}: line {number} is not a JSON object; the file is damaged: put it back, or take the line out"
            )
        (gaps if _is_gap(record) else records).append(record)
    return records, gaps


def standard(value: Any) -> Any:
    """Return the value with null for every number that is not finite, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): standard(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [standard(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _readable(data: bytes, step: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of ascending steps up to one, and former gaps before it; damaged lines are left out."""
    last = 0
    for line in data[: end_of_lines(data)].splitlines():
        record = _record(line) or {}
        number = record.get("step")
        # A gap has the step of the line before it; that of this very step is rewritten.
        if isinstance(number, int) and (last <= number < step if _is_gap(record) else last < number <= step):
            last = number
            yield record


def _difference(data: bytes, mark: Mark | int | None) -> str | None:
    """Say how a log differs from what was there at a mark; None if it begins with the same bytes."""
    length, sha256 = _parts(mark)
    if len(data) < length:
        return f"{len(data):,} bytes are left of {length:,}"
    if sha256 is not None and hashlib.sha256(data[:length]).hexdigest() != sha256:
        return f"its first {length:,} bytes were altered"
    return None


def _mended(data: bytes, step: int) -> int:
    """Return the end of the line with which `mend` marked the checkpoint of a step; 0 without such a line.

    Until the next checkpoint that line is the only record, and the bytes before it must be unchanged.
    """
    if b'"gap"' not in data:
        return 0
    end = 0
    for line in data[: end_of_lines(data)].splitlines(keepends=True):
        record, before, end = _record(line) or {}, end, end + len(line)
        if record.get("step") == step and record.get("sha256") == hashlib.sha256(data[:before]).hexdigest():
            return end
    return 0


def _is_gap(record: Mapping[str, Any]) -> bool:
    return record.keys() | {"sha256"} == _GAP  # earlier versions wrote none


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _parts(mark: Mark | int | None) -> tuple[int, str | None]:
    """Return length and SHA-256 of a mark; no SHA-256 where an older checkpoint has none."""
    if isinstance(mark, dict):
        return mark["bytes"], mark["sha256"]
    return mark or 0, None
