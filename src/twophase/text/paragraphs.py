"""Plain text as documents: paragraphs gathered as they are read, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

MIN_DOCUMENT = 1000
"""Characters that a document has at least, where the text lasts."""
MAX_PARAGRAPH = 10_000
"""Characters after which a paragraph ends at the next end of a line, or within the line if that is as long."""
SEPARATOR = "\n\n"


def documents(text: TextIO) -> Iterator[str]:
    """Yield paragraphs gathered until they have 1,000 characters; a shorter rest at the end joins the last document.

    Args:
        text: open for reading, with ends of lines made uniform.
    """
    ready: str | None = None  # held back, because the rest may have to join it
    pieces: list[str] = []
    size = 0
    for paragraph in _paragraphs(text):
        pieces.append(paragraph)
        size += len(paragraph)
        if size >= MIN_DOCUMENT:
            if ready is not None:
                yield ready
            ready, pieces, size = SEPARATOR.join(pieces), [], 0
    if pieces:
        rest = SEPARATOR.join(pieces)
        ready = rest if ready is None else ready + SEPARATOR + rest
    if ready is not None:
        yield ready


def _paragraphs(text: TextIO) -> Iterator[str]:
    """Yield what is between blank lines, in parts of at most about twice `MAX_PARAGRAPH` characters."""
    lines: list[str] = []
    size = 0
    for line, ended in _lines(text):
        blank = ended and not line.strip()
        if not blank:
            lines.append(line)
            size += len(line)
        if lines and (blank or size >= MAX_PARAGRAPH):
            yield "\n".join(lines)
            lines, size = [], 0
    if lines:
        yield "\n".join(lines)


def _lines(text: TextIO) -> Iterator[tuple[str, bool]]:
    """Yield lines without their ends, endless ones in parts cut at a space; and whether it is a whole line."""
    rest = ""
    while line := text.readline(MAX_PARAGRAPH):
        line = rest + line
        rest = ""
        if line.endswith("\n"):
            yield line[:-1], True
        elif len(line) < MAX_PARAGRAPH:
            yield line, True  # the last line of the file
        else:
            cut = line.rfind(" ") + 1 or len(line)
            yield line[:cut], False
            rest = line[cut:]
    if rest:
        yield rest, False
