"""The examples run as their docstrings say, and each equals the loop that it stands for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.run
from torch import Tensor

from forked import Program
from replicas import same_bits

FOLDER = Path(__file__).parents[1] / "examples"
BIN = Path(sys.executable).parent
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def load(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def held_port() -> Iterator[str]:
    """A port that the kernel gives to no program by itself, and that a server which asks for it can have.

    A port that is only looked up is soon given to another listener of the same test. A bound socket that does not
    listen keeps it, and SO_REUSEADDR, which servers set, lets them bind it all the same.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield str(holder.getsockname()[1])


def losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", printed)]


# --- one worker ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", ["never", "3", "soft:2:0.3:0.1"])
def test_single_worker_by_hand_is_the_engine(restart: str):
    """Rounds written out around a bare `OuterSGD` have the bits of the engine's, the shorter last round included."""
    example = load("single_worker")
    engine, hand = example.with_engine(77, restart), example.by_hand(77, restart)
    assert all(map(same_bits, engine.parameters(), hand.parameters()))


def test_single_worker_restarts_and_prints(capsys: pytest.CaptureFixture[str]):
    """Restarts change the weights; every line has a loss, and the two ways of writing it the same."""
    example = load("single_worker")
    example.main(["--steps", "80"])
    printed = [float(number) for number in re.findall(r"^ +(\d\.\d+)  ", capsys.readouterr().out, re.M)]
    assert len(printed) == 5
    assert printed[1] == printed[2]
    assert printed[3] == printed[4]
    assert len(set(printed)) == 3
    assert max(printed) < example.loss(example.build()[0])


# --- a plain loop, alone and under torchrun -----------------------------------------------------------------------


def test_plain_loop_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """One process: the loss goes down, and every third round restarts."""
    monkeypatch.delenv("RANK", raising=False)
    load("plain_loop").main(["--steps", "150"])
    printed = capsys.readouterr().out
    values = losses(printed)
    assert values[-1] < 0.5 * values[0]
    assert "1 replica(s)" in printed
    assert re.findall(r"round (\d+): restarted True", printed) == ["3", "6", "9"]


@pytest.mark.dist
@pytest.mark.slow
def test_plain_loop_in_two_processes(tmp_path: Path):
    """Two processes of torchrun: the loss goes down on both, and both end with the same weights."""
    log = tmp_path / "log"
    words = ["--standalone", "--nproc-per-node", "2", str(FOLDER / "plain_loop.py"), "--steps", "150"]
    process = Program([str(torch.distributed.run.__file__), *words], log, log, ONE_THREAD)
    try:
        code = process.wait(timeout=150)
    finally:
        process.terminate()  # not kill(): its two processes would live on
        process.wait()
    printed = log.read_text()
    assert code == 0, printed[-3000:]
    for rank in range(2):
        values = losses("\n".join(re.findall(rf"^process {rank}: .*", printed, re.M)))
        assert values[-1] < 0.5 * values[0]
    checksums = re.findall(r"checksum (\w{16})", printed)
    assert len(checksums) == 2
    assert len(set(checksums)) == 1
    assert printed.count("2 replica(s)") == 2


# --- torchft's DiLoCo ---------------------------------------------------------------------------------------------

ROUNDS = 7


def listeners(pid: int) -> set[str]:
    """Addresses, in the kernel's hexadecimal, on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(str(link.readlink()))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                addresses.add(fields[1])
    return addresses


def is_loopback(address: str) -> bool:
    """127.0.0.1, as it is or mapped into IPv6."""
    return address.partition(":")[0] in ("0100007F", "0000000000000000FFFF00000100007F")


@pytest.fixture(scope="session")
def torchft_replicas(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], set[str]]:
    """What two replica groups saved, and on which addresses they listened."""
    pytest.importorskip("torchft", reason="the extra ft is not installed")
    folder = tmp_path_factory.mktemp("torchft")
    with held_port() as port:
        seen = run_torchft(folder, f"127.0.0.1:{port}")
    return [torch.load(folder / f"{number}.pt", weights_only=True) for number in range(2)], seen


def run_torchft(folder: Path, place: str) -> set[str]:
    """Run a lighthouse at `place` and two replica groups; the addresses on which these listen."""
    program = [str(FOLDER / "torchft_diloco.py"), "--replicas", "2", "--lighthouse", f"http://{place}"]
    processes: list[Any] = []
    logs = [folder / "0.log", folder / "1.log"]
    try:
        for number, log in enumerate(logs):
            words = ["--replica", str(number), "--rounds", str(ROUNDS), "--out", str(folder / f"{number}.pt")]
            processes.append(Program([*program, *words], log, log, ONE_THREAD))
        replicas = [*processes]
        seen = wait_for_listeners(replicas)  # the replicas wait for the lighthouse, so they can be looked at
        lighthouse = [BIN / "torchft_lighthouse", "--min_replicas", "2", "--bind", place, "--quorum_tick_ms", "20"]
        processes.append(subprocess.Popen(lighthouse, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        codes = [replica.wait(timeout=90) for replica in replicas]
        assert codes == [0, 0], "\n".join(log.read_text()[-2000:] for log in logs)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return seen


def wait_for_listeners(replicas: list[Program]) -> set[str]:
    """Each replica's store, checkpoint server and manager, as soon as all of them listen."""
    by_replica: list[set[str]] = []
    for _ in range(1200):
        by_replica = [listeners(replica.pid) for replica in replicas if replica.poll() is None]
        if len(by_replica) < 2 or all(len(addresses) >= 3 for addresses in by_replica):
            break  # a replica that has ended is told by the caller, with its log
        time.sleep(0.1)
    return set().union(*by_replica)


def simulate(example: ModuleType) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """The same run in plain torch and one process: global weights and momentum of each fragment."""
    models = [example.build()[:2] for _ in range(2)]
    anchors = [[p.detach().clone() for p in fragment.parameters()] for fragment in models[0][0]]
    momentum = [[torch.zeros_like(a) for a in fragment] for fragment in anchors]
    for synced in range(2 * ROUNDS):
        fragment, number = synced % 2, synced // 2 + 1
        for step in range(synced * example.SYNC_EVERY // 2, (synced + 1) * example.SYNC_EVERY // 2):
            for replica, (fragments, inner) in enumerate(models):
                example.inner_step(fragments, inner, replica, step)
        replicas = [list(fragments[fragment].parameters()) for fragments, _ in models]
        with torch.no_grad():
            for a, m, p, q in zip(anchors[fragment], momentum[fragment], *replicas, strict=True):
                g = ((a - p) + (a - q)) / 2
                m.mul_(0.9).add_(g)
                a.add_(g.add(m, alpha=0.9), alpha=-0.7)
                if number % 3 == 0:
                    m.zero_()
                p.copy_(a)
                q.copy_(a)
    return anchors, momentum


@pytest.mark.dist
@pytest.mark.slow
def test_torchft_replicas_agree(torchft_replicas: tuple[list[dict[str, Any]], set[str]]):
    """Both replica groups hold the same weights, momentum and counters; every third round restarted."""
    (first, second), _ = torchft_replicas
    assert all(same_bits(p, second["weights"][name]) for name, p in first["weights"].items())
    for state_a, state_b in zip(first["outers"], second["outers"], strict=True):
        assert state_a["param_groups"] == state_b["param_groups"]
        (group,) = state_a["param_groups"]
        assert (group["rounds"], group["restarts"], group["rounds_since_restart"]) == (ROUNDS, ROUNDS // 3, ROUNDS % 3)
        for key, state in state_a["state"].items():
            assert same_bits(state["momentum_buffer"], state_b["state"][key]["momentum_buffer"])


@pytest.mark.dist
@pytest.mark.slow
def test_torchft_equals_a_single_process(torchft_replicas: tuple[list[dict[str, Any]], set[str]]):
    """Weights and momentum buffers have the bits of the same DiLoCo, written in plain torch in one process."""
    (run, _), _ = torchft_replicas
    anchors, momentum = simulate(load("torchft_diloco"))
    assert all(map(same_bits, run["weights"].values(), [a for fragment in anchors for a in fragment]))
    for outer, buffers in zip(run["outers"], momentum, strict=True):
        for state, m in zip(outer["state"].values(), buffers, strict=True):
            assert m.abs().max() > 0
            assert same_bits(state["momentum_buffer"], m)


@pytest.mark.dist
@pytest.mark.slow
def test_torchft_listens_on_this_machine_only(torchft_replicas: tuple[list[dict[str, Any]], set[str]]):
    """Store, checkpoint server and manager of both replica groups are bound to 127.0.0.1."""
    _, seen = torchft_replicas
    assert len(seen) >= 6
    assert [address for address in seen if not is_loopback(address)] == []
