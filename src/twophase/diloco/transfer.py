"""Sum pseudo-gradients over processes, each fragment through its channel: exact, or lossy (`wire`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twophase.diloco.communicator import Communicator, Pending

_SUM_PIECE_BYTES = 64 << 20
_PART_BYTES = 32 << 20
"""Bytes of a part in a `PartTransfer`: with fewer the first part arrives sooner, with more there are fewer messages."""


class Transfer:
    """Track a sum under way; `wait()` returns when the tensor holds it.

    All processes call `advance()`, where they call it, at the same place among their collectives.

    Args:
        pending: collectives of the first stage.
        second: function that launches the second stage, if there are two.
        finish: function called once when all stages are over.
    """

    def __init__(
        self,
        pending: Sequence[Pending] = (),
        second: Callable[[], Pending] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._pending = list(pending)
        self._second, self._finish = second, finish
        self.bytes_sent = sum(work.bytes_sent for work in self._pending)
        """Bytes that this process has handed to others so far; all of them after `wait()`."""

    def advance(self) -> None:
        """Wait for the first of two stages and launch the second; do nothing with one stage, or when done."""
        if self._second is not None:
            second, self._second = self._second, None
            self._drain()
            self._pending = [second()]
            self.bytes_sent += self._pending[0].bytes_sent

    def wait(self) -> None:
        """Wait until the tensor holds the sum."""
        self.advance()
        self._drain()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def _drain(self) -> None:
        for work in self._pending:
            work.wait()
        self._pending = []


class PartTransfer(Transfer):
    """Sum a tensor part by part, each filled, sent, and returned when its sum has arrived.

    Nothing is sent before `parts()` is iterated. Then each part travels while later ones are filled and earlier ones
    used.

    Args:
        communicator: processes of the run.
        tensor: vector, 1-D, contiguous; each part of it becomes the sum over the processes.
        fill: function that writes elements `start` to `stop` of the tensor.
    """

    def __init__(self, communicator: Communicator, tensor: Tensor, fill: Callable[[int, int], None]) -> None:
        super().__init__()
        self._communicator, self._tensor, self._fill = communicator, tensor, fill
        self.seconds = {"pseudo_gradient": 0.0, "reduce": 0.0}
        """Seconds of filling, and of launching and waiting."""

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each part, in order, as soon as the tensor holds its sum."""
        numel = self._tensor.numel()
        size = _PART_BYTES // self._tensor.element_size()
        bounds = [(start, min(start + size, numel)) for start in range(0, numel, size)]
        for part, pending in [(part, self._launch(*part)) for part in bounds]:
            clock = time.perf_counter()
            pending.wait()
            self.seconds["reduce"] += time.perf_counter() - clock
            yield part

    def _launch(self, start: int, stop: int) -> Pending:
        clock = time.perf_counter()
        self._fill(start, stop)
        filled = time.perf_counter()
        pending = self._communicator.launch_sum(self._tensor[start:stop])
        self.bytes_sent += pending.bytes_sent
        self.seconds["pseudo_gradient"] += filled - clock
        self.seconds["reduce"] += time.perf_counter() - filled
        return pending


class Channel:
    """Sum a fragment's pseudo-gradient over the processes; the same on every process.

    This channel is exact: a sum is an all-reduce in the tensor's own type, and it has no state. `wire.LossyChannel`
    has error-feedback residuals on int8, which the methods below `launch` save, restore and clear.

    Args:
        name: name of the wire, checked (`formats.check_wire`).
        numel: elements of the fragment, >= 1.
        dtype: type of the tensors that are summed, float32 or float64.
        device: device of the tensors.
    """

    lossy = False
    """True if the wire loses digits."""

    def __init__(self, name: str, numel: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
        assert numel >= 1, "an empty fragment has nothing to sum"
        assert dtype in (torch.float32, torch.float64), "a pseudo-gradient is float32 or float64"
        self._numel, self._dtype, self._device = numel, dtype, device

    def quantize(self, tensor: Tensor, sender: int) -> None:
        """Replace a replica's contribution by the values that its peers would receive.

        With several replicas in one process each is a separate sender. So a run has the same bits in one process as
        with a process for each replica.

        Args:
            tensor: vector, 1-D, contiguous, of the channel's length, dtype and device; changed in place.
            sender: number of a replica of this process, from 0.
        """
        del tensor, sender

    def launch(self, communicator: Communicator, tensor: Tensor, *, quantized: bool = False) -> Transfer:
        """Begin to replace `tensor` by its sum over the processes, in place, with the same bits on all of them.

        Until `Transfer.wait()` has returned, the tensor's values are undefined and the channel takes no other.

        Args:
            communicator: processes of the run.
            tensor: vector, 1-D, contiguous, of the channel's length, dtype and device.
            quantized: True if the tensor is a sum of contributions from `quantize`, in one process.
        """
        del quantized
        # In pieces of about 64 MiB: a large sum is faster in pieces than whole, a small one is not.
        count = max(1, round(tensor.nbytes / _SUM_PIECE_BYTES))
        return Transfer([communicator.launch_sum(piece) for piece in tensor.split(-(-tensor.numel() // count))])

    def state_dict(self) -> dict[str, Any]:
        """Return the error-feedback residuals, live: of each sender, and, after a sum, of the part that is owned here.

        Empty without error feedback.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of `state_dict()`; cancel a transfer under way.

        A residual of the second stage is used while this process owns its part. With another number of processes the
        next sum discards it.

        Raises:
            ValueError: the state of another wire, of other senders, or of another fragment; nothing has been changed.
        """
        problem = self._misfit(state)
        if problem is not None:
            raise ValueError(
                f"Channel.load_state_dict: {problem}; build the engine with the wire, the error feedback, the model "
                "and the replicas of the checkpoint, or start a new run"
            )
        self.clear()

    def _misfit(self, state: Mapping[str, Any]) -> str | None:
        wire = state.get("wire")
        return None if wire is None else f"the state has residuals of wire {wire}, this channel no residuals"

    def withdraw(self) -> None:
        """Cancel a transfer under way: its sum has failed, or is not applied."""

    def clear(self) -> None:
        """Set all residuals to zero, and cancel a transfer under way: the state after construction."""
