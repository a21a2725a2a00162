"""Arguments out of their range: a ValueError that names the argument, for every function; and no warning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from oracle import HB, NAG, SIX
from twophase import theory
from twophase.rule import OuterRule
from twophase.theory import Block

HUGE = 10**400  # an int beyond all doubles
OF_SIGMA: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: ((), {}) for name in ("effective_step", "transition", "regime", "asymptotic_rate", "phase")},
    **{name: ((), {}) for name in ("phase_shift", "restart_can_help", "rounded_period", "heuristic_period")},
    **{name: ((3,), {}) for name in ("envelope", "log_restart_factor", "restart_factor", "restart_rate")},
    **{name: ((3,), {}) for name in ("restart_table", "cancellation_periods", "soft_restart", "cycle_matrix")},
    **{name: ((3,), {}) for name in ("rollout", "hurt_share", "controls")},
    **{name: ((), {"max_period": 3}) for name in ("best_period", "mixed_periods", "advise")},
    "log_final_loss": ((10, 3), {}),
}


@pytest.mark.parametrize("name", OF_SIGMA)
def test_rule_and_sigma(name: str) -> None:
    """Every function of them refuses a rule that is none and a sigma outside [0, 1], however large a number it is."""
    arguments, options = OF_SIGMA[name]
    for sigma in (HUGE, math.nan, -0.1, 1.5, [0.5, HUGE], None):
        with pytest.raises(ValueError, match="sigma"):
            getattr(theory, name)(HB, sigma, *arguments, **options)
    for rule in () if name in ("advise", "controls") else (0.7, None, [HB, 0.7], "HB"):
        with pytest.raises(ValueError, match="rule"):
            getattr(theory, name)(rule, 0.5, *arguments, **options)


@pytest.mark.parametrize("count", [HUGE, 2**53, 0, 2.5, None], ids=["huge", "2^53", "0", "2.5", "none"])
@pytest.mark.parametrize(
    ("name", "arguments", "option"),
    [
        ("restart_rate", (HB, 0.5), "period"),
        ("restart_table", (HB, 0.5), "max_period"),
        ("hurt_share", (HB, 0.5), "period"),
        ("best_period", (HB, 0.5), "max_period"),
        ("mixed_periods", (HB, [0.5]), "max_period"),
        ("block_periods", (HB, [[0.5]]), "max_period"),
        ("cancellation_periods", (HB, 0.5), "count"),
        ("soft_restart", (HB, 0.5), "period"),
        ("cycle_matrix", (HB, 0.5), "period"),
        ("rollout", (HB, 0.5), "rounds"),
        ("rollout_blocks", ([Block(0.5, HB)],), "rounds"),
        ("effective_progress", (0.5, 0.1), "inner_steps"),
    ],
)
def test_counts(name: str, arguments: tuple[Any, ...], option: str, count: Any) -> None:
    """A count is a whole number, at least 1 and below 2^53."""
    with pytest.raises(ValueError, match=option):
        getattr(theory, name)(*arguments, **{option: count})


@pytest.mark.parametrize(
    ("name", "arguments", "options", "word"),
    [
        ("rule_grid", (None, 0.5), {}, "lr"),
        ("rule_grid", (0.7, 1.0), {}, "momentum"),
        ("regime", (OuterRule(1e200, 0.9), 0.5), {}, "lr"),
        ("effective_progress", (0.5, -0.1, 3), {}, "inner_lr"),
        ("effective_progress", (3.0, 0.5, 3), {}, "inner_lr"),
        ("scheduled_progress", (0.5, []), {}, "inner_lrs"),
        ("scheduled_progress", (3.0, [0.5]), {}, "inner_lr"),
        ("scheduled_progress", (3.0, [0.5]), {"weight_decay": -1}, "weight_decay"),
        ("envelope", (HB, 0.5, -1.0), {}, "rounds"),
        ("best_period", (HB, SIX), {"max_period": 5, "objective": "lose"}, "objective"),
        ("best_period", (HB, SIX), {"max_period": 5, "objective": "loss"}, "rounds"),
        ("best_period", (HB, [0.5, 0.6]), {"max_period": 5, "weights": [1, -1]}, "weights"),
        ("block_periods", (HB, 0.3), {"max_period": 3}, "blocks"),
        ("block_periods", ([HB, NAG], [[0.5]]), {"max_period": 3}, "blocks"),
        ("chebyshev_rate", (0.5, 0.3), {}, "sigma_max"),
        ("soft_restart", (OuterRule(1.0, 0.0), 0.5, 3), {}, "momentum"),
        ("soft_restart", (HB, 0.0, 3), {}, "sigma"),
        ("soft_restart", (OuterRule(0.5, 0.5), 1.0, 4), {}, "period"),
        ("cycle_matrix", (HB, 0.5, 3, math.nan), {}, "retain"),
        ("rollout", (HB, [0.5, 0.9], 5), {"weights": [1.0]}, "weights"),
        ("rollout", (HB, [0.5, 0.9], 5), {"initial": [1.0, math.nan]}, "initial"),
        ("rollout", (HB, [0.5, 0.9], 5), {"noise": -0.1}, "noise"),
        ("rollout", (HB, [0.5, 0.9], 5), {"noise": np.zeros((5, 3, 2)), "replicas": 2}, "replicas"),
        ("rollout", (HB, [0.5, 0.9], 5), {"seeds": [1, -1]}, "seeds"),
        ("rollout", (HB, [0.5, 0.9], 5, "test-rising:0.5"), {}, "loss"),
        ("advise", (HB, [0.0]), {}, "sigma"),
        ("advise", (OuterRule(0.0, 0.9), [0.5]), {}, "lr"),
        ("advise", (HB, [0.5, 0.3]), {"weights": [1.0]}, "weights"),
        ("rollout", (OuterRule(1e60, 0.9), [0.5], 12), {}, "1e300"),
        ("rollout_blocks", (0.3, 5), {}, "blocks"),
    ],
)
def test_refused(name: str, arguments: tuple[Any, ...], options: dict[str, Any], word: str) -> None:
    """An argument out of its range is refused by name."""
    with pytest.raises(ValueError, match=word):
        getattr(theory, name)(*arguments, **options)
