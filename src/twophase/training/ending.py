"""The end of an elastic run, in a file that its replicas share: a run has one result, also for a late replica.

The first replica that finishes writes the file, and no later result may differ from it. A replica that was dead or
suspended meanwhile reads the file at its start and before each sync, and adopts the result.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twophase.base.config import RunError
from twophase.base.files import write_atomic
from twophase.base.reading import read_json_object
from twophase.runs.folder import digest, sealed
from twophase.runs.log import standard

_SEAL = "sha256"
"""Key of the digest of all else in the file."""


class Ending:
    """The record of a run's end.

    Args:
        path: the file; in a folder that all replicas reach, it holds for all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, run: int = 0) -> dict[str, Any] | None:
        """Return `run`, `config`, `checksum`, `host`, `folder` and `summary` of the result; None without a result.

        Args:
            run: identity of the run; the record of another is None. 0 takes any.

        Raises:
            RunError: the file cannot be read, or is no such record.
        """
        try:
            record = read_json_object(self.path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._damaged(str(error)) from None
        if digest(record, _SEAL) != record.pop(_SEAL, ""):
            raise self._damaged("its checksum is not that of its content")
        return record if run in (0, record["run"]) else None

    def is_over(self, run: int) -> bool:
        """Tell whether a run has ended; an unreadable file ends no run under way."""
        try:
            return self.read(run) is not None
        except RunError:
            return False

    def conclude(self, run: int, config: str, folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Record a result unless the run has one; return the record of the run's result.

        Args:
            run: identity of the run.
            config: identity of its configuration.
            folder: folder of the replica that has the result.
            summary: its `summary.json`, with the checksum.

        Raises:
            RunError: the file holds the record of another run.
            OSError: it cannot be written.
        """
        checksum, path = summary["checksum"], str(folder.resolve())
        record = {"run": run, "config": config, "checksum": checksum, "host": socket.gethostname(), "folder": path}
        record["summary"] = standard(summary)
        try:
            write_atomic(self.path, sealed(record, _SEAL), replace=False)
        except FileExistsError:
            existing = self.read()
            if existing is None or existing["run"] != run:
                raise RunError(
                    f"--run-record {self.path}: holds the end of another run, so that of run {run} cannot be written "
                    "there. Name another file or move this one, then repeat the command: checkpoints are intact"
                ) from None
            return existing
        return record

    def _damaged(self, why: str) -> RunError:
        return RunError(
            f"--run-record {self.path}: is not the record of a run's end ({why}); put it back, or move it and repeat "
            "the command"
        )
