"""The outer round on an accelerator: two kernels and one transfer to the host, where Triton works.

Elsewhere the engine uses torch's operations, which read the parameters about four times as often.
"""

from __future__ import annotations

import functools
import logging
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from twophase.diloco.flat import PIECE_ELEMENTS, joined_digits, weighted_checksum
from twophase.diloco.fragment import Fragment
from twophase.optim.functional import Update
from twophase.optim.products import Dots
from twophase.policies.base import MEASURED, Restart

_log = logging.getLogger("twophase")
_DEVICES = ("cuda",)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_REPLICAS = 4
"""Replicas of a process that the kernels support."""
_BLOCK = 2048
"""Elements of a program: a power of two, so that no block lies in two pieces of a digest."""


@functools.cache
def kernels(device: torch.device) -> ModuleType | None:
    """Return the kernels, tried once on a device; None, with a warning, where they do not work."""
    try:
        from twophase.diloco import kernels as module  # noqa: PLC0415 - Triton is not everywhere

        _try(module, device)
    except Exception as error:  # no Triton, no C compiler for its launchers, a GPU that it does not support, …
        reason = (str(error).splitlines() or [""])[0]
        _log.warning(
            "outer round on %s: no Triton kernels (%s: %s); torch's operations take their place, and more time",
            device,
            type(error).__name__,
            reason,
        )
        return None
    return module


def is_usable(fragment: Fragment) -> bool:
    """Return whether the kernels support a fragment: float32 on an accelerator, with few, contiguous replicas."""
    flat, replicas = fragment.flat, fragment.params
    dtypes = [[theta.dtype for theta in params] for params in replicas]
    return (
        flat.device.type in _DEVICES
        and flat.dtype == torch.float32
        and len(replicas) <= _MOST_REPLICAS
        and set(dtypes[0]) <= set(_TYPES)
        and all(types == dtypes[0] for types in dtypes)
        and {theta.device for params in replicas for theta in params} == {flat.device}
        and all(all(map(Tensor.is_contiguous, params)) for params in replicas)
        and kernels(flat.device) is not None
    )


@dataclass(frozen=True)
class Table:
    """Hold the parameters of one kind that a launch takes together (`twophase.diloco.kernels`).

    Args:
        numbers: numbers of the parameters, in their order.
        dtype: type of the replicas.
        aligned: True if all offsets, ends and addresses are multiples of 16.
        programs: number of blocks of all parameters.
        of_program: (programs, 2) int32: row in `slots`, and block.
        slots: (parameters, 2 + replicas) int64: offset, end, and the replicas' addresses.
    """

    numbers: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool
    programs: int
    of_program: Tensor
    slots: Tensor


@functools.lru_cache(maxsize=64)
def tables(
    device: torch.device, dtypes: tuple[torch.dtype, ...], rows: tuple[tuple[int, ...], ...]
) -> tuple[Table, ...]:
    """Group parameters by type and alignment, and make the tables of each group.

    Args:
        device: device of the tables.
        dtypes: types of the replicas' tensors, by parameter.
        rows: offset, end and addresses, by parameter.

    Returns:
        One table for most models, the same for the same arguments: rounds do not copy it to the device again.
    """
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for number, (dtype, row) in enumerate(zip(dtypes, rows, strict=True)):
        groups.setdefault((dtype, not any(value % 16 for value in row)), []).append(number)
    made: list[Table] = []
    for (dtype, aligned), numbers in groups.items():
        slots = torch.tensor([rows[number] for number in numbers], dtype=torch.int64, device="cpu")
        first, last = slots[:, 0] // _BLOCK, (slots[:, 1] - 1) // _BLOCK
        counts = last - first + 1
        of_program = torch.arange(len(numbers), device="cpu").repeat_interleave(counts)
        within = torch.arange(len(of_program), device="cpu") - (counts.cumsum(0) - counts)[of_program]
        entries = torch.stack([of_program, first[of_program] + within], 1).int()
        made.append(Table(tuple(numbers), dtype, aligned, len(entries), entries.to(device), slots.to(device)))
    return tuple(made)


@dataclass(slots=True)
class DeviceSweep:
    """Take a fragment's round on its flat vectors, for `OuterSGD.step`.

    Args:
        kernels: module of the kernels.
        x: anchor, (n,) float32.
        g: sum or mean of pseudo-gradients, (n,).
        m: momentum buffer, (n,); None at momentum 0.
        buffers: views of `m` in the parameters' shapes.
        bounds: first element of each parameter, and the one after its last.
        replicas: parameters of each replica; empty if they are not to be set to the anchor.
        divisor: number by which g is still to be divided.
        prove: True if `run` also takes the digest of the buffer.
        measure: True if `run` returns the inner products, for a policy that does not decide by them.
        digests: digests of anchor and buffer by name, after `run`.
    """

    kernels: ModuleType
    x: Tensor
    g: Tensor
    m: Tensor | None
    buffers: Sequence[Tensor]
    bounds: Sequence[tuple[int, int]]
    replicas: Sequence[Sequence[Tensor]]
    divisor: float
    prove: bool
    measure: bool
    digests: dict[str, str] = field(default_factory=dict)

    def write_pseudo_gradient(self) -> None:
        """Write g <- sum over the replicas of (x - theta_r), over the divisor."""
        for table in self._tables():
            _launch(
                self.kernels.pseudo_gradient,
                table.programs,
                (self.x, self.g, table.of_program, table.slots, float(self.divisor)),
                reads=[self.x, *self._of(table)],
                writes=[self.g],
                TYPE=self.kernels.TYPES[table.dtype],
                ALIGNED=table.aligned,
                REPLICAS=len(self.replicas),
                DIVIDE=self.divisor > 1,
            )
        self.divisor = 1

    def dots(self, *, fresh: bool, angle: bool) -> Dots:
        """Return the inner products before the round, and divide g."""
        del angle  # it is free here
        m = None if fresh else self.m
        programs = -(-len(self.g) // _BLOCK)
        products = torch.empty(programs, 3, dtype=torch.float64, device=self.g.device)
        _launch(
            self.kernels.inner_products,
            programs,
            (self.g, self.g if m is None else m, products, len(self.g), float(self.divisor)),
            reads=[self.g] if m is None else [self.g, m],
            writes=[products] if self.divisor == 1 else [self.g, products],
            MOMENTUM=m is not None,
            DIVIDE=self.divisor > 1,
        )
        self.divisor = 1
        gg, mm, gm = products.sum(0).tolist()
        return gg, mm, gm

    def run(self, update: Update) -> Dots | None:
        """Take the round, and read inner products and digests in one transfer."""
        tables = self._tables()
        products = torch.empty(sum(table.programs for table in tables), 3, dtype=torch.float64, device=self.x.device)
        rows = 2 if self.prove and self.m is not None else 1
        sums = torch.zeros(rows, -(-len(self.x) // PIECE_ELEMENTS), dtype=torch.int64, device=self.x.device)
        first = 0
        for table in tables:
            self._step(table, update, products[first : first + table.programs], sums)
            first += table.programs
        # The only wait of a round for the device, unless a policy decides by the inner products.
        numbers = torch.cat([products.sum(0).view(torch.int64), sums.view(-1)]).tolist()
        gg, mm, gm = struct.unpack("=3d", struct.pack("=3q", *numbers[:3]))
        for row, name in enumerate(("anchor", "momentum buffer")[:rows]):
            pieces = numbers[3 + row * sums.shape[1] : 3 + (row + 1) * sums.shape[1]]
            self.digests[name] = joined_digits(len(self.x), pieces)
        return (gg, mm, gm) if self.measure else None

    def _step(self, table: Table, update: Update, products: Tensor, sums: Tensor) -> None:
        """Launch the round of a table's parameters."""
        phase = 0 if update.restart is None else 1 if update.restart.before else 2
        restart = update.restart or Restart(1.0)
        reads, writes = [self.x, self.g], [self.x, *self._of(table)]
        if self.m is not None:
            reads += [] if update.fresh else [self.m]
            writes += [self.m]
        if self.divisor > 1:
            writes += [self.g]
        m = self.g if self.m is None else self.m
        along_g, along_m, along_new, mix_m, mix_g = coefficients(update)
        factors = along_g, along_m, along_new, mix_m, mix_g, restart.retain, restart.inject
        _launch(
            self.kernels.outer_round,
            table.programs,
            (
                *(self.x, self.g, m, products, sums[0], sums[-1]),
                *(table.of_program, table.slots, float(self.divisor)),
                *map(float, factors),
            ),
            reads=reads,
            writes=writes,
            TYPE=self.kernels.TYPES[table.dtype],
            ALIGNED=table.aligned,
            MOMENTUM=self.m is not None,
            FRESH=update.fresh,
            RESTART=phase,
            DROPS=restart.retain == 0,
            ALONG_G=along_g != 0,
            ALONG_M=along_m != 0,
            ALONG_NEW=along_new != 0,
            KEEPS=mix_m != 0 and not update.fresh,
            REPLICAS=len(self.replicas),
            DIVIDE=self.divisor > 1,
            PROVE=len(sums) > 1,
        )

    def _tables(self) -> tuple[Table, ...]:
        # The device waits for this part on the host, so it takes few calls.
        dtypes = [theta.dtype for theta in self.replicas[0]] if self.replicas else [self.x.dtype] * len(self.bounds)
        rows = zip(*zip(*self.bounds, strict=True), *map(_addresses, self.replicas), strict=True)
        return tables(self.x.device, tuple(dtypes), tuple(rows))

    def _of(self, table: Table) -> list[Tensor]:
        return [params[number] for params in self.replicas for number in table.numbers]


def write(fragment: Fragment, divisor: int) -> None:
    """Write g <- sum over this process's replicas of (a - theta_r), over `divisor`, by the kernels."""
    fragment.close_gaps()
    fragment.divisor = divisor
    sweep_of(fragment, None, restore=True, prove=False).write_pseudo_gradient()


def dots(fragment: Fragment) -> list[Dots]:
    """Return the inner products of a fragment's only group; divide its pseudo-gradient."""
    momentum = fragment.momentum() if fragment.outer.param_groups[0]["momentum"] != 0 else None
    sweep = sweep_of(fragment, momentum, restore=False, prove=False)
    return [sweep.dots(fresh=momentum is None, angle=True)]


def sweep_of(fragment: Fragment, momentum: Tensor | None, *, restore: bool, prove: bool) -> DeviceSweep:
    """Return the sweep that divides a pseudo-gradient by the fragment's `divisor`."""
    module = kernels(fragment.flat.device)
    assert module is not None, "is_usable() comes first"
    divisor, fragment.divisor = fragment.divisor, 1
    return DeviceSweep(
        kernels=module,
        x=fragment.flat,
        g=fragment.gradient,
        m=momentum,
        buffers=fragment.momentum_views,
        bounds=fragment.bounds,
        replicas=fragment.params if restore else [],
        divisor=divisor,
        prove=prove,
        measure=not fragment.needs & MEASURED,
    )


def sweep_on(fragment: Fragment, x: Tensor, m: Tensor | None, buffers: Sequence[Tensor]) -> DeviceSweep:
    """Return the sweep of a copy of a fragment's anchor, with its divided pseudo-gradient and another buffer."""
    module = kernels(fragment.flat.device)
    assert module is not None, "the fragment's own round was theirs"
    return DeviceSweep(module, x, fragment.gradient, m, buffers, fragment.bounds, [], 1, prove=False, measure=True)


def coefficients(update: Update) -> tuple[float, float, float, float, float]:
    """Return A, B, C, c and d of `m <- c m_0 + d g` and `x <- x - A g - B m_0 - C m`."""
    c, d = update.mixing
    if update.step is not None:
        return update.step.along_g, update.step.along_m, 0.0, c, d
    if update.momentum == 0:
        return update.lr, 0.0, 0.0, 0.0, 1.0
    if update.nesterov:
        return update.lr * d, 0.0, update.lr * update.momentum, c, d
    return 0.0, 0.0, update.lr, c, d


def _addresses(params: Sequence[Tensor]) -> list[int]:
    return [theta.data_ptr() for theta in params]


def _launch(
    kernel: Any,
    programs: int,
    arguments: Sequence[Any],
    *,
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
    **constants: Any,
) -> None:
    """Launch a kernel on its tensors' device without a wait; a benchmark counts `reads` and `writes`."""
    del reads, writes
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        # Without fusion a product is rounded before it is added, on every kind of GPU alike.
        kernel[(programs,)](*arguments, **constants, BLOCK=_BLOCK, enable_fp_fusion=False)


def _try(module: ModuleType, device: torch.device) -> None:
    """Take one small round, and compare it with the same arithmetic in torch.

    Raises:
        RuntimeError: they differ by more than rounding, or a digest differs.
    """
    numel = 3 * _BLOCK + 7
    length = numel + -numel % 16
    generator = torch.Generator().manual_seed(0)
    x, m, theta = (torch.zeros(length).normal_(generator=generator) for _ in range(3))
    for vector in (x, m):
        vector[numel:] = 0
    expected_g = (x - theta)[:numel] / 3
    new = 0.9 * m[:numel] + expected_g
    expected = (x[:numel] - 0.5 * (expected_g + 0.9 * new), 0.25 * new + 0.5 * expected_g)
    x, m, theta = x.to(device), m.to(device), theta[:numel].to(device)
    sweep = DeviceSweep(module, x, torch.zeros_like(x), m, [m], [(0, numel)], [[theta]], 3, prove=True, measure=True)
    sweep.write_pseudo_gradient()
    sweep.run(Update(0.5, 0.9, True, "sum", restart=Restart(0.25, 0.5)))
    for name, result, reference in zip(("anchor", "buffer"), (x, m), expected, strict=True):
        if not torch.allclose(result[:numel].cpu(), reference, rtol=1e-5, atol=1e-5):
            raise RuntimeError(f"the {name} differs from the same arithmetic in torch")
    digits = {"anchor": weighted_checksum(x.cpu()), "momentum buffer": weighted_checksum(m.cpu())}
    if sweep.digests != digits or not torch.equal(theta, x[:numel]):
        raise RuntimeError("a digest, or a replica, is not that of the anchor")
