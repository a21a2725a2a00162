"""Documents from the running Python's library: its documentation, or its code; nothing is imported or run."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from twophase.base.files import write_atomic
from twophase.base.reading import read_json_object

MIN_DOCSTRING, MIN_CODE = 120, 200
SKIPPED = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"]
)
_CACHE_FORMAT = 1  # to be raised whenever other texts are taken from the same files
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def library_documents(corpus: str) -> list[str]:
    """Return the texts of a corpus, each once, from a cache where that holds exactly these files' texts.

    Args:
        corpus: `python` for documentation topics, and docstrings of more than 120 characters; `python-code` for
            functions and classes of at least 200 characters, without docstrings.
    """
    root = Path(sysconfig.get_path("stdlib"))
    stamps = sorted(_python_files(root))
    key = hashlib.sha256(
        json.dumps([_CACHE_FORMAT, platform.python_version(), str(root), stamps]).encode("utf-8", "surrogatepass")
    ).hexdigest()
    cache = _cache_file(root, corpus)
    texts = _read_cache(cache, key) if cache else None
    if texts is None:
        files = [root / path for path, _, _ in stamps]
        texts = list(dict.fromkeys([*_topics(), *_docstrings(files)] if corpus == "python" else _code(files)))
        if cache:
            content = {"key": key, "fingerprint": fingerprint(texts), "texts": texts}
            # Where nothing can be written, the next run parses again; a process that writes meanwhile writes the same.
            with contextlib.suppress(OSError):
                cache.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(cache, json.dumps(content))
    return texts


def fingerprint(texts: Iterable[str]) -> str:
    """Return SHA-256 of some texts in their order, each with its length, so that the borders count as well."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def _python_files(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, size in bytes and time of change in nanoseconds of each file that counts."""
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


def _parsed(files: Iterable[Path]) -> Iterator[tuple[Path, ast.Module]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in foreign files
        for file in files:
            try:
                tree = ast.parse(file.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError):
                continue
            yield file, tree


def _docstrings(files: Iterable[Path]) -> Iterator[str]:
    for _, tree in _parsed(files):
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, (ast.Module, *_DEFINITIONS)) else None
            if text and len(text) > MIN_DOCSTRING:
                yield text


def _code(files: Iterable[Path]) -> Iterator[str]:
    """Yield the source of functions and classes, less the lines of their docstrings."""
    for file, tree in _parsed(files):
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if not isinstance(node, _DEFINITIONS):
                continue
            parts = [part for part in ast.walk(node) if isinstance(part, _DEFINITIONS) and ast.get_docstring(part)]
            docstrings = [part.body[0] for part in parts]
            gone = {n for text in docstrings for n in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
            numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            text = "\n".join(lines[number - 1] for number in numbers if number not in gone).strip()
            if len(text) >= MIN_CODE:
                yield text


def _cache_file(root: Path, corpus: str) -> Path | None:
    """Return where the texts of the library at `root` are cached; None for a user without a home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # noqa: PTH117 - the specification has relative ones ignored, and Path("") is one
        folder = os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's raises where there is no home
    # One file a Python and place, overwritten when its key changes, so that upgrades leave no old files.
    root_hash = hashlib.sha256(str(root).encode("utf-8", "surrogatepass")).hexdigest()[:12]
    path = Path(folder, "twophase", f"{corpus}-{platform.python_version()}-{root_hash}.json")
    return path if path.is_absolute() else None


def _read_cache(path: Path, key: str) -> list[str] | None:
    """Return the texts of a cache file, or None if it is absent, damaged, or of other files."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        stored = read_json_object(path)
        if stored["key"] == key and stored["fingerprint"] == fingerprint(stored["texts"]):
            return stored["texts"]
    return None
