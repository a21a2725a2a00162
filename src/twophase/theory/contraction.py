"""Compute the restart factor chi_K: what a cycle of K rounds, begun with an empty buffer, leaves of a mode.

`chi_K = [T^K]_11 = x_K / x_0` from `m_0 = 0`. Given as (sign, log|chi|), since its powers over a run underflow.

Two ways to it, for every regime alike and without a closed form:

* one period (`log_restart_factor`): T^K by repeated squaring with twice a double's digits (`powers.py`);
* all periods up to a largest one (`restart_table`): the recurrence itself in doubles, and more digits where those do
  not suffice (`table.py`).

In both a mode that has barely moved is followed by its deficit d = 1 - chi, so that slow modes keep their digits.

Functions take `rule`, one `OuterRule` or an array of them, `sigma` in [0, 1] and `period`, whole numbers below 2^53;
all three broadcast. Anything else is a ValueError that names the function, the argument and the entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twophase.theory.inputs import Floats, Rules, check_count, check_counts, common_shape
from twophase.theory.kernel import Mode
from twophase.theory.powers import Signs, log_factors, table


def log_restart_factor(rule: Rules, sigma: ArrayLike, period: ArrayLike) -> tuple[Any, Any]:
    """Return the sign and logarithm of the restart factor: `chi_K = [T^K]_11`, as (sign chi_K, log|chi_K|).

    Args:
        rule: one rule or an array of rules.
        sigma: effective progress.
        period: K >= 0; K = 0 gives chi = 1.

    Returns:
        (sign, log): sign is -1, 0 or 1; the logarithm is natural, -inf at an exact zero. Relative error of the
        logarithm about 1e-15, whatever the regime, next to zeros of chi too, for K up to 1e6. Beyond about 1e7 digits
        are lost next to the upper edge of the oscillatory interval at momentum near 1, at 1e9 half of them.

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

    Returns:
        The rate; +inf where chi_K is exactly 0, negative where the restarted mode grows. Slow modes keep their digits.

    Source: paper section 3; theory note R7 and F3.

    >>> round(float(restart_rate(OuterRule(1.0, 0.9, form="ema"), 0.95, 5)), 5)
    0.92442
    """
    _, log, periods = _log_factor("restart_rate", rule, sigma, period, 1)
    return -log / periods + 0.0


def restart_table(rule: Rules, sigma: ArrayLike, max_period: int) -> tuple[Signs, Floats]:
    """Return the restart factors of all periods 1 ... max_period at once.

    Args:
        rule: one rule or an array of rules.
        sigma: effective progress in [0, 1]; broadcasts against the rules to some shape.
        max_period: the largest period, a whole number >= 1.

    Returns:
        (sign, log|chi|), each of shape (max_period, ...): entry K-1 belongs to period K. The signs are int8. Relative
        error of the logarithm below 1e-12 (next to a zero of chi: of chi relative to its envelope).

    Source: theory note F2.

    >>> sign, log = restart_table(OuterRule(1.0, 0.9, form="ema"), 0.95, 6)
    >>> (sign * np.exp(log)).round(5).tolist()
    [0.905, 0.73353, 0.50951, 0.2595, 0.00983, -0.2158]
    """
    mode = Mode.of("restart_table", rule, sigma)
    rounds = check_count("restart_table", "max_period", max_period)
    sign, log = table(mode.each(np.ravel), rounds)
    return sign.reshape(rounds, *mode.shape), log.reshape(rounds, *mode.shape)


def _log_factor(where: str, rule: Rules, sigma: ArrayLike, period: ArrayLike, least: int) -> tuple[Any, Any, Any]:
    """Return sign, log|chi| and the periods, for the function named `where`."""
    mode, periods = Mode.of(where, rule, sigma), check_counts(where, "period", period, least)
    shape = common_shape(where, modes=mode.shape, period=periods.shape)
    places = np.broadcast_to(np.arange(mode.size).reshape(mode.shape), shape).reshape(-1)
    sign, log = log_factors(mode.each(np.ravel), places, np.broadcast_to(periods, shape).reshape(-1))
    return sign.reshape(shape)[()], log.reshape(shape)[()], periods
