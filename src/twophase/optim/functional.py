"""Update lists of tensors: in place, in small pieces, without touching the caller's gradients.

An outer step is bound by memory traffic. Whole-tensor operations would read and write each tensor several times from
main memory, and Nesterov would need a scratch tensor as large as the model. All operations are elementwise, so they
run piece by piece: a piece stays in the cache between them, and the scratch is one piece long. The operations on an
element and their order are those of `torch.optim.SGD`, so the result is equal bit for bit.

On a CPU torch's own fused kernel needs a single sweep. It takes the tensors for which it gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twophase.policies.base import Answer, Restart, Step
from twophase.rule import Form, OuterRule

PIECE_CPU = 1 << 17  # elements: four float32 streams of a piece are 2 MiB, about what a second-level cache holds
_PIECE_DEVICE = 1 << 24  # elements: enough to fill an accelerator, and a scratch of 64 MiB
_PIECE_FUSED = 1 << 18  # elements: of three streams that one operation has read; calls cost more than the cache gives
_LANES = 16  # elements: a multiple of every vector register's length
_PLAIN = frozenset({Tensor, torch.nn.Parameter})

Row = tuple[Tensor, ...]
"""Parameter x, pseudo-gradient g and buffer m."""
Scratch = dict[tuple[torch.dtype, torch.device], Tensor]
"""One uninitialised piece for each dtype and device, shared by the batches of a step."""


@dataclass(frozen=True, slots=True)
class Update:
    """Describe what a round does to x and m.

    `m <- momentum m + w g` with w = 1 (sum form) or 1 - momentum (EMA form); then `x <- x - lr m` (heavy ball) or
    `x <- x - lr (w g + momentum m)` (Nesterov). The last is the EMA form's `(1 + momentum) m - momentum m_old` without
    `m_old`: substitute `momentum m_old = m - w g`.

    Args:
        lr, momentum, nesterov, form: numbers and form of the outer rule.
        fresh: True if the buffers are empty and count as 0; they are written without being read.
        step: a policy's update in place of the rule's; `lr` and `nesterov` are then unused.
        restart: restart of the buffers, before or after; comparisons and the arithmetic of the update ignore it.

    Source: paper section 2 and appendix A; theory notes R2 and R3.
    """

    lr: float
    momentum: float
    nesterov: bool
    form: Form
    fresh: bool = False
    step: Step | None = None
    restart: Restart | None = field(default=None, compare=False)

    @classmethod
    def of(cls, rule: OuterRule, answer: Answer, *, fresh: bool) -> Update:
        """Return the round of a rule and a policy's answer."""
        restart = answer.restart
        if fresh and restart is not None and restart.before:  # it acts on a buffer that counts as 0
            restart, fresh = (None, True) if restart.inject == 0 else (restart, False)
        return cls(rule.lr, rule.momentum, rule.nesterov, rule.form, fresh, answer.step, restart)

    @property
    def mixing(self) -> tuple[float, float]:
        """Coefficients c and d of `m <- c m + d g`."""
        if self.step is not None and self.step.mix is not None:
            return self.step.mix
        return self.momentum, 1.0 if self.form == "sum" else 1 - self.momentum

    def simplified(self, *, unrounded: bool) -> Update:
        """Return the same update with fewer operations, where a policy's step is one of momentum SGD.

        With parameters `unrounded`, of the buffers' dtype, more of them round alike.
        """
        step = self.step
        if step is None or step.mix is None or step.mix[1] != 1 or step.along_m != step.along_g * step.mix[0]:
            return self
        if step.mix[0] != 0:  # heavy ball with another learning rate and momentum
            return Update(step.along_g, step.mix[0], False, "sum", self.fresh, restart=self.restart)
        if not unrounded:
            return self
        # Nothing of the buffer is read.
        return Update(step.along_g, self.momentum, False, "sum", fresh=True, restart=self.restart)


def buffer_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a momentum buffer: float32 for 16-bit parameters, otherwise the parameter's own."""
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


def outer_step_(
    params: Sequence[Tensor], pseudo_gradients: Sequence[Tensor], buffers: Sequence[Tensor], update: Update
) -> None:
    """Take one outer round in place on `params` and `buffers`.

    Args:
        params: x, any shapes, floating point.
        pseudo_gradients: g, shapes of `params`; read only.
        buffers: m, shapes of `params`, dtype `buffer_dtype`; empty when momentum is 0.
        update: the round's arithmetic on x and m.
    """
    if update.momentum == 0:
        for x, g in batches(params, pseudo_gradients):
            round_(x, g, [], update, {}, fused=False)
        return
    rows: list[Row] = list(zip(params, pseudo_gradients, buffers, strict=True))
    if update.step is not None:
        update = update.simplified(unrounded=all(x.dtype == m.dtype for x, _, m in rows))
    by_kernel, others = _split(rows, update)
    for bodies in by_kernel.values():
        columns = _columns(bodies)
        # A restart follows while the piece is in the cache.
        for x, g, m in [columns] if update.restart is None else batches(*columns, limit=_PIECE_FUSED):
            round_(x, g, m, update, {}, fused=True)
    for dtype in {row[0].dtype for row in others}:  # 16-bit ones are rounded in their own way
        x, g, m = _columns([row for row in others if row[0].dtype == dtype])
        round_(x, g, m, update, {}, fused=False)


def round_(x: list[Tensor], g: list[Tensor], m: list[Tensor], update: Update, scratch: Scratch, *, fused: bool) -> None:
    """Take the update, and the restart before or after it, by torch's fused kernel or in plain operations.

    Without buffers (momentum 0) m is g itself in both forms: `x <- x - lr g`.
    """
    if not m:
        torch._foreach_add_(x, g, alpha=-update.lr if update.step is None else -update.step.along_g)
        return
    restart = update.restart
    if restart is not None and restart.before:
        restart_(m, g, restart)
    if fused:
        _fused_sgd_(x, g, m, update)
    else:
        in_pieces_(x, g, m, update, scratch)
    if restart is not None and not restart.before:
        restart_(m, g, restart)


def in_pieces_(
    params: Sequence[Tensor], gradients: Sequence[Tensor], buffers: Sequence[Tensor], update: Update, scratch: Scratch
) -> None:
    """Take the update without its restart, in plain operations, on tensors of any kind."""
    momentum, weight = update.mixing
    for x, g, m in batches(params, gradients, buffers):
        if update.step is not None:
            _step_(x, g, m, (update.step.along_g, 0.0 if update.fresh else update.step.along_m), scratch)
        if update.fresh or momentum == 0:
            _copy_(m, g)
            if weight != 1:
                torch._foreach_mul_(m, weight)
        else:
            torch._foreach_mul_(m, momentum)
            torch._foreach_add_(m, g, alpha=weight)
        if update.step is not None:
            continue
        step = m
        if update.nesterov:
            step = _scratch_like(m, scratch)
            if update.form == "sum":
                for gradient, buffer, target in zip(g, m, step, strict=True):
                    # A copy and a sum in one sweep; there is no foreach form.
                    torch.add(gradient, buffer, alpha=momentum, out=target)
            else:
                _copy_(step, m)
                torch._foreach_mul_(step, momentum)
                torch._foreach_add_(step, g, alpha=weight)
        torch._foreach_add_(x, step, alpha=-update.lr)


def _step_(x: list[Tensor], g: list[Tensor], m: list[Tensor], weights: tuple[float, float], scratch: Scratch) -> None:
    """Take `x <- x - a g - b m`; 16-bit x is rounded once, unless b = 0: the bits of a momentum-free step."""
    along_g, along_m = weights
    if along_m == 0 or x[0].dtype.itemsize >= 4:
        torch._foreach_add_(x, g, alpha=-along_g)
        if along_m != 0:
            torch._foreach_add_(x, m, alpha=-along_m)
        return
    total = _scratch_like(m, scratch)
    _copy_(total, m)
    torch._foreach_mul_(total, along_m)
    torch._foreach_add_(total, g, alpha=along_g)
    torch._foreach_add_(x, total, alpha=-1.0)


def _copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)  # one by one: DTensor has no foreach copy


def _scratch_like(batch: list[Tensor], scratch: Scratch) -> list[Tensor]:
    """Cut uninitialised tensors of a batch's shapes from one piece that all batches of a step share.

    A fresh allocation for each batch would return to the system and be faulted in again, batch after batch.
    """
    count, kind = sum(t.numel() for t in batch), (batch[0].dtype, batch[0].device)
    if count > piece_length(batch[0]) or not all(is_plain(t) and (t.dtype, t.device) == kind for t in batch):
        return [torch.empty_like(t) for t in batch]
    if kind not in scratch:
        scratch[kind] = torch.empty(piece_length(batch[0]), dtype=kind[0], device=kind[1])
    parts = scratch[kind][:count].split([t.numel() for t in batch])
    return [part.view(t.shape) for part, t in zip(parts, batch, strict=True)]


def restart_(buffers: Sequence[Tensor], pseudo_gradients: Sequence[Tensor], restart: Restart) -> None:
    """Restart in place, `m <- retain m + inject g`; exact zeros for retain = inject = 0, also of a NaN in m."""
    retain, inject = restart.retain, restart.inject
    for m, g in batches(buffers, pseudo_gradients):
        if retain == 0:
            torch._foreach_zero_(m)  # not a product: 0 x inf would keep a NaN alive
        else:
            torch._foreach_mul_(m, retain)
        if inject != 0:
            torch._foreach_add_(m, g, alpha=inject)


# --- pieces -----------------------------------------------------------------------------------------------------------


def batches(*lists: Sequence[Tensor], limit: int | None = None) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield aligned batches over several lists of tensors, each about a piece, or `limit` elements, long in all.

    Large contiguous tensors are cut into flat views; small ones are put together. A DTensor or a transposed view is
    taken whole, and a DTensor by itself: one operation cannot take DTensors and plain tensors together.
    """
    if not lists[0]:
        return
    limit = limit or piece_length(lists[0][0])
    batch: list[Row] = []
    size = 0
    for row in zip(*lists, strict=True):
        for piece in [row] if row[0].numel() <= limit else _pieces(row, limit):
            count, alone = piece[0].numel(), not is_plain(piece[0])
            if batch and (size + count > limit or alone):
                yield _columns(batch)
                batch, size = [], 0
            batch.append(piece)
            size += limit + 1 if alone else count
    yield _columns(batch)


def _columns(rows: Sequence[Row]) -> tuple[list[Tensor], ...]:
    return tuple(map(list, zip(*rows, strict=True)))


def _pieces(row: Row, limit: int) -> Iterator[Row]:
    if not all(is_plain(t) and t.is_contiguous() for t in row):
        yield row
    else:
        yield from zip(*(t.detach().view(-1).split(limit) for t in row), strict=True)


def piece_length(tensor: Tensor) -> int:
    """Return the elements of a piece on a tensor's device."""
    return PIECE_CPU if tensor.device.type == "cpu" else _PIECE_DEVICE


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is no subclass, such as a DTensor."""
    return type(tensor) in _PLAIN


# --- torch's fused kernel ---------------------------------------------------------------------------------------------


def _split(rows: list[Row], update: Update) -> tuple[dict[torch.dtype, list[Row]], list[Row]]:
    """Return, by dtype, the rows that the fused kernel updates to the bits of the plain operations; then the rest."""
    exact = {dtype: fused_is_exact(dtype, update) for dtype in {row[0].dtype for row in rows}}
    bodies: dict[torch.dtype, list[Row]] = {}
    others: list[Row] = []
    for row in rows:
        x, g, m = row
        dtype, numel = x.dtype, x.numel()
        # Written out, for a loop over the three takes longer than the kernel on a small tensor.
        is_dense = (
            exact[dtype]
            and (type(x) in _PLAIN and type(g) in _PLAIN and type(m) in _PLAIN)
            and g.dtype is m.dtype is dtype
            and (x.is_cpu and g.is_cpu and m.is_cpu)
            and (x.is_contiguous() and g.is_contiguous() and m.is_contiguous())
        )
        body = numel // _LANES * _LANES if is_dense else 0
        if body == 0:
            others.append(row)
        elif body == numel:
            bodies.setdefault(dtype, []).append(row)
        else:  # the kernel rounds what fills no vector register in another way
            flat = [t.detach().view(-1) for t in row]
            bodies.setdefault(dtype, []).append(tuple(t[:body] for t in flat))
            others.append(tuple(t[body:] for t in flat))
    return bodies, others


def _fused_sgd_(x: list[Tensor], g: list[Tensor], m: list[Tensor], update: Update) -> None:
    torch._fused_sgd_(
        x,
        g,
        m,
        weight_decay=0.0,
        momentum=update.momentum,
        lr=update.lr,
        dampening=0.0 if update.form == "sum" else update.momentum,
        nesterov=update.nesterov,
        maximize=False,
        is_first_step=update.fresh,
    )


@functools.lru_cache(maxsize=64)  # schedules change lr from step to step
def fused_is_exact(dtype: torch.dtype, update: Update) -> bool:
    """Return whether torch's fused kernel gives the bits of the plain operations here, with these settings.

    The kernel has the sum form, and the EMA form's heavy ball except for a first step. Its dampening is the EMA weight,
    and a first step leaves it out.

    The compiler and the CPU decide whether it fuses multiplications and additions. Unlike machines, and a run resumed
    on another one, must agree in every bit. The faster path is taken only where both paths give equal bits. The
    function is private to torch: without it, or with other arguments, the plain operations do the work.
    """
    if update.step is not None or dtype not in (torch.float32, torch.float64):
        return False
    if update.form == "ema" and (update.nesterov or update.fresh):
        return False
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 257 * _LANES, dtype=dtype, generator=generator)  # several threads share it unevenly
    plain, fused = ([[row] for row in values.clone()] for _ in range(2))
    in_pieces_(plain[0], plain[1], plain[2], update, {})
    try:
        _fused_sgd_(fused[0], fused[1], fused[2], update)
    except (AttributeError, TypeError, RuntimeError):
        return False
    return all(torch.equal(a, b) for (a,), (b,) in zip(plain, fused, strict=True))
