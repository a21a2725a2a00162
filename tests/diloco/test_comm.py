"""What communicators promise: sums, broadcasts and gathers after which all processes hold the same bits.

Run as a program, this file is one of the three processes of its own test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forked import in_processes
from twophase.base.config import RunError
from twophase.diloco import comm
from twophase.diloco.comm import Communicator, ProcessGroup, SingleProcess, default_communicator
from twophase.diloco.engine import DiLoCo
from twophase.rule import OuterRule

SIZE = 3
SUBGROUP = [1, 2]  # its process 0 is process 1 of all


def join(rank: int, size: int, store: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def vector(rank: int) -> Tensor:
    return torch.randn(1001, generator=torch.Generator().manual_seed(rank))


# --- one process --------------------------------------------------------------------------------------------------


def check_alone(communicator: Communicator) -> None:
    """What every communicator of one process does: nothing, visibly."""
    assert (communicator.rank, communicator.size) == (0, 1)
    tensor = vector(0)
    pending = communicator.launch_sum(tensor)
    pending.wait()
    assert torch.equal(tensor, vector(0))
    communicator.broadcast(tensor)
    assert torch.equal(tensor, vector(0))
    assert communicator.gather({"a": (1, "b")}) == [{"a": (1, "b")}]


def test_single_process_leaves_everything_alone():
    """A sum over one process is the tensor itself, nothing is sent, and a gather is the one value."""
    communicator = SingleProcess()
    check_alone(communicator)
    assert communicator.launch_sum(vector(0)).bytes_sent == 0
    value = object()
    assert communicator.gather(value)[0] is value


def test_process_group_must_be_initialised():
    """Without torch.distributed the constructor says what to call first."""
    with pytest.raises(RuntimeError, match=r"not initialised; call torch\.distributed\.init_process_group\(\)"):
        ProcessGroup()


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    join(0, 1, tmp_path / "store")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_process_group_of_one():
    """A process group of one process behaves like a single process."""
    check_alone(ProcessGroup())


def test_default_without_torch_distributed():
    """Where torch.distributed is not initialised the default is a single process."""
    assert isinstance(default_communicator(), SingleProcess)


@pytest.mark.usefixtures("group_of_one")
def test_default_with_torch_distributed():
    """Where torch.distributed is initialised the default is its default group."""
    communicator = default_communicator()
    assert isinstance(communicator, ProcessGroup)
    assert communicator.group is None


# --- NCCL, by what it does and not with it ------------------------------------------------------------------------


class Work:
    """A collective as NCCL's: `wait()` neither blocks nor raises, and a failure shows in `is_completed` and later."""

    def __init__(self, looks: int | None, fault: str = "") -> None:
        self.looks, self.fault, self.limits = looks, fault, []

    def is_completed(self) -> bool:
        """After so many looks; None is never."""
        if self.looks is not None:
            self.looks -= 1
        return self.looks is not None and self.looks < 0

    def wait(self, limit: timedelta | None = None) -> None:
        """Raise the fault only where there is a time limit, as NCCL does."""
        self.limits.append(limit)
        if self.fault and limit is not None:
            raise RuntimeError(self.fault)


@pytest.fixture
def on_gpus(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> ProcessGroup:
    """A group that seems to be NCCL's alone, on a machine whose current device is its first GPU."""
    assert group_of_one is None
    monkeypatch.setattr(comm.dist, "get_backend_config", lambda _: "cuda:nccl")
    monkeypatch.setattr(comm.dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return ProcessGroup(timeout=0.05)


def summed(group: ProcessGroup, work: Work, monkeypatch: pytest.MonkeyPatch) -> comm.Pending:
    """A sum under way on a device that is no CPU."""
    monkeypatch.setattr(comm.dist, "all_reduce", lambda *_, **__: work)
    return group.launch_sum(torch.empty(4, device="meta"))


def test_the_host_waits_for_a_sum_on_a_gpu(on_gpus: ProcessGroup, monkeypatch: pytest.MonkeyPatch):
    """`wait` looks until the work is over, and lets the stream wait for it, too."""
    work = Work(looks=7)
    pending = summed(on_gpus, work, monkeypatch)
    assert work.looks == 7
    pending.wait()
    assert work.looks == -1
    assert len(work.limits) == 1


@pytest.mark.parametrize("looks", [0, 3])
def test_a_failed_sum_is_one_message(on_gpus: ProcessGroup, monkeypatch: pytest.MonkeyPatch, looks: int):
    """NCCL's error, which a plain `wait()` keeps to itself, ends the run, with the remedy."""
    pending = summed(on_gpus, Work(looks, "NCCL error: remote process exited\nmore"), monkeypatch)
    with pytest.raises(RunError, match=r"is lost \(NCCL error: remote process exited\).*repeat the command"):
        pending.wait()


@pytest.mark.parametrize("fault", ["", "timed out in blocking wait"])
def test_a_sum_that_never_ends(on_gpus: ProcessGroup, monkeypatch: pytest.MonkeyPatch, fault: str):
    """After the timeout the backend is asked to wait with a limit, which frees the GPU, and the run ends."""
    work = Work(None, fault)
    with pytest.raises(RunError, match=fault or r"no answer for 0\.05 s"):
        summed(on_gpus, work, monkeypatch).wait()
    assert work.limits == [timedelta(milliseconds=1)]


def test_a_broadcast_is_waited_for_likewise(on_gpus: ProcessGroup, monkeypatch: pytest.MonkeyPatch):
    """The first collective on the parameters must not hang, either."""
    monkeypatch.setattr(comm.dist, "broadcast", lambda *_, **__: Work(None))
    with pytest.raises(RunError, match="no answer"):
        on_gpus.broadcast(torch.empty(4, device="meta"))


def test_ranks_that_share_a_gpu_are_told(on_gpus: ProcessGroup, monkeypatch: pytest.MonkeyPatch):
    """NCCL's own words name PCI numbers; the remedy is a call."""
    fault = "NCCL error in: init.cpp\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 17000"
    with pytest.raises(RunError, match=r"on one GPU; call torch\.cuda\.set_device\(local_rank\)"):
        summed(on_gpus, Work(0, fault), monkeypatch).wait()


def test_small_messages_go_through_the_parameters_device(on_gpus: ProcessGroup, monkeypatch: pytest.MonkeyPatch):
    """And not through the current one, which a program may change between two rounds."""
    devices = []

    def gather(received: Tensor, sent: Tensor, _group: Any) -> Work:
        devices.extend([received.device, sent.device])
        return Work(0, "enough")

    monkeypatch.setattr(comm, "_all_gather", gather)
    on_gpus.bind(torch.device("meta"))  # any device that is no CPU and that this machine has
    with pytest.raises(RunError, match="enough"):
        on_gpus.exchange([1.0])
    assert devices == [torch.device("meta")] * 2


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (
            "cuda:1",
            r"are on cuda:1, and .* device is cuda:0; call torch\.cuda\.set_device\(local_rank\) before",
        ),
        ("cpu", r"are on the CPU, .* \(cuda:nccl\) takes tensors of a GPU only; .* init_process_group"),
    ],
)
def test_a_device_that_is_not_the_ranks_own_is_refused(on_gpus: ProcessGroup, device: str, message: str):
    """Two ranks that exchange on the same GPU would wait for each other for ever."""
    on_gpus.bind(torch.device("cuda:0"))
    with pytest.raises(ValueError, match=message):
        on_gpus.bind(torch.device(device))


def test_the_engine_asks(on_gpus: ProcessGroup):
    """Before its first collective, a device on which the group cannot work is refused."""
    with pytest.raises(ValueError, match="are on the CPU"):
        DiLoCo(torch.nn.Linear(2, 2), OuterRule(0.7, 0.9), inner_steps=1, communicator=on_gpus)


@pytest.mark.usefixtures("group_of_one")
def test_with_a_cpu_backend_any_device_will_do():
    """Small messages then go through main memory, whatever the current device is."""
    ProcessGroup().bind(torch.device("cuda:5"))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_is_positive_and_finite(timeout: float):
    """Without one a dead peer would be waited for until the machine is turned off."""
    with pytest.raises(ValueError, match=r"timeout is .*; it must be a positive number of seconds"):
        ProcessGroup(timeout=timeout)


# --- three processes ----------------------------------------------------------------------------------------------


def talk(communicator: Communicator, rank: int) -> dict[str, Any]:
    """Every call once, in the order that all processes make them."""
    first, second = vector(rank), torch.full((5,), float(rank), dtype=torch.float64)
    pending = [communicator.launch_sum(first), communicator.launch_sum(second)]  # two under way at once
    for work in reversed(pending):
        work.wait()
    told = vector(10 + rank)
    communicator.broadcast(told)
    return {
        "place": [communicator.rank, communicator.size],
        "sum": first,
        "ranks": second,
        "bytes": [work.bytes_sent for work in pending],
        "told": told,
        "gathered": communicator.gather({"rank": rank, "text": "é" * (rank + 1)}),
    }


@pytest.fixture(scope="session")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each of three processes heard, in the whole group and in a group of two."""
    return in_processes(__file__, tmp_path_factory.mktemp("comm"), SIZE)


@pytest.mark.dist
@pytest.mark.slow
def test_three_processes_hear_the_same(heard: list[dict[str, dict[str, Any]]]):
    """Sum, broadcast and gather leave the same bits on all three, and they are the sum, process 0's, and everyone's."""
    whole = [answers["whole"] for answers in heard]
    assert [answer["place"] for answer in whole] == [[rank, SIZE] for rank in range(SIZE)]
    for answer in whole:
        assert torch.equal(answer["sum"], whole[0]["sum"])
        assert torch.equal(answer["told"], vector(10))
        assert answer["ranks"].tolist() == [0.0 + 1.0 + 2.0] * 5
        assert answer["gathered"] == [{"rank": rank, "text": "é" * (rank + 1)} for rank in range(SIZE)]
        assert answer["bytes"] == [2 * 2 * size // 3 for size in (4 * 1001, 8 * 5)]  # two thirds, there and back
    torch.testing.assert_close(whole[0]["sum"], vector(0) + vector(1) + vector(2), rtol=1e-6, atol=1e-6)


@pytest.mark.dist
@pytest.mark.slow
def test_group_of_two_counts_its_own_ranks(heard: list[dict[str, dict[str, Any]]]):
    """In a group of processes 1 and 2, ranks, sums, broadcasts (from process 1) and gathers are the group's own."""
    pair = [heard[rank]["pair"] for rank in SUBGROUP]
    assert [answer["place"] for answer in pair] == [[0, 2], [1, 2]]
    for answer in pair:
        assert torch.equal(answer["sum"], vector(1) + vector(2))
        assert torch.equal(answer["told"], vector(11))
        assert answer["gathered"] == [{"rank": rank, "text": "é" * (rank + 1)} for rank in SUBGROUP]
    assert "pair" not in heard[0]


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    join(rank, SIZE, folder / "store")
    answers = {"whole": talk(default_communicator(), rank)}
    group: Any = dist.new_group(SUBGROUP)
    if rank in SUBGROUP:
        answers["pair"] = talk(ProcessGroup(group), rank)
    torch.save(answers, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))
