"""Vocabularies of characters and bytes: no training, no files, and every token has a known number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from twophase.base.config import UsageError
from twophase.tasks.lm.config import VOCABULARY_SIZES

Ids = NDArray[np.uint8]

_ASCII = bytes(range(0x20, 0x7F)) + b"\n"
_UNKNOWN = b"?"
_TO_CHAR_IDS = bytes(_ASCII.find(byte) if byte in _ASCII else _ASCII.find(_UNKNOWN) for byte in range(256))


@dataclass(frozen=True)
class Vocabulary:
    r"""A mapping between text and token ids; get one from `vocabulary`.

    Args:
        name: `char` or `bytes`.

    >>> characters = vocabulary("char")
    >>> characters.encode("a\tb").tolist()
    [65, 0, 0, 0, 0, 66]
    >>> characters.decode([40, 73, 95])
    'Hi\n'
    """

    name: str

    @property
    def size(self) -> int:
        """Number of tokens."""
        return VOCABULARY_SIZES[self.name]

    @property
    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of what each token decodes to, (size,): perplexity per byte divides by their sum.

        One for every token of both vocabularies; of `char` it is the text as it was encoded, tabs already expanded.
        """
        return np.ones(self.size, np.int64)

    def encode(self, text: str) -> Ids:
        r"""Text as token ids.

        `char` turns a tab into four spaces, "\r\n" into a newline, and what it does not know into "?". `bytes` keeps
        everything; only lone surrogates, which UTF-8 cannot express, become "?".

        Args:
            text: any string.

        Returns:
            (tokens,) uint8, in [0, size).
        """
        if self.name == "bytes":
            return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        ascii_text = text.replace("\t", "    ").replace("\r\n", "\n").encode("ascii", "replace")
        return np.frombuffer(ascii_text.translate(_TO_CHAR_IDS), np.uint8)

    def replaced(self, text: str) -> int:
        """Number of characters of a text that `encode` turns into "?".

        >>> vocabulary("char").replaced("naïve?")
        1
        """
        unknown = self.encode("?")[0]
        return int(np.count_nonzero(self.encode(text) == unknown)) - text.count("?")

    def decode(self, ids: NDArray[np.integer] | Sequence[int]) -> str:
        """Token ids as text.

        Args:
            ids: (tokens,), in [0, size). With `bytes`, what is not UTF-8 (half a character at the end of a sample)
                becomes U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        array = np.asarray(ids, np.int64)
        if array.size and not 0 <= array.min() <= array.max() < self.size:
            raise ValueError(
                f"decode: ids are in [{array.min()}, {array.max()}]; they must be in [0, {self.size - 1}] for the "
                f"vocabulary {self.name!r}; decode with the vocabulary that the ids were made with"
            )
        data = array.astype(np.uint8).tobytes()
        if self.name == "bytes":
            return data.decode("utf-8", "replace")
        return data.translate(_FROM_CHAR_IDS).decode("ascii")


_FROM_CHAR_IDS = _ASCII + bytes(256 - len(_ASCII))  # translate wants 256 entries; ids beyond the vocabulary are refused


@lru_cache
def vocabulary(name: str) -> Vocabulary:
    """The vocabulary of a name.

    Args:
        name: `char` (0x20 to 0x7e as ids 0 to 94, newline as 95) or `bytes` (UTF-8).

    Raises:
        UsageError: any other name.
    """
    if name not in VOCABULARY_SIZES:
        raise UsageError(f"--data.vocabulary is {name!r}; it must be one of {', '.join(VOCABULARY_SIZES)}")
    return Vocabulary(name)
