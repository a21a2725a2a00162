"""Batches of tensors that are a piece long: a piece stays in the cache between the operations on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_PIECE_CPU = 1 << 17  # elements: four float32 streams of a piece are 2 MiB, about what a second-level cache holds
_PIECE_DEVICE = 1 << 24  # elements: enough to fill an accelerator, and a scratch of 64 MiB
_PLAIN = (Tensor, torch.nn.Parameter)


def is_dense(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor is a plain one of a dtype, without holes, on the CPU."""
    return type(tensor) in _PLAIN and tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no subclass, such as a DTensor."""
    return type(tensor) in _PLAIN


def batches(*lists: Sequence[Tensor], limit: int | None = None) -> Iterator[tuple[list[Tensor], ...]]:
    """Aligned batches over several lists of tensors, each batch about a piece, or `limit` elements, long in all.

    Large contiguous tensors are cut into flat views; small ones are put together. A tensor that is no plain
    contiguous one (a DTensor, a transposed view) is taken whole, and a DTensor by itself: one operation cannot take
    DTensors and plain tensors together.
    """
    if not lists[0]:
        return
    limit = limit or piece_length(lists[0][0])
    batch: list[tuple[Tensor, ...]] = []
    size = 0
    for row in zip(*lists, strict=True):
        for piece in _pieces(row, limit):
            alone = not is_plain(piece[0])
            if batch and (size + piece[0].numel() > limit or alone):
                yield tuple(map(list, zip(*batch, strict=True)))
                batch, size = [], 0
            batch.append(piece)
            size += limit + 1 if alone else piece[0].numel()
    yield tuple(map(list, zip(*batch, strict=True)))


def piece_length(tensor: Tensor) -> int:
    """Elements of a piece on a tensor's device."""
    return _PIECE_CPU if tensor.device.type == "cpu" else _PIECE_DEVICE


def _pieces(row: tuple[Tensor, ...], limit: int) -> Iterator[tuple[Tensor, ...]]:
    if row[0].numel() <= limit or not all(is_plain(t) and t.is_contiguous() for t in row):
        yield row
    else:
        yield from zip(*(t.detach().view(-1).split(limit) for t in row), strict=True)
