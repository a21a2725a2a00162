"""Encoding word by word, with a memory of words: several times as fast, and the same ids.

No merge of a SentencePiece BPE joins what stands before a space with the space, if no piece has a space after another
character; and a byte-level BPE first cuts a text by a pattern. Either way a text is a row of words with ids that do
not depend on each other, and a few ten thousand words make up nearly all text. So texts are cut by `re`, which is fast,
and only words that are not remembered go to `tokenizers`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPACE = "\u2581"
"""The mark that stands for a space in pieces of SentencePiece."""
REMEMBERED = 100_000
"""Words in memory at most; then it forgets them all and begins anew."""
LONGEST = 40
"""Characters of a word that is remembered."""

_LETTERS, _BLANKS = "A-Za-z\u0080-\U0010ffff", " \t\n\r"
BYTE_LEVEL = f" ?[{_LETTERS}]+| ?[0-9]+| ?[^{_LETTERS}0-9{_BLANKS}]+|[{_BLANKS}]+(?![^{_BLANKS}])|[{_BLANKS}]+"
"""How the byte-level BPE of this package cuts texts: by plain ranges, which mean the same to every engine of regular
expressions. A blank before a word is the word's; of several, the last."""

_MARKS = "\x00-\x09\x0b-/:-@\\[-`{-\x7f"
"""The ASCII characters that are neither letters nor digits nor the end of a line."""
_MIXED = re.compile(f"[A-Za-z][0-9{_MARKS}]|[0-9][A-Za-z0-9{_MARKS}]|[{_MARKS}][A-Za-z0-9]").search
_FINE = "".join(f"{SPACE}*+{some}(?![^\x00-\x7f{SPACE}])|" for some in ("[A-Za-z]++", f"[{_MARKS}]++", "[0-9]"))
"""Where no piece mixes letters, digits and marks, or has two digits, these are words of their own: `word,` needs
no memory beside `word`. A possessive quantifier gives nothing back: next to other characters, which may be in one piece
with these, the match fails as a whole and the coarser pattern takes over."""

Ids = NDArray[np.unsignedinteger]


class Words:
    """Encodes texts by remembered words.

    Args:
        pattern: cuts a text; every character is in one match.
        prepare: what is done to a text before.
        encode: words to ids, for those not remembered.
        dtype: of the ids.
    """

    def __init__(
        self,
        pattern: str,
        prepare: Callable[[str], str],
        encode: Callable[[list[str]], list[list[int]]],
        dtype: type[np.unsignedinteger],
    ):
        self._cut = re.compile(pattern).findall
        self._prepare, self._encode, self._dtype = prepare, encode, dtype
        self._code = np.dtype(dtype).char
        self._memory: dict[str, bytes] = {}  # a word's ids as bytes, so that a text's are one join

    def __call__(self, texts: list[str]) -> list[Ids]:
        """Return the ids of each text."""
        memory = self._memory
        cut = [self._cut(self._prepare(text)) for text in texts]
        new = list(set(chain.from_iterable(cut)) - memory.keys())
        for word, ids in zip(new, self._encode(new), strict=True):
            memory[word] = array(self._code, ids).tobytes()
        encoded = [np.frombuffer(b"".join(map(memory.__getitem__, words)), self._dtype) for words in cut]
        for word in new:
            if len(word) > LONGEST:
                del memory[word]
        if len(memory) > REMEMBERED:
            memory.clear()
        return encoded


def wordwise(content: Mapping[str, Any]) -> tuple[str, Callable[[str], str]] | None:
    """Return pattern and preparation with which a tokenizer may be applied word by word, or None.

    Args:
        content: of a `tokenizer.json`.
    """
    model, parts = content["model"], (content.get("normalizer"), content.get("pre_tokenizer"))
    plain = model["type"] == "BPE" and not model.get("dropout") and not model.get("ignore_merges")
    if not plain or not all(token["special"] for token in content.get("added_tokens") or ()):
        return None
    if parts == (None, _BYTE_LEVEL_PARTS):
        return BYTE_LEVEL, str
    if parts == (_MARKED, None):
        ordinary = [token for token in model["vocab"] if not re.fullmatch("<.*>", token)]
        whole = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
        if whole and not any(re.search(f"[^{SPACE}]{SPACE}|\n", token) for token in ordinary):
            pattern = f"{SPACE}+[^{SPACE}\n]*|[^{SPACE}\n]+|\n+"
            return (_FINE if not any(map(_MIXED, ordinary)) else "") + pattern, _marked
    return None


_BYTE_LEVEL_PARTS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": BYTE_LEVEL}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}
"""The part `pre_tokenizer` of a `tokenizer.json` that cuts by `BYTE_LEVEL`."""
_MARKED = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}
"""The part `normalizer` that marks spaces, and the beginning of a text, as SentencePiece does."""


def _marked(text: str) -> str:
    return SPACE + text.replace(" ", SPACE) if text else text
