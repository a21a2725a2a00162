"""Text to a folder of token shards: streamed, in memory that no corpus can fill, resumable by file.

A source file becomes one shard, which is finished when it has its name. Its bytes depend on documents and request.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tyro.conf import Positional

from twophase.config import require
from twophase.errors import UsageError
from twophase.files import replacing, sha256, write_atomic
from twophase.progress import meter
from twophase.text.shards import META, TOKEN_BYTES, TOKENIZER, TRAIN, VALIDATION, Meta, Shard, read_meta, write_meta
from twophase.text.sources import Source, batches, find_sources
from twophase.text.tokenizers import Tokenizer, load_tokenizer

REQUEST = "request.json"  # in the folder until it is finished; `meta.json` holds the request from then on
LIMITS = {TRAIN: "tokens", VALIDATION: "validation_tokens"}


@dataclass(frozen=True)
class Request:
    """Turn text into token shards; repeat the command to resume it."""

    source: Positional[tuple[str, ...]] = ()
    """.json.gz, .jsonl, .parquet or .txt files, folders of them, or c4, which is downloaded; files with the word
    `validation` in their names, as C4 has them, are the validation split."""
    out: str = ""
    """Folder of the shards."""
    tokenizer: str = "mistral"
    """mistral (of the installed mistral-common), bytes, a tokenizer.json, or a name on the hub."""
    end_of_text: str | None = None
    """Token that ends a document, where the tokenizer names none."""
    tokens: float | None = None
    """Stop after so many training tokens, at the end of a document, such as 3.3e9."""
    held_out: float = 0.005
    """Share of the documents that validate, chosen by a hash of their text, where no file does."""
    validation_tokens: float | None = None
    """Validation tokens at most, such as 10e6."""
    column: str = "text"
    """Name of the text in JSON objects and Parquet tables."""
    quiet: bool = False
    """Show no progress."""


def prepare(request: Request) -> Meta:
    """Make a folder of token shards, or resume an unfinished one; a finished one is left as it is."""
    files = _files(request)
    held_out = 0.0 if files[0][0] == VALIDATION else request.held_out
    options = {name: getattr(request, name) for name in ("tokenizer", "end_of_text", "column", *LIMITS.values())}
    record = options | {"held_out": held_out, "files": [f"{split} {file.name} {file.size}" for split, _, file in files]}
    folder = Path(request.out).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _begin(folder, request, record)
    left = {split: getattr(request, name) or math.inf for split, name in LIMITS.items()}
    total = int(request.tokens or len(files))
    with meter("prepare", total, quiet=request.quiet) as show:
        for done, (split, number, file) in enumerate(files):
            splits = (TRAIN, VALIDATION) if split == TRAIN and held_out else (split,)
            paths = {name: folder / f"{name}-{number:05d}.bin" for name in splits}
            if left[split] <= 0:
                continue
            if all(path.exists() for path in paths.values()):
                for name, path in paths.items():
                    left[name] -= path.stat().st_size // np.dtype(tokenizer.dtype).itemsize
            else:
                for _ in _write(file.texts(request.column), paths, left, held_out, tokenizer):
                    show(total - int(max(left[TRAIN], 0)) if request.tokens else done, file.name)
        show(total, "")
    if not (folder / META).exists():
        _finish(folder, tokenizer, record)
    (folder / REQUEST).unlink(missing_ok=True)
    return read_meta(folder)


def _files(request: Request) -> list[tuple[str, int, Source]]:
    """Check a request and return split, number and source of its files, those of a validation split first."""
    if not request.source or not request.out:
        raise UsageError("SOURCE and --out must be given, such as c4 --out data/c4")
    require(0 <= request.held_out < 1, "held_out", request.held_out, "at least 0 and below 1")
    for name in LIMITS.values():
        value = getattr(request, name)
        require(value is None or value >= 1, name, value, "at least 1")
    out = Path(request.out).expanduser().absolute()
    splits: dict[str, list[Source]] = {VALIDATION: [], TRAIN: []}
    for file in find_sources(request.source):
        if file.path is None or out not in file.path.parents:
            apart = re.search(r"(?<![a-z])validation(?![a-z])", file.name.lower())
            splits[VALIDATION if apart else TRAIN].append(file)
    if not splits[TRAIN]:
        raise UsageError(f"SOURCE: must have files to train on, got {' '.join(request.source)}")
    return [(split, number, file) for split, found in splits.items() for number, file in enumerate(found)]


def _begin(folder: Path, request: Request, record: dict[str, Any]) -> Tokenizer:
    """Return the folder's tokenizer; a new folder gets it first, and then the request."""
    begun = [folder / name for name in (META, REQUEST) if (folder / name).exists()]
    if begun:
        before = json.loads(begun[0].read_text())["request"]
        if other := [name for name in record if record[name] != before.get(name)]:
            raise UsageError(f"--out: must be another folder, for {folder} was made with other {', '.join(other)}")
        return load_tokenizer(str(folder / TOKENIZER))
    if any(folder.glob("*.bin")):  # of another program: they would count as finished shards
        raise UsageError(f"--out: must be a folder without .bin files, got {folder}")
    tokenizer = load_tokenizer(request.tokenizer, request.end_of_text)
    tokenizer.save(folder / TOKENIZER)
    np.save(folder / TOKEN_BYTES, tokenizer.token_bytes)
    write_atomic(folder / REQUEST, json.dumps({"request": record}))
    return tokenizer


def _write(
    texts: Iterator[str], paths: Mapping[str, Path], left: dict[str, float], held_out: float, tokenizer: Tokenizer
) -> Iterator[None]:
    """Write the shards of one source file, which get their names at its end; yields after each batch of documents.

    Of two paths the second takes the share that is held out. `left`, the tokens that each split takes, counts down.
    """
    end = np.array([tokenizer.end_of_text], tokenizer.dtype).tobytes()
    main = next(iter(paths))
    with ExitStack() as stack:
        writing = {split: stack.enter_context(replacing(path)) for split, path in paths.items()}
        shards = {split: stack.enter_context(path.open("wb")) for split, path in writing.items()}
        stream, reader = batches(texts), stack.enter_context(ThreadPoolExecutor(1))
        batch = next(stream, None)
        while batch and left[main] > 0:
            following = reader.submit(next, stream, None)  # it is read while this one is encoded
            for text, ids in zip(batch, tokenizer.encode(batch), strict=True):
                split = VALIDATION if len(paths) > 1 and is_held_out(text, held_out) else main
                if left[split] > 0:
                    shards[split].write(ids.tobytes() + end)
                    left[split] -= len(ids) + 1
            yield
            batch = following.result()


def _finish(folder: Path, tokenizer: Tokenizer, record: dict[str, Any]) -> None:
    """Write `meta.json`, which marks the folder as finished, from the shards that are there."""
    splits = {}
    for split in (TRAIN, VALIDATION):
        sizes = {path: path.stat().st_size for path in sorted(folder.glob(f"{split}-*.bin"))}
        width = np.dtype(tokenizer.dtype).itemsize
        splits[split] = [Shard(path.name, size // width, sha256(path)) for path, size in sizes.items()]
        if not sum(sizes.values()) and (split == TRAIN or record["held_out"]):
            raise UsageError(f"{folder}: has no {split} text; delete it and give more, or another --held-out")
    for leftover in folder.rglob(".*.tmp"):  # of killed writers
        leftover.unlink(missing_ok=True)
    size, end, name = tokenizer.vocabulary_size, tokenizer.end_of_text, record["tokenizer"]
    write_meta(folder, Meta(name, tokenizer.sha256, size, end, tokenizer.dtype, record, splits))


def is_held_out(text: str, share: float) -> bool:
    """Return whether a document validates: a pure function of its text, so that equal documents are on one side."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
