"""Parameters, pseudo-gradients and runs for tests of `OuterSGD`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from twophase.optim.outer import OuterSGD

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (33, 17)]
COUNTERS = ("rounds", "rounds_since_restart", "restarts", "policy_state")


def randoms(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Normal tensors, rounded to a type from float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def parameters(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Normal parameters."""
    return [nn.Parameter(x) for x in randoms(seed, shapes, dtype)]


def scalar(value: float) -> nn.Parameter:
    """One float32 number."""
    return nn.Parameter(torch.tensor([value]))


def give(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Set copies of pseudo-gradients."""
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()


@lru_cache(maxsize=256)
def noises(seed: int, shapes: tuple[torch.Size, ...], dtype: torch.dtype) -> list[Tensor]:
    """Normal tensors that are only read, so that runs of the same rounds share them."""
    return randoms(seed, shapes, dtype)


def run(outer: torch.optim.Optimizer, rounds: range, **options: Any) -> None:
    """Take rounds with pseudo-gradients that are a function of the round's number and the parameters' shapes."""
    for number in rounds:
        for group in outer.param_groups:
            params = group["params"]
            give(params, noises(1000 + number, tuple(p.shape for p in params), params[0].dtype))
        outer.step(**options)


def buffers(outer: torch.optim.Optimizer) -> list[Tensor]:
    """The momentum buffers, in the order of the parameters."""
    return [outer.state[p]["momentum_buffer"] for group in outer.param_groups for p in group["params"]]


def counters(outer: OuterSGD) -> list[Any]:
    """What the first group counts and remembers."""
    return [outer.param_groups[0][key] for key in COUNTERS]


def flat(tensors: Sequence[Any]) -> Tensor:
    """One float64 vector."""
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])
