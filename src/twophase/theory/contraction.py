"""Compute the restart factor chi_K: what a cycle of K rounds, begun with an empty buffer, leaves of a mode.

`chi_K = [T^K]_11 = x_K / x_0` from `m_0 = 0`. Given as (sign, log|chi|), since its powers over a run underflow. The
digits are those of docs/theory-limits.md, in every regime; slow modes keep theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twophase.rule import OuterRule
from twophase.theory.inputs import (
    Floats,
    Rules,
    check_count,
    check_counts,
    check_modes,
    check_rule,
    check_weights,
    common_shape,
)
from twophase.theory.kernel import Mode
from twophase.theory.modes import asymptotic_rate
from twophase.theory.powers import Signs, log_factors, table


def log_restart_factor(rule: Rules, sigma: ArrayLike, period: ArrayLike) -> tuple[Any, Any]:
    """Return the sign and logarithm of the restart factor: `chi_K = [T^K]_11`, as (sign chi_K, log|chi_K|).

    K >= 0; K = 0 gives chi = 1. The sign is -1, 0 or 1; the logarithm is natural, -inf at an exact zero. Its relative
    error is about 1e-15 for K up to 1e6, in every regime and next to zeros of chi too. Beyond about 1e7 digits are lost
    next to the upper edge of the oscillatory interval at momentum near 1, at 1e9 half of them.

    Source: paper section 3, proposition 1 (valid in every regime through T^K); theory note R6 and F3.

    >>> sign, log = log_restart_factor(OuterRule(1.0, 0.9, form="ema"), 0.95, 8000)
    >>> int(sign), round(float(log), 2)
    (1, -421.58)
    """
    return _log_factor("log_restart_factor", rule, sigma, period, 0)[:2]


def restart_factor(rule: Rules, sigma: ArrayLike, period: ArrayLike) -> Any:
    """Return the restart factor `chi_K = [T^K]_11` itself: the share of a mode that is left after a cycle of K rounds.

    Underflows to 0 below about 1e-308; `log_restart_factor` does not.

    Source: paper section 3, proposition 1; theory note R6.

    >>> round(float(restart_factor(OuterRule(1.0, 0.9, form="ema"), 0.95, 5)), 7)
    0.0098321
    """
    sign, log, _ = _log_factor("restart_factor", rule, sigma, period, 0)
    with np.errstate(over="ignore"):
        return sign * np.exp(log)


def restart_rate(rule: Rules, sigma: ArrayLike, period: ArrayLike) -> Any:
    """Return the contraction a round with a restart every K rounds: `r_K = -log|chi_K| / K`, in nats a round.

    +inf where chi_K is exactly 0, negative where the restarted mode grows.

    Source: paper section 3; theory note R7 and F3.

    >>> round(float(restart_rate(OuterRule(1.0, 0.9, form="ema"), 0.95, 5)), 5)
    0.92442
    """
    _, log, periods = _log_factor("restart_rate", rule, sigma, period, 1)
    return -log / periods + 0.0


def restart_table(rule: Rules, sigma: ArrayLike, max_period: int) -> tuple[Signs, Floats]:
    """Return (sign, log|chi|) for all periods 1 ... max_period at once, each of shape (max_period, ...).

    Entry K-1 belongs to period K. The signs are int8. Relative error of the logarithm below 1e-12 (next to a zero of
    chi: of chi relative to its envelope).

    Source: theory note F2.

    >>> sign, log = restart_table(OuterRule(1.0, 0.9, form="ema"), 0.95, 6)
    >>> (sign * np.exp(log)).round(5).tolist()
    [0.905, 0.73353, 0.50951, 0.2595, 0.00983, -0.2158]
    """
    mode = Mode.of("restart_table", rule, sigma)
    rounds = check_count("restart_table", "max_period", max_period)
    sign, log = table(mode.each(np.ravel), rounds)
    return sign.reshape(rounds, *mode.shape), log.reshape(rounds, *mode.shape)


def restart_can_help(rule: Rules, sigma: ArrayLike) -> Any:
    """Return True if a restart schedule can contract a mode faster in the long run: only if the mode oscillates.

    Theorem 1: with real eigenvalues `|chi_K| >= (spectral radius)^K` for every K, strictly if b > 0 and s > 0.
    Theorem 2, its consequence: a mode that diverges without restarts (spectral radius >= 1, always a real one)
    diverges under every restart schedule.

    Source: theory note R17 and R18; paper appendix A.6 says less (its errors E16 and E17).

    >>> restart_can_help(OuterRule(1.0, 0.9, form="ema"), [0.01, 0.5]).tolist()
    [False, True]
    """
    return (Mode.of("restart_can_help", rule, sigma).disc().hi < 0)[()]


def hurt_share(rule: OuterRule, sigma: ArrayLike, period: int, weights: ArrayLike | None = None) -> float:
    """Return the share of the modes, by weight, that a restart every `period` rounds slows down.

    `sum of w_j over modes with r_K(sigma_j) < r_infinity(sigma_j)`. Slow modes outside the oscillatory interval always
    belong to it (Theorem 1).

    Source: theory note R15 and R17.

    >>> round(hurt_share(OuterRule(1.0, 0.9, form="ema"), [0.01, 0.2, 0.5, 0.9], 5), 2)
    0.25
    """
    check_rule("hurt_share", rule)
    values = check_modes("hurt_share", sigma).reshape(-1)
    shares = check_weights("hurt_share", weights, values.shape[-1])
    rounds = check_count("hurt_share", "period", period)
    with_restart, without = -log_restart_factor(rule, values, rounds)[1] / rounds, asymptotic_rate(rule, values)
    # Without momentum both are the same number in exact arithmetic.
    slack = np.where(np.isfinite(without), 1e-12 * np.abs(without), 0.0)
    return float(np.sum(shares[with_restart < without - slack]))


def _log_factor(where: str, rule: Rules, sigma: ArrayLike, period: ArrayLike, least: int) -> tuple[Any, Any, Any]:
    """Return sign, log|chi| and the periods, for the function named `where`."""
    mode, periods = Mode.of(where, rule, sigma), check_counts(where, "period", period, least)
    shape = common_shape(where, modes=mode.shape, period=periods.shape)
    indices = np.broadcast_to(np.arange(mode.size).reshape(mode.shape), shape).reshape(-1)
    sign, log = log_factors(mode.each(np.ravel), indices, np.broadcast_to(periods, shape).reshape(-1))
    return sign.reshape(shape)[()], log.reshape(shape)[()], periods
