"""Plan flat buffers: where each parameter lies in one long vector, and the checksum of such a vector."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

ALIGNMENT = 16  # elements: 64 bytes in float32, a cache line, so that every view starts where vector loads like it


@dataclass(frozen=True, slots=True)
class Slot:
    """Place a parameter at elements `offset` to `offset + numel` of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The element after its last."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Layout:
    """Hold the slots of a flat buffer, in the order of the parameters, and its length in elements (with padding)."""

    slots: tuple[Slot, ...]
    numel: int

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a view into `flat` (1-D, `numel` elements) for each slot, in its parameter's shape."""
        return [flat[slot.offset : slot.end].view(slot.shape) for slot in self.slots]

    def gaps(self, flat: Tensor) -> list[Tensor]:
        """Return views of the padding of `flat`, between the parameters."""
        starts = [*(slot.offset for slot in self.slots), self.numel][1:]
        return [flat[slot.end : start] for slot, start in zip(self.slots, starts, strict=True) if start > slot.end]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each slot that elements `start` to `stop` touch, and first and last element in both."""
        first = max(bisect_right(self.slots, start, key=lambda slot: slot.offset) - 1, 0)
        for number in range(first, len(self.slots)):
            slot = self.slots[number]
            if slot.offset >= stop:
                return
            begin, end = max(start, slot.offset), min(stop, slot.end)
            if begin < end:
                yield number, begin, end


def plan(named_shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
    """Lay parameters one after the other, each starting at a multiple of `ALIGNMENT` elements."""
    slots: list[Slot] = []
    end = 0
    for name, shape in named_shapes:
        slots.append(Slot(name, tuple(shape), end))
        end += -(-slots[-1].numel // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(slots), end)


def checksum(flat: Tensor) -> str:
    """Return sixteen hexadecimal digits that depend on every bit of a 1-D float32 or float64 tensor.

    Equal tensors of one kind of device give equal digits on every machine, at any address. So a few bytes compare
    replicas that should agree. On a CPU it is XXH3 (https://xxhash.com): much faster there than an accelerator's
    `weighted_checksum`, but sequential.
    """
    if not flat.is_cpu:
        return weighted_checksum(flat)
    digest = Digest(flat)
    digest.add(0, len(flat))
    return digest.digits()


def divide_(vector: Tensor, count: float) -> None:
    """Divide a sum in place; by a power of two with its reciprocal: the same bits in half the time."""
    if count > 1:
        is_power = math.frexp(count)[0] == 0.5
        vector.mul_(1 / count) if is_power else vector.div_(count)


class Digest:
    """Take the `checksum` of a vector on the CPU, piece by piece while the pieces are in the cache.

    Args:
        flat: vector, 1-D, float32 or float64; its memory is read at each `add`.
    """

    def __init__(self, flat: Tensor) -> None:
        self._bytes, self._size = flat.detach().view(torch.uint8).numpy().data, flat.element_size()
        self._state = xxhash.xxh3_64()

    def add(self, start: int, stop: int) -> None:
        """Add elements `start` to `stop` after the earlier ones; `start` 0 begins a new digest."""
        if start == 0:
            self._state.reset()
        self._state.update(self._bytes[start * self._size : stop * self._size])

    def digits(self) -> str:
        """Return sixteen hexadecimal digits, once all elements have been added."""
        return self._state.hexdigest()


def weighted_checksum(flat: Tensor) -> str:
    """Return an accelerator's checksum: weighted sums of independent pieces."""
    halves = flat.detach().view(torch.int32)
    sums = _sums(halves, _weights(flat.device), rows=_ROWS)
    state = len(halves)
    for value in sums + halves[len(halves) // 2 * 2 :].tolist():  # an odd word at the end is a separate piece
        state = ((state ^ (value & _MASK)) * _PRIME) & _MASK  # FNV-1a, a word at a time
        state ^= state >> 29
    return f"{state:016x}"


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return (piece,) int64, odd and all different; cached, because small tensors would spend most time on it."""
    return (torch.arange(_PIECE, device=device) * _GOLDEN) | 1


# Of the words' highest bits a sum modulo 2^64 contains only the parity: two float64, or all, could change their signs
# unseen. So the sum takes w ^ (w >> 29) in place of each word w, which copies high bits down and is one-to-one. (With a
# shift by 32 the signs of the two float32 in a word could cancel.)
_SHIFT = 29


def _sums(halves: Tensor, weights: Tensor, *, rows: int) -> list[int]:
    """Return the weighted sum of each piece of int32 `halves`, `rows` of them at a time, which changes no sum."""
    words = halves[: len(halves) // 2 * 2]
    if words.storage_offset() % 2:
        words = words.clone()  # torch reads eight bytes only from multiples of eight
    words, piece = words.view(torch.int64), len(weights)
    whole = len(words) // piece * piece
    batches = list(words[:whole].view(-1, piece).split(rows)) if whole else []
    if whole < len(words):
        batches.append(words[None, whole:])
    # One scratch for all batches: a new one for each costs more than the arithmetic.
    scratch = torch.empty(min(rows * piece, len(words)), dtype=torch.int64, device=words.device)
    sums: list[Tensor] = []
    for batch in batches:
        height, width = batch.shape
        mixed = scratch[: height * width].view(height, width)
        torch.bitwise_right_shift(batch, _SHIFT, out=mixed)
        mixed.bitwise_and_(_MASK >> _SHIFT)  # the shift has copied the sign into the free bits
        sums.append(mixed.bitwise_xor_(batch).mul_(weights[:width]).sum(1))
    return torch.cat(sums).tolist() if sums else []


_PIECE = 1 << 15  # words; the digits depend on it
_ROWS = 512  # pieces at a time on an accelerator: enough to fill it, and a scratch of 128 MiB
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed word
_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3
