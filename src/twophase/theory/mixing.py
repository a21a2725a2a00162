"""Mix restart periods: cycles of several lengths, the best mix, a whole schedule, and the limit of all schedules."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.restart import AtRounds, Never, RestartPolicy
from twophase.rule import OuterRule
from twophase.theory.contraction import restart_table
from twophase.theory.inputs import (
    Floats,
    check_count,
    check_counts,
    check_modes,
    check_rule,
    check_sigma,
    check_weights,
    common_shape,
)
from twophase.theory.periods import log_final_loss

Counts: TypeAlias = NDArray[np.int64]

_TIE = 1e-12  # relative difference below which two single periods are equally good
_LARGEST_RATE = 1e4  # of a mode in the linear program, in units of the slowest one's: exact zeros have an infinite one
_SAME_LOSS = 1e-9  # log losses this near are equal: cycles commute with the last one, so many schedules tie
_SMALL_SHARE = 1e-9  # of the rounds, below which a period is not part of a mix
_PAIRS_UP_TO = 24  # periods up to which the search also exchanges pairs of cycles


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

    check_rule("mixed_periods", rule)
    values = check_modes("mixed_periods", sigma).reshape(-1)
    longest = check_count("mixed_periods", "max_period", max_period)
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
    if solved.status != 0:
        raise RuntimeError(f"mixed_periods: the linear program was not solved: {solved.message}")
    shares = np.where(solved.x[:-1] > _SMALL_SHARE, solved.x[:-1], 0.0)
    shares /= shares.sum()
    used = np.flatnonzero(shares)
    rate = -float(np.max(shares[used] @ logs[used])) + 0.0  # of the mix that is returned, not of the solver's
    if rate <= fixed_rate:  # the solver's tolerance must not make a mix worse than one period
        shares, rate, used = np.eye(longest)[fixed], fixed_rate, np.array([fixed])
    return Mixture(tuple((used + 1).tolist()), tuple(shares[used].tolist()), rate, fixed + 1, fixed_rate)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Hold cycles of whole lengths that fill a run.

    Args:
        counts: number of whole cycles of each length, lengths ascending.
        tail: rounds of the unfinished last cycle, 0 if none.
        log_loss: natural log of the loss at the end, initial loss 1/2.
    """

    counts: dict[int, int]
    tail: int
    log_loss: float

    @property
    def policy(self) -> RestartPolicy:
        """Return the schedule as a restart policy, short cycles first."""
        ends = list(accumulate(length for length, count in self.counts.items() for _ in range(count)))
        if not self.tail:
            ends = ends[:-1]  # a restart after the last round shows nowhere
        return AtRounds(tuple(ends)) if ends else Never()


def best_schedule(
    rule: OuterRule, sigma: ArrayLike, *, rounds: int, max_period: int, weights: ArrayLike | None = None
) -> Schedule:
    """Return the whole cycles of mixed lengths with the lowest loss after `rounds` rounds that a local search finds.

    The search starts from the linear program's mix, from every single period and from no restart. It exchanges one or
    two cycles at a time until nothing improves; the unfinished last cycle takes up the difference. Good, not proven
    optimal; never worse than any single period up to max_period, or than no restart. `weights` of the modes are >= 0,
    equal when None.

    Source: theory note R24 (finite horizon).

    >>> schedule = best_schedule(OuterRule(1.0, 0.9, form="ema"), [0.95, 0.3], rounds=40, max_period=12)
    >>> bool(schedule.log_loss < log_final_loss(OuterRule(1.0, 0.9, form="ema"), [0.95, 0.3], 40, range(1, 41)).min())
    True
    """
    from scipy.special import logsumexp  # noqa: PLC0415 - a third of a second, for which --help must not wait

    where = "best_schedule"
    check_rule(where, rule)
    values = check_modes(where, sigma).reshape(-1)
    total = check_count(where, "rounds", rounds)
    longest = min(check_count(where, "max_period", max_period), total)
    shares = check_weights(where, weights, values.size)
    counted = shares > 0
    values, log_weights = values[counted], np.log(shares[counted])
    table = np.concatenate([np.zeros((1, values.size)), restart_table(rule, values, longest)[1]])
    finite = np.where(np.isneginf(table), 0.0, table)
    # An exact zero: lower than what is left of any mode in any other way, so that the search has no infinities.
    gone = total * float((finite[1:] / np.arange(1, longest + 1)[:, None]).min()) - 1000
    search = _Search(np.where(np.isneginf(table), gone, table), log_weights, total)
    improved = [search.improved(start) for start in search.starts(rule, values)]
    lowest = min(loss for _, loss in improved)
    best = next(counts for counts, loss in improved if loss <= lowest + _TIE * abs(lowest))
    counts = {int(k): int(best[k]) for k in np.flatnonzero(best)}
    tail = total - sum(k * count for k, count in counts.items())
    with np.errstate(divide="ignore"):
        residual = sum(count * table[k] for k, count in counts.items()) + table[tail]
        log_loss = float(logsumexp(2 * residual + log_weights) - np.log(2))
    never = float(log_final_loss(rule, values, total, total, shares[counted]))
    slack = _TIE * abs(log_loss) if np.isfinite(log_loss) else 0.0
    return Schedule({}, total, never) if never <= log_loss + slack else Schedule(counts, tail, log_loss)


class _Search:
    """Search locally over how many cycles of each length; position k of an array of counts is length k.

    `table[k]` holds the modes' log|chi_k|.
    """

    def __init__(self, table: Floats, log_weights: Floats, total: int) -> None:
        self.table, self.log_weights, self.total = table, log_weights, total
        self.lengths = np.arange(len(table))
        pairs = combinations_with_replacement(self.lengths[1:], 2) if len(table) <= _PAIRS_UP_TO else ()
        self.exchanges = np.array([np.bincount(move, minlength=len(table)) for move in (*zip(self.lengths), *pairs)])
        self.exchanges[:, 0] = 0
        self.length, self.logs = self.exchanges @ self.lengths, self.exchanges @ table

    def starts(self, rule: OuterRule, values: Floats) -> list[Counts]:
        """Return counts to begin with: the best single periods, and the mix rounded down."""
        single = list(np.diag(self.total // np.maximum(self.lengths, 1))[1:])
        starts = sorted(single, key=self.loss)[:3]
        if np.any(values > 0):
            mix = mixed_periods(rule, values[values > 0], max_period=len(self.table) - 1)
            counts = np.zeros_like(self.lengths)
            counts[list(mix.periods)] = [
                int(share * self.total / k) for k, share in zip(mix.periods, mix.shares, strict=True)
            ]
            while self.total - counts @ self.lengths >= len(self.table):
                counts[mix.periods[0]] += 1
            starts.append(counts)
        return starts

    def loss(self, counts: Counts) -> float:
        """Return the log of the final loss."""
        return float(self._losses(counts @ self.table + self.table[self.total - int(counts @ self.lengths)]))

    def _losses(self, logs: Floats) -> Any:
        from scipy.special import logsumexp  # noqa: PLC0415 - a third of a second, for which --help must not wait

        return logsumexp(2 * logs + self.log_weights, axis=-1) - np.log(2)

    def improved(self, counts: Counts) -> tuple[Counts, float]:
        """Exchange cycles while that lowers the loss."""
        best = self.loss(counts)
        while True:
            lowest, change = best, None
            base, used = counts @ self.table, int(counts @ self.lengths)
            for removed in np.flatnonzero((self.exchanges <= counts).all(axis=1)):
                tails = self.total - (used - self.length[removed]) - self.length
                fits = np.flatnonzero((tails >= 0) & (tails < len(self.table)))
                losses = self._losses(base - self.logs[removed] + self.logs[fits] + self.table[tails[fits]])
                if losses.size and losses.min() < lowest - _SAME_LOSS:
                    lowest = float(losses.min())
                    change = self.exchanges[fits[np.argmax(losses <= lowest + _SAME_LOSS)]] - self.exchanges[removed]
            if change is None:
                return counts, best
            counts, best = counts + change, lowest


def chebyshev_rate(sigma_min: ArrayLike, sigma_max: ArrayLike, rounds: ArrayLike | None = None) -> Any:
    """Return the worst-case contraction a round that no schedule can exceed on an interval of sigma.

    After T rounds of any schedule, at fixed lr and momentum, x_T is a polynomial of degree T in sigma, 1 at 0. Hence
    `rate <= (1/T) log cosh(T arccosh((k+1)/(k-1)))`, k = sigma_max/sigma_min; it tends to
    `-log((sqrt k - 1)/(sqrt k + 1))`.

    Args:
        sigma_min: lower end, 0 <= sigma_min <= sigma_max.
        sigma_max: upper end, in (0, 1].
        rounds: T >= 1; None for the limit of many rounds.

    Returns:
        Nats a round; 0 at sigma_min 0, infinite where both ends are one.

    Source: theory note R25.

    >>> round(float(chebyshev_rate(0.3, 0.95)), 3), round(float(chebyshev_rate(0.3, 0.95, rounds=24)), 4)
    (1.271, 1.2425)
    """
    where = "chebyshev_rate"
    low, high = check_sigma(where, sigma_min), check_sigma(where, sigma_max)
    times = None if rounds is None else check_counts(where, "rounds", rounds)
    common_shape(where, sigma_min=low.shape, sigma_max=high.shape, rounds=() if times is None else times.shape)
    if np.any(low > high) or np.any(high == 0):
        raise ValueError(
            f"{where}: sigma_min {sigma_min}, sigma_max {sigma_max}; sigma_max must be positive and larger"
        )
    with np.errstate(divide="ignore"):
        # -log((sqrt k - 1)/(sqrt k + 1)) = arccosh((k+1)/(k-1)), without a difference of roots
        angle = np.log1p(2 * np.sqrt(low) * (np.sqrt(low) + np.sqrt(high)) / (high - low))
        if times is not None:
            turned = times * angle
            far = turned + np.log1p(np.exp(-2 * turned)) - np.log(2)
            angle = np.where(turned < 1, np.log1p(2 * np.sinh(np.minimum(turned, 1) / 2) ** 2), far) / times
    return angle[()]
