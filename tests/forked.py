"""`twophase` in processes of their own that need not import torch again: they are forked from one that has done so.

A new interpreter spends seconds of CPU time on importing torch. What is forked here is otherwise a real process with
its own output, signals and exit status. The fork server is the standard library's; it starts with the first process
that a test worker asks for and ends with that worker. The workers of a sweep that runs in such a process come from the
same server.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver, spawn
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
import torch.distributed as dist

import twophase
from twophase.cli import main as cli
from twophase.sweeps import runner as launch

_CONTEXT = multiprocessing.get_context("forkserver")
_SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined] - of every process that comes from it, too
_CONTEXT.set_forkserver_preload(
    [
        "fork_requests",
        "twophase.cli.main",
        "twophase.cli.train",
        "twophase.tasks.registry",
        "twophase.training.trainer",
        "twophase.sweeps.runner",
        "torch._dynamo",  # torch imports it, in seconds, with a process's first optimizer
        "matplotlib.backends.backend_agg",
        "matplotlib.backends.backend_pdf",
    ]
)


def _serve() -> None:
    """Start the server where it does not run; Python 3.11 does not tell it where this folder's modules are."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        _SERVER.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({} if before is None else {"PYTHONPATH": before})


class _Process:
    """A process of the fork server, with the methods of `subprocess.Popen`."""

    def __init__(
        self,
        words: list[str],
        outputs: list[str],
        env: Mapping[str, str],
        *,
        cwd: Path | None = None,
        program: bool = False,
    ) -> None:
        arguments = (words, str(cwd or Path.cwd()), dict(env), outputs)
        options = {"program": program, "largest": resource.getrlimit(resource.RLIMIT_FSIZE)}
        _serve()
        self._process = _CONTEXT.Process(target=_run, args=arguments, kwargs=options)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of a subprocess: negative for a signal, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("twophase", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Forked(_Process):
    """A command under way."""

    def __init__(self, *words: str | Path, cwd: Path | None = None) -> None:
        self._files: list[IO[str]] = [tempfile.NamedTemporaryFile("r", encoding="utf-8") for _ in range(2)]  # noqa: SIM115
        super().__init__(list(map(str, words)), [file.name for file in self._files], os.environ, cwd=cwd)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        said = [file.read() for file in self._files]
        for file in self._files:
            file.close()
        return said[0], said[1]


class Program(_Process):
    """A Python program, or `-m twophase`, that appends what it says to two files; `-W error` may stand before it."""

    def __init__(
        self, words: Sequence[str], out: Path, err: Path, env: Mapping[str, str], *, cwd: Path | None = None
    ) -> None:
        for path in (out, err):
            path.touch()
        super().__init__(list(words), [str(out), str(err)], env, cwd=cwd, program=True)


class Popen(_Process):
    """In place of the `subprocess.Popen` by which a sweep starts its workers."""

    def __init__(self, command: list[str], *, env: Mapping[str, str], stdin: int) -> None:
        assert (command[:3], stdin) == ([sys.executable, "-m", launch.__name__], subprocess.DEVNULL)
        super().__init__(command[1:], [], env, program=True)


FORKING = SimpleNamespace(**vars(subprocess) | {"Popen": Popen})
"""In place of the module `subprocess` in `twophase.sweeps.runner`."""


def call(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A whole command, its status and what it said."""
    process = Forked(*words, cwd=cwd)
    out, err = process.communicate()
    return subprocess.CompletedProcess(list(words), process.wait(), out, err)


def places(size: int) -> list[dict[str, str]]:
    """The variables of processes that meet over the loopback, as torchrun makes them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    return [{**os.environ, "OMP_NUM_THREADS": "1", **group, "RANK": r, "LOCAL_RANK": r} for r in map(str, range(size))]


def finish(folder: Path, commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]]) -> None:
    """Run programs side by side in a folder until all have ended well."""
    logs = [folder / f"{rank}.log" for rank in range(len(commands))]
    parts = zip(commands, logs, envs, strict=True)
    processes = [Program(command, log, log, env, cwd=folder) for command, log, env in parts]
    try:
        ends = [process.wait(200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert ends == [0] * len(ends), "\n".join(log.read_text(encoding="utf-8")[-3000:] for log in logs)


def in_processes(program: str, folder: Path, size: int) -> list[dict[str, Any]]:
    """What the processes of a program bring home: each is given its rank and the folder, and leaves RANK.pt there."""
    commands = [["-W", "error", program, str(rank), str(folder)] for rank in range(size)]
    finish(folder, commands, [os.environ] * size)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def bring(work: Callable[[int], dict[str, Any]], size: int) -> None:
    """As a process of `in_processes`: meet the others in a gloo group, and leave what `work` makes of the rank."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, patience = f"file://{folder / 'store'}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=patience)
    torch.save(work(rank), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _run(
    words: list[str],
    place: str,
    variables: dict[str, str],
    outputs: list[str],
    *,
    program: bool,
    largest: tuple[int, int],
) -> None:
    for number, name in enumerate(outputs, 1):
        descriptor = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_FSIZE, largest)  # a file's; as any child has it from its parent
    os.chdir(place)
    os.environ.clear()
    os.environ.update(variables)
    _SERVER.ensure_running = lambda: None  # it runs; this process would start another, which imports torch again
    launch.subprocess = FORKING  # type: ignore[assignment]
    # No torchrun is here, for which processes but the first wait with their messages.
    cli.time = SimpleNamespace(sleep=lambda _: None)  # type: ignore[assignment]
    # A process that this one starts would run this one's program again, to have what it defines.
    spawn.get_preparation_data = lambda name: {"name": name}
    if program and words[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        words = words[2:]
    if words[:2] == ["-m", launch.__name__]:
        sys.exit(launch.worker(Path(words[2])))
    if program and words[0] != "-m":
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
        return
    sys.argv = [str(Path(twophase.__file__).with_name("__main__.py")), *(words[2:] if program else words)]
    from twophase.__main__ import run

    run()
