"""Parameters, pseudo-gradients and runs for tests of outer optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (33, 17)]


def randoms(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Normal tensors, rounded to a type from float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def parameters(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Any]:
    return [nn.Parameter(x) for x in randoms(seed, shapes, dtype)]


def scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def give(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()


def run(outer: Any, rounds: Iterable[int], params: Any = None, **options: Any) -> None:
    """Take rounds whose pseudo-gradients follow from the number, the parameters' order and shapes, and where they are.

    They draw the parameters to 0. `options` are those of `step`, or functions of the round's number to them.
    """
    params = [p for group in outer.param_groups for p in group["params"]] if params is None else params
    for number in rounds:
        noise = randoms(1000 + number, [tuple(p.shape) for p in params])
        give(params, [p.detach() / 4 + draw.to(p.dtype) / 4 for p, draw in zip(params, noise, strict=True)])
        outer.step(**{name: value(number) if isinstance(value, Callable) else value for name, value in options.items()})
        assert all(p.grad._version == 0 for p in params)  # pseudo-gradients are the caller's, and only read


def buffers(outer: torch.optim.Optimizer) -> list[Tensor]:
    return [outer.state[p]["momentum_buffer"] for group in outer.param_groups for p in group["params"]]


def counters(outer: torch.optim.Optimizer) -> list[Any]:
    """What the groups count and remember."""
    names = ("rounds", "rounds_since_restart", "restarts", "policy_state")
    return [group[name] for group in outer.param_groups for name in names]


def flat(tensors: Sequence[Any]) -> Tensor:
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])
