"""Where text comes from: files named by words of the command line, read as a stream of documents from any place on.

A place in a source is a file and a number of records in it, so it can be written down, means the same in every version,
and needs nothing but reading again up to there. JSON lines and Parquet are read by `datasets` in streaming, one file at
a time, so a local copy of C4 and C4 on the hub go through the same lines. JSON is parsed here, line by line, and not by
`datasets`: its reader guesses a type for every column, and reads a file again as a whole when a guess turns out wrong.
"""

from __future__ import annotations

import collections
import contextlib
import glob
import gzip
import itertools
import json
import os
import queue
import tempfile
import threading
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from twophase.base.config import UsageError
from twophase.text.paragraphs import documents as gather

T = TypeVar("T")

C4 = "c4"
C4_TRAIN, C4_VALIDATION = 1024, 8
"""Files of the two splits of allenai/c4, configuration en."""
KINDS = {
    "json": (".json", ".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt", ".text", ".md"),
}
BATCH_BYTES, BATCH_DOCUMENTS = 2_000_000, 1000
MAX_DOCUMENT = 1_000_000
"""Characters of a document at most; longer ones are cut, so that one text cannot fill the memory."""
_OFFICIAL_VALIDATION = "c4-validation."


@dataclass(frozen=True)
class File:
    """A file of documents.

    Args:
        path: absolute, or an address on the hub; links are not followed, because names tell what files are.
        name: for people and for the record.
        kind: `json`, `parquet` or `text`.
        size: bytes; -1 on the hub.
    """

    path: str
    name: str
    kind: str
    size: int

    @property
    def remote(self) -> bool:
        """Whether it is on the hub."""
        return self.path.startswith("hf://")

    @property
    def place(self) -> str:
        """Where it really is: two names of one file have one place."""
        return self.path if self.remote else os.path.realpath(self.path)


@dataclass(frozen=True)
class Batch:
    """Some documents in order, and the place after them.

    Args:
        texts: documents, none blank, without lone surrogates.
        sizes: their UTF-8 bytes.
        file: number of the file in which the next document is.
        record: number of the next record in it.
    """

    texts: list[str]
    sizes: list[int]
    file: int
    record: int


# ------------------------------------------------------------------------------------------------------- which files


def find(words: Sequence[str], kind: str = "auto") -> tuple[list[File], list[File]]:
    """Return the files that some words name, and those of C4's validation split among them.

    Args:
        words: each `c4` (on the hub), a file, a folder, or a glob pattern; the order of words is kept, and files of one
            word are sorted by name.
        kind: `json`, `parquet` or `text`, or `auto` for what each name ends in.

    Raises:
        UsageError: a word that names nothing, or nothing that can be read; a file named twice.
    """
    files: list[File] = []
    for word in words:
        files += _files(word, kind)
    seen: set[str] = set()
    for file in files:
        if file.place in seen:
            raise UsageError(f"{file.name} is named twice; name each file once")
        seen.add(file.place)
    names = collections.Counter(file.name for file in files)
    files = [file if names[file.name] == 1 else replace(file, name=file.path) for file in files]
    official = [file for file in files if file.path.rpartition("/")[2].startswith(_OFFICIAL_VALIDATION)]
    return [file for file in files if file not in official], official


def _files(word: str, kind: str) -> list[File]:
    path = Path(word).expanduser()
    if word == C4 and not path.exists():
        return _c4()
    if path.is_dir():
        inside = sorted(inner for inner in path.rglob("*") if inner.is_file() and not inner.name.startswith("."))
        files = [file for inner in inside if (file := _file(inner, kind))]
        if not files:
            raise UsageError(f"{word}: the folder holds no file that ends in {_endings()}; name files, or give --kind")
        return files
    if path.exists():
        file = _file(path, kind)
        if file is None:
            raise UsageError(f"{word}: ends in none of {_endings()}; say what it is with --kind json, parquet or text")
        return [file]
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute patterns
    files = [file for match in matches if match.is_file() and (file := _file(match, kind))]
    if files:
        return files
    what = "matches no file of a kind that is read here" if glob.has_magic(word) else "there is no such file"
    raise UsageError(
        f"{word}: {what}; name files, folders or patterns of {_endings()} (relative to {Path.cwd()}), or c4"
    )


def _c4() -> list[File]:
    names = [f"c4-train.{i:05d}-of-{C4_TRAIN:05d}.json.gz" for i in range(C4_TRAIN)]
    names += [f"{_OFFICIAL_VALIDATION}{i:05d}-of-{C4_VALIDATION:05d}.json.gz" for i in range(C4_VALIDATION)]
    return [File(f"hf://datasets/allenai/c4/en/{name}", f"allenai/c4 en/{name}", "json", -1) for name in names]


def _file(path: Path, kind: str) -> File | None:
    name = path.name.lower().removesuffix(".gz")
    guess = next((each for each, endings in KINDS.items() if name.endswith(endings)), None)
    chosen = guess if kind == "auto" else kind
    if chosen is None:
        return None
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    return File(str(path.absolute()), path.name, chosen, size)


def _endings() -> str:
    return ", ".join(itertools.chain.from_iterable(KINDS.values())) + " (.gz too)"


# ------------------------------------------------------------------------------------------------------------ reading


def batches(
    files: Sequence[File], column: str = "text", *, file: int = 0, record: int = 0
) -> Generator[Batch, None, None]:
    """Return the documents of some files from a place on, read ahead in a thread.

    Args:
        files: from `find`.
        column: name of the text in JSON objects and Parquet tables.
        file: number of the first file to read.
        record: number of its first record to read.

    Yields:
        batches of at most 1,000 documents and about 2 MB of text; how documents are cut into batches means nothing.

    Raises:
        UsageError: a file that cannot be read, is damaged, or has no such column.
    """
    return ahead(_batches(files, column, file, record))


def _batches(files: Sequence[File], column: str, first: int, record: int) -> Iterator[Batch]:
    for number in range(first, len(files)):
        texts: list[str] = []
        sizes: list[int] = []
        pending = 0
        for text in _records(files[number], column, record):
            record += 1
            for part in _cut(text):
                whole, size = _clean(part)
                texts.append(whole)
                sizes.append(size)
                pending += size
            if pending >= BATCH_BYTES or len(texts) >= BATCH_DOCUMENTS:
                yield Batch(texts, sizes, number, record)
                texts, sizes, pending = [], [], 0
        record = 0
        yield Batch(texts, sizes, number + 1, 0)


def _cut(text: str | None) -> Iterator[str]:
    """Yield the parts of a record that become documents: none if it is blank, several if it is huge."""
    if text is None or not text.strip():
        return
    start, half = 0, MAX_DOCUMENT // 2
    while len(text) - start > MAX_DOCUMENT:  # by places, because cutting the rest off each time would copy it
        low, high = start + half, start + MAX_DOCUMENT
        end = max(text.rfind("\n", low, high), text.rfind(" ", low, high)) + 1 or high
        part = text[start:end]
        if part.strip():
            yield part
        start = end
    rest = text[start:]
    if rest.strip():
        yield rest


def _clean(text: str) -> tuple[str, int]:
    """Return a text that is Unicode, and its bytes; JSON can spell halves of surrogate pairs, which are not."""
    try:
        return text, len(text.encode())
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text, len(text.encode())


def _records(file: File, column: str, start: int) -> Iterator[str | None]:
    reader = {"json": _json_records, "parquet": _parquet_records, "text": _text_records}[file.kind]
    try:
        yield from reader(file, column, start)
    except UsageError:
        raise
    except UnicodeDecodeError:
        raise UsageError(f"{file.name}: is not UTF-8; convert it, for example with iconv -t utf-8") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(
            f"{file.name}: is not a whole gzip file ({error}); fetch it again under the same name and repeat the "
            f"command, which goes on from where it stopped"
        ) from None
    except Exception as error:  # datasets, pyarrow, fsspec and the hub's client each have errors of their own
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if file.remote:
            raise UsageError(
                f"{file.name}: cannot be read from the hub ({reason}); check the network and repeat the command, which "
                f"goes on from where it stopped, or fetch C4's .json.gz files elsewhere and name their folder"
            ) from None
        raise UsageError(
            f"{file.name}: cannot be read as {file.kind} ({reason}); check the file ({file.path}), and --kind"
        ) from None


def _text_records(file: File, _column: str, start: int) -> Iterator[str]:
    opened = gzip.open if file.path.lower().endswith(".gz") else open
    with opened(file.path, "rt", encoding="utf-8-sig") as lines:
        yield from itertools.islice(gather(lines), start, None)


def _json_records(file: File, column: str, start: int) -> Iterator[str | None]:
    """Yield the text of each line that is not blank; records are counted by lines."""
    for number, row in enumerate(_rows(file, "text", "text", start), start=start + 1):
        line = row.lstrip("\ufeff") if number == 1 else row
        yield _text_of(line, column, f"{file.name}: line {number:,}") if line.strip() else None


def _text_of(line: str, column: str, where: str) -> str | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise UsageError(
            f'{where} is not a JSON object ({line[:60]!r}); write one object a line, such as {{"{column}": "words"}}, '
            f"then repeat the command"
        )
    text = entry.get(column)
    if text is not None and not isinstance(text, str):
        raise UsageError(f"{where}: {column!r} is {type(text).__name__}, not text; choose another with --column")
    if column not in entry:
        raise UsageError(f"{where} has no {column!r}, but {', '.join(map(repr, entry))}; choose with --column")
    return text


def _parquet_records(file: File, column: str, start: int) -> Iterator[str | None]:
    return _rows(file, "parquet", column, start)


def _rows(file: File, builder: str, column: str, start: int) -> Iterator[Any]:
    """Yield the values of a column by `datasets` in streaming: of a table, or of lines for the builder `text`."""
    datasets = _datasets(file)
    if builder == "text" and not file.remote:
        _refuse_lists(file)
    options = {"chunksize": 1 << 20} if builder == "text" else {"batch_size": BATCH_DOCUMENTS}
    with tempfile.TemporaryDirectory(prefix="twophase-") as cache:  # it leaves a lock file for every file it opens
        path = file.path if file.remote else _plain_name(file, Path(cache))
        data = {"data_files": {"train": [path]}, "split": "train", "streaming": True, "cache_dir": cache}
        stream = datasets.load_dataset(builder, **data, **options)
        if builder == "parquet":
            columns = list(stream.column_names or ())
            if column not in columns:
                raise UsageError(
                    f"{file.name}: has no column {column!r}, but {', '.join(columns)}; choose with --column"
                )
            dtype = getattr(stream.features[column], "dtype", "no text")
            if dtype not in ("string", "large_string"):
                raise UsageError(f"{file.name}: the column {column!r} is {dtype}, not text; choose with --column")
            stream = datasets.load_dataset(builder, columns=[column], **data, **options)
        for table in stream.with_format("arrow").iter(batch_size=BATCH_DOCUMENTS):
            skipped = min(start, len(table))
            start -= skipped
            yield from table.column(column).slice(skipped).to_pylist()


def _plain_name(file: File, folder: Path) -> str:
    """Link to a file by a plain name: `datasets` takes names for patterns, and fails on brackets and stars."""
    link = folder / f"rows.{file.kind}{'.gz' if file.path.lower().endswith('.gz') else ''}"
    link.symlink_to(file.path)
    return str(link)


def _refuse_lists(file: File) -> None:
    """Refuse a JSON list, which would be read into memory as one line."""
    opened = gzip.open if file.path.lower().endswith(".gz") else open
    with opened(file.path, "rb") as stream:
        if stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            raise UsageError(
                f"{file.name}: is one JSON list, not JSON lines; write one object a line, for example with jq -c '.[]'"
            )


def _datasets(file: File) -> Any:
    try:
        import datasets  # noqa: PLC0415 - an optional package of two seconds
    except ImportError:
        raise UsageError(
            f"{file.name}: is read with the package datasets; run `pip install 'twophase[data]'`"
        ) from None
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # what it would say, our messages say
    datasets.disable_progress_bars()
    return datasets


def ahead(items: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Yield the same items, produced in a thread while earlier ones are used; at most `depth` wait."""
    waiting: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stop = threading.Event()

    def put(entry: tuple[bool, Any]) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put(entry, timeout=0.2)
                return

    def produce() -> None:
        try:
            for item in items:
                put((True, item))
                if stop.is_set():
                    return
            put((False, None))
        except BaseException as error:  # told to the user's thread, which raises it
            put((False, error))
        finally:
            close = getattr(items, "close", None)
            if close:
                close()

    thread = threading.Thread(target=produce, name="twophase-read", daemon=True)
    thread.start()
    try:
        while True:
            more, value = waiting.get()
            if more:
                yield value
            elif value is None:
                return
            else:
                raise value
    finally:
        stop.set()
        thread.join(timeout=5)  # not for ever: it may wait for a network
