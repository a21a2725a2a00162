"""Does the linear theory say where momentum pays? Gains at the task `linear`, predicted and measured, by label noise.

python experiments/regimes/linear.py     three minutes; prints the tables of docs/theory.md
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd

import small_tasks
from common import AVERAGING, show
from run import HEAVY_BALL, NESTEROV, score, times  # pyright: ignore[reportAttributeAccessIssue] - the bench has one, too
from small_tasks import Cell, Workload, train
from twophase import theory

WORK = Workload("linear", 4, 320, 16, 2)
RULES = (AVERAGING, *HEAVY_BALL, *NESTEROV)
CAP = 0.8  # of a ladder in steps of the square root of 2 the largest inner rate that is stable
RATES = [CAP * 2 ** (-k / 2) for k in range(16)]


def predicted(work: Workload, noise: float) -> Any:
    """Return the expected excess by rate and rule: 32 axes of the inputs, and the bias, which begins right."""
    variance = np.append(10 ** np.linspace(0, -3, 32), 1.0)
    start = np.append(np.full(32, (5 * 1.5 / 32) ** 0.5), 0.0)  # of student and teacher, which is twice as large
    sd, rates = 2 * noise * np.sqrt(variance / work.batch), np.array(RATES)[:, None]
    shares = [small_tasks.rate(work.schedule, step / work.steps) for step in range(work.steps)]
    sizes = {"inner_steps": work.inner_steps, "rounds": work.steps // work.inner_steps, "replicas": work.replicas}
    return theory.expected_loss(RULES, 2 * variance, rates, noise=sd, initial=start, schedule=shares, **sizes)


def gains(work: Workload, noise: float) -> dict[str, float]:
    """Return averaging's best rate over the cap and the gain of the best momentum, predicted and measured."""
    losses = predicted(work, noise)
    with patch.object(small_tasks, "NOISE", noise):
        tried = train(work, range(3), {Cell(lr, rule, inner="sgd") for lr, rule in product(RATES, RULES)})
        ranked = sorted(tried, key=lambda cell: score(tried[cell]))
        base, best = (next(cell for cell in ranked if (cell.rule == AVERAGING) == plain) for plain in (True, False))
        new = train(work, range(100, 108), {base, best})
    rates = {"best rate / cap, predicted": RATES[losses[:, 0].argmin()] / CAP, "measured": base.lr / CAP}
    found = {"gain, predicted": losses[:, 0].min() / losses[:, 1:].min(), "gain, measured": times(new[base], new[best])}
    return {"noise": noise} | rates | found


if __name__ == "__main__":
    for work in (WORK, WORK._replace(schedule="wsd"), WORK._replace(steps=160)):
        print(f"{work.steps // work.inner_steps} rounds, {work.schedule}")
        show(pd.DataFrame([gains(work, noise) for noise in (0.03, 0.1, 0.3, 1.0, 3.0)]))
