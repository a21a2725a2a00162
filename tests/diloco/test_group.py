"""What groups promise: sums, broadcasts and gathers of the same bits on all ranks, one message where one is lost."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco.scenarios import HEAVY_BALL, refusal
from forked import bring, in_processes
from replicas import same_bits
from twophase.diloco import group as group_module
from twophase.diloco.compression import BLOCK, Compression
from twophase.diloco.engine import DiLoCo
from twophase.diloco.group import TIMEOUT, ProcessGroup, SingleProcess, default_group
from twophase.errors import RunError, UsageError
from twophase.training.distributed import raised_on_all_ranks

SIZE = 3
SUMS = [(name, numel) for name in ("bfloat16", "int8") for numel in (BLOCK, 9 * BLOCK, 40 * BLOCK)]


def vector(rank: int, numel: int = 1001) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def talk(group: ProcessGroup, rank: int) -> dict[str, Any]:
    """Every call once, in the order that all ranks make them."""
    first, second = vector(rank), torch.full((5,), float(rank), dtype=torch.float64)
    sums = [group.all_reduce(first), group.all_reduce(second)]
    sent = [next(each) for each in sums]  # two under way at once
    assert [[*each] for each in reversed(sums)] == [[], []]
    copied = vector(10 + rank)
    group.broadcast(copied)
    return {
        "place": [group.rank, group.size],
        "sum": first,
        "ranks": second,
        "bytes": sent,
        "copied": copied,
        "json": group.gather_json([rank, "é" * (rank + 1), 0.1, None, math.inf]),
        "alone": group.shards.gather_json(rank),
    }


def summed(name: str, numel: int, rank: int) -> list[Any]:
    """The sums of two rounds in codes, and the bytes that were sent for them."""
    compression, results = Compression(name, torch.zeros(numel), 1), []
    for number in range(2):
        x = vector(10 * number + rank, numel)
        sent = sum(compression.all_reduce(x, ProcessGroup()))
        results += [x, sent]
    return results


def agreed(rank: int, errors: dict[int, Exception]) -> str:
    """What is said where some ranks fail in a block."""

    def block() -> None:
        with raised_on_all_ranks(ProcessGroup()):
            if rank in errors:
                raise errors[rank]

    return refusal(block)


def worker(rank: int) -> dict[str, Any]:
    """One of the three processes; in the end rank 2 dies, and the others notice."""
    hasty: Any = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    answers: dict[str, Any] = talk(ProcessGroup(), rank)
    answers["sums"] = {case: summed(*case, rank) for case in SUMS}
    failures: list[dict[int, Exception]] = [{}, {1: UsageError("one")}, {0: UsageError("none")}]
    failures.append({2: KeyError("two"), 1: RunError("one")})
    answers["agreed"] = [agreed(rank, errors) for errors in failures]
    if rank == 0:
        answers["waited"] = refusal(lambda: ProcessGroup(hasty).gather_json(1))
    dist.barrier()
    if rank < 2:
        answers["lost"] = refusal(lambda: ProcessGroup().gather_json(1))
    torch.save(answers, Path(sys.argv[2]) / f"{rank}.pt")
    os._exit(0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_processes(__file__, tmp_path_factory.mktemp("group"), SIZE)


@pytest.mark.dist
def test_all_hear_the_same(ranks: list[dict[str, Any]]) -> None:
    """Sum, broadcast and gathers leave the same on all: the sum, the first's, and everyone's, in order of rank."""
    for rank, answer in enumerate(ranks):
        assert answer["place"] == [rank, SIZE]
        assert same_bits(answer["sum"], ranks[0]["sum"])
        torch.testing.assert_close(answer["sum"], sum(map(vector, range(SIZE))), rtol=1e-6, atol=1e-6)
        assert torch.equal(answer["copied"], vector(10))
        assert answer["ranks"].tolist() == [3.0] * 5
        assert answer["json"] == [[r, "é" * (r + 1), 0.1, None, math.inf] for r in range(SIZE)]
        assert answer["alone"] == [rank]
        assert answer["bytes"] == [2 * 2 * n // 3 for n in (4 * 1001, 8 * 5)]  # there and back


@pytest.mark.dist
@pytest.mark.parametrize(("name", "numel"), SUMS)
def test_sums_of_three_ranks_in_codes(ranks: list[dict[str, Any]], name: str, numel: int) -> None:
    """They have the bits that three senders in one process make; each rank sends two thirds of the codes twice."""
    alone = Compression(name, torch.zeros(numel), SIZE)
    codes = math.ceil(numel / BLOCK / SIZE) * SIZE * {"bfloat16": 256, "int8": 132}[name]
    for number in range(2):
        total, *others = (vector(10 * number + rank, numel) for rank in range(SIZE))
        alone.quantize_(total, 0)
        for sender, x in enumerate(others, start=1):
            alone.quantize_(x, sender)
            total += x
        assert not [*alone.all_reduce(total, SingleProcess())]  # pyright: ignore[reportArgumentType]
        for answers in ranks:
            assert same_bits(answers["sums"][name, numel][2 * number], total)
            assert answers["sums"][name, numel][2 * number + 1] == 2 * codes * (SIZE - 1) // SIZE


@pytest.mark.dist
def test_an_error_of_one_rank_is_that_of_all(ranks: list[dict[str, Any]]) -> None:
    """The first rank's error, of its kind, where ranks fail in a block; the rank itself raises its own."""
    for answers in ranks:
        assert answers["agreed"] == ["nothing", "UsageError: one", "UsageError: none", "RunError: one"]


@pytest.mark.dist
def test_a_lost_rank_is_one_message(ranks: list[dict[str, Any]]) -> None:
    """Where a rank has died, or does not come within the group's timeout, the others end with one line."""
    for message in (ranks[0]["lost"], ranks[1]["lost"], ranks[0]["waited"]):
        assert message.startswith("RunError")
        assert "rank is lost" in message
        assert "\n" not in message


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_process_hears_itself() -> None:
    """Without torch.distributed a run is alone; errors in agreement are raised as they are."""
    group = default_group()
    assert type(group) is SingleProcess
    assert (group.gather_bytes(b"x"), group.gather_json([1])) == ([b"x"], [[1]])
    x = torch.ones(3)
    assert not [*group.all_reduce(x)]
    assert torch.equal(x, torch.ones(3))
    with pytest.raises(KeyError, match="x"), raised_on_all_ranks(group):
        raise KeyError("x")
    with pytest.raises(ValueError, match="init_process_group"):
        ProcessGroup()


@pytest.mark.usefixtures("alone")
def test_settings_of_a_group() -> None:
    """The timeout is that of the shards, too; no default group goes unused."""
    assert type(default_group()) is ProcessGroup
    group = ProcessGroup(shards=dist.group.WORLD, timeout=5.0)
    assert (group.timeout, group.shards.timeout, group.size, group.sharded) == (5.0, 5.0, 1, True)  # type: ignore[attr-defined]
    assert ProcessGroup().timeout == TIMEOUT


class Collective:
    """A collective as NCCL's: `wait()` blocks and raises only with a time limit."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.limits = fault, []

    def is_completed(self) -> bool:
        return len(self.fault) > 30  # also when it has failed; else it never ends

    def wait(self, limit: timedelta | None = None) -> None:
        self.limits.append(limit)
        if self.fault and limit is not None:
            raise RuntimeError(self.fault)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("", ""),
        ("NCCL error: remote process exited\nmore", "remote process exited"),
        ("NCCL error in: init.cpp\nDuplicate GPU detected : rank 1 and rank 0", "set_device"),
    ],
)
def test_the_host_waits_for_a_sum_on_a_gpu(monkeypatch: pytest.MonkeyPatch, fault: str, word: str) -> None:
    """With a limit; NCCL's error, or a sum without end, ends the run with one line."""
    collective = Collective(fault)
    monkeypatch.setattr(group_module.dist, "all_reduce", lambda *_, **__: collective)
    under_way = ProcessGroup(timeout=0.05).all_reduce(torch.empty(4, device="meta"))
    assert next(under_way) == 0
    if fault:
        with pytest.raises(RunError, match=word) as caught:
            next(under_way)
        assert "\n" not in str(caught.value)
    assert not [*under_way]
    assert collective.limits == [timedelta(seconds=0.05)]


@pytest.mark.usefixtures("alone")
def test_devices_of_small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a group takes GPU tensors alone, parameters must be on this rank's own GPU, and small messages go there."""
    group = ProcessGroup()
    group.bind(torch.device("cuda:5"))  # gloo takes small messages from main memory
    assert group.gather_json([1.0]) == [[1.0]]
    with pytest.raises(ValueError, match="Apple"):
        group.bind(torch.device("mps"))
    monkeypatch.setattr(group_module.dist, "get_backend_config", lambda _: "cuda:nccl")
    monkeypatch.setattr(group_module.dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    group.bind(torch.device("cuda:0"))
    for device, word in {"cuda:1": "set_device", "cpu": "init_process_group"}.items():
        with pytest.raises(ValueError, match=word):
            group.bind(torch.device(device))
    with pytest.raises(ValueError, match="init_process_group"):
        DiLoCo(nn.Linear(2, 2), HEAVY_BALL, inner_steps=1, group=group)
    group.bind(torch.device("meta"))  # any device that is no CPU and that this machine has
    devices: list[torch.device] = []
    monkeypatch.setattr(group, "all_gather", lambda received, sent, **_: devices.extend([received.device, sent.device]))
    with pytest.raises(TypeError):
        group.gather_json([1.0])
    assert devices == [torch.device("meta")] * 2


if __name__ == "__main__":
    bring(worker, SIZE)
