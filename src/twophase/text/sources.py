"""Where text comes from: JSON lines, Parquet, plain text, C4 on the hub, and the running Python's library."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from twophase.errors import RunError, UsageError

C4_FILES = {"train": 1024, "validation": 8}
"""Files of the two splits of allenai/c4, configuration en."""
JSON, PARQUET = (".json", ".jsonl", ".ndjson"), ".parquet"
ENDINGS = (*JSON, PARQUET, ".txt", ".text", ".md")
BATCH_DOCUMENTS, BATCH_CHARACTERS, CHUNK_CHARACTERS = 1000, 2_000_000, 16_000_000
MAX_DOCUMENT = 1_000_000
"""Characters of a prepared document; longer ones are cut, so that none fills the memory."""
MIN_DOCUMENT, MIN_DOCSTRING, MIN_CODE = 1000, 120, 200
"""Characters of a document of plain text, where the text lasts, and of Python's library."""
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


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
    """A file of documents: its name for the record, its size in bytes and path here; of one on the hub -1 and None."""

    name: str
    size: int = -1
    path: Path | None = None

    def texts(self, column: str) -> Iterator[str]:
        """Yield the documents; a file on the hub is downloaded first."""
        path = self.path or download("hf_hub_download", "allenai/c4", f"en/{self.name}", repo_type="dataset")
        return documents(path, column, CHUNK_CHARACTERS)


def find_sources(words: Sequence[str]) -> list[Source]:
    """Return the files that some words name: `c4`, files or folders, in order, those of a folder sorted by path."""
    sources = []
    for word in words:
        if word == "c4":
            counts = C4_FILES.items()
            sources += [Source(f"c4-{split}.{i:05d}-of-{n:05d}.json.gz") for split, n in counts for i in range(n)]
            continue
        path = Path(word).expanduser()
        paths = [path] if path.is_file() else sorted(path.rglob("*"))
        shown = [entry for entry in paths if not any(part.startswith(".") for part in entry.relative_to(path).parts)]
        files = [entry for entry in shown if entry.is_file() and _ending(entry) in ENDINGS]
        if not files:
            raise UsageError(f"{word}: must be c4, or name files of {' '.join(ENDINGS)} (.gz too), got none")
        sources += [Source(entry.name, entry.stat().st_size, entry.absolute()) for entry in files]
    if len(set(sources)) < len(sources):
        raise UsageError(f"{' '.join(words)}: must name each file once")
    return sources


def _ending(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def documents(path: Path, column: str = "text", chunk: int = -1) -> Iterator[str]:
    """Yield the documents of one file that are not blank, read as its name says; gzip too.

    JSON lines and Parquet have a document a row, called `column`. Plain text is read whole, or `chunk` characters at a
    time. Its paragraphs are gathered until they have 1,000 characters; of a single one, its lines are.

    Raises:
        RunError: the file is damaged, not UTF-8, or has no such column.
    """
    try:
        for text in _rows(path, column, chunk):
            if text is not None and text.strip():
                yield text
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RunError(f"{path}: cannot be read as {_ending(path) or '.txt'} ({error!r})") from error


def _rows(path: Path, column: str, chunk: int) -> Iterator[Any]:
    ending = _ending(path)
    if ending == PARQUET:
        with optional("pyarrow.parquet").ParquetFile(path) as table:
            for rows in table.iter_batches(BATCH_DOCUMENTS, columns=[column]):
                yield from rows.column(column).to_pylist()
        return
    opener: Any = gzip.open if path.name.lower().endswith(".gz") else Path.open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        if ending in JSON:
            yield from (json.loads(line)[column] for line in file if line.strip())
            return
        while text := file.read(chunk):
            paragraphs = _gathered(re.split(r"\n(?:[^\S\n]*\n)+", text), "\n\n")
            lines = _gathered(text.split("\n"), "\n") if len(paragraphs) == 1 else []
            yield from lines if len(lines) > 1 else paragraphs


def _gathered(pieces: Sequence[str], joint: str) -> list[str]:
    """Return neighbours, less blank ones, joined to `MIN_DOCUMENT` characters; a shorter rest joins the last."""
    groups: list[list[str]] = []
    size = MIN_DOCUMENT
    for piece in filter(str.strip, pieces):
        if size >= MIN_DOCUMENT:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += len(piece)
    if size < MIN_DOCUMENT and len(groups) > 1:
        groups[-2:] = [groups[-2] + groups[-1]]
    return [joint.join(group) for group in groups]


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


# ---------------------------------------------------------------------------------------------- Python's library


def python_documents(corpus: str) -> list[str]:
    """Return the texts of a corpus, each once, which takes about two seconds; nothing is imported or run.

    `python` is documentation topics, and docstrings of more than 120 characters; `python-code` functions and classes of
    at least 200 characters, without docstrings.
    """
    if corpus == "python-code":
        return list(dict.fromkeys(text for file, tree in _parsed() for text in _code(file.split("\n"), tree)))
    texts: list[str] = []
    with suppress(ImportError):  # some distributions package it apart
        from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte that only this corpus reads

        texts += [topics[name].strip() for name in sorted(topics)]
    docstrings = (ast.get_docstring(node) for _, tree in _parsed() for node in _documented(tree))
    return list(dict.fromkeys([*texts, *(text for text in docstrings if text and len(text) > MIN_DOCSTRING)]))


def _parsed() -> Iterator[tuple[str, ast.Module]]:
    """Yield text and syntax tree of each file of the library, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in foreign files
        for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
            # A link to nowhere, a template, no UTF-8.
            with suppress(OSError, SyntaxError, ValueError, RecursionError):
                yield path.read_text(encoding="utf-8"), ast.parse(path.read_bytes())


def _documented(tree: ast.AST) -> Iterator[Any]:
    """Yield what may have a docstring, in the order of ast.walk, without its time for expressions."""
    nodes = [tree]
    for node in nodes:
        if isinstance(node, (ast.Module, *_DEFINITIONS)):
            yield node
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            nodes += getattr(node, field, ())


def _code(lines: list[str], tree: ast.Module) -> Iterator[str]:
    """Yield the source of functions and classes, less the lines of their docstrings."""
    for node in (node for node in tree.body if isinstance(node, _DEFINITIONS)):
        docstrings = [part.body[0] for part in _documented(node) if ast.get_docstring(part)]
        gone = {number for text in docstrings for number in range(text.lineno, text.end_lineno + 1)}
        kept = [number for number in range(node.lineno, (node.end_lineno or 0) + 1) if number not in gone]
        text = "\n".join(lines[number - 1] for number in kept).strip()
        if len(text) >= MIN_CODE:
            yield text
