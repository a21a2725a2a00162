"""A corpus: which windows of text or of token shards each replica reads, and on which it is judged (no torch here)."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from twophase.config import require
from twophase.errors import UsageError
from twophase.tasks.lm.config import DataConfig
from twophase.text.shards import META, TOKEN_BYTES, TRAIN, VALIDATION, Windows, epoch_order, nanogpt_meta, read_meta
from twophase.text.sources import documents, python_documents
from twophase.text.tokenizers import VOCABULARY_SIZES, encode_text

TOKENS, FILE = "tokens:", "file:"
SEPARATOR = "\n\n"
MAX_REPLACED = 0.01
"""Share of a text's characters that its vocabulary may lack."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Corpus:
    """The windows that each replica reads, and those of the validation, each with the target of its last token.

    Of a text, whose windows begin at every token, each replica has a contiguous share and reads random ones of it. Of
    token shards every epoch has a new order of all windows, and each replica reads a share of it, each window once.
    """

    vocabulary_size: int
    token_bytes: NDArray[np.int64] | None
    """(vocabulary_size,) UTF-8 bytes of what each id decodes to, where they are known."""
    training: Windows | NDArray[np.uint8]
    held_out: Windows | NDArray[np.uint8]
    data: DataConfig
    replicas: int
    description: dict[str, Any]
    """Facts for the record of a run, as plain values."""

    @property
    def in_epochs(self) -> bool:
        """True of token shards, whose windows are read once an epoch."""
        return isinstance(self.training, Windows)

    @property
    def windows_per_replica(self) -> int:
        """Windows of a replica's share; of a text, those across the border of two shares belong to none."""
        border = 0 if self.in_epochs else self.data.sequence_length
        return (len(self.training) + border) // self.replicas - border

    def batch(self, seed: int, step: int, replica: int) -> tuple[Ids, Ids]:
        """Return a replica's windows at a step: tokens and targets, one place on, each (batch, length) int64.

        They are a pure function of (seed, step, replica), so a resumed run needs no generator state. Starts in a text
        are raw words of Philox, a hash of a key (seed, replica) and a counter (the step), which NumPy keeps the same
        over its versions; distributions it does not.
        """
        size, share = self.data.batch_size, self.windows_per_replica
        if self.in_epochs:
            places = [divmod(sample, share) for sample in range(step * size, (step + 1) * size)]
            total = len(self.training)
            rows = [epoch_order(seed, epoch, total)[replica * share + place] for epoch, place in places]
            return _pair(self.training[np.array(rows)])
        # The lowest counter word counts the words drawn within a step, so the step goes into the second one.
        words = np.random.Philox(key=seed % 2**64 + (replica << 64), counter=step << 64).random_raw(size)
        # The remainder favours small starts by less than one part in 2^64 / tokens.
        starts = (words % np.uint64(share)).astype(np.int64)
        return _pair(self.training[replica * (share + self.data.sequence_length) + starts])

    def validation(self) -> tuple[Ids, Ids]:
        """Return the same of windows spread evenly over the held-out ones, from the first to the last."""
        count = self.data.validation_windows
        return _pair(self.held_out[np.arange(count) * (len(self.held_out) - 1) // max(count - 1, 1)])

    def check_enough(self, steps: int) -> None:
        """Refuse a run of so many steps that would read a window of shards twice."""
        possible = self.windows_per_replica // self.data.batch_size
        if self.in_epochs and steps > possible:
            name = self.description["corpus"]
            raise UsageError(f"--steps: must be at most {possible}, all tokens of {name}, or use --repeat; got {steps}")


def _pair(read: NDArray[np.unsignedinteger[Any]]) -> tuple[Ids, Ids]:
    # Two arrays and not two views of one: the model wants its tokens without gaps.
    return read[:, :-1].astype(np.int64), read[:, 1:].astype(np.int64)


def build(data: DataConfig, replicas: int, vocabulary_size: int = 0) -> Corpus:
    """Return the corpus of a run: text, read and encoded now, or prepared tokens, which are mapped into memory.

    The vocabulary size is the model's, which the data's may not exceed; 0 means that it will be as large.
    """
    is_tokens = data.corpus.startswith(TOKENS)
    corpus = _shard_corpus(data, replicas, vocabulary_size) if is_tokens else _text_corpus(data, replicas)
    least = corpus.vocabulary_size
    in_range = vocabulary_size == 0 or vocabulary_size >= least
    require(in_range, "model.vocabulary_size", vocabulary_size, f"0 or at least {least}, the ids of {data.corpus}")
    return corpus


def _text_corpus(data: DataConfig, replicas: int) -> Corpus:
    """Load, shuffle (of a non-iid split only the held-out part), hold out whole documents, encode and share out a text.

    The shuffle does not depend on the run's seed, so every run on a text is judged on the same held-out documents.
    """
    name = data.corpus
    if name in ("python", "python-code"):
        kind = "documentation and docstrings" if name == "python" else "functions and classes of the library"
        source, texts = f"{kind} of Python {platform.python_version()}", python_documents(name)
    elif name.startswith(FILE):
        path = Path(name.removeprefix(FILE)).expanduser()
        source, texts = f"text of {path.name}", list(dict.fromkeys(documents(path)))
    else:
        raise UsageError(f"--data.corpus: must be python, python-code, file:PATH or tokens:DIR, got {name}")
    count = len(texts)
    require(count >= 2, "data.corpus", f"{count} in {name}", "2 documents or more")  # one is to be held out
    order = np.argsort(np.random.Philox(key=0).random_raw(count), kind="stable")
    apart = min(max(round(data.held_out * count), 1), count - 1)
    kept = order[apart:] if data.split == "iid" else np.sort(order[apart:])
    parts = [SEPARATOR.join(texts[i] for i in numbers) for numbers in (kept, order[:apart])]
    stream, held_out = streams = [encode_text(data.vocabulary, part) for part in parts]
    mark = encode_text(data.vocabulary, "?")
    marks = sum(int(np.count_nonzero(ids == mark)) for ids in streams) - sum(part.count("?") for part in parts)
    unknown = marks / sum(map(len, parts))
    lacking = f"bytes, for {unknown:.1%} of the characters of {name} are not ASCII"
    require(unknown <= MAX_REPLACED, "data.vocabulary", data.vocabulary, lacking)
    window = data.sequence_length + 1
    shortest = min(len(stream) // replicas, len(held_out))  # of a replica's tokens and the validation's
    require(shortest >= window, "data.sequence_length", data.sequence_length, f"below {shortest} for {name}")
    facts = {
        "corpus": name,
        "text": f"{source}: {count:,} documents, {sum(map(len, texts)):,} characters",
        "fingerprint": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        "held_out_documents": apart,
        "replaced_share": unknown,
        "vocabulary": data.vocabulary,
    }
    size = VOCABULARY_SIZES[data.vocabulary]
    training, validation = (sliding_window_view(ids, window) for ids in streams)
    # One byte a token in both vocabularies; of `char` of the text as it was encoded, tabs already expanded.
    return Corpus(size, np.ones(size, np.int64), training, validation, data, replicas, facts)


def _shard_corpus(data: DataConfig, replicas: int, vocabulary_size: int) -> Corpus:
    """Open, check and share out a corpus of tokens."""
    folder = Path(data.corpus.removeprefix(TOKENS)).expanduser()
    if (folder / "train.bin").exists() and not (folder / META).exists():
        require(vocabulary_size > 0, "model.vocabulary_size", vocabulary_size, f"given, as {folder} does not name it")
        meta, token_bytes = nanogpt_meta(folder, vocabulary_size), None
    else:
        meta, token_bytes = read_meta(folder), np.load(folder / TOKEN_BYTES).astype(np.int64)
    name, asked = meta.tokenizer, data.validation_windows
    training, held_out = (Windows(folder, meta, split, data.sequence_length) for split in (TRAIN, VALIDATION))
    count, most = len(training), len(held_out)
    require(data.tokenizer in ("", name), "data.tokenizer", data.tokenizer, f"{name}, which made {folder}")
    require(replicas <= count, "replicas", replicas, f"at most {count}, the windows of {folder}")
    require(asked <= most, "data.validation_windows", asked, f"at most {most}, those of {folder}")
    tokens, held_out_tokens = meta.tokens(TRAIN), meta.tokens(VALIDATION)
    facts = {
        "corpus": data.corpus,
        "text": f"token shards: {tokens:,} training tokens, {held_out_tokens:,} for validation, tokenizer {name}",
        "fingerprint": meta.fingerprint,
        "vocabulary": name,
        "tokenizer_sha256": meta.tokenizer_sha256,
        "training_windows": count,
    }
    return Corpus(meta.vocabulary_size, token_bytes, training, held_out, data, replicas, facts)
