"""Tables of sweeps for the tests of verdicts, random and by hand, and ways to pick what a verdict says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from twophase.judge.comparison import Comparison, Difference
from twophase.judge.verdict import Verdict
from twophase.sweeps.table import Row, State

WITHIN = (0.02, 0.1, 0.25)
LR, MOMENTUM, RESTART = "outer.lr", "outer.momentum", "outer.restart"
FIRST, SECOND, MATCHED, FREE = "never", "K=3", "gain of K=3", "momentum-free"


def row(
    arm: str,
    perplexity: float | None,
    lr: float = 0.3,
    momentum: float = 0.5,
    seed: int | None = 0,
    *,
    state: State = "finished",
    control_of: str | None = None,
    shared: str | None = None,
) -> Row:
    values = {LR: lr, MOMENTUM: momentum} | ({} if seed is None else {"seed": seed})
    run = name(arm, lr, momentum, seed)
    return Row(arm, shared or run, values, state, perplexity, control_of=control_of)


def name(arm: str, lr: float, momentum: float, seed: int | None) -> str:
    return f"{arm}/{lr}/{momentum}/{seed}"


def random_table(number: int, bad: float) -> list[Row]:
    """Two arms on one grid, controls of the second cell by cell, momentum-free controls that share runs with them."""
    rng = random.Random(number)
    seeds, lrs = range(rng.randint(1, 5)), [0.3, 0.7, 1.1][: rng.randint(1, 3)]
    momenta = [0.0, 0.5, 0.9][rng.randint(0, 1) : rng.randint(2, 3)]
    quality = {(arm, lr, m): rng.lognormvariate(2, 0.1) for arm in (FIRST, SECOND) for lr in lrs for m in momenta}

    def outcome(middle: float) -> tuple[State, float | None]:
        if rng.random() < bad:
            # A diverged run may have a perplexity too; it must not count.
            return rng.choice([("diverged", 1.0), ("diverged", None), ("missing", None), ("failed", None)])
        return "finished", middle * rng.lognormvariate(0, 0.05)

    rows = []
    for seed in seeds:
        plain = {lr: outcome(8.0) for lr in lrs}
        for (arm, lr, m), middle in quality.items():
            state, perplexity = plain[lr] if m == 0 else outcome(middle)
            shared = f"plain/{lr}/{seed}" if m == 0 else None
            rows.append(row(arm, perplexity, lr, m, seed, state=state, shared=shared))
            if arm == SECOND and m > 0.6:
                state, perplexity = outcome(middle)
                link = name(arm, lr, m, seed)
                rows.append(row(MATCHED, perplexity, lr / 5, m, seed, state=state, control_of=link))
        for lr, (state, perplexity) in plain.items():
            rows.append(row(FREE, perplexity, lr, 0.0, seed, state=state, shared=f"plain/{lr}/{seed}"))
    rng.shuffle(rows)
    return rows


TABLES = st.builds(random_table, st.integers(0, 10**6), st.sampled_from([0.0, 0.05, 0.3]))


def finished(arm: str, perplexities: Sequence[float], **place: Any) -> list[Row]:
    """One setting with one run a seed."""
    return [row(arm, value, seed=seed, **place) for seed, value in enumerate(perplexities)]


def only(judged: Verdict, arm: str, control: str) -> Comparison:
    (pair,) = [pair for pair in judged.comparisons if (pair.arm, pair.control) == (arm, control)]
    return pair


def measured(comparison: Comparison, measure: str, within: float | None = None) -> Difference:
    (difference,) = [d for d in comparison.differences if (d.measure, d.within) == (measure, within)]
    return difference


def values(difference: Difference) -> list[float]:
    """One number a seed: infinite where one side diverged, nan where there is nothing to compare."""
    return [seed.value for seed in difference.by_seed]
