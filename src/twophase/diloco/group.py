"""The ranks of a run: a `torch.distributed` group of replicas, and of the shards of each where FSDP2 shards them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the default group of this moment as default arguments, and torch's optimizers import it, too. If
# that happens after init_process_group(), destroy_process_group() leaves gloo's threads behind, of which one that frees
# a tensor as Python ends aborts the process.
import torch.distributed.nn
from torch import Tensor

from twophase.errors import RunError

TIMEOUT = 480.0
"""Seconds. At NCCL's own default, 600, its watchdog aborts the process without our message and status."""
_HEAD = 512
"""Bytes of the message that comes before others."""


class Disagreement(RunError):  # noqa: N818 - a public name
    """Ranks hold different bits that should be equal, or make unlike calls; the message names what, and the ranks."""


@contextmanager
def _explained() -> Iterator[None]:
    """Say in one line that a rank is gone, where torch speaks of sockets."""
    try:
        yield
    except RuntimeError as error:
        if "Duplicate GPU" in str(error):
            raise RunError("two ranks use one GPU; call torch.cuda.set_device(local_rank) before init") from error
        raise RunError(
            f"the connection to another rank is lost ({str(error).partition(chr(10))[0]}); see all logs, or it left "
            "without a call of the others, such as engine.finish()"
        ) from error


class SingleProcess:
    """The only process of a run: what the others would send is what it has itself."""

    rank, size, sharded = 0, 1, False
    shards: SingleProcess
    """Those of this rank's replica: this process alone, unless FSDP2 shards it."""

    def meet(self, place: str, *, wait: bool = True) -> None:
        """Compare with the other ranks the place in its loop where each is, if need be at the next call that waits.

        Unlike collectives would end the process, or never: this comes before each series of them. Where the places
        differ all ranks raise a `Disagreement`.
        """

    def fault_of_shards(self, fault: str) -> str:
        """Return the first fault of this replica's shards: those without one would wait for those that raise it."""
        return next(filter(None, self.shards.gather_json(fault)), "")

    def sum_over_shards(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of each number over this replica's shards."""
        return [sum(column) for column in zip(*self.shards.gather_json([*numbers]), strict=True)]

    def all_reduce(self, tensor: Tensor) -> Iterator[int]:
        """Return a generator that replaces `tensor` by its sum over the replicas.

        Its first `next` begins and returns the bytes that this rank sends; the second waits, and ends it.
        """
        del tensor
        return iter(())

    def bind(self, device: torch.device) -> None:
        """Send nothing from `device`."""

    def broadcast(self, tensor: Tensor) -> None:
        """Keep `tensor`, which is rank 0's."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return this process's bytes."""
        return [data]

    def gather_json(self, value: Any) -> list[Any]:
        """Return this process's value."""
        return [value]


_ALONE = SingleProcess.shards = SingleProcess()


class ProcessGroup(SingleProcess):
    """The ranks of a run: `group` holds those with the same shard of every replica, `shards` those of one replica.

    Args:
        group: a `torch.distributed` group; None is the default group, which must be initialised.
        shards: ranks that share this replica (FSDP2); None is this rank alone.
        timeout: seconds that a collective on a GPU may take, > 0; on a CPU the group's own timeout holds.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        shards: dist.ProcessGroup | None = None,
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        self.group, self.timeout, self.sharded = group, timeout, shards is not None
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if shards is not None:
            self.shards = ProcessGroup(shards, timeout=timeout)
        self._device = torch.device("cpu")
        """Where small messages lie."""
        self._announced: list[Iterator[Any]] = []

    def bind(self, device: torch.device) -> None:
        """Choose where small messages lie, for parameters on `device`; refuse a group that cannot send from there."""
        if device.type == "mps":
            raise ValueError("DiLoCo: torch.distributed sends nothing from Apple's GPU; train in a single process")
        self.shards.bind(device)
        if "cpu" in dist.get_backend_config(self.group) or dist.get_backend(self.group) == "gloo":
            return
        if device.type == "cpu":
            raise ValueError("DiLoCo: the group takes no CPU tensors; init_process_group('cpu:gloo,cuda:nccl') does")
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            raise ValueError(f"DiLoCo: parameters are on {device}; call torch.cuda.set_device(local_rank) first")
        self._device = device

    def _collective(self, begin: Callable[..., Any], *tensors: Tensor, sent: int = 0, **options: Any) -> Iterator[int]:
        """Begin a collective, yield the bytes that this rank sends, and wait for the result.

        Without a limit NCCL's `wait()` only makes the current stream wait. After the death of a rank the next read from
        the GPU would hang until the watchdog aborts the process. With one the host waits, and hears of failures, but
        looks every 10 ms, too seldom for a sync of several messages.
        """
        with _explained():
            work = begin(*tensors, group=self.group, async_op=True, **options)
        yield sent
        end = time.monotonic() + self.timeout
        with _explained():
            while not (tensors[0].is_cpu or work.is_completed() or time.monotonic() > end):
                time.sleep(1e-4)
            work.wait(*() if tensors[0].is_cpu else (timedelta(seconds=self.timeout),))

    def all_reduce(self, tensor: Tensor) -> Iterator[int]:
        """As the base class says. A ring sends 2 (size - 1) / size of the tensor."""
        return self._collective(dist.all_reduce, tensor, sent=2 * (self.size - 1) * tensor.nbytes // self.size)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Iterator[int]:
        """Send the r-th part of `sent` to rank r."""
        return self._collective(dist.all_to_all_single, received, sent, sent=(self.size - 1) * sent.nbytes // self.size)

    def all_gather(self, received: Tensor, sent: Tensor) -> Iterator[int]:
        """Gather `sent` of all ranks, one after the other, in `received`."""
        # Newer releases warn of the older name, older releases lack the newer one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._collective(gather, received, sent, sent=(self.size - 1) * sent.nbytes)

    def broadcast(self, tensor: Tensor) -> None:
        """Take `tensor` from rank 0."""
        list(self._collective(dist.broadcast, tensor, group_src=0))

    def meet(self, place: str, *, wait: bool = True) -> None:
        """As the base class says."""
        self._announced.append(self._gather(_head(place)))
        next(self._announced[-1])
        if wait:  # a rank that has found a difference announces nothing more
            fault = next(filter(None, (_difference(next(heads)) for heads in self._announced)), "")
            self._announced = []
            if fault := self.fault_of_shards(fault):
                raise Disagreement(f"DiLoCo: {fault}")

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, as many on each."""
        _, rows = self._gather(data)
        return rows

    def _gather(self, data: bytes) -> Iterator[Any]:
        """As a collective, which in the end yields the bytes of every rank."""
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        received = torch.empty(self.size * len(data), dtype=torch.uint8, device=self._device)
        yield from self.all_gather(received, sent)
        yield [row.numpy().tobytes() for row in received.cpu().view(self.size, len(data))]

    def gather_json(self, value: Any) -> list[Any]:
        """Return a JSON value of every rank."""
        text = json.dumps(value).encode()
        heads = self.gather_bytes(_head("a comparison of values", len(text)))
        if fault := _difference(heads):
            raise Disagreement(f"DiLoCo: {fault}")
        longest = max(int(head[:12]) for head in heads)
        return [json.loads(row) for row in self.gather_bytes(text.ljust(longest))]


def _head(place: str, length: int = 0) -> bytes:
    """Return the first message of a series of collectives, and the length of the one that follows."""
    return b"%12d" % length + place.encode("ascii", "backslashreplace")[: _HEAD - 12].ljust(_HEAD - 12)


def _difference(heads: Sequence[bytes]) -> str:
    """Return in words the first difference between the places of ranks."""
    first, *places = (head[12:].decode().rstrip() for head in heads)
    for rank, place in enumerate(places, start=1):
        if place != first:
            return (
                f"ranks make unlike calls: {first} on rank 0, {place} on rank {rank}; all call step() and finish() "
                "equally often, with signals of the same names (a rank without data calls step(weight=0))"
            )
    return ""


def default_group() -> SingleProcess:
    """Return torch's default group where one is initialised, else this process alone."""
    return ProcessGroup() if dist.is_available() and dist.is_initialized() else _ALONE


def unjoined(group: SingleProcess) -> list[str]:
    """Return a sentence where processes were started together, and this one trains alone."""
    size = os.environ.get("WORLD_SIZE", "")
    if group is not _ALONE or size in ("", "1") or os.environ.get("RANK", "0") != "0":
        return []
    alone = f"WORLD_SIZE is {size} without a process group, and this process trains alone"
    return [f"{alone}; call torch.distributed.init_process_group() first, or pass group=SingleProcess()"]
