"""Planning flat buffers: where each parameter lies in one long vector (pure planning, no communication)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16  # elements: 64 bytes in float32, a cache line, so that every view starts where vector loads like it


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies: elements `offset` to `offset + numel` of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of a flat buffer, in the order of the parameters, and its length in elements (padding included)."""

    slots: tuple[Slot, ...]
    numel: int

    def views(self, flat: Tensor) -> list[Tensor]:
        """One view into `flat` (1-D, `numel` elements) a slot, in its parameter's shape."""
        return [flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self.slots]

    def describe(self) -> list[list[object]]:
        """Names and shapes as plain lists, to be saved and compared."""
        return [[slot.name, list(slot.shape)] for slot in self.slots]


def plan(named_shapes: Iterable[tuple[str, tuple[int, ...]]], alignment: int = ALIGNMENT) -> Layout:
    """Lay parameters one after the other, each starting at a multiple of `alignment` elements.

    Args:
        named_shapes: name and shape of each parameter; names differ.
        alignment: elements, >= 1.

    Raises:
        ValueError: a name that occurs twice.
    """
    slots: list[Slot] = []
    names: set[str] = set()
    end = 0
    for name, shape in named_shapes:
        if name in names:
            raise ValueError(f"plan: two parameters are named {name!r}; names must differ")
        names.add(name)
        slots.append(Slot(name, tuple(shape), end))
        end += -(-slots[-1].numel // alignment) * alignment
    return Layout(tuple(slots), end)


def checksum(flat: Tensor) -> str:
    """Sixteen hexadecimal digits that depend on every bit of a 1-D float32 or float64 tensor.

    Equal tensors give equal digits on every machine, so replicas that should agree can be compared by a few bytes.
    """
    words = flat.detach().view(torch.int32)
    # Integers modulo 2^64 add up to the same sum in any order. The weight of a word is odd, so no change of one word is
    # lost, and differs from place to place, so neither two words that change places nor opposite last bits cancel.
    weights = (torch.arange(min(_PIECE, words.numel()), device=flat.device) * _GOLDEN) | 1
    cpu = flat.device.type == "cpu"
    sums = _sums(words, weights, rows=1 if cpu else _ROWS, mixed=not cpu)
    state = words.numel()
    for value in torch.cat(sums).tolist() if sums else ():
        state = ((state ^ (value & _MASK)) * _PRIME) & _MASK  # FNV-1a, a word at a time
        state ^= state >> 29
    return f"{state:016x}"


def _sums(words: Tensor, weights: Tensor, *, rows: int, mixed: bool) -> list[Tensor]:
    """The weighted sum of each piece of words, `rows` pieces at a time.

    Args:
        words: (n,) int32.
        weights: (piece,) int64.
        rows: pieces that are summed together; changes no sum.
        mixed: multiply int32 by int64 in one operation, which saves an accelerator two passes over its memory and is
            three times slower on a CPU; changes no sum.
    """
    piece = len(weights)
    whole = words.numel() // piece * piece if piece else 0
    batches = list(words[:whole].view(-1, piece).split(rows)) if whole else []
    if whole < words.numel():
        batches.append(words[None, whole:])
    # One scratch for all batches: a new one for each costs more than the arithmetic.
    scratch = torch.empty(rows * piece, dtype=torch.int64, device=words.device)
    sums: list[Tensor] = []
    for batch in batches:
        height, width = batch.shape
        product = scratch[: height * width].view(height, width)
        if mixed:
            torch.mul(batch, weights[:width], out=product)
        else:
            product.copy_(batch).mul_(weights[:width])
        sums.append(product.sum(1))
    return sums


_PIECE = 1 << 16  # words: the weights and the products stay in cache
_ROWS = 256  # pieces at a time on an accelerator: enough to fill it, and a scratch of 128 MiB
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed word
_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3
