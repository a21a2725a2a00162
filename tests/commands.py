"""What tests of the command line start from."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twophase.files import read_jsonl
from twophase.runs.record import read_summary


def snapshot(folder: Path) -> dict[str, str]:
    """Every file under a folder with the digest of its content."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


TIMES = ("seconds", "engine_share")


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves, but times and the words of the machine."""
    summary = read_summary(folder)
    assert summary is not None
    return {
        "summary": {key: value for key, value in summary.items() if key not in TIMES},
        "rounds": [
            {key: value for key, value in line.items() if key not in TIMES}
            for line in read_jsonl(folder / "rounds.jsonl")
        ],
        "metrics": read_jsonl(folder / "metrics.jsonl"),
        "weights": (folder / "weights.safetensors").read_bytes(),
        "config": (folder / "config.yaml").read_bytes(),
    }
