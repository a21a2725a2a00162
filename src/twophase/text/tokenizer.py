"""Tokenizers: text to ids, what each id stands for, and a folder that `transformers` opens (no torch here)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.base.config import UsageError
from twophase.base.files import write_atomic
from twophase.base.reading import json_object
from twophase.text import mistral

Ids = NDArray[np.unsignedinteger]

TOKENIZER_JSON, CONFIG_JSON = "tokenizer.json", "tokenizer_config.json"
AS_WRITTEN = {"tokenizer_class": "PreTrainedTokenizerFast"}
"""The class that reads `tokenizer.json` unchanged; others, such as GPT2Tokenizer, rebuild parts of it."""
END_OF_TEXT = "<|endoftext|>"
ENDS = ("</s>", END_OF_TEXT, "<|end_of_text|>")
"""Names that the end of a text usually has, where a tokenizer's own configuration names none."""
BUILT_IN = ("bytes", "mistral")
"""Names of tokenizers that need no folder and name the end of a text themselves."""
SMALLEST_BPE, LARGEST_BPE = 257, 1_000_000
"""Ids of 256 bytes and the end of a text: a BPE without merges."""
_LETTERS, _BLANKS = "A-Za-z\u0080-\U0010ffff", " \t\n\r"
BYTE_LEVEL = f" ?[{_LETTERS}]+| ?[0-9]+| ?[^{_LETTERS}0-9{_BLANKS}]+|[{_BLANKS}]+(?![^{_BLANKS}])|[{_BLANKS}]+"
"""How the byte-level BPE of this package cuts texts: by plain ranges, which mean the same to every engine of regular
expressions. A blank before a word is the word's; of several, the last."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids.

    Args:
        name: name for people: `mistral`, `bytes`, `bpe:8000`, a Hugging Face id or folder.
        sha256: hash of all that decides the ids, hexadecimal; equal tokenizers have equal hashes.
        token_bytes: (vocabulary_size,) UTF-8 bytes of text that each id stands for; 0 for special tokens.
        files: name and content of the files of its folder.
        encode: function from texts without lone surrogates to arrays of ids, of the type `dtype`. No beginning or end
            of a text is added, and the names of special tokens are plain text.
    """

    name: str
    sha256: str
    vocabulary_size: int
    end_of_text: int
    token_bytes: NDArray[np.int64]
    files: Mapping[str, str]
    encode: Callable[[list[str]], list[Ids]]

    @property
    def dtype(self) -> str:
        """The smallest type of `meta.DTYPES` that holds every id."""
        return "uint16" if self.vocabulary_size <= 1 << 16 else "uint32"

    def save(self, folder: Path) -> None:
        """Write a folder that `transformers.AutoTokenizer.from_pretrained` opens and that gives the same ids."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_atomic(folder / name, content)


def load_tokenizer(name: str, *, end_of_text: str | None = None) -> Tokenizer:
    """Return a tokenizer by its name on the command line.

    Args:
        name: `mistral` (from the installed mistral-common), `bytes`, a folder with a `tokenizer.json`, or a Hugging
            Face id such as `openai-community/gpt2`. Only an id may need the network.
        end_of_text: the token that ends a document, where a folder's or hub's tokenizer names none or another is
            wanted.

    Raises:
        UsageError: an unknown name; a tokenizer that is missing, damaged, or cannot be fetched; no end of text.
    """
    if name == "bytes":
        return _bytes()
    if name == "mistral":
        made, unknown, begin, end = mistral.build(_tokenizers("--tokenizer mistral"))
        return _wrap(made, name, end, _config(bos_token=begin, eos_token=end, unk_token=unknown))
    folder = Path(os.path.expanduser(name))  # noqa: PTH111 - Path's raises for unknown users
    if folder.is_file() and folder.name == TOKENIZER_JSON:
        folder = folder.parent
    if folder.is_dir():
        return _from_folder(folder, name, end_of_text)
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, end_of_text)
    raise UsageError(
        f"--tokenizer {name}: there is no such folder, and it is no Hugging Face id (owner/name). Use mistral, "
        f"bytes, bpe:8000, or a folder that holds a {TOKENIZER_JSON}"
    )


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Return a byte-level BPE of `size` ids, learnt from some texts.

    Args:
        texts: documents; only their words are held in memory, not the documents.
        size: number of ids, from `SMALLEST_BPE` to `LARGEST_BPE`; fewer come out where the texts hold too few pairs.
    """
    hf = _tokenizers(f"--tokenizer bpe:{size}")
    made = hf.Tokenizer(hf.models.BPE())
    pre = hf.pre_tokenizers
    made.pre_tokenizer = pre.Sequence(
        [pre.Split(hf.Regex(BYTE_LEVEL), "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return _wrap(made, f"bpe:{size}", END_OF_TEXT, _config(eos_token=END_OF_TEXT))


def byte_characters() -> list[str]:
    """Return the character by which byte-level tokenizers write each byte.

    Source: Radford et al., "Language models are unsupervised multitask learners" (2019), the released code's table.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


def _bytes() -> Tokenizer:
    """Return the tokenizer of bytes: ids 0 to 255 are those of UTF-8, and 256 ends a text."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    nothing = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256, "content": END_OF_TEXT} | plain | {"special": True}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level | {"add_prefix_space": True, "use_regex": True},
        "model": {"type": "BPE"}
        | dict.fromkeys(nothing)
        | dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
        | {"vocab": {name: i for i, name in enumerate([*byte_characters(), END_OF_TEXT])}, "merges": []},
    }

    def encode(texts: list[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    files = {TOKENIZER_JSON: json.dumps(content, ensure_ascii=False)} | _config(eos_token=END_OF_TEXT)
    sizes = np.array([1] * 256 + [0], np.int64)
    return Tokenizer("bytes", _identity(content), 257, 256, sizes, files, encode)


def _config(**tokens: str) -> dict[str, str]:
    """Return `tokenizer_config.json`: special tokens, and that their names in a text are text."""
    settings = AS_WRITTEN | {"split_special_tokens": True}
    return {CONFIG_JSON: json.dumps(settings | {"clean_up_tokenization_spaces": False} | tokens, indent=1) + "\n"}


# -------------------------------------------------------------------------------------------------------- Hugging Face


def _from_folder(folder: Path, name: str, end_of_text: str | None) -> Tokenizer:
    path = folder / TOKENIZER_JSON
    if not path.is_file():
        raise UsageError(
            f"--tokenizer {name}: the folder holds no {TOKENIZER_JSON}; save it from transformers as a fast tokenizer "
            f"(AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER))"
        )
    hf = _tokenizers(f"--tokenizer {name}")
    paths = [folder / other for other in (CONFIG_JSON, "special_tokens_map.json", "added_tokens.json")]
    try:
        made = hf.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        files = {other.name: other.read_text(encoding="utf-8") for other in paths if other.is_file()}
        config = json_object(files.get(CONFIG_JSON, "{}"))
        end = config.get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
    except Exception as error:  # tokenizers raises bare Exception
        raise UsageError(f"--tokenizer {name}: {path} cannot be read ({error}); save the tokenizer again") from None
    tokens = (end_of_text,) if end_of_text else (end,) if end and isinstance(end, str) else ENDS
    end = next((token for token in tokens if made.token_to_id(token) is not None), None)
    if end is None:
        raise UsageError(
            f"--tokenizer {name}: has no token {', '.join(tokens)} to end a document with; name one of its tokens with "
            f"--end-of-text TOKEN"
        )
    # A run never sees what its post-processor adds, nor names of special tokens in a text.
    made.post_processor = None
    config |= {"eos_token": end, "split_special_tokens": True} | AS_WRITTEN
    return _wrap(made, name, end, _config() | files | {CONFIG_JSON: json.dumps(config, indent=1) + "\n"})


def _from_hub(name: str, end_of_text: str | None) -> Tokenizer:
    _tokenizers(f"--tokenizer {name}")
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - tokenizers brings it
    from huggingface_hub.utils import logging  # noqa: PLC0415 - the same

    logging.set_verbosity(logging.CRITICAL)  # it warns of every attempt; what comes of them, our message says
    try:
        folder = snapshot_download(name, allow_patterns=[TOKENIZER_JSON, CONFIG_JSON, "special_tokens_map.json"])
    except Exception as error:  # the hub's client raises errors of its HTTP library, which changes with its version
        reason = " ".join(str(error).split())[:160]
        raise UsageError(
            f"--tokenizer {name}: is no folder here, and the hub cannot be reached, lacks it, or wants "
            f"`hf auth login`: {type(error).__name__}, {reason}. Download it elsewhere and give its folder, or use "
            "--tokenizer mistral, bytes or bpe:8000"
        ) from None
    return replace(_from_folder(Path(folder), folder, end_of_text), name=name)


def _tokenizers(named: str) -> Any:
    """Return the package `tokenizers`, with its parts loaded."""
    try:
        import tokenizers  # noqa: PLC0415 - an optional package
        from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers  # noqa: F401, PLC0415 - the same
    except ModuleNotFoundError:
        raise UsageError(
            f"{named}: needs the package tokenizers; run `pip install 'twophase[data]'`, or use --tokenizer bytes"
        ) from None
    return tokenizers


def _wrap(made: Any, name: str, end: str, files: Mapping[str, str]) -> Tokenizer:
    """Turn a `tokenizers.Tokenizer` into a `Tokenizer`."""
    made.no_padding()
    made.no_truncation()
    made.encode_special_tokens = True  # documents may write about </s>: that is text
    text = made.to_str()
    content, vocabulary = json.loads(text), made.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=0) + 1
    dtype = np.uint16 if size <= 1 << 16 else np.uint32

    def encode(texts: list[str]) -> list[Ids]:
        return [np.array(encoding.ids, dtype) for encoding in made.encode_batch_fast(texts, add_special_tokens=False)]

    sizes = _token_bytes(content, vocabulary, size)
    return Tokenizer(name, _identity(content), size, vocabulary[end], sizes, {TOKENIZER_JSON: text, **files}, encode)


def _identity(content: Mapping[str, Any]) -> str:
    """Return SHA-256 of the parts of a `tokenizer.json` that decide ids; not of how they are decoded or padded."""
    parts = {key: content.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _token_bytes(content: Mapping[str, Any], vocabulary: Mapping[str, int], size: int) -> NDArray[np.int64]:
    """Return UTF-8 bytes that each id stands for."""
    kinds = {*_kinds(content.get("pre_tokenizer")), *_kinds(content.get("decoder"))}
    byte_level, fallback = "ByteLevel" in kinds, bool(content["model"].get("byte_fallback"))
    prefix, suffix = (content["model"].get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    added = {entry["content"]: entry["special"] for entry in content.get("added_tokens") or ()}
    alphabet = set(byte_characters())
    sizes = np.zeros(size, np.int64)
    for token, number in vocabulary.items():
        stem = token.removesuffix(suffix)
        blank = int(stem != token)  # which decoders write at the end of a word
        if token in added:
            sizes[number] = 0 if added[token] else len(token.encode())
        elif fallback and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            sizes[number] = 1
        elif byte_level and alphabet.issuperset(stem):
            sizes[number] = len(stem) + blank  # one character a byte
        elif token != content["model"].get("unk_token"):
            sizes[number] = len(stem.removeprefix(prefix).replace(mistral.SPACE, " ").encode()) + blank
    return sizes


def _kinds(part: Any) -> Iterator[str]:
    """Yield the types in a component of a `tokenizer.json`, sequences opened."""
    if isinstance(part, dict):
        yield part.get("type", "")
        for inner in [*(part.get("pretokenizers") or ()), *(part.get("decoders") or ())]:
            yield from _kinds(inner)
