"""Vocabularies of characters and bytes: no training, no files, and every token stands for one byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twophase.tasks.lm.config import VOCABULARY_SIZES

Ids = NDArray[np.uint8]

_ASCII = bytes(range(0x20, 0x7F)) + b"\n"
_TO_CHAR_IDS = bytes(_ASCII.find(byte) if byte in _ASCII else _ASCII.find(b"?") for byte in range(256))
_FROM_CHAR_IDS = _ASCII.ljust(256, b"\0")  # translate wants 256 entries; ids beyond the vocabulary are refused


def encode(vocabulary: str, text: str) -> Ids:
    r"""Return a text as token ids, (tokens,) uint8.

    Args:
        vocabulary: `char` (0x20 to 0x7e as ids 0 to 94, newline as 95; a tab becomes four spaces, "\r\n" a newline,
            anything else "?") or `bytes` (UTF-8; only lone surrogates, which it cannot express, become "?").
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


def decode(vocabulary: str, ids: NDArray[np.integer] | Sequence[int]) -> str:
    r"""Return token ids as text; what is not UTF-8 (half a character at the end of a sample) as U+FFFD.

    Raises:
        ValueError: an id outside the vocabulary.

    >>> decode("char", [40, 73, 95])
    'Hi\n'
    """
    array, size = np.asarray(ids, np.int64), VOCABULARY_SIZES[vocabulary]
    if array.size and not 0 <= array.min() <= array.max() < size:
        raise ValueError(
            f"decode: ids are in [{array.min()}, {array.max()}]; they must be in [0, {size - 1}] for the vocabulary "
            f"{vocabulary!r}; decode with the vocabulary that the ids were made with"
        )
    data = array.astype(np.uint8).tobytes()
    return data.decode("utf-8", "replace") if vocabulary == "bytes" else data.translate(_FROM_CHAR_IDS).decode("ascii")
