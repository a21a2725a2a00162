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

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""Methods that return the dense tensors of a sparse one."""
_UNIT = 1e-5
"""Distance from 1 within which the norm of a row makes it a unit vector; of 16-bit ones their rounding."""


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers by name, of a DTensor the shard, of a sparse one its dense parts, without copies.

    Of an expanded one each element is there once. Tensors without memory of their own, as on "meta", are left out.
    """
    found = {}
    for name, buffer in module.named_buffers():
        b = local(buffer)
        b = b.conj() if b.is_conj() else b  # what its memory holds
        if b.layout is torch.strided and not (b.is_meta or b.is_quantized or is_traceable_wrapper_subclass(b)):
            for axis, stride in enumerate(b.stride()):
                b = b.select(axis, 0).unsqueeze(axis) if stride == 0 and b.numel() else b
            found[name] = b
        found |= {f"{name}.{part}": getattr(b, part)() for part in _PARTS.get(b.layout, ())}
    return found


def digests(module: nn.Module) -> dict[str, str]:
    """Return the digests of floating-point and complex buffers by name."""
    return {n: digest([b]) for n, b in buffers_of(module).items() if b.is_floating_point() or b.is_complex()}


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
        self._like = {name: (b.shape, b.dtype) for name, b in buffers_of(replicas[0]).items()}
        tables = [buffers_of(module) for module in replicas]
        names = self._unlike(tables, list(self._like))
        if not names:
            return
        first, *others = ([by_name[name] for name in names] for by_name in tables)
        data = [as_bytes(b).to(self._device) for b in first]
        sent = torch.cat(data)
        group.broadcast(sent)
        for of_one in (first, *others):
            for b, part in zip(of_one, sent.split([len(part) for part in data]), strict=True):
                b.copy_(part.clone().view(b.dtype).view(b.shape))  # a copy, aligned to its type

    @torch.no_grad()
    def average(self) -> None:
        """Set floating-point and complex buffers, such as BatchNorm's statistics, to their mean, in float64.

        Those with the same bits in all replicas keep them. Unit vectors, as of spectral norms, stay unit vectors.
        """
        tables = [buffers_of(module) for module in self._replicas]
        kinds = [n for n, (_, dtype) in self._like.items() if dtype.is_floating_point or dtype.is_complex]
        names = self._unlike(tables, kinds)
        if not names:
            return
        replicas = [[_real(by_name[name]) for name in names] for by_name in tables]
        sizes = [b.numel() for b in replicas[0]]
        total = torch.zeros(sum(sizes) + len(names), dtype=torch.float64, device=self._device)
        for of_one in replicas:
            flat = [off_mps(b).to(self._device).double().flatten() for b in of_one]
            norms = torch.stack(torch._foreach_norm(flat)).tolist()
            total += torch.cat([*flat, total.new_tensor(list(map(_has_unit_rows, of_one, norms)))])
        self._group.all_reduce(total).wait()
        *means, units = (total / self._count).split([*sizes, len(names)])
        for mean, unit, *of_all in zip(means, units.tolist(), *replicas, strict=True):
            rows = mean.view(of_all[0].shape)
            if unit == 1:  # in all replicas
                lengths = rows.norm(dim=-1, keepdim=True)
                shrunk = (lengths > 0) & (lengths < 1 - torch.finfo(of_all[0].dtype).eps)
                rows = torch.where(shrunk, rows / lengths, rows)
            for b in of_all:
                b.copy_(rows.to(b.dtype))

    def _unlike(self, tables: Sequence[dict[str, Tensor]], names: Sequence[str]) -> list[str]:
        """Return the names of buffers whose bits differ between replicas, but for those that have changed in shape."""
        marks = []
        for name in names:
            own = [by_name[name] for by_name in tables if name in by_name]
            if len(own) < len(tables) or any((b.shape, b.dtype) != self._like[name] for b in own):
                marks.append(_OTHER)
                continue
            bits = {digest([b]) for b in own}
            marks.append(bits.pop() if len(bits) == 1 else _UNLIKE)
        rows = [row.decode() for row in self._group.gather_bytes("".join(marks).encode())] if names else []
        columns = [{row[start : start + 16] for row in rows} for start in range(0, 16 * len(names), 16)]
        return [n for n, c in zip(names, columns, strict=True) if _OTHER not in c and (len(c) > 1 or _UNLIKE in c)]


_OTHER, _UNLIKE = "-" * 16, "+" * 16
"""In the place of a digest: a buffer of another shape than at the start; several digests in one process."""


def _real(b: Tensor) -> Tensor:
    return torch.view_as_real(b) if b.is_complex() else b


def _has_unit_rows(b: Tensor, norm: float) -> float:
    """Return 1 if the rows of a buffer, of which all have this norm together, are unit vectors, else 0."""
    if b.ndim == 0 or b.shape[-1] < 2:
        return 0.0
    tolerance, rows = max(_UNIT, torch.finfo(b.dtype).eps), b.numel() // b.shape[-1]
    if abs(norm**2 - rows) > 3 * tolerance * rows:  # of most buffers; only then each row is looked at
        return 0.0
    return float(((off_mps(b).double().norm(dim=-1) - 1).abs() <= tolerance).all())
