"""Filters of the pseudo-gradient: what the outer optimizer sees of it.

A filter is a function of a fragment's pseudo-gradients by parameter name. It changes them in place, to the same bits on
every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twophase.optim.names import read_filter
from twophase.optim.outer_sgd import off_mps

Filter = Callable[[Mapping[str, Tensor]], Any]
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def filter_of(value: str | Filter | None, total: Callable[[list[float]], list[float]] | None = None) -> Filter | None:
    """Return the function of `orthogonal`, `clip:1` or a user's own; None where nothing is filtered.

    `total` sums numbers over the shards of a parameter; None where parameters are whole. A ValueError refuses another
    text, and a filter of whole tensors where parameters are sharded.
    """
    kind, norm = ("function", 0.0) if callable(value) else read_filter("none" if value is None else value)
    if total is not None and kind in ("function", "orthogonal"):
        raise ValueError(f"filter {kind} needs whole parameters, got shards; take clip")
    if kind == "clip":
        return partial(clip, norm=norm, total=total or list)
    return {"none": None, "orthogonal": orthogonal}.get(kind, value)  # type: ignore[return-value]


def clip(gradients: Mapping[str, Tensor], norm: float, total: Callable[[list[float]], list[float]] = list) -> None:
    """Scale all of them by `min(1, norm / |g|)`, with the norm |g| over all."""
    squares = [float(torch.linalg.vector_norm(off_mps(g), dtype=torch.float64)) ** 2 for g in gradients.values()]
    (whole,) = total([sum(squares)])
    factor = min(1.0, norm / whole**0.5) if whole > 0 else 1.0
    for g in gradients.values() if factor < 1 else ():
        g.mul_(factor)


def orthogonal(gradients: Mapping[str, Tensor]) -> None:
    """Make the singular values of every matrix alike and keep its Frobenius norm; vectors stay.

    g = U S V^T becomes about |g| U V^T / sqrt(rank). Muon orthogonalizes the momentum and sets the step's size by the
    shape. Iso-C gives all singular values their mean, which shortens g. Here they become their root mean square, so the
    learning rate keeps its meaning. Newton-Schulz iterations bring them within about 30 % of it. A tensor of more axes
    is flattened behind its first one.

    Source: Iso-C (arXiv 2502.04959), IsoLoCo (arXiv 2607.03011); Jordan et al., "Muon" (2024).
    """
    for g in gradients.values():
        if g.ndim < 2 or not g.numel():
            continue
        flat = orthogonalized(g.reshape(len(g), -1)).to(g.dtype).view(g.shape)
        tiny = torch.finfo(g.dtype).tiny
        g.copy_(flat * (torch.linalg.vector_norm(g) / torch.linalg.vector_norm(flat).clamp(min=tiny)))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return about U V^T of a matrix U S V^T, by Newton-Schulz iterations in bfloat16 with Muon's coefficients."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    y = matrix.bfloat16()
    y = y.T if tall else y
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y
