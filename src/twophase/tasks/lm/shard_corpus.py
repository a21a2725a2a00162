"""A corpus of token shards: every replica reads windows of its own, each once an epoch (no torch here)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.base.config import UsageError
from twophase.tasks.lm.config import DataConfig
from twophase.text.meta import TRAIN, VALIDATION
from twophase.text.sampling import window_of
from twophase.text.shards import Shards, Windows, is_prepared, open_bin, open_shards

PREFIX = "tokens:"
MIN_HASH_DIGITS = 8

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ShardVocabulary:
    """What is known of the ids of a shard corpus.

    Args:
        name: of the tokenizer; `unknown` of `.bin` files, which do not name theirs.
        size: number of ids.
        token_bytes: (size,) int64, UTF-8 bytes of each id; None where they are not known.
    """

    name: str
    size: int
    token_bytes: NDArray[np.int64] | None


@dataclass(frozen=True, eq=False)
class ShardCorpus:
    """Windows of token shards, with the interface of `twophase.tasks.lm.corpus.Corpus`; made by `build_shards`.

    The N windows of the training split are numbered through its shards. Replica r of R owns those from r (N // R) to
    (r+1) (N // R), and reads each of them once an epoch, in an order of that epoch. So no window is read twice before
    all of a replica's were, and never by two replicas.

    Args:
        vocabulary: what the ids mean, as far as that is known.
        training: the windows of the training split.
        held_out: the windows of the validation split.
        replicas: R.
        batch_size: windows of a batch.
        validation_windows: windows of a validation.
        description: facts for the record of a run, as plain values.
    """

    vocabulary: ShardVocabulary
    training: Windows
    held_out: Windows
    replicas: int
    batch_size: int
    validation_windows: int
    description: dict[str, Any]

    @property
    def sequence_length(self) -> int:
        """Tokens of a window."""
        return self.training.length

    @property
    def windows_per_replica(self) -> int:
        """Windows that each replica reads in an epoch, N // R."""
        return len(self.training) // self.replicas

    def batch(self, seed: int, step: int, replica: int) -> tuple[Ids, Ids]:
        """A replica's next windows: a pure function of (seed, step, replica).

        Row j is the replica's sample number step x batch_size + j; `twophase.text.sampling.window_of` says which
        window that is. So a resumed run needs no state, and any process may read for any replica.

        Args:
            seed: seed of the run, >= 0; taken modulo 2^64.
            step: inner step, >= 0.
            replica: in [0, replicas).

        Returns:
            tokens and targets, each (batch_size, sequence_length) int64; targets are the tokens one place on.

        Raises:
            UsageError: an id outside the vocabulary.
        """
        available = self.windows_per_replica
        sample = step * self.batch_size + np.arange(self.batch_size)
        return _split(self.training.read(replica * available + window_of(seed, replica, sample, available)))

    def validation(self) -> tuple[Ids, Ids]:
        """Windows spread evenly over the validation split, from its first to its last, the same for every seed.

        Returns:
            tokens and targets, each (validation_windows, sequence_length) int64.
        """
        last = len(self.held_out) - 1
        numbers = np.arange(self.validation_windows) * last // max(self.validation_windows - 1, 1)
        return _split(self.held_out.read(numbers))

    def check_enough(self, steps: int) -> None:
        """Refuse a run that would read a window twice.

        Args:
            steps: inner steps of each replica in the whole run.

        Raises:
            UsageError: steps x batch_size windows are more than a replica has; says how many tokens there are and how
                many it takes.
        """
        available, wanted = self.windows_per_replica, steps * self.batch_size
        if wanted <= available:
            return
        length, possible = self.sequence_length, available // self.batch_size
        fewer = f"--steps {possible}" if possible else f"--data.batch-size {available} or less"
        raise UsageError(
            f"--data.corpus {self.description['corpus']}: the run takes {wanted * self.replicas * length:,} training "
            f"tokens (--steps {steps} x --data.batch-size {self.batch_size} x --data.sequence-length {length} x "
            f"--replicas {self.replicas}) and there are {available * self.replicas * length:,} in whole windows; "
            f"{self._more(wanted * self.replicas)}, use {fewer}, or allow reading them again with --repeat"
        )

    def _more(self, windows: int) -> str:
        if "tokenizer_sha256" not in self.description:
            return "use a larger file"
        # A shard of s tokens leaves at most T of them unread: k shards that together hold (W + k) T hold W windows.
        length, shards = self.sequence_length, self.description["training_shards"]
        read = max(self.description["training_tokens"] / shards - length, 1)
        needed = (windows + math.ceil(windows * length / read)) * length
        return f"prepare more (`twophase data prepare … --tokens {math.ceil(needed / 1000) * 1000}`)"


def build_shards(data: DataConfig, replicas: int, vocabulary_size: int) -> ShardCorpus:
    """Open, check and share out a corpus of tokens.

    Args:
        data: its corpus is `tokens:PATH`; PATH is a folder of `twophase data prepare`, a folder with `train.bin` and
            `val.bin`, or a `.bin` file with the other beside it.
        replicas: number of equal, contiguous parts of the training windows.
        vocabulary_size: of the model; 0 for as many as the shards' tokenizer has.

    Raises:
        UsageError: files that are not what they claim, another tokenizer than expected, a vocabulary that is unknown or
            larger than the model's, or fewer windows than replicas or validation windows.
    """
    named = f"--data.corpus {data.corpus}"
    shards = _open(data, vocabulary_size, named)
    _check_tokenizer(shards, data.tokenizer, named)
    if 0 < vocabulary_size < shards.vocabulary_size:
        raise UsageError(
            f"--model.vocabulary-size is {vocabulary_size}, and the tokenizer of {named} has {shards.vocabulary_size} "
            f"ids; it must be 0 (as many) or at least {shards.vocabulary_size}"
        )
    training, held_out = (shards.windows(split, data.sequence_length) for split in (TRAIN, VALIDATION))
    if len(training) < replicas:
        raise UsageError(
            f"{named}: its {shards.tokens(TRAIN):,} training tokens are {len(training):,} windows of "
            f"--data.sequence-length {data.sequence_length}, and each of --replicas {replicas} needs one of its own; "
            f"lower one of them, or use more tokens"
        )
    if len(held_out) < data.validation_windows:
        remedy = f"use --data.validation-windows {len(held_out)} or less" if len(held_out) else "use more tokens"
        raise UsageError(
            f"{named}: its {shards.tokens(VALIDATION):,} validation tokens are {len(held_out):,} windows of "
            f"--data.sequence-length {data.sequence_length}, and --data.validation-windows is "
            f"{data.validation_windows}; {remedy}, or lower --data.sequence-length"
        )
    name = shards.meta.tokenizer if shards.meta else "unknown"
    return ShardCorpus(
        vocabulary=ShardVocabulary(name, shards.vocabulary_size, shards.token_bytes),
        training=training,
        held_out=held_out,
        replicas=replicas,
        batch_size=data.batch_size,
        validation_windows=data.validation_windows,
        description=_describe(data, shards, training, replicas),
    )


def _open(data: DataConfig, vocabulary_size: int, named: str) -> Shards:
    if not data.corpus.startswith(PREFIX) or data.corpus == PREFIX:
        raise UsageError(f"{named}: it must be {PREFIX}PATH, for example {PREFIX}data/c4")
    path = Path(os.path.expanduser(data.corpus.removeprefix(PREFIX)))  # noqa: PTH111 - Path's raises for unknown users
    if not path.exists():
        raise UsageError(
            f"{named}: there is no such file or folder (the path is relative to {Path.cwd()}); make one with `twophase "
            "data prepare SOURCE … --out DIR`, where SOURCE is c4, files or folders"
        )
    if path.is_dir() and is_prepared(path):
        return open_shards(path)
    if path.is_file() and is_prepared(path.parent):
        raise UsageError(f"{named}: is a part of a prepared folder; name the folder: {PREFIX}{path.parent}")
    if vocabulary_size < 1:
        raise UsageError(
            f"{named}: .bin files do not say how many ids their vocabulary has; give --model.vocabulary-size, for "
            f"example 50304 for GPT-2's 50257 (a multiple of 64 is faster)"
        )
    return open_bin(path, vocabulary_size)


def _check_tokenizer(shards: Shards, wanted: str, named: str) -> None:
    if not wanted:
        return
    if shards.meta is None:
        raise UsageError(
            f"--data.tokenizer is {wanted!r}, and the .bin files of {named} do not say which tokenizer made them; "
            f"leave it out, or prepare the text with `twophase data prepare … --tokenizer {wanted}`"
        )
    name, digest = shards.meta.tokenizer, shards.meta.tokenizer_sha256
    prefix = wanted.lower()
    if wanted != name and not (len(prefix) >= MIN_HASH_DIGITS and digest.lower().startswith(prefix)):
        raise UsageError(
            f"--data.tokenizer is {wanted!r}, and {named} was made with {name!r} (SHA-256 {digest[:12]}…); name the "
            f"folder that was made with {wanted!r}, or use --data.tokenizer {name}"
        )


def _describe(data: DataConfig, shards: Shards, training: Windows, replicas: int) -> dict[str, Any]:
    tokens, meta = shards.tokens(TRAIN), shards.meta
    tokenizer = f"tokenizer {meta.tokenizer}" if meta else "tokenizer unknown"
    facts = {
        "corpus": data.corpus,
        "text": f"token shards: {tokens:,} training tokens, {shards.tokens(VALIDATION):,} for validation, {tokenizer}",
        "fingerprint": shards.fingerprint,
        "vocabulary": meta.tokenizer if meta else "unknown",
        "vocabulary_size": shards.vocabulary_size,
        "training_tokens": tokens,
        "training_shards": len(shards.splits[TRAIN]),
        "training_windows": len(training),
        "windows_per_replica": len(training) // replicas,
        "validation_tokens": shards.tokens(VALIDATION),
        "dtype": shards.splits[TRAIN][0].dtype,
    }
    if meta:
        facts |= {"tokenizer": meta.tokenizer, "tokenizer_sha256": meta.tokenizer_sha256, "source": dict(meta.source)}
    return facts


def _split(read: NDArray[np.unsignedinteger[Any]]) -> tuple[Ids, Ids]:
    # Two arrays and not two views of one: the model wants its tokens without gaps.
    return read[:, :-1].astype(np.int64), read[:, 1:].astype(np.int64)
