"""Who takes part: the small object through which the engine talks to the other processes.

The engine is written once, against `Communicator`. One process (with any number of replicas in it) needs no messages;
a `torch.distributed` group sums over its processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A reduction under way."""

    bytes_sent: int
    """Bytes of payload that this process handed over."""

    def wait(self) -> None:
        """Return when the tensor holds the result."""
        ...


class Communicator(Protocol):
    """What the engine asks of its surroundings.

    Every process makes the same calls in the same order, and after each call all processes hold the same bits.
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def launch_sum(self, tensor: Tensor) -> Pending:
        """Begin to replace `tensor` by its sum over the processes, in place."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` by process 0's, in place."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The small picklable `value` of every process, in order of rank (for rare calls: it pickles)."""
        ...


@dataclass(slots=True)
class Done:
    """A reduction that needed no messages."""

    bytes_sent: int = 0

    def wait(self) -> None:
        """Nothing to wait for."""


class SingleProcess:
    """All replicas live in this process."""

    rank = 0
    size = 1

    def launch_sum(self, tensor: Tensor) -> Pending:
        """The sum over one process is the tensor itself."""
        del tensor
        return Done()

    def broadcast(self, tensor: Tensor) -> None:
        """Nothing to copy."""
        del tensor

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]


@dataclass(slots=True)
class _Work:
    work: Any
    bytes_sent: int

    def wait(self) -> None:
        self.work.wait()


class ProcessGroup:
    """The processes of a `torch.distributed` group (gloo, NCCL, …).

    Args:
        group: a process group; None means the default group, which must be initialised.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "ProcessGroup: torch.distributed is not initialised; call torch.distributed.init_process_group() "
                "first, for example in a program started by torchrun"
            )
        self.group = group

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return dist.get_world_size(self.group)

    def launch_sum(self, tensor: Tensor) -> Pending:
        """All-reduce with SUM, asynchronously."""
        work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        return _Work(work, tensor.numel() * tensor.element_size())

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast from the group's process 0."""
        dist.broadcast(tensor, group=self.group, group_src=0)

    def gather(self, value: Any) -> list[Any]:
        """All-gather of Python objects."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def default_communicator() -> Communicator:
    """The default process group where torch.distributed is initialised, otherwise a single process."""
    if torch.distributed.is_available() and dist.is_initialized():
        return ProcessGroup()
    return SingleProcess()
