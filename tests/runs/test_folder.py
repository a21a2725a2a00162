"""A run's folder: whose it is, which process may write to it, and when it counts as finished."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import snapshot
from twophase.config import fingerprint, load_yaml
from twophase.errors import RunError, UsageError
from twophase.files import read_jsonl
from twophase.runs.config import OuterConfig
from twophase.runs.folder import METRICS, ROUNDS, STALE_SECONDS, BusyError, RunFolder
from twophase.runs.record import read_summary

CONFIG: dict[str, Any] = {"seed": 0, "inner_steps": 2, "outer": {"lr": 0.7}}


def age(path: Path, seconds: float) -> None:
    """Make the last claim look as if it was not touched for so long."""
    file = max(path.glob(".claim-*"), key=lambda file: int(file.name.removeprefix(".claim-")))
    when = file.stat().st_mtime - seconds
    os.utime(file, (when, when))


def test_a_folder_belongs_to_one_configuration(tmp_path: Path) -> None:
    """The same configuration reopens it; another is refused with the first value that differs, and changes nothing."""
    for _ in range(2):
        with RunFolder.claim(tmp_path / "run", CONFIG) as folder:
            assert folder.fingerprint == fingerprint(CONFIG)
    assert load_yaml(tmp_path / "run" / "config.yaml") == CONFIG
    before = snapshot(tmp_path / "run")
    for change, words in (
        ({"outer": {"lr": 0.9}}, r"--outer\.lr: .*0\.7.*0\.9"),
        ({"inner_steps": 3}, "--inner-steps: .*2.*3"),
        ({"inner_steps": None}, "--inner-steps: .*2.*None"),
    ):
        with pytest.raises(UsageError, match=words):
            RunFolder.claim(tmp_path / "run", CONFIG | change)
    assert snapshot(tmp_path / "run") == before
    RunFolder.claim(tmp_path / "dataclass", OuterConfig()).release()
    assert load_yaml(tmp_path / "dataclass" / "config.yaml")["method"] == "averaging"


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """Other files are named and stay; leftovers of a killed writer are no other files, and are removed."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"--out .*notes\.txt"):
        RunFolder.claim(tmp_path, CONFIG)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "notes.txt").rename(tmp_path / ".summary.json.0.tmp")
    RunFolder.claim(tmp_path, CONFIG).release()
    assert not list(tmp_path.glob(".*.tmp"))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """While a process holds the folder every claim is refused with its host and number; its death frees the folder."""
    code = (
        "import sys; from pathlib import Path; from twophase.runs.folder import RunFolder\n"
        "folder = RunFolder.claim(Path(sys.argv[1]), {'seed': 0}); print('held', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"process {other.pid} on "):
            RunFolder.claim(tmp_path, {"seed": 0})
        other.kill()
    with RunFolder.claim(tmp_path, {"seed": 0}) as folder:
        with pytest.raises(BusyError, match=f"process {os.getpid()} on "):
            RunFolder.claim(tmp_path, {"seed": 0})
        folder.release()
        for write in (lambda: folder.log(METRICS, {"step": 1}), lambda: folder.finish({}), lambda: folder.truncate(0)):
            with pytest.raises(RunError, match="released"):
                write()


@pytest.mark.parametrize("lock", [True, False])
def test_two_hosts(tmp_path: Path, lock: bool) -> None:
    """Another host's claim is respected while it is touched; one that was released, or is old, is taken over.

    With a lock that works as without: where hosts share a folder each may see its own locks alone. A host that was
    suspended meanwhile writes nothing more.
    """
    first = RunFolder.claim(tmp_path, CONFIG, host="first", lock=False)
    for seconds in (0.0, STALE_SECONDS - 10):
        age(tmp_path, seconds)
        with pytest.raises(BusyError, match=f"process {os.getpid()} on first"):
            RunFolder.claim(tmp_path, CONFIG, host="second", lock=lock)
    first.release()
    RunFolder.claim(tmp_path, CONFIG, host="second", lock=lock).release()
    suspended = RunFolder.claim(tmp_path, CONFIG, host="suspended", lock=False)
    age(tmp_path, STALE_SECONDS + 1)
    with RunFolder.claim(tmp_path, CONFIG, host="second", lock=lock) as second:
        second.log(METRICS, {"step": 1})
        for _ in range(2):
            with pytest.raises(RunError, match="taken over"):
                suspended.log(METRICS, {"step": 1})
            suspended.release()
        with pytest.raises(BusyError, match="on second"):
            RunFolder.claim(tmp_path, CONFIG, host="first", lock=False)
    assert len(read_jsonl(tmp_path / METRICS)) == 1


def test_a_claim_of_this_host_is_void_with_its_lock(tmp_path: Path) -> None:
    """The lock of a process that was killed is free, so its claim holds up nobody on its host; elsewhere it does.

    One that was killed before it had written its name holds up nobody for long.
    """
    (tmp_path / ".claim-6").touch()
    age(tmp_path, 4.8)
    RunFolder.claim(tmp_path, CONFIG).release()
    (tmp_path / ".claim-8").write_text(json.dumps({"host": "here", "pid": 1}))
    for host, lock in (("there", True), ("here", False)):
        with pytest.raises(BusyError, match="process 1 on here"):
            RunFolder.claim(tmp_path, CONFIG, host=host, lock=lock)
    RunFolder.claim(tmp_path, CONFIG, host="here").release()


def test_one_of_many_rivals_takes_over(tmp_path: Path) -> None:
    """Of hosts that all see a dead one's claim at once a single one gets the folder, every time."""
    RunFolder.claim(tmp_path, CONFIG, host="dead", lock=False)
    for turn in range(20):
        age(tmp_path, STALE_SECONDS + 1)
        barrier, won = threading.Barrier(4), list[RunFolder]()

        def rival(name: str, barrier: threading.Barrier = barrier, won: list[RunFolder] = won) -> None:
            barrier.wait()
            with suppress(BusyError):
                won.append(RunFolder.claim(tmp_path, CONFIG, host=name, lock=False))

        threads = [threading.Thread(target=rival, args=(f"{turn} {n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1


def test_a_log_line_and_the_environment(tmp_path: Path) -> None:
    """A record is one line of standard JSON at once; the environment is written once."""
    with RunFolder.claim(tmp_path, CONFIG) as folder:
        folder.log(METRICS, {"step": np.int64(1), "loss": math.nan, 3: {"a": (math.inf, np.float32(0.5))}})
        assert read_jsonl(tmp_path / METRICS) == [{"step": 1, "loss": None, "3": {"a": [None, 0.5]}}]
        for version in ("3.11", "3.12"):
            folder.write_env({"python": version})
    assert json.loads((tmp_path / "env.json").read_text()) == {"python": "3.11"}


@pytest.mark.parametrize("torn", [b"", b'{"step": 3, "lo'])
def test_a_resumed_run_repeats_no_line(tmp_path: Path, torn: bytes) -> None:
    """After `truncate` the logs hold the lines up to the checkpoint, and are those of an uninterrupted run."""
    with RunFolder.claim(tmp_path, CONFIG) as folder:
        whole = [{"step": step, "loss": 1 / step} for step in range(1, 6)]
        for line in whole[:4]:
            folder.log(METRICS, line)
        with (tmp_path / METRICS).open("ab") as file:
            file.write(torn)
        folder.truncate(2)
        for line in whole[2:]:
            folder.log(METRICS, line)
        assert read_jsonl(tmp_path / METRICS) == whole
        folder.truncate(0)
        assert (tmp_path / METRICS).read_bytes() == b""
        assert not (tmp_path / ROUNDS).exists()


def test_finished_if_the_summary_is_of_this_run(tmp_path: Path) -> None:
    """A summary that is missing, damaged, or of another run does not finish one; a sound one names its weights."""
    assert read_summary(tmp_path / "nowhere") is None
    with RunFolder.claim(tmp_path, CONFIG) as folder:
        assert read_summary(tmp_path) is None
        folder.finish({"validation_loss": 2.0, "perplexity": math.inf}, b"weights")
    expected: dict[str, Any] = {"validation_loss": 2.0, "perplexity": None, "config": fingerprint(CONFIG)}
    expected["weights_sha256"] = hashlib.sha256(b"weights").hexdigest()
    assert read_summary(tmp_path) == read_summary(tmp_path, fingerprint(CONFIG)) == expected
    assert (tmp_path / "weights.safetensors").read_bytes() == b"weights"
    assert read_summary(tmp_path, fingerprint(CONFIG | {"seed": 1})) is None
    for damage in ("{", "{}", "[]", "3"):
        (tmp_path / "summary.json").write_text(damage)
        assert read_summary(tmp_path) is None
