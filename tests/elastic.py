"""Runs whose replicas are processes that a test starts, kills and starts again, and what must hold of them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from urllib.parse import urlsplit

import pytest

from forked import Program
from namespaces import Place, enter
from twophase.runs.folder import read_lines, read_summary

DRIVER = Path(__file__).with_name("faulty.py")
HEARTBEAT = 1.0
"""Seconds after which the lighthouse takes a replica for dead."""
PATIENCE = 100.0
"""Seconds that a test waits for anything, on a machine that has much else to do."""
_LIGHTHOUSE = {"join_timeout_ms": 30000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": int(1000 * HEARTBEAT)}


def until(event: str, true: Callable[[], Any]) -> None:
    """Wait for something."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"in {PATIENCE:g} s: not {event}"
        time.sleep(0.02)


@contextmanager
def lighthouse(least: int = 1, place: Place | None = None, port: int = 0) -> Iterator[str]:
    """One in this process, in a namespace if one is named, that waits for so many replicas; the URL."""
    from torchft.coordination import LighthouseServer

    host = "127.0.0.1" if place is None else place.address

    def serve() -> LighthouseServer:
        if place is not None:
            enter(place.file)
        return LighthouseServer(f"{host}:{port}", least, **_LIGHTHOUSE)

    with ThreadPoolExecutor(1) as pool:  # a namespace is a thread's
        server = pool.submit(serve).result()
    yield f"http://{host}:{urlsplit(server.address()).port}"
    server.shutdown()


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def listeners(process: int | str) -> list[str]:
    """The addresses on which a process (a number, or "self") listens, as the kernel writes them in hexadecimal."""
    place, sockets = Path(f"/proc/{process}"), set()
    for descriptor in (place / "fd").iterdir():
        with suppress(OSError):  # it may be closed by now
            sockets.add(str(descriptor.readlink()))
    rows = [line.split() for name in ("tcp", "tcp6") for line in (place / "net" / name).read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def listens(port: int) -> bool:
    """Whether a process listens on it."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Processes:
    """Processes of a test, which all end with it.

    Args:
        folder: of all that they write.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.started: list[subprocess.Popen[bytes] | Program] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        for process in self.started:
            process.kill()
            process.wait()

    def start(self, name: str, command: Sequence[str], **env: str) -> Any:
        """Start one, whose words go to a file of its name; Python's need not import torch again."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        if command[0] == sys.executable:
            forked = Program(command[1:], self.folder / f"{name}.out", self.folder / f"{name}.err", env)
            self.started.append(forked)
            return forked
        with (self.folder / f"{name}.out").open("ab") as out, (self.folder / f"{name}.err").open("ab") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, env=env)
        self.started.append(process)
        return process

    def said(self, name: str) -> list[str]:
        """The lines of its standard error."""
        return (self.folder / f"{name}.err").read_text().splitlines()

    def ended(self, name: str, process: subprocess.Popen[bytes], status: int = 0) -> None:
        """Wait for its end, which must be this one."""
        ended_with = process.wait(timeout=PATIENCE)
        assert ended_with == status, (name, ended_with, self.said(name)[-12:])


class Run(Processes):
    """A run of replicas that come and go.

    Args:
        folder: of all that is written.
        config: file of the configuration.
        url: of the lighthouse.
        options: further words of the command.
        alone: replicas of a run in which each may go on by itself; at first each waits until all are up.
    """

    def __init__(self, folder: Path, config: Path, url: str, *options: str, alone: int = 0) -> None:
        super().__init__(folder)
        self.alone = alone
        times = ["--sync-timeout", "20", "--quorum-timeout", "60", "--start-timeout", "90"]
        self.words = ["train", "--config", str(config), "--out", str(folder / "run"), "--quiet", "--lighthouse", url]
        self.words += [*times, *options]
        self.out = folder / "run"
        self.launched: dict[int, float] = {}

    def replica(self, number: int, *faults: str, options: Sequence[str] = ()) -> Any:
        """Start one, with words for `faulty`; files in them are relative to the folder."""
        others: list[str] = []
        if self.alone:
            options = ["--min-replicas", "1", *options]
            if number not in self.launched:  # one that comes back finds the others at work
                others = [f"hold=up-{other}@up:1" for other in range(self.alone) if other != number]
            faults = (*faults, f"touch=up-{number}@up:1", *others)
        self.launched[number] = time.time()
        pairs = [word.partition("=") for word in (f"events={number}.events", *faults)]  # ACTION=FILE@MOMENT:COUNT
        words = [f"{event}={self.folder / file}" if equal else event for event, equal, file in pairs]
        command = [sys.executable, str(DRIVER), *words, "--", *self.words, "--replica", str(number), *options]
        return self.start(str(number), command)

    def touch(self, file: str) -> None:
        """Let the waiting threads go on."""
        (self.folder / file).touch()

    def events(self, number: int) -> list[dict[str, Any]]:
        """What has happened in a replica's processes, with the times."""
        path = self.folder / f"{number}.events"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def await_event(self, number: int, event: str, times: int = 1) -> None:
        """Wait until it has happened so often."""
        until(f"{event} in {number}", lambda: sum(e["what"] == event for e in self.events(number)) >= times)

    def lines(self, number: int) -> list[dict[str, Any]]:
        """A replica's rounds."""
        return read_lines(self.out / f"replica-{number}" / "rounds.jsonl")

    def summary(self, number: int) -> dict[str, Any]:
        """A replica's end."""
        return json.loads((self.out / f"replica-{number}" / "summary.json").read_text())

    def wait_after(self, fault: str, of: int, survivor: int) -> float:
        """Seconds from a replica's fault to another's next round that counts."""
        (then,) = (event["time"] for event in self.events(of) if event["what"] == fault)
        return self._next_round(survivor, then)

    def way_back(self, number: int) -> float:
        """Seconds from a replica's last start to the first round that counts in it."""
        return self._next_round(number, self.launched[number])

    def newcomers(self, number: int) -> list[int]:
        """The newcomers of each sync that had any, as a replica that was always there has seen them."""
        return [line["newcomers"] for line in self.lines(number) if line["newcomers"]]

    def sizes(self, number: int) -> list[int]:
        """How many replicas counted, without repetition."""
        return [count for count, _ in itertools.groupby(line["replicas"] for line in self.lines(number))]

    def _next_round(self, number: int, then: float) -> float:
        return min(e["time"] for e in self.events(number) if e["what"] == "round" and e["time"] > then) - then


def state_of(pid: int) -> str:
    """The letter that the system has for what a process does; X for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether SIGSTOP has stopped it."""
    return state_of(process.pid) == "T"


def wake(process: subprocess.Popen[bytes]) -> None:
    """Let a stopped process go on."""
    process.send_signal(signal.SIGCONT)


def check_rounds(run: Run, numbers: Sequence[int], *, always: Sequence[int], like: Path, period: int | None) -> None:
    """What must hold after any fault.

    Every sync that two replicas have in common has the same checksum; each fragment's rounds go up by one in the
    replicas that were always there, and never repeat in the others; restarts are where the period puts them; no inner
    step is lost or taken twice; all ends are the same.

    Args:
        run: the run.
        numbers: of all replicas.
        always: of those that were never killed.
        like: the folder of an undisturbed run of as many steps.
        period: of the restarts; None where the run itself decides, which all must do alike.
    """
    facts_by_round: dict[tuple[str, int], Any] = {}
    for number in numbers:
        lines = run.lines(number)
        steps = [line["step"] for line in lines]
        assert steps == sorted(steps), number
        seen: dict[str, int] = {}
        for line in lines:
            for part in line["fragments"]:
                name, this = part["name"], part["round"]
                before = seen.get(name, 0)
                assert this == before + 1 if number in always else this > before, (number, line)
                seen[name] = this
                assert period is None or part["restarted"] == (this % period == 0), (number, line)
                common = [part["checksum"], part["restarted"], line["replicas"], line["newcomers"], line["step"]]
                common += [group["gain"] for group in line["groups"]]
                assert facts_by_round.setdefault((name, this), common) == common, (number, line)
    summaries, whole = [run.summary(number) for number in numbers], read_summary(like)
    assert whole is not None
    for number, summary in zip(numbers, summaries, strict=True):
        assert summary["exit_reason"] == "finished", number
        for key in ("rounds", "steps", *(["restarts"] if period else [])):
            assert summary[key] == whole[key], (number, key)
        for key in ("checksum", "perplexity"):
            assert summary[key] == summaries[0][key], (number, key)
    for number in always:
        assert _inner_steps(run.lines(number)) == _inner_steps(read_lines(like / "rounds.jsonl")), number


def _inner_steps(lines: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many have been counted for each fragment."""
    steps: dict[str, int] = {}
    for part in (part for line in lines for part in line["fragments"]):
        steps[part["name"]] = steps.get(part["name"], 0) + part["inner_steps"]
    return steps


def side_by_side(monkeypatch: pytest.MonkeyPatch, *calls: Callable[[], Any]) -> list[Any]:
    """Call functions in threads of this process, each with a `TorchFT` of its own: what each returns, or has raised.

    Where the processes need not be killed, this is a test of seconds less: no process imports torch. Managers are
    made one after the other, and none of them filters the standard error that all share.
    """
    from twophase.elastic import parts as torchft_parts

    one_by_one, make = threading.Lock(), torchft_parts.manager

    def manager(*words: Any, **options: Any) -> Any:
        with one_by_one:
            return make(*words, **options)

    results: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as error:
            results[place] = error

    with monkeypatch.context() as patch:
        patch.setattr(torchft_parts, "manager", manager)
        patch.setattr(torchft_parts, "Hush", lambda: SimpleNamespace(close=lambda: None))
        threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads), results
    return results


if __name__ == "__main__":  # a lighthouse that can be killed
    with lighthouse(port=int(sys.argv[1])):
        signal.pause()
