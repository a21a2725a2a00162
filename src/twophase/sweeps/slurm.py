"""Starting a sweep's workers on a Slurm cluster: an array of identical jobs, submitted through submitit.

A worker needs nothing but the sweep's folder, so all jobs of the array run the same command. They may start and end at
any time, in any number. A job that Slurm stops, at its time limit or by preemption, starts again with the same command
and resumes.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.base.config import UsageError

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

LOGS = "slurm"
_GRACE_SECONDS = 60.0
"""How long a worker may take to save and end when its job is stopped; Slurm gives notice 90 s before."""
_LINGER_SECONDS = 120.0
_NAMES = {"cpus": "cpus_per_task", "gpus": "gpus_per_node", "memory": "mem", "parallel": "array_parallelism"}
"""Option names that differ from submitit's."""
_WHOLE = frozenset({"nodes", "ntasks_per_node", "cpus_per_task", "array_parallelism"})
_COMPUTED = _WHOLE | {"job_name", "time"}
"""Options that submitit computes with or has a default for; it passes the rest on unchanged."""
_NOT_SBATCH = frozenset(
    "setup teardown srun_args use_srun stderr_to_stdout map_count additional_parameters signal_delay_s".split()
)
"""Options of submitit that are not options of sbatch."""
_RESTARTS = 1000
"""How often a job may start again after its time was up; a worker without work left ends by itself."""


class Payload:
    """Job of the array: run a command and check its exit."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        """Run the command; a RuntimeError where it fails, and not because it was told to stop."""
        notice = os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")
        # Slurm announces the end of the job's time to every process, and would so kill the worker, which does not know
        # that signal. A signal that the shell ignores stays ignored in the command.
        words = ["/bin/sh", "-c", f"trap '' {notice}; exec \"$@\"", "sh", *self.command]
        self._process = subprocess.Popen(words)  # noqa: S603 - the command is the caller's own
        try:
            status = self._process.wait()
        finally:  # submitit ends its process by an exception
            self._stop()
        if status in {sign for number in (signal.SIGTERM, signal.SIGINT) for sign in (-number, 128 + number)}:
            # Slurm has told all processes to end, perhaps in favour of a more important job. It starts only those again
            # that are still there when their time is up.
            time.sleep(_LINGER_SECONDS)
        elif status != 0:
            raise RuntimeError(f"{' '.join(self.command)}: ended with status {status}")

    def checkpoint(self) -> DelayedSubmission:
        """Let the worker save and end, before submitit has the job started again; the same is to be started then."""
        from submitit.helpers import DelayedSubmission  # noqa: PLC0415 - an extra

        self._stop()
        return DelayedSubmission(Payload(self.command))

    def _stop(self) -> None:
        """Tell the worker to end, once (a second signal would keep it from saving), and wait."""
        process = self._process
        if process is None or process.returncode is not None or self._ends_within(0.0):
            return
        process.terminate()
        if not self._ends_within(_GRACE_SECONDS):
            process.kill()

    def _ends_within(self, seconds: float) -> bool:
        """Wait for the worker, but not by Popen's own wait, which this may have interrupted."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        with suppress(ChildProcessError):  # its status has been collected
            while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.05)
        return True


def submit(folder: Path, command: Sequence[str], workers: int, options: Mapping[str, Any]) -> list[str]:
    """Submit workers as one job array.

    Args:
        folder: the sweep's folder, which the nodes must see under the same name; scripts and logs go to `slurm/` in it.
        command: the words that start a worker.
        workers: jobs in the array, >= 1.
        options: values by name (`--slurm-NAME VALUE`). `time` is required: minutes, or Slurm's `HH:MM:SS`, `D-HH:MM`
            and so on. `cpus` and `gpus` are per job, `memory` is text such as `16GB`, `parallel` limits the jobs at
            once. `partition`, `account` and every other option of `sbatch` keep their names; True stands for a flag.

    Returns:
        The jobs' ids, `ARRAY_INDEX` each (a single job has no index).

    Raises:
        UsageError: a missing or malformed time, or an option that the array needs itself. Also if submitit or Slurm's
            commands are missing, Slurm refuses the jobs, or the folder cannot be written.
    """
    parameters = checked(options)
    try:
        import submitit  # noqa: PLC0415 - an extra, and half a second that `import twophase` should not cost
        from submitit.core.utils import FailedJobError, FailedSubmissionError  # noqa: PLC0415
    except ModuleNotFoundError:
        raise UsageError(
            "--launcher slurm needs submitit, which is not installed; pip install 'twophase[slurm]'"
        ) from None
    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise UsageError(
                f"--launcher slurm: {program} is not found on this machine; start the sweep on a login node of the "
                "cluster, or use --launcher local"
            )
    logs = Path(folder).absolute() / LOGS
    try:
        logs.mkdir(parents=True, exist_ok=True)
        executor = submitit.SlurmExecutor(logs, max_num_timeout=_RESTARTS)
        computed = {name: parameters[name] for name in _COMPUTED & parameters.keys()}
        others = {name.replace("_", "-"): value for name, value in parameters.items() if name not in computed}
        executor.update_parameters(**computed, additional_parameters=others)
        jobs = executor.submit_array([Payload(command)] * workers)
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UsageError(
            f"--launcher slurm: sbatch refused the jobs ({lines[-1] if lines else 'it gave no reason'}); "
            "change the --slurm options"
        ) from None
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be used ({error.strerror}); choose another --out") from None
    return [job.job_id for job in jobs]


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by submitit's names; what submitit does not know keeps sbatch's. Refuse impossible ones."""
    sbatch = {name.replace("-", "_"): value for name, value in options.items()}
    for name in ("array", "output", "error", "signal", "open_mode"):
        if name in sbatch:
            raise UsageError(
                f"--slurm-{name.replace('_', '-')} cannot be given: the sweep sets it itself; leave it out"
            )
    if "time" not in sbatch:
        raise UsageError("--slurm-time is missing; write how long a job may take, in minutes or as 8:00:00")
    if others := sorted(sbatch.keys() & _NOT_SBATCH):
        raise UsageError(f"--slurm-{others[0].replace('_', '-')} is no option of sbatch; leave it out")
    parameters = {_NAMES.get(name, name): value for name, value in sbatch.items()}
    for name, value in sbatch.items():
        if (theirs := _NAMES.get(name, name)) in _WHOLE:
            if not str(value).isdecimal():
                raise UsageError(f"--slurm-{name.replace('_', '-')} is {value!r}; it must be a whole number")
            parameters[theirs] = int(value)
    return {"job_name": "twophase-sweep"} | parameters | {"time": _minutes(parameters["time"])}


def _minutes(value: Any) -> int:
    """Convert a time as sbatch takes it to whole minutes, rounded up: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(value))
    if match is not None:
        days, *parts = match.groups()
        numbers = [int(part) for part in parts if part is not None]
        if days is None and len(numbers) < 3:
            numbers = [0, *numbers]
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        total = (int(days or 0) * 24 + hours) * 60 + minutes + math.ceil(seconds / 60)
        if total > 0:
            return total
    raise UsageError(f"--slurm-time {value}: not a time; write minutes, H:MM:SS or D-HH:MM, at least one minute")
