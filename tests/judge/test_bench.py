"""What a bench says: words by hand, seeds that diverged, distances behind the best of each place."""

from __future__ import annotations

import math

import pytest

from twophase.cli.tuning import Tuned
from twophase.judge.bench import Against, Card, PlaceCard, behind, beside, results_of
from twophase.judge.cells import seed_table
from twophase.judge.decision import decide
from twophase.recipes.bench import short

SEEDS = range(100, 106)
BETTER = {seed: 1.0 + 0.001 * (seed % 3) for seed in SEEDS}
CONTROL = {seed: 1.1 + 0.001 * (seed % 2) for seed in SEEDS}


def results(by_seed: dict[tuple[str, str], dict[int, float]]):
    return seed_table(list(by_seed.values()), list(by_seed), ("place", "arm"))


RESULTS = results({("here", "arm"): BETTER, ("here", "averaging"): CONTROL, ("here", "lost"): {}})


def test_rows_of_a_table() -> None:
    """A row without a result is a run that diverged, one without a seed an arm without any setting."""
    rows = [
        {"place": "here", "arm": "arm", "seed": "100", "result": "2.5"},
        {"place": "here", "arm": "arm", "seed": 101, "result": None},
        {"place": "here", "arm": "lost", "seed": "", "result": ""},
    ]
    assert results_of(rows).equals(results({("here", "arm"): {100: 2.5, 101: math.inf}, ("here", "lost"): {}}))


@pytest.mark.parametrize(
    ("arm", "label"),
    [
        ("nesterov:momentum=~0.6@K", "nesterov@K"),
        ("nesterov:momentum=~0.65", "nesterov:momentum=C"),
        ("ramp:~0.5+filter=orthogonal", "ramp:C+orthogonal"),
        ("along:~1e-3+readout=tail:rounds=3", "along:C+tail average"),
    ],
)
def test_labels(arm: str, label: str) -> None:
    """Where a search begins is left out, and nothing else."""
    assert short(arm) == label


def test_a_pair_is_decided_on_common_seeds() -> None:
    """Differences are logarithms, positive where the first is better; with a seed in which both diverged, no word."""
    expected = decide([math.log(CONTROL[seed]) - math.log(BETTER[seed]) for seed in SEEDS], comparisons=7)
    for arm, control, against in (
        ({1: 9.0}, {2: 9.0}, Against("averaging", expected.word, *expected.ratios())),
        ({7: math.inf}, {7: math.inf}, Against("averaging", "undecided")),
    ):
        table = results({("here", "arm"): BETTER | arm, ("here", "averaging"): CONTROL | control})
        assert Against.of(table, "here", "arm", "averaging", 7) == against


@pytest.mark.parametrize(
    ("pair", "word"),
    [(("arm", "averaging"), "better"), (("averaging", "arm"), "worse"), (("arm", "lost"), "all diverged")],
)
def test_words(pair: tuple[str, str], word: str) -> None:
    """The ratio is the other's mean over the arm's; nothing is said of what has not been run."""
    against = Against.of(RESULTS, "here", *pair, 1)
    assert against is not None
    assert against.word == word
    assert Against.of(RESULTS, "elsewhere", *pair, 1) is None
    if word == "better":
        logs = [math.log(CONTROL[seed] / BETTER[seed]) for seed in SEEDS]
        assert against.ratio == pytest.approx(math.exp(sum(logs) / len(logs)), rel=1e-12)
        assert 1 < (against.low or 0) < (against.ratio or 0)


def test_an_interval_that_no_float_holds() -> None:
    """Two seeds of a wild arm have an interval over thousands of nats."""
    wild = results({("here", "arm"): {1: 1.0, 2: 1.0}, ("here", "averaging"): {1: 1.0, 2: math.exp(40)}})
    decision = decide([0.0, 40.0], comparisons=5)
    ratio, *ends = decision.ratios()
    assert ratio == pytest.approx(math.exp(20))
    assert all(end is not None and math.isfinite(end) for end in ends)
    assert Against.of(wild, "here", "arm", "averaging", 5) == Against("averaging", "undecided", ratio, *ends)
    assert Tuned("arm", {}, True, 1, 1.0, 1.0, (1.0, 1.0), decision).ratios() == (ratio, *ends)


def test_distances_behind_the_best() -> None:
    """In per cent of the place's best geometric mean, the nearest first; infinite where an arm is missing."""
    reached = {
        ("a", "x"): {1: 2.0, 2: 8.0}, ("a", "y"): {1: 4.4, 2: 4.4}, ("b", "y"): {1: 1.0}, ("b", "x"): {1: math.inf},
    }  # fmt: skip
    distances = behind(results(reached), ["a", "b"], ["x", "y", "z"])
    assert distances["x"] == pytest.approx([0.0, math.inf])
    assert distances["y"] == pytest.approx([0.0, 10.0])
    assert distances["z"] == [math.inf, math.inf]


def test_another_bench_beside_this_one() -> None:
    """Its ratios to its own control stay; seeds and places in which a side has no control are left out."""
    theirs = {
        ("a", "control"): {1: 2.0, 2: 4.0, 3: 1.0, 4: 1.0},
        ("a", "x"): {1: 1.0, 2: 6.0, 3: 5.0, 4: 5.0},
        ("a", "lost"): {},
        ("a", "elsewhere"): {9: 1.0},
        ("b", "x"): {1: 1.0},
    }
    mine = {("a", "control"): {1: 20.0, 2: 30.0, 3: math.inf, 4: 1.0}}
    placed = beside(results(theirs), results(mine), "control", (1, 2, 3)).dropna(axis="columns", how="all")
    expected = {("a", "control"): {1: 20.0, 2: 30.0}, ("a", "x"): {1: 10.0, 2: 45.0}, ("a", "lost"): {}}
    assert placed.equals(results(expected))


def test_a_cards_sentence() -> None:
    """Counts each word; a mean ratio is there only if every place has one."""
    control = Against.of(RESULTS, "here", "arm", "averaging", 1)
    place = PlaceCard("here", "a place", {"inner.lr": 0.01}, 1.0, 3, True, 1.0, 1.0, control, ())
    card = Card("arm", "quick", (place, place), {}, {"averaging": 2, "stored": 0}, {})
    assert "better in 2; ratio 1.0" in card.line()
    diverged = PlaceCard("here", "a place", {}, None, 3, False, 1.0, 1.0, Against("averaging", "all diverged"), ())
    both = Card("arm", "quick", (place, diverged), {}, {"averaging": 2, "stored": 0}, {})
    assert both.line().endswith("better in 1, all diverged in 1.")
