"""The device and the ranks of a run: torchrun's processes, signals, batches to the device."""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

import twophase
from twophase.diloco.group import ProcessGroup, SingleProcess
from twophase.errors import RunError, UsageError


def device_of(name: str) -> torch.device:
    """Return the device of this rank, or raise a UsageError; under torchrun `cuda` is the GPU of its local rank."""
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
        if device.type == "cuda":
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: cannot be used here ({str(error).splitlines()[0]})") from None
    return device


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch (nested tuples, lists, dictionaries) with every array and tensor on the device."""
    leaves, structure = tree_flatten(batch)
    tensors = [torch.as_tensor(leaf) for leaf in leaves]
    if device.type == "cuda":  # pinned, its copy does not wait for the device
        tensors = [tensor if tensor.is_cuda else tensor.pin_memory() for tensor in tensors]
    return tree_unflatten([tensor.to(device, non_blocking=True) for tensor in tensors], structure)


@contextmanager
def process_group(device: torch.device, timeout: float | None = None) -> Iterator[SingleProcess]:
    """Join the ranks that torchrun has started, by NCCL for GPUs and gloo else; without it this process is alone.

    `timeout` is the seconds for the start and for each collective, by default ten minutes on GPUs, else half an hour.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SingleProcess()
        return
    on_gpu = device.type == "cuda"
    seconds = timeout or (600.0 if on_gpu else 1800.0)
    backend, device_id = ("cpu:gloo,cuda:nccl", device) if on_gpu else ("gloo", None)
    if on_gpu:  # else NCCL's watchdog may notice a dead rank first, and abort without a message
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds), device_id=device_id)
    except (RuntimeError, ValueError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise RunError(
            f"the ranks cannot meet ({reason}); start them with torchrun, at an address all reach"
        ) from error
    try:
        group = ProcessGroup(timeout=seconds)
        yield group
        group.gather_json(0)  # leave together: a rank that ends first closes its connections
    except BaseException:
        if on_gpu:  # destroying the group would wait for a collective that a dead rank never ends
            with suppress(Exception):
                cast("dist.ProcessGroup", dist.group.WORLD).abort()
        raise
    finally:
        dist.destroy_process_group()


@contextmanager
def raised_on_all_ranks(group: SingleProcess) -> Iterator[None]:
    """Raise the first failing rank's error on all ranks, which would wait for it otherwise.

    All ranks enter; the block itself must not communicate.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # of any type: no rank may wait for this one
        failure = error
    rows = group.gather_json([isinstance(failure, UsageError), str(failure)] if failure else [])
    for rank, row in enumerate(rows):
        if row and failure is not None and rank == group.rank:
            raise failure
        if row:
            raise (UsageError if row[0] else RunError)(row[1]) from failure


class Stop(threading.Event):
    """Set by the first SIGINT or SIGTERM, whose number is `number`."""

    number = 0


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Let the first SIGINT or SIGTERM ask for a checkpoint and a clean end; a second one acts at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # where signals cannot be handled
        yield stop
        return

    def ask(number: int, _frame: object) -> None:
        stop.number = number
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and machine, for `env.json`."""
    return {
        "twophase": twophase.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "command": sys.argv,
    }


def peak_bytes(device: torch.device) -> int:
    """Return the largest memory so far: allocated on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # noqa: PLC0415 - Windows lacks it

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
