"""Find where restarts help and where they harm: single modes, shares of a spectrum, and the edge of stability."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twophase.rule import OuterRule
from twophase.theory.contraction import log_restart_factor
from twophase.theory.inputs import Rules, check_count, check_modes, check_weights, rule_arrays
from twophase.theory.kernel import Mode
from twophase.theory.modes import asymptotic_rate, stable_limit


def useful_share(rule: Rules, sigma: ArrayLike) -> Any:
    """Return the share of all periods that beat a mode's envelope: `1 - 2 |theta| / pi`; 0 without oscillation.

    A period beats it if `r_K > r_infinity`: a weak statement, which most periods satisfy.

    Source: theory note R15.

    >>> useful_share(OuterRule(1.0, 0.9, form="ema"), [0.95, 0.1, 0.05]).round(3).tolist()
    [0.995, 0.685, 0.499]
    """
    shift = Mode.of("useful_share", rule, sigma).oscillation().shift
    return np.where(np.isnan(shift), 0.0, 1 - 2 * np.abs(np.nan_to_num(shift)) / np.pi)[()]


def restart_can_help(rule: Rules, sigma: ArrayLike) -> Any:
    """True if any restart schedule can contract a mode faster than none as the rounds go on: only if it oscillates.

    Theorem 1: with real eigenvalues `|chi_K| >= (spectral radius)^K` for every K, strictly if b > 0 and s > 0.
    Theorem 2, its consequence: a mode that diverges without restarts (spectral radius >= 1, always a real one)
    diverges under every restart schedule.

    Source: theory note R17 and R18; paper appendix A.6 says less (its errors E16 and E17).

    >>> restart_can_help(OuterRule(1.0, 0.9, form="ema"), [0.01, 0.5]).tolist()
    [False, True]
    """
    return (Mode.of("restart_can_help", rule, sigma).pieces()[0].hi < 0)[()]


def hurt_share(rule: OuterRule, sigma: ArrayLike, period: int, weights: ArrayLike | None = None) -> float:
    """Return the share of the modes, by weight, that a restart every `period` rounds slows down.

    `sum of w_j over modes with r_K(sigma_j) < r_infinity(sigma_j)`. Slow modes outside the oscillatory interval always
    belong to it (Theorem 1).

    Source: theory note R15 and R17.

    >>> round(hurt_share(OuterRule(1.0, 0.9, form="ema"), [0.01, 0.2, 0.5, 0.9], 5), 2)
    0.25
    """
    values = check_modes("hurt_share", sigma)
    shares = check_weights("hurt_share", weights, values.shape[-1])
    rounds = check_count("hurt_share", "period", period)
    with_restart, without = -log_restart_factor(rule, values, rounds)[1] / rounds, asymptotic_rate(rule, values)
    # Without momentum both are the same number in exact arithmetic.
    slack = np.where(np.isfinite(without), 1e-12 * np.abs(without), 0.0)
    return float(np.sum(shares[with_restart < without - slack]))


def restart_stable_limit(rule: OuterRule, period: int) -> float:
    """Return the smallest sigma at which a restart every `period` rounds makes a mode grow: `|chi_K| > 1`.

    Never above `stable_limit` (Theorem 2), and it may lie below: a restart can destabilise a stable mode, and beyond
    the value there may be stable stretches again.

    Args:
        rule: the outer rule.
        period: K >= 1.

    Returns:
        sigma, which may exceed 1; infinite at lr 0.

    Source: theory note R19.

    >>> round(restart_stable_limit(OuterRule(1.0, 0.95), 3), 2)
    0.69
    """
    from scipy.optimize import brentq, minimize_scalar  # noqa: PLC0415 - a third of a second that few callers need

    rounds = check_count("restart_stable_limit", "period", period)
    size = float(rule_arrays("restart_stable_limit", rule).lr * rule.injection)
    if size == 0:
        return np.inf
    top = float(stable_limit(OuterRule(1.0, rule.momentum, rule.nesterov)))
    wide = OuterRule(top, rule.momentum, rule.nesterov)

    def log_size(angle: Any) -> Any:
        # In units in which sigma = s / top lies in [0, 1]: chi_K is about a cosine of K times this angle.
        return log_restart_factor(wide, (1 - np.cos(angle)) / 2, rounds)[1]

    angles = np.linspace(0, np.pi, 48 * (rounds + 2))[1:]
    logs = log_size(angles)
    beyond = int(np.argmax(logs > 0)) if np.any(logs > 0) else len(angles)
    end = float(angles[beyond]) if beyond < len(angles) else None
    inner = logs[1:-1]
    peaks = 1 + np.flatnonzero((inner >= logs[:-2]) & (inner >= logs[2:]) & (inner > -0.1))
    for i in peaks[peaks < beyond]:  # a peak between two points of the grid may rise above 0 where neither does
        around = (float(angles[i - 1]), float(angles[i + 1]))
        peak: Any = minimize_scalar(lambda a: -log_size(a), bounds=around, method="bounded", options={"xatol": 1e-12})
        if peak.fun < 0:
            beyond, end = i, float(peak.x)
            break
    if end is None:
        return top / size
    start = float(angles[beyond - 1]) if beyond else end / 2
    crossing: Any = brentq(lambda a: max(float(log_size(a)), -1.0), start, end, xtol=1e-15)
    return top * (1 - math.cos(crossing)) / 2 / size
