"""Logs and temporary files: no line is joined, lost or altered unnoticed, and no file of a live process is removed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakerun import Config
from twophase.base.config import UsageError
from twophase.base.files import append_line, remove_leftovers, write_atomic
from twophase.runs.folder import METRICS, ROUNDS, RunFolder, read_lines, read_rounds
from twophase.runs.log import Log, read_log
from twophase.runs.record import read_record

STEPS = (4, 8, 12)
SUMMARY = {"validation_loss": 2.0, "tokens": 640, "seconds": 1.5, "diverged": False, "exit_reason": "finished"}


def filled(path: Path, steps: tuple[int, ...] = STEPS) -> tuple[RunFolder, dict[str, Any]]:
    """Claim a run's folder, write its logs up to a checkpoint, and go on for a line."""
    folder = RunFolder.claim(path, Config())
    for number, step in enumerate(steps, start=1):
        folder.log(METRICS, {"step": step, "train_loss": 1.5})
        folder.log(ROUNDS, {"step": step, "round": number, "checksum": f"{step:x}"})
    position = json.loads(json.dumps(folder.position()))
    folder.log(ROUNDS, {"step": 16, "round": 4})
    return folder, position


HARMS: dict[str, tuple[Callable[[bytes], bytes] | None, list[int]]] = {
    # what happens to the log, and the steps of the lines that can still be read
    "a line is missing": (lambda data: b"".join(data.splitlines(keepends=True)[:2]), [4, 8]),
    "cut inside a line": (lambda data: data[: len(data) // 2 - 5], [4]),
    "empty": (lambda _: b"", []),
    "gone": (None, []),
    "a number is altered": (lambda data: data.replace(b'"checksum": "8"', b'"checksum": "9"'), [4, 8, 12]),
    "a bit is set": (lambda data: data[:30] + bytes([data[30] | 128]) + data[31:], [8, 12]),
    "a line is inserted": (lambda data: data.replace(b'{"step": 8', b'{"step": 4}\n{"step": 8'), [4, 8, 12]),
    "nested without end": (lambda data: data.replace(b'{"step": 8', b"[" * 100_000 + b'\n{"step": 8'), [4, 8, 12]),
}


@pytest.mark.parametrize("harm", HARMS)
def test_lost_and_altered_logs(tmp_path: Path, harm: str) -> None:
    """A log that no longer begins with what a checkpoint counts is refused, and nothing changes.

    With `accept_logs` the run goes on with what can be read, a report names the gap, and the old file stays.
    """
    folder, position = filled(tmp_path)
    log, (change, readable) = tmp_path / "rounds.jsonl", HARMS[harm]
    log.write_bytes((change or bytes)(log.read_bytes()))
    if change is None:
        log.unlink()
    damaged = log.read_bytes() if log.exists() else None
    folder.release()
    with RunFolder.claim(tmp_path, Config()) as folder:
        with pytest.raises(UsageError, match=rf"{log}: .* checkpoint of step 12 .*Put the file back.*--accept-logs"):
            folder.rewind(position, 12)
        assert (log.read_bytes() if log.exists() else None) == damaged
    assert len(read_lines(tmp_path / "metrics.jsonl")) == len(STEPS)
    with RunFolder.claim(tmp_path, Config(), accept_logs=True) as folder:
        folder.rewind(position, 12)
        assert [line["step"] for line in read_rounds(tmp_path)][-1:] == readable[-1:]
        folder.log(ROUNDS, {"step": 16, "round": 6})
        folder.rewind(folder.position(), 16)
    lines, (gap,) = read_log(log)
    assert [line["step"] for line in lines] == [*readable, 16]
    assert gap["step"] == 12
    (problem,) = (text for text in read_record(tmp_path).problems if "--accept-logs" in text)
    assert gap["gap"] in problem
    kept_files = [path.read_bytes() for path in tmp_path.glob("rounds.jsonl.gap-*")]
    assert kept_files == ([damaged] if damaged else [])


def test_a_second_gap_leaves_the_first(tmp_path: Path) -> None:
    """Each log that was altered is told, for the lines before it are still not those that were written."""
    folder, _ = filled(tmp_path)
    log = tmp_path / "rounds.jsonl"
    for step, word in ((12, b'"round": 1'), (20, b'"round": 4')):
        position = folder.position()
        folder.release()
        log.write_bytes(log.read_bytes().replace(word, b'"round": 9'))
        folder = RunFolder.claim(tmp_path, Config(), accept_logs=True)
        folder.rewind(position, step)
        for number in (4, 5):
            folder.log(ROUNDS, {"step": step + 4 * (number - 3), "round": number})
    folder.release()
    assert [gap["step"] for gap in read_log(log)[1]] == [12, 20]


@pytest.mark.parametrize("accepts", [[True, True], [True, False, False]])
def test_a_log_is_accepted_once(tmp_path: Path, accepts: list[bool]) -> None:
    """A kill before the next checkpoint asks no second time; the gap stays marked once, and no line is written twice.

    What happens to the log after that is noticed as before.
    """
    folder, position = filled(tmp_path)
    log = tmp_path / "rounds.jsonl"
    log.write_text('{"step": 4, "round": 1}\n')
    folder.release()
    for accept_logs in accepts:
        with RunFolder.claim(tmp_path, Config(), accept_logs=accept_logs) as folder:
            folder.rewind(position, 12)
            folder.log(ROUNDS, {"step": 16, "round": 4})
    lines, gaps = read_log(log)
    assert ([line["step"] for line in lines], len(gaps)) == ([4, 16], 1)
    assert len(list(tmp_path.glob("rounds.jsonl.gap-*"))) == 1
    mended = log.read_bytes()
    for harmed in (mended.replace(b'"round": 1', b'"round": 2'), mended.splitlines(keepends=True)[0]):
        log.write_bytes(harmed)
        with RunFolder.claim(tmp_path, Config()) as folder, pytest.raises(UsageError, match="--accept-logs"):
            folder.rewind(position, 12)


def test_gaps_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They have no SHA-256."""
    (tmp_path / "log").write_text('{"step": 4, "gap": "12 bytes are left of 40"}\n')
    assert [len(part) for part in read_log(tmp_path / "log")] == [0, 1]


def test_older_checkpoints_know_lengths_alone(tmp_path: Path) -> None:
    """The bare lengths of an older checkpoint are checked as such, and rewound to."""
    folder, position = filled(tmp_path)
    lengths = {name: mark["bytes"] for name, mark in position.items()}
    folder.rewind(lengths, 12)
    assert [line["step"] for line in read_lines(tmp_path / "rounds.jsonl")] == [*STEPS]
    (tmp_path / "rounds.jsonl").write_text('{"step": 4}\n')
    with pytest.raises(UsageError, match=r"12 bytes are left of \d+"):
        folder.rewind(lengths, 12)
    folder.release()


def test_the_running_checksum_is_that_of_the_file(tmp_path: Path) -> None:
    """A log that goes on after a kill, with half a line at its end, has the mark of one written in one go."""
    records = [{"step": step, "text": "ß" * step} for step in range(5)]
    whole, parts = Log(tmp_path / "whole"), tmp_path / "parts"
    for record in records:
        whole.append(record)
        Log(parts).append(record)
        with parts.open("ab") as file:
            file.write(b'{"step": 1')
    assert Log(parts).mark() == whole.mark()
    assert Log(parts).fault(whole.mark()) is None


@pytest.mark.parametrize("room", [0, 5])
def test_a_full_disk_glues_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """With room for a part of a line, or none, the error names the file and its reason; the next line stands alone."""
    path, write = tmp_path / "log", os.write
    log = Log(path)
    log.append({"step": 1})
    space = [room]

    def full(file: int, data: bytes) -> int:
        if not space[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, data[: space[0]])
        space[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*log'"):
            log.append({"step": 2})
    log.append({"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'
    assert log.mark() == Log(path).mark()


def test_a_short_write_without_a_reason_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that writes less than it was given, twice, has no room."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:2]))
    with pytest.raises(OSError, match="No space left on device"):
        append_line(tmp_path / "log", b"a line\n")
    assert (tmp_path / "log").read_bytes() == b""


def test_finish_syncs_the_logs_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last lines are on the disk before the summary says that the run has ended."""
    folder, _ = filled(tmp_path)
    synced: list[str] = []
    fsync = os.fsync

    def note(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
        fsync(file)

    monkeypatch.setattr(os, "fsync", note)
    folder.finish(SUMMARY)
    summary = next(number for number, name in enumerate(synced) if name.startswith(".tmp-summary.json"))
    assert {"rounds.jsonl", "metrics.jsonl", tmp_path.name} <= set(synced[:summary])
    folder.release()


WRITERS = {
    "a file": "os.fsync = wait; files.write_atomic(Path(sys.argv[1]), b'new')",
    "a library's file": "with files.replacing(Path(sys.argv[1])) as path: path.with_name('.tmpx').touch(); wait()",
}
START = """
import os, sys, time
from pathlib import Path
import twophase.base.files as files
wait = lambda *_: (print("writing", flush=True), time.sleep(60))
"""


@pytest.mark.parametrize("writer", WRITERS)
def test_leftovers_of_the_dead_alone(tmp_path: Path, writer: str) -> None:
    """What a live process writes stays, though it is suspended; what it leaves when it is killed goes.

    So do folders; other names, such as open shards, are none of this.
    """
    path = tmp_path / "file"
    others = [tmp_path / name for name in (".tmp-train-00000.bin", ".tmp-x", "file")]
    for other in others:
        other.write_bytes(b"")
    folder = tmp_path / ".tmp-export-12-0123abcd"
    folder.mkdir()
    (folder / "part").write_bytes(b"half")
    with subprocess.Popen(
        [sys.executable, "-c", START + WRITERS[writer], str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGSTOP)
        remove_leftovers(tmp_path)
        (temporary,) = (entry for entry in tmp_path.glob(".tmp-file-*"))
        assert not folder.exists()
        process.send_signal(signal.SIGKILL)
    remove_leftovers(tmp_path, "another")
    assert temporary.exists()
    write_atomic(path, b"newer")  # the next writer of the file tidies up by itself
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_claim_removes_leftovers(tmp_path: Path) -> None:
    """A process that goes on with a run removes what a killed one left half written in its folder."""
    RunFolder.claim(tmp_path, Config()).release()
    leftover = tmp_path / ".tmp-weights.safetensors-7-89abcdef"
    leftover.write_bytes(b"half")
    RunFolder.claim(tmp_path, Config()).release()
    assert not leftover.exists()
