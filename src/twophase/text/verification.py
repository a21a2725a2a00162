"""Token files that were taken on trust are read back in the background, while a run trains on them."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from twophase.base.progress import meter
from twophase.text.shards import remember

BYTES_PER_SECOND = 50_000_000
_BLOCK_BYTES = 1 << 20


class Verification:
    """Compares files with their SHA-256 in a thread, at `BYTES_PER_SECOND` at most.

    Args:
        expected: the SHA-256 of each file, hexadecimal.

    Attributes:
        fault: fault of a file, with the remedy; empty without a fault.
    """

    def __init__(self, expected: Mapping[Path, str]) -> None:
        self.fault = ""
        self._expected = dict(expected)
        self._done_bytes = 0
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless that was done; of the processes that torchrun started on a machine, the first does it."""
        if self._expected and self._thread is None and os.environ.get("LOCAL_RANK", "0") == "0":
            # A daemon: a command that fails or is interrupted need not wait for it.
            self._thread = threading.Thread(target=self._read, name="verify-tokens", daemon=True)
            self._thread.start()

    def finish(self) -> str:
        """Read what is left without a pause; return the fault."""
        self._hurry.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)
            total = sum(path.stat().st_size for path in self._expected if path.exists())
            with meter("checking token files (MB)", total // 10**6, quiet=not self._thread.is_alive()) as show:
                while self._thread.is_alive():
                    show(self._done_bytes // 10**6, "")
                    self._thread.join(0.5)
        return self.fault

    def _read(self) -> None:
        for path, expected in self._expected.items():
            digest = hashlib.sha256()
            try:
                with path.open("rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        digest.update(block)
                        self._done_bytes += len(block)
                        self._hurry.wait(len(block) / BYTES_PER_SECOND)  # returns at once when hurried
            except OSError as error:
                self.fault = f"{path} cannot be read any more ({error.strerror}); check the disk, copy it again"
                return
            if digest.hexdigest() != expected:
                remember(path, None)
                self.fault = (
                    f"{path} was damaged since it was prepared, at the same size and time of change. Its SHA-256 is "
                    f"{digest.hexdigest()[:16]}…, not {expected[:16]}…; copy it again, or prepare the folder again"
                )
                return
