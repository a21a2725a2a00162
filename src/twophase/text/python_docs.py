"""Documents from the running Python's library: its documentation, or its code; nothing is imported or run."""

from __future__ import annotations

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIN_DOCSTRING, MIN_CODE = 120, 200
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_documents(corpus: str) -> list[str]:
    """Return the texts of a corpus, each once, which takes about two seconds.

    Args:
        corpus: `python` for documentation topics, and docstrings of more than 120 characters; `python-code` for
            functions and classes of at least 200 characters, without docstrings.
    """
    texts = [*_topics(), *_docstrings()] if corpus == "python" else _code()
    return list(dict.fromkeys(texts))


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte that only this corpus reads
    except ImportError:  # some distributions package it apart
        return []
    return [topics[name].strip() for name in sorted(topics)]


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
            try:
                yield path.read_text(encoding="utf-8"), ast.parse(path.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError):  # a link to nowhere, a template, no UTF-8
                continue


def _documented(tree: ast.AST) -> Iterator[Any]:
    """Yield what may have a docstring, in the order of ast.walk, without its time for expressions."""
    nodes = [tree]
    for node in nodes:
        if isinstance(node, (ast.Module, *_DEFINITIONS)):
            yield node
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            nodes += getattr(node, field, ())


def _docstrings() -> Iterator[str]:
    for _, tree in _parsed():
        texts = [ast.get_docstring(node) for node in _documented(tree)]
        yield from (text for text in texts if text and len(text) > MIN_DOCSTRING)


def _code() -> Iterator[str]:
    """Yield the source of functions and classes, less the lines of their docstrings."""
    for content, tree in _parsed():
        lines = content.split("\n")
        for node in (node for node in tree.body if isinstance(node, _DEFINITIONS)):
            docstrings = [part.body[0] for part in _documented(node) if ast.get_docstring(part)]
            gone = {number for text in docstrings for number in range(text.lineno, text.end_lineno + 1)}
            kept = [number for number in range(node.lineno, (node.end_lineno or 0) + 1) if number not in gone]
            text = "\n".join(lines[number - 1] for number in kept).strip()
            if len(text) >= MIN_CODE:
                yield text
