"""Buffers of the replicas, such as BatchNorm's statistics, which no outer optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from twophase.diloco.digest import as_bytes, digest
from twophase.diloco.fragment import local
from twophase.diloco.group import SingleProcess
from twophase.optim.outer_sgd import off_mps

_UNIT = 1e-5
"""Distance from 1 within which the norm of a row makes it a unit vector; of 16-bit ones their rounding."""


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers by name, of a DTensor the shard, of a sparse one its dense parts, without copies.

    Left out are complex, expanded and quantized ones, and those without memory of their own, as on "meta".
    """
    found = {}
    for name, buffer in module.named_buffers():
        b = local(buffer)
        if b.layout is torch.sparse_coo:
            found |= {f"{name}.indices": b._indices(), f"{name}.values": b._values()}
        elif b.layout is torch.strided and 0 not in b.stride() and not is_traceable_wrapper_subclass(b):
            found[name] = b
    return {n: b for n, b in found.items() if not (b.is_meta or b.is_quantized or b.is_complex())}


class Buffers:
    """The buffers of the replicas: taken from rank 0's first replica at the start, as in DDP, and averaged on demand.

    Args:
        replicas, count: modules of this process, and their number over all ranks; buffers have equal shapes in all.
        group: ranks of the run.
        anchor: a tensor on the device where ranks exchange values.
    """

    @torch.no_grad()
    def __init__(self, replicas: Sequence[nn.Module], count: int, group: SingleProcess, anchor: Tensor) -> None:
        self._replicas, self._count, self._group = replicas, count, group
        self._device = off_mps(anchor[:0]).device
        tables = [list(buffers_of(module).values()) for module in replicas]
        if not tables[0] or count == 1:
            return
        data = [as_bytes(b).to(self._device) for b in tables[0]]
        sent = torch.cat(data)
        group.broadcast(sent)
        parts = sent.split([len(part) for part in data])
        for b, part in ((b, part) for table in tables for b, part in zip(table, parts, strict=True)):
            b.copy_(part.clone().view(b.dtype).view(b.shape))  # a copy, aligned to its type

    @torch.no_grad()
    def average(self) -> None:
        """Set floating-point buffers, such as BatchNorm's statistics, to their mean, in float64.

        Those with the same bits in all replicas keep them, and so do those that differ in shape. Unit vectors, as of
        spectral norms, stay unit vectors.
        """
        tables = [buffers_of(module) for module in self._replicas]
        own = [{n: [digest([b]), *b.shape] for n, b in t.items() if b.is_floating_point()} for t in tables]
        first, *others = (row for of_rank in self._group.gather_json(own) for row in of_rank)
        names = [n for n in first if all(n in row and row[n][1:] == first[n][1:] for row in others)]
        names = [n for n in names if any(row[n] != first[n] for row in others)]
        if not names:
            return
        replicas = [[by_name[name] for name in names] for by_name in tables]
        sizes = [b.numel() for b in replicas[0]]
        total = torch.zeros(sum(sizes) + len(names), dtype=torch.float64, device=self._device)
        for of_one in replicas:
            wide = [off_mps(b).to(self._device).double() for b in of_one]
            units = torch.stack([_has_unit_rows(w, b.dtype) for w, b in zip(wide, of_one, strict=True)])
            total += torch.cat([*(w.flatten() for w in wide), units])
        self._group.all_reduce(total).wait()
        *means, units = (total / self._count).split([*sizes, len(names)])
        for mean, unit, *of_all in zip(means, units.tolist(), *replicas, strict=True):
            rows = mean.view(of_all[0].shape)
            if unit == 1:  # in all replicas
                lengths = rows.norm(dim=-1, keepdim=True)
                rows = torch.where(lengths < 1 - torch.finfo(of_all[0].dtype).eps, rows / lengths.clamp(1e-12), rows)
            for b in of_all:
                b.copy_(rows.to(b.dtype))


def _has_unit_rows(b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 if the rows of a buffer, which was of a type, are unit vectors, else 0."""
    norms = b.norm(dim=-1) if b.ndim and b.shape[-1] > 1 else b.new_zeros(1)
    return ((norms - 1).abs() <= max(_UNIT, torch.finfo(dtype).eps)).all().double()
