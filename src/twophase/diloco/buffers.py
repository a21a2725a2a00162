"""Floating-point buffers of the replicas, such as BatchNorm's statistics, which no outer optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from twophase.diloco.group import SingleProcess


def float_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's floating-point buffers by name, on the CPU."""
    return {n: b.detach().to("cpu", copy=True) for n, b in module.named_buffers() if b.is_floating_point()}


@torch.no_grad()
def average_buffers(replicas: Sequence[nn.Module], group: SingleProcess) -> None:
    """Set the floating-point buffers of all replicas, such as BatchNorm's statistics, to their mean, in float64.

    Args:
        replicas: modules of this process, as many as on every other rank.
        group: ranks of the run.
    """
    buffers = [[b for _, b in module.named_buffers() if b.is_floating_point()] for module in replicas]
    if not buffers[0]:
        return
    device = buffers[0][0].device  # another replica may be elsewhere
    total = torch.zeros(sum(b.numel() for b in buffers[0]), dtype=torch.float64, device=device)
    for of_one in buffers:
        total += torch.cat([b.double().flatten().to(device) for b in of_one])
    group.all_reduce(total).wait()
    mean = total / (len(replicas) * group.size)
    for of_one in buffers:
        for b, part in zip(of_one, mean.split([b.numel() for b in of_one]), strict=True):
            b.copy_(part.view_as(b))
