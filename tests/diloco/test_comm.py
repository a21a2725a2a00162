"""What communicators promise: sums, broadcasts and gathers after which all processes hold the same bits.

Run as a program, this file is one of the three processes of its own test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forked import in_processes
from twophase.diloco.comm import Communicator, ProcessGroup, SingleProcess, default_communicator

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
