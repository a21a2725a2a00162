"""Fragments: how parameters are cut, and that those which never meet share room."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
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


@pytest.mark.parametrize(
    ("options", "rooms"),
    [
        ({"inner_steps": 6}, 1),
        ({"inner_steps": 6, "delay": 2}, 3),
        ({"inner_steps": 6, "stagger": False}, 3),
        ({"inner_steps": 2}, 3),
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
