"""The outer round of a fragment in two Triton kernels, for accelerators: 11 passes over the parameters of two replicas.

`pseudo_gradient` reads the anchor and every replica and writes g (4 passes for two replicas). `outer_round` reads g,
anchor and buffer and writes anchor, buffer and every replica (7). It takes the inner products and both digests from its
registers. No launch waits for the device.

The replicas' parameters are separate tensors; a launch takes all of a type by two tables. `of_program`, (programs, 2)
int32, names a row of `slots` and a block. `slots`, (parameters, 2 + REPLICAS) int64, has begin and end of a parameter
in the flat vectors, and its address in each replica.

Imported only where Triton is installed (`twophase.diloco.device_sweep`).
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""The kernels' names of the types that replicas may have."""


@triton.jit
def pseudo_gradient(
    anchor,
    gradient,
    of_program,
    slots,
    divisor,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    REPLICAS: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write g <- sum over replicas of (a - theta_r), over `divisor` where DIVIDE says so."""
    row, _, index, within, inside = _elements(of_program, slots, ALIGNED, REPLICAS, BLOCK)
    a = tl.load(anchor + index, mask=inside, other=0.0)
    began = a.to(TYPE).to(tl.float32)  # a 16-bit replica began its round at the anchor rounded to its type
    g = tl.zeros_like(a)
    for number in tl.static_range(REPLICAS):
        theta = tl.load(_theta(row, number, TYPE, ALIGNED) + within, mask=inside, other=0.0)
        g += began - theta.to(tl.float32)
    if DIVIDE:
        g = tl.div_rn(g, divisor)
    tl.store(gradient + index, g, mask=inside)


@triton.jit
def outer_round(
    anchor,
    gradient,
    momentum,
    products,
    anchor_sums,
    momentum_sums,
    of_program,
    slots,
    divisor,
    along_g,
    along_m,
    along_new,
    mix_m,
    mix_g,
    retain,
    inject,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    FRESH: tl.constexpr,
    RESTART: tl.constexpr,
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
    """Take the outer step for the elements of the table's parameters, and all that follows it.

    With m_0 the buffer, restarted where RESTART is 1:

        m <- mix_m m_0 + mix_g g,   x <- x - along_g g - along_m m_0 - along_new m,   theta_r <- x

    and m restarted where RESTART is 2. A restart is `m <- retain m + inject g`; DROPS says that retain is 0, KEEPS that
    mix_m is not, and ALONG_... which terms there are.
    """
    row, block, index, within, inside = _elements(of_program, slots, ALIGNED, REPLICAS, BLOCK)
    x = tl.load(anchor + index, mask=inside, other=0.0)
    g = tl.load(gradient + index, mask=inside, other=0.0)
    if DIVIDE:
        g = tl.div_rn(g, divisor)
        tl.store(gradient + index, g, mask=inside)
    m = tl.zeros_like(g)
    if MOMENTUM and not FRESH:
        m = tl.load(momentum + index, mask=inside, other=0.0)
    _store_products(products, g, m)
    if RESTART == 1:
        m = _restarted(m, g, retain, inject, DROPS)
    # A term with factor 0 is left out: 0 times NaN is NaN.
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
        m = _restarted(m, g, retain, inject, DROPS)
    tl.store(anchor + index, x, mask=inside)
    for number in tl.static_range(REPLICAS):
        tl.store(_theta(row, number, TYPE, ALIGNED) + within, x.to(TYPE), mask=inside)
    # All words of a block lie in one piece of 2^15 words (`twophase.diloco.flat`).
    word = block * (BLOCK // 2)
    tl.atomic_add(anchor_sums + word // 32768, _digest(tl.where(inside, x, 0.0), word, BLOCK))
    if MOMENTUM:
        tl.store(momentum + index, m, mask=inside)
        if PROVE:
            tl.atomic_add(momentum_sums + word // 32768, _digest(tl.where(inside, m, 0.0), word, BLOCK))


@triton.jit
def _elements(of_program, slots, ALIGNED: tl.constexpr, REPLICAS: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's parameter, a row of `slots`; its block; and its elements' places, flat and in the tensors.

    The last value masks what other parameters have in the block. ALIGNED says that offsets, ends and addresses are
    multiples of 16, so that the compiler may read 16 bytes at a time.
    """
    entry = of_program + 2 * tl.program_id(0)
    row = slots + (2 + REPLICAS) * tl.load(entry)
    block = tl.load(entry + 1).to(tl.int64)
    offset, end = tl.load(row), tl.load(row + 1)
    if ALIGNED:
        offset, end = tl.multiple_of(offset, 16), tl.multiple_of(end, 16)
    index = block * BLOCK + tl.arange(0, BLOCK)
    return row, block, index, index - offset, (index >= offset) & (index < end)


@triton.jit
def _theta(row, number: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where a replica has this program's parameter."""
    theta = tl.load(row + 2 + number).to(tl.pointer_type(TYPE))
    if ALIGNED:
        theta = tl.multiple_of(theta, 16)
    return theta


@triton.jit
def _store_products(products, g, m):
    """Store this program's <g, g>, <m, m> and <g, m>, summed in float64."""
    row = products + 3 * tl.program_id(0)
    wide_g, wide_m = g.to(tl.float64), m.to(tl.float64)
    tl.store(row, tl.sum(wide_g * wide_g, 0))
    tl.store(row + 1, tl.sum(wide_m * wide_m, 0))
    tl.store(row + 2, tl.sum(wide_g * wide_m, 0))


@triton.jit
def _restarted(m, g, retain, inject, DROPS: tl.constexpr):
    return inject * g if DROPS else retain * m + inject * g  # not 0 m, which would keep a NaN alive


@triton.jit
def _digest(values, word, BLOCK: tl.constexpr):
    """Return the weighted sum of a block's words of eight bytes, as `twophase.diloco.flat` defines it."""
    low, high = tl.split(tl.reshape(values.to(tl.uint32, bitcast=True), (BLOCK // 2, 2)))
    words = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    position = (word % 32768 + tl.arange(0, BLOCK // 2)).to(tl.uint64)
    weights = (position * 0x9E3779B97F4A7C15) | 1
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
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    g = tl.load(gradient + index, mask=inside, other=0.0)
    if DIVIDE:
        g = tl.div_rn(g, divisor)
        tl.store(gradient + index, g, mask=inside)
    m = tl.zeros_like(g)
    if MOMENTUM:
        m = tl.load(momentum + index, mask=inside, other=0.0)
    _store_products(products, g, m)
