"""Advise on restarts of a given rule on given modes: the best period, and what to compare it with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.restart import Never, Periodic, mean_outer_gain
from twophase.rule import OuterRule
from twophase.theory.checks import numbers
from twophase.theory.factor import hurt_share, restart_rate
from twophase.theory.modes import asymptotic_rate
from twophase.theory.periods import OBJECTIVES, Objective, best_period, cancellation_periods, log_final_loss
from twophase.theory.rules import rule_grid

_MOST_ROUNDS = 10_000  # for a mean gain, and the longest period that is tried unless `max_period` is given
_MOST_FACTORS = 10**7  # modes times periods, whose restart factors are in memory together
_SAME = 1e-9  # relative difference of rates or log losses up to which a restart is no better than none


@dataclass(frozen=True, slots=True)
class Criterion:
    """A setting: what one criterion chooses, or a control.

    Args:
        name: an objective of `best_period`, or the control in words.
        period: of its restarts; None for no restart.
        rate: contraction a round of the slowest mode, nats; negative if it diverges.
        log_loss: natural log of the loss at the horizon; None without one.
    """

    name: str
    period: int | None
    rate: float
    log_loss: float | None


@dataclass(frozen=True, slots=True)
class Advice:
    """The theory's results for a rule and its modes.

    Args:
        rule: the rule asked about.
        sigma, weights: the modes, without those of weight 0 or sigma 0; the weights sum to 1.
        rounds: the horizon, or None.
        max_period: the longest period that was tried.
        criteria: choice of each criterion; the first is the recommended one.
        without: the rule without restarts.
        controls: other rules without restarts that a restart must be compared with; the last has the tuned momentum.
        hurt: share of the weight in modes that the recommended period slows down; 0 if that is no restart.
    """

    rule: OuterRule
    sigma: NDArray[np.float64]
    weights: NDArray[np.float64]
    rounds: int | None
    max_period: int
    criteria: tuple[Criterion, ...]
    without: Criterion
    controls: tuple[Criterion, ...]
    hurt: float

    @property
    def recommended(self) -> Criterion:
        """The choice of the criterion that fits: exact loss with a horizon, slowest rate without one."""
        return self.criteria[0]


def advise(
    rule: OuterRule,
    sigma: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    rounds: int | None = None,
    max_period: int | None = None,
) -> Advice:
    """Return the period to choose for a rule on modes of given sigma, beside settings without restarts.

    Args:
        rule: the outer rule, in either form.
        sigma: effective progress of the modes, shape (M,). Modes with sigma 0 are left out: nothing moves them.
        weights: one a mode, >= 0; equal when None.
        rounds: the horizon T; without it the recommendation is by the rate of the slowest mode.
        max_period: longest period tried; by default the horizon, or three times the longest first cancellation (at
            most 10000).

    Raises:
        ValueError: values out of range, or no mode with positive sigma and weight.

    Source: theory note R13 to R22 and R31.

    >>> advice = advise(OuterRule(1.0, 0.9, form="ema"), [0.95, 0.6, 0.3], rounds=120)
    >>> advice.recommended.period, round(advice.hurt, 2)
    (7, 0.0)
    """
    values = numbers("sigma", sigma, 0, 1).reshape(-1)
    shares = np.ones(values.size) if weights is None else numbers("weights", weights, 0)
    if shares.shape != values.shape or not (shares >= 0).all():
        raise ValueError(f"advise: weights must be one number >= 0 for each of {values.size} modes, got {weights}")
    moving = (values != 0) & (shares > 0)
    if not moving.any() or rule.lr == 0:
        raise ValueError(f"advise: lr and a sigma must be positive, got lr {rule.lr:g} and sigma {sigma}")
    values, shares = values[moving], shares[moving] / shares[moving].sum()
    first = float(np.max(np.nan_to_num(cancellation_periods(rule, values, 1))))
    longest = max_period or min(rounds or max(int(3 * first) + 6, 60), _MOST_ROUNDS, _MOST_FACTORS // values.size)
    objectives: list[Objective] = [objective for objective in OBJECTIVES if objective != "loss" or rounds is not None]

    def setting(name: str, rule: OuterRule, period: int | None) -> Criterion:
        rates = asymptotic_rate(rule, values) if period is None else restart_rate(rule, values, period)
        loss = None if rounds is None else float(log_final_loss(rule, values, rounds, period or rounds, shares))
        return Criterion(name, period, float(np.min(rates)), loss)

    without = setting("no restart", rule, None)
    criteria = []
    for name in objectives:
        period = best_period(rule, values, weights=shares, max_period=longest, rounds=rounds, objective=name)
        period = None if rounds is not None and period >= rounds else period
        criteria.append(setting(name, rule, period))
    best = criteria[0]
    pair = (without.rate, best.rate) if best.log_loss is None else (best.log_loss, without.log_loss or 0.0)
    if pair[0] >= pair[1] or math.isclose(*pair, rel_tol=_SAME):  # as without momentum, where all periods do the same
        best = criteria[0] = Criterion(best.name, None, without.rate, without.log_loss)
    return Advice(
        rule=rule,
        sigma=values,
        weights=shares,
        rounds=rounds,
        max_period=longest,
        criteria=tuple(criteria),
        without=without,
        controls=tuple(
            setting(name, other, None) for name, other in _controls(rule, values, best.period, rounds).items()
        ),
        hurt=0.0 if best.period is None else hurt_share(rule, values, best.period, shares),
    )


def controls(rule: OuterRule, sigma: ArrayLike, period: int | None, rounds: int | None = None) -> dict[str, float]:
    """Return rates of the slowest mode without restarts, nats a round, that any gain by restarts must be held against.

    A restart lowers the mean outer gain, so it is also a smaller step. A gain at a badly tuned momentum is no gain over
    a tuned one. Hence three controls, of the rule's kind. The first has no momentum and the same step `lr` (sum form).
    The second has no momentum and the period's mean outer gain over `rounds` rounds (in the long run when None). The
    third has the best momentum of a fine grid on [0, 1), the rule's included, at the same EMA lr.

    Source: theory note R25 and R31; paper error E11.

    >>> [round(rate, 3) for rate in controls(OuterRule(1.0, 0.9, form="ema"), [0.95, 0.3], 3).values()]
    [0.03, 0.058, 0.619]
    """
    others = _controls(rule, numbers("sigma", sigma, 0, 1).reshape(-1), period, rounds)
    return {name: float(np.min(asymptotic_rate(other, sigma))) for name, other in others.items()}


def _controls(
    rule: OuterRule, sigma: NDArray[np.float64], period: int | None, rounds: int | None
) -> dict[str, OuterRule]:
    """Return the rules of `controls` by name."""
    same, ema_lr, total = rule.to("sum").lr, rule.to("ema").lr, rounds or period
    restart = Periodic(period) if period else Never()
    gain = mean_outer_gain(rule, restart, min(total, _MOST_ROUNDS)) if total else ema_lr
    momenta = np.unique([*np.linspace(0, 0.995, 200), *(1 - 0.005 / 1.25 ** np.arange(1, 40)), rule.momentum])
    rates = asymptotic_rate(rule_grid(ema_lr, momenta, rule.nesterov, "ema")[:, None], sigma).min(axis=1)
    tuned = OuterRule(ema_lr, float(momenta[np.argmax(rates)]), rule.nesterov, "ema")
    return {
        f"no momentum, the same step (lr {same:.4g})": OuterRule(same, 0.0),
        f"no momentum, the same mean gain (lr {gain:.4g})": OuterRule(gain, 0.0),
        f"momentum tuned to {tuned.momentum:.6g} at EMA lr {ema_lr:.4g}, no restart": tuned,
    }
