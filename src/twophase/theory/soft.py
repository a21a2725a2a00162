"""Solve soft restarts `m <- retain m + inject g` in closed form.

Soft restarts happen after the ordinary update of a round, with g the pseudo-gradient that the round has just used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twophase.theory.checks import Floats, count, counts, numbers
from twophase.theory.factor import power
from twophase.theory.modes import Modes, transition
from twophase.theory.rules import AnyRule, Rules


def soft_restart(rule: AnyRule, sigma: ArrayLike, period: ArrayLike) -> tuple[Any, Any]:
    """Return (retain, inject) of the soft restart every R rounds that removes a mode, on the rule's own buffer.

    Heavy ball `retain = -chi_R / (b p_R)`, `inject = chi_R / (lr b sigma p_R)`; Nesterov the same `retain` and
    `inject = (1-s) chi_R / (lr b^2 sigma p_R)`; with `[T^R]_12 = p_R T_12`. The cycle of R rounds is then nilpotent:
    from any state the mode is exactly 0 after two cycles. Where chi_R = 0 both are 0: a hard restart is the best one
    exactly at a cancellation. Elsewhere one of them is negative (Nesterov: while s < 1), outside the paper's [0, 1].
    This is the optimum of one mode; it does not carry over to several.

    For `Soft(period, retain, inject)` with a rule of this form; infinite beyond all doubles.

    Raises:
        ValueError: momentum, lr or sigma 0, or p_R = 0 where chi_R is not (no such restart exists).

    Source: theory note R26 and R27; paper appendix on soft restarts.

    >>> retain, inject = soft_restart(OuterRule(1.0, 0.9, form="ema"), 0.95, 3)
    >>> round(float(retain), 3), round(float(inject), 3)
    (-0.24, 0.253)
    """
    rules, modes, periods = Rules.of(rule), Modes.of(rule, sigma), counts("period", period)
    for name, values in (("momentum", rules.momentum), ("lr", rules.lr), ("sigma", np.asarray(sigma, float))):
        if np.any(values == 0):
            raise ValueError(f"{name} must be positive, got 0; there is nothing to restart otherwise")
    found = power(modes, periods)
    gone = (found.chi == 0) & (found.p == 0)  # no restart is needed to remove what is 0
    if np.any((found.p == 0) & ~gone):
        raise ValueError(f"period must be another one, got {period!r:.100}: then this mode leaves the buffer empty")
    with np.errstate(over="ignore", divide="ignore"):
        retain = -found.chi / np.where(gone, 1.0, found.p) / modes.momentum  # one power of 2 goes with both
        ahead = np.where(modes.nesterov, (1 - modes.step) / modes.momentum, 1.0)
        inject = -retain * rules.injection * ahead / modes.step
    return (retain + 0.0)[()], (inject + 0.0)[()]


def cycle_matrix(
    rule: AnyRule, sigma: ArrayLike, period: int, retain: ArrayLike = 0.0, inject: ArrayLike = 0.0
) -> Floats:
    """Return the matrix of a cycle, R rounds and a soft restart: `(x, m) -> C (x, m)`, m of the rule's own form.

    `C = [[T^R]_1 ; retain [T^R]_2 + inject sigma [T^(R-1)]_1]`, rows of the powers of T. A hard restart is retain 0,
    inject 0: C has chi_R in its corner and 0 below. Both broadcast with rule and sigma, as `soft_restart` returns them.

    A buffer that is dropped (set to None) under PyTorch's `dampening = momentum` begins as g and not (1-b) g. The cycle
    then leaves `C_11 + sigma C_12` of the mode (EMA form), which may exceed 1. `OuterSGD` zeroes its buffer.

    Shape (..., 2, 2), infinite beyond all doubles; the eigenvalues of C are the contraction of one cycle.

    Source: theory note R26 and R28.

    >>> cycle_matrix(OuterRule(0.5, 0.5), 1.0, 2).tolist()
    [[0.0, -0.25], [0.0, 0.0]]
    """
    rounds = count("period", period)
    share, weight = numbers("retain", retain), numbers("inject", inject)
    modes, t, values = Modes.of(rule, sigma), transition(rule, sigma), np.asarray(sigma, float)
    last, before = power(modes, np.array(rounds)), power(modes, np.array(rounds - 1))
    (upper, lower), back = (t[..., 0, 1], t[..., 1, 0]), before.exponent - last.exponent  # in units of the later power
    entries = np.broadcast_arrays(
        last.chi,
        upper * last.p,
        share * lower * last.p + weight * values * np.ldexp(before.chi, back),
        share * last.q + weight * values * upper * np.ldexp(before.p, back),
    )
    matrix = np.stack(entries, axis=-1).reshape(*entries[0].shape, 2, 2)
    with np.errstate(over="ignore"):
        return np.ldexp(matrix, last.exponent[..., None, None])
