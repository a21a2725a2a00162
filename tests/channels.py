"""Channels of the wires, contributions to sum, and their sums, made in one process and in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twophase.diloco.communicator import Pending, SingleProcess
from twophase.diloco.setting import open_channel
from twophase.diloco.transfer import Channel


def channel(name: str, numel: int, senders: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Channel:
    return open_channel(name, numel, dtype=dtype, device=torch.device("cpu"), senders=senders, **options)


def contribution(numel: int, rank: int, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What process `rank` brings to round `number`: many magnitudes."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(numel, generator=generator, dtype=dtype) * torch.rand(numel, generator=generator, dtype=dtype)


def contributions(numel: int, size: int, number: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [contribution(numel, rank, number, dtype) for rank in range(size)]


def simulate(alone: Channel, parts: Sequence[Tensor]) -> Tensor:
    """The sum as several replicas in one process make it."""
    decoded = [x.clone() for x in parts]
    for sender, x in enumerate(decoded):
        alone.quantize(x, sender)
    total = decoded[0]
    for x in decoded[1:]:
        total += x
    alone.launch(SingleProcess(), total, quantized=True).wait()
    return total


def residuals(channels: Sequence[Channel]) -> list[Tensor]:
    """Copy each sender's residual, and that of the sum, of which each process has a part; empty without a state."""
    states = [state for channel in channels if (state := channel.state_dict())]
    returned = [state["returned"] for state in states]
    residual = [x.clone() for state in states for x in state["sent"]]
    return residual + ([torch.cat(returned)] if returned else [])


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


# --- several processes in one: each makes its calls in turn ---------------------------------------------------------


@dataclass
class Later:
    """A collective whose messages are read by `wait()`, when all have sent theirs."""

    wait: Callable[[], Any]
    bytes_sent: int = 0


class Member(SingleProcess):
    """One of the processes that share `calls`: what each rank has sent in each collective."""

    def __init__(self, rank: int, size: int, calls: list[dict[int, Tensor]]) -> None:
        self.rank, self.size, self.calls = rank, size, calls
        self.handed_over: list[int] = []

    def call(self, sent: Tensor, deliver: Callable[[list[Tensor]], Any]) -> Pending:
        """A collective in which all send something."""
        number = len(self.handed_over)
        self.calls.extend({} for _ in range(number + 1 - len(self.calls)))
        self.calls[number][self.rank] = sent.clone()
        self.handed_over.append(sent.nbytes)
        return Later(lambda: deliver([self.calls[number][rank] for rank in range(self.size)]))

    def launch_sum(self, tensor: Tensor) -> Pending:
        """Sum."""
        return self.call(tensor, lambda sent: tensor.copy_(torch.stack(sent).sum(0)))

    def launch_scatter(self, received: Tensor, sent: Tensor) -> Pending:
        """All-to-all."""
        return self.call(sent, lambda all_: received.copy_(torch.cat([x.chunk(self.size)[self.rank] for x in all_])))

    def launch_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """All-gather."""
        return self.call(sent, lambda all_: received.copy_(torch.cat(all_)))


class Failing(Member):
    """A process whose gathering fails when it is waited for."""

    def launch_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """Read nothing, and fail."""

        def fail() -> None:
            raise ConnectionError("gone")

        del received, sent
        return Later(fail)


def members(size: int) -> list[Member]:
    calls: list[dict[int, Tensor]] = []
    return [Member(rank, size, calls) for rank in range(size)]


def together(channels: Sequence[Channel], parts: Sequence[Tensor]) -> list[Tensor]:
    """The sum on each of several processes."""
    sums = [x.clone() for x in parts]
    group = members(len(channels))
    transfers = [channel.launch(member, x) for channel, member, x in zip(channels, group, sums, strict=True)]
    for transfer in transfers:
        transfer.advance()
    for transfer in transfers:
        transfer.wait()
    return sums
