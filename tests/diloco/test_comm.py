"""What communicators promise: sums, broadcasts and gathers after which all processes hold the same bits.

Run as a program, this file is one of the three processes of its own tests, which also try the wires.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import threads
from channels import channel, contribution, contributions, simulate
from forked import bring, finish, in_processes, places
from threads import Member
from twophase.base.config import RunError, UsageError
from twophase.diloco import comm
from twophase.diloco import transfer as transfer_module
from twophase.diloco.comm import ProcessGroup, default_communicator
from twophase.diloco.communicator import Communicator, Pending, SingleProcess, in_agreement
from twophase.diloco.engine import DiLoCo
from twophase.diloco.flat import checksum
from twophase.diloco.formats import WIRES
from twophase.rule import OuterRule

SIZE = 3
SUBGROUP = [1, 2]  # its process 0 is process 1 of all
ROUNDS = 3
LENGTHS = [1, 127, 128, 129, 1_000_003]
SUMS = [(name, numel) for name in WIRES for numel in LENGTHS]


def vector(rank: int) -> Tensor:
    return torch.randn(1001, generator=torch.Generator().manual_seed(rank))


# --- one process --------------------------------------------------------------------------------------------------


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def check_alone(communicator: Communicator) -> None:
    """What every communicator of one process does: nothing, visibly."""
    assert (communicator.rank, communicator.size) == (0, 1)
    tensor = vector(0)
    pending = communicator.launch_sum(tensor)
    pending.wait()
    communicator.broadcast(tensor)
    assert torch.equal(tensor, vector(0))
    assert pending.bytes_sent == 0
    assert communicator.gather({"a": [1, "b"]}, dict) == [{"a": [1, "b"]}]


@pytest.mark.parametrize(
    ("failures", "ends"),
    [
        ([None, None, None], [None] * 3),
        ([OSError("full"), None, None], [OSError, RunError, RunError]),
        ([None, UsageError("full"), OSError("other")], [UsageError] * 3),
        ([None, RunError("full"), UsageError("other")], [RunError] * 3),
        ([None, None, MemoryError()], [RunError, RunError, MemoryError]),
    ],
)
def test_all_end_as_the_first_that_fails(failures: list[Exception | None], ends: list[type | None]):
    """Each process raises the failure of the lowest rank that has one, with its words and its exit status."""

    def part(member: Member) -> None:
        with in_agreement(member):
            if (failure := failures[member.rank]) is not None:
                raise failure

    raised = threads.together(3, part)
    assert [error and type(error) for error in raised] == ends
    texts = {str(error) for error in raised if error and not isinstance(error, MemoryError)}
    assert texts <= {"full"} or "the memory is full" in texts.pop()


def test_without_torch_distributed():
    """The default is a single process, which leaves everything alone; a process group says what to call first."""
    assert isinstance(default_communicator(), SingleProcess)
    check_alone(default_communicator())
    with pytest.raises(RuntimeError, match=r"not initialised; call torch\.distributed\.init_process_group\(\)"):
        ProcessGroup()


@pytest.mark.usefixtures("group_of_one")
def test_with_torch_distributed():
    """The default is the default group, which in one process behaves like a single process, and takes any device."""
    communicator = default_communicator()
    assert isinstance(communicator, ProcessGroup)
    assert communicator.group is None
    check_alone(communicator)
    communicator.bind(torch.device("cuda:5"))  # small messages go through main memory
    for timeout in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"timeout is .*; it must be a positive number of seconds"):
            ProcessGroup(timeout=timeout)


def test_a_destroyed_group_leaves_no_threads(tmp_path: Path):
    """A process ends without gloo's threads, which would abort it if they freed a tensor as Python ends."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import os
import torch, torch.distributed as dist
from twophase import DiLoCo, OuterRule
dist.init_process_group("gloo", init_method={tmp_path.as_uri() + "/store"!r}, rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
torch.optim.AdamW(model.parameters())
engine = DiLoCo(model, OuterRule(0.7, 0.9), inner_steps=1)
engine.step()
dist.destroy_process_group()
print([open(f"/proc/self/task/{{task}}/comm").read() for task in os.listdir("/proc/self/task")])
""")
    finish(tmp_path, [[str(program)]], places(1))
    printed = (tmp_path / "0.log").read_text()
    assert "gloo" not in printed
    assert "python" in printed


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


def summed(group: ProcessGroup, work: Work, monkeypatch: pytest.MonkeyPatch) -> Pending:
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


LOST = "NCCL error: remote process exited"
TWICE = "NCCL error in: init.cpp\nDuplicate GPU detected : rank 1 and rank 0"


@pytest.mark.parametrize(
    ("looks", "fault", "message"),
    [
        *((looks, f"{LOST}\nmore", rf"is lost \({LOST}\).*repeat the command") for looks in (0, 3)),
        (0, TWICE, r"one GPU; call torch\.cuda\.set_device"),
        (None, "", r"no answer for 0\.05 s"),
        (None, "timed out in blocking wait", "timed out in blocking wait"),
    ],
)
def test_a_failed_sum_is_one_message(
    on_gpus: ProcessGroup, monkeypatch: pytest.MonkeyPatch, looks: int | None, fault: str, message: str
):
    """NCCL's error, which a plain `wait()` keeps to itself, ends the run with the remedy; so does a sum without end.

    After the timeout the backend is asked to wait with a limit, which frees the GPU.
    """
    work = Work(looks, fault)
    with pytest.raises(RunError, match=message):
        summed(on_gpus, work, monkeypatch).wait()
    assert looks is not None or work.limits == [timedelta(milliseconds=1)]


def test_a_broadcast_is_waited_for_likewise(on_gpus: ProcessGroup, monkeypatch: pytest.MonkeyPatch):
    """The first collective on the parameters must not hang, either."""
    monkeypatch.setattr(comm.dist, "broadcast", lambda *_, **__: Work(None))
    with pytest.raises(RunError, match="no answer"):
        on_gpus.broadcast(torch.empty(4, device="meta"))


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


def test_a_device_that_is_not_the_ranks_own_is_refused(on_gpus: ProcessGroup):
    """Two ranks that exchange on the same GPU would wait for each other for ever; the engine asks before it begins."""
    on_gpus.bind(torch.device("cuda:0"))
    for device, message in {
        "cuda:1": r"are on cuda:1, and .* device is cuda:0\. Call torch\.cuda\.set_device\(local_rank\) before",
        "cpu": r"are on the CPU, .* \(cuda:nccl\) takes tensors of a GPU only; .* init_process_group",
    }.items():
        with pytest.raises(ValueError, match=message):
            on_gpus.bind(torch.device(device))
    with pytest.raises(ValueError, match="are on the CPU"):
        DiLoCo(torch.nn.Linear(2, 2), OuterRule(0.7, 0.9), inner_steps=1, communicator=on_gpus)


# --- three processes ----------------------------------------------------------------------------------------------


def talk(communicator: Communicator, rank: int) -> dict[str, Any]:
    """Every call once, in the order that all processes make them."""
    first, second = vector(rank), torch.full((5,), float(rank), dtype=torch.float64)
    pending = [communicator.launch_sum(first), communicator.launch_sum(second)]  # two under way at once
    for work in reversed(pending):
        work.wait()
    copied = vector(10 + rank)
    communicator.broadcast(copied)
    return {
        "place": [communicator.rank, communicator.size],
        "sum": first,
        "ranks": second,
        "bytes": [work.bytes_sent for work in pending],
        "copied": copied,
        "gathered": communicator.gather({"rank": rank, "text": "é" * (rank + 1)}, dict),
    }


class Counting(ProcessGroup):
    """Counts the bytes of what it is given to send to others."""

    counted = 0

    def launch_sum(self, tensor: Tensor) -> Pending:
        """Sum."""
        self.counted += 2 * (tensor.nbytes * (self.size - 1) // self.size)
        return super().launch_sum(tensor)

    def launch_scatter(self, received: Tensor, sent: Tensor) -> Pending:
        """All-to-all."""
        self.counted += sum(part.nbytes for part in sent.chunk(self.size)[: self.size - 1])
        return super().launch_scatter(received, sent)

    def launch_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """All-gather."""
        self.counted += sent.nbytes * (self.size - 1)
        return super().launch_gather(received, sent)


def sums(rank: int, name: str, numel: int) -> tuple[list[str], int, int]:
    """The digits of the sums of each round over a wire, the bytes that the transfers report, and those counted."""
    wire, group, digits, reported = channel(name, numel), Counting(), [], 0
    for number in range(ROUNDS):
        # Whole numbers for float32: no order of adding changes their sum.
        total = contribution(numel, rank, number)
        total = total.mul_(1000).round_() if name == "float32" else total
        transfer = wire.launch(group, total)
        transfer.wait()
        digits.append(checksum(total))
        reported += transfer.bytes_sent
    return digits, reported, group.counted


@pytest.fixture(scope="session")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three processes heard."""
    return in_processes(__file__, tmp_path_factory.mktemp("comm"), SIZE)


@pytest.mark.dist
@pytest.mark.parametrize(("name", "ranks"), [("whole", [0, 1, 2]), ("pair", SUBGROUP)])
def test_all_of_a_group_hear_the_same(heard: list[dict[str, Any]], name: str, ranks: list[int]):
    """Sum, broadcast and gather leave the same bits on all, and they are the sum, the first's, and everyone's.

    Of processes 1 and 2, ranks, sums, broadcasts (from process 1) and gathers are the group's own.
    """
    size = len(ranks)
    rounding = 0.0 if size == 2 else 1e-6  # of three, the order in which they are added
    assert [rank for rank in range(SIZE) if name in heard[rank]] == ranks
    for index, answer in enumerate(heard[rank][name] for rank in ranks):
        assert answer["place"] == [index, size]
        assert torch.equal(answer["sum"], heard[ranks[0]][name]["sum"])
        torch.testing.assert_close(answer["sum"], sum(map(vector, ranks)), rtol=rounding, atol=rounding)
        assert torch.equal(answer["copied"], vector(10 + ranks[0]))
        assert answer["ranks"].tolist() == [float(sum(ranks))] * 5
        assert answer["gathered"] == [{"rank": rank, "text": "é" * (rank + 1)} for rank in ranks]
        assert answer["bytes"] == [2 * (size - 1) * n // size for n in (4 * 1001, 8 * 5)]  # there and back


def test_collectives_of_one_process():
    """What it sends, it receives; a mesh without one of the two axes makes no group."""
    for launch in (SingleProcess().launch_scatter, SingleProcess().launch_gather):
        received, sent = torch.zeros(6), torch.arange(6.0)
        launch(received, sent).wait()
        assert torch.equal(received, sent)
    mesh: Any = SimpleNamespace(mesh_dim_names=("replica",))
    with pytest.raises(ValueError, match=r"the mesh has no axis 'shard' \(it has replica\)"):
        ProcessGroup.of_mesh(mesh)


@pytest.mark.dist
@pytest.mark.parametrize(("name", "numel"), SUMS)
def test_wires_of_three_processes(heard: list[dict[str, Any]], name: str, numel: int):
    """Each wire sums to the bits that one process with three replicas has; bytes reported are bytes handed over."""
    rounds = [contributions(numel, SIZE, number) for number in range(ROUNDS)]
    if name == "float32":
        expected = [checksum(torch.stack([x.mul_(1000).round_() for x in parts]).sum(0)) for parts in rounds]
    else:
        alone = channel(name, numel, SIZE)
        expected = [checksum(simulate(alone, parts)) for parts in rounds]
    for answers in heard:
        assert answers["pieces"] == answers[f"float32 {LENGTHS[-1]}"][0]
        digits, reported, counted = answers[f"{name} {numel}"]
        assert digits == expected
        assert abs(counted - reported) <= (2 * ROUNDS if name == "float32" else 0)
        ratio = reported / answers[f"float32 {numel}"][1]
        shares = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.26}
        assert numel < 1000 or ratio == pytest.approx(shares[name], rel=0.03)


def worker(rank: int) -> dict[str, Any]:
    answers: dict[str, Any] = {"whole": talk(default_communicator(), rank)}
    group: Any = dist.new_group(SUBGROUP)
    if rank in SUBGROUP:
        answers["pair"] = talk(ProcessGroup(group), rank)
    answers |= {f"{name} {numel}": sums(rank, name, numel) for name, numel in SUMS}
    transfer_module._SUM_PIECE_BYTES = 1 << 16
    answers["pieces"] = sums(rank, "float32", LENGTHS[-1])[0]
    return answers


if __name__ == "__main__":
    bring(worker, SIZE)
