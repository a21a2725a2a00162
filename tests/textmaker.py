"""Small texts for tests: made up, deterministic, with enough documents to hold some out."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twophase.config import update
from twophase.tasks.lm.config import TrainConfig

_WORDS = "the outer loop keeps a buffer of what the inner steps have done and it may forget after some rounds".split()


def text(documents: int = 60, words: int = 160, seed: int = 0) -> str:
    """Documents of pseudo-English separated by blank lines, about six characters a word."""
    source = random.Random(seed)
    return "\n\n".join(" ".join(source.choice(_WORDS) for _ in range(words)) + "." for _ in range(documents))


def paragraph(number: int, words: int) -> str:
    """A paragraph that names its number in every word."""
    return " ".join([f"word{number}"] * words)


def write(path: Path, **options: int) -> Path:
    path.write_text(text(**options), encoding="utf-8")
    return path


def write_lines(path: Path, texts: Iterable[str], column: str = "text") -> Path:
    """Write JSON lines of C4's schema, packed if the name says so."""
    facts = {"timestamp": "2019-04-25T12:57:54Z", "url": "http://x"}
    data = "".join(json.dumps({column: text, **facts}) + "\n" for text in texts).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, 1) if path.name.endswith(".gz") else data)
    return path


def small_run(corpus: Path, size: int = 16, /, **values: Any) -> TrainConfig:
    """A run of a moment on a text: one layer, widths and windows of about a size, and what `values` say by path."""
    small = {
        "outer.method": "nesterov",
        "inner.schedule": "cosine",
        "model.layers": 1,
        "model.hidden_size": size,
        "model.intermediate_size": size * 3 // 2,
        "data.corpus": f"file:{corpus}",
        "data.sequence_length": size,
        "data.batch_size": size // 4,
        "data.validation_windows": size // 2,
    }
    return update(TrainConfig(), small | values)
