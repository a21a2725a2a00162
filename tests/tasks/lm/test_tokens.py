"""Vocabularies: what they keep, and what they replace."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twophase.tasks.lm.tokens import CHARACTERS, encode, replaced

PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))


def reference_char(text: str) -> tuple[str, int]:
    """Characters one at a time, as the rule is stated, and how many of them were replaced."""
    result, count, i = "", 0, 0
    while i < len(text):
        if text[i] == "\t":
            result += "    "
        elif text[i : i + 2] == "\r\n":
            result += "\n"
            i += 1
        elif text[i] in PRINTABLE + "\n":
            result += text[i]
        else:
            result += "?"
            count += 1
        i += 1
    return result, count


def test_char_ids_are_printable_ascii_then_newline():
    """Ids 0 to 94 are the characters 0x20 to 0x7e in order, and 95 is newline."""
    assert PRINTABLE + "\n" == CHARACTERS
    assert encode("char", PRINTABLE + "\n").tolist() == list(range(96))
    assert encode("char", "x").dtype == np.uint8


@given(st.text(st.characters(), max_size=60) | st.text(st.sampled_from(PRINTABLE + "\t\r\n?aé😀\x00\x7f\ud800")))
def test_texts_are_kept_but_for_what_the_rules_replace(text: str):
    """`char` equals its rule character by character; `bytes` is UTF-8, lone surrogates replaced; each is counted."""
    rule, count = reference_char(text)
    assert "".join(CHARACTERS[i] for i in encode("char", text)) == rule
    assert replaced("char", text) == count
    whole = "".join("?" if 0xD800 <= ord(c) < 0xE000 else c for c in text)
    assert bytes(encode("bytes", text).tolist()) == whole.encode()
    assert replaced("bytes", text) == sum(a != b for a, b in zip(text, whole, strict=True))
