"""Run collectives in a gloo group whose members may die: after the first failure all fail, and so does the sync."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, BroadcastOptions

from twophase.diloco.communicator import Communicator, Done, Interrupted, Pending

_log = logging.getLogger("twophase")


class Collectives(Communicator):
    """Hold torchft's manager and group, and run the collectives of a `Communicator` in the present quorum."""

    elastic = True

    def __init__(self) -> None:
        self._manager: Any = None
        self._group: Any = None
        self._failure: Exception | None = None
        """Error that has ended this attempt at a sync."""
        self._works: list[_Work] = []

    @property
    def rank(self) -> int:
        """Number of this process in the present quorum."""
        return 0 if self._manager is None else (self._manager.participating_rank() or 0)

    @property
    def size(self) -> int:
        """Number of processes in it."""
        return 1 if self._manager is None else max(1, self._manager.num_participants())

    def launch_sum(self, tensor: Tensor) -> Pending:
        """All-reduce with SUM."""
        sent = 2 * (self.size - 1) * tensor.nbytes // self.size
        return self._launch(lambda group: group.allreduce([tensor], AllreduceOptions()), sent, tensor)

    def launch_scatter(self, received: Tensor, sent: Tensor) -> Pending:
        """All-to-all, between two processes or more."""
        return self._launch(
            lambda group: group.alltoall_base(received, sent, [], [], AllToAllOptions()),
            (self.size - 1) * sent.nbytes // self.size,
            received,
            sent,
        )

    def launch_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """All-gather."""
        if self.size == 1:
            received.copy_(sent)
        return self._launch(
            lambda group: group._allgather_base(received, sent, AllgatherOptions()),
            (self.size - 1) * sent.nbytes,
            received,
            sent,
        )

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast from process 0."""
        self._launch(lambda group: group.broadcast([tensor], BroadcastOptions()), 0, tensor).wait()

    def exchange_bytes(self, sent: bytes, *, in_replica: bool = False) -> list[bytes]:
        """All-gather; a replica is one process."""
        if in_replica:
            return [sent]
        received = torch.empty((self.size, len(sent)), dtype=torch.uint8)
        self.launch_gather(received.view(-1), torch.frombuffer(bytearray(sent), dtype=torch.uint8)).wait()
        return [row.numpy().tobytes() for row in received]

    def _launch(self, start: Callable[[Any], Any], bytes_sent: int, *tensors: Tensor) -> Pending:
        if self._failure is None and self.size == 1:
            return Done()
        work = _Work(self, bytes_sent, tensors)
        if self._failure is None:
            try:
                work.work = start(self._group.parent)
                self._works.append(work)
            except Exception as error:  # torch raises various types after a process died
                self._fail(error)
        return work

    def _wait(self, work: _Work) -> None:
        if self._failure is None and work in self._works:
            try:
                work.work.wait()
                self._works.remove(work)
            except Exception as error:  # the same
                self._fail(error)
        if self._failure is not None:
            raise Interrupted(str(self._failure))

    def _fail(self, error: Exception) -> None:
        """End this attempt; peers notice it because this process leaves the group."""
        self._failure = error
        self._manager.report_error(error)
        self._manager._commit_failures += 1  # also after the vote: the next quorum forms a new group
        _log.info("a sync has failed: %s", error)
        for work in self._works:  # a late one would write into buffers that the next attempt fills
            with suppress(Exception):
                work.work.wait()
        self._works = []
        self._group.abort(errored=False)


class _Work:
    """A collective under way, or one that never began because an earlier one failed."""

    def __init__(self, collectives: Collectives, bytes_sent: int, tensors: tuple[Tensor, ...]) -> None:
        self.bytes_sent = bytes_sent
        self.work: Any = None
        self._collectives = collectives
        self._tensors = tensors  # a buffer must not be freed under a collective that uses it

    def wait(self) -> None:
        self._collectives._wait(self)
