"""Small texts for tests: made up, deterministic, with enough documents to hold some out."""

from __future__ import annotations

import random
from pathlib import Path

_WORDS = "the outer loop keeps a buffer of what the inner steps have done and it may forget after some rounds".split()


def text(documents: int = 60, words: int = 160, seed: int = 0) -> str:
    """Documents of pseudo-English separated by blank lines, about six characters a word."""
    source = random.Random(seed)
    return "\n\n".join(" ".join(source.choice(_WORDS) for _ in range(words)) + "." for _ in range(documents))


def write(path: Path, **options: int) -> Path:
    """Write such a text to a file."""
    path.write_text(text(**options), encoding="utf-8")
    return path
