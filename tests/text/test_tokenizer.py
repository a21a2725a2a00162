"""Tokenizers: the ids of the originals, what ids stand for, folders that transformers opens, and what goes wrong."""

from __future__ import annotations

import functools
import importlib.util
import json
import pydoc_data.topics
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twophase.base.config import UsageError
from twophase.text import sentencepiece as sp
from twophase.text import tokenizer as module
from twophase.text import words
from twophase.text.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer, train_bpe

tokenizers = pytest.importorskip("tokenizers", reason="the extra 'data' is not installed")

ODD = [
    "",
    " ",
    "\n",
    "a",
    " a",
    "  a  b\t\n c   \n\n d ",
    "</s> <s> <unk> <0x0A>x</s>y <|endoftext|>z",
    "e\u0301 \u6f22\u5b57 \U0001f389 \u00a0\u2003x \u2581\u2581 a",
    "\x00\x01 tab\tnewline\r\nend",
    "1234 5.67 snake_case don't a-b (c)",
]


def mistral() -> Tokenizer:
    if importlib.util.find_spec("mistral_common") is None:
        pytest.skip(f"mistral-common is not installed ({module.MISTRAL_INSTALL})")
    return _mistral()


@functools.cache
def _mistral() -> Tokenizer:
    return load_tokenizer("mistral")


def small_bpe() -> Tokenizer:
    return train_bpe(list(pydoc_data.topics.topics.values())[:20], 600)


def oddly_spaced(count: int, seed: int = 0) -> list[str]:
    """Documents of about 1 kB: words of Python's documentation with runs of blanks, odd characters, special tokens."""
    source = random.Random(seed)
    known = " ".join(pydoc_data.topics.topics.values()).split(" ")
    gaps = [" "] * 12 + ["  ", "   ", " " * 7, " " * 20, "\t", "\n", "\n\n", " \n ", "\u00a0", "\u3000", "\r\n", ""]
    strange = [
        "</s>",
        "<s>",
        "<0x0A>",
        "\u2581",
        "\u6f22\u5b57\u304b",
        "\U0001f642",
        "na\u00efve",
        "\x00",
        "\ufeff",
        "0x1F",
    ]
    documents = []
    for _ in range(count):
        picked = [source.choice(strange) if source.random() < 0.05 else source.choice(known) for _ in range(120)]
        documents.append("".join(word + source.choice(gaps) for word in picked))
    return documents


def test_mistral_ids_are_sentencepieces_own():
    """On 4,000 oddly spaced documents and the odd strings, every id is the one that SentencePiece itself gives."""
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece, the oracle, is not installed")
    tokenizer = mistral()
    oracle = spm.SentencePieceProcessor(model_proto=module._mistral_model())
    documents = [*ODD, *oddly_spaced(4000)]
    for start in range(0, len(documents), 500):
        batch = documents[start : start + 500]
        for text, ids, expected in zip(batch, tokenizer.encode_batch(batch), oracle.encode(batch), strict=True):
            assert ids.tolist() == expected, repr(text[:200])


def test_the_model_file_is_read_as_sentencepiece_reads_it():
    """Pieces, scores and kinds of the model file are what SentencePiece reports."""
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece, the oracle, is not installed")
    mistral()
    found = sp.pieces(module._mistral_model())
    oracle = spm.SentencePieceProcessor(model_proto=module._mistral_model())
    assert [piece.text for piece in found] == [oracle.id_to_piece(i) for i in range(oracle.get_piece_size())]
    assert [piece.score for piece in found] == [oracle.get_score(i) for i in range(oracle.get_piece_size())]
    for kind, asked in ((sp.CONTROL, oracle.is_control), (sp.BYTE, oracle.is_byte), (sp.UNKNOWN, oracle.is_unknown)):
        assert [piece.kind == kind for piece in found] == [asked(i) for i in range(len(found))]


@pytest.mark.parametrize("damaged", [b"", b"\x0a", b"\x0a\x7fabc", b"\x0b\x01", b"\x80" * 11, b"\x12\x01a"])
def test_a_file_that_is_no_model_is_a_value_error(damaged: bytes):
    """Bytes that are cut off, of an unknown wire type, or without pieces are refused and never loop."""
    with pytest.raises(ValueError, match="no SentencePiece model"):
        sp.pieces(damaged)


def plain(tokenizer: Tokenizer):
    """The same tokenizer by the library alone, without our words."""
    made = tokenizers.Tokenizer.from_str(tokenizer.files[module.TOKENIZER_JSON])
    made.encode_special_tokens = True
    return lambda text: made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("make", [mistral, small_bpe])
def test_word_by_word_gives_the_ids_of_the_whole(make):
    """Encoding by remembered words equals the library's encoding of whole texts, also when the memory is emptied."""
    tokenizer = make()
    assert isinstance(tokenizer.encode, words.Words)
    whole = plain(tokenizer)

    @settings(max_examples=150)
    @given(st.text(st.sampled_from(" \n\t\u2581ab.1_-'\u00e9\u6f22\x00<>/s\u2028\x85")), st.text())
    def holds(near: str, any_text: str) -> None:
        for text in (near, any_text):
            assert tokenizer.encode_batch([text])[0].tolist() == whole(text)

    holds()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "REMEMBERED", 50)
        documents = [*ODD, *oddly_spaced(30, seed=1)]
        for _ in range(2):
            assert [ids.tolist() for ids in tokenizer.encode_batch(documents)] == [whole(text) for text in documents]
        assert len(tokenizer.encode._memory) <= 50


@pytest.mark.parametrize("pattern", [words.BYTE_LEVEL])
def test_the_pattern_covers_every_text(pattern: str):
    """What the pattern finds, joined, is the text: nothing is lost between words."""
    import re

    @given(st.text())
    def holds(text: str) -> None:
        assert "".join(re.findall(pattern, text)) == text

    holds()


@pytest.mark.parametrize("make", [mistral, small_bpe, lambda: load_tokenizer("bytes")])
def test_a_saved_folder_opens_in_transformers_with_the_same_ids(make, tmp_path: Path):
    """AutoTokenizer gives the saved tokenizer's ids, special names in the text included, knows its end, and decodes."""
    auto = pytest.importorskip("transformers", reason="the extra 'hf' is not installed").AutoTokenizer
    tokenizer = make()
    tokenizer.save(tmp_path / "saved")
    theirs = auto.from_pretrained(str(tmp_path / "saved"))
    documents = [*ODD, *oddly_spaced(60, seed=2)]
    for text, ids in zip(documents, tokenizer.encode_batch(documents), strict=True):
        assert theirs(text)["input_ids"] == ids.tolist(), repr(text[:100])
    assert theirs.eos_token_id == tokenizer.end_of_text
    assert len(theirs) == tokenizer.vocabulary_size
    assert theirs.decode(tokenizer.encode_batch(["two  blanks"])[0]) == "two  blanks"


@pytest.mark.parametrize("make", [mistral, small_bpe, lambda: load_tokenizer("bytes")])
def test_a_saved_folder_is_the_same_tokenizer_here(make, tmp_path: Path):
    """Loaded from its folder a tokenizer has the same hash, sizes, end and ids."""
    tokenizer = make()
    tokenizer.save(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert (again.sha256, again.end_of_text, again.dtype) == (tokenizer.sha256, tokenizer.end_of_text, tokenizer.dtype)
    assert again.token_bytes.tolist() == tokenizer.token_bytes.tolist()
    assert [i.tolist() for i in again.encode_batch(ODD)] == [i.tolist() for i in tokenizer.encode_batch(ODD)]


@pytest.mark.parametrize(("make", "marks"), [(mistral, 1), (small_bpe, 0), (lambda: load_tokenizer("bytes"), 0)])
def test_token_bytes_add_up_to_the_text(make, marks: int):
    """The bytes of a text's ids sum to its UTF-8 length; an end has none.

    Mistral's puts a space before a text, and its mark of a space is a space in a text, too.
    """
    tokenizer = make()
    for text, ids in zip(ODD, tokenizer.encode_batch(ODD), strict=True):
        assert tokenizer.token_bytes[ids].sum() == len(
            text.replace(sp.SPACE, " ").encode() if marks else text.encode()
        ) + (marks if text else 0)
    assert tokenizer.token_bytes[tokenizer.end_of_text] == 0
    assert tokenizer.token_bytes.dtype == np.int64
    assert tokenizer.token_bytes.shape == (tokenizer.vocabulary_size,)


def test_bytes_are_bytes():
    """The ids of `bytes` are the bytes of UTF-8; 256 ends a text."""
    tokenizer = load_tokenizer("bytes")
    assert [ids.tolist() for ids in tokenizer.encode_batch(ODD)] == [list(text.encode()) for text in ODD]
    assert (tokenizer.end_of_text, tokenizer.vocabulary_size, tokenizer.dtype) == (256, 257, "uint16")


def test_hashes_tell_tokenizers_apart():
    """Tokenizers with other ids have other hashes; the same training gives the same one."""
    texts = list(pydoc_data.topics.topics.values())[:5]
    hashes = [load_tokenizer("bytes").sha256, train_bpe(texts, 300).sha256, train_bpe(texts, 301).sha256]
    assert len(set(hashes)) == 3
    assert train_bpe(texts, 300).sha256 == hashes[1]


def general(folder: Path, size: int = 400, config: dict | None = None) -> Path:
    """A tokenizer folder as others save it: GPT-2's cutting, a special and a post-processor that adds tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<start>", "<stop>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(list(pydoc_data.topics.topics.values())[:5], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 0)])
    made.enable_truncation(5)
    made.enable_padding()
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return folder


@pytest.mark.parametrize("end", ["<stop>", {"content": "<stop>", "special": True}])
def test_others_folders_are_used_as_they_are(tmp_path: Path, end: object):
    """A folder's tokenizer gives its ids without what it adds, pads or cuts; special names in a text are text."""
    tokenizer = load_tokenizer(str(general(tmp_path / "gpt", config={"eos_token": end})))
    assert not isinstance(tokenizer.encode, words.Words)
    assert tokenizer.end_of_text == 1
    ids = tokenizer.encode_batch(["some words, more than five of them", "a <stop> b"])
    assert 1 not in ids[1]
    assert [tokenizer.token_bytes[each].sum() for each in ids] == [34, 10]


def test_the_end_of_a_text_can_be_named(tmp_path: Path):
    """Where a folder names no end of text, the message asks for one, and --end-of-text gives it."""
    folder = str(general(tmp_path / "gpt"))
    with pytest.raises(UsageError, match=r"no token </s>, .* name one of its tokens with --end-of-text TOKEN"):
        load_tokenizer(folder)
    assert load_tokenizer(folder, end_of_text="<stop>").end_of_text == 1
    with pytest.raises(UsageError, match="has no token <none>"):
        load_tokenizer(folder, end_of_text="<none>")


def test_more_than_65536_ids_take_four_bytes(tmp_path: Path):
    """The type of the ids follows from their number."""
    folder = general(tmp_path / "gpt", config={"eos_token": "<stop>"})
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 70_000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.vocabulary_size, tokenizer.dtype) == (70_001, "uint32")
    assert tokenizer.encode_batch(["a b"])[0].dtype == np.uint32


# What goes wrong


def test_mistral_missing_or_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without mistral-common, or with another file in it, the message gives the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"--tokenizer mistral: .*not installed; run `pip install --no-deps mistral"):
        load_tokenizer("mistral")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / module.MISTRAL_MODEL).write_bytes(b"other")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(UsageError, match="SHA-256 differs"):
        load_tokenizer("mistral")


def test_folders_that_are_none(tmp_path: Path):
    """An unknown name, a folder without tokenizer.json and a damaged one are told apart, each with a remedy."""
    with pytest.raises(UsageError, match="--tokenizer nonsense: there is no such folder"):
        load_tokenizer("nonsense")
    with pytest.raises(UsageError, match=r"holds no tokenizer.json; save it from transformers"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UsageError, match="is learnt by `twophase data prepare`"):
        load_tokenizer("bpe:300")
    with pytest.raises(UsageError, match="the size must be 257"):
        train_bpe([], 100)


def test_a_hub_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch):
    """A hub id without a network gives one message with the alternatives; nothing else asks the hub."""
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'data' is not installed")

    def unreachable(*_: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "hf_hub_download", unreachable)
    with pytest.raises(UsageError, match=r"cannot be reached .*no route; download it elsewhere and give"):
        load_tokenizer("owner/name")


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch):
    """Without `tokenizers`, bytes still work and everything else says what to install."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer("bytes").vocabulary_size == 257
    with pytest.raises(UsageError, match=r"pip install 'twophase\[data\]'"):
        train_bpe([], 300)


def test_the_end_is_a_token_of_the_bytes_folder():
    """The name of the end of text, in a text, is thirteen bytes and not the end."""
    assert load_tokenizer("bytes").encode_batch([END_OF_TEXT])[0].tolist() == list(END_OF_TEXT.encode())
