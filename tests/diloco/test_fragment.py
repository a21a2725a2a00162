"""Fragments: how parameters are cut, where they lie, and that those which never meet share room."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.scenarios import start
from twophase.diloco.fragment import partition

SIZES = st.lists(st.integers(0, 50) | st.sampled_from([1, 10**9]), min_size=1, max_size=8)


@given(SIZES, st.data())
def test_contiguous_parts_with_the_least_largest_one(sizes: list[int], data: st.DataObject) -> None:
    """Parts follow the model's order, none is empty, and no other cut has a smaller largest part."""
    count = data.draw(st.integers(1, len(sizes)))
    parts = partition({str(n): size for n, size in enumerate(sizes)}, count)
    assert list(parts) == [str(n) for n in range(count)]
    assert [name for names in parts.values() for name in names] == [str(n) for n in range(len(sizes))]
    assert all(parts.values())

    def largest(cuts: tuple[int, ...]) -> int:
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise([0, *cuts, len(sizes)]))

    best = min(map(largest, itertools.combinations(range(1, len(sizes)), count - 1)))
    assert max(sum(sizes[int(name)] for name in names) for names in parts.values()) == best


def test_patterns_take_names_in_order() -> None:
    """A parameter belongs to the first expression that its name contains; fragments keep the model's order."""
    sizes = dict.fromkeys(["wte.weight", "h.0.w", "h.10.w", "h.1.w", "norm"], 1)
    parts = partition(sizes, {"tens": r"h\.\d\d", "blocks": r"^h\.", "rest": "."})
    assert parts == {"tens": ["h.10.w"], "blocks": ["h.0.w", "h.1.w"], "rest": ["wte.weight", "norm"]}


@pytest.mark.parametrize("fragments", [0, 3, 1.0, True, {}, {"a": "x"}, {"a": ".", "b": "y"}, {"a": "["}])
def test_impossible_cuts_are_refused(fragments: Any) -> None:
    """Too many or no parts, a parameter without a fragment, a fragment without a parameter, no pattern."""
    with pytest.raises(ValueError, match="fragments"):
        partition({"x": 1, "y": 2}, fragments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_lie_at_cache_lines_of_one_buffer(dtype: torch.dtype) -> None:
    """Each begins at a multiple of 64 bytes of the flat anchor, behind the one before; what lies between is zero."""
    engine = start("heavy ball", dtype=dtype, fragments=3).engine
    begin, itemsize = engine.flat.data_ptr(), engine.flat.itemsize
    assert engine.flat.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    places = [((a.data_ptr() - begin) // itemsize, a.numel()) for a in engine.anchor.values()]
    assert places == [(0, 32), (32, 8), (48, 8), (64, 8), (80, 24), (112, 3)]
    assert len(engine.flat) == 128
    taken = sum(int(a.count_nonzero()) for a in engine.anchor.values())
    assert taken == int(engine.flat.count_nonzero())


@pytest.mark.parametrize(
    ("options", "rooms"),
    [
        ({"inner_steps": 6}, 1),
        ({"inner_steps": 6, "delay": 1}, 1),
        ({"inner_steps": 6, "delay": 2}, 3),
        ({"inner_steps": 6, "stagger": False}, 3),
        ({"inner_steps": 2}, 3),
        ({"inner_steps": 3}, 1),
    ],
    ids=str,
)
def test_fragments_that_never_meet_share_a_room(options: dict[str, Any], rooms: int) -> None:
    """Pseudo-gradients never reduced at the same time lie in one room, as long as the longest; others lie apart."""
    gradients = [fragment.gradient for fragment in start("heavy ball", fragments=3, **options).engine.fragments]
    lengths = [len(gradient) for gradient in gradients]
    assert gradients[0].untyped_storage().nbytes() == 4 * (max(lengths) if rooms == 1 else sum(lengths))
    spans = sorted((g.data_ptr(), g.data_ptr() + g.nbytes) for g in gradients)
    assert len({begin for begin, _ in spans}) == rooms
    assert rooms == 1 or all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
