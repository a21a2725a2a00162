"""Which GPU a process of torchrun takes, and what is refused before anything starts."""

from __future__ import annotations

import pytest
import torch

from twophase.config import UsageError
from twophase.lm.config import TrainConfig
from twophase.session import take_device


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Devices that were set, on a machine that seems to have two GPUs."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    return found


def test_each_process_takes_its_own(taken: list[int]):
    """`cuda` means the GPU of the local rank."""
    take_device(TrainConfig(device="cuda"))
    assert taken == [1]


@pytest.mark.parametrize(("device", "size"), [("cpu", "3"), ("cuda", "1"), ("cuda:1", "1")])
def test_otherwise_nothing_is_touched(taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str, size: str):
    """On a CPU, or alone, the device is what the option says."""
    monkeypatch.setenv("WORLD_SIZE", size)
    take_device(TrainConfig(device=device))
    assert taken == []


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
    """Two processes on one GPU would wait for each other for ever; they are told instead."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(UsageError, match=message):
        take_device(TrainConfig(device=device))
    assert taken == []
