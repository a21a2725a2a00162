"""Buffers of the replicas, such as BatchNorm's statistics, which no outer optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from twophase.diloco.digest import as_bytes, digest
from twophase.diloco.fragment import local
from twophase.optim.outer_sgd import off_mps

if TYPE_CHECKING:
    from twophase.diloco.engine import DiLoCo


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers by name, of a DTensor the shard; those alone that are one plain array of numbers."""
    found = {name: local(b) for name, b in module.named_buffers() if b.layout is torch.strided and not b.is_quantized}
    return {n: b for n, b in found.items() if 0 not in b.stride() and not (b.is_meta or is_wrapper(b))}


@torch.no_grad()
def broadcast_buffers(engine: DiLoCo) -> None:
    """Set the buffers of all replicas to those of rank 0's first replica, as DDP does."""
    if engine.replica_count == 1:
        return
    for of_all in zip(*(buffers_of(module).values() for module in engine.replicas), strict=True):
        sent = as_bytes(of_all[0]).to(off_mps(engine.flat[:0]).device, copy=True)
        engine.group.broadcast(sent)
        for b in of_all:
            b.copy_(sent.view(b.dtype).view(b.shape))


@torch.no_grad()
def average_buffers(engine: DiLoCo) -> None:
    """Set floating-point buffers, such as BatchNorm's statistics, to their mean, in float64.

    Those with the same bits in all replicas keep them, and so do those that differ in shape. Unit vectors, as of
    spectral norms, stay unit vectors.
    """
    tables = [buffers_of(module) for module in engine.replicas]
    own = [{n: [digest([b]), _is_unit(b), *b.shape] for n, b in t.items() if b.is_floating_point()} for t in tables]
    rows = [row for of_rank in engine.group.gather_json(own) for row in of_rank]
    names = [n for n, (_, _, *shape) in rows[0].items() if all(n in row and row[n][2:] == shape for row in rows)]
    names = [n for n in names if len({row[n][0] for row in rows}) > 1]
    if not names:
        return
    device = off_mps(engine.flat[:0]).device
    wide = [torch.cat([off_mps(t[n]).to(device).double().flatten() for n in names]) for t in tables]
    total = sum(wide, start=torch.zeros_like(wide[0]))
    list(engine.group.all_reduce(total))
    means = (total / engine.replica_count).split([tables[0][name].numel() for name in names])
    for name, mean in zip(names, means, strict=True):
        values = mean.view(tables[0][name].shape)
        if all(row[name][1] for row in rows):
            lengths, eps = values.norm(dim=-1, keepdim=True), torch.finfo(tables[0][name].dtype).eps
            values = torch.where(lengths < 1 - eps, values / lengths.clamp(1e-12), values)
        for table in tables:
            table[name].copy_(values.to(table[name].dtype))


def _is_unit(b: Tensor) -> bool:
    """Return whether a buffer, or each of its rows, is a unit vector."""
    if b.ndim == 0 or b.shape[-1] < 2:
        return False
    return bool(((off_mps(b).double().norm(dim=-1) - 1).abs() <= max(1e-5, torch.finfo(b.dtype).eps)).all())
