"""The comparison of a sweep: each method and each pair against slow recomputation, and one sweep by hand."""

from __future__ import annotations

import math
import random
from statistics import geometric_mean
from typing import Any

import pytest

from twophase.compare.compare import compare
from twophase.compare.sweep import SweepComparison, compare_sweep, describe, headlines, select
from twophase.errors import UsageError
from twophase.sweeps.table import Row, State

LR, MOMENTUM = "outer.lr", "outer.momentum"
NEVER, K, MATCHED, FREE = "never", "K=3", "never, gain of K=3", "momentum-free"


def row(
    method: str,
    result: float | None,
    lr: float = 0.3,
    momentum: float = 0.9,
    seed: int | None = 0,
    *,
    state: State = "finished",
    run: str | None = None,
    of: str | None = None,
) -> Row:
    values = {LR: lr, MOMENTUM: momentum, "seed": seed}
    return Row(method, run or f"{method}/{lr}/{momentum}/{seed}", values, state, result, control_of=of)


def finished(method: str, results: list[float], **place: Any) -> list[Row]:
    """One setting with a run a seed."""
    return [row(method, value, seed=seed, **place) for seed, value in enumerate(results)]


def against(comparison: SweepComparison, method: str, control: str) -> Any:
    (found,) = [each for each in comparison.against if (each.method, each.control) == (method, control)]
    return found


def random_rows(number: int) -> list[Row]:
    """Two methods on one grid, linked controls of the second's momentum 0.9, momentum-free runs shared with both."""
    rng = random.Random(number)
    bad = rng.choice([0.0, 0.05, 0.3])
    rows: list[Row] = []

    def add(method: str, middle: float, *place: Any, **more: Any) -> None:
        outcome: tuple[State, float | None] = ("finished", middle * rng.lognormvariate(0, 0.05))
        if rng.random() < bad:  # a diverged run may have a perplexity, which does not count
            outcome = rng.choice([("diverged", 1.0), ("diverged", None), ("missing", None), ("failed", None)])
        rows.append(row(method, outcome[1], *place, state=outcome[0], **more))

    for seed in range(rng.randint(1, 5)):
        for lr in (0.3, 0.7):
            add(FREE, 8.0, lr, 0.0, seed, run=f"free/{lr}/{seed}")
            free = rows[-1]
            for method in (NEVER, K):
                rows.append(row(method, free.perplexity, lr, 0.0, seed, state=free.state, run=free.run))
                add(method, 7.0 + lr, lr, 0.9, seed)
            add(MATCHED, 9.0, lr / 5, 0.9, seed, of=f"{K}/{lr}/0.9/{seed}")
    rng.shuffle(rows)
    return rows


def slow(rows: list[Row], method: str) -> dict[tuple[float, float], dict[int, float]]:
    """Results by place and seed: infinite where diverged, nothing where missing."""
    places: dict[tuple[float, float], dict[int, float]] = {}
    for each in rows:
        if each.arm == method:
            values = places.setdefault((each.values[LR], each.values[MOMENTUM]), {})
            if each.state in ("finished", "diverged"):
                values[each.values["seed"]] = (each.perplexity if each.state == "finished" else None) or math.inf
    return places


@pytest.mark.parametrize("number", range(30))
def test_methods_and_pairs_computed_otherwise(number: int) -> None:
    """Counts, best, near the best, tuned and matched results follow from the rows, in any order of them."""
    rows = random_rows(number)
    seeds = {each.values["seed"] for each in rows}
    found = compare_sweep(rows, controls=[NEVER])
    tables = {method.name: slow(rows, method.name) for method in found.methods}
    means = {
        name: {place: sum(line.values()) / len(seeds) for place, line in table.items() if set(line) == seeds}
        for name, table in tables.items()
    }
    means = {name: {k: v for k, v in lines.items() if v < math.inf} for name, lines in means.items()}
    lowest = min((value for lines in means.values() for value in lines.values()), default=None)
    assert (found.best and found.best.result) == (lowest and pytest.approx(lowest))
    for method in found.methods:
        table, ended = tables[method.name], means[method.name]
        assert method.is_control == (method.name != K)
        assert method.finished == len(ended)
        assert method.diverged == sum(math.inf in line.values() for line in table.values())
        assert method.finished + method.diverged + method.missing == len(method.settings) == len(table)
        assert method.within(0.1) == sum(value <= 1.1 * (lowest or 0) for value in ended.values())
        assert (method.best and method.best.result) == (pytest.approx(min(ended.values())) if ended else None)
    assert {each.control for each in found.against} == {NEVER, FREE, MATCHED}
    for each in found.against:
        linked = {place: (place[0] / 5, 0.9) for place in tables[K] if place[1]}
        pairs = linked if each.control == MATCHED else {place: place for place in tables[each.control] if place[1]}
        pairs = {mine: other for mine, other in pairs.items() if mine in means[K] and other in means[each.control]}
        assert each.cells == len(pairs)
        assert (each.matched is None) == (not pairs)
        logs = [
            {seed: geometric_mean(tables[name][place][seed] for place in side) for seed in seeds if side}
            for name, side in ((K, pairs.keys()), (each.control, pairs.values()))
        ]
        if each.matched:
            again = compare(*logs, comparisons=found.comparisons)
            assert (each.matched.word, each.matched.ratio) == (again.word, pytest.approx(again.ratio))
        if not all(means[name] for name in (K, each.control)):
            continue
        bests = [min(means[name], key=lambda place: means[name][place]) for name in (K, each.control)]
        lines = [tables[name][place] for name, place in zip((K, each.control), bests, strict=True)]
        assert each.tuned == compare(*lines, comparisons=found.comparisons)


GOLDEN = [
    *finished(K, [7.0, 7.1, 6.9], lr=0.3),
    *finished(K, [8.0, 8.2, 8.1], lr=0.7),
    *finished(NEVER, [9.0, 9.2, 8.8], lr=0.3),
    *finished(NEVER, [7.9, 8.3, 8.1], lr=0.7),
    *(row(NEVER, None, 1.1, seed=seed, state="diverged") for seed in range(3)),
    *(row(K, 9.0, 1.1, seed=seed) for seed in range(3)),
    *finished(FREE, [7.5, 7.6, 7.4], lr=1.0, momentum=0.0),
]


def test_one_sweep_by_hand() -> None:
    """Its table, once read and found right."""
    text = describe(compare_sweep(GOLDEN, controls=[NEVER]))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "K=3 3 3 0 0 2 7.00 0.1 3 lr 0.3" in lines
    assert "never yes 3 2 1 0 1 8.10 0.2 3 lr 0.7" in lines
    assert "momentum-free yes 1 1 0 0 1 7.50 0.1 3" in lines
    assert "K=3 never tuned 1.157 1.052 to 1.273 3 0 better" in lines
    assert "K=3 never matched 2 of 3 1.134 1.091 to 1.179 3 0 better" in lines
    assert "K=3 momentum-free tuned 1.071 1.067 to 1.076 3 0 better" in lines


@pytest.mark.parametrize(
    ("values", "is_control"),
    [
        ({MOMENTUM: 0}, True),
        ({MOMENTUM: 0.0, "outer.filter": "none", "outer.restart": "never", "sync.restart": ()}, True),
        ({MOMENTUM: 0, "outer.filter": "orthogonal"}, False),
        ({MOMENTUM: 0, "outer.schedule": "linear:2"}, False),
        ({MOMENTUM: 0, "outer.restart": "auto"}, False),
        ({MOMENTUM: 0, "sync.restart": "a=auto"}, False),
        ({MOMENTUM: 0.5}, False),
        ({LR: 1.0}, False),
    ],
)
def test_which_methods_are_momentum_free(values: dict[str, Any], is_control: bool) -> None:
    """Momentum 0 and nothing else beside the learning rate."""
    (method,) = compare_sweep([Row("a", "run", values, "finished", 8.0)]).methods
    assert method.is_control == is_control


def test_restarts_are_compared_with_none() -> None:
    """Also where nothing else is a control; the first sentence is the tuned bests', not the shared cells'."""
    rows = [
        Row(name, f"{name}{lr}{seed}", {LR: lr, "outer.restart": restart, "seed": seed}, "finished", result + seed / 9)
        for name, restart, results in ((NEVER, "never", (9.0, 5.0)), (K, "3", (6.0, 7.0)))
        for lr, result in zip((0.3, 0.7), results, strict=True)
        for seed in range(3)
    ]
    found = compare_sweep(rows)
    assert against(found, K, NEVER).tuned.ratio < 1 < against(found, K, NEVER).matched.ratio
    (line,) = headlines(found)
    assert {"6.11", "K=3", "5.11", "never", f"{against(found, K, NEVER).tuned.ratio:.4g}"} <= {*line.split()}
    assert " ".join(describe(found).split()).startswith(line)


def test_what_a_sweep_without_results_says() -> None:
    """No cells, no results, one seed and no control have a note and a table; an unknown control is refused."""
    assert compare_sweep([]).notes
    unfinished = compare_sweep([row(K, None, state="missing"), row(FREE, 8.0, momentum=0.0)])
    assert against(unfinished, K, FREE).tuned.word == "undecided"
    assert len(unfinished.notes) == 2
    assert describe(unfinished)
    assert not compare_sweep([row(K, 8.0), row(NEVER, 8.0)]).against
    with pytest.raises(UsageError, match="--controls"):
        compare_sweep([row(K, 8.0)], controls=["K=4"])


def test_a_method_that_always_diverges_is_worse() -> None:
    """By the sign test, where the seeds are enough; nothing is said while settings are missing."""
    rows = [row(K, None, seed=seed, state="diverged") for seed in range(6)]
    free = finished(FREE, [8.0] * 6, momentum=0.0)
    assert against(compare_sweep(rows + free), K, FREE).tuned.word == "worse"
    assert against(compare_sweep(rows[:5] + free), K, FREE).tuned.word == "undecided"
    assert against(compare_sweep([*rows, row(K, None, 0.7, state="missing"), *free]), K, FREE).tuned.seeds == 0


def test_methods_of_the_same_runs_are_equal() -> None:
    """A shared run is no evidence cell by cell; the best settings are then equal."""
    rows = [row(m, 8.0 + s, momentum=0.0, seed=s, run=f"shared {s}") for m in (K, FREE) for s in range(3)]
    found = compare_sweep([*rows, *finished(K, [99.0] * 3)])
    assert (against(found, K, FREE).tuned.word, against(found, K, FREE).matched) == ("equal", None)


def test_select() -> None:
    """Rows by their values, however numbers are written; what is not there is refused."""
    rows = [row(K, 8.0, lr, seed=seed) for lr in (0.3, 1.0) for seed in range(2)]
    assert select(rows, {LR: "1", "seed": "1.0"}) == rows[3:]
    for where in ({LR: "2"}, {"outer.beta": "1"}):
        with pytest.raises(UsageError, match="--where"):
            select(rows, where)
