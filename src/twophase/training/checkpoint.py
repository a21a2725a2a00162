"""Checkpoints: written in the background, complete or absent, and verified when they are read.

`checkpoint/step-00000320/` holds JSON and safetensors files (see `twophase.training.parts`), and no pickle:

* `engine.safetensors`: anchor, outer optimizer, position;
* `replica-000.safetensors`, …: a replica's inner optimizer, and its model where that differs from the anchor;
* `residuals-000.safetensors`, …: a process's error-feedback residuals of a compression;
* `progress.json`: plain numbers; `manifest.json`: length and SHA-256 of each file.

A process writes its own replicas' files, so a resumed run may have other processes. A `Writer` copies the state. Its
thread writes the files, syncs the disk, renames the folder to its final name, and removes the oldest checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from twophase.base.errors import RunError, UsageError, is_out_of_memory
from twophase.base.files import file_sha256, sync_folder, write_atomic
from twophase.base.reading import read_json_object
from twophase.diloco.fragment import views_of
from twophase.diloco.group import SingleProcess
from twophase.training import parts as files
from twophase.training.snapshot import Snapshots

ENGINE = f"engine{files.ENDING}"
"""The file of the engine's part."""
_FORMAT = 4
_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}\d{{8,}}")
_WRITING = ".writing-"
_MANIFEST, _PROGRESS = "manifest.json", "progress.json"

T = TypeVar("T")


def replica_file(replica: int) -> str:
    """Name the file of a replica's part."""
    return f"replica-{replica:03d}{files.ENDING}"


def residuals_file(rank: int) -> str:
    """Name the file of a process's error-feedback residuals."""
    return f"residuals-{rank:03d}{files.ENDING}"


class Writer:
    """Writes the checkpoints of a run while it trains on; every process has one and calls it alike.

        with Writer(folder, fingerprint=..., keep=2, communicator=...) as writer:
            ...                                   # train
            writer.save(step, parts, progress)    # copies the state and returns
            ...                                   # train on
        # here the last one is whole, on all processes

    The next `save` waits for the checkpoint on its way, and raises, as `poll` and `close` do, an error of the
    thread. One process completes its checkpoint in the thread; several do so in the first of these calls after all have
    written their parts. If an error ends the `with` block, a single process still completes the checkpoint on its way;
    a second Ctrl-C drops it.

    Args:
        folder: the run's `checkpoint/`, seen by all processes.
        fingerprint: digest of the configuration; loading refuses a checkpoint of another one.
        keep: number of checkpoints that stay; older ones go once a newer one is complete.
        communicator: the processes of the run; used by the methods and never by the thread.
        before: function that syncs the logs that `progress` counts; the thread calls it before a checkpoint is visible.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        keep: int,
        communicator: SingleProcess,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.keep = keep
        self.comm = communicator
        self._before = before
        self._snapshots = Snapshots()
        self._thread: threading.Thread | None = None
        self._step = 0
        self._progress = ""
        self._entries: dict[str, Any] = {}
        """Length and SHA-256 of each file that the thread has written."""
        self._failure: BaseException | None = None
        self._dropped = threading.Event()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._thread is not None:  # without a collective, which the other processes might not join
            if not isinstance(error, Exception):
                self._dropped.set()
            self._thread.join()
            if self._failure is not None:
                error.add_note(str(self._failure))

    def save(self, step: int, parts: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Copy the state and start to write it; after this call training may change it.

        Args:
            step: inner steps taken; above those of every earlier checkpoint.
            parts: this process's trees of tensors and plain values (see `parts.take_apart`), by file name.
            progress: plain numbers and text (process 0's are written).

        Raises:
            OSError: this checkpoint or the previous one cannot be written; the message has place, reason and remedy.
        """
        self.close()
        self._step, self._progress, self._entries = step, json.dumps(progress), {}
        snapshot = self._snapshots.take(parts)
        failure = None
        if self.comm.rank == 0:
            try:
                shutil.rmtree(self._writing, ignore_errors=True)
                self.folder.mkdir(exist_ok=True)
                self._writing.mkdir()  # no parents: a run folder that was moved must not start again here
            except OSError as error:
                failure = self._unwritable(error)
        self._agree(failure)  # and no process writes before the folder exists

        def work() -> None:  # no collective may be called in here
            try:
                with snapshot.readable():
                    for name, part in snapshot.parts.items():
                        if self._dropped.is_set():
                            return
                        files.write(self._writing / name, part)
                        self._entries[name] = _entry(self._writing / name)
                # After a power cut, a checkpoint must not count log lines that are lost.
                self._before()
                if self.comm.size == 1:
                    self._complete(self._entries)
            except OSError as error:
                self._failure = self._unwritable(error)
            except BaseException as error:  # of any type: `close` raises it
                self._failure = error

        # A daemon: a second Ctrl-C need not wait for a slow disk. It leaves nothing that looks like a checkpoint.
        self._thread = threading.Thread(target=work, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Complete a checkpoint that all processes have written, or raise its error; never wait for the disk."""
        if self._thread is not None and not any(self.comm.gather_json(self._thread.is_alive())):
            self.close()

    def close(self) -> None:
        """Wait until every saved checkpoint is complete on disk, on all processes."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        self._agree(failure)
        if self.comm.size > 1:
            entries = self.comm.gather_json(self._entries)
            if self.comm.rank == 0:
                try:
                    self._complete({name: entry for some in entries for name, entry in some.items()})
                except OSError as error:
                    failure = self._unwritable(error)
            self._agree(failure)

    @property
    def _writing(self) -> Path:
        return self.folder / f"{_WRITING}{path_of(self.folder, self._step).name}"

    def _unwritable(self, error: OSError) -> OSError:
        return unwritable(self.folder, f"the checkpoint of step {self._step}", error, self.folder)

    def _agree(self, failure: BaseException | None) -> None:
        """Raise one process's failure on all; first remove the incomplete checkpoint, for the disk may be full."""
        text = None if failure is None else str(failure)
        texts = [text for text in self.comm.gather_json(text) if text is not None]
        if texts and self.comm.rank == 0:
            shutil.rmtree(self._writing, ignore_errors=True)
        if texts:
            raise failure or OSError(texts[0])

    def _complete(self, entries: dict[str, Any]) -> None:
        """Make a checkpoint of the parts that lie under the temporary name, and remove the oldest."""
        write_atomic(self._writing / _PROGRESS, self._progress)
        manifest = {
            "format": _FORMAT,
            "step": self._step,
            "config": self.fingerprint,
            "torch": str(torch.__version__),
            "files": entries | {_PROGRESS: _entry(self._writing / _PROGRESS)},
        }
        write_atomic(self._writing / _MANIFEST, json.dumps(manifest, indent=1))
        self._writing.rename(path_of(self.folder, self._step))
        sync_folder(self.folder)
        for path in _checkpoints(self.folder)[: -self.keep]:
            half = path.rename(path.with_name(f"{_WRITING}{path.name}"))  # a kill after this leaves no partial one
            shutil.rmtree(half)


def unwritable(where: Path, item: str, error: OSError, checkpoints: Path) -> OSError:
    """Return the error of a disk that is full or cannot be written, with its remedy.

    Args:
        where: the file or folder.
        item: object that cannot be written there.
        error: error of the operating system.
        checkpoints: the run's `checkpoint/`, from which a repeated command resumes.
    """
    remedy = "free space there or make it writable"
    if isinstance(error, FileNotFoundError):
        remedy = "choose an --out that all processes see, and leave it in its place"
    step = latest_step(checkpoints)
    begins = (
        "starts from the beginning, for it has no checkpoint yet"
        if step is None
        else f"resumes from its checkpoint of step {step}, which is whole"
    )
    return OSError(
        f"{item} cannot be written to {where} ({error.strerror or error}); {remedy}, then repeat the command: the run "
        f"{begins}"
    )


# ------------------------------------------------------------------------------------------------------------ reading


def path_of(folder: Path, step: int) -> Path:
    """Return the place of the checkpoint of a step."""
    return folder / f"{_PREFIX}{step:08d}"


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    checkpoints = _checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def latest_step(folder: Path) -> int | None:
    """Return the inner steps of the newest complete checkpoint, or None."""
    newest = latest(folder)
    return None if newest is None else _step(newest)


def read_latest(folder: Path, read: Callable[[Path], T]) -> T | None:
    """Return the result of `read` for the newest complete checkpoint, or None without one.

    A run under way removes its older checkpoints. If it removes this one during the read, the new newest one is read.
    """
    while (newest := latest(folder)) is not None:
        try:
            return read(newest)
        except (UsageError, OSError):
            if latest(folder) in (newest, None):
                raise
    return None


def clean(folder: Path) -> None:
    """Remove checkpoints that a crash left half written or half removed."""
    for path in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(path)


class Checkpoint:
    """A complete checkpoint, verified against its manifest.

    Args:
        path: the checkpoint's folder.
        fingerprint: digest of the configuration that continues from it.

    Raises:
        UsageError: damaged, truncated, of another configuration, or in the format of another version.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        try:
            manifest = read_json_object(path / _MANIFEST)
            self._entries = entries = dict(manifest["files"])
            self.step: int = manifest["step"]
            owner, version = manifest["config"], manifest.get("format", 1)
            if type(self.step) is not int or any(Path(name).name != name for name in entries):
                raise ValueError("a step that is no number, or a file outside of the folder")
        except (OSError, ValueError, KeyError, TypeError) as error:
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
                f"checkpoint {path} is in format {version}, and this version of twophase reads format {_FORMAT}. "
                f"Finish the run with the version that began it, choose another --out, or rename {path.parent} and "
                "repeat the command, which then starts from the beginning"
            )
        for name, entry in entries.items():
            if not (path / name).is_file():
                raise _damaged(path, f"{name} is missing")
            if _entry(path / name) != entry:
                raise _damaged(path, f"{name} has changed (its length or SHA-256 differs)")

    def progress(self) -> dict[str, Any]:
        """Read the plain numbers."""
        with self.content(_PROGRESS):
            return read_json_object(self.path / _PROGRESS)

    @contextmanager
    def content(self, name: str) -> Iterator[None]:
        """Turn an error in the use of a file's content into the message of a damaged checkpoint."""
        try:
            yield
        except Exception as error:
            if isinstance(error, UsageError | RunError) or is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())
            raise _damaged(self.path, f"{name}: {reason or type(error).__name__}") from None

    def holds(self, name: str) -> bool:
        """Tell whether the checkpoint has this file."""
        return name in self._entries

    def anchor(self) -> dict[str, Tensor]:
        """Read the anchor as weights by name."""
        state = self.part(ENGINE)
        with self.content(ENGINE):
            named = [(name, torch.Size(shape)) for _, parts in state["spec"]["fragments"] for name, shape in parts]
            views = views_of(state["anchor"], [shape for _, shape in named])
            return dict(zip([name for name, _ in named], views, strict=True))

    def part(self, name: str) -> Any:
        """Read one part, with its tensors on the CPU."""
        with self.content(name):
            return files.read(self.path / name)


def _damaged(path: Path, why: str) -> UsageError:
    others = [other.name for other in _checkpoints(path.parent) if other != path]
    back = f"the run then resumes from {others[-1]}" if others else "the run then starts from the beginning"
    remedy = f"rename that folder (for example to {path.name}.bad) and repeat the command, {back}"
    return UsageError(f"checkpoint {path} is damaged: {why}; {remedy}")


def _step(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    paths = [path for path in folder.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=_step)


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
