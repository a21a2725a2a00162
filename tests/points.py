"""Points at which the page's numbers are held against the package's: random ones, and edge cases of every regime."""

from __future__ import annotations

from typing import Any

import numpy as np

from twophase.rule import OuterRule
from twophase.theory import stable_limit

Point = tuple[OuterRule, float, int]
"""A rule, the effective progress of a mode, and a period."""


def random_points(count: int, seed: int = 0) -> list[Point]:
    """Every kind and form; momentum near 0 and near 1, small and large steps, periods to 10,000."""
    draw = np.random.default_rng(seed)
    points: list[Point] = []
    for _ in range(count):
        momentum = draw.choice([draw.uniform(), 1 - 10 ** draw.uniform(-6, 0), 10 ** draw.uniform(-6, 0) * 0.999])
        sigma = draw.choice([draw.uniform(), 10 ** draw.uniform(-12, 0)])
        period = int(10 ** draw.uniform(0, 2.5))
        form = draw.choice(["sum", "ema"])
        rule = OuterRule(float(10 ** draw.uniform(-2, 1)), float(momentum), bool(draw.integers(2)), str(form))  # type: ignore[arg-type]
        points.append((rule, float(sigma), period))
    return points


def nasty_points() -> list[Point]:
    """Critical and almost so, nilpotent and almost so, no momentum, unstable, nothing and everything, huge periods."""
    points: list[Point] = []
    periods = (1, 2, 3, 5, 11, 60, 63, 64, 65, 129, 10_000)
    for nesterov in (False, True):
        for b in (0.0, 1e-9, 0.25, 0.5, 0.5625, 0.81, 0.9, 0.99, 1 - 2.0**-30):
            root = b**0.5
            edges = {((1 - b) / (1 + b)) ** 2, 1.0} if nesterov else {(1 - root) ** 2, (1 + root) ** 2}
            limit = float(stable_limit(OuterRule(1.0, b, nesterov)))
            steps = {0.3, 1e-7, 1e-30, limit, limit * 1.01, 2 * limit, 1 + b, 1e5}
            steps |= {edge * (1 + near) for edge in edges for near in (0, 1e-15, -1e-15, 1e-9, -1e-9, 1e-4, -1e-4)}
            for s in sorted(steps):
                for form in ("sum", "ema"):
                    lr = s if form == "sum" else s / (1 - b)
                    rule = OuterRule(lr, b, nesterov, form)
                    points += [(rule, 1.0, periods[len(points) % len(periods)])]
                    points += [(OuterRule(2 * lr, b, nesterov, form), 0.5, periods[(len(points) + 4) % len(periods)])]
            points += [(OuterRule(0.7, b, nesterov), 0.0, period) for period in (1, 10_000)]
    exact = [(2.0, 0.5, True, "ema"), (4.0, 0.75, True, "ema"), (2.0, 0.5, False, "ema"), (1.0, 0.0, True, "sum")]
    points += [(OuterRule(*values), 1.0, period) for values in exact for period in periods]  # type: ignore[arg-type]
    return points


def as_json(points: list[Point]) -> list[dict[str, Any]]:
    """The points for JavaScript."""
    return [
        {"lr": r.lr, "momentum": r.momentum, "nesterov": r.nesterov, "form": r.form, "sigma": sigma, "period": period}
        for r, sigma, period in points
    ]
