"""The interface through which the engine talks to other processes, and the single process that needs no messages.

The engine is written once, against `Communicator`. `comm.ProcessGroup` sums over a `torch.distributed` group.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from twophase.base.errors import RunError, UsageError, message_of

if torch.distributed.is_available():
    # Its functions have the default group of this moment as default arguments, and torch's optimizers import it too. If
    # that happens after init_process_group(), destroy_process_group() leaves gloo's threads behind. One of them that
    # frees a tensor as Python ends aborts the process.
    import torch.distributed.nn

_LONGEST = 1 << 24
"""Bytes of one process's JSON at most: a peer must not make this process reserve any amount of memory."""


_MISTAKE = 2.0
"""Code by which a process reports a `UsageError` to its peers; 1 means any other failure."""


class Pending(Protocol):
    """Wait for a collective under way."""

    bytes_sent: int
    """Bytes that this process sends to others for it."""

    def wait(self) -> None:
        """Wait until the result is there."""
        ...


@dataclass(slots=True)
class Done:
    """A collective that needed no messages."""

    bytes_sent: int = 0

    def wait(self) -> None:
        """Return at once."""


class Communicator(Protocol):
    """Connect the processes of a run.

    Every process makes the same calls in the same order, and after each call all processes hold the same bits. Methods
    that a backend does not override behave as in a single process.
    """

    sharded: bool = False
    """True if several processes share one replica."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    @property
    def alone(self) -> bool:
        """True if all replicas always live in this process, so that there is nothing to compare."""
        return self.size == 1

    def bind(self, device: torch.device) -> None:
        """Check that this process can take part with parameters on a device."""

    def launch_sum(self, tensor: Tensor) -> Pending:
        """Begin to replace `tensor` by its sum over the processes, in place."""
        del tensor
        return Done()

    def launch_scatter(self, received: Tensor, sent: Tensor) -> Pending:
        """Begin an all-to-all: the r-th of `size` equal parts of `sent` goes to process r, in the order of the ranks.

        Args:
            received: tensor, 1-D, as long as `sent`; its r-th part comes from process r.
            sent: tensor, 1-D, contiguous, its length a multiple of `size`.
        """
        received.copy_(sent)
        return Done()

    def launch_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """Begin an all-gather: `received`, `size` times as long, holds every process's `sent` in order of rank."""
        received.copy_(sent)
        return Done()

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` by process 0's, in place."""

    def exchange_bytes(self, sent: bytes, *, in_replica: bool = False) -> list[bytes]:
        """Return the bytes of every process, in order of rank.

        Args:
            sent: message, of the same length >= 1 on every process.
            in_replica: True exchanges between the processes that share one replica's shards.
        """
        del in_replica
        return [sent]

    def gather(self, value: Any, kind: Any) -> list[Any]:
        """Return a JSON value of every process, in order of rank. Pickles of a peer could run code here.

        Args:
            value: JSON value of this process.
            kind: type, or union of types, of every process's value.

        Raises:
            RunError: a process has sent no JSON of that kind.
        """
        text = json.dumps(value).encode()
        lengths = [row[0] for row in self.exchange([len(text)])]
        for number, length in enumerate(lengths):
            if not 1 <= length <= _LONGEST:
                raise _foreign(number, f"a message of {length:g} bytes, where 1 to {_LONGEST} are allowed")
        rows = self.exchange_bytes(text.ljust(int(max(lengths))))
        return [_parsed(row, kind, number) for number, row in enumerate(rows)]

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, in order of rank: a few bytes, for every round.

        Args:
            numbers: floats, or whole numbers below 2^53, equally many on every process. A NaN keeps its bits.
        """
        return _unpacked(self.exchange_bytes(_packed(numbers)))

    def exchange_in_replica(self, numbers: Sequence[float]) -> list[list[float]]:
        """Exchange between the processes that share one replica's shards; without shards, return this process's."""
        return _unpacked(self.exchange_bytes(_packed(numbers), in_replica=True))


class SingleProcess(Communicator):
    """Stand for the only process of a run: every exchange has this process's values alone."""

    rank: int = 0  # type: ignore[override] - it never changes
    size: int = 1  # type: ignore[override]


@contextmanager
def in_agreement(communicator: Communicator) -> Iterator[None]:
    """Raise the error of the first process in which the block fails, in all processes.

    Otherwise its peers would wait for that process, and learn only that it died. All processes enter; the block itself
    exchanges nothing.

    Raises:
        UsageError: another process has raised it.
        RunError: another process has raised another error.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # of any type: no peer may wait for this process
        failure = error
    code = 0.0 if failure is None else _MISTAKE if isinstance(failure, UsageError) else 1.0
    codes = [row[0] for row in communicator.exchange([code])]
    if not any(codes):
        return
    texts = communicator.gather("" if failure is None else message_of(failure), str)
    first = next(rank for rank, of_rank in enumerate(codes) if of_rank)
    if failure is not None and first == communicator.rank:
        raise failure
    raise (UsageError if codes[first] == _MISTAKE else RunError)(texts[first]) from failure


def _packed(numbers: Sequence[float]) -> bytes:
    return struct.pack(f"={len(numbers)}d", *numbers)


def _unpacked(rows: Sequence[bytes]) -> list[list[float]]:
    return [list(struct.unpack(f"={len(row) // 8}d", row)) for row in rows]


def _parsed(text: bytes, kind: Any, process: int) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _foreign(process, f"no JSON ({type(error).__name__})") from None
    if not isinstance(value, kind):
        raise _foreign(process, f"a value of type {type(value).__name__}")
    return value


def _foreign(process: int, content: str) -> RunError:
    return RunError(
        f"process {process} sent {content}; start all processes with the same program and options, and let no other "
        "program reach the ports of the group"
    )
