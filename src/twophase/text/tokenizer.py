"""Tokenizers: text to ids, what each id stands for, and a folder that `transformers` opens (no torch here)."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.base.config import UsageError
from twophase.base.files import write_atomic
from twophase.text import sentencepiece as sp
from twophase.text.words import BYTE_LEVEL, Words, wordwise

Ids = NDArray[np.unsignedinteger]
Encode = Callable[[list[str]], list[Ids]]

TOKENIZER_JSON, CONFIG_JSON = "tokenizer.json", "tokenizer_config.json"
MISTRAL_MODEL = "tokenizer.model.v1"
MISTRAL_SHA256 = "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"
MISTRAL_INSTALL = "pip install --no-deps mistral-common==1.13.1"
END_OF_TEXT = "<|endoftext|>"
ENDS = ("</s>", END_OF_TEXT, "<|end_of_text|>")
"""Names that the end of a text usually has, where a tokenizer's own configuration names none."""
OURS = ("bytes", "mistral")
"""Names of tokenizers that need no folder and name the end of a text themselves."""
SMALLEST_BPE = 257
"""Ids of 256 bytes and the end of a text: a BPE without merges."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids.

    Args:
        name: for people: `mistral`, `bytes`, `bpe:8000`, a Hugging Face id or folder.
        sha256: of what decides the ids, hexadecimal; equal tokenizers have equal hashes.
        vocabulary_size: number of ids.
        end_of_text: the id that ends a document.
        token_bytes: (vocabulary_size,) UTF-8 bytes of text that each id stands for; 0 for special tokens.
        files: name and content of the files of its folder.
        encode: texts to ids, without anything before, between or after; see `encode_batch`.
    """

    name: str
    sha256: str
    vocabulary_size: int
    end_of_text: int
    token_bytes: NDArray[np.int64]
    files: Mapping[str, str]
    encode: Encode

    @property
    def dtype(self) -> str:
        """The smallest type of `meta.DTYPES` that holds every id."""
        return "uint16" if self.vocabulary_size <= 1 << 16 else "uint32"

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Encode each text: no beginning or end of text is added, and the names of special tokens are plain text.

        Args:
            texts: without lone surrogates.

        Returns:
            an array of ids for each, of the type `dtype`.
        """
        return self.encode(texts)

    def save(self, folder: Path) -> None:
        """Write a folder that `transformers.AutoTokenizer.from_pretrained` opens and that gives the same ids."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_atomic(folder / name, content)


def load_tokenizer(name: str, *, end_of_text: str | None = None) -> Tokenizer:
    """Return a tokenizer by its name on the command line.

    Args:
        name: `mistral` (from the installed mistral-common), `bytes`, a folder with a `tokenizer.json`, or a Hugging
            Face id such as `openai-community/gpt2`, which is the only one that may need the network.
        end_of_text: the token that ends a document, where a folder's or hub's tokenizer names none or another is
            wanted.

    Raises:
        UsageError: an unknown name; a tokenizer that is missing, damaged, or cannot be fetched; no end of text.
    """
    if name.startswith("bpe:"):
        raise UsageError(f"--tokenizer {name}: is learnt by `twophase data prepare`; load its folder instead")
    if name == "bytes":
        return _bytes()
    if name == "mistral":
        return _mistral()
    folder = Path(name).expanduser()
    if folder.is_file() and folder.name == TOKENIZER_JSON:
        folder = folder.parent
    if folder.is_dir():
        return _from_folder(folder, name, end_of_text)
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, end_of_text)
    raise UsageError(
        f"--tokenizer {name}: there is no such folder, and it is no Hugging Face id (owner/name); use mistral, bytes, "
        f"bpe:8000, or a folder that holds a {TOKENIZER_JSON}"
    )


# --------------------------------------------------------------------------------------------------------------- bytes


def _bytes() -> Tokenizer:
    """Return the tokenizer of bytes: ids 0 to 255 are those of UTF-8, and 256 ends a text."""
    alphabet = _byte_characters()
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(256, END_OF_TEXT)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {**{alphabet[byte]: byte for byte in range(256)}, END_OF_TEXT: 256},
            "merges": [],
        },
    }

    def encode(texts: list[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    files = {TOKENIZER_JSON: json.dumps(content, ensure_ascii=False), CONFIG_JSON: _config({"eos_token": END_OF_TEXT})}
    sizes = np.array([1] * 256 + [0], np.int64)
    return Tokenizer("bytes", _identity(content), 257, 256, sizes, files, encode)


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def _added(number: int, content: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **plain, "special": True}


def _config(tokens: Mapping[str, str]) -> str:
    """Return a `tokenizer_config.json`: special tokens, and that their names in a text are text."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}
    return json.dumps(settings | {"clean_up_tokenization_spaces": False} | dict(tokens), indent=1) + "\n"


# -------------------------------------------------------------------------------------------------------- trained here


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Return a byte-level BPE of `size` ids, learnt from some texts.

    Args:
        texts: documents; only their words are held, not the documents.
        size: number of ids, 257 to 1,000,000; fewer come out where the texts hold too few pairs.

    Raises:
        UsageError: a size outside the range.
    """
    if not SMALLEST_BPE <= size <= 1_000_000:
        raise UsageError(f"--tokenizer bpe:{size}: the size must be {SMALLEST_BPE} to 1000000, for example bpe:8000")
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
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return _wrap(made, f"bpe:{size}", END_OF_TEXT, {CONFIG_JSON: _config({"eos_token": END_OF_TEXT})})


# ------------------------------------------------------------------------------------------------------------- mistral


def _mistral() -> Tokenizer:
    """Return Mistral-7B-v0.1's 32,000 pieces, with ids identical to SentencePiece's own."""
    hf = _tokenizers("--tokenizer mistral")
    vocabulary = sp.pieces(_mistral_model())
    ids = {piece.text: i for i, piece in enumerate(vocabulary)}
    names = [piece.text for piece in vocabulary if piece.kind == sp.CONTROL]
    model = hf.models.BPE(
        vocab=ids, merges=sp.merges(vocabulary), byte_fallback=True, fuse_unk=True, unk_token=vocabulary[0].text
    )
    made = hf.Tokenizer(model)
    norm, deco = hf.normalizers, hf.decoders
    made.normalizer = norm.Sequence([norm.Prepend(sp.SPACE), norm.Replace(" ", sp.SPACE)])
    made.decoder = deco.Sequence([deco.Replace(sp.SPACE, " "), deco.ByteFallback(), deco.Fuse(), deco.Strip(" ", 1, 0)])
    made.add_special_tokens([vocabulary[0].text, *names])
    begin, end = names
    config = _config({"bos_token": begin, "eos_token": end, "unk_token": vocabulary[0].text})
    return _wrap(made, "mistral", end, {CONFIG_JSON: config})


def _mistral_model() -> bytes:
    """Return the model file inside mistral-common, which is found but not run: its dependencies need not be there."""
    package = importlib.util.find_spec("mistral_common")
    paths = [Path(place, "data", MISTRAL_MODEL) for place in (package and package.submodule_search_locations) or ()]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UsageError(
            f"--tokenizer mistral: its file is inside the package mistral-common, which is not installed; run "
            f"`{MISTRAL_INSTALL}`, or use --tokenizer bpe:8000 or bytes"
        )
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != MISTRAL_SHA256:
        raise UsageError(
            f"--tokenizer mistral: {path} is not the file of Mistral-7B-v0.1 (its SHA-256 differs); run "
            f"`{MISTRAL_INSTALL} --force-reinstall`"
        )
    return data


# -------------------------------------------------------------------------------------------------------- Hugging Face


def _from_folder(folder: Path, name: str, end_of_text: str | None) -> Tokenizer:
    path = folder / TOKENIZER_JSON
    if not path.is_file():
        raise UsageError(
            f"--tokenizer {name}: the folder holds no {TOKENIZER_JSON}; save it from transformers as a fast tokenizer "
            f"(AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER))"
        )
    hf = _tokenizers(f"--tokenizer {name}")
    try:
        made = hf.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        config = (
            json.loads((folder / CONFIG_JSON).read_text(encoding="utf-8")) if (folder / CONFIG_JSON).exists() else {}
        )
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG_JSON} holds no mapping")
    except Exception as error:  # tokenizers raises bare Exception
        raise UsageError(f"--tokenizer {name}: {path} cannot be read ({error}); save the tokenizer again") from None
    named = config.get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    wanted = (end_of_text,) if end_of_text else (named,) if named else ENDS
    end = next((token for token in wanted if made.token_to_id(token) is not None), None)
    if end is None:
        tried = ", ".join(wanted)
        raise UsageError(
            f"--tokenizer {name}: has no token {tried} to end a document with; name one of its tokens with "
            f"--end-of-text TOKEN"
        )
    files = {path.name: path.read_text(encoding="utf-8") for path in _beside(folder)}
    return _wrap(made, name, end, {CONFIG_JSON: _config({"eos_token": end})} | files)


def _beside(folder: Path) -> list[Path]:
    names = (CONFIG_JSON, "special_tokens_map.json", "added_tokens.json")
    return [folder / name for name in names if (folder / name).is_file()]


def _from_hub(name: str, end_of_text: str | None) -> Tokenizer:
    named = f"--tokenizer {name}"
    _tokenizers(named)
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - an optional package
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError  # noqa: PLC0415 - the same
        from huggingface_hub.utils import logging  # noqa: PLC0415 - the same
    except ImportError:
        raise UsageError(f"{named}: is fetched with huggingface_hub; run `pip install 'twophase[data]'`") from None
    logging.set_verbosity(logging.CRITICAL)  # it warns of every attempt; what comes of them, our message says
    try:
        folder = Path(hf_hub_download(name, TOKENIZER_JSON)).parent
        for other in (CONFIG_JSON, "special_tokens_map.json"):
            try:
                hf_hub_download(name, other)
            except EntryNotFoundError:
                continue
    except RepositoryNotFoundError:
        raise UsageError(
            f"{named}: is no folder here and no repository on the hub that you may read; check the name, or log in "
            f"with `hf auth login`"
        ) from None
    except Exception as error:  # the hub's client raises errors of its HTTP library, which changes with its version
        reason = " ".join(str(error).split())[:160]
        raise UsageError(
            f"{named}: is no folder here, and the hub cannot be reached or lacks it: {type(error).__name__}, {reason}; "
            f"download it elsewhere and give its folder, or use --tokenizer mistral, bytes or bpe:8000"
        ) from None
    return replace(_from_folder(folder, str(folder), end_of_text), name=name)


def _tokenizers(named: str) -> Any:
    """Return the package `tokenizers`, with its parts loaded."""
    try:
        import tokenizers  # noqa: PLC0415 - an optional package
        import tokenizers.decoders  # noqa: PLC0415 - the same
        import tokenizers.models  # noqa: PLC0415 - the same
        import tokenizers.normalizers  # noqa: PLC0415 - the same
        import tokenizers.pre_tokenizers  # noqa: PLC0415 - the same
        import tokenizers.trainers  # noqa: PLC0415 - the same
    except ImportError:
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
    content = json.loads(text)
    vocabulary = made.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values()) + 1
    dtype = np.uint16 if size <= 1 << 16 else np.uint32

    sizes = _token_bytes(content, vocabulary, size)
    files = {TOKENIZER_JSON: text, **files}
    return Tokenizer(name, _identity(content), size, vocabulary[end], sizes, files, _encoder(made, content, dtype))


def _encoder(made: Any, content: Mapping[str, Any], dtype: type[np.unsignedinteger]) -> Encode:
    """Return what encodes texts with a `tokenizers.Tokenizer`, word by word where that gives the same ids."""

    def lists(texts: list[str]) -> list[list[int]]:
        return [each.ids for each in made.encode_batch_fast(texts, add_special_tokens=False)]

    by_words = wordwise(content)
    if by_words is None:
        return lambda texts: [np.array(ids, dtype) for ids in lists(texts)]
    made.normalizer = None  # words are cut from prepared text
    return Words(*by_words, lists, dtype)


def _identity(content: Mapping[str, Any]) -> str:
    """Return SHA-256 of the parts of a `tokenizer.json` that decide ids; not of how they are decoded or padded."""
    parts = {key: content.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _token_bytes(content: Mapping[str, Any], vocabulary: Mapping[str, int], size: int) -> NDArray[np.int64]:
    """Return UTF-8 bytes that each id stands for."""
    kinds = set(_kinds(content.get("pre_tokenizer"))) | set(_kinds(content.get("decoder")))
    byte_level, fallback = "ByteLevel" in kinds, bool(content["model"].get("byte_fallback"))
    prefix = content["model"].get("continuing_subword_prefix") or ""
    added = {entry["content"]: entry["special"] for entry in content.get("added_tokens") or ()}
    alphabet = set(_byte_characters())
    sizes = np.zeros(size, np.int64)
    for token, number in vocabulary.items():
        if token in added:
            sizes[number] = 0 if added[token] else len(token.encode())
        elif fallback and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            sizes[number] = 1
        elif byte_level and alphabet.issuperset(token):
            sizes[number] = len(token)  # one character a byte
        elif token != content["model"].get("unk_token"):
            sizes[number] = len(token.removeprefix(prefix).replace(sp.SPACE, " ").encode())
    return sizes


def _kinds(part: Any) -> Iterable[str]:
    """Yield the types in a component of a `tokenizer.json`, sequences opened."""
    if isinstance(part, dict):
        yield part.get("type", "")
        for inner in [*(part.get("pretokenizers") or ()), *(part.get("decoders") or ())]:
            yield from _kinds(inner)
