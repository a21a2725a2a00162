"""Hold a benchmark's figures against the bounds in bounds.json.

    sys.exit(finish("loader", figures))

A bound is a `max`, a `min` or both for one figure of one benchmark, with the `source` of its number. Only ratios taken
in one run have bounds: an absolute time would fail on a slower machine. A bound that is no more than what was measured
has the `goal` beside it, which each run names until it is reached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BOUNDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
SIDES = {"min": "least", "max": "most"}


def broken(name: str, figures: Mapping[str, float | None]) -> list[str]:
    """Return a line for each figure that is worse than its bound.

    A figure that is None or absent was not measured (a part left out, no GPU) and breaks nothing; NaN breaks any bound.
    """
    lines = []
    for figure, bound in BOUNDS.get(name, {}).items():
        value = figures.get(figure)
        if value is not None and not bound.get("min", value) <= value <= bound.get("max", value):
            limits = " and ".join(f"at {side} {bound[key]:g}" for key, side in SIDES.items() if key in bound)
            lines.append(f"{name}: {figure} is {value:.4g}; it must be {limits}")
    return lines


def missed_goals(name: str, figures: Mapping[str, float | None]) -> list[str]:
    """Return a line for each figure within its bound that does not reach the goal beside it."""
    lines = []
    for figure, bound in BOUNDS.get(name, {}).items():
        value, goal = figures.get(figure), bound.get("goal")
        if value is not None and goal is not None and (value > goal if "max" in bound else value < goal):
            lines.append(f"{name}: {figure} is {value:.4g}; its goal is {goal:g}")
    return lines


def finish(name: str, figures: Mapping[str, float | None]) -> int:
    """Print a line for each broken bound and each goal that is not reached, then the figures as one JSON object.

    Args:
        name: the benchmark's name in bounds.json.
        figures: by name; None: not measured.

    Returns:
        The exit status: 1 where a bound is broken, otherwise 0.
    """
    lines = broken(name, figures)
    print(*lines, *missed_goals(name, figures), json.dumps(dict(figures)), sep="\n", flush=True)
    return 1 if lines else 0
