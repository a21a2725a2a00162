"""Solve soft restarts `m <- retain m + inject g` in closed form.

Soft restarts happen after the ordinary update of a round, with g the pseudo-gradient that the round has just used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twophase.theory.inputs import (
    Floats,
    Rules,
    check_count,
    check_counts,
    check_finite,
    check_sigma,
    common_shape,
    rule_arrays,
)
from twophase.theory.kernel import Mode
from twophase.theory.modes import transition
from twophase.theory.powers import power


def soft_restart(rule: Rules, sigma: ArrayLike, period: ArrayLike) -> tuple[Any, Any]:
    """Return (retain, inject) of the soft restart every R rounds that removes a mode, on the rule's own buffer.

    Heavy ball `retain = -chi_R / (b p_R)`, `inject = chi_R / (lr b sigma p_R)`; Nesterov the same `retain` and
    `inject = (1-s) chi_R / (lr b^2 sigma p_R)`; with `[T^R]_12 = p_R T_12`. The cycle of R rounds is then nilpotent:
    from any state the mode is exactly 0 after two cycles. Where chi_R = 0 both are 0: a hard restart is the best one
    exactly at a cancellation. Elsewhere one of them is negative (Nesterov: while s < 1), outside the paper's [0, 1].
    This is the optimum of one mode; it does not carry over to several.

    Args:
        rule: one rule or an array of rules; momentum and lr must be positive.
        sigma: effective progress in (0, 1].
        period: R >= 1 in rounds; all three broadcast.

    Returns:
        (retain, inject), for `Soft(period, retain, inject)` with a rule of this form.

    Raises:
        ValueError: momentum, lr or sigma 0, or p_R = 0 where chi_R is not (no such restart exists).

    Source: theory note R26 and R27; paper appendix on soft restarts.

    >>> retain, inject = soft_restart(OuterRule(1.0, 0.9, form="ema"), 0.95, 3)
    >>> round(float(retain), 3), round(float(inject), 3)
    (-0.24, 0.253)
    """
    where = "soft_restart"
    rules = rule_arrays(where, rule)
    for name, values in (("momentum", rules.momentum), ("lr", rules.lr), ("sigma", check_sigma(where, sigma))):
        if np.any(values == 0):
            raise ValueError(f"{where}: {name} is 0; it must be positive, there is nothing to restart otherwise")
    modes, periods = Mode.of(where, rule, sigma), check_counts(where, "period", period)
    shape = common_shape(where, modes=modes.shape, period=periods.shape)
    mode = modes.each(lambda array: np.broadcast_to(array, shape).ravel())
    state = power(mode, np.broadcast_to(periods, shape).ravel())
    gone = (state.p.hi == 0) & (state.x.hi == 0)  # no restart is needed to remove what is 0
    if np.any((state.p.hi == 0) & ~gone):
        raise ValueError(f"{where}: after period {period} this mode leaves no trace in the buffer; use another period")
    # They bear the same power of 2, which underflows where their quotient does not.
    ratio = state.x.hi / np.where(gone, 1.0, state.p.hi)
    injection = np.broadcast_to(rules.injection, shape).reshape(-1)
    with np.errstate(over="ignore", divide="ignore"):
        retain = -ratio / mode.momentum
        ahead = np.where(mode.nesterov, (1 - mode.step).hi / mode.momentum, 1.0)
        inject = injection * ratio / mode.momentum * ahead / mode.step.hi
    return (retain + 0.0).reshape(shape)[()], (inject + 0.0).reshape(shape)[()]


def cycle_matrix(
    rule: Rules, sigma: ArrayLike, period: int, retain: ArrayLike = 0.0, inject: ArrayLike = 0.0
) -> Floats:
    """Return the matrix of a cycle, R rounds and a soft restart: `(x, m) -> C (x, m)`, m of the rule's own form.

    `C = [[T^R]_1 ; retain [T^R]_2 + inject sigma [T^(R-1)]_1]`, rows of the powers of T. A hard restart is retain 0,
    inject 0: C has chi_R in its corner and 0 below. Both broadcast with rule and sigma, as `soft_restart` returns them.

    A buffer that is dropped (set to None) under PyTorch's `dampening = momentum` begins as g and not (1-b) g. The cycle
    then leaves `C_11 + sigma C_12` of the mode (EMA form), which may exceed 1. `OuterSGD` zeroes its buffer.

    Returns:
        Array of shape (..., 2, 2); the eigenvalues of C are the contraction of one cycle.

    Source: theory note R26 and R28.

    >>> cycle_matrix(OuterRule(0.5, 0.5), 1.0, 2).tolist()
    [[0.0, -0.25], [0.0, 0.0]]
    """
    where = "cycle_matrix"
    rounds = check_count(where, "period", period)
    share, weight = check_finite(where, "retain", retain), check_finite(where, "inject", inject)
    t, values = transition(rule, sigma), check_sigma(where, sigma)
    before = np.linalg.matrix_power(t, rounds - 1)
    last = t @ before
    common_shape(where, modes=t.shape[:-2], retain=share.shape, inject=weight.shape)
    below = share[..., None] * last[..., 1, :] + (weight * values)[..., None] * before[..., 0, :]
    return np.stack(np.broadcast_arrays(last[..., 0, :], below), axis=-2)
