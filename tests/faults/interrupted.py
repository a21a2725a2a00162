"""Commands one after the other in this process, which is killed, or has a full disk, at its n-th call that writes.

    python interrupted.py FOLDER kill|full|count NUMBER WORDS.json

Calls on paths in FOLDER count: opening for writing, each write, fsync, rename, mkdir, unlink, rmdir, truncate, and
safetensors' own writing. A kill at a write leaves half of its data. From a full disk on every call fails with ENOSPC.
`count` prints the number of calls.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

FREES_SPACE = ("unlink", "remove", "rmdir")


class Fault:
    """What happens at which call.

    Args:
        folder: calls on paths in it count.
        kind: `kill`, `full` or `count`.
        number: number of the call, from 1.
    """

    def __init__(self, folder: str, kind: str, number: int) -> None:
        self.inside, self.kind, self.number, self.count = f"{folder}{os.sep}", kind, number, 0

    def reach(self, call: str, path: str, write_half: Callable[[], Any] = lambda: None) -> None:
        """Count a call; end the process or raise an OSError where it is time."""
        if not f"{path}{os.sep}".startswith(self.inside):
            return
        self.count += 1
        if self.kind == "kill" and self.count == self.number:
            write_half()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "full" and self.count >= self.number and call not in FREES_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def place(path: Any, descriptor: int | None = None) -> str:
    if isinstance(path, int):
        return str(Path(f"/proc/self/fd/{path}").readlink())
    base = Path.cwd() if descriptor is None else Path(f"/proc/self/fd/{descriptor}").readlink()
    return str(base / os.fsdecode(path))


class File(io.FileIO):
    """A file each of whose writes may fail."""

    fault: Fault
    path: str

    def write(self, data: Any, /) -> int:
        whole = memoryview(data).cast("B")
        self.fault.reach("write", self.path, lambda: io.FileIO.write(self, whole[: len(whole) // 2]))
        return super().write(whole)

    def truncate(self, size: int | None = None, /) -> int:
        self.fault.reach("truncate", self.path)
        return super().truncate(size)


def wrap_os(fault: Fault, name: str) -> None:
    original = getattr(os, name)

    def wrapped(path: Any, *args: Any, **options: Any) -> Any:
        if name != "open" or args[0] & os.O_CREAT:
            fault.reach(name, place(path, options.get("dir_fd") or options.get("src_dir_fd")))
        return original(path, *args, **options)

    setattr(os, name, wrapped)


def wrap_files(fault: Fault) -> None:
    """Count what files that are opened for writing, and descriptors, are given."""
    plain_open, plain_write = builtins.open, os.write

    def watched_open(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+"):
            return plain_open(file, mode, buffering, *args, **options)
        if not isinstance(file, int):
            fault.reach("open", place(file))
        raw = File(file, mode.replace("b", "").replace("t", ""))
        raw.fault, raw.path = fault, place(file)
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        encoding = options.get("encoding", args[0] if args else None) or "utf-8"
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, newline=options.get("newline"))

    def watched_write(descriptor: int, data: Any) -> int:
        fault.reach("write", place(descriptor), lambda: plain_write(descriptor, data[: len(data) // 2]))
        return plain_write(descriptor, data)

    builtins.open = io.open = watched_open  # type: ignore[assignment]
    os.write = watched_write


def wrap_safetensors(fault: Fault, module: Any) -> None:
    """Count safetensors' writing of a file, which is not Python's; its failures are its own, and leave a part."""
    plain = module.save_file

    def watched(tensors: Any, path: Any, metadata: Any = None) -> None:
        try:
            fault.reach("write", str(path), lambda: Path(path).write_bytes(b"half"))
        except OSError as error:
            Path(path).touch()
            raise SafetensorError(f"Error while serializing: I/O error: (os error {error.errno})") from None
        plain(tensors, path, metadata=metadata)

    module.save_file = watched


def main() -> int:
    import safetensors.torch

    from twophase.cli.main import main as command
    from twophase.figures import style
    from twophase.files import write_atomic

    style.save = lambda path, _: write_atomic(path, b"PNG")  # drawing takes a second
    folder, kind, number, words = sys.argv[1:]
    fault = Fault(folder, kind, int(number))
    for name in ("fsync", "replace", "rename", "mkdir", "unlink", "remove", "rmdir", "open"):
        wrap_os(fault, name)
    wrap_safetensors(fault, safetensors.torch)
    commands = json.loads(Path(words).read_text(encoding="utf-8"))
    wrap_files(fault)
    status = [command(each) for each in commands][-1]
    if kind == "count":
        print(f"calls: {fault.count}")
    return status


if __name__ == "__main__":
    sys.exit(main())
