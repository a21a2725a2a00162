"""Checkpoints: written behind the training's back, there whole or not at all, and checked when they are read.

`checkpoint/step-00000320/` holds `engine.safetensors` (anchor, outer optimizer, position), `replica-000.safetensors`, …
(a model, where it differs from the anchor, and its inner optimizer each, written by the process that trains it, so that
the processes may be dealt differently when the run resumes), `wire-000.safetensors`, … where a lossy wire leaves a
process owing something to the others, `progress.json` (plain numbers), and `manifest.json` with
the length and SHA-256 of each. Nothing in it is a pickle; see `twophase.training.parts` for the format.

A `Writer` copies the state, which takes as long as moving that many bytes, and a thread does the rest: it writes the
files into a folder of another name, waits for the disk, renames the folder, and removes the oldest.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from twophase.base.config import UsageError
from twophase.base.files import sync_folder, write_atomic
from twophase.diloco.comm import Communicator
from twophase.training import parts as files
from twophase.training.snapshot import Snapshot, Snapshots

ENGINE = f"engine{files.ENDING}"
"""The file of the engine's part."""
_FORMAT = 3
_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}\d{{8,}}")
_WRITING = ".writing-"
_MANIFEST = "manifest.json"
_PROGRESS = "progress.json"


def replica_file(replica: int) -> str:
    """The file name of a replica's part."""
    return f"replica-{replica:03d}{files.ENDING}"


def wire_file(rank: int) -> str:
    """The file name of what a process owes the others on a lossy wire."""
    return f"wire-{rank:03d}{files.ENDING}"


class Writer:
    """Writes the checkpoints of a run while it trains on; every process has one and calls it alike.

        with Writer(folder, fingerprint=..., keep=2, communicator=...) as writer:
            ...                                   # train
            writer.save(step, parts, progress)    # copies the state and returns
            ...                                   # train on
        # here the last one is whole, on all processes

    At most one checkpoint is on its way: the next `save` waits for it. What goes wrong in the thread is raised by the
    next `save`, `poll` or `close`. When an error ends the `with` block, a checkpoint on its way is completed if that
    needs no other process, and dropped when the user is in a hurry (a second Ctrl-C).

    Args:
        folder: the run's `checkpoint/`, seen by all processes.
        fingerprint: of the configuration; a checkpoint of another one is refused when loading.
        keep: number of checkpoints that stay; older ones go once a newer one is complete.
        communicator: the processes of the run; used by the methods and never by the thread.
        patience: seconds that process 0 waits for the parts of the others after it has written its own.
    """

    def __init__(
        self, folder: Path, *, fingerprint: str, keep: int, communicator: Communicator, patience: float = 1800.0
    ) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.keep = keep
        self.comm = communicator
        self.patience = patience
        self._snapshots = Snapshots()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._forsaken = threading.Event()
        """The other processes' parts will not come."""
        self._dropped = threading.Event()
        """This checkpoint is no longer wanted."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._thread is not None:
            self._forsaken.set()
            if not isinstance(error, Exception):
                self._dropped.set()
            self._thread.join()
            if self._failure is not None:
                error.add_note(str(self._failure))

    def save(self, step: int, parts: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Take the state as it is now and have it written; on return training may go on and change it.

        Args:
            step: inner steps taken; above those of every earlier checkpoint.
            parts: from file name to a tree of tensors and plain values (see `parts.take_apart`), those
                that this process holds.
            progress: plain numbers and text (process 0's are written).

        Raises:
            OSError: this checkpoint or the previous one cannot be written; says where, why and what to do.
        """
        self.close()
        job = _Job(self.folder, step, json.dumps(progress), self._snapshots.take(parts))
        failure = None
        if self.comm.rank == 0:
            try:
                shutil.rmtree(job.writing, ignore_errors=True)
                job.writing.mkdir(parents=True)
            except OSError as error:
                failure = unwritable(self.folder, f"the checkpoint of step {step}", error)
        self._agree(failure)  # and no process writes before the folder exists
        # A daemon: a second Ctrl-C need not wait for a slow disk. It leaves nothing that looks like a checkpoint.
        self._thread = threading.Thread(target=self._work, args=(job,), name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Raise what went wrong with the last checkpoint, if that is known by now; never waits.

        With several processes it says nothing: they must learn of it together, which the next `save` does.
        """
        if self.comm.size == 1 and self._thread is not None and not self._thread.is_alive():
            self.close()

    def close(self) -> None:
        """Return when everything that was saved is whole on disk, on all processes.

        Raises:
            OSError: it could not be written; says where, why and what to do.
        """
        if self._thread is None:
            return
        if self.comm.rank != 0:
            self._thread.join()
        others = self.comm.gather(None if self.comm.rank == 0 or self._failure is None else str(self._failure))
        if self.comm.rank == 0:
            if any(others):
                self._forsaken.set()
            self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        self._forsaken.clear()
        try:
            self._agree(failure, others)
        except BaseException:
            if self.comm.rank == 0:  # half a checkpoint is useless, and the disk may be full
                for path in self.folder.glob(f"{_WRITING}*"):
                    shutil.rmtree(path, ignore_errors=True)
            raise

    def _agree(self, failure: BaseException | None, gathered: list[str | None] | None = None) -> None:
        """Raise one process's failure on all; a cause goes before the failures of processes that only waited for it."""
        texts = self.comm.gather(None if failure is None else str(failure))
        if failure is not None and not isinstance(failure, _ForsakenError):
            raise failure
        text = next((text for text in [*(gathered or []), *texts] if text is not None), None)
        if text is not None:
            raise OSError(text)

    # ---------------------------------------------------------------------------------------------------- the thread

    def _work(self, job: _Job) -> None:
        """What the thread does; no collective may be called in here."""
        try:
            self._write(job)
        except OSError as error:
            self._failure = unwritable(self.folder, f"the checkpoint of step {job.step}", error)
        except BaseException as error:  # whatever it is, it must come to light, in `close`
            self._failure = error

    def _write(self, job: _Job) -> None:
        with job.snapshot.readable():
            entries = {
                name: files.write(job.writing / name, part, self._check) for name, part in job.snapshot.parts.items()
            }
        if self.comm.rank != 0:
            write_atomic(job.entries(self.comm.rank), json.dumps(entries))
            return
        write_atomic(job.writing / _PROGRESS, job.progress)
        entries[_PROGRESS] = _entry(job.writing / _PROGRESS)
        for rank in range(1, self.comm.size):
            entries |= self._wait_for(job, rank)
        manifest = {
            "format": _FORMAT,
            "step": job.step,
            "config": self.fingerprint,
            "torch": str(torch.__version__),
            "files": entries,
        }
        write_atomic(job.writing / _MANIFEST, json.dumps(manifest, indent=1))
        job.writing.rename(job.final)
        sync_folder(self.folder)
        for old in _complete(self.folder)[: -self.keep]:
            half = old.rename(old.with_name(f"{_WRITING}{old.name}"))  # a kill from here on leaves no torn checkpoint
            shutil.rmtree(half)

    def _wait_for(self, job: _Job, rank: int) -> dict[str, Any]:
        """The entries of another process's parts, which are on disk when these are."""
        path = job.entries(rank)
        end = time.monotonic() + self.patience
        while not path.exists():
            self._check()
            if self._forsaken.wait(0.02):
                raise _ForsakenError(f"process {rank} has not written its part of the checkpoint of step {job.step}")
            if time.monotonic() > end:
                raise OSError(f"process {rank} has not written its part in {self.patience:g} seconds")
        entries = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        return entries

    def _check(self) -> None:
        if self._dropped.is_set():
            raise _ForsakenError("the checkpoint was dropped")


class _ForsakenError(Exception):
    """Others have failed, and will say so; or the user wants to go."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A checkpoint on its way."""

    folder: Path
    step: int
    progress: str
    snapshot: Snapshot

    @property
    def final(self) -> Path:
        return self.folder / f"{_PREFIX}{self.step:08d}"

    @property
    def writing(self) -> Path:
        return self.folder / f"{_WRITING}{self.final.name}"

    def entries(self, rank: int) -> Path:
        return self.writing / f".entries-{rank:03d}.json"


def unwritable(where: Path, what: str, error: OSError) -> OSError:
    """The one message about a full or unwritable disk.

    Args:
        where: the folder.
        what: could not be written there.
        error: why.
    """
    remedy = "free space there or make it writable"
    if isinstance(error, FileNotFoundError):
        remedy = "choose an --out that all processes see, and leave it in its place"
    return OSError(
        f"{what} cannot be written to {where} ({error.strerror or error}); {remedy}, then repeat the command: the run "
        "resumes from its newest whole checkpoint, which is intact"
    )


# ------------------------------------------------------------------------------------------------------------ reading


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    checkpoints = _complete(folder)
    return checkpoints[-1] if checkpoints else None


def latest_step(folder: Path) -> int | None:
    """Inner steps of the newest complete checkpoint, or None."""
    newest = latest(folder)
    return None if newest is None else _step(newest)


def clean(folder: Path) -> None:
    """Remove what a crash left half written or half removed."""
    for path in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(path)


class Checkpoint:
    """A complete checkpoint, verified against its manifest.

    Args:
        path: the checkpoint's folder.
        fingerprint: of the configuration that wants to continue from it.

    Raises:
        UsageError: damaged, truncated, of another configuration, or in the format of another version.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        try:
            manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
            entries = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
            self.step: int = manifest["step"]
            owner, version = manifest["config"], manifest.get("format", 1)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, f"its {_MANIFEST} cannot be read ({error})") from None
        if _NAME.fullmatch(path.name) and self.step != _step(path):
            raise _damaged(path, f"its {_MANIFEST} is that of step {self.step}")
        if owner != fingerprint:
            raise UsageError(
                f"checkpoint {path} was written by another configuration (fingerprint {owner}, here {fingerprint}); "
                "choose another --out, or repeat the command with the options of the run's config.yaml"
            )
        if version != _FORMAT:
            raise UsageError(
                f"checkpoint {path} is in format {version} and this version of twophase reads format {_FORMAT}; finish "
                f"the run with the version that began it, choose another --out, or rename {path.parent} and repeat the "
                "command, which then starts from the beginning"
            )
        for name, (length, digest) in entries.items():
            if not (path / name).is_file():
                raise _damaged(path, f"{name} is missing")
            size = (path / name).stat().st_size
            if size != length:
                raise _damaged(path, f"{name} holds {size} bytes instead of {length}")
            if _entry(path / name)["sha256"] != digest:
                raise _damaged(path, f"the content of {name} has changed (its SHA-256 differs)")

    def progress(self) -> dict[str, Any]:
        """The plain numbers."""
        return json.loads((self.path / _PROGRESS).read_text(encoding="utf-8"))

    def holds(self, name: str) -> bool:
        """Whether there is such a part."""
        return (self.path / name).exists()

    def part(self, name: str) -> Any:
        """One part, with its tensors on the CPU."""
        return files.read(self.path / name)


def _damaged(path: Path, why: str) -> UsageError:
    others = [other.name for other in _complete(path.parent) if other != path]
    back = f"the run then resumes from {others[-1]}" if others else "the run then starts from the beginning"
    remedy = f"rename that folder (for example to {path.name}.bad) and repeat the command, {back}"
    return UsageError(f"checkpoint {path} is damaged: {why}; {remedy}")


def _step(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    paths = [path for path in folder.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=_step)


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
