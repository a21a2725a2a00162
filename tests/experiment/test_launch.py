"""Sweeps: every run exactly once, whatever happens to the workers, and the same command resumes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from twophase.config import UsageError
from twophase.experiment.grid import Axis, Sweep, product
from twophase.experiment.launch import Outcome, Status, read_summaries, run_sweep
from twophase.experiment.run import RunFolder, lock_folder
from twophase.experiment.table import read_rows

# Speaks the protocol without importing anything that is slow. `mode` of a configuration says how it misbehaves.
WORKER = r"""
import json, os, signal, sys, time

def note(name, text):
    with open(name, "a") as file:
        file.write(text + "\n")

def say(answer):
    print(json.dumps(answer), flush=True)

for line in sys.stdin:
    job = json.loads(line)
    run, folder, mode = job["run"], job["folder"], job["config"]["mode"]
    os.makedirs(folder, exist_ok=True)
    print("run", run, file=sys.stderr, flush=True)
    note(os.path.join(folder, "tries"), f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")
    tries = len(open(os.path.join(folder, "tries")).readlines())
    if mode == "garbage":
        os.write(1, b"hello\n\xff\xfe\n[1]\n3\n{\n" + json.dumps({"run": "other", "status": "failed"}).encode() + b"\n")
        say({"run": run, "status": "running"})
        say({"status": "finished"})
    if mode == "hang" and tries == 1:
        def save(*_):
            note(os.path.join(folder, "saved"), "yes")
            sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        signal.signal(signal.SIGINT, lambda *_: note(os.path.join(folder, "interrupted"), "yes"))
        note(os.path.join(folder, "hanging"), "yes")
        time.sleep(60)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(os.path.join(folder, "hanging"), "yes")
        time.sleep(60)
    if mode == "waits for 12":
        runs, deadline = os.path.dirname(folder), time.monotonic() + 20
        while sum(os.path.exists(os.path.join(runs, name, "finished")) for name in os.listdir(runs)) < 12:
            if time.monotonic() > deadline:
                sys.exit(1)
            time.sleep(0.01)
    if mode == "killed always" or (mode == "killed once" and tries == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "quit":
        print("ImportError: no module named torch", file=sys.stderr)
        sys.exit(3)
    if mode == "closes stdout":
        os.close(1)
        time.sleep(60)
    if mode == "fails" or (mode == "fails once" and tries == 1):
        say({"run": run, "status": "failed", "error": "the corpus is too small"})
        continue
    if mode != "lies":
        loss = None if mode == "diverges" else 2.0
        summary = {"validation_loss": loss, "perplexity": loss, "tokens": 1, "seconds": 0.1, "config": run,
                   "diverged": mode == "diverges", "exit_reason": "end"}
        with open(os.path.join(folder, ".tmp-summary"), "w") as file:
            json.dump(summary, file)
        os.replace(os.path.join(folder, ".tmp-summary"), os.path.join(folder, "summary.json"))
        note(os.path.join(folder, "finished"), "yes")
    if mode == "killed after":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "lingers":
        say({"run": run, "status": "finished"})
        time.sleep(60)
    say({"run": run, "status": "finished"})
"""


@dataclass(frozen=True)
class Config:
    """What a fake run needs to know."""

    mode: str = "ok"
    seed: int = 0


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("worker") / "worker.py"
    path.write_text(WORKER)
    return [sys.executable, "-I", "-S", str(path)]


def sweep_of(*modes: str) -> Sweep:
    """One cell a mode; a cell's seed is its place, so that equal modes are different runs."""
    cells = [
        cell for seed, mode in enumerate(modes) for cell in product(Config(), [], mode, {"mode": mode, "seed": seed})
    ]
    return Sweep("fake", Config(), cells)


def counts(outcome: Outcome) -> tuple[int, int, int, int]:
    return outcome.finished, outcome.diverged, outcome.failed, outcome.skipped


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def tries(folder: Path, sweep: Sweep) -> list[int]:
    return [len(lines(folder / "runs" / cell.run_id / "tries")) for cell in sweep.cells]


def pids(folder: Path) -> set[int]:
    return {int(line.split()[0]) for path in folder.glob("runs/*/tries") for line in lines(path)}


def assert_all_ended(folder: Path) -> None:
    for pid in pids(folder):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sweep_runs_and_resumes(tmp_path: Path, command: list[str]) -> None:
    """All runs end, the folder holds what was promised, and the second call starts no process at all."""
    sweep = sweep_of("ok", "diverges", "ok", "ok")
    outcome = run_sweep(sweep, tmp_path / "out", workers=2, command=command, threads=3)
    assert counts(outcome) == (3, 1, 0, 0)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        ".lock", "cells.csv", "figures", "runs", "sweep.json", "worker-0.log", "worker-1.log",
    }  # fmt: skip
    assert json.loads((tmp_path / "out/sweep.json").read_text()) == sweep.spec()
    rows = read_rows(tmp_path / "out/cells.csv")
    assert [(row.run, row.state, row.perplexity) for row in rows] == [
        (cell.run_id, "diverged" if cell.arm == "diverges" else "finished", None if cell.arm == "diverges" else 2.0)
        for cell in sweep.cells
    ]
    assert all(line.endswith(" 3") for path in (tmp_path / "out").glob("runs/*/tries") for line in lines(path))
    said = [line for n in (0, 1) for line in lines(tmp_path / f"out/worker-{n}.log")]
    assert sorted(said) == sorted(f"run {run}" for run in sweep.runs)
    assert_all_ended(tmp_path / "out")
    again = run_sweep(sweep, tmp_path / "out", workers=2, command=["/nonexistent"])
    assert counts(again) == (0, 0, 0, 4)
    assert tries(tmp_path / "out", sweep) == [1, 1, 1, 1]
    assert set(read_summaries(sweep, tmp_path / "out")) == set(sweep.runs)


def test_finished_sweep_resumes_at_once(tmp_path: Path) -> None:
    """A finished sweep of 420 cells is recognised in under 2 seconds without a process being started."""
    sweep = Sweep("big", Config(), product(Config(), [Axis("seed", tuple(range(420)))]))
    with pytest.raises(RuntimeError, match="cannot be run"):  # leaves the folder as a killed sweep would
        run_sweep(sweep, tmp_path, workers=1, command=["/nonexistent"])
    for run, config in sweep.runs.items():
        with RunFolder.claim(tmp_path / "runs" / run, config) as folder:
            folder.finish(
                {
                    "validation_loss": 2.0,
                    "perplexity": 7.4,
                    "tokens": 1,
                    "seconds": 1.0,
                    "diverged": False,
                    "exit_reason": "end",
                }
            )
    began = time.monotonic()
    outcome = run_sweep(sweep, tmp_path, workers=8, command=["/nonexistent"])
    assert time.monotonic() - began < 2
    assert counts(outcome) == (0, 0, 0, 420)
    assert [row.state for row in read_rows(tmp_path / "cells.csv")] == ["finished"] * 420


def test_killed_worker_is_replaced(tmp_path: Path, command: list[str]) -> None:
    """A run whose worker is killed is tried again, at most twice more; the others are not disturbed."""
    sweep = sweep_of("killed once", "ok", "killed always", "ok")
    statuses: list[Status] = []
    outcome = run_sweep(sweep, tmp_path, workers=1, command=command, progress=statuses.append)
    assert counts(outcome) == (3, 0, 1, 0)
    assert tries(tmp_path, sweep) == [2, 1, 3, 1]
    (error,) = outcome.errors.values()
    assert "killed by signal 9" in error
    assert "attempt 3 of 3" in error
    assert "worker-0.log" in error
    assert [status.event for status in statuses].count("retried") == 3
    assert [row.state for row in read_rows(tmp_path / "cells.csv")] == ["finished", "finished", "failed", "finished"]
    assert_all_ended(tmp_path)


def test_death_after_the_summary_is_no_loss(tmp_path: Path, command: list[str]) -> None:
    """A worker killed between its summary and its answer has finished the run: it is neither lost nor repeated."""
    sweep = sweep_of("killed after", "ok")
    assert counts(run_sweep(sweep, tmp_path, workers=1, command=command)) == (2, 0, 0, 0)
    assert tries(tmp_path, sweep) == [1, 1]


def test_failed_run_is_tried_again_by_the_next_call(tmp_path: Path, command: list[str]) -> None:
    """A run that its worker reports as failed is not retried now, and is when the command is repeated."""
    sweep = sweep_of("fails once", "ok", "fails")
    outcome = run_sweep(sweep, tmp_path, workers=2, command=command)
    assert counts(outcome) == (1, 0, 2, 0)
    assert set(outcome.errors.values()) == {"the corpus is too small"}
    assert tries(tmp_path, sweep) == [1, 1, 1]
    assert counts(run_sweep(sweep, tmp_path, workers=2, command=command)) == (1, 0, 1, 1)
    assert [row.state for row in read_rows(tmp_path / "cells.csv")] == ["finished", "finished", "failed"]


def test_folder_is_believed_and_not_the_worker(tmp_path: Path, command: list[str]) -> None:
    """A run that was reported as finished without a valid summary has failed."""
    sweep = sweep_of("lies", "ok")
    outcome = run_sweep(sweep, tmp_path, workers=1, command=command)
    assert counts(outcome) == (1, 0, 1, 0)
    assert "no valid summary" in outcome.errors[sweep.cells[0].run_id]


def test_garbage_on_stdout_is_ignored(tmp_path: Path, command: list[str]) -> None:
    """Text, bytes that are no text, other JSON and answers about other runs do not count as answers."""
    sweep = sweep_of("garbage", "garbage", "ok")
    assert counts(run_sweep(sweep, tmp_path, workers=1, command=command)) == (3, 0, 0, 0)


def test_deaf_workers_are_ended(tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not end at the end of its stdin, or closes its stdout and lives on, is ended."""
    monkeypatch.setattr("twophase.experiment.launch._END_SECONDS", 0.1)
    sweep = sweep_of("closes stdout", "lingers")
    outcome = run_sweep(sweep, tmp_path, workers=2, command=command)
    assert counts(outcome) == (1, 0, 1, 0)
    assert_all_ended(tmp_path)


@pytest.mark.parametrize("words", [["/nonexistent/worker"], [sys.executable, "-c", "pass"]])
def test_broken_command_ends_the_sweep(tmp_path: Path, words: list[str]) -> None:
    """A command that cannot be started, or never answers, is an error at once and not one failure a run."""
    with pytest.raises(RuntimeError, match=r"cannot be run with '/nonexistent/worker'|before it answered"):
        run_sweep(sweep_of(*["ok"] * 50), tmp_path, workers=2, command=words)
    assert [row.state for row in read_rows(tmp_path / "cells.csv")].count("finished") == 0


def test_worker_that_never_starts_says_why(tmp_path: Path, command: list[str]) -> None:
    """When workers exit before any answer, the error repeats the last line of their log."""
    with pytest.raises(RuntimeError, match=r"ended with status 3 .*worker-0\.log: ImportError: no module named torch"):
        run_sweep(sweep_of("quit", "ok"), tmp_path, workers=1, command=command)


def test_queue_is_dynamic(tmp_path: Path, command: list[str]) -> None:
    """A slow run holds up one worker only: the other takes all the rest."""
    sweep = sweep_of("waits for 12", *["ok"] * 12)
    assert counts(run_sweep(sweep, tmp_path, workers=2, command=command)) == (13, 0, 0, 0)
    by_pid = [int(lines(tmp_path / "runs" / cell.run_id / "tries")[0].split()[0]) for cell in sweep.cells]
    assert by_pid.count(by_pid[0]) == 1
    assert len(set(by_pid)) == 2


def test_shared_run_is_run_once(tmp_path: Path, command: list[str]) -> None:
    """Two cells with one configuration are one run, which counts for both rows."""
    cells = [cell for arm in "ab" for cell in product(Config(), [Axis("seed", (0, 1))], arm)]
    sweep = Sweep("shared", Config(), cells)
    assert counts(run_sweep(sweep, tmp_path, workers=2, command=command)) == (2, 0, 0, 0)
    assert tries(tmp_path, sweep) == [1, 1, 1, 1]
    assert [row.state for row in read_rows(tmp_path / "cells.csv")] == ["finished"] * 4


def test_progress_and_table_follow_the_runs(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress is told in the calling thread, counts up to the total, and the table on disk keeps up with it."""
    monkeypatch.setattr("twophase.experiment.launch._TABLE_SECONDS", 0.0)
    sweep, seen = sweep_of("ok", "fails", "diverges", "ok"), []

    def progress(status: Status) -> None:
        table = tmp_path / "cells.csv"
        seen.append((status, sum(row.state != "missing" for row in read_rows(table)) if table.exists() else 0))

    run_sweep(sweep, tmp_path, workers=2, command=command, progress=progress)
    assert [status.done for status, _ in seen] == [0, 1, 2, 3, 4]
    assert [on_disk for _, on_disk in seen] == [0, 0, 1, 2, 3]
    assert seen[0][0].event == "begun"
    assert sorted(status.event for status, _ in seen[1:]) == ["diverged", "failed", "finished", "finished"]
    assert {status.run for status, _ in seen[1:]} == set(sweep.runs)
    assert all(status.total == 4 for status, _ in seen)
    assert (seen[-1][0].finished, seen[-1][0].diverged, seen[-1][0].failed, seen[-1][0].skipped) == (2, 1, 1, 0)


def test_interrupt_stops_the_workers_in_good_order(tmp_path: Path, command: list[str]) -> None:
    """On KeyboardInterrupt every worker is told by SIGTERM, saves and ends; the table is written; a repeat resumes."""
    sweep = sweep_of("ok", "hang", "hang", "ok", "ok")

    def interrupt(status: Status) -> None:
        if status.event == "finished":
            for cell in sweep.cells[1:3]:
                wait_for(tmp_path / "runs" / cell.run_id / "hanging")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, tmp_path, workers=3, command=command, progress=interrupt)
    assert_all_ended(tmp_path)
    for cell in sweep.cells[1:3]:
        assert lines(tmp_path / "runs" / cell.run_id / "saved") == ["yes"]
    states = [row.state for row in read_rows(tmp_path / "cells.csv")]
    assert states[0] == "finished"
    assert states[1:3] == ["missing", "missing"]
    done = states.count("finished")
    assert counts(run_sweep(sweep, tmp_path, workers=3, command=command)) == (5 - done, 0, 0, done)
    assert tries(tmp_path, sweep)[:3] == [1, 2, 2]


def test_stubborn_worker_is_killed_after_the_grace(tmp_path: Path, command: list[str]) -> None:
    """A worker that ignores SIGTERM does not keep the interrupted sweep from ending."""
    sweep = sweep_of("ok", "stubborn")

    def interrupt(status: Status) -> None:
        if status.event == "finished":
            wait_for(tmp_path / "runs" / sweep.cells[1].run_id / "hanging")
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, tmp_path, workers=2, command=command, progress=interrupt, grace_seconds=0.3)
    assert time.monotonic() - began < 8
    assert_all_ended(tmp_path)


def test_ctrl_c_reaches_the_parent_only(tmp_path: Path, command: list[str]) -> None:
    """SIGINT to the whole process group of the parent, as a terminal sends it, lets the workers save and end."""
    script = (
        "import signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job inherits that it is ignored
        "from test_launch import sweep_of; from twophase.experiment.launch import run_sweep\n"
        "try:\n    run_sweep(sweep_of('hang', 'hang'), Path(sys.argv[2]), workers=2, command=sys.argv[3:])\n"
        "except KeyboardInterrupt:\n    sys.exit(77)"
    )
    here = str(Path(__file__).parent)
    words = [sys.executable, "-c", script, here, str(tmp_path), *command]
    with subprocess.Popen(words, start_new_session=True) as process:
        for cell in sweep_of("hang", "hang").cells:
            wait_for(tmp_path / "runs" / cell.run_id / "hanging")
        os.killpg(process.pid, signal.SIGINT)
    assert process.returncode == 77
    assert_all_ended(tmp_path)
    assert [lines(path) for path in tmp_path.glob("runs/*/saved")] == [["yes"], ["yes"]]
    assert not list(tmp_path.glob("runs/*/interrupted"))


@pytest.mark.parametrize("seed", range(3))
def test_no_run_is_lost_or_counted_twice(tmp_path: Path, command: list[str], seed: int) -> None:
    """With workers that die, lie, fail and babble at random, every run is counted once and finished at most once."""
    modes = ["ok", "killed once", "killed after", "killed always", "fails", "diverges", "garbage", "lies"]
    sweep = sweep_of(*random.Random(seed).choices(modes, k=16))
    statuses: list[Status] = []
    outcome = run_sweep(sweep, tmp_path, workers=3, command=command, progress=statuses.append)
    wanted = {"killed always": "failed", "fails": "failed", "lies": "failed", "diverges": "diverged"}
    assert [row.state for row in read_rows(tmp_path / "cells.csv")] == [
        wanted.get(cell.arm, "finished") for cell in sweep.cells
    ]
    assert sum(counts(outcome)) == len(sweep.cells)
    ended = [status.run for status in statuses if status.event in {"finished", "diverged", "failed"}]
    assert sorted(ended) == sorted(sweep.runs)
    for cell in sweep.cells:
        finished = lines(tmp_path / "runs" / cell.run_id / "finished")
        assert len(finished) == (wanted.get(cell.arm, "finished") != "failed")
    assert_all_ended(tmp_path)


def test_a_sweep_can_be_extended(tmp_path: Path, command: list[str]) -> None:
    """The same sweep with more cells takes over what is finished and runs the rest."""
    run_sweep(sweep_of("ok"), tmp_path, workers=1, command=command)
    outcome = run_sweep(sweep_of("ok", "ok", "ok"), tmp_path, workers=1, command=command)
    assert (outcome.skipped, outcome.finished) == (1, 2)
    assert [row.state for row in read_rows(tmp_path / "cells.csv")] == ["finished"] * 3
    again = run_sweep(sweep_of("ok", "ok", "ok"), tmp_path, workers=1, command=command)
    assert again.skipped == 3


def test_another_sweep_is_refused(tmp_path: Path, command: list[str]) -> None:
    """A folder of another sweep, a larger one included, is refused with what differs, and keeps every byte."""
    run_sweep(sweep_of("ok", "ok"), tmp_path, workers=1, command=command)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UsageError) as error:
        run_sweep(sweep_of("ok"), tmp_path, workers=1, command=command)
    for part in (str(tmp_path), "another sweep", "axis seed is [0, 1] there, [0] here", "choose another --out"):
        assert part in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"name": 1}', '{"name": "fake", "base": 1, "axes": 2}'])
def test_damaged_spec_is_refused(tmp_path: Path, content: str) -> None:
    """A sweep.json that is damaged is refused and kept."""
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(UsageError, match=r"sweep\.json is damaged.*choose another --out"):
        run_sweep(sweep_of("ok"), tmp_path, workers=1)
    assert (tmp_path / "sweep.json").read_text() == content


def test_other_places_are_refused(tmp_path: Path) -> None:
    """A folder of something else and a file are refused untouched; no workers and a busy folder are refused too."""
    folder, file, busy = tmp_path / "folder", tmp_path / "file", tmp_path / "busy"
    folder.mkdir()
    (folder / "notes.txt").touch()
    file.touch()
    sweep: Any = sweep_of("ok")
    with pytest.raises(UsageError, match=r"notes\.txt.*not the folder of a sweep"):
        run_sweep(sweep, folder, workers=1)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(UsageError, match="is a file"):
        run_sweep(sweep, file, workers=1)
    with pytest.raises(UsageError, match=r"--workers is 0; it must be a whole number >= 1"):
        run_sweep(sweep, busy, workers=0)
    lock = lock_folder(busy, "is running a sweep")
    with pytest.raises(UsageError, match="another process is running a sweep in this folder"):
        run_sweep(sweep, busy, workers=1)
    os.close(lock)
