"""A run is a folder: what is in it, which process may write to it, and when it counts as finished.

| file            | holds                                                            | written            |
|-----------------|------------------------------------------------------------------|--------------------|
| `config.yaml`   | the resolved configuration; says which run the folder belongs to | first, atomically  |
| `env.json`      | versions and machine                                             | once, atomically   |
| `metrics.jsonl` | one line an evaluation or log step                               | appended           |
| `rounds.jsonl`  | one line a round                                                 | appended           |
| `steps.jsonl`   | one line every `log_every` steps: loss, speed, memory            | appended           |
| `checkpoint/`   | the trainer's own                                                | by the trainer     |
| `summary.json`  | the outcome; the run is finished if and only if this validates   | last, atomically   |

Nothing here knows what is trained: a configuration is any tree of frozen dataclasses.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twophase.base.config import Tree, UsageError, differences, dump_yaml, fingerprint, load_yaml, to_tree
from twophase.base.files import TEMPORARY, write_atomic

CONFIG, ENV, SUMMARY = "config.yaml", "env.json", "summary.json"
METRICS, ROUNDS, STEPS = "metrics.jsonl", "rounds.jsonl", "steps.jsonl"
LOCK = ".lock"
_LOGS = (METRICS, ROUNDS, STEPS)


class BusyError(UsageError):
    """Another process is at work in the folder."""


class RunFolder:
    """One run's folder, claimed by this process until `release()` or its death; use `RunFolder.claim`.

    Attributes:
        path: the folder.
        fingerprint: of the configuration in its `config.yaml`.
        resumed: whether the folder held this run's `config.yaml` before the claim.
    """

    def __init__(self, path: Path, identity: str, lock: int, *, resumed: bool) -> None:
        self.path = path
        self.fingerprint = identity
        self.resumed = resumed
        self._lock: int | None = lock

    @classmethod
    def claim(cls, path: Path, config: Any) -> RunFolder:
        """Make or reopen the folder of a run and keep every other process out of it.

        A missing or empty folder becomes this run's; one that holds the same configuration is resumed. Every refusal
        leaves the disk as it was.

        Args:
            path: the run's folder (`--out`).
            config: the resolved configuration, a tree of frozen dataclasses.

        Returns:
            The claimed folder, with `config.yaml` written.

        Raises:
            UsageError: the folder belongs to another run, holds other files or a damaged `config.yaml`, is a file,
                cannot be written, or another process is training in it.
        """
        path = Path(path)
        tree = to_tree(config)
        _saved_tree(path, tree)  # refuse before anything is touched
        lock = lock_folder(path, "is training")
        try:
            saved = _saved_tree(path, tree)  # once more, now that no other process can write
            if saved is None:
                write_atomic(path / CONFIG, dump_yaml(tree))
        except BaseException as error:
            os.close(lock)
            if isinstance(error, OSError):
                raise _unwritable(path, error) from None
            raise
        return cls(path, fingerprint(tree if saved is None else saved), lock, resumed=saved is not None)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let other processes claim the folder; safe to repeat."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def checkpoint_dir(self) -> Path:
        """Where the trainer keeps its checkpoints (the trainer makes it)."""
        return self.path / "checkpoint"

    @property
    def weights(self) -> Path:
        """Where the trainer writes the final weights."""
        return self.path / "weights.safetensors"

    def summary(self) -> dict[str, Any] | None:
        """Return the outcome of the run, or None while it has no valid `summary.json`."""
        return read_summary(self.path, self.fingerprint)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, which makes the run finished; numbers that are not finite become null.

        Args:
            summary: `validation_loss`, a number, or null in a diverged run; `tokens`, a whole number; `seconds`;
                `diverged`, bool; `exit_reason`, text; and whatever else the task says of its run, such as `perplexity`.

        Raises:
            ValueError: a required value is missing or of the wrong type.
        """
        record = standard({**summary, "config": self.fingerprint})
        fault = _fault(record, self.fingerprint)
        if fault is not None:
            raise ValueError(f"RunFolder.finish: {fault}")
        write_atomic(self.path / SUMMARY, json.dumps(record, indent=2, allow_nan=False) + "\n")

    def write_env(self, env: Mapping[str, Any]) -> None:
        """Record versions and machine in `env.json`, unless an earlier part of this run has done so."""
        if not (self.path / ENV).exists():
            text = json.dumps(standard(env), indent=2, allow_nan=False) + "\n"
            write_atomic(self.path / ENV, text, durable=False)  # nothing depends on it

    def log_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl`; numbers that are not finite become null."""
        self._append(METRICS, record)

    def log_round(self, record: Mapping[str, Any]) -> None:
        """Append one line to `rounds.jsonl`; numbers that are not finite become null."""
        self._append(ROUNDS, record)

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Append one line to `steps.jsonl`; numbers that are not finite become null."""
        self._append(STEPS, record)

    def position(self) -> dict[str, int]:
        """Return the present length of each log in bytes; a checkpoint keeps it for `rewind`."""
        paths = {name: self.path / name for name in _LOGS}
        return {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}

    def rewind(self, position: Mapping[str, int] | None = None) -> None:
        """Cut the logs back to where a checkpoint was taken, so that a resumed run repeats no line.

        A log that is shorter than that keeps its whole lines; a last line that was cut in the middle goes.

        Args:
            position: what `position()` returned at the checkpoint; None, or a missing name, means from the start.
        """
        for name in _LOGS:
            path = self.path / name
            if path.exists():
                with path.open("r+b") as file:
                    file.truncate(_end_of_lines(file.read((position or {}).get(name, 0))))

    def last_round(self) -> dict[str, Any] | None:
        """Return the newest whole line of `rounds.jsonl`; None where there is none."""
        records = read_lines(self.path / ROUNDS)
        return records[-1] if records else None

    def set_aside(self, name: str) -> Path:
        """Move logs and checkpoints into a folder of that name, or the first free number of it, and return that."""
        places = (self.path / (f"{name}-{number}" if number > 1 else name) for number in itertools.count(1))
        place = next(place for place in places if not place.exists())
        place.mkdir()
        for path in (*(self.path / log for log in _LOGS), self.checkpoint_dir):
            if path.exists():
                path.rename(place / path.name)
        return place

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = json.dumps(standard(record), allow_nan=False) + "\n"
        # One unbuffered write of a whole line: a kill leaves at most one torn line, at the end.
        with (self.path / name).open("ab", buffering=0) as file:
            file.write(line.encode())


def read_summary(path: Path, expected: str | None = None) -> dict[str, Any] | None:
    """Return the outcome of the run in a folder, or None when the run is not finished.

    Args:
        path: the run's folder.
        expected: fingerprint of the run's configuration, where the caller knows it; otherwise that of the folder's
            `config.yaml`.

    Returns:
        What `summary.json` holds, if it is a JSON object with every required value of the right type and the
        fingerprint of this run.
    """
    try:
        record = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        wanted = fingerprint(load_yaml(path / CONFIG)) if expected is None else expected
    except (OSError, ValueError):  # unreadable, not UTF-8, not JSON, or (UsageError) no sound config.yaml
        return None
    return record if _fault(record, wanted) is None else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `.jsonl` file without a torn last line; a missing file is empty.

    Raises:
        UsageError: a whole line that is not a JSON object.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(data[: _end_of_lines(data)].splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UsageError(
                f"{path}: line {number} is not a JSON object; the file is damaged: put it back, or take the line out"
            )
        records.append(record)
    return records


def lock_folder(path: Path, doing: str) -> int:
    """Make a folder if it is missing and lock it for this process, which `doing` describes: `is training`.

    Returns:
        A file descriptor; closing it, or the death of the process, releases the lock.

    Raises:
        BusyError: another process holds the lock.
        UsageError: the folder cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise BusyError(
            f"--out {path}: another process {doing} in this folder; wait for it, stop it, or choose another --out"
        ) from None
    except OSError as error:
        os.close(lock)
        raise _unwritable(path, error) from None
    return lock


def check_place(path: Path, marker: str, what: str) -> bool:
    """Return whether a folder holds its marker file: False where it is missing or empty; changes nothing.

    Args:
        path: the folder.
        marker: the name of that file.
        what: what the folder should be, for the message: `run`.

    Raises:
        UsageError: a file in place of the folder, a folder of something else, or one that cannot be read.
    """
    try:
        names = [entry.name for entry in path.iterdir()]
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise UsageError(f"--out {path}: is a file, not a folder; choose another --out") from None
    except OSError as error:
        raise _unwritable(path, error) from None
    foreign = sorted(name for name in names if name != LOCK and not name.startswith(TEMPORARY))
    if foreign and marker not in foreign:
        raise UsageError(
            f"--out {path}: holds {foreign[0]!r} but no {marker}, so it is not the folder of a {what}; "
            "choose another --out"
        )
    return bool(foreign)


def list_some(phrases: Sequence[str], limit: int = 6) -> str:
    """Return the first phrases in one line, and how many more there are.

    >>> list_some(["a", "b", "c"], limit=2)
    'a; b; and 1 more'
    """
    more = [f"and {len(phrases) - limit} more"] if len(phrases) > limit else []
    return "; ".join([*phrases[:limit], *more])


def _saved_tree(path: Path, tree: Tree) -> Tree | None:
    """Return the folder's configuration if it is this run's, None if the folder is free; otherwise a UsageError."""
    if not check_place(path, CONFIG, "run"):
        return None
    try:
        saved = load_yaml(path / CONFIG)
    except UsageError as error:
        fault = str(error).removeprefix(f"--config {path / CONFIG}: ")
        raise UsageError(
            f"--out {path}: its {CONFIG} is damaged ({fault}); put it back or choose another --out"
        ) from None
    different = differences(tree, saved)
    if different:
        raise UsageError(
            f"--out {path}: belongs to another run: {list_some(different)}; "
            "choose another --out, or repeat that run's values to resume it"
        )
    return saved


def _fault(record: Any, wanted: str) -> str | None:
    """Return what keeps a summary from being valid, or None."""
    if not isinstance(record, dict):
        return "the summary is not a JSON object"
    # A run that has blown up may have no loss to report; a run that has not must have one.
    optional = type(None) if record.get("diverged") is True else float
    kinds: dict[str, tuple[type, ...]] = {
        "diverged": (bool,),
        "validation_loss": (int, float, optional),
        "tokens": (int,),
        "seconds": (int, float),
        "exit_reason": (str,),
        "config": (str,),
    }
    for key, kind in kinds.items():
        if key not in record:
            return f"the summary has no {key!r}"
        value = record[key]
        fits = isinstance(value, kind) and (bool in kind or not isinstance(value, bool))
        fits = fits and not (isinstance(value, float) and not math.isfinite(value))
        if not fits or (key == "config" and value != wanted):
            return f"the summary's {key!r} is {value!r}, which does not fit"
    return None


def standard(value: Any) -> Any:
    """Return the value with null for every number that is not finite, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): standard(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [standard(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _end_of_lines(data: bytes) -> int:
    """Return number of bytes up to the end of the last whole line."""
    return data.rfind(b"\n") + 1


def _unwritable(path: Path, error: OSError) -> UsageError:
    reason = "a file is in the way" if error.errno in {errno.ENOTDIR, errno.EEXIST} else error.strerror or str(error)
    return UsageError(f"--out {path}: cannot be used ({reason}); choose another --out")
