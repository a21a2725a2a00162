"""Sweeps: every run exactly once, whatever happens to the workers, and the same command resumes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import snapshot, wait_until
from fakerun import Config, finish, grid, work_of
from forked import FORKING
from twophase.base.config import UsageError
from twophase.runs.folder import lock_folder
from twophase.sweeps import run as launch
from twophase.sweeps.crew import Crew
from twophase.sweeps.grid import Cell, Sweep, product
from twophase.sweeps.queue import Queue
from twophase.sweeps.run import Outcome, Status, read_plan, read_summaries, run_sweep
from twophase.sweeps.table import read_rows, write_rows

# A worker that trains nothing. `mode` of a configuration says how it misbehaves.
WORKER = r"""
import json, os, signal, sys, threading, time
from pathlib import Path
from twophase.sweeps import work as house
from twophase.base.files import write_atomic

house._PAUSE_SECONDS, house._LONGEST_PAUSE_SECONDS = 0.05, 0.2
folder = Path(sys.argv[sys.argv.index("--out") + 1])
environment = [os.environ.get(name, "-") for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]
stop, lingers = threading.Event(), False

def ask_to_stop(*_):
    note(folder / "told", str(os.getpid()))
    stop.set()

def all_told():
    # Else a worker that is not told yet takes, and ends, the job that a stopped one gives back.
    pids = [{line.split()[0] for line in (folder / name).read_text().splitlines()} for name in ("started", "told")]
    return pids[0] <= pids[1]

def note(path, text):
    with path.open("a") as file:
        file.write(text + "\n")

def leash():
    while os.read(0, 1000):
        pass
    ask_to_stop()

def wait(condition):
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("waited in vain")
        time.sleep(0.01)

def execute(plan, job):
    global lingers
    if not job.deep:
        note(plan.folder / "trunks", job.node)
        plan.state(job.node).parent.mkdir(exist_ok=True)
        plan.state(job.node).touch()
        return
    for run in job.runs:
        if plan.finished(run):
            continue
        place, mode = plan.run_folder(run), plan.runs[run].get("mode", plan.base["mode"])
        place.mkdir(exist_ok=True)
        print("run", run, file=sys.stderr, flush=True)
        note(place / "tries", str(os.getpid()))
        tries = len((place / "tries").read_text().splitlines())
        if mode == "hang" and tries == 1:
            signal.signal(signal.SIGINT, lambda *_: note(place / "interrupted", "yes"))
            note(place / "hanging", "yes")
            wait(stop.is_set)
            wait(all_told)
            note(place / "saved", "yes")
            raise house.Stopped
        if mode == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note(place / "hanging", "yes")
            time.sleep(60)
        if mode == "waits for 12":
            wait(lambda: len(list(folder.glob("runs/*/finished"))) >= 12)
        if mode == "waits for the table":
            wait(lambda: ",finished," in (folder / "cells.csv").read_text())
        if mode == "killed always" or (mode == "killed once" and tries == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "fails" or (mode == "fails once" and tries == 1):
            raise ValueError("the corpus is too small")
        if mode != "lies":
            loss = None if mode == "diverges" else 2.0
            write_atomic(place / "summary.json", json.dumps({
                "validation_loss": loss, "perplexity": loss, "tokens": 1, "seconds": 0.1, "config": run,
                "diverged": mode == "diverges", "exit_reason": "end"}))
            note(place / "finished", "yes")
        if mode == "killed after" and tries == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        lingers = lingers or mode == "lingers"

signal.signal(signal.SIGTERM, ask_to_stop)
if "--leash" in sys.argv:
    threading.Thread(target=leash, daemon=True).start()
note(folder / "started", " ".join([str(os.getpid()), *environment]))
house.work(folder, execute, stopped=stop.is_set)
if lingers:
    time.sleep(60)
sys.exit(143 if stop.is_set() else 0)
"""


@pytest.fixture
def command(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words that start a fake worker, which is forked."""
    monkeypatch.setattr("twophase.sweeps.crew.subprocess", FORKING)
    path = tmp_path_factory.mktemp("worker") / "worker.py"
    path.write_text(WORKER)
    return [sys.executable, "-P", str(path)]


def sweep_of(*modes: str) -> Sweep:
    """One cell a mode; a cell's seed is its place, so that equal modes are different runs that share nothing."""
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


def states(folder: Path) -> list[str]:
    return [row.state for row in read_rows(folder / "cells.csv")]


def started(folder: Path) -> list[list[str]]:
    """Of every worker that was started: pid and two variables of its environment."""
    return [line.split() for line in lines(folder / "started")]


def runs_now(pid: int) -> bool:
    """Whether the process is there and has not ended; an orphan may stay as a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # no Linux


def assert_all_ended(folder: Path) -> None:
    assert not [pid for pid, *_ in started(folder) if runs_now(int(pid))]


def wait_for_hanging(folder: Path, cells: Sequence[Cell]) -> None:
    wait_until(lambda: all((folder / "runs" / cell.run_id / "hanging").exists() for cell in cells))


def saved(folder: Path) -> int:
    """How many hanging runs have been told to stop, and have saved."""
    return sum(lines(path) == ["yes"] for path in folder.glob("runs/*/saved"))


def must_not(*_: Any, **__: Any) -> Any:
    raise AssertionError("this must not be called")


# ------------------------------------------------------------------------------------------------------- what is run


def test_sweep_runs_and_resumes(tmp_path: Path, command: list[str]) -> None:
    """All runs end, the folder holds what was promised, progress counts up, and the second call starts no process."""
    sweep, seen = sweep_of("ok", "diverges", "ok", "fails"), []
    outcome = run_sweep(sweep, tmp_path, workers=2, command=command, threads=3, progress=seen.append)
    assert counts(outcome) == (2, 1, 1, 0)
    assert {path.name for path in tmp_path.iterdir()} - {"started"} == {
        ".lock", "cells.csv", "claims", "figures", "plan.json", "runs", "sweep.json", "worker-0.log", "worker-1.log",
    }  # fmt: skip
    assert json.loads((tmp_path / "sweep.json").read_text()) == sweep.spec()
    rows = read_rows(tmp_path / "cells.csv")
    assert [(row.run, row.state) for row in rows] == list(
        zip(sweep.runs, ["finished", "diverged", "finished", "failed"], strict=True)
    )
    assert [row.perplexity for row in rows] == [2.0, None, 2.0, None]
    assert [threads for _, threads, _ in started(tmp_path)] == ["3", "3"]
    assert [status.done for status in seen] == [0, 1, 2, 3, 4]
    assert seen[0].event == "begun"
    assert sorted(status.event for status in seen[1:]) == ["diverged", "failed", "finished", "finished"]
    assert {status.run for status in seen[1:]} == set(sweep.runs)
    assert_all_ended(tmp_path)
    (tmp_path / "runs" / rows[3].run).rename(tmp_path / "failed")
    finish(work_of(tmp_path), rows[3].run)
    again = run_sweep(sweep, tmp_path, workers=2, command=["/nonexistent"])
    assert counts(again) == (0, 0, 0, 4)
    assert tries(tmp_path, sweep) == [1, 1, 1, 0]
    assert list((tmp_path / "claims").iterdir()) == []
    assert set(read_summaries(list(sweep.runs), tmp_path)) == set(sweep.runs)


def test_shared_stretches_are_done_once(tmp_path: Path, command: list[str]) -> None:
    """Every piece above a branch is done once, before what needs its state; every run below is done once."""
    sweep = grid(lr=(0.3, 0.5, 0.7), momentum=(0.5, 0.9), restart=("never", "3", "4"))
    assert counts(run_sweep(sweep, tmp_path, workers=2, command=command)) == (18, 0, 0, 0)
    made = work_of(tmp_path)
    expected = [job.node for job in made.jobs.values() if not job.deep]
    assert len(expected) >= 2
    assert sorted(lines(tmp_path / "trunks")) == sorted(expected)
    assert tries(tmp_path, sweep) == [1] * 18
    assert list((tmp_path / "forest").iterdir()) == []  # though these workers have removed no state


def test_workers_elsewhere(tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without workers the call writes the plan; a worker needs the folder alone, and a repeat sees the results."""
    sweep = sweep_of("ok", "diverges", "ok")
    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("twophase.sweeps.crew.subprocess.Popen", must_not)
        assert counts(run_sweep(sweep, folder, workers=0)) == (0, 0, 0, 0)
    assert states(folder) == ["missing"] * 3
    subprocess.run([*command, "--out", str(folder)], check=True, capture_output=True)
    assert counts(run_sweep(sweep, folder, workers=0)) == (0, 0, 0, 3)
    assert states(folder) == ["finished", "diverged", "finished"]


def test_failures_of_workers_elsewhere_are_told(tmp_path: Path) -> None:
    """A call that starts no worker, only to look, says what has failed and why; the next call tries it again."""
    sweep, folder = sweep_of("ok", "ok"), tmp_path / "out"
    run_sweep(sweep, folder, workers=0)
    work, queue = work_of(folder), Queue(folder)
    for name in work.jobs:
        claim = queue.take(queue.look([name]))
        assert claim is not None
        claim.fail("RuntimeError: CUDA error: out of memory")
    outcome = run_sweep(sweep, folder, workers=0)
    assert len(outcome.errors) == 2
    assert all("out of memory" in error for error in outcome.errors.values())
    assert states(folder) == ["failed", "failed"]
    assert {standing.state for standing in Queue(folder).look(work.jobs).values()} == {"waiting"}


def test_devices_are_dealt_out(tmp_path: Path, command: list[str]) -> None:
    """A worker and its replacement see one device; a slow run holds up one worker, and the other takes the rest."""
    sweep = sweep_of("waits for 12", "killed once", *["ok"] * 12)
    run_sweep(sweep, tmp_path, workers=2, command=command, devices=["5", "7"])
    seen = [device for _, _, device in started(tmp_path)]
    assert len(seen) == 3
    assert set(seen) == {"5", "7"}
    assert tries(tmp_path, sweep) == [1, 2, *[1] * 12]


def test_run_folders_may_be_shared(tmp_path: Path, command: list[str]) -> None:
    """Two sweeps with one folder of runs do the runs that they have in common once."""
    small, large = sweep_of("ok", "ok"), sweep_of("ok", "ok", "ok")
    runs = tmp_path / "runs"
    assert counts(run_sweep(small, tmp_path / "small", workers=1, command=command, runs=runs)) == (2, 0, 0, 0)
    assert counts(run_sweep(large, tmp_path / "large", workers=1, command=command, runs=runs)) == (1, 0, 0, 2)
    assert tries(tmp_path, large) == [1, 1, 1]
    assert states(tmp_path / "large") == ["finished"] * 3
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "small").rename(tmp_path / "elsewhere" / "small")
    with pytest.raises(UsageError, match=rf"--out {moved}: its runs are in .*/runs, which is not there; move"):
        run_sweep(small, moved, workers=1, command=command)


def test_a_folder_that_is_moved_meanwhile(tmp_path: Path, command: list[str]) -> None:
    """The failure says so; what was finished is there in the new place."""
    sweep, place, moved = sweep_of("ok", "ok"), tmp_path / "sweep", tmp_path / "moved"

    def move(status: Status) -> None:
        if status.event == "finished" and place.exists():
            place.rename(moved)

    with pytest.raises(RuntimeError, match=rf"^{place}: was moved or removed during the sweep; .* --out"):
        run_sweep(sweep, place, workers=1, command=command, progress=move)
    assert run_sweep(sweep, moved, workers=1, command=command).skipped >= 1
    assert states(moved) == ["finished"] * 2


def test_leftovers_of_killed_processes_go(tmp_path: Path, command: list[str]) -> None:
    """The next call on a sweep's folder removes what killed processes left half written."""
    run_sweep(sweep_of("ok"), tmp_path, workers=1, command=command)
    before = snapshot(tmp_path).keys()
    for name in (
        ".tmp-cells.csv-1-0123abcd",
        "figures/.tmp-overview.png-1-0123abcd",
        "forest/.tmp-a.end.safetensors-1-0123abcd",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    run_sweep(sweep_of("ok"), tmp_path, workers=1, command=command)
    assert snapshot(tmp_path).keys() == before


# -------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.slow
def test_no_run_is_lost_or_counted_twice(tmp_path: Path, command: list[str]) -> None:
    """With workers that die, lie and fail, every run is counted once and finished at most once."""
    modes = ("ok", "killed once", "killed after", "killed always", "fails", "diverges", "lies", "killed always", "ok")
    sweep, statuses = sweep_of(*modes), []
    outcome = run_sweep(sweep, tmp_path, workers=3, command=command, progress=statuses.append)
    expected = {"killed always": "failed", "fails": "failed", "lies": "failed", "diverges": "diverged"}
    assert states(tmp_path) == [expected.get(mode, "finished") for mode in modes]
    assert counts(outcome) == (4, 1, 4, 0)
    assert tries(tmp_path, sweep) == [1, 2, 1, 3, 1, 1, 1, 3, 1]
    for cell, phrase in zip(sweep.cells[3:8], ("attempt 3 of 3", "ValueError", "", "no valid", "killed"), strict=True):
        assert phrase in outcome.errors.get(cell.run_id, "")
    ended = [status.run for status in statuses if status.event in {"finished", "diverged", "failed"}]
    assert sorted(ended) == sorted(sweep.runs)
    replaced = [status.error for status in statuses if status.event == "replaced"]
    assert 1 <= len(replaced) <= 8  # two may die between two looks, and the last of all is not replaced
    assert all(" was killed by signal 9; see worker-" in error for error in replaced)
    assert_all_ended(tmp_path)


@pytest.mark.slow
def test_failed_shared_stretch_fails_the_runs_below(tmp_path: Path, command: list[str]) -> None:
    """When the piece that runs share cannot be done, each of them has failed with its reason, and no worker waits."""
    sweep = grid(lr=(0.3, 0.5, 0.7), momentum=(0.5, 0.9))
    run_sweep(sweep, tmp_path, workers=0)
    (tmp_path / "forest").touch()  # in the way of the folder of states
    outcome = run_sweep(sweep, tmp_path, workers=2, command=command)
    assert counts(outcome) == (0, 0, 6, 0)
    (reason,) = set(outcome.errors.values())
    assert reason.startswith("FileExistsError")
    (tmp_path / "forest").unlink()
    assert counts(run_sweep(sweep, tmp_path, workers=2, command=command)) == (6, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["claims", "plan.json", "summary.json"])
def test_lost_files_cost_nothing_else(tmp_path: Path, command: list[str], lost: str) -> None:
    """Without its claims or plan a half-done sweep goes on; a run whose summary is damaged is done again."""
    sweep = sweep_of("ok", "fails once", "ok")
    assert run_sweep(sweep, tmp_path, workers=1, command=command).finished == 2
    again = lost == "summary.json"
    if again:
        (tmp_path / "runs" / sweep.cells[0].run_id / lost).write_text("{")
    else:
        shutil.rmtree(tmp_path / lost) if lost == "claims" else (tmp_path / lost).unlink()
    assert counts(run_sweep(sweep, tmp_path, workers=1, command=command)) == (1 + again, 0, 0, 2 - again)
    assert tries(tmp_path, sweep) == [1 + again, 2, 1]


def test_lingering_worker_is_ended(tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not end when nothing is left is ended."""
    monkeypatch.setattr(Crew.finish, "__defaults__", (0.2,))
    assert counts(run_sweep(sweep_of("lingers", "ok"), tmp_path, workers=1, command=command)) == (2, 0, 0, 0)
    assert_all_ended(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message", "starts"),
    [
        (["/nonexistent/worker"], r"cannot be run with '/nonexistent/worker", 0),
        (["pass"], r"worker \d ended with status 0; see worker-\d\.log: no output", 6),
        (
            ["sys.exit('warned\\nImportError: no module named torch')"],
            r"worker \d ended with status 1; see worker-\d\.log: ImportError: no module named torch",
            6,
        ),
        # A mistake that every worker would make: the first one's words end the sweep.
        (["print('error: no'); sys.exit(2)"], r"ended with status 2; see worker-0\.log: error: no", 1),
    ],
)
def test_broken_command_ends_the_sweep(tmp_path: Path, words: list[str], message: str, starts: int) -> None:
    """A command that cannot be started, or only ends, is an error with its last words and not one failure a run."""
    if starts:
        begin = f"import sys; open({str(tmp_path / 'calls')!r}, 'a').write('x');"
        words = [sys.executable, "-S", "-c", f"{begin} {words[0]}"]
    with pytest.raises(RuntimeError, match=message):
        run_sweep(sweep_of(*["ok"] * 5), tmp_path / "out", workers=1, command=words)
    assert states(tmp_path / "out") == ["missing"] * 5
    assert sum(map(len, lines(tmp_path / "calls"))) == starts


# ------------------------------------------------------------------------------------------------------ interruptions


@pytest.mark.slow
def test_table_follows_the_runs(tmp_path: Path, command: list[str]) -> None:
    """The table on disk shows what has ended while others are still running."""
    sweep = sweep_of("waits for the table", "ok")
    assert counts(run_sweep(sweep, tmp_path, workers=2, command=command)) == (2, 0, 0, 0)


@pytest.mark.slow
def test_interrupt_stops_the_workers_in_good_order(tmp_path: Path, command: list[str]) -> None:
    """On KeyboardInterrupt every worker is told by SIGTERM, saves and ends; the table is written; a repeat resumes."""
    sweep, interrupted = sweep_of("ok", "hang", "hang", "ok", "ok"), []

    def interrupt(status: Status) -> None:
        if status.event == "finished" and not interrupted:
            wait_for_hanging(tmp_path, sweep.cells[1:3])
            interrupted.append(status)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, tmp_path, workers=3, command=command, progress=interrupt)
    assert_all_ended(tmp_path)
    assert list((tmp_path / "claims").iterdir()) == []
    assert saved(tmp_path) == 2
    assert states(tmp_path)[1:3] == ["missing", "missing"]
    done = states(tmp_path).count("finished")
    assert done >= 1
    assert counts(run_sweep(sweep, tmp_path, workers=3, command=command)) == (5 - done, 0, 0, done)
    assert tries(tmp_path, sweep) == [1, 2, 2, 1, 1]


@pytest.mark.slow
def test_table_that_cannot_be_written(tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for the parent stops the workers in good order, with the reason; a repeat resumes."""
    sweep, calls = sweep_of("ok", "hang", "hang"), iter(range(1))

    def write(*words: Any) -> None:
        if next(calls, None) is None:
            wait_for_hanging(tmp_path, sweep.cells[1:])
            raise OSError(errno.ENOSPC, "No space left on device")
        write_rows(*words)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "write_rows", write)
        with pytest.raises(OSError, match="No space left"):
            run_sweep(sweep, tmp_path, workers=3, command=command)
    assert_all_ended(tmp_path)
    assert saved(tmp_path) == 2
    assert sum(counts(run_sweep(sweep, tmp_path, workers=2, command=command))) == 3
    assert states(tmp_path) == ["finished"] * 3


def test_stubborn_worker_is_killed_after_the_grace(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ignores SIGTERM does not keep the interrupted sweep from ending."""
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.3)
    sweep = sweep_of("ok", "stubborn")

    def interrupt(status: Status) -> None:
        if status.event == "finished":
            wait_for_hanging(tmp_path, sweep.cells[1:])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, tmp_path, workers=2, command=command, progress=interrupt)
    assert_all_ended(tmp_path)


PARENT = """
import signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
from fakerun import Config
from twophase.sweeps.grid import Sweep, product
from twophase.sweeps.run import run_sweep
cells = [product(Config(), [], "hang", {"mode": "hang", "seed": seed})[0] for seed in range(2)]
try:
    run_sweep(Sweep("fake", Config(), cells), Path(sys.argv[2]), workers=2, command=sys.argv[3:])
except KeyboardInterrupt:
    sys.exit(77)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl-c", "kill"])
def test_workers_of_a_parent_that_ends(tmp_path: Path, command: list[str], how: str) -> None:
    """SIGINT to the parent's group, as of a terminal, or its death: the workers save and end, the next call goes on."""
    sweep = sweep_of("hang", "hang")
    words = [sys.executable, "-c", PARENT, str(Path(__file__).parent), str(tmp_path), *command]
    with subprocess.Popen(words, start_new_session=True) as process:
        wait_for_hanging(tmp_path, sweep.cells)
        os.killpg(process.pid, signal.SIGINT) if how == "ctrl-c" else process.kill()
    assert process.returncode == (77 if how == "ctrl-c" else -signal.SIGKILL)
    wait_until(lambda: not any(runs_now(int(pid)) for pid, *_ in started(tmp_path)))
    assert saved(tmp_path) == 2
    assert not list(tmp_path.glob("runs/*/interrupted"))
    if how == "kill":
        assert counts(run_sweep(sweep, tmp_path, workers=2, command=command)) == (2, 0, 0, 0)
        assert tries(tmp_path, sweep) == [2, 2]


# --------------------------------------------------------------------------------------------------------- extensions


def test_a_sweep_can_be_extended(tmp_path: Path, command: list[str]) -> None:
    """The same sweep with more cells takes over what is finished and runs the rest, also after a failure."""
    run_sweep(sweep_of("ok", "fails once"), tmp_path, workers=1, command=command)
    more = sweep_of("ok", "fails once", "ok", "ok")
    assert counts(run_sweep(more, tmp_path, workers=1, command=command)) == (3, 0, 0, 1)
    assert states(tmp_path) == ["finished"] * 4
    assert tries(tmp_path, more) == [1, 2, 1, 1]
    assert run_sweep(more, tmp_path, workers=1, command=["/nonexistent"]).skipped == 4


def test_finished_run_stays_canonical(tmp_path: Path, command: list[str]) -> None:
    """Of runs that are one in exact arithmetic, the one that is finished stands for those that an extension adds.

    The others have its results and its name in the table.
    """
    small, large = grid(momentum=(0.0,), restart=("2",)), grid(momentum=(0.0,), restart=("2", "3", "never"))
    run_sweep(small, tmp_path, workers=1, command=command)
    assert counts(run_sweep(large, tmp_path, workers=1, command=["/nonexistent"])) == (0, 0, 0, 1)
    (done,) = small.runs
    rows = read_rows(tmp_path / "cells.csv")
    assert [(row.state, row.twin_of) for row in rows] == [("finished", twin) for twin in (None, done, done)]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [done]
    work = read_plan(large, tmp_path)
    assert work is not None
    assert (work.counts["cells"], work.counts["runs"]) == (3, 1)


@pytest.mark.slow
def test_extension_of_a_stopped_sweep(tmp_path: Path, command: list[str]) -> None:
    """Jobs of the former plan that still wait are dropped, and states that say nothing about added runs removed."""
    run_sweep(grid(lr=(0.3, 0.5, 0.7), momentum=(0.5, 0.9)), tmp_path, workers=0)
    old = work_of(tmp_path)
    (root,) = old.forest.roots
    old.state(root.id).parent.mkdir()
    old.state(root.id).touch()
    large = grid(lr=(0.3, 0.5, 0.7, 0.9), momentum=(0.5, 0.9))
    run_sweep(large, tmp_path, workers=0)
    assert not old.state(root.id).exists()
    assert counts(run_sweep(large, tmp_path, workers=2, command=command)) == (8, 0, 0, 0)
    assert tries(tmp_path, large) == [1] * 8
    assert len(lines(tmp_path / "trunks")) == len(set(lines(tmp_path / "trunks")))


# ----------------------------------------------------------------------------------------------------------- refusals

LARGER = sweep_of("ok", "ok", "ok")
DAMAGED = r"its plan\.json cannot be used .*; remove that file and repeat"


@pytest.mark.parametrize(
    ("damage", "sweep", "options", "message"),
    [
        ({}, sweep_of("ok"), {}, r"another sweep: axis seed is \[0, 1\] there, \[0\] here; choose another --out"),
        ({}, LARGER, {"merge": False}, "was begun without --no-merge there, with it here"),
        ({}, LARGER, {"texts": {"a": "2"}}, "the text is not the one"),
        *(({"sweep.json": text}, LARGER, {}, r"sweep\.json is damaged") for text in ("", "[]", '{"name": 1}')),
        *(({"plan.json": text}, LARGER, {}, DAMAGED) for text in ("", "null", "{}", '{"format": 99}')),
    ],
)
def test_refusals(tmp_path: Path, damage: dict[str, str], sweep: Sweep, options: dict[str, Any], message: str) -> None:
    """A folder of another sweep, one begun otherwise, and a damaged one are refused, and keep every byte."""
    run_sweep(sweep_of("ok", "ok"), tmp_path, workers=0, texts={"a": "1"})
    for name, text in damage.items():
        (tmp_path / name).write_text(text)
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=message) as error:
        run_sweep(sweep, tmp_path, workers=0, **options)
    assert str(error.value).startswith(f"--out {tmp_path}: ")
    assert snapshot(tmp_path) == before


def test_other_places_are_refused(tmp_path: Path) -> None:
    """A folder of something else and a file are refused untouched; impossible numbers and a busy folder are too."""
    folder, file, busy = tmp_path / "folder", tmp_path / "file", tmp_path / "busy"
    folder.mkdir()
    (folder / "notes.txt").touch()
    file.touch()
    sweep = sweep_of("ok")
    for place, options, message in (
        (folder, {}, r"notes\.txt.*not the folder of a sweep"),
        (file, {}, "is a file"),
        (busy, {"workers": -1}, "--workers is -1; it must be a whole number"),
        (busy, {"workers": 1.0}, "--workers is 1.0; it must be a whole number"),
    ):
        chosen: dict[str, Any] = {"workers": 1} | options
        with pytest.raises(UsageError, match=message):
            run_sweep(sweep, place, **chosen)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "notes.txt"]
    lock = lock_folder(busy, "is running a sweep")
    with pytest.raises(UsageError, match="another process is running a sweep in this folder"):
        run_sweep(sweep, busy, workers=1)
    os.close(lock)
