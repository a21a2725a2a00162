"""Codes for numbers that travel: bfloat16, or int8 in blocks with a scale each. Pure functions, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Elements that share a scale in int8; parts and pieces are whole numbers of blocks."""

_LEVELS = 127
_SMALLEST = 2.0**-149  # the least positive float32
_LARGEST_SCALE = float.fromhex("0x1.020406p+121")  # `_LEVELS` times the next float32 above overflows


@dataclass(frozen=True, slots=True)
class Packet:
    """Encoded elements.

    Args:
        codes: one an element, int8 or bfloat16.
        scales: for int8, one a block of `BLOCK` elements (the last block may be shorter), float32; None for bfloat16.
    """

    codes: Tensor
    scales: Tensor | None

    def piece(self, start: int, stop: int) -> Packet:
        """Elements `start`, a multiple of `BLOCK`, to `stop`."""
        scales = None if self.scales is None else self.scales[start // BLOCK : -(-stop // BLOCK)]
        return Packet(self.codes[start:stop], scales)


def packet_bytes(name: str, numel: int) -> int:
    """Bytes of `numel` encoded elements, a multiple of `BLOCK`: 2 an element for bfloat16, 132 a block for int8."""
    return 2 * numel if name == "bfloat16" else numel + 4 * (numel // BLOCK)


def packet(name: str, payload: Tensor, numel: int) -> Packet:
    """The packet of `numel` elements, a multiple of `BLOCK`, that lies in `packet_bytes(name, numel)` bytes."""
    if name == "bfloat16":
        return Packet(payload.view(torch.bfloat16), None)
    return Packet(payload[:numel].view(torch.int8), payload[numel:].view(torch.float32))


def encode(values: Tensor, into: Packet, scratch: Tensor) -> None:
    """Write the codes of `values`.

    bfloat16 rounds to the nearest, ties to even. For int8, with the elements x of a block,

        scale = max|x| / 127 + 2^-149,    code = round(x / scale), ties to even, in -127 ... 127,

    so that code * scale is within scale / 2 of x, to rounding, for every finite float32. (2^-149 matters to subnormal
    scales only: rounded down, they could not reach max|x|.) A block with an element that is not finite gets the scale
    NaN and is NaN altogether when decoded: divergence shows on every process. In bfloat16 such an element stays what
    it is.

    Args:
        values: 1-D, float32 or float64.
        into: of as many elements.
        scratch: of the same shape and dtype; overwritten.
    """
    if into.scales is None:
        into.codes.copy_(values)
        return
    torch.abs(values, out=scratch)
    scales = into.scales
    for scale, magnitudes in _by_block(scales, scratch):
        scale.copy_(torch.amax(magnitudes, dim=1, keepdim=True))
    nan_unless_finite = scales * 0
    scales.div_(_LEVELS).add_(_SMALLEST).clamp_(max=_LARGEST_SCALE).add_(nan_unless_finite)
    for scale, x, quotient in _by_block(scales, values, scratch):
        torch.div(x, scale, out=quotient)  # not times 1 / scale, which overflows for a subnormal scale
    into.codes.copy_(scratch.round_())  # within -127 ... 127 by themselves, since scale >= max|x| / 127, to rounding


def decode(taken: Packet, out: Tensor) -> None:
    """Write the elements of a packet to `out`, 1-D of as many elements, float32 or float64."""
    out.copy_(taken.codes)
    if taken.scales is not None:
        for scale, codes in _by_block(taken.scales, out):
            codes.mul_(scale)


def _by_block(scales: Tensor, *vectors: Tensor) -> Iterator[list[Tensor]]:
    """Scales as a column and vectors as matrices, a row a block: of the whole blocks, then of a shorter last one."""
    numel = vectors[0].numel()
    whole = numel // BLOCK
    if whole:
        yield [scales[:whole, None], *(vector[: whole * BLOCK].view(whole, BLOCK) for vector in vectors)]
    if numel > whole * BLOCK:
        yield [scales[whole:, None], *(vector[None, whole * BLOCK :] for vector in vectors)]
