"""Text to a folder of token shards, once: streamed, resumable after any kill, in memory that no corpus can fill.

    DIR/.preparing.json     while it is being made: the request, the place in the source, what counts of open shards
    DIR/.tmp-train-00003.bin  an open shard
    DIR/tokenizer/          first of all, so that a resumed command has the same one

A state is saved after every shard, and every half minute. The result depends on the documents and the request alone,
not on interruptions. Resumed and uninterrupted folders are equal byte for byte.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from twophase.base.config import UsageError, differences, fingerprint
from twophase.base.files import TEMPORARY, remove_leftovers, write_atomic
from twophase.base.progress import meter
from twophase.base.reading import read_json_object
from twophase.text.meta import META, TOKEN_BYTES, TOKENIZER, TRAIN, VALIDATION, Meta, read_meta, write_meta
from twophase.text.sources import BATCH_BYTES, Batch, File, batches, find
from twophase.text.tokenizer import BUILT_IN, LARGEST_BPE, SMALLEST_BPE, Ids, Tokenizer, load_tokenizer, train_bpe
from twophase.text.writer import Splits

STATE = ".preparing.json"
SAVE_SECONDS = 30.0
_BPE = "bpe:"


@dataclass(frozen=True)
class Request:
    """What is to be prepared: the options of `twophase data prepare`, which says what each of them means.

    `tokens` and `validation_tokens` are ids at which a split stops, at the end of a document; None takes all text.
    """

    sources: tuple[str, ...]
    out: Path
    kind: str = "auto"
    tokenizer: str = "mistral"
    end_of_text: str | None = None
    tokens: int | None = None
    validation: tuple[str, ...] = ()
    held_out: float = 0.005
    validation_tokens: int | None = None
    column: str = "text"
    shard_tokens: int = 100_000_000
    train_bytes: int = 50_000_000


@dataclass(frozen=True)
class _Plan:
    """The request with its files."""

    request: Request
    train: list[File]
    validation: list[File]

    @property
    def stages(self) -> list[tuple[str, list[File]]]:
        """Files in reading order: separate validation text first, then the training text."""
        return [*([(VALIDATION, self.validation)] if self.validation else []), (TRAIN, self.train)]

    @property
    def held_out(self) -> float:
        """Share of the training files' documents that is held out."""
        return 0.0 if self.validation else self.request.held_out

    def record(self) -> dict[str, Any]:
        """Return what decides the content of the folder, as plain values."""
        request = self.request
        names = ("kind", "end_of_text", "tokens", "validation_tokens", "column", "shard_tokens")
        return {
            "files": {file.name: file.size for file in self.train},
            "validation_files": {file.name: file.size for file in self.validation},
            "order": fingerprint([file.name for file in [*self.train, *self.validation]]),
            "tokenizer": request.tokenizer,
            "held_out": self.held_out,
            **{name: getattr(request, name) for name in names},
            **({"train_bytes": request.train_bytes} if request.tokenizer.startswith(_BPE) else {}),
        }


def prepare(request: Request, *, quiet: bool = True) -> Meta:
    """Make a folder of token shards, or resume an interrupted one, or return a finished one.

    Args:
        request: content of the folder.
        quiet: show no progress.

    Returns:
        The folder's description, also in its `meta.json`.

    Raises:
        UsageError: a value out of range, or a missing or damaged source or tokenizer. Also a folder that holds
            something else, cannot be written, or has tokens of another request.
        OSError: the disk is full. Complete parts stay, and repeating the call resumes from there.
    """
    plan = _planned(request)
    try:
        with _claimed(request.out) as folder:
            if not (folder / META).exists():
                return _Preparation(folder, plan).run(quiet=quiet)
            meta = read_meta(folder)
            changed = differences(plan.record(), meta.source)
            if changed:
                raise UsageError(
                    f"--out {folder}: is finished, and of another request ({_few(changed)}); name another folder"
                )
            with suppress(OSError):  # a folder that became read-only is finished all the same
                (folder / STATE).unlink(missing_ok=True)
            return meta
    except OSError as error:
        advice = "complete files stay there; repeat the command to resume"
        fault = f"--out {request.out}: cannot be written ({error.strerror or error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(f"{fault}; make room; {advice}") from None  # a failure while running, and no mistake
        raise UsageError(f"{fault}; make it writable; {advice}") from None


def _planned(request: Request) -> _Plan:
    """Check a request and find its files."""
    if not request.sources:
        raise UsageError("no source; name files, folders or patterns, or c4")
    if not 0 <= request.held_out < 1:
        raise UsageError(f"--held-out {request.held_out}: must be at least 0 and below 1, for example 0.005")
    for name in ("tokens", "validation_tokens", "shard_tokens", "train_bytes"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1, for example 10M")
    is_bpe, size = request.tokenizer.startswith(_BPE), request.tokenizer.removeprefix(_BPE)
    if is_bpe and not (re.fullmatch("[0-9]{1,7}", size) and SMALLEST_BPE <= int(size) <= LARGEST_BPE):
        raise UsageError(
            f"--tokenizer {request.tokenizer}: write bpe:SIZE, {SMALLEST_BPE} to {LARGEST_BPE}, as bpe:8000"
        )
    if request.end_of_text is not None and (is_bpe or request.tokenizer in BUILT_IN):
        raise UsageError(
            f"--end-of-text {request.end_of_text}: --tokenizer {request.tokenizer} has its own end of a text; leave "
            f"--end-of-text out"
        )
    train, validation = find(request.sources, request.kind, outside=request.out)
    if request.validation:
        others, official = find(request.validation, request.kind, outside=request.out)
        validation = [*(file for file in others if not file.remote), *official]  # of the word c4 its validation split
    if not train:
        raise UsageError("the sources are validation files of C4 only; name its c4-train files as well")
    trained = {file.place for file in train}
    both = [file.path for file in validation if file.place in trained]
    if both:
        raise UsageError(f"--validation {min(both)}: is also trained on; name other files")
    return _Plan(request, train, validation)


@contextmanager
def _claimed(out: Path) -> Iterator[Path]:
    """Make the folder, check that it holds nothing else, and lock it against a second process."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; name a folder")
    if out.is_dir() and not (out / META).exists() and not (out / STATE).exists():
        others = sorted(path.name for path in out.iterdir() if not path.name.startswith(TEMPORARY))
        if others:
            raise UsageError(f"--out {out}: holds something else ({', '.join(others[:3])}); name a new or empty folder")
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the OS when the process ends
        except BlockingIOError:
            raise UsageError(
                f"--out {out}: another process is preparing it; wait for it, or name another folder"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield out
    finally:
        os.close(descriptor)


def _beginning(stage: int) -> dict[str, Any]:
    return {"stage": stage, "file": 0, "record": 0, "before": ""}


def _few(phrases: Sequence[str]) -> str:
    more = f", and {len(phrases) - 3} more" if len(phrases) > 3 else ""
    return ", ".join(phrases[:3]) + more


class _Preparation:
    """One call of `prepare` on a folder that is not finished.

    The place in the source is a stage of the plan, a file of the stage, and a record of the file. The digest of the
    record before shows whether the file has changed.
    """

    def __init__(self, folder: Path, plan: _Plan) -> None:
        self.folder, self.plan = folder, plan
        remove_leftovers(folder)
        remove_leftovers(folder / TOKENIZER)
        state = self._begun()
        self.tokenizer = self._tokenizer(state.get("tokenizer_sha256"))
        self.splits = Splits(folder, self.tokenizer.dtype, plan.request.shard_tokens)
        self.position: dict[str, Any] = state.get("place", _beginning(0))
        self.splits.resume(state.get("splits", {"closed": {}, "parts": {}}))
        self.saved = time.monotonic()

    def run(self, *, quiet: bool) -> Meta:
        """Read, encode and write what is missing, then declare the folder whole."""
        self._save()
        limit = self.plan.request.tokens
        total = limit or sum(len(files) for _, files in self.plan.stages)  # progress counts tokens, else files
        began, text_bytes = time.monotonic(), 0
        try:
            with meter("prepare", total, quiet=quiet) as show:
                for size in self._stages():
                    text_bytes += size
                    tokens = {split: self.splits.tokens(split) for split in (TRAIN, VALIDATION)}
                    files = sum(len(files) for _, files in self.plan.stages[: self.position["stage"]])
                    done = min(tokens[TRAIN], total) if limit else files + self.position["file"]
                    speed = text_bytes / max(time.monotonic() - began, 1e-9)
                    show(done, f"{sum(tokens.values()) / 1e6:,.1f} M tokens, {speed / 1e6:.1f} MB/s of text")
            for split in (TRAIN, VALIDATION):
                self.splits.close(split)
        finally:
            self.splits.abandon()
        return self._declare()

    def _stages(self) -> Iterator[int]:
        """Write the rest of all stages; yields the bytes of text of each batch."""
        for stage in range(self.position["stage"], len(self.plan.stages)):
            if stage > self.position["stage"]:
                self.position = _beginning(stage)
                self._save()
            split, files = self.plan.stages[stage]
            if split == TRAIN and self.plan.validation and not self.splits.tokens(VALIDATION):
                names = _few([file.name for file in self.plan.validation])
                raise UsageError(f"--validation {names}: holds no text; name files that do, with another --out")
            if self._is_full(split):
                continue
            position = {name: self.position[name] for name in ("file", "record", "before")}
            with closing(batches(files, self.plan.request.column, **position)) as stream:
                for batch in stream:
                    has_closed = self._batch(split, batch)
                    self.position = _beginning(stage) | {name: getattr(batch, name) for name in position}
                    if has_closed or time.monotonic() - self.saved > SAVE_SECONDS:
                        self._save()
                    yield sum(batch.sizes)
                    if self._is_full(split):
                        break

    def _is_full(self, split: str) -> bool:
        """Return whether a split has as many tokens as were asked for."""
        limit = self.plan.request.tokens if split == TRAIN else self.plan.request.validation_tokens
        return limit is not None and self.splits.tokens(split) >= limit

    def _batch(self, stage: str, batch: Batch) -> bool:
        """Encode and write some documents; True if that closed a shard."""
        has_closed = False
        end = np.array([self.tokenizer.end_of_text], self.tokenizer.dtype)
        for text, size, ids in self._encoded(batch):
            split = VALIDATION if stage == VALIDATION or is_held_out(text, self.plan.held_out) else TRAIN
            if self._is_full(split):
                continue
            has_closed |= self.splits.add(split, np.concatenate([ids, end]), size)
            if self._is_full(stage):
                break  # here and not at the end of the batch, which may be elsewhere in a resumed run
        return has_closed

    def _encoded(self, batch: Batch) -> Iterator[tuple[str, int, Ids]]:
        """Yield each document of a batch, its bytes and ids; a few at a time, because a huge record is one batch."""
        start = pending = 0
        for end, size in enumerate(batch.sizes, start=1):
            pending += size
            if pending >= BATCH_BYTES or end == len(batch.sizes):
                texts = batch.texts[start:end]
                yield from zip(texts, batch.sizes[start:end], self.tokenizer.encode(texts), strict=True)
                start, pending = end, 0

    def _save(self) -> None:
        self.splits.flush()
        facts = {"request": self.plan.record(), "tokenizer_sha256": _digest(self.tokenizer)}
        self._write(facts | {"place": self.position, "splits": self.splits.state()})
        self.saved = time.monotonic()

    def _write(self, state: dict[str, Any]) -> None:
        write_atomic(self.folder / STATE, json.dumps(state | {"fingerprint": fingerprint(state)}))

    def _begun(self) -> dict[str, Any]:
        """Return the state of an interrupted folder; an empty one for a new folder."""
        path = self.folder / STATE
        if not path.exists():
            return {}
        try:
            state = read_json_object(path)
            if state.pop("fingerprint") != fingerprint(state):
                raise ValueError("it has changed since it was written")
            request, position = state["request"], state.get("place", _beginning(0))
            # A file that has not been read to its end may have changed, as after a cut download. The part already read
            # is compared with the recorded digest.
            for number, (split, files) in enumerate(self.plan.stages[position["stage"] :]):
                sizes = request["validation_files" if split == VALIDATION else "files"]
                first = 0 if number else position["file"]
                sizes |= {file.name: file.size for file in files[first:] if file.name in sizes}
            changed = differences(self.plan.record(), request)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is damaged ({error}); delete {self.folder} and prepare it again") from None
        if changed and any(self.folder.glob("*.bin")):
            raise UsageError(
                f"--out {self.folder}: was begun with another request ({_few(changed)}); repeat that one, name another "
                f"folder, or delete this one"
            )
        if changed:  # nothing has been prepared, as after a slip in an option: the folder is this request's
            self._write({"request": self.plan.record()})
            shutil.rmtree(self.folder / TOKENIZER, ignore_errors=True)  # another one may have fewer files
            return {}
        return state

    def _tokenizer(self, expected: str | None) -> Tokenizer:
        """Return the tokenizer, saved in the folder; `expected`: the hash of the one that it was begun with."""
        request, folder = self.plan.request, self.folder / TOKENIZER
        if not request.tokenizer.startswith(_BPE):
            tokenizer = load_tokenizer(request.tokenizer, end_of_text=request.end_of_text)
        elif expected is None:
            tokenizer = train_bpe(self._sample(), int(request.tokenizer.removeprefix(_BPE)))
        else:
            tokenizer = replace(load_tokenizer(str(folder)), name=request.tokenizer)
        if expected is None:
            # First, for it makes the folder one that is being prepared; a tokenizer that fails leaves it empty.
            self._write({"request": self.plan.record()})
            tokenizer.save(folder)
        elif _digest(tokenizer) != expected:
            raise UsageError(
                f"--tokenizer {request.tokenizer}: is not the one that {self.folder} was begun with, of which "
                f"{folder} is a copy; restore it, or prepare into another folder"
            )
        return tokenizer

    def _sample(self) -> Iterator[str]:
        """Yield the first documents of the training text, without those held out, for a tokenizer to learn from."""
        remaining = self.plan.request.train_bytes
        with closing(batches(self.plan.train, self.plan.request.column)) as stream:
            for batch in stream:
                for text, size in zip(batch.texts, batch.sizes, strict=True):
                    if remaining <= 0:
                        return
                    if not is_held_out(text, self.plan.held_out):
                        remaining -= size
                        yield text

    def _declare(self) -> Meta:
        """Write `meta.json`, last; the state goes when it is there."""
        if not self.splits.closed.get(TRAIN):
            raise UsageError(
                f"{' '.join(self.plan.request.sources)}: holds no text to train on; name files that do, and lower "
                f"--held-out if it is high"
            )
        if self.plan.held_out and not self.splits.closed.get(VALIDATION):
            raise UsageError(
                f"--held-out {self.plan.held_out}: holds out none of so few documents; with another --out give "
                f"--validation FILES or a larger share"
            )
        token_bytes = _token_bytes(self.tokenizer)
        write_atomic(self.folder / TOKEN_BYTES, token_bytes)
        meta = Meta(
            tokenizer=self.tokenizer.name,
            tokenizer_sha256=self.tokenizer.sha256,
            vocabulary_size=self.tokenizer.vocabulary_size,
            end_of_text=self.tokenizer.end_of_text,
            dtype=self.tokenizer.dtype,
            source=self.plan.record(),
            splits={split: tuple(shards) for split, shards in sorted(self.splits.closed.items())},
            token_bytes_sha256=hashlib.sha256(token_bytes).hexdigest(),
        )
        write_meta(self.folder, meta)
        (self.folder / STATE).unlink()
        return meta


def _token_bytes(tokenizer: Tokenizer) -> bytes:
    """Return the content of `token_bytes.npy`."""
    buffer = io.BytesIO()
    np.save(buffer, tokenizer.token_bytes)
    return buffer.getvalue()


def _digest(tokenizer: Tokenizer) -> str:
    """Return SHA-256 of the ids that a tokenizer gives, and of what each stands for."""
    return hashlib.sha256(tokenizer.sha256.encode() + _token_bytes(tokenizer)).hexdigest()


def is_held_out(text: str, share: float) -> bool:
    """Return whether a document validates: a pure function of its text, so that equal documents are on one side."""
    if share <= 0:
        return False
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
