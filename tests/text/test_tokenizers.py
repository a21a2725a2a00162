"""Tokenizers: the ids of the originals, what ids stand for, and folders that transformers opens."""

from __future__ import annotations

import functools
import importlib.util
import json
import pydoc_data.topics
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.errors import RunError, UsageError
from twophase.text import mistral
from twophase.text.tokenizers import CHARACTERS, CONFIG_JSON, TOKENIZER_JSON, Tokenizer, encode_text, load_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="the extra 'data' is not installed")

NAMES = [pytest.param("mistral", marks=pytest.mark.slow), "bytes"]
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
    return load_tokenizer(name)


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


def test_golden_ids():
    """The ids of `bytes` are the bytes of UTF-8, also of the end's name; those of `mistral` were printed once."""
    made = tokenizer_of("bytes")
    assert [ids.tolist() for ids in made.encode(ODD)] == [list(text.encode()) for text in ODD]
    assert (made.end_of_text, made.vocabulary_size, made.dtype) == (256, 257, "uint16")
    made = tokenizer_of("mistral")
    assert (made.end_of_text, made.vocabulary_size, made.dtype) == (2, 32_000, "uint16")
    golden = [415, 12859, 28705, 7870, 13, 13, 2287, 7120, 28713, 1867, 28713, 28767]
    assert made.encode(["The outer  loop\n\n    forgets </s>"])[0].tolist() == golden


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_folder_is_the_same_tokenizer_here_and_in_transformers(name: str, tmp_path: Path):
    """Hash, sizes, end and ids come back; AutoTokenizer gives the ids, special names in the text included."""
    auto = pytest.importorskip("transformers", reason="the extra 'hf' is not installed").AutoTokenizer
    tokenizer = tokenizer_of(name)
    tokenizer.save(tmp_path)
    again, theirs = load_tokenizer(str(tmp_path)), auto.from_pretrained(str(tmp_path))
    assert (again.sha256, again.end_of_text, again.dtype) == (tokenizer.sha256, tokenizer.end_of_text, tokenizer.dtype)
    assert again.token_bytes.tolist() == tokenizer.token_bytes.tolist()
    assert (theirs.eos_token_id, len(theirs)) == (tokenizer.end_of_text, tokenizer.vocabulary_size)
    documents = [*ODD, *oddly_spaced(20, seed=2)]
    for text, ids, reloaded in zip(documents, tokenizer.encode(documents), again.encode(documents), strict=True):
        assert theirs(text)["input_ids"] == ids.tolist() == reloaded.tolist(), repr(text[:100])
        # Mistral's puts a space before a text, and its mark of a space is a space in a text, too.
        whole = f" {text}".replace(mistral.SPACE, " ") if name == "mistral" and text else text
        assert tokenizer.token_bytes[ids].sum() == len(whole.encode())
    assert tokenizer.token_bytes[tokenizer.end_of_text] == 0
    assert theirs.decode(tokenizer.encode(["two  blanks"])[0]) == "two  blanks"


@pytest.fixture(scope="module")
def general(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's file as others save it: special tokens, and a post-processor that adds, cuts and pads."""
    pre, specials = tokenizers.pre_tokenizers, ["<start>", "<stop>"]
    alphabet = {character: number for number, character in enumerate([*specials, *sorted(pre.ByteLevel.alphabet())])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet | {"om": 258}, [("o", "m")]))
    made.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(specials)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 0)])
    made.enable_truncation(5)
    made.enable_padding()
    path = tmp_path_factory.mktemp("general") / "own.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize("end", ["<stop>", {"content": "<stop>", "special": True}, None])
@pytest.mark.parametrize("largest", [258, 70_000])
def test_others_files_are_used_as_they_are(general: Path, tmp_path: Path, end: object, largest: int):
    """A file's tokenizer gives its ids without what it adds, pads or cuts, whatever their number; names are text."""
    content = json.loads(general.read_text())
    content["model"]["vocab"] |= {"far": largest} if largest > 258 else {}
    (tmp_path / TOKENIZER_JSON).write_text(json.dumps(content))
    config: dict[str, Any] = {"eos_token": end} if end else {}
    (tmp_path / CONFIG_JSON).write_text(json.dumps(config | {"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_tokenizer(str(tmp_path / TOKENIZER_JSON), end_of_text=None if end else "<stop>")
    assert (tokenizer.end_of_text, tokenizer.vocabulary_size) == (1, largest + 1)
    ids = tokenizer.encode(["some words, more than five, 1234", "a <stop> b"])
    assert (258 in ids[0], 1 in ids[1]) == (True, False)
    assert [tokenizer.token_bytes[each].sum() for each in ids] == [32, 10]
    assert ids[0].dtype == tokenizer.dtype == ("uint16" if largest == 258 else "uint32")
    tokenizer.save(tmp_path / "saved")
    auto = pytest.importorskip("transformers", reason="the extra 'hf' is not installed").AutoTokenizer
    theirs = auto.from_pretrained(tmp_path / "saved", local_files_only=True)
    assert theirs("in 1234 and 4321")["input_ids"] == tokenizer.encode(["in 1234 and 4321"])[0].tolist()


def test_a_hub_id_is_fetched(general: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A hub id is the folder that the hub gives; where it gives none, the id is named."""
    import huggingface_hub

    (tmp_path / TOKENIZER_JSON).write_bytes(general.read_bytes())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path) * (name == "owner/name"))
    assert load_tokenizer("owner/name", "<stop>").vocabulary_size == 259
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(RunError, match="owner/other"):
        load_tokenizer("owner/other")


def test_what_is_no_tokenizer_is_refused(general: Path, monkeypatch: pytest.MonkeyPatch):
    """A wrong name or end of a text is named by its option; without mistral-common, its command is."""
    with pytest.raises(UsageError, match="--tokenizer"):
        load_tokenizer("nonsense")
    for end in ("", "<none>"):
        with pytest.raises(UsageError, match="--end-of-text"):
            load_tokenizer(str(general), end)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RunError, match="--tokenizer mistral"):
        load_tokenizer("mistral")


# Vocabularies of text corpora

PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))


def reference_char(text: str) -> str:
    """Characters one at a time, as the rule is stated."""
    text = text.replace("\t", "    ").replace("\r\n", "\n")
    return "".join(character if character in PRINTABLE + "\n" else "?" for character in text)


@given(st.text(st.characters(), max_size=60) | st.text(st.sampled_from(PRINTABLE + "\t\r\n?aé😀\x00\x7f\ud800")))
def test_texts_are_kept_but_for_what_the_rules_replace(text: str):
    """`char` equals its rule character by character; `bytes` is UTF-8, lone surrogates replaced."""
    assert PRINTABLE + "\n" == CHARACTERS
    assert "".join(CHARACTERS[i] for i in encode_text("char", text)) == reference_char(text)
    whole = "".join("?" if 0xD800 <= ord(c) < 0xE000 else c for c in text)
    assert bytes(encode_text("bytes", text).tolist()) == whole.encode()
