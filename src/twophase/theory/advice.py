"""Advise on restarts of a given rule on a given spectrum, in a value that holds all that the theory says.

Used by `twophase period` and by reports; it prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from twophase.restart import Never, Periodic, RestartPolicy
from twophase.rule import OuterRule
from twophase.theory.contraction import hurt_share, log_restart_factor, restart_can_help, restart_rate, restart_table
from twophase.theory.inputs import Floats, check_count, check_modes, check_rule, check_weights, rule_grid
from twophase.theory.modes import REGIMES, asymptotic_rate, effective_step, regime, stable_limit
from twophase.theory.periods import (
    OBJECTIVES,
    Objective,
    best_periods,
    cancellation_periods,
    heuristic_period,
    log_final_loss,
)

_DEFAULT_PERIODS = 60, 10_000  # the least and the most that are tried unless `max_period` is given
_LONGEST_PERIOD = 10**6
_TINY = 1e-150  # sigma at which only the first order counts
_MOST_FACTORS = 10**8  # modes times periods; their restart factors are in memory together, some 80 bytes each


@dataclass(frozen=True, slots=True)
class Criterion:
    """Hold what one criterion chooses.

    Args:
        objective: its name (see `best_period`).
        period: the period it chooses; None for no restart.
        rate: contraction a round of the slowest mode at that period, nats.
        log_loss: natural log of the loss at the horizon; None without one.
    """

    objective: str
    period: int | None
    rate: float
    log_loss: float | None


@dataclass(frozen=True, slots=True)
class Advice:
    """Hold the theory's results for a rule and a spectrum.

    Args:
        rule: the rule asked about.
        sigma: the modes, without those of weight 0 or sigma 0.
        weights: weights of the modes, summing to 1.
        rounds: the horizon, or None.
        max_period: the longest period that was tried.
        regimes: share of the weight in each regime.
        criteria: choice of each criterion; the first is the recommended one.
        without: no restart, in the same terms.
        hurt: share of the weight in modes that the recommended period slows down; 0 if that is no restart.
        first_cancellation: shortest and longest first cancellation among the modes that oscillate, or None.
        heuristics: the paper's and the corrected closed form, at the weighted mean of sigma.
        controls: rates of the slowest mode that a restart must be compared with, by name.
        warnings: plain sentences, where restarts cannot help or would harm.
    """

    rule: OuterRule
    sigma: Floats
    weights: Floats
    rounds: int | None
    max_period: int
    regimes: dict[str, float]
    criteria: tuple[Criterion, ...]
    without: Criterion
    hurt: float
    first_cancellation: tuple[float, float] | None
    heuristics: tuple[float, float]
    controls: dict[str, float]
    warnings: tuple[str, ...]

    @property
    def recommended(self) -> Criterion:
        """Return the choice of the criterion that fits: exact loss with a horizon, minimax rate without one."""
        return self.criteria[0]

    @property
    def policy(self) -> RestartPolicy:
        """Return the recommended period as a restart policy."""
        return Never() if self.recommended.period is None else Periodic(self.recommended.period)


def advise(
    rule: OuterRule,
    sigma: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    rounds: int | None = None,
    max_period: int | None = None,
) -> Advice:
    """Return the expected effect of restarts, and the period to choose, for a rule on modes of given sigma.

    Args:
        rule: the outer rule, in either form.
        sigma: effective progress of the modes, shape (M,). Modes with sigma 0 are left out: nothing moves them.
        weights: one a mode, >= 0; equal when None.
        rounds: the horizon T; without it the recommendation is the minimax rate.
        max_period: longest period tried; by default the horizon, or three times the longest first cancellation (at
            most 10000).

    Raises:
        ValueError: values out of range, or no mode with positive sigma and weight.

    Source: theory note R13 to R22 and R31.

    >>> advice = advise(OuterRule(1.0, 0.9, form="ema"), [0.95, 0.6, 0.3], rounds=120)
    >>> str(advice.policy), round(advice.hurt, 2), advice.warnings
    ('7', 0.0, ())
    """
    where = "advise"
    check_rule(where, rule)
    values = check_modes(where, sigma).reshape(-1)
    shares = check_weights(where, weights, values.size)
    total = None if rounds is None else check_count(where, "rounds", rounds)
    moving = (values > 0) & (shares > 0)
    if not moving.any() or rule.lr == 0:
        largest = values[shares > 0].max()
        raise ValueError(f"{where}: no mode moves (lr {rule.lr:g}, sigma {largest:g}); both must be positive")
    left_out = ["modes with sigma 0 are left out: nothing moves them"] if np.any(values == 0) else []
    values, shares = values[moving], shares[moving] / shares[moving].sum()
    first = cancellation_periods(rule, values, 1)[:, 0]
    first = first[~np.isnan(first)]
    if max_period is not None:
        longest = check_count(where, "max_period", max_period)
    elif total is not None:
        longest = min(total, _DEFAULT_PERIODS[1])
    else:
        longest = int(np.clip(np.ceil(3 * first.max(initial=0)) + 5, *_DEFAULT_PERIODS))
    most = min(_LONGEST_PERIOD, _MOST_FACTORS // values.size)
    if longest > most:
        raise ValueError(
            f"{where}: max_period is {longest}; it must be at most {most:,} for {values.size:,} modes: all periods of "
            "all modes are held at once"
        )
    criteria, without = _criteria(rule, values, shares, total, longest)
    chosen = criteria[0].period
    names = regime(rule, values)
    mean = float(np.sum(shares * values))
    return Advice(
        rule=rule,
        sigma=values,
        weights=shares,
        rounds=total,
        max_period=longest,
        regimes={name: float(np.sum(shares[names == name])) for name in REGIMES if np.any(names == name)},
        criteria=criteria,
        without=without,
        hurt=0.0 if chosen is None else hurt_share(rule, values, chosen, shares),
        first_cancellation=(float(first.min()), float(first.max())) if first.size else None,
        heuristics=(float(heuristic_period(rule, mean, corrected=False)), float(heuristic_period(rule, mean))),
        controls=controls(rule, values, chosen, total),
        warnings=(*left_out, *_warnings(rule, values, shares, total, longest, chosen=chosen)),
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
    check_rule("controls", rule)
    values = check_modes("controls", sigma).reshape(-1)
    period = None if period is None else check_count("controls", "period", period)
    rounds = None if rounds is None else check_count("controls", "rounds", rounds)
    same = rule.to("sum").lr
    gain = _mean_gain(rule, period, rounds)
    momenta = np.unique([*np.linspace(0, 0.995, 200), *(1 - 0.005 / 1.25 ** np.arange(1, 40)), rule.momentum])
    ema_lr = rule.to("ema").lr
    grid = rule_grid(ema_lr, momenta, rule.nesterov, "ema")
    grid[momenta == rule.momentum] = rule  # itself: next to a nilpotent mode the rounding of its lr would show
    tuned = grid[np.argmax(asymptotic_rate(grid[:, None], values).min(axis=1))]
    others = {
        f"no momentum, the same step (lr {same:.4g})": OuterRule(same, 0.0),
        f"no momentum, the same mean gain (lr {gain:.4g})": OuterRule(gain, 0.0),
        f"momentum tuned to {tuned.momentum:.6g} at EMA lr {ema_lr:.4g}, no restart": tuned,
    }
    rates = asymptotic_rate(np.array(list(others.values()), object)[:, None], values).min(axis=1)
    return dict(zip(others, rates.tolist(), strict=True))


def _mean_gain(rule: OuterRule, period: int | None, rounds: int | None) -> float:
    """Return `mean_outer_gain` with a restart every `period` rounds (None: none): what moves a slow mode (R31)."""
    total = rounds or period
    if total is None:
        return rule.to("ema").lr
    cycle = min(period or total, total)
    whole, rest = -log_restart_factor(rule, _TINY, [cycle, total % cycle])[1] / _TINY
    return float((total // cycle * whole + rest) / total)


def _criteria(
    rule: OuterRule, sigma: Floats, weights: Floats, rounds: int | None, longest: int
) -> tuple[tuple[Criterion, ...], Criterion]:
    """Return what each criterion chooses, the fitting one first, and no restart at all."""

    @cache
    def facts(period: int | None) -> tuple[float, float | None]:
        rates = asymptotic_rate(rule, sigma) if period is None else restart_rate(rule, sigma, period)
        loss = None if rounds is None else float(log_final_loss(rule, sigma, rounds, period or rounds, weights))
        return float(np.min(rates)), loss

    objectives: list[Objective] = [objective for objective in OBJECTIVES if objective != "loss" or rounds is not None]
    best = best_periods(rule, sigma, objectives, weights=weights, max_period=longest, rounds=rounds)
    criteria: dict[Objective, Criterion] = {}
    for objective, period in zip(objectives, best, strict=True):
        chosen = None if rounds is not None and period >= rounds else period
        criteria[objective] = Criterion(objective, chosen, *facts(chosen))
    without = Criterion("none", None, *facts(None))
    first = next(iter(criteria))
    slower = rounds is None and criteria[first].rate <= without.rate  # in the long run: by the rates alone
    if slower or not restart_can_help(rule, sigma).any():  # a tie of all periods goes to the smallest
        criteria[first] = replace(without, objective=first)
    return tuple(criteria.values()), without


def _warnings(
    rule: OuterRule, sigma: Floats, weights: Floats, rounds: int | None, longest: int, *, chosen: int | None
) -> list[str]:
    warnings = []
    if chosen == 1 and rule.momentum > 0:
        lr = rule.to("sum").lr * (1 + rule.momentum if rule.nesterov else 1)
        warnings.append(f"period 1 is no momentum at all: the same as momentum 0 with lr {lr:.4g} (sum form)")
    helped = restart_can_help(rule, sigma)
    unstable = effective_step(rule, sigma) >= stable_limit(OuterRule(1.0, rule.momentum, rule.nesterov))
    if unstable.any():
        limit = float(stable_limit(rule)) / float(sigma.max())
        verb = "diverges" if unstable.sum() == 1 else "diverge"
        warnings.append(
            f"{_modes(sigma[unstable])} {verb} without restarts, and no restart schedule can stabilise what "
            f"diverges (Theorem 2): lower lr below {rule.lr * limit:.4g} ({rule.form} form)"
        )
    if rule.momentum == 0:
        warnings.append("the rule has no momentum: there is nothing to restart, and every period does the same")
    elif not helped.any():
        warnings.append(
            "no mode oscillates (all eigenvalues are real), so every restart slows every mode down (Theorem 1): "
            "do not restart"
        )
    elif not helped.all():
        warnings.append(
            f"{100 * np.sum(weights[~helped]):.3g} % of the weight is in modes that do not oscillate, down to sigma "
            f"{sigma[~helped].min():.3g}; every restart slows those down (Theorem 1)"
        )
    if rounds is not None and helped.any():
        soonest = float(np.nanmin(cancellation_periods(rule, sigma, 1)))
        if rounds <= soonest:
            warnings.append(
                f"the horizon of {rounds} rounds is too short: the first phase cancellation comes after "
                f"{soonest:.1f} rounds"
            )
        elif chosen is None and rounds > 1:
            warnings.append(
                f"within {rounds} rounds no restart is best: every period up to {min(longest, rounds - 1)} ends with "
                "a higher loss"
            )
    longest = longest if rounds is None else min(longest, rounds - 1)  # a longer period is no restart
    if (~unstable).any() and longest > 0:
        logs = restart_table(rule, sigma[~unstable], longest)[1].max(axis=1)
        bad = np.flatnonzero(logs > 0) + 1
        if bad.size:
            worst = int(bad[np.argmax(logs[bad - 1])])
            warnings.append(
                f"restarting every {_listed(bad)} rounds would make stable modes grow "
                f"(by {np.exp(logs[worst - 1]):.4g} a cycle at {worst}): avoid these periods"
            )
    return warnings


def _modes(sigma: Floats) -> str:
    span = f"sigma {sigma.min():.3g}" if sigma.size == 1 else f"sigma {sigma.min():.3g} to {sigma.max():.3g}"
    return f"{sigma.size} mode{'s' if sigma.size > 1 else ''} ({span})"


def _listed(numbers: ArrayLike) -> str:
    texts = [str(int(n)) for n in np.asarray(numbers)]
    return ", ".join(texts) if len(texts) <= 6 else f"{', '.join(texts[:5])}, ... ({len(texts)} periods)"
