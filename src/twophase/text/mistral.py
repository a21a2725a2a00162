"""The pieces of Mistral-7B-v0.1 as a ranked BPE of the package `tokenizers`, with the ids that SentencePiece gives.

The model file lies in the package mistral-common. It is a SentencePiece model, a protocol buffer that begins with its
pieces. Its hash is checked, so the layout is known.
"""

from __future__ import annotations

import hashlib
import importlib.util
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twophase.base.config import UsageError

SPACE = "\u2581"
"""The mark that stands for a space in pieces of SentencePiece."""
MODEL = "tokenizer.model.v1"
SHA256 = "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"
INSTALL = "pip install --no-deps mistral-common==1.13.1"
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
"""Kinds of pieces, as SentencePiece numbers them."""


class Piece(NamedTuple):
    """A piece of the vocabulary, spaces as `SPACE`; its id is its place in the file."""

    text: str
    score: float
    kind: int


def model_file() -> bytes:
    """Return the model file inside mistral-common, which is not imported: its dependencies need not be installed.

    Raises:
        UsageError: the package is not installed, or holds another file.
    """
    package = importlib.util.find_spec("mistral_common")
    paths = [Path(directory, "data", MODEL) for directory in (package and package.submodule_search_locations) or ()]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UsageError(
            f"--tokenizer mistral: its file is inside the package mistral-common, which is not installed; run "
            f"`{INSTALL}`, or use --tokenizer bpe:8000 or bytes"
        )
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise UsageError(
            f"--tokenizer mistral: {path} is not the file of Mistral-7B-v0.1 (its SHA-256 differs); run "
            f"`{INSTALL} --force-reinstall`"
        )
    return data


def pieces(model: bytes) -> list[Piece]:
    """Return the pieces of the model file, in the order of their ids.

    A piece is the bytes `0A size`, then `0A length text`, `15` and the score as a float32, and `18 kind` unless the
    kind is NORMAL. All sizes of this file are below 128, so each is one byte.
    """
    vocabulary, start = [], 0
    while model[start] == 0x0A:
        end, score = start + 2 + model[start + 1], start + 5 + model[start + 3]
        kind = model[end - 1] if end > score + 4 else NORMAL
        vocabulary.append(
            Piece(str(model[start + 4 : score - 1], "utf-8"), struct.unpack_from("<f", model, score)[0], kind)
        )
        start = end
    return vocabulary


def merges(vocabulary: Sequence[Piece]) -> list[tuple[str, str]]:
    """Return the merges, most urgent first, with which ranked BPE makes the pieces that SentencePiece makes by scores.

    SentencePiece joins the neighbours that make the piece of the highest score, and of equal ones the leftmost. So
    every piece gets all its splits into two pieces, sorted by the score of the joint piece. Pieces of nothing but
    spaces have scores of -1e9 and come last. Conversions that order merges by ids, or put those first, give other ids
    for blanks in a row.
    """
    ids = {piece.text: i for i, piece in enumerate(vocabulary) if piece.kind == NORMAL}
    ranked: list[tuple[str, str]] = []
    for piece in sorted((vocabulary[i] for i in ids.values()), key=lambda piece: -piece.score):  # stable
        splits = [(piece.text[:cut], piece.text[cut:]) for cut in range(1, len(piece.text))]
        pairs = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        ranked += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return ranked


def build(hf: Any) -> tuple[Any, str, str, str]:
    """Return the tokenizer of `hf`, the package, and the tokens for what is unknown, and a text's beginning and end."""
    vocabulary = pieces(model_file())
    ids = {piece.text: i for i, piece in enumerate(vocabulary)}
    unknown = vocabulary[0].text
    begin, end = (piece.text for piece in vocabulary if piece.kind == CONTROL)
    made = hf.Tokenizer(
        hf.models.BPE(vocab=ids, merges=merges(vocabulary), byte_fallback=True, fuse_unk=True, unk_token=unknown)
    )
    norm, deco = hf.normalizers, hf.decoders
    made.normalizer = norm.Sequence([norm.Prepend(SPACE), norm.Replace(" ", SPACE)])
    made.decoder = deco.Sequence([deco.Replace(SPACE, " "), deco.ByteFallback(), deco.Fuse(), deco.Strip(" ", 1, 0)])
    made.add_special_tokens([unknown, begin, end])
    return made, unknown, begin, end
