"""Workers on Slurm: what is submitted, and that it runs the command; a few shell scripts stand in for the cluster."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from twophase.base.config import UsageError
from twophase.sweeps import slurm
from twophase.sweeps.slurm import Payload, submit

# Keeps what it was given, and numbers the job.
SBATCH = """#!/bin/sh
cp "$1" "{folder}/submitted.sh"
{extra}
echo "Submitted batch job 42"
"""
# Runs the words behind its own options.
SRUN = """#!/bin/sh
while true; do
  case "$1" in
    --unbuffered) shift ;;
    --output | --error) shift 2 ;;
    *) exec "$@" ;;
  esac
done
"""
# Told to stop, it saves; told twice, it is killed before it can.
WORKER = r"""
import signal, sys, time
from pathlib import Path

def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(0.2)
    Path(sys.argv[1]).write_text("saved")
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
Path(sys.argv[1]).write_text("working")
time.sleep(60)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of programs that stand in for Slurm's, in front of PATH."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "SUBMITIT"))]:
        monkeypatch.delenv(name)
    programs = tmp_path / "bin"
    programs.mkdir()
    install(programs / "sbatch", SBATCH.format(folder=programs, extra=""))
    install(programs / "srun", SRUN)
    install(programs / "scontrol", f'#!/bin/sh\necho "$@" $(cat "{tmp_path}/out") >> "{programs}/scontrol.log"\n')
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return programs


def install(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def flags(script: Path) -> dict[str, str]:
    """The options in a script for sbatch."""
    words = [line[len("#SBATCH --") :] for line in script.read_text().splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def on_node(script: Path, index: int | None = None, errors: int | None = None) -> subprocess.Popen[bytes]:
    """Start a submitted script as Slurm would on a node, as a job of the array, in its own group of processes."""
    identity = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    if index is not None:
        identity |= {"SLURM_JOB_ID": str(42 + index), "SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": str(index)}
    words = ["/bin/bash", str(script)]
    return subprocess.Popen(words, env=os.environ | identity, start_new_session=True, stderr=errors)


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_text() != text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_array_is_what_was_asked_for(tmp_path: Path, cluster: Path) -> None:
    """Workers, time, resources and options of our own reach sbatch under Slurm's names; logs lie in the sweep."""
    options = {
        "time": "1-02:30",
        "cpus": 4,
        "gpus": 1,
        "memory": "16GB",
        "partition": "short",
        "account": "lab",
        "parallel": "2",  # as the command line has it
        "nodes": "1",
        "ntasks-per-node": "1",
        "qos": "low",
        "licenses": "x:1",
        "cpu-freq": "high",
        "requeue": True,
    }
    ids = submit(tmp_path / "sweep", ["twophase", "sweep-worker"], 3, options)
    assert ids == ["42_0", "42_1", "42_2"]
    options_of_sbatch = flags(cluster / "submitted.sh")
    for name, value in {
        "array": "0-2%2",
        "time": str(26 * 60 + 30),
        "cpus-per-task": "4",
        "gpus-per-node": "1",
        "mem": "16GB",
        "partition": "short",
        "account": "lab",
        "qos": "low",
        "licenses": "x:1",
        "cpu-freq": "high",
        "requeue": "",
        "job-name": "twophase-sweep",
        "output": f"{tmp_path}/sweep/slurm/%A_%a_0_log.out",
    }.items():
        assert options_of_sbatch[name] == value, name


@pytest.mark.slow
def test_every_job_runs_the_command(tmp_path: Path, cluster: Path) -> None:
    """The submitted script, run as Slurm would run it, runs exactly the words given; a repetition runs them again."""
    out = tmp_path / "out"
    script = "import os, sys; open(sys.argv[1], 'a').write(repr(sys.argv[2:]) + os.environ['SLURM_ARRAY_TASK_ID'])"
    words = ["a b", "$HOME", "'"]
    submit(tmp_path / "sweep", [sys.executable, "-c", script, str(out), *words], 2, {"time": 60})
    for index in (1, 1):  # the second as after a requeue
        assert on_node(cluster / "submitted.sh", index).wait(60) == 0
    assert out.read_text() == f"{words!r}1{words!r}1"


def test_one_worker_is_one_job(tmp_path: Path, cluster: Path) -> None:
    """A single worker is submitted as a plain job; a command that fails fails the job and says so."""
    assert submit(tmp_path / "sweep", [sys.executable, "-c", "raise SystemExit(3)"], 1, {"time": 60}) == ["42"]
    assert "array" not in flags(cluster / "submitted.sh")
    with on_node(cluster / "submitted.sh", errors=subprocess.PIPE) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert b"ended with status 3" in said


@pytest.mark.slow
def test_the_worker_saves_before_it_starts_again(tmp_path: Path, cluster: Path) -> None:
    """When Slurm announces the end to all processes, the worker is told once, saves, and the job is requeued then."""
    out = tmp_path / "out"
    submit(tmp_path / "sweep", [sys.executable, "-c", WORKER, str(out)], 2, {"time": 60})
    with on_node(cluster / "submitted.sh", 1, subprocess.DEVNULL) as process:
        wait_for(out, "working")
        os.killpg(process.pid, signal.SIGUSR2)  # bash and srun would outlive it: here they have gone before
        process.wait(60)
    wait_for(out, "saved")
    wait_for(cluster / "scontrol.log", "requeue 42_1 saved\n")
    out.unlink()
    with on_node(cluster / "submitted.sh", 1, subprocess.DEVNULL) as process:
        wait_for(out, "working")  # what submitit has written for the next start runs the same
        os.killpg(process.pid, signal.SIGKILL)


def test_a_worker_that_slurm_stops_keeps_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that ends by SIGTERM is no failure, and its job waits for Slurm to requeue it."""
    waits: list[float] = []
    monkeypatch.setattr(slurm.time, "sleep", waits.append)
    Payload(["/bin/sh", "-c", "kill -TERM $$"])()
    Payload(["/bin/sh", "-c", "exit 143"])()
    assert waits == [slurm._LINGER_SECONDS] * 2
    Payload(["/bin/sh", "-c", "kill -USR2 $$"])()  # Slurm's notice does not reach the worker
    with pytest.raises(RuntimeError, match="ended with status 1"):
        Payload(["/bin/false"])()


@pytest.mark.slow
def test_a_deaf_worker_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not end in time is killed, and the command can be sent to another machine meanwhile."""
    monkeypatch.setattr(slurm, "_GRACE_SECONDS", 0.1)
    out = tmp_path / "out"
    payload = Payload(["/bin/sh", "-c", f"trap '' TERM; printf on > {out}; while true; do sleep 0.05; done"])

    def interrupt(*_: object) -> None:
        assert pickle.loads(pickle.dumps(payload.checkpoint().function)).command == payload.command  # noqa: S301
        raise SystemExit

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(SystemExit):
            payload()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert payload._process is not None
    assert payload._process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), (90, 90), ("0:30", 1), ("10:01", 11), ("8:00:00", 480), ("1-0", 1440), ("1-2:03:04", 1564)],
)
def test_times_are_read_as_sbatch_does(text: Any, minutes: int) -> None:
    """M, M:S, H:M:S, D-H, D-H:M and D-H:M:S all become minutes, rounded up."""
    assert slurm._minutes(text) == minutes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"--slurm-time is missing; write how long"),
        ({"time": "soon"}, r"--slurm-time soon: not a time; write minutes"),
        ({"time": 0}, r"--slurm-time 0: not a time"),
        ({"time": "1:2:3:4"}, r"--slurm-time 1:2:3:4: not a time"),
        ({"time": 1, "array": "0-9"}, r"--slurm-array cannot be given"),
        ({"time": 1, "open-mode": "append"}, r"--slurm-open-mode cannot be given"),
        ({"time": 1, "nodes": True}, r"--slurm-nodes is True; it must be a whole number"),  # without a value
        ({"time": 1, "parallel": "many"}, r"--slurm-parallel is 'many'; it must be a whole number"),
        ({"time": 1, "setup": "module load x"}, r"--slurm-setup is no option of sbatch; leave it out"),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_impossible_requests_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """What cannot be submitted is refused with the option, the value and the remedy, before anything is written."""
    with pytest.raises(UsageError, match=message):
        submit(tmp_path / "sweep", ["true"], 1, options)
    assert not (tmp_path / "sweep").exists()


def test_a_refusal_of_slurm_is_passed_on(tmp_path: Path, cluster: Path) -> None:
    """What sbatch says is in the error; a folder that cannot be written names --out."""
    extra = "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1"
    install(cluster / "sbatch", SBATCH.format(folder=cluster, extra=extra))
    with pytest.raises(UsageError, match=r"sbatch refused the jobs \(.*invalid partition.*change the --slurm options"):
        submit(tmp_path / "sweep", ["true"], 2, {"time": 1, "partition": "x"})
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--out .*file: cannot be used .*choose another --out"):
        submit(tmp_path / "file", ["true"], 2, {"time": 1})


def test_slurm_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Slurm's commands, or without submitit, the error says what to do."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"sbatch is not found on this machine; .*login node.*--launcher local"):
        submit(tmp_path / "sweep", ["true"], 1, {"time": 1})
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UsageError, match=r"pip install 'twophase\[slurm\]'"):
        submit(tmp_path / "sweep", ["true"], 1, {"time": 1})
