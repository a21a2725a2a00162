"""Made-up results of a sweep, for tests of what is concluded from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from twophase.sweeps.grid import Cell, Sweep
from twophase.sweeps.table import Row, rows_of

Value = Callable[[Cell], float | str | None]
"""A perplexity, "diverged" or infinity, or None for a run that is missing."""


def rows(sweep: Sweep, value: Value, seconds: float = 1.0) -> list[Row]:
    """Return the rows of a sweep with made-up results."""
    summaries: dict[str, dict[str, Any]] = {}
    for cell in sweep.cells:
        result = value(cell)
        if result is not None:
            number = None if result in ("diverged", math.inf) else result
            losses = {"perplexity": number, "validation_loss": number}
            summaries[cell.run_id] = losses | {"seconds": seconds, "diverged": number is None}
    return rows_of(sweep, summaries)


def staged_rows(study: Any, scale: Any, value: Value) -> list[Row]:
    """Return made-up rows of a sweep study, all stages of one that chooses its later cells by them."""
    so_far: list[Row] = []
    while True:
        sweep = study.sweep(scale, so_far) if hasattr(study, "CHOOSES_RUNS") else study.sweep(scale)
        if len(sweep.cells) == len(so_far):
            return so_far
        so_far = rows(sweep, value)


def pages(study: Any, result: Any) -> list[Any]:
    """Draw a study's figure, and those of its details."""
    return [study.draw(result), *(study.details(result).values() if hasattr(study, "details") else ())]


def line_of(text: str, words: str) -> str:
    """Return the only line of a text that has these words."""
    (line,) = [line for line in text.splitlines() if words in line]
    return line
