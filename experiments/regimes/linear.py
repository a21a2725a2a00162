"""Does the linear theory say where momentum pays? Gains at the task `linear`, predicted and measured, by label noise.

python experiments/regimes/linear.py     three minutes; prints the tables of docs/theory.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any
from unittest.mock import patch

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
from torch import Tensor

import small_tasks
from common import AVERAGING, show
from small_tasks import Cell, Workload
from twophase import theory
from twophase.rule import OuterRule

WORK = Workload("linear", 4, 320, 16, 2)
RULES = (AVERAGING, *(OuterRule(*numbers) for numbers in product((0.3, 0.7, 1.0), (0.3, 0.6, 0.9), (False, True))))
CAP = 0.8  # of a ladder in steps of the square root of 2 the largest inner rate that is stable
RATES = [CAP * 2 ** (-k / 2) for k in range(16)]
DRAW = small_tasks.points


def predicted(work: Workload, noise: float) -> Any:
    """Return the expected excess by rate and rule: 32 axes of the inputs, and the bias, which begins right."""
    variance = np.append(10 ** np.linspace(0, -3, 32), 1.0)
    start = np.append(np.full(32, (5 * 1.5 / 32) ** 0.5), 0.0)  # of student and teacher, which is twice as large
    heard, rates = 2 * noise * np.sqrt(variance / work.batch), np.array(RATES)[:, None]
    shares = [small_tasks.rate(work.schedule, step / work.steps) for step in range(work.steps)]
    sizes = {"inner_steps": work.inner_steps, "rounds": work.steps // work.inner_steps, "replicas": work.replicas}
    return theory.expected_loss(RULES, 2 * variance, rates, noise=heard, initial=start, schedule=shares, **sizes)


def measured(work: Workload, noise: float, seeds: Sequence[int], cells: set[Cell]) -> dict[Cell, list[float]]:
    """Return the excess of each cell by seed, with label noise of that standard deviation."""

    def points(*shape: Any, **options: Any) -> list[Tensor]:
        x, y, clean = DRAW(*shape, **options)
        return [x, clean + noise / 0.1 * (y - clean), clean]

    with patch.object(small_tasks, "points", points):
        found = small_tasks.train(work, seeds, cells)
    return {cell: [outcomes[seed].excess for seed in seeds] for cell, outcomes in found.items()}


def gains(work: Workload, noise: float) -> dict[str, float]:
    """Return averaging's best rate over the cap and the gain of the best momentum, predicted and measured."""
    losses = predicted(work, noise)
    tried = measured(work, noise, range(3), {Cell(lr, rule, inner="sgd") for lr, rule in product(RATES, RULES)})
    ranked = sorted(tried, key=lambda cell: geometric_mean(tried[cell]))
    base, best = (next(cell for cell in ranked if (cell.rule == AVERAGING) == plain) for plain in (True, False))
    new = measured(work, noise, range(100, 108), {base, best})
    found = {
        "noise": noise,
        "best rate / cap, predicted": RATES[losses[:, 0].argmin()] / CAP,
        "measured": base.lr / CAP,
    }
    found["gain, predicted"] = losses[:, 0].min() / losses[:, 1:].min()
    return found | {"gain, measured": median(a / b for a, b in zip(new[base], new[best], strict=True))}


if __name__ == "__main__":
    for work in (WORK, WORK._replace(schedule="wsd"), WORK._replace(steps=160)):
        print(f"{work.steps // work.inner_steps} rounds, {work.schedule}")
        show(pd.DataFrame([gains(work, noise) for noise in (0.03, 0.1, 0.3, 1.0, 3.0)]))
