"""The GPU that a process of torchrun takes, and what is refused before anything starts."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from twophase.base.config import RunError, UsageError
from twophase.tasks.lm.config import TrainConfig
from twophase.training import session
from twophase.training.session import process_group, take_device


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Devices that were set, on a machine that seems to have two GPUs."""
    numbers: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", numbers.append)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    return numbers


@pytest.mark.parametrize(
    ("device", "size", "numbers"), [("cuda", "3", [1]), ("cpu", "3", []), ("cuda", "1", []), ("cuda:1", "1", [])]
)
def test_each_process_takes_its_own_gpu(
    taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str, size: str, numbers: list[int]
):
    """`cuda` means the GPU of the local rank; on a CPU, or alone, the device is what the option says."""
    monkeypatch.setenv("WORLD_SIZE", size)
    take_device(TrainConfig(device=device))
    assert taken == numbers


@pytest.mark.parametrize(
    ("device", "rank", "message"),
    [
        ("cuda:0", "1", "--device cuda:0 would be every process's; use --device cuda"),
        ("cuda", "2", "process 2 of this machine has no GPU, there are 2; give torchrun --nproc-per-node 2"),
    ],
)
def test_processes_without_a_gpu_of_their_own(
    taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str, rank: str, message: str
):
    """Two processes on one GPU would wait for each other for ever; they are refused instead."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(UsageError, match=message):
        take_device(TrainConfig(device=device))
    assert taken == []


@pytest.mark.parametrize("size", ["abc", "0", "-1", "1.5", ""])
def test_world_sizes_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch, size: str):
    """The variable is named with its value, where it would have been a traceback."""
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UsageError, match=f"WORLD_SIZE is '{size}'; torchrun sets it .* or unset it"):
        take_device(TrainConfig(device="cuda"))


def test_an_environment_that_is_not_torchruns(monkeypatch: pytest.MonkeyPatch):
    """Some variables of torchrun's without the others: they are named, with what sets them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with (
        pytest.raises(UsageError, match="WORLD_SIZE=2 but no RANK, MASTER_PORT; start the processes with torchrun"),
        process_group(TrainConfig()),
    ):
        pass


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The group's arguments, in a process of torchrun whose current device is its second GPU."""
    for name, value in {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "")  # so that it is put back
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(session, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 2)]))
    arguments: dict[str, Any] = {}

    def join(backend: str, **options: Any) -> None:
        arguments.update(options, backend=backend)
        raise RuntimeError("enough")

    monkeypatch.setattr(dist, "init_process_group", join)
    return arguments


@pytest.mark.parametrize(
    ("device", "timeout", "place", "seconds"),
    [("cpu", None, None, 1800), ("cpu", 7.0, None, 7), ("cuda", None, "cuda:1", 600), ("cuda", 0.5, "cuda:1", 0.5)],
)
def test_a_group_has_a_timeout_and_its_own_gpu(
    joined: dict[str, Any], device: str, timeout: float | None, place: str | None, seconds: float
):
    """Collectives end in finite time; NCCL is bound to the rank's GPU and reports errors instead of aborting."""
    with pytest.raises(RunError, match="enough"), process_group(TrainConfig(device=device), timeout=timeout):
        pass
    assert joined["timeout"].total_seconds() == seconds
    assert joined["device_id"] == (place and torch.device(place))
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == (place and "1")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_timeouts(joined: dict[str, Any], seconds: float):
    """It is refused before the processes meet."""
    with pytest.raises(UsageError, match="--sync-timeout is"), process_group(TrainConfig(), timeout=seconds):
        pass
    assert not joined


@pytest.mark.dist
def test_the_first_process_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    """Where the others never come it says so after its patience, and not after torch's half an hour."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    with (
        pytest.raises(RunError, match=f"the processes cannot meet at 127.0.0.1:{port} .*1/2 clients"),
        process_group(TrainConfig(), patience=1.0),
    ):
        pass
