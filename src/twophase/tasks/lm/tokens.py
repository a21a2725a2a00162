"""Vocabularies of characters and bytes: no training, no files, and every token stands for one byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint8]

_ASCII = bytes(range(0x20, 0x7F)) + b"\n"
CHARACTERS = _ASCII.decode()
"""Character of each id of `char`."""
_TO_CHAR_IDS = bytes(_ASCII.find(byte) if byte in _ASCII else _ASCII.find(b"?") for byte in range(256))


def encode(vocabulary: str, text: str) -> Ids:
    r"""Return a text as token ids, (tokens,) uint8.

    Args:
        vocabulary: `char` or `bytes`. In `char` 0x20 to 0x7e are ids 0 to 94, newline 95; a tab becomes four spaces,
            "\r\n" a newline, anything else "?". UTF-8 `bytes` turn only lone surrogates into "?".
        text: any string.

    >>> encode("char", "a\tb").tolist()
    [65, 0, 0, 0, 0, 66]
    """
    if vocabulary == "bytes":
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    ascii_text = text.replace("\t", "    ").replace("\r\n", "\n").encode("ascii", "replace")
    return np.frombuffer(ascii_text.translate(_TO_CHAR_IDS), np.uint8)


def replaced(vocabulary: str, text: str) -> int:
    """Return the number of characters that `encode` turns into "?".

    >>> replaced("char", "naïve?")
    1
    """
    return int(np.count_nonzero(encode(vocabulary, text) == encode(vocabulary, "?")[0])) - text.count("?")
