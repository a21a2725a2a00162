"""A run is a folder: what is in it, which process may write to it, and when it counts as finished.

| file            | holds                                                            | written            |
|-----------------|------------------------------------------------------------------|--------------------|
| `config.yaml`   | the resolved configuration; says which run the folder belongs to | first, atomically  |
| `env.json`      | versions, machine and data                                       | once, atomically   |
| `metrics.jsonl` | one line an evaluation or log step                               | appended           |
| `rounds.jsonl`  | one line a round                                                 | appended           |
| `steps.jsonl`   | one line every `log_every` steps: loss, speed, memory            | appended           |
| `checkpoint/`   | the trainer's own                                                | by the trainer     |
| `weights.safetensors` | the final weights                                          | before the summary |
| `summary.json`  | the outcome; the run is finished if and only if this validates   | last, atomically   |

Nothing here knows what is trained: a configuration is any tree of frozen dataclasses.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from twophase.base.config import Tree, UsageError, differences, dump_yaml, fingerprint, load_yaml, to_tree
from twophase.base.files import TEMPORARY, file_sha256, make_folder, remove_leftovers, sync_folder, write_atomic
from twophase.base.reading import json_object_or_none, read_json_object
from twophase.runs.log import Log, Mark, read_log, standard

CONFIG, ENV, SUMMARY, WEIGHTS = "config.yaml", "env.json", "summary.json", "weights.safetensors"
CHECKPOINTS = "checkpoint"
METRICS, ROUNDS, STEPS = "metrics.jsonl", "rounds.jsonl", "steps.jsonl"
LOCK, TRACKING = ".lock", "tracking.json"
REPORT, COMPARE = "report.html", "compare.html"
"""Names of the page of a run or sweep in its folder, and of the page of several runs."""
USER = "user"
"""Group of a recorded run's configuration that holds the caller's own values."""
RECORDED = "recorded"
"""In the configuration of a run that a loop of the caller's own trained, and its exit reason: it may end without a
validation."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a run may be called in a file; any other name might lead out of its folder."""
LOGS = (METRICS, ROUNDS, STEPS)
_SEAL = "summary_sha256"
_RATIOS = ("perplexity", "perplexity_per_byte", "engine_share")
"""Numbers of a summary that a task may leave out."""
_LONGEST_SECONDS = 1e10
"""Above this, three centuries, the time of a run is a damaged number, which no date would hold."""


class BusyError(UsageError):
    """Another process is at work in the folder."""


class RunFolder:
    """One run's folder, claimed by this process until `release()` or its death; use `RunFolder.claim`.

    Attributes:
        path: the folder.
        fingerprint: fingerprint of the configuration in its `config.yaml`.
        accept_logs: True if `rewind` accepts logs that were lost or altered, and marks the gap.
    """

    def __init__(self, path: Path, identity: str, lock: int | None, *, accept_logs: bool = False) -> None:
        self.path = path
        self.fingerprint = identity
        self.accept_logs = accept_logs
        self._lock = lock
        self._logs = {name: Log(path / name) for name in LOGS}
        self._weights_sha256 = ""

    @classmethod
    def claim(cls, path: Path, config: Any, *, accept_logs: bool = False) -> RunFolder:
        """Make or reopen the folder of a run and keep every other process out of it.

        A missing or empty folder becomes this run's; one that holds the same configuration is resumed. Every refusal
        leaves the disk as it was.

        Args:
            path: the run's folder (`--out`).
            config: the resolved configuration, a tree of frozen dataclasses, or of dictionaries.
            accept_logs: accept logs that were lost or altered (`--accept-logs`).

        Returns:
            The claimed folder, with `config.yaml` written.

        Raises:
            UsageError: the folder belongs to another run, holds other files or a damaged `config.yaml`, is a file,
                cannot be written, or is in use.
        """
        tree = config if isinstance(config, dict) else to_tree(config)
        _saved_tree(path, tree)  # refuse before anything is touched
        lock = lock_folder(path, "is training")
        try:
            saved = _saved_tree(path, tree)  # once more, now that no other process can write
            remove_leftovers(path)
            if saved is None:
                write_atomic(path / CONFIG, dump_yaml(tree))
        except BaseException as error:
            os.close(lock)
            if isinstance(error, OSError):
                raise _unwritable(path, error) from None
            raise
        return cls(path, fingerprint(tree if saved is None else saved), lock, accept_logs=accept_logs)

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
        """Folder of the trainer's checkpoints (the trainer makes it)."""
        return self.path / CHECKPOINTS

    def summary(self) -> dict[str, Any] | None:
        """Return the outcome of the run, or None while it has no valid `summary.json`."""
        return read_summary(self.path, self.fingerprint)

    def write_weights(self, weights: bytes) -> None:
        """Write the final weights, `weights.safetensors`; `finish` then records their SHA-256."""
        self._check_place()
        write_atomic(self.path / WEIGHTS, weights)
        self._weights_sha256 = hashlib.sha256(weights).hexdigest()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, which makes the run finished.

        Numbers that are not finite become null. The summary records its own SHA-256 and that of the weights.

        Args:
            summary: `validation_loss`, a number, or null in a diverged run; `tokens`, a whole number; `seconds`;
                `diverged`, bool; `exit_reason`, text. The task may add more, such as `perplexity`.

        Raises:
            ValueError: a required value is missing or of the wrong type.
        """
        record = standard({**summary, "config": self.fingerprint})
        if fault := _fault(record, self.fingerprint):
            raise ValueError(f"RunFolder.finish: {fault}")
        self._check_place()
        self.sync_logs()  # a power cut must not leave a finished run without its last lines
        if self._weights_sha256:
            record["weights_sha256"] = self._weights_sha256
        write_atomic(self.path / SUMMARY, sealed(record, _SEAL))

    def write_env(self, env: Mapping[str, Any], *, anew: bool = False) -> None:
        """Record versions, machine and data in `env.json`; a sound record of the same data stays, unless `anew`."""
        text = json.dumps(standard(env), indent=2, allow_nan=False) + "\n"
        earlier = json_object_or_none(self.path / ENV)
        if anew or earlier is None or earlier.get("corpus") != json.loads(text).get("corpus"):
            write_atomic(self.path / ENV, text, durable=False)  # damaged, it is written again

    def log(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one line to one of `LOGS`; numbers that are not finite become null."""
        self._check_place()
        self._logs[name].append(record)

    def _check_place(self) -> None:
        """Refuse a folder that was moved or removed, for its name may be another process's by now."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(-1 if self._lock is None else self._lock), (self.path / LOCK).stat()):
                return
        raise FileNotFoundError(errno.ENOENT, "it was moved, removed or replaced during the run", str(self.path))

    def position(self) -> dict[str, Mark]:
        """Return the present length and SHA-256 of each log; a checkpoint keeps them for `rewind`."""
        return {name: log.mark() for name, log in self._logs.items()}

    def sync_logs(self) -> None:
        """Bring the logs to the disk; another thread may append meanwhile."""
        for log in self._logs.values():
            log.sync()
        sync_folder(self.path)

    def rewind(self, position: Mapping[str, Mark | int], step: int = 0) -> None:
        """Cut the logs back to where a checkpoint was taken, so that a resumed run repeats no line.

        As `accept_logs` says, those that were lost or altered then hold what can still be read, and a mark of the gap.

        Args:
            position: result of `position()` at the checkpoint; a missing name means the empty log.
            step: inner steps of the checkpoint.

        Raises:
            UsageError: a log was lost or altered and is not accepted; nothing is changed then.
        """
        faults = {name: fault for name, log in self._logs.items() if (fault := log.fault(position.get(name), step))}
        if faults and not self.accept_logs:
            name, fault = next(iter(faults.items()))
            raise UsageError(
                f"{self.path / name}: is not the log that the checkpoint of step {step} counts ({fault}). Put the "
                "file back, or mark the gap: repeat the command with --accept-logs (in a sweep or study: "
                f"twophase train --config {shlex.quote(str(self.path / CONFIG))} --out {shlex.quote(str(self.path))} "
                "--accept-logs)"
            )
        for name, fault in faults.items():
            self._logs[name].mend(step, fault)
        for name, log in self._logs.items():
            log.rewind(position.get(name), step)

    def cut(self, step: int, rounds: Mapping[str, int]) -> None:
        """Cut the lines after an inner step and after the rounds of fragments; a loop that went back repeats them."""
        for log in self._logs.values():
            log.cut(step, rounds)

    def set_aside(self, name: str) -> Path:
        """Move logs, checkpoints and trackers' id to a folder of that name, or its first free number; return it."""
        places = (self.path / (f"{name}-{number}" if number > 1 else name) for number in itertools.count(1))
        place = next(place for place in places if not place.exists())
        place.mkdir()
        # First the id, lest a tracker show two runs as one; then the checkpoint: without its logs it would be refused.
        for path in (self.path / TRACKING, self.checkpoint_dir, *(self.path / log for log in LOGS)):
            if path.exists():
                path.rename(place / path.name)
        self._logs = {name: Log(self.path / name) for name in LOGS}
        return place


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
        record = read_json_object(path / SUMMARY)
        wanted = fingerprint(load_yaml(path / CONFIG)) if expected is None else expected
        return record if _fault(record, wanted) is None else None
    except (OSError, ValueError):  # unreadable, no JSON, or (UsageError) no sound config.yaml
        return None


def weights_fault(path: Path, summary: Mapping[str, Any]) -> str:
    """Return what is wrong with the final weights of a run, with its remedy; nothing where they are sound.

    Nothing is wrong with weights that were removed, nor with those of earlier versions, which recorded no SHA-256.

    Args:
        path: the run's folder.
        summary: content of its `summary.json`.
    """
    expected, weights = summary.get("weights_sha256"), path / WEIGHTS
    try:
        if expected is None or file_sha256(weights) == expected:
            return ""
        why = f"is damaged: its SHA-256 differs from the one in {SUMMARY};"
    except FileNotFoundError:
        return ""
    except OSError as error:
        why = f"cannot be read ({error.strerror}); make it readable, or"
    return (
        f"{weights} {why} delete it and {SUMMARY} and repeat the run's command, or its sweep's, which resumes from "
        "the last checkpoint, or trains the run again"
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `.jsonl` file but for a torn last line and marks of gaps; a missing file is empty.

    Raises:
        UsageError: a whole line that is not a JSON object.
    """
    return read_log(path)[0]


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Return the records of a run's `rounds.jsonl`.

    Raises:
        UsageError: as `read_lines`, or one without its step, round or checksum.
    """
    records = read_lines(path / ROUNDS)
    if any(not {"step", "round", "checksum"} <= record.keys() for record in records):
        raise UsageError(
            f"{path / ROUNDS}: a line has no step, round or checksum; the file is damaged: put it back, or take the "
            "line out"
        )
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
        make_folder(path)
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
        what: kind of the folder, for the message: `run`.

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


def _fault(record: Mapping[str, Any], wanted: str) -> str | None:
    """Return what keeps a summary from being valid, or None."""
    # A run that has blown up may have no loss to report; a run that has not must have one.
    may_lack_loss = record.get("diverged") is True or record.get("exit_reason") == RECORDED
    optional = type(None) if may_lack_loss else float
    kinds: dict[str, tuple[type, ...]] = {
        "diverged": (bool,),
        "validation_loss": (int, float, optional),
        "tokens": (int,),
        "seconds": (int, float),
        "exit_reason": (str,),
        "config": (str,),
    }
    counts = {name: (int,) for name in ("steps", "rounds", "restarts") if name in record}
    ratios = {name: (int, float, type(None)) for name in _RATIOS if name in record}
    for key, kind in (kinds | counts | ratios).items():
        if key not in record:
            return f"the summary has no {key!r}"
        value = record[key]
        fits = isinstance(value, kind) and (bool in kind or not isinstance(value, bool))
        # JSON knows whole numbers that no float holds, such as 10**400.
        largest = _LONGEST_SECONDS if key == "seconds" else sys.float_info.max
        fits = fits and (not isinstance(value, (int, float)) or abs(value) <= largest)
        if not fits or (key == "config" and value != wanted):
            return f"the summary's {key!r} is {str(value)[:80]!r}, which does not fit"
    if record.get(_SEAL, seal := digest(record, _SEAL)) != seal:  # earlier versions wrote none
        return "the summary's content differs from its SHA-256"
    return None


def sealed(record: Mapping[str, Any], key: str) -> str:
    """Return the JSON of a record, with the digest of all else under a key."""
    return json.dumps({**record, key: digest(record, key)}, indent=2, allow_nan=False) + "\n"


def digest(record: Mapping[str, Any], key: str) -> str:
    """Return the SHA-256 of a record of plain values without what is under a key."""
    rest = {name: value for name, value in record.items() if name != key}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _unwritable(path: Path, error: OSError) -> UsageError:
    reason = "a file is in the way" if error.errno in {errno.ENOTDIR, errno.EEXIST} else error.strerror or str(error)
    return UsageError(f"--out {path}: cannot be used ({reason}); choose another --out")
