"""SentencePiece BPE models without SentencePiece: read the file, and derive merges that give the same ids elsewhere.

A model file is a protocol buffer, `ModelProto`: a list of fields, each begun by a varint `number << 3 | wire`, with a
wire type that says how long the field is. Only each piece, its score and its kind are needed; the rest is stepped over.
A caller that needs to know that a file is whole checks its hash.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces, as SentencePiece numbers them."""
SPACE = "\u2581"
"""The mark that stands for a space in pieces."""


@dataclass(frozen=True)
class Piece:
    """A piece of the vocabulary; its id is its place in the file.

    Args:
        text: its characters, spaces as `SPACE`.
        score: SentencePiece first merges the pair that makes the piece of the highest score.
        kind: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE.
    """

    text: str
    score: float
    kind: int


def pieces(model: bytes) -> list[Piece]:
    """Return the pieces of a SentencePiece model file, in the order of their ids.

    Raises:
        ValueError: bytes that are no such file.
    """
    try:
        messages = [dict(_fields(value)) for number, value in _fields(model) if number == 1]
        vocabulary = [Piece(str(m[1], "utf-8"), struct.unpack("<f", m[2])[0], m.get(3, NORMAL)) for m in messages]
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise ValueError(f"no SentencePiece model: {type(error).__name__}, {error}") from None
    if not vocabulary:
        raise ValueError("no SentencePiece model: it has no pieces")
    return vocabulary


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field: an integer for varints, else its bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value, after = _varint(message, at) if key & 7 in (0, 2) else (0, at)
        if key & 7:
            start, after = after, after + {1: 8, 2: value, 5: 4}[key & 7]
            value = message[start:after]
        yield key >> 3, value
        at = after


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the integer at a place, seven bits a byte, lowest first; and the place after it."""
    value = shift = 0
    while message[at] > 127:
        value |= (message[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1


def merges(vocabulary: list[Piece]) -> list[tuple[str, str]]:
    """Return the merges, most urgent first, with which ranked BPE makes the pieces that SentencePiece makes by scores.

    SentencePiece joins the neighbours that make the piece of the highest score, and of equal ones the leftmost. So
    every piece gets all its splits into two pieces, sorted by the score of the joint piece. Pieces of nothing but
    spaces have scores of -1e9 in Mistral's model and come last. Conversions that order merges by ids, or put those
    first, give other ids for blanks in a row.

    Args:
        vocabulary: from `pieces`.

    Returns:
        Pairs of pieces' texts.
    """
    ids = {piece.text: i for i, piece in enumerate(vocabulary) if piece.kind == NORMAL}
    ranked: list[tuple[float, tuple[str, str]]] = []
    for piece in (vocabulary[i] for i in ids.values()):
        splits = [(piece.text[:cut], piece.text[cut:]) for cut in range(1, len(piece.text))]
        pairs = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        ranked += [(piece.score, pair) for pair in pairs]
    ranked.sort(key=lambda entry: -entry[0])  # stable: splits of a piece, and pieces of a score, keep their order
    return [pair for _, pair in ranked]
