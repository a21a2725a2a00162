"""Checkpoints: folders that appear whole or not at all, and say so when they are damaged.

`checkpoint/step-00000320/` holds `engine.pt` (anchor, outer optimizer, position), `replica-000.pt`, … (a model and its
inner optimizer each, written by the process that trains it, so that the processes may be dealt differently when the
run resumes), `progress.json` (plain numbers), and `manifest.json` with the length and SHA-256 of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from twophase.config import UsageError
from twophase.diloco.comm import Communicator
from twophase.files import sync_folder, write_atomic

_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}\d{{8,}}")
_WRITING = ".writing-"
_MANIFEST = "manifest.json"


def replica_file(replica: int) -> str:
    """The file name of a replica's part."""
    return f"replica-{replica:03d}.pt"


def save(
    folder: Path,
    step: int,
    parts: dict[str, Any],
    progress: dict[str, Any],
    *,
    fingerprint: str,
    keep: int,
    communicator: Communicator,
) -> None:
    """Write the checkpoint of `step`; every process calls this with the parts that it holds.

    Args:
        folder: the run's `checkpoint/`, seen by all processes.
        step: inner steps taken.
        parts: file name to anything that `torch.load(weights_only=True)` reads.
        progress: plain numbers (process 0's are written).
        fingerprint: of the configuration; a checkpoint of another one is refused when loading.
        keep: number of checkpoints that stay; older ones go once this one is complete.
        communicator: the processes of the run.
    """
    final = folder / f"{_PREFIX}{step:08d}"
    writing = folder / f"{_WRITING}{final.name}"
    lead = communicator.rank == 0
    if lead:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    communicator.gather(None)  # nobody writes before the folder is there
    entries = {name: _write_part(writing / name, part) for name, part in parts.items()}
    everyone = communicator.gather(entries)
    if lead:
        write_atomic(writing / "progress.json", json.dumps(progress))
        files = {name: entry for part in everyone for name, entry in part.items()}
        files["progress.json"] = _entry(writing / "progress.json")
        manifest = {"step": step, "config": fingerprint, "torch": str(torch.__version__), "files": files}
        write_atomic(writing / _MANIFEST, json.dumps(manifest, indent=1))
        writing.rename(final)
        sync_folder(folder)
        for old in _complete(folder)[:-keep]:
            shutil.rmtree(old)
    communicator.gather(None)  # nobody goes on before it is complete


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    found = _complete(folder)
    return found[-1] if found else None


def latest_step(folder: Path) -> int | None:
    """Inner steps of the newest complete checkpoint, or None."""
    newest = latest(folder)
    return None if newest is None else int(newest.name.removeprefix(_PREFIX))


def clean(folder: Path) -> None:
    """Remove what a crash left half written."""
    for path in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(path)


class Checkpoint:
    """A complete checkpoint, verified against its manifest.

    Args:
        path: the checkpoint's folder.
        fingerprint: of the configuration that wants to continue from it.

    Raises:
        UsageError: damaged, truncated, or of another configuration.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        try:
            manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
            files: dict[str, dict[str, Any]] = manifest["files"]
            self.step: int = manifest["step"]
            owner = manifest["config"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, f"its {_MANIFEST} cannot be read ({error})") from None
        if owner != fingerprint:
            raise UsageError(
                f"checkpoint {path} was written by another configuration (fingerprint {owner}, here {fingerprint}); "
                "choose another --out, or repeat the command with the options of the run's config.yaml"
            )
        for name, entry in files.items():
            if not (path / name).is_file():
                raise _damaged(path, f"{name} is missing")
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                raise _damaged(path, f"{name} holds {size} bytes instead of {entry['bytes']}")
            if _entry(path / name) != entry:
                raise _damaged(path, f"the content of {name} has changed (its SHA-256 differs)")

    def progress(self) -> dict[str, Any]:
        """The plain numbers."""
        return json.loads((self.path / "progress.json").read_text(encoding="utf-8"))

    def part(self, name: str) -> Any:
        """One part, with its tensors on the CPU."""
        return torch.load(self.path / name, map_location="cpu", weights_only=True)


def _damaged(path: Path, why: str) -> UsageError:
    others = [other.name for other in _complete(path.parent) if other != path]
    back = f"the run then resumes from {others[-1]}" if others else "the run then starts from the beginning"
    remedy = f"rename that folder (for example to {path.name}.bad) and repeat the command, {back}"
    return UsageError(f"checkpoint {path} is damaged: {why}; {remedy}")


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir())


def _write_part(path: Path, part: Any) -> dict[str, Any]:
    with path.open("wb") as file:
        torch.save(part, file)
        file.flush()
        os.fsync(file.fileno())
    return _entry(path)


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
