"""The GPU that a process of torchrun takes, and what is refused before anything starts."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from twophase.base.config import RunError, UsageError
from twophase.tasks.lm.config import TrainConfig
from twophase.training import session
from twophase.training.device import make_repeatable
from twophase.training.session import _meeting, process_group, take_device


def set_place(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """The environment of the first of two processes of torchrun."""
    place = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1} | values
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))


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
    ("device", "variable", "value", "message"),
    [
        ("cuda:0", "LOCAL_RANK", "1", "--device cuda:0 would be every process's; use --device cuda"),
        ("cuda", "LOCAL_RANK", "2", "process 2 of this machine has no GPU, there are 2; give .* --nproc-per-node 2"),
        *(
            ("cuda", "WORLD_SIZE", size, f"WORLD_SIZE is '{size}'; torchrun sets it .* or unset it")
            for size in ("abc", "0", "-1", "1.5", "")
        ),
    ],
)
def test_places_without_a_gpu(
    taken: list[int], monkeypatch: pytest.MonkeyPatch, device: str, variable: str, *, value: str, message: str
):
    """Two processes on one GPU would wait for each other for ever; a size that is no number would be a traceback."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=message):
        take_device(TrainConfig(device=device))
    assert taken == []


def test_an_environment_that_is_not_torchruns(monkeypatch: pytest.MonkeyPatch):
    """Some variables of torchrun's without the others: they are named, with what sets them."""
    set_place(monkeypatch)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("MASTER_PORT")
    with (
        pytest.raises(UsageError, match="WORLD_SIZE=2 but no RANK, MASTER_PORT; start the processes with torchrun"),
        process_group(TrainConfig()),
    ):
        pass


def test_deterministic_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """They are asked of torch where the run says so; on a CPU nothing changes."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    filled: Any = torch.utils.deterministic
    monkeypatch.setattr(filled, "fill_uninitialized_memory", True)
    for device, strictly, then in (("cuda", True, True), ("cpu", False, True), ("cuda", False, False)):
        make_repeatable(torch.device(device), strictly=strictly)
        assert torch.are_deterministic_algorithms_enabled() == then
    assert not filled.fill_uninitialized_memory


@pytest.mark.parametrize(
    ("device", "timeout", "place", "seconds"),
    [("cpu", None, None, 1800), ("cpu", 7.0, None, 7), ("cuda", None, "cuda:1", 600), ("cuda", 0.5, "cuda:1", 0.5)],
)
def test_a_group_has_timeouts_and_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, timeout: float | None, place: str | None, seconds: float
):
    """It forms within the first timeout, the second holds from then on; NCCL has the rank's GPU and reports errors."""
    set_place(monkeypatch)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "")  # so that it is put back
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    joined: dict[str, Any] = {}
    limits: list[float] = []

    class Group:
        def __init__(self, timeout: float) -> None:
            self.timeout = timeout

        def gather_json(self, value: int) -> None:
            del value
            limits.append(self.timeout)

    def join(backend: str, **options: Any) -> None:
        joined.update(options, backend=backend)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(session, "_meeting", lambda *_: "meeting")
    monkeypatch.setattr(session, "ProcessGroup", Group)
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda limit: limits.append(limit.total_seconds()))
    with process_group(TrainConfig(device=device), 3.0, timeout):
        assert joined["timeout"].total_seconds() == 3
        assert limits == [3, seconds]
    assert limits == [3, seconds, seconds]
    assert joined["device_id"] == (place and torch.device(place))
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == (place and "1")


@pytest.mark.dist
@pytest.mark.parametrize("agent", [False, True])
def test_the_first_process_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, *, agent: bool):
    """Where another never comes it says so after its patience; it serves the store, or finds torchrun's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if not agent:
        del store
    set_place(monkeypatch, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE=agent)
    with (
        pytest.raises(RunError, match=f"cannot meet at 127.0.0.1:{port} .process 1 has not come in 0.5 s"),
        process_group(TrainConfig(), patience=0.5),
    ):
        pass


@pytest.mark.dist
def test_restarted_processes_meet_one_another_only():
    """In a store that knows an earlier start, whole or broken off, all agree on a new prefix, in any order."""
    store, prefixes = dist.HashStore(), []
    starts: list[dict[int, float]] = [{0: 0, 1: 0, 2: 0}, {0: 0.3, 1: 0, 2: 0}, {1: 0, 2: 0}, {0: 0, 2: 0.1}]

    def meet(rank: int, delay: float, patience: float) -> str:
        time.sleep(delay)
        return _meeting(store, rank, 3, patience)

    for delays in [*starts, *starts[:2]]:
        patience = 5.0 if len(delays) == 3 else 0.2
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(meet, rank, delay, patience) for rank, delay in delays.items()]
        if len(delays) < 3:
            assert all("not come in 0.2 s" in str(call.exception()) for call in calls)
        else:
            (prefix,) = {call.result() for call in calls}
            prefixes.append(prefix)
    assert len(set(prefixes)) == 4
