"""Where text comes from: files named on the command line, read as a stream of documents from any place on.

A place in a source is a file and a number of records in it. It can be written down, means the same in every version,
and needs nothing but reading again up to there. C4 on the hub is read like a local copy: gzip streams of JSON lines.
"""

from __future__ import annotations

import collections
import glob
import gzip
import io
import itertools
import logging
import os
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

from twophase.base.config import fingerprint
from twophase.base.errors import UsageError, is_out_of_memory
from twophase.base.reading import check_regular, json_object

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
MIN_DOCUMENT = 1000
"""Characters that a document of plain text has at least, where the text lasts."""
MAX_PARAGRAPH = 10_000
"""Characters after which a paragraph ends at the next end of a line, or within the line if that is as long."""
_SEPARATOR = "\n\n"
_OFFICIAL_VALIDATION = "c4-validation."
_ENDINGS = ", ".join(itertools.chain.from_iterable(KINDS.values())) + " (.gz too)"


@dataclass(frozen=True)
class File:
    """A file of documents: JSON lines, Parquet or text.

    Its path is absolute, or an address on the hub, where its size is -1; links are not followed, because names give the
    kind. Its name is for people and for the record.
    """

    path: str
    name: str
    kind: str
    size: int

    @property
    def remote(self) -> bool:
        """True if it is on the hub."""
        return self.path.startswith("hf://")

    @property
    def place(self) -> str:
        """Real path: two names of one file have one place."""
        return self.path if self.remote else os.path.realpath(self.path)


@dataclass(frozen=True)
class Batch:
    """Documents in order, none blank, without lone surrogates; their UTF-8 bytes; and the place after them.

    `file` and `record` are the numbers of the next file and of its next record. `before` is the digest of the record
    before that, empty at a file's beginning.
    """

    texts: list[str]
    sizes: list[int]
    file: int
    record: int
    before: str = ""


# ------------------------------------------------------------------------------------------------------- which files


def find(sources: Sequence[str], kind: str = "auto", *, outside: Path | None = None) -> tuple[list[File], list[File]]:
    """Return the files of some sources, and those of C4's validation split among them.

    Args:
        sources: `c4` (on the hub), files, folders, or glob patterns, in order; the files of each are sorted by name.
        kind: `json`, `parquet` or `text`, or `auto` for what each name ends in.
        outside: a folder whose files are left out: where the result goes.

    Raises:
        UsageError: a word that names nothing, or nothing that can be read; a file named twice.
    """
    files = [file for word in sources for file in _files(word, kind)]
    if outside is not None:
        folder = outside.resolve()
        inside = [file for file in files if folder in Path(file.place).parents]
        named = {str(Path(os.path.expanduser(word)).absolute()) for word in sources}  # noqa: PTH111 - as in _files
        if inside and (inside == files or any(file.path in named for file in inside)):
            raise UsageError(f"{inside[0].path}: lies in --out {outside}; choose another --out")
        files = [file for file in files if file not in inside]
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
    path = Path(os.path.expanduser(word))  # noqa: PTH111 - Path's raises for unknown users
    if word == C4 and not path.exists():
        return _c4()
    if path.is_dir():
        inner = (entry for entry in path.rglob("*") if entry.is_file())
        paths = sorted(entry for entry in inner if not any(p.startswith(".") for p in entry.relative_to(path).parts))
        fault = f"the folder holds no file that ends in {_ENDINGS}; name files, or give --kind"
    elif path.exists():
        paths = [path]
        fault = f"ends in none of {_ENDINGS}; say what it is with --kind json, parquet or text"
    else:
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 - patterns may be absolute
        paths = sorted(Path(match) for match in matches if Path(match).is_file())
        reason = "matches no file of a kind that is read here" if glob.has_magic(word) else "there is no such file"
        fault = f"{reason}; name files, folders or patterns of {_ENDINGS} (relative to {Path.cwd()}), or c4"
    files = [file for path in paths if (file := _file(path, kind))]
    if not files:
        raise UsageError(f"{word}: {fault}")
    return files


def _c4() -> list[File]:
    names = [f"c4-train.{i:05d}-of-{C4_TRAIN:05d}.json.gz" for i in range(C4_TRAIN)]
    names += [f"{_OFFICIAL_VALIDATION}{i:05d}-of-{C4_VALIDATION:05d}.json.gz" for i in range(C4_VALIDATION)]
    return [File(f"hf://datasets/allenai/c4/en/{name}", f"allenai/c4 en/{name}", "json", -1) for name in names]


def _kind(path: Path) -> str:
    """Return the kind that a file's name tells; nothing where it tells none."""
    name = path.name.lower().removesuffix(".gz")
    return next((kind for kind, endings in KINDS.items() if name.endswith(endings)), "")


def _file(path: Path, kind: str) -> File | None:
    """Return a file with its kind; None if its name does not tell."""
    kind = _kind(path) if kind == "auto" else kind
    if not kind:
        return None
    try:
        return File(str(path.absolute()), path.name, kind, check_regular(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); name files that can be read again") from None


# ------------------------------------------------------------------------------------------------------------ reading


def batches(
    files: Sequence[File], column: str = "text", *, file: int = 0, record: int = 0, before: str = ""
) -> Generator[Batch, None, None]:
    """Yield the documents of some files from a place on, read ahead in a thread.

    A batch has at most 1,000 documents and about 2 MB of text; how documents are cut into batches means nothing. The
    column names the text in JSON objects and Parquet tables; the place is one that an earlier batch has noted.

    Raises:
        UsageError: the file has changed, or cannot be read.
    """
    return ahead(_batches(files, column, file, record, before))


def _batches(files: Sequence[File], column: str, first: int, record: int, before: str) -> Generator[Batch, None, None]:
    for number in range(first, len(files)):
        texts: list[str] = []
        sizes: list[int] = []
        pending = 0
        records = _records(files[number], column, record - bool(before))
        if before and fingerprint(next(records, None) or "") != before:
            raise UsageError(
                f"{files[number].path}: is not the file of which a part has been prepared; put that back, or prepare "
                "this one in another folder"
            )
        before = ""
        for text in records:
            record += 1
            for part in _cut(text):
                whole, size = _clean(part)
                texts.append(whole)
                sizes.append(size)
                pending += size
            if pending >= BATCH_BYTES or len(texts) >= BATCH_DOCUMENTS:
                yield Batch(texts, sizes, number, record, fingerprint(text or ""))
                texts, sizes, pending = [], [], 0
        record = 0
        yield Batch(texts, sizes, number + 1, 0)


def _cut(text: str | None) -> Iterator[str]:
    """Yield the parts of a record that become documents: none if it is blank, several if it is huge."""
    start, text = 0, text or ""
    while start < len(text):  # by places, because cutting the rest off each time would copy it
        low, high = start + MAX_DOCUMENT // 2, start + MAX_DOCUMENT
        blank = max(text.rfind("\n", low, high), text.rfind(" ", low, high)) + 1
        end = len(text) if len(text) <= high else blank or high
        part = text[start:end]
        if part.strip():
            yield part
        start = end


def _clean(text: str) -> tuple[str, int]:
    """Return a text that is Unicode, and its bytes; JSON can spell halves of surrogate pairs, which are not."""
    try:
        return text, len(text.encode())
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text, len(text.encode())


def _records(file: File, column: str, start: int) -> Iterator[str | None]:
    """Yield the texts of a file from a record on."""
    with _refusals(file):
        if file.kind == "parquet":
            yield from _parquet_records(file, column, start)
            return
        with _opened(file) as lines:
            if file.kind == "text":
                yield from itertools.islice(paragraphs(lines), start, None)
            else:
                yield from _json_records(file, lines, column, start)


def documents(path: Path, name: str) -> list[str]:
    """Return the documents of one file that is read as a whole: JSON lines, or plain text; gzip too.

    Of plain text, paragraphs are gathered until they have 1,000 characters, or lines where paragraphs would make only
    one document.

    Args:
        path: the file; JSON lines have names in `.jsonl`, `.ndjson` or `.json`.
        name: name of the file in messages.

    Raises:
        UsageError: a file that cannot be read or is damaged.
    """
    file = File(str(path.absolute()), name, "json" if _kind(path) == "json" else "text", 0)
    if file.kind == "json":
        return [text for text in _records(file, "text", 0) if text and text.strip()]
    with _refusals(file), _opened(file) as lines:
        text = lines.read()
    texts = list(_gather(re.split(r"\n(?:[^\S\n]*\n)+", text), _SEPARATOR))
    by_lines = list(_gather(text.split("\n"), "\n")) if len(texts) == 1 else []
    return by_lines if len(by_lines) > 1 else texts


@contextmanager
def _refusals(file: File) -> Iterator[None]:
    """Turn every error of reading a file into one message."""
    try:
        yield
    except (UsageError, MemoryError):
        raise
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{file.name}: is read with the package {error.name}; run `pip install 'twophase[data]'`"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(
            f"{file.name}: is not UTF-8; convert it, for example with iconv -f latin1 -t utf-8, or -f utf-16 if it "
            "begins with the bytes ff fe"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(
            f"{file.name}: is not a whole gzip file ({error}); fetch it again under the same name and repeat the "
            "command"
        ) from None
    except Exception as error:  # pyarrow, fsspec and the hub's client raise many types
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if file.remote:
            raise UsageError(
                f"{file.name}: cannot be read from the hub ({reason}). Check the network and repeat the command, "
                "which resumes, or fetch C4's .json.gz files elsewhere and name their folder"
            ) from None
        raise UsageError(
            f"{file.name}: cannot be read as {file.kind} ({reason}); name one file that can be read ({file.path})"
        ) from None


@contextmanager
def _opened(file: File) -> Iterator[io.TextIOWrapper]:
    """Open a file of lines, packed or not, here or on the hub."""
    if not file.remote:
        check_regular(Path(file.path))
    with _hub_file(file) if file.remote else Path(file.path).open("rb") as source:
        stream: Any = gzip.GzipFile(fileobj=source) if file.path.lower().endswith(".gz") else source
        with io.TextIOWrapper(stream, encoding="utf-8-sig") as lines:
            yield lines


def _hub_file(file: File) -> Any:
    from huggingface_hub import HfFileSystem  # noqa: PLC0415 - an optional package

    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # our messages say what its warnings would
    return HfFileSystem().open(file.path, "rb")


def _json_records(file: File, lines: io.TextIOWrapper, column: str, start: int) -> Iterator[str | None]:
    """Yield the text of each line, None for a blank one; records are counted by lines."""
    stream: Any = lines.buffer
    beginning = stream.peek(64)[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
    if beginning.startswith(b"["):  # one line that may fill the memory
        raise UsageError(
            f"{file.name}: is one JSON list, not JSON lines; write one object a line, for example with jq -c '.[]'"
        )
    for number, line in enumerate(itertools.islice(lines, start, None), start + 1):
        if not line.strip():
            yield None
            continue
        where = f"{file.name}: line {number:,}"
        try:
            entry = json_object(line)
        except ValueError:
            raise UsageError(
                f'{where} is not a JSON object ({line[:60]!r}); write one object a line, such as {{"{column}": '
                f'"words"}}, then repeat the command'
            ) from None
        text = entry.get(column)
        if text is not None and not isinstance(text, str):
            raise UsageError(f"{where}: {column!r} is {type(text).__name__}, not text; choose another with --column")
        if column not in entry:
            raise UsageError(
                f"{where} has no {column!r}, but {', '.join(map(repr, entry))}; `data prepare` chooses with --column"
            )
        yield text


def _parquet_records(file: File, column: str, start: int) -> Iterator[str | None]:
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415 - an optional package

    with ParquetFile(file.path) as table:
        types = {field.name: str(field.type) for field in table.schema_arrow}
        if column not in types:
            raise UsageError(f"{file.name}: has no column {column!r}, but {', '.join(types)}; choose with --column")
        kind = types[column].removeprefix("dictionary<values=").partition(",")[0]  # categories, as pandas writes them
        if kind not in ("string", "large_string", "string_view"):
            raise UsageError(f"{file.name}: the column {column!r} is {types[column]}, not text; choose with --column")
        for rows in table.iter_batches(BATCH_DOCUMENTS, columns=[column]):
            skipped = min(start, len(rows))
            start -= skipped
            yield from rows.column(0).slice(skipped).to_pylist()


def ahead(items: Generator[T, None, None]) -> Generator[T, None, None]:
    """Yield the same items, each produced in a thread while the one before is used."""
    with closing(items), ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, items, None)
        while (item := future.result()) is not None:
            future = thread.submit(next, items, None)
            yield item


# --------------------------------------------------------------------------------------------------------- plain text


def paragraphs(text: TextIO) -> Iterator[str]:
    """Yield paragraphs gathered to documents of at least 1,000 characters, where the text lasts."""
    return _gather(_paragraphs(text), _SEPARATOR)


def _gather(pieces: Iterable[str], joint: str) -> Iterator[str]:
    """Yield neighbours, less blank ones, joined to `MIN_DOCUMENT` characters or more; a shorter rest joins the last."""
    ready: list[str] = []  # a document waits, because the rest may have to join it
    pending: list[str] = []
    size = 0
    for piece in filter(str.strip, pieces):
        pending.append(piece)
        size += len(piece)
        if size >= MIN_DOCUMENT:
            if ready:
                yield joint.join(ready)
            ready, pending, size = pending, [], 0
    if ready or pending:
        yield joint.join([*ready, *pending])


def _paragraphs(text: TextIO) -> Iterator[str]:
    """Yield what is between blank lines, in parts of at most about twice `MAX_PARAGRAPH` characters."""
    lines: list[str] = []
    size, rest = 0, ""  # the rest is that of an endless line, which is cut at spaces
    while line := text.readline(MAX_PARAGRAPH):
        line, rest = rest + line, ""
        if not line.endswith("\n") and len(line) >= MAX_PARAGRAPH:
            cut = line.rfind(" ") + 1 or len(line)
            line, rest = line[:cut], line[cut:]
            is_blank, is_cut = False, True
        else:
            line = line.removesuffix("\n")
            is_blank, is_cut = not line.strip(), False
        if not is_blank:
            lines.append(line)
            size += len(line)
        if lines and (is_blank or is_cut or size >= MAX_PARAGRAPH):
            yield "\n".join(lines)
            lines, size = [], 0
    if lines or rest:
        yield "\n".join([*lines, *([rest] if rest else [])])
