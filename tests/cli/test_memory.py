"""Commands that run out of memory: one message with the remedy, status 2 at the door and 1 later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import forked
import textmaker

MEGABYTE = 1_000_000
TRAIN = "train --out run"
# Megabytes beyond those of a process that has loaded its libraries, the command, its status, and what the message says.
CASES = [
    (200, f"{TRAIN} --data.validation-windows 1300000", 1, "the memory is full"),
    (200, f"{TRAIN} --model.intermediate-size 1000000", 2, "a smaller model"),
    (200, f"{TRAIN} --replicas 1500 --model.hidden-size 128", 2, "fewer --replicas"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("megabytes", "words", "status", "text"), CASES)
def test_out_of_memory(tmp_path: Path, megabytes: int, words: str, status: int, text: str) -> None:
    """No traceback; the message names what to lower."""
    textmaker.write(tmp_path / "text.txt")
    words += " --data.corpus file:text.txt --data.sequence-length 16 --steps 20 --inner-steps 5"
    program = Path(__file__).parents[1] / "limited.py"
    process = forked.Program(
        [str(program), str(megabytes * MEGABYTE), str(tmp_path), *words.split()],
        tmp_path / "out",
        tmp_path / "err",
        os.environ,
    )
    ended = process.wait(120)
    message = (tmp_path / "err").read_text()
    assert "Traceback" not in message
    assert ended == status, message
    assert text in message.splitlines()[-1]
