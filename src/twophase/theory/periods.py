"""Choose when to restart: cancellation times, heuristics for them, and the best period by each criterion.

Arguments are those of `twophase.theory.modes`; where several modes make one answer, they are the last axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from twophase.rule import OuterRule
from twophase.theory.checks import Floats, count, counts, progress_of, shares
from twophase.theory.factor import log_restart_factor, restart_table
from twophase.theory.modes import Modes
from twophase.theory.rules import AnyRule, Rules

Objective: TypeAlias = Literal["loss", "minimax", "rate", "factor"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

_TIE = 1e-11  # relative difference below which two periods are equally good, and the smaller one is taken


def cancellation_periods(rule: AnyRule, sigma: ArrayLike, count: int) -> Floats:
    """Return the first `count` real-valued times at which an oscillating mode passes through 0, in rounds.

    `t_l = (theta + pi/2 + l pi) / phase`, l = 0, 1, 2, ...: the paper's main text begins at 1 and so skips the first
    and best one (its error E3). Shape (..., count); nan where the mode does not oscillate.

    Source: paper section 3, proposition 2, and appendix A.7; theory note R13.

    >>> cancellation_periods(OuterRule(1.0, 0.9, form="ema"), 0.95, 2).round(2).tolist()
    [5.04, 15.07]
    """
    modes, times = Modes.of(rule, sigma), np.arange(int(counts("count", count)))
    half = modes.half
    angle = np.arctan2(half, modes.trace / 2)
    delay = np.arctan2(half, -modes.lead / 2)  # theta + pi/2; not as that sum, which loses the digits of a small one
    return (delay[..., None] + np.pi * times) / angle[..., None]


def rounded_period(rule: AnyRule, sigma: ArrayLike) -> Any:
    """Return the first cancellation in whole rounds: `K_0 = max(1, floor(K_c + 1/2))`; 0 without oscillation.

    A good guess, not the best period: argmax of the rate in about 92 % of random modes, within 1 in about 99 %.
    The rounding leaves at most `sqrt(1+C^2) sin(phase/2)` of the envelope where K_c >= 1/2 (R14; the paper's error E4).

    Source: paper appendix A.7; theory note R13.

    >>> rounded_period(OuterRule(1.0, 0.9, form="ema"), [0.95, 0.3, 0.01]).tolist()
    [5, 10, 0]
    """
    first = cancellation_periods(rule, sigma, 1)[..., 0]
    return np.nan_to_num(np.maximum(1, np.floor(first + 0.5))).astype(np.int64)[()]


def heuristic_period(rule: AnyRule, sigma: ArrayLike, corrected: bool = True) -> Any:
    """Return the first cancellation for momentum near 1, in closed form; a real number of rounds, infinite at s = 0.

    Paper (`corrected=False`): `pi / (2 sqrt s)`. Corrected by the terms of order 1 that it drops: plus `((1-b)/s -
    1)/2` for heavy ball, plus `(1-b)/(2s) - 1` for Nesterov. Neither holds near the lower edge of the oscillatory
    interval. With sigma known, `cancellation_periods` is exact.

    Source: paper appendix A.9; theory note R16, paper error E7.

    >>> rule = OuterRule(1.0, 0.99, form="ema")
    >>> [round(float(heuristic_period(rule, 0.22, corrected=c)), 2) for c in (False, True)]
    [33.49, 35.26]
    """
    modes = Modes.of(rule, sigma)
    with np.errstate(divide="ignore", over="ignore"):
        period = np.pi / (2 * np.sqrt(modes.step))
        if corrected:
            period = period + (1 - modes.momentum) / modes.step / 2 - np.where(modes.nesterov, 1.0, 0.5)
    return period[()]


def log_final_loss(
    rule: AnyRule, sigma: ArrayLike, rounds: int, period: ArrayLike, weights: ArrayLike | None = None
) -> Any:
    """Return the logarithm of the loss after `rounds` rounds with a restart every `period` rounds, exactly.

    `loss(K) = 1/2 sum_j w_j (chi_K(sigma_j)^(T div K) chi_{T mod K}(sigma_j))^2`, from x_j = 1, m = 0, so that the
    initial loss is 1/2. A period at or above `rounds` means no restart.

    The modes are the last axis of sigma; leading axes broadcast against the rules. `weights` are one a mode, >= 0,
    normalised to sum 1, equal when None. Natural logarithm, -inf at an exact 0; shape (periods, ...), without the first
    axis for one period.

    Source: theory note R20.

    >>> round(float(log_final_loss(OuterRule(1.0, 0.9, form="ema"), 0.95, 80, 5) / np.log(10)), 2)
    -64.54
    """
    total, periods = count("rounds", rounds), counts("period", period)
    rules, values, weight = _weighted(rule, sigma, weights)
    cut = np.minimum(np.atleast_1d(periods), total)
    column = cut.reshape(-1, *[1] * len(np.broadcast_shapes(rules.shape, values.shape)))
    if cut.size > 4 and cut.max() <= 20000:  # a table costs its largest period, single factors cost each
        logs = _table_from_0(rules, values, int(cut.max()))
        full, rest = logs[cut], logs[total % cut]
    else:
        full, rest = log_restart_factor(rules, values, np.stack([column, total % column]))[1]
    result = _log_mean_square(total // column * full + rest, weight) - np.log(2)
    return result[0][()] if periods.ndim == 0 else result


def best_period(
    rule: AnyRule,
    sigma: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    max_period: int,
    rounds: int | None = None,
    objective: Objective | None = None,
) -> Any:
    """Return the best restart period of one mode or of several, among 1 ... max_period.

    | objective | what it makes best | when |
    |---|---|---|
    | `"loss"` | the exact loss after `rounds` rounds (`log_final_loss`) | default with a known horizon |
    | `"minimax"` | the rate of the slowest mode, `min_j r_K(sigma_j)` | default without one |
    | `"rate"` | `-log(sum_j w_j chi_K^2) / (2K)`; r_K for one mode | |
    | `"factor"` | `sum_j w_j chi_K^2`, with K free of cost | the paper's; depends on max_period |

    With a horizon, all periods at or above `rounds` mean no restart. This choice always competes, at any max_period,
    and is returned as `rounds`. Ties go to the smaller period. Modes of weight 0 do not count.

    The modes are the last axis of sigma; leading axes broadcast against the rules. For `"minimax"` leave out modes with
    sigma 0, which no period moves. Returns an int, or an array of them without the axis of modes.

    Source: theory note R20 to R22; paper appendix A.7 (`"factor"`), its errors E1 and E2.

    >>> rule, six = OuterRule(1.0, 0.9, form="ema"), [0.95, 0.85, 0.75, 0.60, 0.45, 0.30]
    >>> best_period(rule, six, max_period=120, rounds=120), best_period(rule, 0.95, max_period=40)
    (7, 5)
    """
    chosen = ("minimax" if rounds is None else "loss") if objective is None else objective
    largest, total = count("max_period", max_period), None if rounds is None else count("rounds", rounds)
    if chosen not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}")
    rules, values, weight = _weighted(rule, sigma, weights)
    table = _table_from_0(rules, values, largest if total is None else min(largest, total))
    periods, logs = np.arange(1, len(table)), table[1:]
    if total is not None and total > largest:
        periods = np.append(periods, total)
        logs = np.concatenate([logs, log_restart_factor(rules, values, total)[1][None]])
    column = periods.reshape(-1, *[1] * (logs.ndim - 1))
    if chosen == "loss":
        if total is None:
            raise ValueError('rounds must be given for the objective "loss"; without a horizon use "minimax"')
        score = -_log_mean_square(total // column * logs + table[total % periods], weight)
    elif chosen == "minimax":
        score = np.min(-logs / column, axis=-1)
    else:
        score = -_log_mean_square(logs, weight) / (2 * column[..., 0] if chosen == "rate" else 1)
    highest = score.max(axis=0)
    slack = np.where(np.isfinite(highest), _TIE * np.abs(highest), 0.0)
    best = periods[np.argmax(score >= highest - slack, axis=0)]  # the first that is as good, ties forgiven
    return best if best.ndim else int(best)


def block_periods(
    rule: AnyRule,
    blocks: Sequence[ArrayLike] | Floats,
    *,
    weights: Sequence[ArrayLike] | None = None,
    max_period: int,
    rounds: int | None = None,
    objective: Objective | None = None,
) -> tuple[int, ...]:
    """Return the best period of each block of modes, K_b: `best_period` for every block by itself.

    One rule for all blocks, or one a block; `blocks` and `weights` are lists for each. Blocks of one mode each are the
    per-mode oracle of the paper's figure 1.

    Source: paper appendix A.9; theory note R20 to R22.

    >>> rule = OuterRule(1.0, 0.9, form="ema")
    >>> block_periods(rule, [[0.92, 1.0], [0.55, 0.65], [0.18, 0.26]], max_period=40, rounds=120)
    (5, 7, 13)
    """
    if not np.iterable(blocks) or not len(blocks):
        raise ValueError(f"blocks must be at least one list of sigma, got {blocks!r:.100}")
    rules = [rule] * len(blocks) if isinstance(rule, OuterRule) else list(rule)
    parts: Sequence[ArrayLike | None] = [None] * len(blocks) if weights is None else weights
    if len(rules) != len(blocks) or len(parts) != len(blocks):
        raise ValueError(f"blocks must be as many as rules and weights, got {len(blocks)}, {len(rules)}, {len(parts)}")
    return tuple(
        best_period(r, s, weights=w, max_period=max_period, rounds=rounds, objective=objective)
        for r, s, w in zip(rules, blocks, parts, strict=True)
    )


def _weighted(rule: AnyRule, sigma: ArrayLike, weights: ArrayLike | None) -> tuple[Rules, Floats, Floats]:
    """Return rules with an axis for the modes, the modes that count, and their weights."""
    rules, values = Rules.of(rule), progress_of(sigma)
    weight = shares(weights, values.shape[-1])
    return rules.column(*rules.shape), values[..., weight > 0], weight[weight > 0]


def _table_from_0(rules: Rules, values: Floats, largest: int) -> Floats:
    """Return log|chi_K| for K = 0 ... largest."""
    logs = restart_table(rules, values, largest)[1]
    return np.concatenate([np.zeros((1, *logs.shape[1:])), logs])


def _log_mean_square(logs: Floats, weight: Floats) -> Floats:
    """Return log sum_j w_j exp(2 logs_j) over the last axis, the weights of sum 1."""
    top = np.max(2 * logs, axis=-1)
    top = np.where(np.isfinite(top), top, 0.0)
    # Slow modes keep their digits: next to 1 the sum is 1 less a small remainder.
    beside_1 = np.expm1(np.minimum(2 * logs, 700)) @ weight
    with np.errstate(divide="ignore", invalid="ignore"):
        far = top + np.log(np.exp(2 * logs - top[..., None]) @ weight)
        return np.where(np.abs(beside_1) < 0.1, np.log1p(beside_1), far)
