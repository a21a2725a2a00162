"""The outer update on lists of tensors: in place, in small pieces, without touching the caller's gradients.

An outer step is bound by memory traffic. Whole-tensor operations would read and write each tensor several times from
main memory and, for Nesterov, need a scratch tensor as large as the model. Everything here is elementwise, so it is
done piece by piece instead: a piece stays in cache between the operations and the scratch is one piece long. The
operations on each element and their order are those of `torch.optim.SGD`, which keeps the result equal bit for bit.

On a CPU torch's own fused kernel needs one sweep instead, and takes the tensors for which it gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from twophase.optim.pieces import batches, is_dense, is_plain, piece_length
from twophase.optim.products import Dots
from twophase.policies.base import Restart, Step
from twophase.rule import Form

_PIECE_FUSED = 1 << 18  # elements: of three streams that one operation has read; calls cost more than the cache gives
_LANES = 16  # elements: a multiple of every vector register's length


def buffer_dtype(param: Tensor) -> torch.dtype:
    """The dtype of a momentum buffer: float32 for 16-bit parameters, otherwise the parameter's own."""
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


def outer_step_(
    params: Sequence[Tensor],
    pseudo_gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    form: Form,
    fresh: bool = False,
    step: Step | None = None,
    restart: Restart | None = None,
) -> None:
    """One outer update, in place on `params` and `buffers`.

    `m <- momentum m + w g` with w = 1 (sum form) or 1 - momentum (EMA form); then `x <- x - lr m` (heavy ball) or
    `x <- x - lr (w g + momentum m)` (Nesterov). The last is the EMA form's `(1 + momentum) m - momentum m_old` without
    `m_old`: substitute `momentum m_old = m - w g`.

    Args:
        params: x, any shapes, floating point.
        pseudo_gradients: g, shapes of `params`; read only.
        buffers: m, shapes of `params`, dtype `buffer_dtype`; ignored (and may be empty) when momentum is 0.
        lr: outer learning rate in the named form.
        momentum: in [0, 1).
        nesterov: whether to look ahead.
        form: `"sum"` or `"ema"`.
        fresh: the buffers hold nothing yet and count as 0; they are written without being read.
        step: the update in the place of the rule's own; `lr` and `nesterov` are not used then.
        restart: of the buffers, after the update of each piece, while it is in the cache.

    Source: paper section 2 and appendix A; theory notes R2 and R3.
    """
    if not params:
        return
    if momentum == 0:
        for x, g in batches(params, pseudo_gradients):
            step_without_momentum_(x, g, lr, step)
        if restart is not None:
            restart_(list(buffers), list(pseudo_gradients), restart.retain, restart.inject, opposed=restart.opposed)
        return
    rule = UpdateRule(lr, momentum, nesterov, form, fresh, step)
    if step is not None:
        rule = simplified(rule, unrounded=all(x.dtype == m.dtype for x, m in zip(params, buffers, strict=True)))
    rows = list(zip(params, pseudo_gradients, buffers, strict=True))
    if rule.step is None:
        rows = _fused_(rows, rule, restart)
    if rows:
        in_pieces_(rows, rule)
        if restart is not None:
            _, g, m = map(list, zip(*rows, strict=True))
            restart_(m, g, restart.retain, restart.inject, opposed=restart.opposed)


@dataclass(frozen=True, slots=True)
class Update:
    """A group's round: its rule, the step in the rule's place, and the restart.

    Args:
        lr: outer learning rate in the named form.
        momentum: in [0, 1).
        nesterov: whether to look ahead.
        form: `"sum"` or `"ema"`.
        fresh: the buffers hold nothing yet and count as 0.
        step: the update in the place of the rule's own.
        restart: what happens to the buffers before or after g is mixed in.
    """

    lr: float
    momentum: float
    nesterov: bool
    form: Form
    fresh: bool
    step: Step | None
    restart: Restart | None

    @property
    def before(self) -> Restart | None:
        """The restart before the mixing; one of buffers that hold nothing, and are given nothing, is none."""
        restart = self.restart
        if restart is None or not restart.before or (self.fresh and restart.inject == 0):
            return None
        return restart

    @property
    def after(self) -> Restart | None:
        """The restart after the update."""
        return None if self.restart is None or self.restart.before else self.restart

    @property
    def rule(self) -> UpdateRule:
        """What the update itself is told, after a restart before it."""
        fresh = self.fresh and self.before is None
        return UpdateRule(self.lr, self.momentum, self.nesterov, self.form, fresh, self.step)

    def coefficients(self) -> tuple[float, float, float, float, float]:
        """A, B, C, c and d of `m <- c m_0 + d g` and `x <- x - A g - B m_0 - C m`, m_0 after a restart before it."""
        c, d = self.rule.mixing
        if self.step is not None:
            return self.step.along_g, self.step.along_m, 0.0, c, d
        if self.momentum == 0:
            return self.lr, 0.0, 0.0, 0.0, 1.0
        if self.nesterov:
            return self.lr * d, 0.0, self.lr * self.momentum, c, d
        return 0.0, 0.0, self.lr, c, d


class Sweep(Protocol):
    """A group's parameters, pseudo-gradients and buffers as flat vectors, stepped and restarted in one go."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """The buffers in views of the parameters' shapes, in their order."""
        ...

    @property
    def measure(self) -> bool:
        """Whether `run` takes the inner products on its way."""
        ...

    def dots(self, *, fresh: bool, angle: bool) -> Dots | None:
        """The inner products before the round; None where the tensors themselves must be asked."""
        ...

    def run(self, update: Update) -> Dots | None:
        """Take a round; the inner products before it, where it measures."""
        ...


def step_without_momentum_(x: list[Tensor], g: list[Tensor], lr: float, step: Step | None) -> None:
    """`x <- x - lr g`: m is g itself in both forms, so there is nothing to remember."""
    torch._foreach_add_(x, g, alpha=-lr if step is None else -step.along_g)


def simplified(rule: UpdateRule, *, unrounded: bool) -> UpdateRule:
    """A rule that takes the same update with fewer operations, where a policy's step is one of momentum SGD.

    Args:
        rule: the rule.
        unrounded: the parameters have the buffers' dtype, so both ways round alike.
    """
    step = rule.step
    if step is None or step.mix is None or step.mix[1] != 1 or step.along_m != step.along_g * step.mix[0]:
        return rule
    retained = step.mix[0]
    if retained != 0:  # heavy ball with another learning rate and momentum
        return UpdateRule(step.along_g, retained, False, "sum", rule.fresh)
    # Nothing of the buffer is read.
    return UpdateRule(step.along_g, rule.momentum, False, "sum", fresh=True) if unrounded else rule


Row = tuple[Tensor, ...]
"""Parameter x, pseudo-gradient g and buffer m."""
Scratch = dict[tuple[torch.dtype, torch.device], Tensor]
"""One piece of uninitialised memory of each kind, which the batches of a step share."""


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """What `outer_step_` is told."""

    lr: float
    momentum: float
    nesterov: bool
    form: Form
    fresh: bool
    step: Step | None = None

    @property
    def mixing(self) -> tuple[float, float]:
        """The c and d of `m <- c m + d g`."""
        if self.step is not None and self.step.mix is not None:
            return self.step.mix
        return self.momentum, 1.0 if self.form == "sum" else 1 - self.momentum


def in_pieces_(rows: Sequence[Row], rule: UpdateRule, scratch: Scratch | None = None) -> None:
    """The update in plain operations, on tensors of any kind."""
    momentum, weight = rule.mixing
    scratch = {} if scratch is None else scratch
    for x, g, m in batches(*zip(*rows, strict=True)):
        if rule.step is not None:
            _take_(x, g, m, (rule.step.along_g, 0.0 if rule.fresh else rule.step.along_m), scratch)
        if rule.fresh or momentum == 0:
            _copy_(m, g)
            if weight != 1:
                torch._foreach_mul_(m, weight)
        else:
            torch._foreach_mul_(m, momentum)
            torch._foreach_add_(m, g, alpha=weight)
        if rule.step is not None:
            continue
        step = m
        if rule.nesterov:
            step = _scratch_like(m, scratch)
            if rule.form == "sum":
                _add(g, m, momentum, step)
            else:
                _copy_(step, m)
                torch._foreach_mul_(step, momentum)
                torch._foreach_add_(step, g, alpha=weight)
        torch._foreach_add_(x, step, alpha=-rule.lr)


def _take_(
    x: list[Tensor],
    g: list[Tensor],
    m: list[Tensor],
    step: tuple[float, float],
    scratch: Scratch,
) -> None:
    """`x <- x - a g - b m`; 16-bit x is rounded once, unless b = 0, which has the bits of a momentum-free step."""
    along_g, along_m = step
    if along_m == 0 or x[0].dtype.itemsize >= 4:
        torch._foreach_add_(x, g, alpha=-along_g)
        if along_m != 0:
            torch._foreach_add_(x, m, alpha=-along_m)
        return
    if along_g == 0:
        torch._foreach_add_(x, m, alpha=-along_m)
        return
    whole = _scratch_like(m, scratch)
    _copy_(whole, m)
    torch._foreach_mul_(whole, along_m)
    torch._foreach_add_(whole, g, alpha=along_g)
    torch._foreach_add_(x, whole, alpha=-1.0)


def _fused_(rows: list[Row], rule: UpdateRule, restart: Restart | None = None) -> list[Row]:
    """Update in one sweep what torch's fused kernel updates to the same bits; return the others."""
    if not has_fused(rule):
        return rows
    others: list[Row] = []
    bodies: dict[torch.dtype, list[Row]] = {}
    exact: dict[torch.dtype, bool] = {}
    for row in rows:
        x, g, m = row
        dtype, numel = x.dtype, x.numel()
        if numel == 0:
            continue
        if dtype not in exact:
            exact[dtype] = dtype in (torch.float32, torch.float64) and fused_is_exact(dtype, rule)
        if not (exact[dtype] and is_dense(x, dtype) and is_dense(g, dtype) and is_dense(m, dtype)):
            others.append(row)
            continue
        body = numel // _LANES * _LANES
        if body == numel:
            bodies.setdefault(dtype, []).append(row)
            continue
        flat = [t.detach().view(-1) for t in row]
        if body:
            bodies.setdefault(dtype, []).append(tuple(t[:body] for t in flat))
        # The kernel rounds what fills no vector register in another way.
        others.append(tuple(t[body:] for t in flat))
    for group in bodies.values():
        if restart is None:
            fused_sgd_(group, rule)
            continue
        for x, g, m in batches(*zip(*group, strict=True), limit=_PIECE_FUSED):
            fused_sgd_(list(zip(x, g, m, strict=True)), rule)
            restart_(m, g, restart.retain, restart.inject, opposed=restart.opposed)
    return others


def has_fused(rule: UpdateRule) -> bool:
    """Whether torch's fused kernel has the rule: the sum form, and the EMA form's heavy ball but for a first step.

    That one is its dampening, which it leaves out of a first step.
    """
    return rule.form == "sum" or not (rule.nesterov or rule.fresh)


def fused_sgd_(rows: Sequence[Row], rule: UpdateRule) -> None:
    """Take the update by torch's fused kernel."""
    x, g, m = zip(*rows, strict=True)
    torch._fused_sgd_(
        list(x),
        list(g),
        list(m),
        weight_decay=0.0,
        momentum=rule.momentum,
        lr=rule.lr,
        dampening=0.0 if rule.form == "sum" else rule.momentum,
        nesterov=rule.nesterov,
        maximize=False,
        is_first_step=rule.fresh,
    )


@functools.lru_cache(maxsize=64)  # schedules change lr from step to step
def fused_is_exact(dtype: torch.dtype, rule: UpdateRule) -> bool:
    """Whether torch's fused kernel gives the bits of the plain operations here, with these very settings.

    Whether it fuses multiplications and additions alike is up to the compiler and the CPU's instructions. Processes on
    unlike machines, and a run resumed on another one, must agree in every bit, so the faster path is taken only where
    the path cannot be told from the result. The function is a private one of torch's: without it, or when its arguments
    have changed, the plain operations do the work.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 257 * _LANES, dtype=dtype, generator=generator)  # several threads share it unevenly
    plain, fused = (tuple(values.clone()) for _ in range(2))
    in_pieces_([plain], rule)
    try:
        fused_sgd_([fused], rule)
    except (AttributeError, TypeError, RuntimeError):
        return False
    return all(map(torch.equal, plain, fused))


def _add(a: list[Tensor], b: list[Tensor], alpha: float, out: list[Tensor]) -> None:
    for first, second, target in zip(a, b, out, strict=True):
        torch.add(first, second, alpha=alpha, out=target)  # a copy and a sum in one sweep; there is no foreach form


def _copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)  # one by one: DTensor has no foreach copy


def _scratch_like(batch: list[Tensor], scratch: Scratch) -> list[Tensor]:
    """Uninitialised tensors of a batch's shapes, cut from one piece that all batches of a step share.

    A fresh allocation for each batch would be given back to the system and faulted in again, batch after batch.
    """
    count, kind = sum(t.numel() for t in batch), (batch[0].dtype, batch[0].device)
    if count > piece_length(batch[0]) or not all(is_plain(t) and (t.dtype, t.device) == kind for t in batch):
        return [torch.empty_like(t) for t in batch]
    if kind not in scratch:
        scratch[kind] = torch.empty(piece_length(batch[0]), dtype=kind[0], device=kind[1])
    parts = scratch[kind][:count].split([t.numel() for t in batch])
    return [part.view(t.shape) for part, t in zip(parts, batch, strict=True)]


def restart_(
    buffers: list[Tensor], pseudo_gradients: list[Tensor], retain: float, inject: float, *, opposed: bool = False
) -> None:
    """`m <- retain m + inject g` in place; exact zeros for retain = inject = 0, whatever m holds.

    With `opposed` only in the coordinates in which m and g have opposite signs (a NaN has none).
    """
    for m, g in batches(buffers, pseudo_gradients):
        if opposed:
            for buffer, gradient in zip(m, g, strict=True):
                opposite = (buffer < 0) & (gradient > 0) | (buffer > 0) & (gradient < 0)  # a product may underflow
                new = retain * buffer if retain != 0 else torch.zeros_like(buffer)  # 0 x inf would be a NaN
                buffer.copy_(torch.where(opposite, new + inject * gradient if inject != 0 else new, buffer))
            continue
        if retain == 0:
            torch._foreach_zero_(m)  # not a product: 0 x inf would keep a NaN alive
        else:
            torch._foreach_mul_(m, retain)
        if inject != 0:
            torch._foreach_add_(m, g, alpha=inject)
