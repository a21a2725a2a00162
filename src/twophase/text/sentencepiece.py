"""SentencePiece BPE models without SentencePiece: their file read, and the merges that give the same ids elsewhere.

A model file is a protocol buffer, `ModelProto`, of which three facts are needed here: each piece, its score, its kind.
Protocol buffers are a list of fields; each begins with a varint `number << 3 | wire`, and the wire type says how long
the field is. What is not understood can be stepped over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces, as SentencePiece numbers them."""
SPACE = "\u2581"
"""The mark that stands for a space in pieces."""

_PIECES, _TEXT, _SCORE, _KIND = 1, 1, 2, 3  # field numbers of ModelProto and of its pieces
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # wire types


@dataclass(frozen=True)
class Piece:
    """A piece of the vocabulary; its id is its place in the file.

    Args:
        text: its characters, spaces as `SPACE`.
        score: SentencePiece merges the pair whose piece has the highest score first.
        kind: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE.
    """

    text: str
    score: float
    kind: int


def pieces(model: bytes) -> list[Piece]:
    """The pieces of a SentencePiece model file, in the order of their ids.

    Raises:
        ValueError: bytes that are no such file.
    """
    found = []
    for number, value in _fields(model):
        if number == _PIECES:
            if not isinstance(value, bytes):
                raise ValueError("no SentencePiece model: a piece that is no message")
            found.append(_piece(value))
    if not found:
        raise ValueError("no SentencePiece model: it has no pieces")
    return found


def _piece(message: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(message):
        if number == _TEXT and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == _SCORE and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == _KIND and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field: an integer for varints, else its bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            length, at = _varint(message, at)
        elif wire in (_EIGHT, _FOUR):
            length = 8 if wire == _EIGHT else 4
        else:
            raise ValueError(f"no SentencePiece model: wire type {wire}")
        if at + length > len(message):
            raise ValueError("no SentencePiece model: it ends within a field")
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The integer at a place, seven bits a byte, lowest first; and the place after it."""
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("no SentencePiece model: it ends within a number")
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def merges(vocabulary: list[Piece]) -> list[tuple[str, str]]:
    """The merges, most urgent first, with which ranked BPE makes the pieces that SentencePiece makes by scores.

    SentencePiece joins the neighbours whose joint piece has the highest score, whichever two they are, and of equal
    ones the leftmost. So every piece gets all its splits into two pieces, and the list is sorted by the score of the
    joint piece. Pieces of nothing but spaces have scores of -1e9 in Mistral's model and come last; conversions that
    order merges by ids or put those first give other ids wherever blanks stand in a row.

    Args:
        vocabulary: from `pieces`.

    Returns:
        pairs of pieces' texts.
    """
    ids = {piece.text: i for i, piece in enumerate(vocabulary) if piece.kind == NORMAL}
    ranked: list[tuple[float, tuple[str, str]]] = []
    for piece in vocabulary:
        if piece.kind != NORMAL:
            continue
        splits = [(piece.text[:cut], piece.text[cut:]) for cut in range(1, len(piece.text))]
        known = [(left, right) for left, right in splits if left in ids and right in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        ranked += [(piece.score, pair) for pair in known]
    ranked.sort(key=lambda entry: -entry[0])  # stable: splits of one piece, and pieces of one score, keep their order
    return [pair for _, pair in ranked]
