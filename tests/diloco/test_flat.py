"""Flat buffers: where parameters lie, views into them, and the checksum."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from twophase.diloco import flat
from twophase.diloco.flat import ALIGNMENT, checksum, plan, weighted_checksum

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), max_size=12)


def named(shapes: list[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"layer.{index}", shape) for index, shape in enumerate(shapes)]


# --- plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(SHAPES)
def test_plan_covers_without_overlap(shapes: list[tuple[int, ...]]):
    """Slots keep order, names and shapes, start at multiples of the alignment, and pad less than one alignment each.

    Each element of the buffer is in one parameter's view or in one gap between two of them.
    """
    layout = plan(named(shapes))
    assert [(slot.name, slot.shape) for slot in layout.slots] == named(shapes)
    starts = [*(slot.offset for slot in layout.slots), layout.numel]
    assert starts[0] == 0
    assert all(start % ALIGNMENT == 0 for start in starts)
    for slot, following in zip(layout.slots, starts[1:], strict=True):
        assert slot.numel == math.prod(slot.shape)
        assert 0 <= following - slot.end < ALIGNMENT
    buffer = torch.zeros(layout.numel)
    views, gaps = layout.views(buffer), layout.gaps(buffer)
    assert [tuple(view.shape) for view in views] == shapes
    for number, view in enumerate(views, start=1):
        view.add_(number)
    for gap in gaps:
        gap.sub_(1)
    expected = -torch.ones(layout.numel)
    for number, slot in enumerate(layout.slots, start=1):
        expected[slot.offset : slot.end] = number
    assert torch.equal(buffer, expected)


# --- checksum -----------------------------------------------------------------------------------------------------

LARGE = 300_000  # elements: several internal pieces
LENGTHS = [65535, 65536, 65537, LARGE, LARGE + 1]
GOLDEN_DIGITS = "bf4388083f6b4f05"
KINDS = pytest.mark.parametrize("kind", [checksum, weighted_checksum])


def vectors(draw: Callable[..., Any], min_size: int) -> Tensor:
    """A vector of random bits, float32 or float64, within a piece or longer: every pattern, NaN and infinities too."""
    dtype, width = draw(st.sampled_from([(torch.float32, 32), (torch.float64, 64)]))
    words = st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    short = draw(st.lists(words, min_size=min_size, max_size=20))
    integer = torch.int32 if width == 32 else torch.int64
    flat = torch.tensor(short, dtype=integer)
    if draw(st.booleans()):  # a long one, with the random words at random places
        length = draw(st.sampled_from(LENGTHS))
        long = torch.arange(length, dtype=integer) * 2654435761
        indices = draw(st.lists(st.integers(0, length - 1), min_size=len(short), max_size=len(short), unique=True))
        long[torch.tensor(indices, dtype=torch.int64)] = flat
        flat = long
    return flat.view(dtype)


def as_words(flat: Tensor) -> Tensor:
    return flat.view(torch.int32 if flat.dtype == torch.float32 else torch.int64)


@KINDS
@given(data=st.data())
def test_equal_bits_have_equal_checksums(kind: Callable[[Tensor], str], data: st.DataObject):
    """The checksum is a function of the bits: a copy at any place in memory has the same sixteen digits."""
    flat = vectors(data.draw, 0)
    digits = kind(flat)
    for start in range(1, 4):
        assert digits == kind(torch.cat([torch.zeros(start, dtype=flat.dtype), flat])[start:])
    assert len(digits) == 16
    assert int(digits, 16) >= 0


def flip(data: st.DataObject, words: Tensor, width: int) -> None:
    """Turn over one bit of one element."""
    bit = data.draw(st.integers(0, width - 1))
    words[data.draw(st.integers(0, len(words) - 1))] ^= 1 << bit if bit < width - 1 else -(1 << bit)


def swap(data: st.DataObject, words: Tensor, width: int) -> None:
    """Let two elements change places."""
    del width
    a, b = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    words[[a, b]] = words[[b, a]]


def two_places(data: st.DataObject, words: Tensor) -> list[int]:
    return data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))


def round_apart(data: st.DataObject, words: Tensor, width: int) -> None:
    """Move one element a last bit up and another one down, as two orders of summation would leave them."""
    del width
    a, b = two_places(data, words)
    words[a] += 1
    words[b] -= 1


def two_signs(data: st.DataObject, words: Tensor, width: int) -> None:
    """Turn over the signs of two elements."""
    words[two_places(data, words)] ^= -(2 ** (width - 1))


def all_signs(data: st.DataObject, words: Tensor, width: int) -> None:
    """Turn over all signs."""
    del data
    words ^= -(2 ** (width - 1))


@KINDS
@pytest.mark.parametrize("change", [flip, swap, round_apart, two_signs, all_signs])
@given(data=st.data())
def test_every_change_shows(
    data: st.DataObject, change: Callable[[st.DataObject, Tensor, int], None], kind: Callable[[Tensor], str]
):
    """Another bit, place, sign or last digit anywhere changes the checksum; changes must not cancel."""
    values = vectors(data.draw, 2)
    words = as_words(values.clone())
    change(data, words, 8 * values.dtype.itemsize)
    changed, same = words.view(values.dtype), torch.equal(words, as_words(values))
    assert (kind(changed) == kind(values)) == same


@KINDS
def test_zeros_of_both_signs_and_lengths_differ(kind: Callable[[Tensor], str]):
    """0 and -0, and buffers of zeros of different lengths, have different checksums."""
    zeros = [torch.zeros(n) for n in (0, 1, 2, 4095, 4096, 4097, 65536, 65537)]
    negative = torch.zeros(4096)
    negative[1234] = -0.0
    digits = [kind(flat) for flat in [*zeros, negative]]
    assert len(set(digits)) == len(digits)


def test_no_two_signs_of_a_piece_cancel():
    """A sign also changes w ^ (w >> 29) by 2^2 or 2^34, and no two weights add up, or differ, to make that vanish."""
    golden, piece = flat._GOLDEN % 2**64, flat._PIECE
    weights = flat._weights(torch.device("cpu")).numpy().view(np.uint64)
    assert weights.tolist() == [index * golden % 2**64 | 1 for index in range(piece)]
    # Of places i and j the odd weights add up to (i + j) golden + 0, 1 or 2 and differ by (i - j) golden - 1, 0 or 1.
    sums = {(index * golden + extra) % 2**64 for index in range(2 * piece) for extra in (0, 1, 2)}
    differences = {(index * golden + extra) % 2**64 for index in range(piece) for extra in (-1, 0, 1)}
    assert all(value % 2**29 for value in (sums | differences) - {0})


def test_checksum_is_the_same_on_every_machine():
    """Of a CPU it is XXH3 of the bytes, by the published digits of no byte at all."""
    assert checksum(torch.zeros(0)) == "2d06800538d394c2"
    assert checksum(torch.ones(LARGE)) == xxhash.xxh3_64_hexdigest(LARGE * b"\x00\x00\x80\x3f")


def test_weighted_checksum_is_the_same_on_every_machine():
    """Digits that were computed once are those that integer arithmetic gives, done here word by word."""
    flat = torch.tensor([1.0, -2.5, 0.0, -0.0, 3e-45, math.inf, -1.5] * 30_001)
    halves = [int(half) % 2**32 for half in flat.view(torch.int32).tolist()]
    words = [low + (high << 32) for low, high in zip(halves[::2], halves[1::2], strict=False)]
    values = []
    for start in range(0, len(words), 1 << 15):
        piece = enumerate(words[start : start + (1 << 15)])
        values.append(sum((word ^ word >> 29) * (index * 0x9E3779B97F4A7C15 | 1) for index, word in piece))
    values.append(halves[-1] - (halves[-1] >> 31 << 32))  # the odd one, as a signed number
    state = len(halves)
    for value in values:
        state = (state ^ value % 2**64) * 0x100000001B3 % 2**64
        state ^= state >> 29
    assert weighted_checksum(flat) == f"{state:016x}" == GOLDEN_DIGITS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_digest_in_parts_is_the_checksum(dtype: torch.dtype):
    """Parts that are taken up one after the other give the digits of the whole; the first one begins anew."""
    values = torch.randn(LARGE, dtype=dtype, generator=torch.Generator().manual_seed(2))
    digest = flat.Digest(values)
    for ends in ([0, 10], [0, 1, 70_001, 70_001, LARGE]):
        for start, stop in pairwise(ends):
            digest.add(start, stop)
    assert digest.digits() == checksum(values)


@pytest.mark.parametrize("count", [1, 6, 7, 20, 27, 28, 29, 100])
def test_the_sums_of_an_accelerator_are_those_of_a_cpu(count: int):
    """How many pieces are summed together, and in which operations, changes no sum."""
    generator = torch.Generator().manual_seed(1)
    halves = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator).to(torch.int32)
    weights = torch.tensor([2**62 + 1, -(2**63) + 3, 5, 7, -9, 11, 13])
    numbers = [int(half) % 2**32 for half in halves.tolist()]
    words = [low + (high << 32) for low, high in zip(numbers[::2], numbers[1::2], strict=False)]
    pieces = [zip(words[start : start + 7], weights.tolist(), strict=False) for start in range(0, len(words), 7)]
    totals = [sum((word ^ word >> 29) * weight for word, weight in piece) % 2**64 for piece in pieces]
    plain = [total - (total >> 63 << 64) for total in totals]
    for rows in (1, 2, 3, 50):
        assert flat._sums(halves, weights, rows=rows) == plain
