"""Checkpoints: written in a thread, verified by SHA-256, complete or not counted.

`checkpoint/step-00000320/` holds files of `torch.save`, which are read with `weights_only=True`:

* `engine.pt`: anchor, outer optimizer, position;
* `replica-000.pt`, …: a replica's inner optimizer, and its model where that differs from the anchor;
* `residuals-000.pt`, …: what a rank still owes by compression;
* `manifest-000.json`, …: by each rank, last: the SHA-256 of its files, the number of ranks, and the run's progress.

A rank writes its own replicas' files, so a resumed run may have another number of ranks. A checkpoint counts once every
rank's manifest is there.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from twophase.diloco.fragment import views_of
from twophase.diloco.group import SingleProcess
from twophase.errors import RunError, UsageError
from twophase.files import replacing, sha256, write_atomic
from twophase.training.distributed import raised_on_all_ranks

_log = logging.getLogger("twophase")
ENGINE = "engine"
_PLAIN = (Tensor, bool, int, float, str, type(None))


class DamagedError(RunError):
    """A file of a checkpoint is missing or has changed."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, its files' SHA-256 and the progress that it was saved with."""

    path: Path
    files: dict[str, str]
    progress: dict[str, Any]

    @property
    def step(self) -> int:
        """Inner steps that it was saved after."""
        return int(self.path.name[5:])

    def verify(self, names: Iterable[str]) -> None:
        """Compare the files of some parts with their SHA-256; a DamagedError names one that differs."""
        for name in names:
            path = self.path / f"{name}.pt"
            if not path.is_file() or sha256(path) != self.files[path.name]:
                raise DamagedError(f"checkpoint {path} is damaged: it lacks the SHA-256 of its manifest")

    def part(self, name: str) -> Any:
        """Return a part, with its tensors on the CPU; `verify` it before."""
        return torch.load(self.path / f"{name}.pt", map_location="cpu", weights_only=True)

    def anchor(self) -> dict[str, Tensor]:
        """Return the anchor as weights by name."""
        self.verify([ENGINE])
        state = self.part(ENGINE)
        named = [(name, torch.Size(shape)) for _, parts in state["spec"]["fragments"] for name, shape in parts]
        views = views_of(state["anchor"], [shape for _, shape in named])
        return dict(zip([name for name, _ in named], views, strict=True))


def read(path: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder, or None where a rank has not finished it."""
    manifests = [json.loads(file.read_bytes()) for file in sorted(path.glob("manifest-*.json"))]
    if not manifests or len(manifests) < manifests[0]["ranks"]:
        return None
    files = {name: digest for manifest in manifests for name, digest in manifest["files"].items()}
    return Checkpoint(path, files, manifests[0]["progress"])


def complete(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, oldest first."""
    found = {int(path.name[5:]): saved for path in folder.glob("step-*[0-9]") if (saved := read(path)) is not None}
    return [found[step] for step in sorted(found)]


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, or None."""
    return next(reversed(complete(folder)), None)


def set_aside(damaged: Checkpoint) -> None:
    """Rename a damaged checkpoint, so that the one before it is the newest, and say so."""
    place = damaged.path.with_name(f"{damaged.path.name}.damaged")
    shutil.rmtree(place, ignore_errors=True)
    damaged.path.rename(place)
    _log.warning("%s is damaged and now has the name %s; the run resumes from the one before", damaged.path, place.name)


def save(path: Path, tree: Any) -> str:
    """Write a tree of tensors and plain values to a file, whole or not at all; return the file's SHA-256."""
    with replacing(path) as temporary, temporary.open("wb") as stream:
        try:
            torch.save(tree, stream)
        except RuntimeError as error:  # with which torch's writer covers that the disk is full
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    return sha256(path)


def save_sealed(path: Path, tree: Any) -> None:
    """Write a tree and, beside it, its SHA-256, for a checkpoint of another library."""
    write_atomic(path.with_suffix(".sha256"), save(path, tree))


def load_sealed(path: Path) -> Any:
    """Return what `save_sealed` has written; a DamagedError where the file has changed since."""
    if sha256(path) != path.with_suffix(".sha256").read_text():
        raise DamagedError(f"{path} is damaged: it lacks the SHA-256 beside it; take another checkpoint")
    return torch.load(path, map_location="cpu", weights_only=True)


class Checkpointer:
    """Writes the checkpoints of a run to a folder that all ranks see, while it trains on; keeps the newest `keep`.

    All ranks call it at the same steps.
    """

    def __init__(self, folder: Path, group: SingleProcess, keep: int) -> None:
        self.folder, self.group, self.keep = folder, group, keep
        self._thread, self._writing = ThreadPoolExecutor(1), None

    def save(self, step: int, parts: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Copy this rank's parts and start to write them; afterwards training may change them.

        Raises:
            OSError: the checkpoint before, or this one, cannot be written on this rank.
            UsageError: a state that `weights_only=True` would not load, as of a task's own inner optimizer.
        """
        self.close()
        path = self.folder / f"step-{step:08d}"
        with raised_on_all_ranks(self.group):
            for leaf in tree_leaves(parts):
                if not isinstance(leaf, _PLAIN):
                    raise UsageError(f"the inner optimizer's state must hold tensors, numbers, text, has {type(leaf)}")
            if self.group.rank == 0:  # another start of this run may have left half of it
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True)
        copies = tree_map(lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, parts)

        def write() -> None:  # no collective: it would mix with those of the training
            files = {f"{name}.pt": save(path / f"{name}.pt", part) for name, part in copies.items()}
            manifest = {"ranks": self.group.size, "files": files, "progress": progress}
            write_atomic(path / f"manifest-{self.group.rank:03d}.json", json.dumps(manifest))
            self._prune()

        self._writing: Future[None] | None = self._thread.submit(write)

    def close(self) -> None:
        """Wait until the checkpoint of the last `save` is complete on all ranks."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with raised_on_all_ranks(self.group):
                writing.result()
            self._prune()

    def _prune(self) -> None:
        """Remove all checkpoints before the newest complete ones, and what kills have left half written."""
        kept = complete(self.folder)[-self.keep :] if self.group.rank == 0 else []
        for old in sorted(self.folder.glob("step-*[0-9]")) if kept else ():
            if int(old.name[5:]) < kept[-1].step and old not in [checkpoint.path for checkpoint in kept]:
                for manifest in old.glob("manifest-*.json"):  # first, so that no half one counts
                    manifest.unlink()
                shutil.rmtree(old)
