"""Where text comes from: files of JSON lines, Parquet or plain text, and C4 on the hub, as streams of documents."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from twophase.errors import RunError, UsageError

C4 = "c4"
C4_FILES = {"train": 1024, "validation": 8}
"""Files of the two splits of allenai/c4, configuration en."""
JSON, PARQUET, TEXT = (".json", ".jsonl", ".ndjson"), (".parquet",), (".txt", ".text", ".md")
BATCH_DOCUMENTS, BATCH_CHARACTERS, CHUNK_CHARACTERS = 1000, 2_000_000, 16_000_000
MAX_DOCUMENT = 1_000_000
"""Characters of a prepared document; longer ones are cut, so that none fills the memory."""
MIN_DOCUMENT = 1000
"""Characters that a document of plain text has at least, where the text lasts."""


def optional(package: str, extra: str = "data") -> Any:
    """Import a package that one of this project's extras installs."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(f"needs the package {error.name}: run `pip install 'twophase[{extra}]'`") from None


def download(function: str, *names: str, **options: str) -> Path:
    """Call `hf_hub_download` or `snapshot_download`, which keep files in the hub's own cache."""
    call = getattr(optional("huggingface_hub"), function)
    try:
        return Path(call(*names, **options))
    except Exception as error:  # errors of its HTTP library too, which changes with its version
        reason = " ".join(str(error).split())
        raise RunError(f"{' '.join(names)}: cannot be downloaded; repeat the command to resume ({reason})") from error


@dataclass(frozen=True)
class Source:
    """A file of documents: its name for the record, its size in bytes (-1 on the hub), and its path here."""

    name: str
    size: int = -1
    path: Path | None = None

    @property
    def is_validation(self) -> bool:
        """True for a file of a validation split: its name has the word, as C4's files do."""
        return re.search(r"(?<![a-z])validation(?![a-z])", self.name.lower()) is not None

    def texts(self, column: str) -> Iterator[str]:
        """Yield the documents; a file on the hub is downloaded first, into the hub's own cache."""
        path = self.path or download("hf_hub_download", "allenai/c4", f"en/{self.name}", repo_type="dataset")
        return documents(path, column, CHUNK_CHARACTERS)


def find_sources(words: Sequence[str]) -> list[Source]:
    """Return the files that some words name: `c4`, files or folders, in order, those of a folder sorted by path."""
    found = [source for word in words for source in _sources(word)]
    if len(set(found)) < len(found):
        raise UsageError(f"{' '.join(words)}: must name each file once")
    return found


def _sources(word: str) -> list[Source]:
    if word == C4:
        counts = C4_FILES.items()
        return [Source(f"c4-{split}.{i:05d}-of-{n:05d}.json.gz") for split, n in counts for i in range(n)]
    path = Path(word).expanduser()
    paths = [path] if path.is_file() else sorted(path.rglob("*"))
    shown = [entry for entry in paths if not any(part.startswith(".") for part in entry.relative_to(path).parts)]
    files = [entry for entry in shown if entry.is_file() and _ending(entry) in JSON + PARQUET + TEXT]
    if not files:
        raise UsageError(f"{word}: must be c4, or name files of {' '.join(JSON + PARQUET + TEXT)} (.gz too), got none")
    return [Source(entry.name, entry.stat().st_size, entry.absolute()) for entry in files]


def _ending(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def documents(path: Path, column: str = "text", chunk: int = -1) -> Iterator[str]:
    """Yield the documents of one file that are not blank, read as its name says; gzip too.

    JSON lines and Parquet have a document a row, called `column`. Plain text is read whole, or `chunk` characters at a
    time. Its paragraphs are gathered until they have 1,000 characters; of a single one, its lines are.

    Raises:
        RunError: the file is damaged, not UTF-8, or has no such column.
    """
    ending = _ending(path)
    try:
        if ending in PARQUET:
            texts: Iterator[Any] = _parquet(path, column)
        else:
            texts = _json(path, column) if ending in JSON else _plain(path, chunk)
        yield from (text for text in texts if text is not None and text.strip())
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RunError(f"{path}: cannot be read as {ending or '.txt'} ({error!r})") from error


def _opened(path: Path) -> Any:
    opener = gzip.open if path.name.lower().endswith(".gz") else Path.open
    return opener(path, "rt", encoding="utf-8-sig")


def _json(path: Path, column: str) -> Iterator[Any]:
    with _opened(path) as lines:
        yield from (json.loads(line)[column] for line in lines if line.strip())


def _parquet(path: Path, column: str) -> Iterator[Any]:
    with optional("pyarrow.parquet").ParquetFile(path) as table:
        for rows in table.iter_batches(BATCH_DOCUMENTS, columns=[column]):
            yield from rows.column(column).to_pylist()


def _plain(path: Path, chunk: int) -> Iterator[str]:
    with _opened(path) as file:
        while text := file.read(chunk):
            texts = list(_gather(re.split(r"\n(?:[^\S\n]*\n)+", text), "\n\n"))
            by_lines = list(_gather(text.split("\n"), "\n")) if len(texts) == 1 else []
            yield from by_lines if len(by_lines) > 1 else texts


def _gather(pieces: Iterable[str], joint: str) -> Iterator[str]:
    """Yield neighbours, less blank ones, joined to `MIN_DOCUMENT` characters or more; a shorter rest joins the last."""
    ready: list[str] = []  # a document waits for the next, which may be too short
    pending: list[str] = []
    for piece in filter(str.strip, pieces):
        pending.append(piece)
        if sum(map(len, pending)) >= MIN_DOCUMENT:
            if ready:
                yield joint.join(ready)
            ready, pending = pending, []
    if ready or pending:
        yield joint.join([*ready, *pending])


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield documents in lists of at most 1,000 and about 2 million characters, long ones in parts.

    Halves of surrogate pairs, which JSON can spell but no tokenizer takes, become question marks.
    """
    batch: list[str] = []
    size = 0
    for text in texts:
        for start in range(0, len(text), MAX_DOCUMENT):
            batch.append(text[start : start + MAX_DOCUMENT].encode("utf-8", "replace").decode())
            size += len(batch[-1])
            if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
