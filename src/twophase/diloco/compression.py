"""Sums of pseudo-gradients in 8 or 16 bits, with error feedback: what a replica could not send it adds the next time.

With M ranks, in two stages that each send about one vector of codes:

    1   rank s sends c_s = encode(x_s + e_s), e_s <- x_s + e_s - decode(c_s), the r-th part of it to rank r,
        which adds decode(c_0) + decode(c_1) + ... in the order of the ranks;
    2   rank r sends encode(its sum) to all, and everyone takes decode(...) of all parts.

Several replicas in one process are M senders with a residual each, so that they get the same bits. Codes of int8 are
made in blocks of 128 elements with a scale each. A block with an element that is not finite decodes to NaN as a whole,
so that divergence shows on every rank.

Source: error feedback, Karimireddy et al. 2019 (arXiv 1901.09847).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from twophase.diloco.group import ProcessGroup

COMPRESSIONS = ("float32", "bfloat16", "int8")
BLOCK = 128
_ROWS, _ROWS_DEVICE = 1 << 10, 1 << 15  # blocks that are coded at a time: on a CPU they stay in the cache
_SMALLEST = 2.0**-149  # a subnormal scale, rounded down, could not reach the block's maximum
_LARGEST = float.fromhex("0x1.020406p+121")  # 127 times the next float32 above overflows


def encode(name: str, vector: Tensor) -> Tensor:
    """Return the codes of a vector, whose length is a multiple of 128: bytes, in rows of 256 (bfloat16) or 132 (int8).

    int8: `scale = max|x| / 127 + 2^-149`, `code = round(x / scale)`, ties to even, and the scale in float32.
    """
    if name == "bfloat16":
        return vector.bfloat16().view(torch.uint8).view(-1, 2 * BLOCK)
    codes = torch.empty(len(vector) // BLOCK, BLOCK + 4, dtype=torch.uint8, device=vector.device)
    rows = _ROWS if vector.is_cpu else _ROWS_DEVICE
    for blocks, out in zip(vector.view(-1, BLOCK).split(rows), codes.split(rows), strict=True):
        scale = blocks.abs().amax(1, keepdim=True).float()
        scale = (scale / 127 + _SMALLEST).clamp_(max=_LARGEST) + scale * 0  # NaN unless finite
        out[:, BLOCK:] = scale.view(torch.uint8)
        # Not times 1 / scale, which overflows for a subnormal one.
        out[:, :BLOCK] = (blocks / scale).round_().to(torch.int8).view(torch.uint8)
    return codes


def decode_(name: str, codes: Tensor, vector: Tensor, *, add: bool = False) -> None:
    """Set a vector to what its codes stand for, or add it."""
    count = _ROWS if vector.is_cpu else _ROWS_DEVICE
    for blocks, rows in zip(vector.view(-1, BLOCK).split(count), codes.split(count), strict=True):
        if name == "bfloat16":
            values = rows.view(torch.bfloat16)
        else:
            values = rows[:, :BLOCK].view(torch.int8).to(vector.dtype)
            values.mul_(rows[:, BLOCK:].contiguous().view(torch.float32))
        (blocks.add_ if add else blocks.copy_)(values)


class Compression:
    """Sums vectors like one, in "bfloat16" or "int8"; `residuals`, (senders, numel), is what this rank still owes."""

    def __init__(self, name: str, like: Tensor, senders: int) -> None:
        self.name = name
        self.residuals = torch.zeros(senders, len(like), dtype=like.dtype, device=like.device)

    def quantize_(self, vector: Tensor, sender: int) -> Tensor:
        """Replace a sender's vector by what the others receive of it, and keep the rest; return the codes."""
        residual = self.residuals[sender]
        residual.add_(vector)
        codes = encode(self.name, residual)
        decode_(self.name, codes, vector)
        residual.sub_(vector)
        return codes

    def all_reduce(self, vector: Tensor, group: ProcessGroup) -> Iterator[int]:
        """As the group's, but in two stages: the second `next` waits for the first stage and begins the second.

        All ranks call it at the same place among their collectives. In a single process, whose senders have called
        `quantize_`, the sum is only rounded as by the second stage.
        """
        if group.size == 1:
            decode_(self.name, encode(self.name, vector), vector)
            return
        sent = self.quantize_(vector, 0)
        sent = pad(sent, (0, 0, 0, -len(sent) % group.size))
        received = torch.empty_like(sent)
        yield from group.all_to_all(received, sent)
        del sent
        parts = received.chunk(group.size)
        total = torch.empty(len(parts[0]) * BLOCK, dtype=vector.dtype, device=vector.device)
        for rank, part in enumerate(parts):  # in the order of the ranks
            decode_(self.name, part, total, add=rank > 0)
        yield from group.all_gather(received, encode(self.name, total))
        decode_(self.name, received[: len(vector) // BLOCK], vector)
