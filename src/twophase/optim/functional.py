"""The outer update on lists of tensors: in place, in small pieces, without touching the caller's gradients.

An outer step is bound by memory traffic. Whole-tensor operations would read and write each tensor several times from
main memory and, for Nesterov, need a scratch tensor as large as the model. Everything here is elementwise, so it is
done piece by piece instead: a piece stays in cache between the operations and the scratch is one piece long. The
operations on each element and their order are those of `torch.optim.SGD`, which keeps the result equal bit for bit.

On a CPU torch's own fused kernel needs one sweep instead, and takes the tensors for which it gives the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twophase.policies.base import Restart, Step
from twophase.rule import Form

_PIECE_CPU = 1 << 17  # elements: four float32 streams of a piece are 2 MiB, about what a second-level cache holds
_PIECE_FUSED = 1 << 18  # elements: of three streams that one operation has read; calls cost more than the cache gives
_PIECE_DOTS = 1 << 19  # elements: of inner products over many, which are read once; a longer sum rounds more
_MANY = 1 << 20  # elements
_PIECE_DEVICE = 1 << 24  # elements: enough to fill an accelerator, and a scratch of 64 MiB
_PLAIN = (Tensor, torch.nn.Parameter)
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
        for x, g in _batches(params, pseudo_gradients):
            _step_without_momentum_(x, g, lr, step)
        if restart is not None:
            restart_(list(buffers), list(pseudo_gradients), restart.retain, restart.inject, opposed=restart.opposed)
        return
    rule = _Rule(lr, momentum, nesterov, form, fresh, step)
    if step is not None:
        rule = _simplified(rule, unrounded=all(x.dtype == m.dtype for x, m in zip(params, buffers, strict=True)))
    rows = list(zip(params, pseudo_gradients, buffers, strict=True))
    if rule.step is None:
        rows = _fused_(rows, rule, restart)
    if rows:
        _in_pieces_(rows, rule)
        if restart is not None:
            _, g, m = map(list, zip(*rows, strict=True))
            restart_(m, g, restart.retain, restart.inject, opposed=restart.opposed)


@dataclass(frozen=True, slots=True)
class PartSweep:
    """A group's tensors as flat vectors, to be gone through once, part by part, while each part is in the cache.

    Args:
        x: parameters, (n,).
        g: pseudo-gradients, (n,).
        m: buffers, (n,); None at momentum 0.
        buffers: `m` in views of the parameters' shapes, in their order.
        parts: yields start and stop of each part, in order, as soon as its pseudo-gradient is there.
        after: called with start and stop of each part when its x and m are those of the next round.
        measure: whether the inner products are taken on the way, for a policy that does not decide by them.
        dense: whether the tensors lie without room between them.
    """

    x: Tensor
    g: Tensor
    m: Tensor | None
    buffers: Sequence[Tensor]
    parts: Callable[[], Iterator[tuple[int, int]]]
    after: Callable[[int, int], None]
    measure: bool
    dense: bool

    def dots(self, *, fresh: bool, angle: bool) -> Dots | None:
        """The inner products, where one operation on the vectors has the bits of `dots` of the tensors; else None."""
        if not self.dense or len(self.g) > _limit(self.g):
            return None
        if fresh or self.m is None:
            return float(torch.dot(self.g, self.g)), 0.0, 0.0
        gg, mm, *gm = map(float, _dots(self.g, self.m, angle))
        return gg, mm, gm[0] if gm else math.nan

    def run(self, update: Update) -> Dots | None:
        """Take the update, with the bits of `outer_step_` and `restart_`.

        Returns:
            `<g, g>`, `<m, m>` and `<g, m>` before all of it, where the sweep measures.
        """
        rule = _simplified(update.rule, unrounded=True)
        fused = rule.step is None and self.x.is_cpu and _knows_fused(rule) and _fused_is_exact(self.x.dtype, rule)
        remembers = self.m is not None and not update.fresh
        scratch: Scratch = {}
        products: list[Tensor] = []
        for start, stop in self.parts():
            x, g = self.x[start:stop], self.g[start:stop]
            if self.measure and not remembers:
                products.append(torch.dot(g, g))
            if self.m is None:
                _step_without_momentum_([x], [g], update.lr, update.step)
                self.after(start, stop)
                continue
            m = self.m[start:stop]
            if self.measure and remembers:
                products += _dots(g, m, angle=True)
            if update.before is not None:
                if update.fresh:
                    m.zero_()
                restart_([m], [g], update.before.retain, update.before.inject, opposed=update.before.opposed)
            if fused:
                _fused_sgd_([(x, g, m)], rule)
            else:
                _in_pieces_([(x, g, m)], rule, scratch)
            if update.after is not None:
                restart_([m], [g], update.after.retain, update.after.inject, opposed=update.after.opposed)
            self.after(start, stop)
        if not self.measure:
            return None
        totals = torch.stack(products).double().view(-1, 3 if remembers else 1).sum(dim=0).tolist()
        gg, mm, gm = totals if remembers else (totals[0], 0.0, 0.0)
        return gg, mm, gm


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
    def rule(self) -> _Rule:
        """What the update itself is told, after a restart before it."""
        fresh = self.fresh and self.before is None
        return _Rule(self.lr, self.momentum, self.nesterov, self.form, fresh, self.step)

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


def _step_without_momentum_(x: list[Tensor], g: list[Tensor], lr: float, step: Step | None) -> None:
    """`x <- x - lr g`: m is g itself in both forms, so there is nothing to remember."""
    torch._foreach_add_(x, g, alpha=-lr if step is None else -step.along_g)


def _simplified(rule: _Rule, *, unrounded: bool) -> _Rule:
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
        return _Rule(step.along_g, retained, False, "sum", rule.fresh)
    # Nothing of the buffer is read.
    return _Rule(step.along_g, rule.momentum, False, "sum", fresh=True) if unrounded else rule


Row = tuple[Tensor, ...]
"""Parameter x, pseudo-gradient g and buffer m."""
Scratch = dict[tuple[torch.dtype, torch.device], Tensor]
"""One piece of uninitialised memory of each kind, which the batches of a step share."""


@dataclass(frozen=True, slots=True)
class _Rule:
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


def _in_pieces_(rows: Sequence[Row], rule: _Rule, scratch: Scratch | None = None) -> None:
    """The update in plain operations, on tensors of any kind."""
    momentum, weight = rule.mixing
    scratch = {} if scratch is None else scratch
    for x, g, m in _batches(*zip(*rows, strict=True)):
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


def _fused_(rows: list[Row], rule: _Rule, restart: Restart | None = None) -> list[Row]:
    """Update in one sweep what torch's fused kernel updates to the same bits; return what is left."""
    if not _knows_fused(rule):
        return rows
    left: list[Row] = []
    bodies: dict[torch.dtype, list[Row]] = {}
    exact: dict[torch.dtype, bool] = {}
    for row in rows:
        x, g, m = row
        dtype, numel = x.dtype, x.numel()
        if numel == 0:
            continue
        if dtype not in exact:
            exact[dtype] = dtype in (torch.float32, torch.float64) and _fused_is_exact(dtype, rule)
        if not (exact[dtype] and _is_dense(x, dtype) and _is_dense(g, dtype) and _is_dense(m, dtype)):
            left.append(row)
            continue
        body = numel // _LANES * _LANES
        if body == numel:
            bodies.setdefault(dtype, []).append(row)
            continue
        flat = [t.detach().view(-1) for t in row]
        if body:
            bodies.setdefault(dtype, []).append(tuple(t[:body] for t in flat))
        # The kernel rounds what fills no vector register in another way.
        left.append(tuple(t[body:] for t in flat))
    for group in bodies.values():
        if restart is None:
            _fused_sgd_(group, rule)
            continue
        for x, g, m in _batches(*zip(*group, strict=True), limit=_PIECE_FUSED):
            _fused_sgd_(list(zip(x, g, m, strict=True)), rule)
            restart_(m, g, restart.retain, restart.inject, opposed=restart.opposed)
    return left


def _knows_fused(rule: _Rule) -> bool:
    """Whether torch's fused kernel has the rule: the sum form, and the EMA form's heavy ball but for a first step.

    That one is its dampening, which it leaves out of a first step.
    """
    return rule.form == "sum" or not (rule.nesterov or rule.fresh)


def _fused_sgd_(rows: Sequence[Row], rule: _Rule) -> None:
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
def _fused_is_exact(dtype: torch.dtype, rule: _Rule) -> bool:
    """Whether torch's fused kernel gives the bits of the plain operations here, with these very settings.

    Whether it fuses multiplications and additions alike is up to the compiler and the CPU's instructions. Processes on
    unlike machines, and a run resumed on another one, must agree in every bit, so the faster path is taken only where
    the path cannot be told from the result. The function is a private one of torch's: without it, or when its arguments
    have changed, the plain operations do the work.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 257 * _LANES, dtype=dtype, generator=generator)  # several threads share it unevenly
    plain, fused = (tuple(values.clone()) for _ in range(2))
    _in_pieces_([plain], rule)
    try:
        _fused_sgd_([fused], rule)
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
    if count > _limit(batch[0]) or not all(_is_plain(t) and (t.dtype, t.device) == kind for t in batch):
        return [torch.empty_like(t) for t in batch]
    if kind not in scratch:
        scratch[kind] = torch.empty(_limit(batch[0]), dtype=kind[0], device=kind[1])
    parts = scratch[kind][:count].split([t.numel() for t in batch])
    return [part.view(t.shape) for part, t in zip(parts, batch, strict=True)]


def restart_(
    buffers: list[Tensor], pseudo_gradients: list[Tensor], retain: float, inject: float, *, opposed: bool = False
) -> None:
    """`m <- retain m + inject g` in place; exact zeros for retain = inject = 0, whatever m holds.

    With `opposed` only in the coordinates in which m and g have opposite signs (a NaN has none).
    """
    for m, g in _batches(buffers, pseudo_gradients):
        if opposed:
            for ours, theirs in zip(m, g, strict=True):
                there = (ours < 0) & (theirs > 0) | (ours > 0) & (theirs < 0)  # a product may underflow
                new = retain * ours if retain != 0 else torch.zeros_like(ours)  # 0 x inf would be a NaN
                ours.copy_(torch.where(there, new + inject * theirs if inject != 0 else new, ours))
            continue
        if retain == 0:
            torch._foreach_zero_(m)  # not a product: 0 x inf would keep a NaN alive
        else:
            torch._foreach_mul_(m, retain)
        if inject != 0:
            torch._foreach_add_(m, g, alpha=inject)


Dots = tuple[float, float, float]
"""`<g, g>`, `<m, m>` and `<g, m>` over a group of parameters."""


@dataclass(frozen=True, slots=True)
class Angles:
    """Norms of pseudo-gradient and buffer and the cosine between them (0 when either vanishes)."""

    pseudo_gradient_norm: float
    buffer_norm: float
    cosine: float

    @classmethod
    def of(cls, dots: Dots) -> Angles:
        """From the inner products."""
        gg, mm, gm = dots
        scale = gg**0.5 * mm**0.5  # the product of the squares may over- or underflow
        cosine = gm / scale if scale != 0 else 0.0
        if abs(cosine) > 1:  # by rounding; a NaN stays a NaN, for it is a divergence that the report must show
            cosine = math.copysign(1.0, cosine)
        return cls(gg**0.5, mm**0.5, cosine)


def dots(pseudo_gradients: Sequence[Tensor], buffers: Sequence[Tensor], *, angle: bool = True) -> Dots:
    """`<g, g>`, `<m, m>` and `<g, m>` over all tensors together, accumulated in float64.

    An empty `buffers` counts as m = 0. Without `angle` the last one is not computed where it costs time, and is a NaN.
    """
    first = pseudo_gradients[0].device
    limit = _limit(pseudo_gradients[0])
    if first.type == "cpu" and sum(g.numel() for g in pseudo_gradients) > _MANY:
        limit = _PIECE_DOTS
    batches = _batches(pseudo_gradients, buffers or pseudo_gradients, limit=limit)
    if first.type == "cpu" and all(
        t.device == first for t in pseudo_gradients
    ):  # joining small tensors is cheaper than an operation on each
        found = [_dots(_joined(g), _joined(m), angle) for g, m in batches]
    else:  # there it would only be two more passes over the memory
        found = [_dots(_joined([a]), _joined([b]), angle) for g, m in batches for a, b in zip(g, m, strict=True)]
    parts = torch.stack(
        [dot.to(first) for three in found for dot in three]
    ).double()  # a batch is short, all of them are not
    gg, mm, *gm = parts.view(-1, 3 if angle else 2).sum(dim=0).tolist()  # one transfer to the host
    if not buffers:
        return gg, 0.0, 0.0
    return gg, mm, gm[0] if gm else math.nan


def _joined(tensors: list[Tensor]) -> Tensor:
    """The tensors of a batch as one vector, in a type wide enough to sum in."""
    # |z|^2 is the sum of the squares of both parts, and so is torch's step on a complex tensor one on its parts.
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    wide = [t.float() if t.dtype.itemsize < 4 else t for t in real]
    return torch.cat([t.reshape(-1) for t in wide]) if len(wide) > 1 else wide[0]


def _dots(g: Tensor, m: Tensor, angle: bool) -> tuple[Tensor, ...]:
    """<g, g>, <m, m> and, with `angle`, <g, m> of a batch."""
    if _is_plain(g):
        g, m = g.reshape(-1), m.reshape(-1).to(g.dtype)
    pairs = ((g, g), (m, m), (g, m))[: 3 if angle else 2]
    if _is_plain(g):
        return tuple(torch.dot(a, b) for a, b in pairs)
    totals = [(a * b).sum(dtype=torch.float64) for a, b in pairs]
    # A DTensor's sum is partial on each rank; full_tensor() adds the parts up, the same on every rank.
    return tuple(total.full_tensor() if hasattr(total, "full_tensor") else total for total in totals)  # type: ignore[operator]


def _is_dense(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor is a plain one of a dtype, without holes, on the CPU."""
    return type(tensor) in _PLAIN and tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN


def _batches(*lists: Sequence[Tensor], limit: int | None = None) -> Iterator[tuple[list[Tensor], ...]]:
    """Aligned batches over several lists of tensors, each batch about a piece, or `limit` elements, long in all.

    Large contiguous tensors are cut into flat views; small ones are put together. A tensor that is no plain
    contiguous one (a DTensor, a transposed view) is taken whole, and a DTensor by itself: one operation cannot take
    DTensors and plain tensors together.
    """
    if not lists[0]:
        return
    limit = limit or _limit(lists[0][0])
    batch: list[tuple[Tensor, ...]] = []
    size = 0
    for row in zip(*lists, strict=True):
        for piece in _pieces(row, limit):
            alone = not _is_plain(piece[0])
            if batch and (size + piece[0].numel() > limit or alone):
                yield tuple(map(list, zip(*batch, strict=True)))
                batch, size = [], 0
            batch.append(piece)
            size += limit + 1 if alone else piece[0].numel()
    yield tuple(map(list, zip(*batch, strict=True)))


def _limit(tensor: Tensor) -> int:
    return _PIECE_CPU if tensor.device.type == "cpu" else _PIECE_DEVICE


def _pieces(row: tuple[Tensor, ...], limit: int) -> Iterator[tuple[Tensor, ...]]:
    if row[0].numel() <= limit or not all(_is_plain(t) and t.is_contiguous() for t in row):
        yield row
    else:
        yield from zip(*(t.detach().view(-1).split(limit) for t in row), strict=True)
