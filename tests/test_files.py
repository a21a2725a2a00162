"""Files that are written whole or not at all, and logs that survive a kill and a full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from twophase.files import append, read_jsonl, replacing, sha256, write_atomic


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """After an error, also of a full disk, the old content is there, and nothing beside it."""
    path = tmp_path / "a.txt"
    write_atomic(path, "old é")
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        write_atomic(path, "x" * 200)
    with suppress(KeyError), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert (path.read_text(encoding="utf-8"), names(path.parent)) == ("old é", ["a.txt"])
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert sha256(path) == "11507a0e2f5e69d5dfa40a62a1bd7b6ee57e6bcd85c67c9b8431b36fff21c437"


@pytest.mark.parametrize("cut", range(1, 13))
def test_a_torn_line_costs_only_itself(tmp_path: Path, cut: int) -> None:
    """Wherever a kill has cut the last line, those before it and the next one are read."""
    log = tmp_path / "log.jsonl"
    append(log, {"step": 1})
    append(log, {"step": 2})
    log.write_bytes(log.read_bytes()[:-cut])
    append(log, {"step": 3})
    steps = [row["step"] for row in read_jsonl(log)]
    assert steps == ([1, 2, 3] if cut == 1 else [1, 3])


def test_a_full_disk_leaves_a_log_that_goes_on(tmp_path: Path) -> None:
    """The system's error comes through; with space again the next line is whole."""
    log = tmp_path / "log.jsonl"
    append(log, {"step": 1})
    with full_disk(20), pytest.raises(OSError, match="File too large"):
        append(log, {"step": 2, "text": "x" * 100})
    append(log, {"step": 3})
    assert [row["step"] for row in read_jsonl(log)] == [1, 3]
