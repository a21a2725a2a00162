"""The small object through which the engine talks to other processes, and the single process that needs no messages.

The engine is written once, against `Communicator`. `comm.ProcessGroup` sums over a `torch.distributed` group;
`twophase.elastic.torchft` is a group with members that come and go.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from twophase.base.errors import RunError, UsageError, message_of

if torch.distributed.is_available():
    # Its functions have the default group of this moment as default arguments. Torch's optimizers import it as well;
    # where that comes after init_process_group(), destroy_process_group() leaves gloo's threads behind, and one that
    # frees a tensor as Python ends aborts the process.
    import torch.distributed.nn

_LONGEST = 1 << 24
"""Bytes of one process's JSON at most: a peer must not make this process reserve any amount of memory."""


_MISTAKE = 2.0
"""What a process says of a `UsageError` to the others; 1 means any other failure."""


class Interrupted(Exception):  # noqa: N818 - no fault: a process has gone, and the others go on
    """A collective of an elastic communicator failed; the sync is tried again with the processes that are left."""


class Pending(Protocol):
    """A collective under way."""

    bytes_sent: int
    """Bytes that this process sends to others for it."""

    def wait(self) -> None:
        """Return when the result is there."""
        ...


@dataclass(slots=True)
class Done:
    """A collective that needed no messages."""

    bytes_sent: int = 0

    def wait(self) -> None:
        """Nothing to wait for."""


class Communicator(Protocol):
    """What the engine asks of its surroundings.

    Every process makes the same calls in the same order, and after each call all processes hold the same bits. What a
    backend does not override answers as a single process does.
    """

    elastic: bool = False
    """Whether processes may come and go. Then a sync lies between `begin` and a `commit` that may fail, collectives may
    raise `Interrupted`, and `rank` and `size` change with `begin`."""

    sharded: bool = False
    """Whether several processes share one replica."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    @property
    def alone(self) -> bool:
        """Whether all replicas live in this process for good, so that there is nothing to compare."""
        return self.size == 1 and not self.elastic

    def bind(self, device: torch.device) -> None:
        """Check that this process can take part with parameters on a device."""

    def launch_sum(self, tensor: Tensor) -> Pending:
        """Begin to replace `tensor` by its sum over the processes, in place."""
        del tensor
        return Done()

    def launch_scatter(self, received: Tensor, sent: Tensor) -> Pending:
        """Begin an all-to-all: the r-th of `size` equal parts of `sent` goes to process r, in the order of the ranks.

        Args:
            received: 1-D, as long as `sent`; its r-th part comes from process r.
            sent: 1-D, contiguous, its length a multiple of `size`.
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
            sent: as many on every process, and not none.
            in_replica: exchange them between the processes that share one replica's shards.
        """
        del in_replica
        return [sent]

    def gather(self, value: Any, kind: Any) -> list[Any]:
        """Return a JSON value of every process, in order of rank. Pickles of a peer could run code here.

        Args:
            value: this process's.
            kind: type, or union of types, of every process's.

        Raises:
            RunError: a process has sent no JSON of that kind.
        """
        text = json.dumps(value).encode()
        lengths = [row[0] for row in self.exchange([len(text)])]
        for number, length in enumerate(lengths):
            if not 1 <= length <= _LONGEST:
                raise _stranger(number, f"a message of {length:g} bytes, where 1 to {_LONGEST} are allowed")
        rows = self.exchange_bytes(text.ljust(int(max(lengths))))
        return [_parsed(row, kind, number) for number, row in enumerate(rows)]

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, in order of rank: a few bytes, for every round.

        Args:
            numbers: as many on every process; floats, or whole numbers below 2^53. A NaN keeps its bits.
        """
        return _unpacked(self.exchange_bytes(_packed(numbers)))

    def exchange_in_replica(self, numbers: Sequence[float]) -> list[list[float]]:
        """Do the same between the processes that share one replica's shards; this process's alone where none does."""
        return _unpacked(self.exchange_bytes(_packed(numbers), in_replica=True))

    # ------------------------------------------------------------------------- of processes that come and go

    replica: int = 0
    """This replica's number, whichever others are there."""

    allowance: float = math.inf
    """Replicas that may go on without most of those of the last sync; inf: none may."""

    def begin(self) -> bool:
        """Begin a sync with the processes that take part in it.

        Returns:
            Whether this process came late and has just been given another's state.
        """
        return False

    def commit(self) -> bool:
        """Return whether every collective since `begin` has succeeded, so that the sync counts."""
        return True

    def attach(self, engine: Any, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Define what a replica that comes late receives: the engine's state and the rest (models, optimizers, …).

        Args:
            engine: the `DiLoCo`.
            save: returns the rest, as a tree of tensors, numbers and text.
            load: takes it.
        """

    def enter(self, syncs: int, *, run: int = 0) -> None:
        """Announce, before `begin`, how far this process's state is; one that is behind another is given the other's.

        Args:
            syncs: that it has behind it, plus 1; 0 asks for any state that there is.
            run: identity of the run that is under way, if one is; a late joiner then is behind, however many syncs it
                has, and so is a replica of a run that began earlier.
        """

    def enough(self, count: int, needed: int | None = None) -> bool:
        """Return whether a run may begin, or go on, with this many replicas; wait a moment if not.

        Args:
            count: replicas that are there; of the last sync's, in a run under way.
            needed: how many a run under way needs; None where it has not begun.

        Raises:
            RuntimeError: they have not come in time.
        """
        return count >= (needed or 1)


class SingleProcess(Communicator):
    """All replicas live in this process: every exchange has this process's values alone."""

    rank: int = 0  # type: ignore[override] - it never changes
    size: int = 1  # type: ignore[override]


@contextmanager
def in_agreement(communicator: Communicator) -> Iterator[None]:
    """Raise in all processes what the block has raised in the first of those in which it fails.

    Else the others would wait for that process, and learn only that it is gone. All processes enter; the block itself
    exchanges nothing.

    Raises:
        UsageError: another process has raised it.
        RunError: another process has raised anything else.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the others must not wait for this process
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
        raise _stranger(process, f"no JSON ({type(error).__name__})") from None
    if not isinstance(value, kind):
        raise _stranger(process, f"a value of type {type(value).__name__}")
    return value


def _stranger(process: int, what: str) -> RunError:
    return RunError(
        f"process {process} sent {what}; start all processes with the same program and options, and let no other "
        "program reach the ports of the group"
    )
