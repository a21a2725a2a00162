"""The device of a run: check it, move batches to it, and explain an error when its memory is full."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import deterministic

import twophase
from twophase.base.errors import FULL, RunError, UsageError, first_line, is_out_of_memory


def usable_device(name: str) -> torch.device:
    """Return a torch device after a first tensor on it.

    Raises:
        UsageError: this machine or this torch has no such device.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name} cannot be used here ({first_line(error)}); use --device cpu") from None
    return device


def prepare_repeatable() -> None:
    """Set the variable that torch reads once, at a process's first matrix product on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def make_repeatable(device: torch.device, *, strictly: bool) -> None:
    """Let torch use any kernel on a GPU, or strictly those that give the same bits every time."""
    if device.type == "cuda":
        prepare_repeatable()
        torch.use_deterministic_algorithms(strictly)
        # Filled memory helps to find faults, and costs time.
        deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with every array and tensor on the device, without waiting for the copies."""

    def move(leaf: Any) -> Tensor:
        tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
        if device.type == "cuda" and tensor.device.type == "cpu":  # pinned, its copy does not wait for the device
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return _mapped(move, batch)


def _mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _mapped(function, part) for key, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        make = getattr(batch, "_make", type(batch))  # a named tuple's
        return make([_mapped(function, part) for part in batch])
    return function(batch)


def check_memory(parts: str, needed: int, device: torch.device, remedy: str) -> None:
    """Refuse a run that cannot fit into a device's memory, or this process's part of the machine's.

    Raises:
        UsageError: with the estimate and the remedy.
    """
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else machine_bytes()
    if needed > total:
        raise UsageError(
            f"--device {device}: {parts} need at least {needed / 1e9:,.1f} GB, and its memory has {total / 1e9:,.1f}; "
            f"{remedy}"
        )


def machine_bytes() -> int:
    """Return this machine's memory, free or not, or the smaller limit of this process or its container."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), resource.getrlimit(resource.RLIMIT_AS)[0]]
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limit for limit in limits if limit > 0)  # no limit is -1


@contextmanager
def room_for(parts: str, device: torch.device | str) -> Iterator[None]:
    """Explain an out-of-memory error of the block: the object, the device and the remedy.

    Raises:
        RunError: in place of the device's exception.
    """
    try:
        yield
    except FULL as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(
            f"--device {device}: out of memory for {parts} ({first_line(error)}); use a device with more memory, "
            "a smaller model, or more processes with fewer replicas each. What the run has saved is intact"
        ) from error


def device_name(device: torch.device) -> str:
    """Return the GPU's product name, or the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and machine, for `env.json`."""
    return {
        "twophase": twophase.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "device": device_name(device),
        "command": sys.argv,
    }


def peak_bytes(device: torch.device) -> int:
    """Return the largest memory so far: allocated on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
