"""Text to train on: documents, what is held out of them, and the windows that each replica reads."""

from __future__ import annotations

import ast
import contextlib
import gzip
import hashlib
import json
import os
import platform
import re
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twophase.base.config import UsageError
from twophase.base.files import write_atomic
from twophase.tasks.lm.config import DataConfig
from twophase.tasks.lm.shard_corpus import ShardCorpus, build_shards
from twophase.tasks.lm.tokens import Ids, Vocabulary, vocabulary

SEPARATOR = "\n\n"
TOKENS = "tokens:"
MIN_DOCUMENT = 1000
"""Characters that a document of a plain text file has at least, where the text lasts."""
MIN_DOCSTRING = 120
MIN_CODE = 200
MAX_REPLACED = 0.01
SKIPPED = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"]
)
_CACHE_FORMAT = 1  # to be raised whenever other texts are taken from the same files

Windows = NDArray[np.int64]


@dataclass(frozen=True)
class Documents:
    """Texts in a fixed order.

    Args:
        texts: the documents, none of them blank and no two of them equal.
        description: one line for people.
        fingerprint: SHA-256 of the texts, hexadecimal; equal texts in equal order have equal fingerprints.
    """

    texts: tuple[str, ...]
    description: str
    fingerprint: str


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token streams and the windows that are read from them; made by `build_text`.

    Args:
        vocabulary: what the ids mean.
        training: (replicas, tokens), row r is the part of the text that replica r and no other reads.
        held_out: (tokens,), the held-out documents.
        sequence_length: tokens of a window.
        batch_size: windows of a batch.
        validation_windows: windows of a validation.
        description: facts for the record of a run, as plain values.
    """

    vocabulary: Vocabulary
    training: Ids
    held_out: Ids
    sequence_length: int
    batch_size: int
    validation_windows: int
    description: dict[str, Any]

    def batch(self, seed: int, step: int, replica: int) -> tuple[Windows, Windows]:
        """Random windows of a replica's part: a pure function of (seed, step, replica).

        Philox is a counter-based generator: its output is a hash of a key, here (seed, replica), and a counter, here
        the step. So a resumed run needs no generator state, replicas may be drawn in any order, on any process, and no
        draw depends on how many came before. Its raw words are used as they come, because NumPy promises that they stay
        the same over its versions, which it does not for distributions.

        Args:
            seed: seed of the run, >= 0; taken modulo 2^64.
            step: inner step, >= 0.
            replica: in [0, replicas).

        Returns:
            tokens and targets, each (batch_size, sequence_length) int64; targets are the tokens one place on.

        Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
        """
        part = self.training[replica]
        # The lowest counter word counts the words drawn within a step, so the step goes into the second one.
        words = np.random.Philox(key=seed % 2**64 + (replica << 64), counter=step << 64).random_raw(self.batch_size)
        # The remainder favours small starts by less than one part in 2^64 / tokens.
        return self._windows(part, words % np.uint64(len(part) - self.sequence_length))

    def validation(self) -> tuple[Windows, Windows]:
        """Windows spread evenly over the held-out text, from its first token to its last, the same for every seed.

        Returns:
            tokens and targets, each (validation_windows, sequence_length) int64.
        """
        last = len(self.held_out) - self.sequence_length - 1
        starts = np.arange(self.validation_windows) * last // max(self.validation_windows - 1, 1)
        return self._windows(self.held_out, starts)

    def _windows(self, stream: Ids, starts: NDArray[np.integer]) -> tuple[Windows, Windows]:
        places = starts.astype(np.int64)[:, None] + np.arange(self.sequence_length)
        return stream[places].astype(np.int64), stream[places + 1].astype(np.int64)


AnyCorpus = Corpus | ShardCorpus


def build(data: DataConfig, replicas: int, vocabulary_size: int = 0) -> AnyCorpus:
    """The corpus of a run: text, which is read and encoded now, or prepared tokens, which are mapped into memory.

    Args:
        data: where it is, and the sizes of windows and batches.
        replicas: number of equal parts of the training text.
        vocabulary_size: of the model, which the data's may not exceed; 0 means that it will be as large.

    Raises:
        UsageError: a corpus that cannot be read, is too short for its windows, or does not fit its vocabulary.
    """
    if data.corpus.startswith(TOKENS):
        return build_shards(data, replicas, vocabulary_size)
    size = vocabulary(data.vocabulary).size
    if 0 < vocabulary_size < size:
        raise UsageError(
            f"--model.vocabulary-size is {vocabulary_size}; --data.vocabulary {data.vocabulary} has {size} tokens; "
            "give at least that, or 0"
        )
    if data.tokenizer:
        raise UsageError(
            f"--data.tokenizer is {data.tokenizer!r}, but --data.corpus {data.corpus} is text, which --data.vocabulary "
            "encodes; leave it empty (--data.tokenizer ''), or prepare tokens with it: twophase data prepare --help"
        )
    return build_text(data, replicas)


def build_text(data: DataConfig, replicas: int) -> Corpus:
    """Load, shuffle, hold out, encode and share out a text.

    The documents are shuffled once and for all (not by the run's seed), so that every run on the same text is judged on
    the same held-out documents: whole documents, never windows of documents that were trained on.

    Args:
        data: corpus, vocabulary, window and batch sizes, held-out share of the documents.
        replicas: number of equal, contiguous parts of the training text.

    Raises:
        UsageError: as `build`.
    """
    documents = load_documents(data.corpus)
    count = len(documents.texts)
    order = np.argsort(np.random.Philox(key=0).random_raw(count), kind="stable")
    apart = min(max(round(data.held_out * count), 1), count - 1)
    held_out_text = SEPARATOR.join(documents.texts[i] for i in order[:apart])
    training_text = SEPARATOR.join(documents.texts[i] for i in order[apart:])

    vocab = vocabulary(data.vocabulary)
    characters = len(training_text) + len(held_out_text)
    replaced = (vocab.replaced(training_text) + vocab.replaced(held_out_text)) / characters
    if replaced > MAX_REPLACED:
        raise UsageError(
            f"--data.corpus {data.corpus}: {replaced:.1%} of its characters are not in the vocabulary "
            f"{data.vocabulary!r} (at most {MAX_REPLACED:.0%} may be); use --data.vocabulary bytes"
        )
    stream, held_out = vocab.encode(training_text), vocab.encode(held_out_text)
    part, needed = len(stream) // replicas, data.sequence_length + 1
    if part < needed:
        raise UsageError(
            f"--data.corpus {data.corpus}: {len(stream):,} training tokens over --replicas {replicas} leave {part:,} "
            f"to each, and a window takes {needed:,}; lower --data.sequence-length or --replicas, or use a larger file"
        )
    if len(held_out) < needed:
        raise UsageError(
            f"--data.corpus {data.corpus}: {apart} of {count} documents are held out, which are {len(held_out):,} "
            f"tokens, and a window takes {needed:,}; lower --data.sequence-length, raise --data.held-out, or "
            f"use a larger file"
        )
    return Corpus(
        vocabulary=vocab,
        training=stream[: part * replicas].reshape(replicas, part),
        held_out=held_out,
        sequence_length=data.sequence_length,
        batch_size=data.batch_size,
        validation_windows=data.validation_windows,
        description={
            "corpus": data.corpus,
            "text": documents.description,
            "fingerprint": documents.fingerprint,
            "documents": count,
            "held_out_documents": apart,
            "training_characters": len(training_text),
            "validation_characters": len(held_out_text),
            "replaced_share": replaced,
            "vocabulary": data.vocabulary,
        },
    )


def load_documents(corpus: str) -> Documents:
    """The documents of a corpus.

    Args:
        corpus: `python` for the documentation topics and longer docstrings of the running Python's standard library,
            `python-code` for its functions and classes of at least 200 characters without their docstrings, or
            `file:PATH` for a UTF-8 file: JSON lines with a string `text` each (`.jsonl`, `.json`), else plain text,
            whose paragraphs are gathered to documents of at least 1,000 characters. Either may end in `.gz`. Of equal
            documents, the first is kept.

    Raises:
        UsageError: another form, or a file that cannot be read, is damaged, or holds fewer than two documents.
    """
    named = f"--data.corpus {corpus}"
    if corpus == "python":
        source = f"documentation and docstrings of Python {platform.python_version()}"
        texts = _python_documents("python", lambda files: [*_topics(), *_docstrings(files)])
    elif corpus == "python-code":
        source = f"functions and classes of the library of Python {platform.python_version()}"
        texts = _python_documents("python-code", _code)
    elif corpus.startswith("file:") and corpus != "file:":
        path = Path(os.path.expanduser(corpus.removeprefix("file:")))  # noqa: PTH111 - Path's raises for unknown users
        source = f"text of {path.name}"
        texts = _file_documents(path, named)
    else:
        raise UsageError(
            f"--data.corpus is {corpus!r}; it must be python, python-code, file:PATH or tokens:PATH, for example "
            "file:notes.txt"
        )
    texts = list(dict.fromkeys(texts))  # a held-out document must not be trained on under another number
    if not texts:
        raise UsageError(f"{named}: holds no text; name a file that does, for example file:notes.txt")
    if len(texts) == 1:
        raise UsageError(
            f"{named}: is a single document of {len(texts[0]):,} characters, and at least one is to be held out; use a "
            f"larger file, or JSON lines with a text each"
        )
    description = f"{source}: {len(texts):,} documents, {sum(map(len, texts)):,} characters"
    return Documents(tuple(texts), description, fingerprint(texts))


def fingerprint(texts: Iterable[str]) -> str:
    """SHA-256 of some texts in their order, each with its length, so that the borders count as well."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def _file_documents(path: Path, named: str) -> list[str]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{named}: there is no such file; check the path (it is relative to {Path.cwd()})") from None
    except IsADirectoryError:
        raise UsageError(f"{named}: is a folder; name one file in it") from None
    except OSError as error:
        raise UsageError(f"{named}: cannot be read ({error.strerror}); check the path and its permissions") from None
    name = path.name.lower()
    if name.endswith(".gz"):
        name = name.removesuffix(".gz")
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"{named}: is not a whole gzip file ({error}); fetch it again or rename it") from None
    try:
        text = data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{named}: is not UTF-8 (byte {data[error.start]:#04x} at offset {error.start:,}); convert it, for example "
            f"with iconv -t utf-8"
        ) from None
    return _json_lines(text, named) if name.endswith((".jsonl", ".json")) else _plain_documents(text)


def _json_lines(text: str, named: str) -> list[str]:
    texts: list[str] = []
    # Not splitlines: it would also split at separators that JSON allows inside strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise UsageError(
                f'{named}: line {number:,} is not a JSON object with a string \'text\', such as {{"text": "words"}}; '
                f"write one object a line, or give the file a name that ends in .txt"
            )
        if entry["text"].strip():
            texts.append(entry["text"])
    return texts


def _plain_documents(text: str) -> list[str]:
    """Paragraphs gathered to documents, or lines where paragraphs would make only one."""
    texts = _gather(re.split(r"\n(?:[^\S\n]*\n)+", text), SEPARATOR)
    if len(texts) == 1:
        by_lines = _gather(text.split("\n"), "\n")
        return by_lines if len(by_lines) > 1 else texts
    return texts


def _gather(pieces: Iterable[str], joint: str) -> list[str]:
    """Neighbouring pieces joined until each has `MIN_DOCUMENT` characters; a shorter rest joins the last."""
    texts: list[str] = []
    open_pieces: list[str] = []
    size = 0
    for piece in pieces:
        if piece.strip():
            open_pieces.append(piece)
            size += len(piece)
        if size >= MIN_DOCUMENT:
            texts.append(joint.join(open_pieces))
            open_pieces, size = [], 0
    if open_pieces:
        rest = joint.join(open_pieces)
        texts[-1:] = [texts[-1] + joint + rest] if texts else [rest]
    return texts


def _python_documents(name: str, read: Callable[[list[Path]], Iterable[str]]) -> list[str]:
    """Documents of the running Python, from a cache where that holds exactly these files' texts.

    Args:
        name: of the corpus.
        read: from the library's files to the texts.
    """
    root = Path(sysconfig.get_path("stdlib"))
    stamps = sorted(_python_files(root))
    key = hashlib.sha256(
        json.dumps([_CACHE_FORMAT, platform.python_version(), str(root), stamps]).encode("utf-8", "surrogatepass")
    ).hexdigest()
    cache = _cache_file(root, name)
    texts = _read_cache(cache, key) if cache else None
    if texts is None:
        texts = list(dict.fromkeys(read([root / path for path, _, _ in stamps])))
        if cache:
            _write_cache(cache, key, texts)
    return texts


def _python_files(root: Path) -> Iterator[tuple[str, int, int]]:
    """Name, size in bytes and time of change in nanoseconds of each file that counts."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            with contextlib.suppress(OSError):  # a link to nowhere
                stat = path.stat()
                yield path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte that only this corpus reads
    except ImportError:  # some distributions package it apart
        return []
    return [topics[name].strip() for name in sorted(topics)]


def _docstrings(files: Iterable[Path]) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's invalid escapes
        for file in files:
            try:
                tree = ast.parse(file.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError):
                continue
            for node in ast.walk(tree):
                text = ast.get_docstring(node) if isinstance(node, documented) else None
                if text and len(text) > MIN_DOCSTRING:
                    yield text


def _code(files: Iterable[Path]) -> Iterator[str]:
    """The source of functions and classes, less the lines of their docstrings."""
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's invalid escapes
        for file in files:
            try:
                source = file.read_text(encoding="utf-8")
                tree = ast.parse(source)
            except (OSError, SyntaxError, ValueError, RecursionError):
                continue
            lines = source.split("\n")
            for node in tree.body:
                if not isinstance(node, documented):
                    continue
                parts = [part for part in ast.walk(node) if isinstance(part, documented) and ast.get_docstring(part)]
                docstrings = [part.body[0] for part in parts]
                gone = {n for text in docstrings for n in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
                numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                text = "\n".join(lines[number - 1] for number in numbers if number not in gone).strip()
                if len(text) >= MIN_CODE:
                    yield text


def _cache_file(root: Path, name: str = "python") -> Path | None:
    """Where the texts of the Python library at `root` are kept; None for a user without a home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # noqa: PTH117 - the specification has relative ones ignored, and Path("") is one
        folder = os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's raises where there is no home
    # One file a Python and place, overwritten when its key changes, so that upgrades leave no heap of old ones.
    place = hashlib.sha256(str(root).encode("utf-8", "surrogatepass")).hexdigest()[:12]
    path = Path(folder, "twophase", f"{name}-{platform.python_version()}-{place}.json")
    return path if path.is_absolute() else None


def _read_cache(path: Path, key: str) -> list[str] | None:
    """The texts of a cache file, or None if it is absent, damaged, or of other files."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        stored = json.loads(path.read_bytes())
        if stored["key"] == key and stored["fingerprint"] == fingerprint(stored["texts"]):
            return stored["texts"]
    return None


def _write_cache(path: Path, key: str, texts: list[str]) -> None:
    """Keep the texts for the next time, if that can be done; another process that is writing writes the same."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"key": key, "fingerprint": fingerprint(texts), "texts": texts}))
