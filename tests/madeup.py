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
    summaries: dict[str, dict[str, Any]] = {}
    for cell in sweep.cells:
        result = value(cell)
        if result is not None:
            number = None if result in ("diverged", math.inf) else result
            losses = {"perplexity": number, "validation_loss": number}
            summaries[cell.run_id] = losses | {"seconds": seconds, "diverged": number is None}
    return rows_of(sweep, summaries)
