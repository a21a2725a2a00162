"""Compute with the exact theory of outer momentum and its restarts: `from twophase import theory`.

Every function takes the rule first, then sigma, and broadcasts. NumPy and SciPy only; no torch.
docs/theory-results.md lists the results by number (R1 to R34), with functions and tests.
"""

from twophase.theory.advice import Advice, Criterion, advise, controls
from twophase.theory.factor import (
    hurt_share,
    log_restart_factor,
    restart_can_help,
    restart_factor,
    restart_rate,
    restart_table,
)
from twophase.theory.mixing import Mixture, chebyshev_rate, mixed_periods
from twophase.theory.modes import (
    asymptotic_rate,
    effective_progress,
    effective_step,
    envelope,
    oscillatory_interval,
    phase,
    phase_shift,
    regime,
    scheduled_progress,
    stable_limit,
    transition,
)
from twophase.theory.noise import expected_loss, momentum_gain, stationary_variance
from twophase.theory.periods import (
    best_period,
    block_periods,
    cancellation_periods,
    heuristic_period,
    log_final_loss,
    rounded_period,
)
from twophase.theory.rollout import Block, BlockRollout, Rollout, rollout, rollout_blocks
from twophase.theory.rules import Rules, rule_grid
from twophase.theory.soft import cycle_matrix, soft_restart

__all__ = [
    "Advice",
    "Block",
    "BlockRollout",
    "Criterion",
    "Mixture",
    "Rollout",
    "Rules",
    "advise",
    "asymptotic_rate",
    "best_period",
    "block_periods",
    "cancellation_periods",
    "chebyshev_rate",
    "controls",
    "cycle_matrix",
    "effective_progress",
    "effective_step",
    "envelope",
    "expected_loss",
    "heuristic_period",
    "hurt_share",
    "log_final_loss",
    "log_restart_factor",
    "mixed_periods",
    "momentum_gain",
    "oscillatory_interval",
    "phase",
    "phase_shift",
    "regime",
    "restart_can_help",
    "restart_factor",
    "restart_rate",
    "restart_table",
    "rollout",
    "rollout_blocks",
    "rounded_period",
    "rule_grid",
    "scheduled_progress",
    "soft_restart",
    "stable_limit",
    "stationary_variance",
    "transition",
]
