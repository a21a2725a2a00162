"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from twophase.base.files import write_atomic


@pytest.mark.parametrize("is_link", [False, True])
def test_nothing_takes_the_place_of_a_pipe(tmp_path: Path, *, is_link: bool) -> None:
    """A rename would put a file where a pipe or device is; it is refused, and nothing is left beside it."""
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / "pipe"
    if is_link:
        path = tmp_path / "link"
        path.symlink_to("pipe")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="not a file"):
        write_atomic(path, "text")
    assert path.is_fifo()
    assert sorted(tmp_path.iterdir()) == before
