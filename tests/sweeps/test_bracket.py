"""The bracketing search: it ends at an interior best, asks for no point twice, and needs nothing but its results."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.base.errors import UsageError
from twophase.sweeps.bracket import Point, Scale, Search

LR, MOMENTUM, PERIOD = Scale(0.7), Scale(0.9, "odds"), Scale(3, "whole", low=1, high=64)


def run(search: Search, loss: Callable[[dict[str, float]], float]) -> dict[Point, float]:
    """Measure until the search asks for nothing more; each call sees the results alone."""
    results: dict[Point, float] = {}
    while pending := search.pending(results):
        assert not set(pending) & set(results)
        for point in pending:
            results[point] = loss(search.values(point))
    return results


def bowl(**optimum: float) -> Callable[[dict[str, float]], float]:
    """A loss with one minimum, in the logarithms (of a momentum's odds)."""

    def scaled(name: str, value: float) -> float:
        return math.log(value / (1 - value) if name == "momentum" else value)

    return lambda values: sum((scaled(n, v) - scaled(n, optimum[n])) ** 2 for n, v in values.items())


@pytest.mark.slow
@given(lr=st.floats(1e-3, 1e3), momentum=st.floats(0.01, 0.999), refinements=st.integers(0, 3))
def test_ends_within_half_a_step(lr: float, momentum: float, refinements: int) -> None:
    """The best of a bowl lies within half a last step of its minimum, on every scale, and is interior."""
    search = Search({"lr": LR, "momentum": MOMENTUM}, 10_000, refinements)
    results = run(search, bowl(lr=lr, momentum=momentum))
    best = search.best(results)
    assert best is not None
    assert search.is_interior(results)
    values, half = search.values(best), math.log(2) / 2**refinements / 2 + 1e-4
    assert abs(math.log(values["lr"] / lr)) <= half
    odds = [value / (1 - value) for value in (values["momentum"], momentum)]
    assert abs(math.log(odds[0] / odds[1])) <= half + 1e-2


@pytest.mark.parametrize("most", [1, 2, 5, 9])
def test_keeps_to_its_budget(most: int) -> None:
    """A search asks for as many points as it may; an end by the budget is not interior."""
    search = Search({"lr": LR}, most)
    results = run(search, bowl(lr=1e9))
    assert len(results) == most
    assert not search.is_interior(results)


def test_goes_on_from_its_table() -> None:
    """The points do not depend on where the search was interrupted, nor on the order of the table."""
    search = Search({"lr": LR, "period": PERIOD}, 100, 2)
    whole = run(search, bowl(lr=5, period=11))
    for cut in range(len(whole)):
        part = dict(reversed(list(whole.items())[:cut]))
        while pending := search.pending(part):
            part |= {point: whole[point] for point in pending}
        assert part == whole


@given(lr=st.floats(1e-2, 1e2), period=st.integers(1, 5), slope=st.floats(0.1, 2))
def test_no_neighbour_of_a_small_whole_number_is_left_out(lr: float, period: int, slope: float) -> None:
    """Where half a step rounds to the same period, the next one is tried: the end is interior, whatever the valley."""

    def loss(values: dict[str, float]) -> float:
        return bowl(lr=lr, period=period)(values) + slope * math.log(values["lr"] / lr) * math.log(values["period"])

    search = Search({"lr": LR, "period": PERIOD}, 10_000)
    results = run(search, loss)
    best = search.best(results)
    assert best is not None
    assert search.is_interior(results)
    tried = {(search.values(point)["lr"], search.values(point)["period"]) for point in results}
    values = search.values(best)
    if values["period"] <= 2:  # above, the scale leaves some out
        assert {(values["lr"], values["period"] + by) for by in (-1, 1)} - {(values["lr"], 0.0)} <= tried


@pytest.mark.parametrize("start", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("refinements", [0, 1, 2, 3])
def test_the_end_of_a_scale_is_an_end(start: int, refinements: int) -> None:
    """A search that ends by itself is interior, also at period 1, whose neighbours round to it: each once."""
    search = Search({"period": Scale(start, "whole", low=1, high=64)}, 100, refinements)
    results = run(search, bowl(period=0.5))
    best = search.best(results)
    assert best is not None
    assert search.values(best) == {"period": 1}
    periods = [search.values(point)["period"] for point in results]
    assert len(periods) == len(set(periods))
    assert search.is_interior(results)


def test_walks_away_from_divergence() -> None:
    """Where everything diverges, all numbers become smaller; a NaN counts as diverged."""

    def loss(values: dict[str, float]) -> float:
        return math.nan if values["lr"] > 0.05 else bowl(lr=0.01, momentum=0.5)(values)

    search = Search({"lr": LR, "momentum": MOMENTUM}, 200)
    best = search.best(run(search, loss))
    assert best is not None
    assert search.values(best)["lr"] < 0.05


def test_all_diverged() -> None:
    """An arm that diverges everywhere ends at its budget or at the end of its scales, without a best."""
    for search in (Search({"lr": LR}, 30), Search({"lr": Scale(0.7, low=0.1)}, 1000)):
        results = run(search, lambda _: math.inf)
        assert search.best(results) is None
        assert not search.is_interior(results)


@pytest.mark.parametrize("wrong", [{"start": 0}, {"start": 1.5, "kind": "odds"}, {"start": 1, "factor": 1}])
def test_impossible_scales(wrong: dict) -> None:
    """A scale that has no steps is refused."""
    with pytest.raises(UsageError):
        Scale(**wrong)
