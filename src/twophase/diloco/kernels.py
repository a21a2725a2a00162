"""The outer round of a fragment in two Triton kernels, for accelerators: 11 passes over the parameters of two replicas.

`pseudo_gradient` reads the anchor and every replica and writes g (4 passes for two replicas); `outer_round` reads g,
anchor and buffer and writes anchor, buffer and every replica (7), and takes the inner products and both digests of what
it has in its registers. One launch a parameter, because the replicas' parameters are tensors of their own; no launch
waits for the device.

Imported only where Triton is there (`twophase.diloco.device_sweep`).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pseudo_gradient(
    anchor,
    gradient,
    t0,
    t1,
    t2,
    t3,
    offset,
    end,
    divisor,
    REPLICAS: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write g <- sum over replicas of (a - theta_r), over `divisor` where DIVIDE says so, for one parameter."""
    places = (offset // BLOCK + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (places >= offset) & (places < end)
    a = tl.load(anchor + places, mask=inside, other=0.0)
    at = places - offset
    theta = tl.load(t0 + at, mask=inside, other=0.0)
    # A 16-bit replica began its round at the anchor rounded to its type.
    g = a.to(theta.dtype).to(tl.float32) - theta.to(tl.float32)
    if REPLICAS > 1:
        theta = tl.load(t1 + at, mask=inside, other=0.0)
        g += a.to(theta.dtype).to(tl.float32) - theta.to(tl.float32)
    if REPLICAS > 2:
        theta = tl.load(t2 + at, mask=inside, other=0.0)
        g += a.to(theta.dtype).to(tl.float32) - theta.to(tl.float32)
    if REPLICAS > 3:
        theta = tl.load(t3 + at, mask=inside, other=0.0)
        g += a.to(theta.dtype).to(tl.float32) - theta.to(tl.float32)
    if DIVIDE:
        g = tl.div_rn(g, divisor)
    tl.store(gradient + places, g, mask=inside)


@triton.jit
def outer_round(
    anchor,
    gradient,
    momentum,
    t0,
    t1,
    t2,
    t3,
    products,
    anchor_sums,
    momentum_sums,
    offset,
    end,
    divisor,
    along_g,
    along_m,
    along_new,
    mix_m,
    mix_g,
    retain,
    inject,
    MOMENTUM: tl.constexpr,
    FRESH: tl.constexpr,
    RESTART: tl.constexpr,
    OPPOSED: tl.constexpr,
    DROPS: tl.constexpr,
    ALONG_G: tl.constexpr,
    ALONG_M: tl.constexpr,
    ALONG_NEW: tl.constexpr,
    KEEPS: tl.constexpr,
    REPLICAS: tl.constexpr,
    DIVIDE: tl.constexpr,
    PROVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take the outer step for the elements of one parameter, and all that follows it.

    With m_0 the buffer, restarted where RESTART is 1:

        m <- mix_m m_0 + mix_g g,   x <- x - along_g g - along_m m_0 - along_new m,   theta_r <- x

    and m restarted where RESTART is 2. A restart is `m <- retain m + inject g`; DROPS says that retain is 0, KEEPS that
    mix_m is not, and ALONG_... which terms there are.
    """
    places = (offset // BLOCK + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (places >= offset) & (places < end)
    x = tl.load(anchor + places, mask=inside, other=0.0)
    g = tl.load(gradient + places, mask=inside, other=0.0)
    if DIVIDE:
        g = tl.div_rn(g, divisor)
        tl.store(gradient + places, g, mask=inside)
    m = tl.zeros_like(g)
    if MOMENTUM and not FRESH:
        m = tl.load(momentum + places, mask=inside, other=0.0)
    _store_products(products, g, m)
    if RESTART == 1:
        m = _restarted(m, g, retain, inject, OPPOSED, DROPS)
    # A factor of 0 takes no part: 0 times a NaN would keep it alive.
    update = tl.zeros_like(g)
    if ALONG_G:
        update += along_g * g
    if MOMENTUM:
        if ALONG_M:
            update += along_m * m
        m = mix_m * m + mix_g * g if KEEPS else mix_g * g
        if ALONG_NEW:
            update += along_new * m
    x -= update
    if RESTART == 2:
        m = _restarted(m, g, retain, inject, OPPOSED, DROPS)
    tl.store(anchor + places, x, mask=inside)
    at = places - offset
    if REPLICAS > 0:
        tl.store(t0 + at, x.to(t0.dtype.element_ty), mask=inside)
    if REPLICAS > 1:
        tl.store(t1 + at, x.to(t1.dtype.element_ty), mask=inside)
    if REPLICAS > 2:
        tl.store(t2 + at, x.to(t2.dtype.element_ty), mask=inside)
    if REPLICAS > 3:
        tl.store(t3 + at, x.to(t3.dtype.element_ty), mask=inside)
    # All words of a block lie in one piece of 2^15 words (`twophase.diloco.flat`).
    word = (offset // BLOCK + tl.program_id(0)).to(tl.int64) * (BLOCK // 2)
    tl.atomic_add(anchor_sums + word // 32768, _digest(tl.where(inside, x, 0.0), word, BLOCK))
    if MOMENTUM:
        tl.store(momentum + places, m, mask=inside)
        if PROVE:
            tl.atomic_add(momentum_sums + word // 32768, _digest(tl.where(inside, m, 0.0), word, BLOCK))


@triton.jit
def _store_products(products, g, m):
    """Store this program's <g, g>, <m, m> and <g, m>, summed in float64."""
    row = products + 3 * tl.program_id(0)
    wide_g, wide_m = g.to(tl.float64), m.to(tl.float64)
    tl.store(row, tl.sum(wide_g * wide_g, 0))
    tl.store(row + 1, tl.sum(wide_m * wide_m, 0))
    tl.store(row + 2, tl.sum(wide_g * wide_m, 0))


@triton.jit
def _restarted(m, g, retain, inject, OPPOSED: tl.constexpr, DROPS: tl.constexpr):
    new = inject * g if DROPS else retain * m + inject * g  # not 0 m, which would keep a NaN alive
    if OPPOSED:
        new = tl.where(((m < 0) & (g > 0)) | ((m > 0) & (g < 0)), new, m)
    return new


@triton.jit
def _digest(values, word, BLOCK: tl.constexpr):
    """The weighted sum of a block's words of eight bytes, as `twophase.diloco.flat` defines it."""
    low, high = tl.split(tl.reshape(values.to(tl.uint32, bitcast=True), (BLOCK // 2, 2)))
    words = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    place = (word % 32768 + tl.arange(0, BLOCK // 2)).to(tl.uint64)
    weights = (place * 0x9E3779B97F4A7C15) | 1
    return tl.sum(((words ^ (words >> 29)) * weights).to(tl.int64, bitcast=True), 0)


@triton.jit
def inner_products(
    gradient,
    momentum,
    products,
    numel,
    divisor,
    MOMENTUM: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take <g, g>, <m, m> and <g, m> of two flat vectors, g divided first and written back where DIVIDE says so."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < numel
    g = tl.load(gradient + places, mask=inside, other=0.0)
    if DIVIDE:
        g = tl.div_rn(g, divisor)
        tl.store(gradient + places, g, mask=inside)
    m = tl.zeros_like(g)
    if MOMENTUM:
        m = tl.load(momentum + places, mask=inside, other=0.0)
    _store_products(products, g, m)
