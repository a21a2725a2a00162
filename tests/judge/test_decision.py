"""Decisions: their words by an oracle of p values, symmetry, and how often they are wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from twophase.judge.decision import decide

TTEST: Any = scipy.stats.ttest_1samp


@settings(max_examples=50)
@given(
    st.lists(st.integers(-500, 500), min_size=3, max_size=9).filter(lambda d: len(set(d)) > 1),
    st.integers(1, 20),
)
def test_words_are_those_of_p_values(parts: list[int], comparisons: int) -> None:
    """The word follows from SciPy's one-sample tests at alpha / comparisons."""
    level, margin, differences = 0.05 / comparisons, math.log(1.01), [part / 1e4 for part in parts]
    decision = decide(differences, comparisons=comparisons)
    above = TTEST(differences, -margin, alternative="greater")[1]
    below = TTEST(differences, margin, alternative="less")[1]
    if max(above, below) < level:
        assert decision.word == "equivalent"
    elif TTEST(differences, 0)[1] < level:
        assert decision.word == ("better" if np.mean(differences) > 0 else "worse")
    else:
        assert decision.word == "undecided"


@pytest.mark.parametrize("differences", [[0.02, 0.03, 0.025], [0.0, 0.1, 0.3], [0.001, 0.002], [math.inf] * 9, [0.5]])
def test_symmetry(differences: list[float]) -> None:
    """The control's decision against the arm is the mirror image."""
    mirror = {"better": "worse", "worse": "better"}
    word, other = decide(differences).word, decide([-d for d in differences]).word
    assert other == mirror.get(word, word)


def test_wrong_words_are_rare() -> None:
    """Of benches with 10 arms that do not differ from their control at most 5 % say a wrong word."""
    generator = np.random.default_rng(0)
    wrong = 0
    for _ in range(400):
        words = {decide(generator.normal(0, 0.02, 5).tolist(), comparisons=10).word for _ in range(10)}
        wrong += bool(words & {"better", "worse"})
    assert wrong / 400 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_divergence() -> None:
    """One side that diverges on every seed loses if there are enough of them, and has no mean."""
    assert decide([-math.inf] * 6).word == "worse"
    assert decide([-math.inf] * 3).word == "undecided"
    assert decide([-math.inf, 0.1, 0.1, 0.1, 0.1, 0.1]).word == "undecided"
    assert decide([-math.inf] * 6).mean is None
    for side in (-math.inf, math.inf):  # an equal seed agrees with neither
        assert decide([side, 0, 0, 0, 0, 0]).word == "undecided"


@pytest.mark.parametrize(("arm", "word"), [(1.0, "better"), (4.0, "worse"), (math.inf, "worse")])
def test_seeds_in_which_both_diverged(arm: float, word: str) -> None:
    """They are no seeds less: with such a seed the others cannot agree."""
    gaps = [math.log(2.0 + 0.01 * seed) - math.log(arm + 0.01 * seed) for seed in range(6)]
    assert decide(gaps).word == word
    decision = decide([*gaps, math.nan])
    assert (decision.word, decision.mean, decision.seeds) == ("undecided", None, 7)
