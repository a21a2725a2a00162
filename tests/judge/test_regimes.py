"""A sign predicted from one quantity: the rule that is chosen, and how it is judged."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twophase.judge.regimes import Rule, fit, right

CELLS = [{"cosine": value, "noise": noise} for value, noise in zip((0.1, 0.2, 0.6, 0.9), (3, 1, 4, 2), strict=True)]


def test_a_threshold_between_the_signs() -> None:
    """Where a quantity separates the signs, it is chosen with the middle of the gap, in either direction."""
    assert fit(CELLS, [-1, -1, 1, 1], ["noise", "cosine"]) == Rule("cosine", 0.4, above=True)
    assert fit(CELLS, [1, 1, -1, -1], ["noise", "cosine"]) == Rule("cosine", 0.4, above=False)


def test_the_majority_where_nothing_is_better() -> None:
    """Signs that are all alike need no quantity; a quantity that a cell lacks is no choice."""
    assert fit(CELLS, [1, 1, 1, 1], ["cosine"]) == Rule("", 0.0, above=True)
    assert fit(CELLS, [-1, -1, 1, -1], ["agreement"]) == Rule("", 0.0, above=False)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=12))
def test_never_worse_than_the_majority(pairs: list[tuple[float, float]]) -> None:
    """On the cells that chose it a rule has as many right as any threshold and as the more frequent sign."""
    cells, gains = [{"x": x} for x, _ in pairs], [gain for _, gain in pairs]
    helped = sum(gain > 0 for gain in gains)
    best = max(
        right(Rule("x", threshold, above), cells, gains)
        for threshold in (-2.0, *(x for x, _ in pairs))
        for above in (True, False)
    )
    assert right(fit(cells, gains, ["x"]), cells, gains) == max(best, helped, len(gains) - helped)


def test_no_quantity_is_chosen_for_its_scale() -> None:
    """A quantity in other units gives the same signs."""
    random = np.random.default_rng(2)
    gains = random.normal(size=9).tolist()
    values = random.normal(size=9)
    cells, scaled = ([{"x": factor * value} for value in values] for factor in (1.0, 1000.0))
    first, second = fit(cells, gains, ["x"]), fit(scaled, gains, ["x"])
    assert [first.helps(cell) for cell in cells] == [second.helps(cell) for cell in scaled]
