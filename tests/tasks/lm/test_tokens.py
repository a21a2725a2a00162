"""Vocabularies: what they keep, what they replace, and what each token weighs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.base.config import UsageError
from twophase.tasks.lm.config import VOCABULARY_SIZES
from twophase.tasks.lm.tokens import Vocabulary, vocabulary

PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
ANY_TEXT = st.text(st.characters(), max_size=60)


def reference_char(text: str) -> tuple[str, int]:
    """Characters one at a time, as the rule is stated, and how many of them were replaced."""
    kept, replaced, i = "", 0, 0
    while i < len(text):
        if text[i] == "\t":
            kept += "    "
        elif text[i : i + 2] == "\r\n":
            kept += "\n"
            i += 1
        elif text[i] in PRINTABLE + "\n":
            kept += text[i]
        else:
            kept += "?"
            replaced += 1
        i += 1
    return kept, replaced


def test_sizes_are_those_of_the_configuration():
    """A model built for the configured size has one score for each token, no more and no less."""
    for name, size in VOCABULARY_SIZES.items():
        vocab = vocabulary(name)
        assert vocab.size == size == len(vocab.token_bytes)
        assert vocab.decode(range(128 if name == "bytes" else size)) is not None
    assert (vocabulary("char").size, vocabulary("bytes").size) == (96, 256)


def test_char_ids_are_printable_ascii_then_newline():
    """Ids 0 to 94 are the characters 0x20 to 0x7e in order, and 95 is newline."""
    vocab = vocabulary("char")
    assert vocab.decode(range(96)) == PRINTABLE + "\n"
    assert vocab.encode(PRINTABLE + "\n").tolist() == list(range(96))


@given(st.text(st.sampled_from(PRINTABLE + "\n")))
def test_char_round_trip(text: str):
    """Decoding undoes encoding for text within the vocabulary, and nothing counts as replaced."""
    vocab = vocabulary("char")
    ids = vocab.encode(text)
    assert vocab.decode(ids) == text
    assert ids.dtype == np.uint8
    assert vocab.replaced(text) == 0


@given(ANY_TEXT | st.text(st.sampled_from("\t\r\n ?aé😀\x00\x7f\ud800")))
def test_char_equals_the_rule_character_by_character(text: str):
    """Tabs, line ends and unknown characters are treated as stated, and each replaced character is counted once."""
    vocab = vocabulary("char")
    kept, replaced = reference_char(text)
    assert vocab.decode(vocab.encode(text)) == kept
    assert vocab.replaced(text) == replaced


@given(ANY_TEXT)
def test_bytes_round_trip(text: str):
    """The ids are the UTF-8 bytes, which decode to the text; only lone surrogates are replaced, and counted."""
    vocab = vocabulary("bytes")
    whole = "".join("?" if 0xD800 <= ord(c) < 0xE000 else c for c in text)
    assert bytes(vocab.encode(text).tolist()) == whole.encode()
    assert vocab.decode(vocab.encode(text)) == whole
    assert vocab.replaced(text) == sum(a != b for a, b in zip(text, whole, strict=True))


@given(st.text(st.sampled_from(PRINTABLE + "\n")))
def test_token_bytes_add_up_to_the_size_of_the_text(text: str):
    """The bytes of the tokens of a text are the bytes of its UTF-8 form, in both vocabularies."""
    for name in VOCABULARY_SIZES:
        vocab = vocabulary(name)
        assert vocab.token_bytes[vocab.encode(text)].sum() == len(text.encode())


def test_half_a_character_decodes():
    """A sample that ends within a character of several bytes still decodes, to U+FFFD there."""
    assert vocabulary("bytes").decode(list("aé".encode())[:-1]) == "a\ufffd"


def test_vocabularies_are_values():
    """Vocabularies of one name are equal and hashable."""
    assert vocabulary("char") == Vocabulary("char") != vocabulary("bytes")
    assert len({vocabulary("char"), Vocabulary("char")}) == 1


def test_an_id_outside_the_vocabulary_is_refused():
    """The message names the ids, the range and the vocabulary."""
    for ids in ([0, 96], [-1]):
        with pytest.raises(ValueError, match=r"ids are in .*\[0, 95\] for the vocabulary 'char'"):
            vocabulary("char").decode(ids)


def test_an_unknown_vocabulary_is_refused():
    """The message names the option, the value and the choices."""
    with pytest.raises(UsageError, match=r"--data.vocabulary is 'bpe'; it must be one of char, bytes"):
        vocabulary("bpe")
