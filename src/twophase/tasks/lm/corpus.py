"""A corpus: which windows of text or of token shards each replica reads, and on which it is judged (no torch here)."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from twophase.base.config import UsageError
from twophase.tasks.lm.config import VOCABULARY_SIZES, DataConfig
from twophase.tasks.lm.tokens import encode, replaced
from twophase.text.library import fingerprint, library_documents
from twophase.text.meta import TRAIN, VALIDATION
from twophase.text.sampling import window_of
from twophase.text.shards import Shards, is_prepared, open_bin, open_shards
from twophase.text.sources import documents
from twophase.text.verification import Verification

TOKENS = "tokens:"
SEPARATOR = "\n\n"
MAX_REPLACED = 0.01
MIN_HASH_DIGITS = 8

Ids = NDArray[np.int64]


class Windows(Protocol):
    """Numbered windows of tokens, each with the target of its last token."""

    def __len__(self) -> int: ...

    def __getitem__(self, numbers: Any, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Corpus:
    """The windows that each replica reads, and those of the validation; made by `build`.

    Each replica has a contiguous share of them. Of token shards it reads each window of its share once an epoch, in a
    new order each epoch. Of a text, whose windows begin at every token, it reads random ones.

    Args:
        token_bytes: (vocabulary_size,) UTF-8 bytes of what each id decodes to; None where they are not known.
        data: sizes of windows, batches and validations.
        in_epochs: read each window once an epoch.
        description: facts for the record of a run, as plain values.
        verification: check of token files that were opened without their checksums.
    """

    vocabulary_size: int
    token_bytes: NDArray[np.int64] | None
    training: Windows
    held_out: Windows
    data: DataConfig
    replicas: int
    windows_per_replica: int
    in_epochs: bool
    description: dict[str, Any]
    verification: Verification = field(default_factory=lambda: Verification({}))

    def batch(self, seed: int, step: int, replica: int) -> tuple[Ids, Ids]:
        """Return a replica's windows at a step: a pure function of (seed, step, replica).

        So a resumed run needs no generator state, and any process may read for any replica. Of shards, row j is the
        replica's sample number step x batch_size + j, see `twophase.text.sampling.window_of`. Of a text, starts are raw
        words of Philox, a hash of a key (seed, replica) and a counter (the step). NumPy keeps raw words the same over
        its versions; distributions it does not.

        Args:
            seed: seed of the run, >= 0; taken modulo 2^64.
            step: inner step, >= 0.
            replica: number in [0, replicas).

        Returns:
            tokens and targets, each (batch_size, sequence_length) int64; targets are the tokens one place on.

        Raises:
            UsageError: an id outside the vocabulary.

        Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
        """
        size = self.data.batch_size
        if self.in_epochs:
            sample = step * size + np.arange(size)
            windows = window_of(seed, replica, sample, self.windows_per_replica)
        else:
            # The lowest counter word counts the words drawn within a step, so the step goes into the second one.
            words = np.random.Philox(key=seed % 2**64 + (replica << 64), counter=step << 64).random_raw(size)
            # The remainder favours small starts by less than one part in 2^64 / tokens.
            windows = (words % np.uint64(self.windows_per_replica)).astype(np.int64)
        # Windows of a text overlap, and those across the border of two shares belong to none.
        stride = self.windows_per_replica + (0 if self.in_epochs else self.data.sequence_length)
        return _pair(self.training[replica * stride + windows])

    def validation(self) -> tuple[Ids, Ids]:
        """Return windows spread evenly over the held-out ones, from the first to the last, the same for every seed.

        Returns:
            tokens and targets, each (validation_windows, sequence_length) int64.
        """
        count = self.data.validation_windows
        numbers = np.arange(count) * (len(self.held_out) - 1) // max(count - 1, 1)
        return _pair(self.held_out[numbers])

    def check_enough(self, steps: int) -> None:
        """Refuse a run of so many steps that would read a window of shards twice; say how many tokens it takes."""
        available, size, replicas = self.windows_per_replica, self.data.batch_size, self.replicas
        needed, length, possible = steps * size, self.data.sequence_length, available // size
        if not self.in_epochs or needed <= available:
            return
        fewer = f"--steps {possible}" if possible else f"--data.batch-size {available // steps} or less"
        if available < min(steps, size):
            fewer = f"--steps {available} or less with --data.batch-size 1"
        more = "prepare more tokens" if "tokenizer_sha256" in self.description else "use a larger file"
        raise UsageError(
            f"--data.corpus {self.description['corpus']}: the run takes {needed * replicas * length:,} training "
            f"tokens (--steps {steps} x --data.batch-size {size} x --data.sequence-length {length} x --replicas "
            f"{replicas}). Whole windows have {available * replicas * length:,}. To run, {more}, use {fewer}, or "
            "allow reading them again with --repeat"
        )


def _pair(read: NDArray[np.unsignedinteger[Any]]) -> tuple[Ids, Ids]:
    # Two arrays and not two views of one: the model wants its tokens without gaps.
    return read[:, :-1].astype(np.int64), read[:, 1:].astype(np.int64)


def build(data: DataConfig, replicas: int, vocabulary_size: int = 0) -> Corpus:
    """Return the corpus of a run: text, read and encoded now, or prepared tokens, which are mapped into memory.

    The vocabulary size is the model's, which the data's may not exceed; 0 means that it will be as large.

    Raises:
        UsageError: a corpus that cannot be read, is too short for its windows, or does not fit its vocabulary.
    """
    named = f"--data.corpus {data.corpus}"
    if data.corpus.startswith(TOKENS):
        return _shard_corpus(data, replicas, vocabulary_size, named)
    _check_vocabulary(vocabulary_size, VOCABULARY_SIZES[data.vocabulary], f"--data.vocabulary {data.vocabulary}")
    if data.tokenizer:
        raise UsageError(
            f"--data.tokenizer is {data.tokenizer!r}, but {named} is text, which --data.vocabulary encodes. Leave it "
            "empty (--data.tokenizer ''), or prepare tokens with it: twophase data prepare --help"
        )
    return _text_corpus(data, replicas, named)


def _check_vocabulary(model: int, data: int, named: str) -> None:
    if 0 < model < data:
        raise UsageError(
            f"--model.vocabulary-size is {model}, and {named} has {data} ids; it must be 0 (as many) or at least {data}"
        )


# ---------------------------------------------------------------------------------------------------------------- text


def load_documents(corpus: str) -> tuple[list[str], str]:
    """Return the documents of a corpus of text, none blank and no two equal, and a line about them.

    Raises:
        UsageError: another form, or a file that cannot be read, is damaged, or holds fewer than two documents.
    """
    named = f"--data.corpus {corpus}"
    if corpus in ("python", "python-code"):
        kind = "documentation and docstrings" if corpus == "python" else "functions and classes of the library"
        source, texts = f"{kind} of Python {platform.python_version()}", library_documents(corpus)
    elif path := _text_file(corpus):
        source, texts = f"text of {path.name}", documents(path, named)
    else:
        raise UsageError(
            f"--data.corpus is {corpus!r}; it must be python, python-code, file:PATH or tokens:PATH, for example "
            "file:notes.txt"
        )
    texts = list(dict.fromkeys(texts))  # a held-out document must not be trained on under another number
    if len(texts) < 2:
        fault = f"is a single document of {len(texts[0]):,} characters" if texts else "holds no text"
        raise UsageError(
            f"{named}: {fault}, and at least one document is to be held out; use a larger file, or JSON lines with a "
            "text each"
        )
    return texts, f"{source}: {len(texts):,} documents, {sum(map(len, texts)):,} characters"


def _text_file(corpus: str) -> Path | None:
    """Return the file of a corpus `file:PATH`; None for another one."""
    name = corpus.removeprefix("file:")
    return Path(os.path.expanduser(name)) if name and name != corpus else None  # noqa: PTH111 - Path's may raise


def text_fingerprint(corpus: str) -> str | None:
    """Return the fingerprint that a run on a text file would have now; None for another corpus or a file that is gone.

    Raises:
        UsageError: a file that holds no text any more.
    """
    path = _text_file(corpus)
    return fingerprint(load_documents(corpus)[0]) if path and path.exists() else None


def _text_corpus(data: DataConfig, replicas: int, named: str) -> Corpus:
    """Load, shuffle (of a non-iid split only the held-out part), hold out, encode and share out a text.

    The shuffle does not depend on the run's seed, so every run on a text is judged on the same held-out documents.
    Whole documents are held out, never windows of training documents.
    """
    texts, description = load_documents(data.corpus)
    count = len(texts)
    order = np.argsort(np.random.Philox(key=0).random_raw(count), kind="stable")
    apart = min(max(round(data.held_out * count), 1), count - 1)
    training = order[apart:] if data.split == "iid" else np.sort(order[apart:])
    parts = [SEPARATOR.join(texts[i] for i in numbers) for numbers in (training, order[:apart])]
    unknown = sum(replaced(data.vocabulary, part) for part in parts) / sum(map(len, parts))
    if unknown > MAX_REPLACED:
        raise UsageError(
            f"{named}: {unknown:.1%} of its characters are not in the vocabulary {data.vocabulary!r} (at most "
            f"{MAX_REPLACED:.0%} may be); use --data.vocabulary bytes"
        )
    stream, held_out = (encode(data.vocabulary, part) for part in parts)
    share, needed = len(stream) // replicas, data.sequence_length + 1
    if share < needed:
        raise UsageError(
            f"{named}: {len(stream):,} training tokens over --replicas {replicas} leave {share:,} to each, and a "
            f"window takes {needed:,}. Lower --data.sequence-length or --replicas, or use a larger file"
        )
    if len(held_out) < needed:
        raise UsageError(
            f"{named}: {apart} of {count} documents are held out, which are {len(held_out):,} tokens, and a window "
            f"takes {needed:,}. Lower --data.sequence-length, raise --data.held-out, or use a larger file"
        )
    size = VOCABULARY_SIZES[data.vocabulary]
    return Corpus(
        vocabulary_size=size,
        # One for every token of both vocabularies; of `char` it is the text as it was encoded, tabs already expanded.
        token_bytes=np.ones(size, np.int64),
        training=sliding_window_view(stream, needed),
        held_out=sliding_window_view(held_out, needed),
        data=data,
        replicas=replicas,
        windows_per_replica=share - data.sequence_length,
        in_epochs=False,
        description={
            "corpus": data.corpus,
            "text": description,
            "fingerprint": fingerprint(texts),
            "documents": count,
            "held_out_documents": apart,
            "training_characters": len(parts[0]),
            "validation_characters": len(parts[1]),
            "replaced_share": unknown,
            "vocabulary": data.vocabulary,
        },
    )


# -------------------------------------------------------------------------------------------------------- token shards


def _shard_corpus(data: DataConfig, replicas: int, vocabulary_size: int, named: str) -> Corpus:
    """Open, check and share out a corpus of tokens; the order of windows is that of the shards."""
    shards = _open(data, vocabulary_size, named)
    _check_tokenizer(shards, data.tokenizer, named)
    _check_vocabulary(vocabulary_size, shards.vocabulary_size, f"the tokenizer of {named}")
    length = data.sequence_length
    training, held_out = (shards.windows(split, length) for split in (TRAIN, VALIDATION))
    if len(training) < replicas:
        raise UsageError(
            f"{named}: its {shards.tokens(TRAIN):,} training tokens are {len(training):,} windows of "
            f"--data.sequence-length {length}, and each of --replicas {replicas} needs one. Lower one of them, or "
            "use more tokens"
        )
    if len(held_out) < data.validation_windows:
        remedy = f"use --data.validation-windows {len(held_out)} or less" if len(held_out) else "use more tokens"
        raise UsageError(
            f"{named}: its {shards.tokens(VALIDATION):,} validation tokens are {len(held_out):,} windows of "
            f"--data.sequence-length {length}, and --data.validation-windows is {data.validation_windows}; {remedy}, "
            "or lower --data.sequence-length"
        )
    tokens, meta, share = shards.tokens(TRAIN), shards.meta, len(training) // replicas
    name = meta.tokenizer if meta else "unknown"
    facts = {
        "corpus": data.corpus,
        "text": f"token shards: {tokens:,} training tokens, {shards.tokens(VALIDATION):,} for validation, tokenizer "
        f"{name}",
        "fingerprint": shards.fingerprint,
        "vocabulary": name,
        "vocabulary_size": shards.vocabulary_size,
        "training_tokens": tokens,
        "training_shards": len(shards.splits[TRAIN]),
        "training_windows": len(training),
        "windows_per_replica": share,
        "validation_tokens": shards.tokens(VALIDATION),
        "dtype": shards.splits[TRAIN][0].dtype,
    }
    if meta:
        facts |= {"tokenizer": meta.tokenizer, "tokenizer_sha256": meta.tokenizer_sha256, "source": dict(meta.source)}
    return Corpus(
        vocabulary_size=shards.vocabulary_size,
        token_bytes=shards.token_bytes,
        training=training,
        held_out=held_out,
        data=data,
        replicas=replicas,
        windows_per_replica=share,
        in_epochs=True,
        description=facts,
        verification=Verification(shards.trusted),
    )


def verify(data: DataConfig, vocabulary_size: int) -> None:
    """Read all token files of a corpus and compare them with their SHA-256, remembered checks or not.

    Raises:
        UsageError: a file that is damaged, or that the corpus cannot be used.
    """
    if data.corpus.startswith(TOKENS):
        _open(data, vocabulary_size, f"--data.corpus {data.corpus}", trust=False)


def _open(data: DataConfig, vocabulary_size: int, named: str, *, trust: bool = True) -> Shards:
    path = Path(os.path.expanduser(data.corpus.removeprefix(TOKENS)))  # noqa: PTH111 - Path's raises for unknown users
    if data.corpus == TOKENS or not path.exists():
        raise UsageError(
            f"{named}: there is no such file or folder (it must be {TOKENS}PATH, and the path is relative to "
            f"{Path.cwd()}). Make one with `twophase data prepare SOURCE … --out DIR`, where SOURCE is c4, files or "
            "folders"
        )
    if path.is_dir() and is_prepared(path):
        return open_shards(path, trust=trust)
    if path.is_file() and is_prepared(path.parent):
        raise UsageError(f"{named}: is a part of a prepared folder; name the folder: {TOKENS}{path.parent}")
    if vocabulary_size < 1:
        raise UsageError(
            f"{named}: .bin files do not say how many ids their vocabulary has. Give --model.vocabulary-size, for "
            "example 50304 for GPT-2's 50257 (a multiple of 64 is faster)"
        )
    return open_bin(path, vocabulary_size, trust=trust)


def _check_tokenizer(shards: Shards, expected: str, named: str) -> None:
    if not expected:
        return
    if shards.meta is None:
        raise UsageError(
            f"--data.tokenizer is {expected!r}, and the .bin files of {named} do not say which tokenizer made them. "
            f"Leave it out, or prepare the text with `twophase data prepare … --tokenizer {expected}`"
        )
    name, digest = shards.meta.tokenizer, shards.meta.tokenizer_sha256
    prefix = expected.lower()
    if expected != name and not (len(prefix) >= MIN_HASH_DIGITS and digest.lower().startswith(prefix)):
        raise UsageError(
            f"--data.tokenizer is {expected!r}, and {named} was made with {name!r} (SHA-256 {digest[:12]}…); name the "
            f"folder that was made with {expected!r}, or use --data.tokenizer {name}"
        )
