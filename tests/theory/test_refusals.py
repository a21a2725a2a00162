"""What the functions of the theory refuse: a ValueError that names the function and the argument."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from oracle import HB, NAG, SIX
from twophase import theory
from twophase.rule import OuterRule
from twophase.theory.inputs import check_weights, rule_grid

OF_A_MODE: dict[str, tuple[Any, ...]] = {  # functions of a rule and sigma, and their further arguments
    **dict.fromkeys(("effective_step", "transition", "regime", "asymptotic_rate", "phase", "heuristic_period"), ()),
    **dict.fromkeys(("restart_factor", "restart_rate", "restart_table", "soft_restart", "envelope"), (3,)),
}
MODES = [(name, (rule, sigma, *rest), {}, word) for name, rest in OF_A_MODE.items() for rule, sigma, word in (
    (None, 0.5, "rule"), ([HB, None], 0.5, "rule"), (HB, 1.5, "sigma"), (HB, [0.5, math.nan], r"sigma\[1\]"),
    (HB, "high", "sigma"), ([HB, NAG], [0.1, 0.2, 0.3], ""), (OuterRule(1.7e308, 0.9), 1.0, "1e100"))]  # fmt: skip
PERIODS = [(name, (HB, 0.5, period), {}, "period") for name in ("restart_rate", "soft_restart", "hurt_share")
           for period in (-1, 0, 2.5, True, 2**53, [])]  # fmt: skip
REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("effective_progress", ([0.5, 2.0], 1.0, 3), {}, "inner_lr"),
    ("effective_progress", (0.5, 1.0, 0), {}, "inner_steps"),
    ("scheduled_progress", ([1.0, 3.0], [0.1, 0.5]), {}, r"eigenvalue\[1\]"),
    ("scheduled_progress", (1.0, [[1.0]]), {}, "inner_lrs"),
    ("cancellation_periods", (HB, 0.5, 0), {}, "count"),
    ("log_final_loss", (HB, 0.5, 10, 3, [1, 1]), {}, "weights"),
    ("best_period", (HB, SIX), {"max_period": 5, "objective": "lose"}, "objective"),
    ("best_period", (HB, SIX), {"max_period": 5, "weights": [1, -1]}, "weights"),
    ("soft_restart", (OuterRule(1.0, 0.0), 0.5, 3), {}, "momentum"),
    ("soft_restart", (HB, [0.5, 0.6], [1, 2, 3]), {}, "shapes"),
    ("chebyshev_rate", (0.5, 0.3), {}, ""),
    ("cycle_matrix", (HB, 0.5, 3, math.nan), {}, "retain"),
    ("advise", (HB, [0.0, 0.0]), {}, "mode"),
    ("advise", (HB, [0.5]), {"max_period": 10**9}, "max_period"),
]


@pytest.mark.parametrize(("name", "arguments", "options", "word"), [*MODES, *PERIODS, *REFUSED])
def test_refused(name: str, arguments: tuple[Any, ...], options: dict[str, Any], word: str) -> None:
    """An argument out of its range is refused by name."""
    with pytest.raises(ValueError, match=f"^{name}: .*{word}"):
        getattr(theory, name)(*arguments, **options)


def test_weights_and_grids() -> None:
    """Weights are normalised to sum 1, whatever their size; numbers broadcast to an array of rules."""
    for scale in (1e-310, 1.0, 1.7e308 / 3):
        np.testing.assert_allclose(check_weights("here", [scale, 0, 2 * scale, 3 * scale], 4), [1 / 6, 0, 1 / 3, 1 / 2])
    grid = rule_grid([[0.5], [0.7]], [0.0, 0.9], True, "ema")
    assert (grid.shape, grid[1, 1]) == ((2, 2), OuterRule(0.7, 0.9, True, "ema"))
