"""Writing shards: documents are appended to open parts, and whole parts get their final names.

An open part is a file with a temporary name; its valid length is in the state that `prepare` saves. To resume after a
kill, open parts are cut to that length, and the source is read again from the saved place.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from twophase.base.config import UsageError
from twophase.base.files import TEMPORARY, sync_folder
from twophase.text.meta import DTYPES, Shard, read_splits
from twophase.text.tokenizer import Ids


@dataclass
class Splits:
    """The shards of all splits of a folder.

    A shard is closed at the end of the document with which it has `shard_tokens` ids. `closed` are the whole shards of
    each split; `parts` say what counts of each open one, whose `sha256` is that of its bytes so far.
    """

    folder: Path
    dtype: str
    shard_tokens: int
    closed: dict[str, list[Shard]] = field(default_factory=dict)
    parts: dict[str, Shard] = field(default_factory=dict)
    _files: dict[str, BinaryIO] = field(default_factory=dict)
    _hashes: dict[str, Any] = field(default_factory=dict)

    def tokens(self, split: str) -> int:
        """Return ids of a split so far."""
        part = self.parts.get(split)
        return sum(shard.tokens for shard in self.closed.get(split, ())) + (part.tokens if part else 0)

    def add(self, split: str, ids: Ids, text_bytes: int) -> bool:
        """Append a document, with its end of text; True if that closed a shard."""
        name = f"{split}-{len(self.closed.get(split, ())):05d}.bin"
        part = self.parts.get(split) or Shard(name, 0, 0, 0, 0, "")
        if split not in self._files:
            self._files[split] = self._path(part).open("ab")
        data = ids.astype(np.dtype(self.dtype).newbyteorder("<"), copy=False).tobytes()
        self._files[split].write(data)
        self._hashes.setdefault(split, hashlib.sha256()).update(data)
        self.parts[split] = replace(
            part,
            tokens=part.tokens + len(ids),
            documents=part.documents + 1,
            text_bytes=part.text_bytes + text_bytes,
            largest=max(part.largest, int(ids.max())),
        )
        is_whole = self.parts[split].tokens >= self.shard_tokens
        if is_whole:
            self.close(split)
        return is_whole

    def close(self, split: str) -> None:
        """Give the open shard of a split, if there is one, its final name."""
        self.flush()
        part = self.parts.pop(split, None)
        if part is None:
            return
        if split in self._files:
            self._files.pop(split).close()
        self._path(part).rename(self.folder / part.file)
        sync_folder(self.folder)
        self.closed.setdefault(split, []).append(replace(part, sha256=self._hashes.pop(split).hexdigest()))

    def flush(self) -> None:
        """Bring what is open to the disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def abandon(self) -> None:
        """Let go of open files as they are."""
        for file in self._files.values():
            with suppress(OSError):  # a full disk: what was not written does not count
                file.close()
        self._files.clear()

    def state(self) -> dict[str, Any]:
        """Return what `resume` needs, as plain values; call `flush` before."""
        return {
            "closed": {split: [asdict(shard) for shard in shards] for split, shards in self.closed.items()},
            "parts": {s: asdict(replace(p, sha256=self._hashes[s].hexdigest())) for s, p in self.parts.items()},
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state: cut open parts to what counts, remove what came after.

        Raises:
            UsageError: a file of the state is missing, too short, or of other content.
        """
        self.closed = {split: list(shards) for split, shards in read_splits(state["closed"]).items()}
        parts = read_splits({split: [part] for split, part in state["parts"].items()})
        self.parts = {split: part for split, (part,) in parts.items()}
        current = {self.folder / shard.file: shard for shards in self.closed.values() for shard in shards}
        whole = set(current)
        for part in self.parts.values():
            path = self._path(part)
            current[path] = part
            if not path.exists() and (self.folder / part.file).exists():
                (self.folder / part.file).rename(path)  # it was closed after the state was saved
        for path, shard in current.items():
            size, actual = shard.tokens * DTYPES[self.dtype], path.stat().st_size if path.exists() else -1
            fault, digest = "", hashlib.sha256()
            if actual < size:
                fault = "is missing" if actual < 0 else f"has {actual:,} bytes instead of {size:,}"
            else:
                os.truncate(path, size)
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256")  # an open part continues it
                if digest.hexdigest() != shard.sha256:
                    fault = "has changed since it was written"
            if fault:
                raise UsageError(
                    f"--out {self.folder}: cannot be resumed, because {path.name} {fault}; delete the folder and "
                    f"prepare it again, or give another --out"
                )
            if path not in whole:
                self._hashes[shard.file.partition("-")[0]] = digest
        for path in self.folder.glob("*.bin"):  # hidden ones too
            if path.name.removeprefix(TEMPORARY).startswith(("train-", "validation-")) and path not in current:
                path.unlink()

    def _path(self, part: Shard) -> Path:
        return self.folder / f"{TEMPORARY}{part.file}"
