"""Tokenizers: the ids of the originals, what ids stand for, folders that transformers opens, and what goes wrong."""

from __future__ import annotations

import functools
import importlib.util
import json
import pydoc_data.topics
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.base.config import UsageError
from twophase.text import mistral
from twophase.text.tokenizer import (
    BYTE_LEVEL,
    CONFIG_JSON,
    END_OF_TEXT,
    TOKENIZER_JSON,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)

tokenizers = pytest.importorskip("tokenizers", reason="the extra 'data' is not installed")

MISTRAL = pytest.param("mistral", marks=pytest.mark.slow)
TOPICS = list(pydoc_data.topics.topics.values())
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
GAPS = [*[" "] * 12, "  ", "   ", " " * 7, " " * 20, *"\t|\n|\n\n| \n |\u00a0|\u3000|\r\n|".split("|")]
STRANGE = "</s> <s> <0x0A> \u2581 \u6f22\u5b57\u304b \U0001f642 na\u00efve \x00 \ufeff 0x1F".split(" ")


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    if name == "mistral" and importlib.util.find_spec("mistral_common") is None:
        pytest.skip(f"mistral-common is not installed ({mistral.INSTALL})")
    return train_bpe(TOPICS[:20], 600) if name == "bpe" else load_tokenizer(name)


def oddly_spaced(count: int, seed: int = 0) -> list[str]:
    """Documents of about 1 kB: words of Python's documentation with runs of blanks, odd characters, special tokens."""
    source = random.Random(seed)
    plain = " ".join(TOPICS).split(" ")
    return [
        "".join(source.choice(STRANGE if source.random() < 0.05 else plain) + source.choice(GAPS) for _ in range(120))
        for _ in range(count)
    ]


@pytest.mark.slow
def test_mistral_ids_are_sentencepieces_own():
    """On 1,500 oddly spaced documents and the odd strings, every id is the one that SentencePiece itself gives."""
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece, the oracle, is not installed")
    documents = [*ODD, *oddly_spaced(1500)]
    encoded = tokenizer_of("mistral").encode(documents)
    oracle = spm.SentencePieceProcessor(model_proto=mistral.model_file())
    for text, ids, expected in zip(documents, encoded, oracle.encode(documents), strict=True):
        assert ids.tolist() == expected, repr(text[:200])


@given(st.text())
def test_the_pattern_covers_every_text(text: str):
    """What the byte-level pattern finds, joined, is the text: nothing is lost between words."""
    assert "".join(re.findall(BYTE_LEVEL, text)) == text


@pytest.mark.parametrize("name", [MISTRAL, "bpe", "bytes"])
def test_a_saved_folder_is_the_same_tokenizer_here_and_in_transformers(name: str, tmp_path: Path):
    """Hash, sizes, end and ids come back; AutoTokenizer gives the ids, special names in the text included."""
    auto = pytest.importorskip("transformers", reason="the extra 'hf' is not installed").AutoTokenizer
    tokenizer = tokenizer_of(name)
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert (again.sha256, again.end_of_text, again.dtype) == (tokenizer.sha256, tokenizer.end_of_text, tokenizer.dtype)
    assert again.token_bytes.tolist() == tokenizer.token_bytes.tolist()
    theirs = auto.from_pretrained(str(tmp_path / "saved"))
    documents = [*ODD, *oddly_spaced(20, seed=2)]
    for text, ids, reloaded in zip(documents, tokenizer.encode(documents), again.encode(documents), strict=True):
        assert theirs(text)["input_ids"] == ids.tolist() == reloaded.tolist(), repr(text[:100])
    assert theirs.eos_token_id == tokenizer.end_of_text
    assert len(theirs) == tokenizer.vocabulary_size
    assert theirs.decode(tokenizer.encode(["two  blanks"])[0]) == "two  blanks"


@pytest.mark.parametrize("name", [MISTRAL, "bpe", "bytes"])
def test_token_bytes_add_up_to_the_text(name: str):
    """The bytes of a text's ids sum to its UTF-8 length; an end has none.

    Mistral's puts a space before a text, and its mark of a space is a space in a text, too.
    """
    tokenizer = tokenizer_of(name)
    for text, ids in zip(ODD, tokenizer.encode(ODD), strict=True):
        marked = f" {text}".replace(mistral.SPACE, " ") if name == "mistral" and text else text
        assert tokenizer.token_bytes[ids].sum() == len(marked.encode())
    assert tokenizer.token_bytes[tokenizer.end_of_text] == 0
    assert tokenizer.token_bytes.dtype == np.int64
    assert tokenizer.token_bytes.shape == (tokenizer.vocabulary_size,)


def test_the_mark_of_a_words_end_is_a_blank(tmp_path: Path):
    """Of a tokenizer that marks the ends of words, a token has its letters and the blank that decoding writes."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(end_of_word_suffix="</w>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    options: dict[str, Any] = {"special_tokens": ["</s>"], "show_progress": False}
    text = "the cat sat on the mät"
    made.train_from_iterator([text] * 9, tokenizers.trainers.BpeTrainer(end_of_word_suffix="</w>", **options))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.token_bytes[tokenizer.encode([text])[0]].sum() == len(f"{text} ".encode())


def test_bytes_are_bytes():
    """The ids of `bytes` are the bytes of UTF-8, also of the end's name; 256 ends a text."""
    tokenizer = load_tokenizer("bytes")
    texts = [*ODD, END_OF_TEXT]
    assert [ids.tolist() for ids in tokenizer.encode(texts)] == [list(text.encode()) for text in texts]
    assert (tokenizer.end_of_text, tokenizer.vocabulary_size, tokenizer.dtype) == (256, 257, "uint16")


def test_hashes_tell_tokenizers_apart():
    """Tokenizers with other ids have other hashes; the same training gives the same one."""
    hashes = [load_tokenizer("bytes").sha256, *(train_bpe(TOPICS[:5], size).sha256 for size in (300, 301, 300))]
    assert len(set(hashes)) == 3
    assert hashes[1] == hashes[3]


def byte_level(texts: list[str], *special: str) -> Any:
    """A byte-level BPE as others learn it, with GPT-2's cutting."""
    made, pre = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers
    made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*special], initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


@pytest.fixture(scope="module")
def general(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder as others save it: special tokens, and a post-processor that adds, cuts and pads."""
    made = byte_level(TOPICS[:5], "<start>", "<stop>")
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 0)])
    made.enable_truncation(5)
    made.enable_padding()
    folder = tmp_path_factory.mktemp("gpt")
    made.save(str(folder / TOKENIZER_JSON))
    return folder


@pytest.mark.parametrize("end", ["<stop>", {"content": "<stop>", "special": True}, None])
@pytest.mark.parametrize("largest", [399, 70_000])
def test_others_folders_are_used_as_they_are(general: Path, tmp_path: Path, end: object, largest: int):
    """A folder's tokenizer gives its ids without what it adds, pads or cuts, whatever their number; names are text."""
    content = json.loads((general / TOKENIZER_JSON).read_text())
    content["model"]["vocab"] |= {"far": largest} if largest > 399 else {}
    (tmp_path / TOKENIZER_JSON).write_text(json.dumps(content))
    (tmp_path / CONFIG_JSON).write_text(json.dumps({"eos_token": end} if end else {}))
    tokenizer = load_tokenizer(str(tmp_path / TOKENIZER_JSON), end_of_text=None if end else "<stop>")
    assert (tokenizer.end_of_text, tokenizer.vocabulary_size) == (1, largest + 1)
    ids = tokenizer.encode(["some words, more than five of them", "a <stop> b"])
    assert 1 not in ids[1]
    assert [tokenizer.token_bytes[each].sum() for each in ids] == [34, 10]
    assert ids[0].dtype == tokenizer.dtype == ("uint16" if largest == 399 else "uint32")


def test_a_class_of_another_does_not_change_the_ids(tmp_path: Path):
    """Some classes of transformers build parts of `tokenizer.json` anew: digits one by one would come out together."""
    auto = pytest.importorskip("transformers", reason="the extra 'hf' is not installed").AutoTokenizer
    made, pre = byte_level(["12 34 1234 " * 50], "<stop>"), tokenizers.pre_tokenizers
    made.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    made.save(str(tmp_path / TOKENIZER_JSON))
    (tmp_path / CONFIG_JSON).write_text(json.dumps({"eos_token": "<stop>", "tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.save(tmp_path / "saved")
    text = "in 1234 and 4321"
    there = auto.from_pretrained(tmp_path / "saved", local_files_only=True)(text)["input_ids"]
    assert there == tokenizer.encode([text])[0].tolist()


# What goes wrong


def test_what_is_no_tokenizer_is_refused(general: Path, tmp_path: Path):
    """A wrong name, folder, size or end of text is told with what to do."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / TOKENIZER_JSON).write_text("{")
    refused: dict[str, Callable[[], object]] = {
        "--tokenizer nonsense: there is no such folder": lambda: load_tokenizer("nonsense"),
        r"holds no tokenizer.json; save it from transformers": lambda: load_tokenizer(str(tmp_path / "empty")),
        "cannot be read": lambda: load_tokenizer(str(tmp_path / "damaged")),
        r"no token </s>, .* with --end-of-text TOKEN": lambda: load_tokenizer(str(general)),
        "has no token <none>": lambda: load_tokenizer(str(general), end_of_text="<none>"),
    }
    for message, call in refused.items():
        with pytest.raises(UsageError, match=message):
            call()


def test_mistral_missing_or_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without mistral-common, or with another file in it, the message gives the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"--tokenizer mistral: .*not installed; run `pip install --no-deps mistral"):
        load_tokenizer("mistral")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / mistral.MODEL).write_bytes(b"other")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(UsageError, match="SHA-256 differs"):
        load_tokenizer("mistral")


def test_a_hub_id_is_fetched_or_told(general: Path, monkeypatch: pytest.MonkeyPatch):
    """A hub id is the folder that the hub gives; without a network one message names the alternatives."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda _, **__: str(general))
    fetched = load_tokenizer("owner/name", end_of_text="<stop>")
    assert (fetched.name, fetched.vocabulary_size) == ("owner/name", 400)

    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UsageError, match=r"cannot be reached, .*no route\. Download it elsewhere and give"):
        load_tokenizer("owner/name")


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch):
    """Without `tokenizers`, bytes still work and everything else says what to install."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer("bytes").vocabulary_size == 257
    with pytest.raises(UsageError, match=r"pip install 'twophase\[data\]'"):
        train_bpe([], 300)
