"""Channels of the wires, contributions to sum, and their sum as several replicas in one process make it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twophase.diloco.communicator import SingleProcess
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
