"""`ProcessGroup`: the communicator of a `torch.distributed` group."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from twophase.base.errors import RunError, first_line
from twophase.diloco.communicator import Communicator, Pending, SingleProcess

TIMEOUT = 480.0
"""Seconds. NCCL's own default is 600, at which its watchdog aborts the process, without our message and status."""
_POLL = 1e-4


@contextmanager
def _explained() -> Iterator[None]:
    """Explain in one message that the connection is lost; torch's own is about sockets."""
    try:
        yield
    except RuntimeError as error:
        if "Duplicate GPU" in str(error):
            raise RunError(
                "two ranks of this machine have their parameters on one GPU; call torch.cuda.set_device(local_rank) "
                "before the model is made, with the LOCAL_RANK that torchrun sets"
            ) from error
        raise RunError(
            f"the connection to the other processes is lost ({first_line(error)}); see their logs: one may "
            "have ended or been cut off. Checkpoints are intact: repeat the command to resume"
        ) from error


def _finish(work: Any, device: torch.device, timeout: float) -> None:
    """Wait for a collective, and raise its error.

    NCCL's `wait()` returns at once, because it only makes the current stream wait. After a peer's death the next read
    from the GPU hangs until the watchdog aborts the process. So the host polls the work itself: one synchronization a
    round, where the engine waits for its sums. `wait(timeout)` would block, too, but in sleeps of a millisecond. Its
    time also begins at the launch, long before a delayed sync's end.
    """
    if device.type == "cpu":
        work.wait()
        return
    end = time.monotonic() + timeout
    while not work.is_completed():  # also when it has failed
        if time.monotonic() > end:
            # With a time limit it raises and aborts the communicator, which removes the hanging kernel from the GPU.
            work.wait(timedelta(milliseconds=1))
            raise RuntimeError(f"no answer for {timeout:g} s")
        time.sleep(_POLL)
    work.wait(timedelta(seconds=math.ceil(timeout)))  # the stream's part, and the error if there is one


@dataclass(slots=True)
class _Works:
    work: Any
    bytes_sent: int
    timeout: float
    tensors: tuple[Tensor, ...]  # a buffer must not be freed under a collective that uses it

    def wait(self) -> None:
        if self.tensors:
            with _explained():
                _finish(self.work, self.tensors[0].device, self.timeout)
        self.tensors = ()


class ProcessGroup(Communicator):
    """Communicate in a `torch.distributed` group (gloo, NCCL, …).

    Several processes may share a replica (FSDP2's shards). Then `group` holds the processes with the same shard of
    every replica, and `shards` those with the shards of one replica. `of_mesh` takes both from a mesh.

    Args:
        group: process group; None means the default group, which must be initialised.
        shards: processes that share this replica; None means this process alone.
        timeout: seconds for a collective on a GPU, > 0; on a CPU the group's own timeout holds.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: a timeout outside its range.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        shards: dist.ProcessGroup | None = None,
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        if not 0 < timeout < math.inf:
            raise ValueError(
                f"ProcessGroup: timeout is {timeout}; it must be a positive number of seconds, such as {TIMEOUT:g}"
            )
        if not dist.is_initialized():
            raise RuntimeError(
                "ProcessGroup: torch.distributed is not initialised; call torch.distributed.init_process_group() "
                "first, for example in a program started by torchrun"
            )
        self.group = group
        self.shards = shards
        self.sharded = shards is not None
        self.timeout = timeout
        self._device = torch.device("cuda")
        """Device of small messages in a group that takes no tensors of a CPU."""

    def bind(self, device: torch.device) -> None:
        """Check that this rank can take part with parameters on a device; small messages then use it as well.

        Raises:
            ValueError: the group takes no tensors of a CPU, where the parameters are, or the device is not the current
                one. The ranks' small messages would then meet on one GPU and hang.
        """
        if _takes_cpu(self.group) and (self.shards is None or _takes_cpu(self.shards)):
            return
        if device.type == "cpu":
            raise ValueError(
                f"DiLoCo: the parameters are on the CPU, and the process group ({dist.get_backend_config(self.group)}) "
                'takes tensors of a GPU only; move the module there, or call init_process_group("cpu:gloo,cuda:nccl")'
            )
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            raise ValueError(
                f"DiLoCo: the parameters are on {device}, and this process's current device is "
                f"cuda:{torch.cuda.current_device()}. Call torch.cuda.set_device(local_rank) before the engine is "
                "made, with the LOCAL_RANK that torchrun sets"
            )
        self._device = device

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, replica: str = "replica", shard: str = "shard") -> ProcessGroup:
        """Take the groups of a mesh with an axis of replicas and an axis of shards.

        Args:
            mesh: device mesh, such as `init_device_mesh("cuda", (4, 2), mesh_dim_names=("replica", "shard"))` with 4
                replicas of 2 shards; then `fully_shard(module, mesh=mesh["shard"])`.
            replica: name of the axis along which DiLoCo synchronises.
            shard: name of the axis along which a replica is sharded.

        Raises:
            ValueError: an axis that the mesh lacks.
        """
        names = mesh.mesh_dim_names or ()
        for name in (replica, shard):
            if name not in names:
                raise ValueError(
                    f"ProcessGroup.of_mesh: the mesh has no axis {name!r} (it has {', '.join(names) or 'no names'}); "
                    'make it with init_device_mesh(device, shape, mesh_dim_names=("replica", "shard"))'
                )
        return cls(mesh.get_group(replica), mesh.get_group(shard))

    @property
    def rank(self) -> int:
        """Number of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return dist.get_world_size(self.group)

    def launch_sum(self, tensor: Tensor) -> Pending:
        """All-reduce with SUM, asynchronously.

        A ring forwards each of its `size` parts 2 (size - 1) times, the least of any algorithm.
        """
        with _explained():
            work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        return _Works(work, 2 * (self.size - 1) * tensor.nbytes // self.size, self.timeout, (tensor,))

    def launch_scatter(self, received: Tensor, sent: Tensor) -> Pending:
        """All-to-all, asynchronously."""
        with _explained():
            work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        return _Works(work, (self.size - 1) * sent.nbytes // self.size, self.timeout, (received, sent))

    def launch_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """All-gather, asynchronously."""
        with _explained():
            work = _all_gather(received, sent, self.group)
        return _Works(work, (self.size - 1) * sent.nbytes, self.timeout, (received, sent))

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast from the group's process 0."""
        with _explained():
            _finish(dist.broadcast(tensor, group=self.group, group_src=0, async_op=True), tensor.device, self.timeout)

    def exchange_bytes(self, sent: bytes, *, in_replica: bool = False) -> list[bytes]:
        """All-gather over the group, or over the shards."""
        if in_replica and self.shards is None:
            return [sent]
        group = self.shards if in_replica else self.group
        device = torch.device("cpu") if _takes_cpu(group) else self._device
        message = torch.frombuffer(bytearray(sent), dtype=torch.uint8).to(device)
        received = torch.empty((dist.get_world_size(group), len(sent)), dtype=torch.uint8, device=device)
        with _explained():
            _finish(_all_gather(received.view(-1), message, group), device, self.timeout)
        return [row.numpy().tobytes() for row in received.cpu()]


def _takes_cpu(group: dist.ProcessGroup | None) -> bool:
    return "cpu" in dist.get_backend_config(group) or dist.get_backend(group) == "gloo"


def _all_gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup | None) -> Any:
    # Newer releases warn about the older name, older releases lack the newer one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(received, sent, group=group, async_op=True)


def default_communicator() -> Communicator:
    """Return the default process group where torch.distributed is initialised, otherwise a single process."""
    if torch.distributed.is_available() and dist.is_initialized():
        return ProcessGroup()
    return SingleProcess()
