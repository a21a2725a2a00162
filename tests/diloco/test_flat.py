"""Flat buffers: where parameters lie, views into them, and the checksum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from twophase.diloco import flat
from twophase.diloco.flat import ALIGNMENT, checksum, plan

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), max_size=12)
ALIGNMENTS = st.integers(1, 64)


def named(shapes: list[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"layer.{index}", shape) for index, shape in enumerate(shapes)]


# --- plan ---------------------------------------------------------------------------------------------------------


@given(SHAPES, ALIGNMENTS)
def test_plan_keeps_order_names_and_shapes(shapes: list[tuple[int, ...]], alignment: int):
    """One slot a parameter, in the order given, with its name, shape and number of elements."""
    layout = plan(named(shapes), alignment)
    assert [(slot.name, slot.shape) for slot in layout.slots] == named(shapes)
    assert [slot.numel for slot in layout.slots] == [math.prod(shape) for shape in shapes]


@given(SHAPES, ALIGNMENTS)
def test_plan_covers_without_overlap(shapes: list[tuple[int, ...]], alignment: int):
    """Every element has a place of its own inside the buffer, and slots follow one another."""
    layout = plan(named(shapes), alignment)
    places = [slot.offset + i for slot in layout.slots for i in range(slot.numel)]
    assert len(places) == len(set(places)) == sum(math.prod(shape) for shape in shapes)
    assert places == sorted(places)
    assert all(0 <= place < layout.numel for place in places)


@given(SHAPES, ALIGNMENTS)
def test_plan_is_aligned_and_tight(shapes: list[tuple[int, ...]], alignment: int):
    """Every slot starts at a multiple of the alignment, and padding is less than one alignment a slot."""
    layout = plan(named(shapes), alignment)
    starts = [*(slot.offset for slot in layout.slots), layout.numel]
    assert all(slot.offset % alignment == 0 for slot in layout.slots)
    assert layout.numel % alignment == 0
    for slot, following in zip(layout.slots, starts[1:], strict=True):
        assert 0 <= following - slot.offset - slot.numel < alignment


def test_plan_written_out():
    """Two parameters of 20 and 3 elements at the default alignment: offsets 0 and 32, 48 elements in all."""
    layout = plan([("weight", (4, 5)), ("bias", (3,))])
    assert [(slot.name, slot.offset) for slot in layout.slots] == [("weight", 0), ("bias", 32)]
    assert layout.numel == 48
    assert layout.describe() == [["weight", [4, 5]], ["bias", [3]]]
    assert ALIGNMENT * torch.float32.itemsize == 64


def test_plan_refuses_a_name_twice():
    """Two parameters of one name are refused by name."""
    with pytest.raises(ValueError, match="plan: two parameters are named 'w'; names must differ"):
        plan([("w", (2,)), ("v", (2,)), ("w", (3,))])


# --- views --------------------------------------------------------------------------------------------------------


@given(SHAPES, ALIGNMENTS)
def test_views_are_windows_on_the_buffer(shapes: list[tuple[int, ...]], alignment: int):
    """Views have the parameters' shapes; writing to each fills exactly its slot; padding is never touched."""
    layout = plan(named(shapes), alignment)
    flat = torch.full((layout.numel,), -1.0)
    for number, (view, shape) in enumerate(zip(layout.views(flat), shapes, strict=True)):
        assert tuple(view.shape) == shape
        assert view.is_contiguous()
        view.fill_(number)
    expected = torch.full((layout.numel,), -1.0)
    for number, slot in enumerate(layout.slots):
        expected[slot.offset : slot.offset + slot.numel] = number
    assert torch.equal(flat, expected)


# --- checksum -----------------------------------------------------------------------------------------------------

LARGE = 300_000  # elements: several internal pieces
GOLDEN_DIGITS = "bf4388083f6b4f05"


def vectors(draw: Callable[..., Any], min_size: int) -> Tensor:
    """A vector of random bits, float32 or float64: every pattern, NaN and infinities included."""
    dtype, width = draw(st.sampled_from([(torch.float32, 32), (torch.float64, 64)]))
    words = st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    short = draw(st.lists(words, min_size=min_size, max_size=20))
    integer = torch.int32 if width == 32 else torch.int64
    flat = torch.tensor(short, dtype=integer)
    if draw(st.booleans()):  # a long one, with the random words at random places
        long = torch.arange(LARGE, dtype=integer) * 2654435761
        places = draw(st.lists(st.integers(0, LARGE - 1), min_size=len(short), max_size=len(short), unique=True))
        long[torch.tensor(places, dtype=torch.int64)] = flat
        flat = long
    return flat.view(dtype)


def as_words(flat: Tensor) -> Tensor:
    return flat.view(torch.int32 if flat.dtype == torch.float32 else torch.int64)


@given(st.data())
def test_equal_bits_have_equal_checksums(data: st.DataObject):
    """The checksum is a function of the bits: a copy, elsewhere in memory, has the same sixteen digits."""
    flat = vectors(data.draw, 0)
    elsewhere = torch.cat([torch.zeros(3, dtype=flat.dtype), flat])[3:]
    digits = checksum(flat)
    assert digits == checksum(elsewhere)
    assert len(digits) == 16
    assert int(digits, 16) >= 0


@given(st.data())
def test_every_bit_counts(data: st.DataObject):
    """Turning over any one bit of any element changes the checksum."""
    flat = vectors(data.draw, 1)
    words = as_words(flat.clone())
    place = data.draw(st.integers(0, len(words) - 1))
    bit = data.draw(st.integers(0, 8 * flat.dtype.itemsize - 1))
    mask = 1 << bit if bit < 8 * flat.dtype.itemsize - 1 else -(1 << bit)
    words[place] ^= mask
    assert checksum(words.view(flat.dtype)) != checksum(flat)


@given(st.data())
def test_places_count(data: st.DataObject):
    """Two unlike elements that change places change the checksum, wherever they are."""
    flat = vectors(data.draw, 2)
    words = as_words(flat.clone())
    a, b = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    words[[a, b]] = words[[b, a]]
    assert (checksum(words.view(flat.dtype)) == checksum(flat)) == torch.equal(words, as_words(flat))


@given(st.data())
def test_opposite_roundings_do_not_cancel(data: st.DataObject):
    """One element a last bit up and another one down, as two orders of summation would leave them, shows."""
    flat = vectors(data.draw, 2)
    words = as_words(flat.clone())
    a, b = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    words[a] += 1
    words[b] -= 1
    assert checksum(words.view(flat.dtype)) != checksum(flat)


def test_zeros_of_both_signs_and_lengths_differ():
    """0 and -0, and buffers of zeros of different lengths, have different checksums."""
    zeros = [torch.zeros(n) for n in (0, 1, 2, 4095, 4096, 4097, 65536, 65537)]
    negative = torch.zeros(4096)
    negative[1234] = -0.0
    digits = [checksum(flat) for flat in [*zeros, negative]]
    assert len(set(digits)) == len(digits)


@given(st.data())
def test_signs_count(data: st.DataObject):
    """Two signs that turn over, wherever they are, and all of them at once, change the checksum."""
    flat = vectors(data.draw, 2)
    a, b = data.draw(st.lists(st.integers(0, len(flat) - 1), min_size=2, max_size=2, unique=True))
    sign = -(2 ** (8 * flat.dtype.itemsize - 1))
    words = as_words(flat.clone())
    words[[a, b]] ^= sign
    assert checksum(words.view(flat.dtype)) != checksum(flat)
    assert checksum((as_words(flat) ^ sign).view(flat.dtype)) != checksum(flat)


def test_no_two_signs_of_a_piece_cancel():
    """A sign also changes w ^ (w >> 29) by 2^2 or 2^34, and no two weights add up, or differ, to make that vanish."""
    golden, piece = flat._GOLDEN % 2**64, flat._PIECE
    weights = flat._weights(torch.device("cpu")).numpy().view(np.uint64)
    assert weights.tolist() == [place * golden % 2**64 | 1 for place in range(piece)]
    # Of places i and j the odd weights add up to (i + j) golden + 0, 1 or 2 and differ by (i - j) golden - 1, 0 or 1.
    sums = {(place * golden + extra) % 2**64 for place in range(2 * piece) for extra in (0, 1, 2)}
    differences = {(place * golden + extra) % 2**64 for place in range(piece) for extra in (-1, 0, 1)}
    assert all(value % 2**29 for value in (sums | differences) - {0})


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 65535, 65536, 65537, LARGE + 1])
def test_digits_are_the_same_wherever_the_tensor_lies(count: int):
    """Odd lengths, odd places in memory, and an accelerator's operations give the digits of an aligned CPU tensor."""
    values, room = torch.randn(count, generator=torch.Generator().manual_seed(1)), torch.zeros(count + 4)
    weights = flat._weights(values.device)
    digits = set()
    for start in range(4):
        there = room[start : start + count].copy_(values)
        digits.add(checksum(there))
        digest = flat.Digest(there)
        digest.add(0, count)
        sums = [value - (value >> 63 << 64) for value in digest._sums]
        assert flat._sums(there.view(torch.int32), weights, rows=2) == sums
    assert len(digits) == 1


def test_checksum_is_the_same_on_every_machine():
    """Digits that were computed once are those that integer arithmetic gives, done here word by word."""
    flat = torch.tensor([1.0, -2.5, 0.0, -0.0, 3e-45, math.inf, -1.5] * 30_001)
    halves = [int(half) % 2**32 for half in flat.view(torch.int32).tolist()]
    words = [low + (high << 32) for low, high in zip(halves[::2], halves[1::2], strict=False)]
    values = []
    for start in range(0, len(words), 1 << 15):
        piece = enumerate(words[start : start + (1 << 15)])
        values.append(sum((word ^ word >> 29) * (place * 0x9E3779B97F4A7C15 | 1) for place, word in piece))
    values.append(halves[-1] - (halves[-1] >> 31 << 32))  # the odd one, as a signed number
    state = len(halves)
    for value in values:
        state = (state ^ value % 2**64) * 0x100000001B3 % 2**64
        state ^= state >> 29
    assert checksum(flat) == f"{state:016x}" == GOLDEN_DIGITS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_digest_in_parts_is_the_checksum(dtype: torch.dtype):
    """Parts that are taken up one after the other, each of whole digest pieces, give the digits of the whole."""
    values = torch.randn(5 * flat.DIGEST_ELEMENTS + 321, dtype=dtype, generator=torch.Generator().manual_seed(2))
    digest = flat.Digest(values)
    for start, stop in ((0, 1), (1, 3), (3, 5)):
        digest.add(start * flat.DIGEST_ELEMENTS, stop * flat.DIGEST_ELEMENTS)
    digest.add(5 * flat.DIGEST_ELEMENTS, len(values))
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
