"""The calls by which a process changes a folder, and what can go wrong at the n-th of them.

`install` wraps them in this process, which is a forked child: opening for writing, each write, fsync, rename, mkdir,
unlink, rmdir, truncate, and safetensors' own writing. A `Fault` is what happens at one of them.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils._python_dispatch import TorchDispatchMode

from twophase.training import parts

KILL, HALF, ERROR, FULL, SHORT, POWER = "kill", "half", "error", "full", "short", "power"
"""Die before the call; die in the middle of a write; fail once; fail from now on; write less once, then fail; cut."""
MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes. Error code 12"


INSTALLED: list[Callable[[], None]] = []
"""What undoes the wrapping; a child of this process begins without its faults."""


@dataclass
class Fault:
    """What happens at which call.

    Args:
        folder: calls on paths in it count.
        kind: one of the constants above; empty: only count.
        number: of the call, from 1.
        seed: of what a power cut leaves.
        late: with `POWER`, whether a rename counts only when its folder was synced.
    """

    folder: Path
    kind: str = ""
    number: int = 0
    seed: int = 0
    late: bool = True
    count: int = 0
    where: str = ""
    lock: Any = field(default_factory=threading.RLock)
    disk: Disk | None = None

    def reach(self, call: str, path: str) -> bool:
        """A call comes; True if it must write only a part of its data."""
        with self.lock:
            self.count += 1
            if self.count < self.number or not self.number or (self.count > self.number and self.kind != FULL):
                return False
            self.where = self.where or f"{call} {os.path.relpath(path, self.folder)}"
            if self.kind == POWER and self.disk is not None:
                self.disk.cut(random.Random(self.seed), late=self.late)
            if self.kind in (KILL, POWER) or (self.kind == HALF and call != "write"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind in (HALF, SHORT) and call == "write":
                self.kind = self.kind if self.kind == HALF else FULL
                return True
            if self.kind in (ERROR, FULL, SHORT) and call not in ("unlink", "rmdir"):
                number = errno.EIO if self.kind == ERROR and self.seed % 2 else errno.ENOSPC
                raise OSError(number, os.strerror(number), path)
            return False


class Disk:
    """What a folder on a tmpfs would be after a power cut: files and folders as they were when they were synced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[int, dict[str, int]] = {}
        self.contents: dict[int, tuple[bytes, int]] = {}
        for path in (folder, *folder.rglob("*")):
            self.sync(path)

    def sync(self, path: Path) -> None:
        """A file or folder reaches the disk."""
        number = path.stat().st_ino
        if path.is_dir():
            self.entries[number] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self.contents[number] = path.read_bytes(), path.stat().st_mtime_ns

    def cut(self, rng: random.Random, *, late: bool) -> None:
        """Write what is left beside the folder, with the ending `.cut`."""
        paths = {path.stat().st_ino: path for path in (self.folder, *self.folder.rglob("*"))}
        folders = {number for number, path in paths.items() if path.is_dir()} | set(self.entries)
        now = {n: {e.name: e.inode() for e in os.scandir(paths[n])} for n in folders & set(paths)}

        def put(number: int, place: Path) -> None:
            if number in folders:
                place.mkdir()
                for name, child in (self.entries if late else now).get(number, {}).items():
                    put(child, place / name)
                return
            synced, changed = self.contents.get(number, (b"", 0))
            last = synced
            if number in paths and paths[number].is_file():
                last, changed = paths[number].read_bytes(), paths[number].stat().st_mtime_ns
            if last.startswith(synced):
                more = last[len(synced) :]
                lengths = [b"", more, more[: rng.randint(0, len(more))], bytes(len(more))]
                place.write_bytes(synced + rng.choice(lengths))
            else:
                place.write_bytes(rng.choice([synced, last]))
            os.utime(place, ns=(changed, changed))

        put(self.folder.stat().st_ino, self.folder.with_name(f"{self.folder.name}.cut"))


class _Raw(io.FileIO):
    """A file each of whose writes may fail."""

    fault: Fault
    path: str

    def write(self, data: Any, /) -> int:
        data = memoryview(data).cast("B")
        if self.fault.reach("write", self.path):
            size = super().write(data[: len(data) // 2])
            if self.fault.kind == HALF:
                os.kill(os.getpid(), signal.SIGKILL)
            return size
        return super().write(data)

    def truncate(self, size: int | None = None, /) -> int:
        self.fault.reach("truncate", self.path)
        return super().truncate(size)


def install(fault: Fault) -> Callable[[], None]:  # noqa: PLR0915 - one wrapper after the other
    """Wrap the calls of this process; returns what undoes it."""
    inside = f"{fault.folder}{os.sep}"
    undo: list[tuple[Any, str, Any]] = []
    if fault.kind == POWER:
        fault.disk = Disk(fault.folder)

    def replace(owner: Any, name: str, function: Any) -> Any:
        original = getattr(owner, name)
        undo.append((owner, name, original))
        setattr(owner, name, function)
        return original

    def place(path: Any, dir_fd: int | None = None) -> str:
        if isinstance(path, int):
            return str(Path(f"/proc/self/fd/{path}").readlink())
        base = Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        return str(base / os.fsdecode(path))

    def wrap(name: str) -> None:
        def wrapped(path: Any, *args: Any, **options: Any) -> Any:
            where = place(path, options.get("dir_fd") or options.get("src_dir_fd"))
            if (where + os.sep).startswith(inside) and not (name == "open" and not args[0] & os.O_CREAT):
                fault.reach(name, where)
            result = original(path, *args, **options)
            if name == "fsync" and fault.disk is not None and (where + os.sep).startswith(inside):
                fault.disk.sync(Path(where))
            return result

        original = replace(os, name, wrapped)

    def watched_open(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+") or not place(file).startswith(inside):
            return plain_open(file, mode, buffering, *args, **options)
        if not isinstance(file, int):
            fault.reach("open", place(file))
        raw = _Raw(file, mode.replace("b", "").replace("t", ""))
        raw.fault, raw.path = fault, place(file)
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffer
        encoding = options.pop("encoding", args[0] if args else None)
        return io.TextIOWrapper(buffer, encoding or "utf-8", newline=options.get("newline"))

    def watched_save(tensors: Any, path: Any, metadata: Any = None) -> None:
        """As safetensors does: its failures are its own, and leave a part of the file."""
        try:
            is_part = fault.reach("write", str(path))
        except OSError as error:
            Path(path).touch()
            raise SafetensorError(f"Error while serializing: I/O error: (os error {error.errno})") from None
        plain_save(tensors, path, metadata=metadata)
        if is_part:
            os.truncate(path, Path(path).stat().st_size // 2)
            if fault.kind == HALF:
                os.kill(os.getpid(), signal.SIGKILL)
            raise SafetensorError(f"Error while serializing: I/O error: (os error {errno.ENOSPC})")

    def watched_write(descriptor: int, data: Any) -> int:
        where = place(descriptor)
        if not where.startswith(inside) or not fault.reach("write", where):
            return plain_write(descriptor, data)
        size = plain_write(descriptor, memoryview(data)[: len(data) // 2])
        if fault.kind == HALF:
            os.kill(os.getpid(), signal.SIGKILL)
        return size

    plain_write = replace(os, "write", watched_write)
    for name in ("fsync", "replace", "rename", "mkdir", "unlink", "remove", "rmdir", "open"):
        wrap(name)
    plain_open = replace(io, "open", watched_open)
    replace(builtins, "open", watched_open)
    plain_save = replace(parts, "save_file", watched_save)

    def restore() -> None:
        for owner, name, original in undo:
            setattr(owner, name, original)

    INSTALLED[:] = [restore]
    return restore


class Allocations(TorchDispatchMode):
    """The n-th operation of torch in this thread fails as it does when there is no memory; 0: only count."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.number:
            raise MemoryError if self.number % 3 == 0 else RuntimeError(MEMORY)
        return func(*args, **(kwargs or {}))


def stop_threads() -> None:
    """Keep torch to this thread; a forked process has no other."""
    with suppress(RuntimeError):
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
