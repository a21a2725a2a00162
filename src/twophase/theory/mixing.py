"""Mix restart periods: the best mix of cycles of several lengths, and the limit of all schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twophase.rule import OuterRule
from twophase.theory.checks import count, counts, numbers, progress_of
from twophase.theory.factor import restart_table

_TIE = 1e-11  # relative difference below which two single periods are equally good
_LARGEST_RATE = 1e4  # of a mode in the linear program, in units of the slowest one's: exact zeros have an infinite one
_SMALL_SHARE = 1e-9  # of the rounds, below which a period is not part of a mix


@dataclass(frozen=True, slots=True)
class Mixture:
    """Hold a mix of restart periods in the long run.

    Args:
        periods: the lengths of the cycles in it, ascending.
        shares: share of the rounds spent in cycles of each length; sums to 1.
        rate: contraction a round of the slowest mode, in nats.
        fixed_period: the best single period, the smallest if several are.
        fixed_rate: its rate.
    """

    periods: tuple[int, ...]
    shares: tuple[float, ...]
    rate: float
    fixed_period: int
    fixed_rate: float


def mixed_periods(rule: OuterRule, sigma: ArrayLike, *, max_period: int) -> Mixture:
    """Return the mix of restart periods with the best worst-case rate in the long run, by a linear program.

    Variables: f_K >= 0, cycles of length K <= max_period a round, and t. `min t` subject to
    `sum_K f_K log|chi_K(sigma_j)| <= t` for every mode j and `sum_K K f_K = 1`; the rate is -t. Solved by HiGHS
    (SciPy). Never below the best single period up to the same max_period, never above `chebyshev_rate`; no gain where
    the slowest modes do not oscillate. Leave out modes with sigma 0, which nothing moves.

    Source: theory note R24.

    >>> mix = mixed_periods(OuterRule(1.0, 0.9, form="ema"), np.linspace(0.3, 0.95, 241), max_period=40)
    >>> round(mix.rate, 4), mix.fixed_period
    (0.1946, 7)
    """
    from scipy.optimize import linprog  # noqa: PLC0415 - a third of a second that few callers need

    values, longest = progress_of(sigma).reshape(-1), count("max_period", max_period)
    logs = restart_table(rule, values, longest)[1] / np.arange(1, longest + 1)[:, None] + 0.0  # a round, (K, M)
    worst = np.max(logs, axis=1)
    best = float(worst.min())
    if np.isneginf(best):  # every mode is gone after one cycle
        gone = int(np.argmin(worst)) + 1
        return Mixture((gone,), (1.0,), np.inf, gone, np.inf)
    fixed = int(np.argmax(worst <= best + _TIE * abs(best)))
    fixed_rate = -float(worst[fixed]) + 0.0
    # The unknowns are shares of rounds u_K = K f_K, the coefficients rates in units of the slowest mode's. The
    # solver's tolerances then mean the same for slow modes and fast ones.
    with np.errstate(over="ignore"):
        scaled = np.clip(logs / (abs(best) or 1.0), -_LARGEST_RATE, _LARGEST_RATE)
    solved = linprog(
        np.append(np.zeros(longest), 1.0),
        A_ub=np.hstack([scaled.T, -np.ones((values.size, 1))]),
        b_ub=np.zeros(values.size),
        A_eq=np.append(np.ones(longest), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * longest + [(None, None)],
        method="highs",
    )
    shares = np.where(solved.x[:-1] > _SMALL_SHARE, solved.x[:-1], 0.0)
    shares /= shares.sum()
    used = np.flatnonzero(shares)
    rate = -float(np.max(shares[used] @ logs[used])) + 0.0  # of the mix that is returned, not of the solver's
    if rate <= fixed_rate:  # the solver's tolerance must not make a mix worse than one period
        shares, rate, used = np.eye(longest)[fixed], fixed_rate, np.array([fixed])
    return Mixture(tuple((used + 1).tolist()), tuple(shares[used].tolist()), rate, fixed + 1, fixed_rate)


def chebyshev_rate(sigma_min: ArrayLike, sigma_max: ArrayLike, rounds: ArrayLike | None = None) -> Any:
    """Return the worst-case contraction a round that no schedule can exceed on an interval of sigma.

    After T rounds of any schedule, at fixed lr and momentum, x_T is a polynomial of degree T in sigma, 1 at 0. Hence
    `rate <= (1/T) log cosh(T arccosh((k+1)/(k-1)))`, k = sigma_max/sigma_min; it tends to
    `-log((sqrt k - 1)/(sqrt k + 1))`.

    In nats a round: 0 at sigma_min 0, infinite where both ends are one. 0 <= sigma_min <= sigma_max <= 1; rounds >= 1,
    None for the limit of many.

    Source: theory note R25.

    >>> round(float(chebyshev_rate(0.3, 0.95)), 3), round(float(chebyshev_rate(0.3, 0.95, rounds=24)), 4)
    (1.271, 1.2425)
    """
    low, high = numbers("sigma_min", sigma_min, 0, 1), numbers("sigma_max", sigma_max, 0, 1)
    if np.any(low > high) or np.any(high == 0):
        raise ValueError(f"sigma_max must be positive and at least sigma_min, got {sigma_min} and {sigma_max}")
    with np.errstate(divide="ignore"):
        # -log((sqrt k - 1)/(sqrt k + 1)) = arccosh((k+1)/(k-1)), without a difference of roots
        angle = np.log1p(2 * np.sqrt(low) * (np.sqrt(low) + np.sqrt(high)) / (high - low))
        if rounds is not None:
            times = counts("rounds", rounds)
            turned = times * angle
            far = turned + np.log1p(np.exp(-2 * turned)) - np.log(2)
            angle = np.where(turned < 1, np.log1p(2 * np.sinh(np.minimum(turned, 1) / 2) ** 2), far) / times
    return angle[()]
