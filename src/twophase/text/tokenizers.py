"""Tokenizers: text to ids, what each id stands for, and a folder that `transformers` opens (no torch here)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.errors import UsageError
from twophase.files import write_atomic
from twophase.text import mistral
from twophase.text.sources import download, optional

TOKENIZER_JSON, CONFIG_JSON = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
"""Of the tokenizer `bytes`."""


class Tokenizer:
    """Text to ids by a `tokenizers.Tokenizer`, without what it adds at a text's beginning and end.

    `config` is the content of `tokenizer_config.json`; its `eos_token` ends a document. Equal tokenizers have equal
    `sha256`. `token_bytes` has the UTF-8 bytes of text that each id stands for, 0 for special tokens.
    """

    def __init__(self, made: Any, config: Mapping[str, Any]) -> None:
        made.no_padding()
        made.no_truncation()
        made.encode_special_tokens = True  # documents may write about </s>: that is text
        self._made, self._config = made, config
        vocabulary = made.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(vocabulary.values()) + 1
        self.end_of_text = vocabulary[config["eos_token"]]
        self.dtype = "uint16" if self.vocabulary_size <= 1 << 16 else "uint32"
        content = json.loads(made.to_str())
        parts = {key: content[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        self.sha256 = hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        self.token_bytes = _token_bytes(vocabulary, content)

    def encode(self, texts: list[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """Return the ids of each text, which must not hold lone surrogates."""
        encodings = self._made.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def save(self, folder: Path) -> None:
        """Write a folder that `transformers.AutoTokenizer.from_pretrained` opens and that gives the same ids."""
        # The class that reads `tokenizer.json` unchanged; others, such as GPT2Tokenizer, rebuild parts of it.
        written = {"split_special_tokens": True, "tokenizer_class": "PreTrainedTokenizerFast"}
        config = {"clean_up_tokenization_spaces": False, **self._config, **written}
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / TOKENIZER_JSON, self._made.to_str())
        write_atomic(folder / CONFIG_JSON, json.dumps(config, indent=1) + "\n")


class _Bytes(Tokenizer):
    """The ids of UTF-8, ten times as fast as by merging nothing."""

    def encode(self, texts: list[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        return [encode_text("bytes", text).astype(self.dtype) for text in texts]


def _token_bytes(vocabulary: Mapping[str, int], content: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return UTF-8 bytes that each id of a `tokenizer.json` stands for."""
    model, alphabet = content["model"], set(optional("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    none = {entry["content"] for entry in content["added_tokens"] if entry["special"]} | {model.get("unk_token")}
    is_byte_level = '"ByteLevel"' in json.dumps([content["pre_tokenizer"], content["decoder"]])
    sizes = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, number in vocabulary.items():
        if token in none:
            continue
        if model.get("byte_fallback") and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            sizes[number] = 1
        elif is_byte_level and alphabet.issuperset(token):
            sizes[number] = len(token)  # one character a byte
        else:
            sizes[number] = len(token.replace(mistral.SPACE, " ").encode())
    return sizes


def load_tokenizer(name: str, end_of_text: str | None = None) -> Tokenizer:
    """Return a tokenizer by its name; a UsageError where there is none, or where no token ends a document.

    It is `mistral` (from the installed mistral-common), `bytes`, a `tokenizer.json`, the folder of one, or a Hugging
    Face id such as `openai-community/gpt2`, which is downloaded. `end_of_text` is the token that ends a document, where
    a file names none or another is wanted.
    """
    hf = optional("tokenizers")
    if name == "bytes":
        made = text_tokenizer("bytes")
        made.add_special_tokens([END_OF_TEXT])
        return _Bytes(made, {"eos_token": END_OF_TEXT})
    if name == "mistral":
        made, unknown, begin, end = mistral.build(hf)
        return Tokenizer(made, {"bos_token": begin, "eos_token": end, "unk_token": unknown})
    path = Path(name).expanduser()
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        path = download("snapshot_download", name, allow_patterns="tokenizer*.json")
    path = path / TOKENIZER_JSON if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"--tokenizer: must be mistral, bytes, a {TOKENIZER_JSON} or a hub id, got {name}")
    made = hf.Tokenizer.from_file(str(path))
    made.post_processor = None  # what it adds to a text is no text
    settings = path.with_name(CONFIG_JSON)
    config = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    named = config.get("eos_token")
    end = end_of_text or (named["content"] if isinstance(named, dict) else named)
    if not end or made.token_to_id(end) is None:
        raise UsageError(f"--end-of-text: must be a token of {name} that ends a document, got {end}")
    return Tokenizer(made, config | {"eos_token": end})


# -------------------------------------------------------------------------------------- vocabularies of text corpora

_ASCII = bytes(range(0x20, 0x7F)) + b"\n"
CHARACTERS = _ASCII.decode()
"""Character of each id of `char`."""
VOCABULARY_SIZES = {"char": len(_ASCII), "bytes": 256}
_TO_CHAR_IDS = bytes(_ASCII.find(byte) if byte in _ASCII else _ASCII.find(b"?") for byte in range(256))


def encode_text(vocabulary: str, text: str) -> NDArray[np.uint8]:
    r"""Return a text as ids of `char` or `bytes`, each of which stands for one byte, (tokens,).

    In `char` 0x20 to 0x7e are ids 0 to 94, newline 95; a tab becomes four spaces, "\r\n" a newline, anything else "?".
    UTF-8 `bytes` turn only lone surrogates into "?".

    >>> encode_text("char", "a\tb").tolist()
    [65, 0, 0, 0, 0, 66]
    """
    if vocabulary == "bytes":
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    ascii_text = text.replace("\t", "    ").replace("\r\n", "\n").encode("ascii", "replace")
    return np.frombuffer(ascii_text.translate(_TO_CHAR_IDS), np.uint8)


def text_tokenizer(vocabulary: str) -> Any:
    """Return a `tokenizers.Tokenizer` with the ids of `encode_text`; it refuses lone surrogates, which are no text.

    It has no special tokens, so every text means itself, and nothing to merge.
    """
    hf = optional("tokenizers")
    if vocabulary == "bytes":
        made = hf.Tokenizer(hf.models.BPE({f"<0x{i:02X}>": i for i in range(256)}, [], byte_fallback=True))
        made.decoder = hf.decoders.Sequence([hf.decoders.ByteFallback(), hf.decoders.Fuse()])
        return made
    made = hf.Tokenizer(hf.models.BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
    replacements = [("\t", "    "), ("\r\n", "\n"), (hf.Regex(r"[^ -~\n]"), "?")]  # in the order of `encode_text`
    made.normalizer = hf.normalizers.Sequence([hf.normalizers.Replace(*each) for each in replacements])
    made.decoder = hf.decoders.Fuse()
    return made
