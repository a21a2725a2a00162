"""The pieces of Mistral-7B-v0.1 as a ranked BPE of the package `tokenizers`, with the ids that SentencePiece gives.

The model file is in the package mistral-common: a protocol buffer that begins with its pieces. Its hash is checked, so
the layout is known. Conversions by transformers give other ids for blanks in a row (huggingface/transformers#25069).
"""

from __future__ import annotations

import hashlib
import importlib.util
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twophase.errors import RunError

SPACE = "\u2581"
"""The mark that stands for a space in pieces of SentencePiece."""
MODEL = "tokenizer.model.v1"
SHA256 = "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"
INSTALL = "pip install --no-deps mistral-common==1.13.1"
NORMAL, CONTROL = 1, 3
"""Kinds of pieces, as SentencePiece numbers them; 2 is unknown, 6 a byte."""


def model_file() -> bytes:
    """Return the model file inside mistral-common, which is not imported: its dependencies need not be installed."""
    package = importlib.util.find_spec("mistral_common")
    for directory in (package and package.submodule_search_locations) or ():
        path = Path(directory, "data", MODEL)
        if path.is_file() and hashlib.sha256(data := path.read_bytes()).hexdigest() == SHA256:
            return data
    raise RunError(f"--tokenizer mistral: its file is in the package mistral-common; run `{INSTALL} --force-reinstall`")


def pieces(model: bytes) -> list[tuple[str, float, int]]:
    """Return text (spaces as `SPACE`), score and kind of the pieces of the model file, in the order of their ids.

    A piece is the bytes `0A size`, then `0A length text`, `15` and the score as a float32, and `18 kind` unless it is
    NORMAL. All sizes of this file are below 128, so each is one byte.
    """
    vocabulary, start = [], 0
    while model[start] == 0x0A:
        end, score = start + 2 + model[start + 1], start + 5 + model[start + 3]
        kind = model[end - 1] if end > score + 4 else NORMAL
        text = str(model[start + 4 : score - 1], "utf-8")
        vocabulary.append((text, struct.unpack_from("<f", model, score)[0], kind))
        start = end
    return vocabulary


def merges(vocabulary: Sequence[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Return the merges, most urgent first, with which ranked BPE makes the pieces that SentencePiece makes by scores.

    It joins the neighbours that make the piece of the highest score. So every piece gets all its splits into two,
    sorted by the score of the joint piece. Pieces of nothing but spaces have scores of -1e9 and come last.
    """
    ids = {text: i for i, (text, _, kind) in enumerate(vocabulary) if kind == NORMAL}
    ranked: list[tuple[str, str]] = []
    for text in sorted(ids, key=lambda text: -vocabulary[ids[text]][1]):  # stable
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text)) if text[:cut] in ids and text[cut:] in ids]
        ranked += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return ranked


def build(hf: Any) -> tuple[Any, str, str, str]:
    """Return the tokenizer of `hf`, the package, and the tokens for what is unknown, and a text's beginning and end."""
    vocabulary = pieces(model_file())
    ids = {text: i for i, (text, _, _) in enumerate(vocabulary)}
    unknown = vocabulary[0][0]
    begin, end = (text for text, _, kind in vocabulary if kind == CONTROL)
    made = hf.Tokenizer(
        hf.models.BPE(vocab=ids, merges=merges(vocabulary), byte_fallback=True, fuse_unk=True, unk_token=unknown)
    )
    norm, deco = hf.normalizers, hf.decoders
    made.normalizer = norm.Sequence([norm.Prepend(SPACE), norm.Replace(" ", SPACE)])
    made.decoder = deco.Sequence([deco.Replace(SPACE, " "), deco.ByteFallback(), deco.Fuse(), deco.Strip(" ", 1, 0)])
    made.add_special_tokens([unknown, begin, end])
    return made, unknown, begin, end
