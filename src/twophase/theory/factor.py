"""Compute the restart factor chi_K: what a cycle of K rounds, begun with an empty buffer, leaves of a mode.

`chi_K = [T^K]_11 = x_K / x_0` from `m_0 = 0`. Given as (sign, log|chi|), since its powers over a run underflow.

The recurrence of the optimizer itself is stable in every regime; its numbers are rescaled by powers of two, which is
exact. While a mode has barely moved, its loss 1 - chi is summed up beside it, so that the rates of slow modes keep
their digits. At steps s >= 1/2 nothing is slow, and `chi_K = p_{K+1} - b p_K` with `p_{k+1} = tr p_k - D p_{k-1}` keeps
those next to nilpotent modes.

Digits, for the step s as a double: the error of chi is at most 1e-13 K of its envelope (`envelope`; where a mode does
not oscillate, of chi itself), mostly 1e-16 K, and next to a double eigenvalue at most 1e-13 K^2. So next to a zero of
chi log|chi| has the fewer digits the smaller chi is beside the envelope. While less than half of a slow mode is gone,
log|chi| has a relative error of at most 1e-11.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.rule import OuterRule
from twophase.theory.checks import Floats, Whole, count, counts, progress_of, shares
from twophase.theory.modes import Modes, asymptotic_rate
from twophase.theory.rules import AnyRule

Signs: TypeAlias = NDArray[np.int8]

_LOG_2 = float(np.log(2.0))
_LARGE = 0.5  # step from which nothing is slow
_CHUNK = 4096  # modes at a time: their arrays stay in the processor's cache
_BITS = 900  # by which numbers may grow or shrink before they are rescaled; a double has 1022
_TIE = 1e-11  # relative difference below which two rates are one


def log_restart_factor(rule: AnyRule, sigma: ArrayLike, period: ArrayLike) -> tuple[Any, Any]:
    """Return the sign and logarithm of the restart factor: `chi_K = [T^K]_11`, as (sign chi_K, log|chi_K|).

    K >= 0; K = 0 gives chi = 1. The sign is -1, 0 or 1; the logarithm is natural, -inf at an exact zero. By repeated
    squaring of T, so that K = 1e9 costs thirty products. Digits: see the module.

    Source: paper section 3, proposition 1 (valid in every regime through T^K); theory note R6 and F3.

    >>> sign, log = log_restart_factor(OuterRule(1.0, 0.9, form="ema"), 0.95, 8000)
    >>> int(sign), round(float(log), 2)
    (1, -421.58)
    """
    found = power(Modes.of(rule, sigma), counts("period", period, 0))
    return np.sign(found.chi).astype(np.int8)[()], _log(found.chi, found.exponent, found.lost)[()]


def restart_factor(rule: AnyRule, sigma: ArrayLike, period: ArrayLike) -> Any:
    """Return the restart factor `chi_K = [T^K]_11` itself: the share of a mode that is left after a cycle of K rounds.

    Underflows to 0 below about 1e-308; `log_restart_factor` does not.

    Source: paper section 3, proposition 1; theory note R6.
    """
    sign, log = log_restart_factor(rule, sigma, period)
    with np.errstate(over="ignore"):
        return sign * np.exp(log)


def restart_rate(rule: AnyRule, sigma: ArrayLike, period: ArrayLike) -> Any:
    """Return the contraction a round with a restart every K rounds: `r_K = -log|chi_K| / K`, in nats a round.

    +inf where chi_K is exactly 0, negative where the restarted mode grows.

    Source: paper section 3; theory note R7 and F3.

    >>> round(float(restart_rate(OuterRule(1.0, 0.9, form="ema"), 0.95, 5)), 5)
    0.92442
    """
    periods = counts("period", period)
    return -log_restart_factor(rule, sigma, periods)[1] / periods + 0.0


def restart_table(rule: AnyRule, sigma: ArrayLike, max_period: int) -> tuple[Signs, Floats]:
    """Return (sign, log|chi|) for all periods 1 ... max_period at once, each of shape (max_period, ...).

    Entry K-1 belongs to period K. The signs are int8. Digits: see the module.

    Source: theory note F2.

    >>> sign, log = restart_table(OuterRule(1.0, 0.9, form="ema"), 0.95, 6)
    >>> (sign * np.exp(log)).round(5).tolist()
    [0.905, 0.73353, 0.50951, 0.2595, 0.00983, -0.2158]
    """
    modes, rounds = Modes.of(rule, sigma), count("max_period", max_period)
    shape = (rounds, *modes.step.shape)
    flat = Modes(modes.momentum.ravel(), modes.step.ravel(), modes.nesterov.ravel())
    sign, log = np.empty((rounds, flat.step.size), np.int8), np.empty((rounds, flat.step.size))
    large = flat.step >= _LARGE
    for kind in (large, ~large & flat.nesterov, ~large & ~flat.nesterov):
        chosen = np.flatnonzero(kind)
        for begin in range(0, chosen.size, _CHUNK):
            part = chosen[begin : begin + _CHUNK]
            neighbours = part[-1] - part[0] + 1 == part.size  # a slice, which is written several times as fast
            where = slice(part[0], part[-1] + 1) if neighbours else part
            _fill(flat[where], sign, log, where)
    return sign.reshape(shape), log.reshape(shape)


def restart_can_help(rule: AnyRule, sigma: ArrayLike) -> Any:
    """Return the first period whose restarts contract a mode faster in the long run; 0 where no schedule does.

    Only a mode that oscillates has one. Theorem 1: with real eigenvalues `|chi_K| >= (spectral radius)^K` for every K,
    strictly if b > 0 and s > 0. Theorem 2, its consequence: a mode that diverges without restarts (spectral radius >=
    1, always a real one) diverges under every restart schedule.

    The first K with `|cos(K phase - theta)| < cos(theta)`; a nearly nilpotent mode is gone well before.

    Source: theory note R15, R17 and R18; paper appendix A.6 says less (its errors E16 and E17).

    >>> restart_can_help(OuterRule(1.0, 0.9, form="ema"), [0.01, 0.05, 0.5]).tolist()
    [0, 32, 2]
    """
    modes = Modes.of(rule, sigma)
    half, lead, trace = modes.half, modes.lead / 2, modes.trace / 2
    backward = trace < 0  # the same sizes with an angle of pi - phase, below pi/2, and -theta
    angle, lead = np.arctan2(half, np.abs(trace)), np.where(backward, -lead, lead)
    shift, span = np.arctan2(lead, half), 2 * np.arctan2(half, np.abs(lead))  # span = pi - 2 |theta|
    with np.errstate(invalid="ignore", divide="ignore"):
        # K angle (modulo pi) must come into (2 theta, pi), which is longer than the angle; or, for theta < 0, into
        # (0, span): at once, or by every second K, which goes back by pi - 2 angle, and the span is longer than that.
        ahead = np.floor(2 * shift / angle) + 1
        behind = np.where(angle < span, 1, 2 * np.floor((angle - span) / (2 * np.arctan2(np.abs(trace), half))) + 3)
        first = np.where(shift >= 0, ahead, behind)
    return np.nan_to_num(first).astype(np.int64)[()]


def hurt_share(rule: OuterRule, sigma: ArrayLike, period: int, weights: ArrayLike | None = None) -> float:
    """Return the share of the modes, by weight, that a restart every `period` rounds slows down.

    `sum of w_j over modes with r_K(sigma_j) < r_infinity(sigma_j)`. Slow modes outside the oscillatory interval always
    belong to it (Theorem 1).

    Source: theory note R15 and R17.
    """
    values = progress_of(sigma).reshape(-1)
    with_restart = restart_rate(rule, values, count("period", period))
    without = asymptotic_rate(rule, values)
    slack = np.where(np.isfinite(without), _TIE * np.abs(without), 0.0)  # without momentum both are one number
    return float(np.sum(shares(weights, values.size)[with_restart < without - slack]))


def _fill(modes: Modes, sign: Signs, log: Floats, where: Any) -> None:
    """Fill the columns `where`, of modes of one kind, by the rounds of the optimizer with n = lr m, or by the p_k."""
    b, s, trace, determinant = modes.momentum, modes.step, modes.trace, modes.determinant
    ahead, large, stride = modes.nesterov[0], s[0] >= _LARGE, _stride(modes)
    x, n, exponent, lost = np.ones_like(s), np.zeros_like(s), np.zeros_like(s), np.full_like(s, np.nan if large else 0)
    for row in range(len(log)):
        if large:  # x and n are p_{k+1} and p_k
            x, n = trace * x - determinant * n, x
        else:
            push = s * x
            n = b * n + push
            step = b * n + push if ahead else n
            x, lost = x - step, _while_slow(lost + step)
        if row % stride == stride - 1:
            shift = np.where(np.isnan(lost), np.frexp(np.maximum(np.abs(x), np.abs(n)))[1], 0)
            x, n, exponent = np.ldexp(x, -shift), np.ldexp(n, -shift), exponent + shift
        chi = x - b * n if large else x
        sign[row, where], log[row, where] = np.sign(chi), _log(chi, exponent, lost)


def _stride(modes: Modes) -> int:
    """Return for how many rounds numbers stay within `_BITS`: a round of T grows or shrinks them by bounded factors."""
    most = 2 + 2 * modes.step
    least = np.where(modes.momentum > 0, np.abs(modes.determinant) / most, np.abs(1 - modes.step))
    least = least[least > 0]  # what is not is gone, and stays so
    return max(1, int(_BITS / max(float(np.log2(most).max()), -float(np.log2(least).min(initial=1.0)))))


def _while_slow(lost: Floats) -> Floats:
    """Return 1 - chi while a mode is slow, and nan for good from there on."""
    return np.where(np.abs(lost) <= 0.5, lost, np.nan)


def _log(x: Floats, exponent: Any, lost: Floats) -> Floats:
    """Return log|x 2^exponent|, by what it has lost while a mode is slow."""
    slow = ~np.isnan(lost)
    if slow.all():
        return np.log1p(-lost) + 0.0
    with np.errstate(divide="ignore"):
        log = np.log(np.abs(x)) + exponent * _LOG_2
    return (np.where(slow, np.log1p(-lost), log) if slow.any() else log) + 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Power:
    """Hold chi_K, p_K and q = [T^K]_22, all times 2^-exponent, and 1 - chi_K while slow; `T^K = p_K T - D p_{K-1}`."""

    chi: Floats
    p: Floats
    q: Floats
    exponent: Whole
    lost: Floats


def power(modes: Modes, rounds: Whole) -> Power:
    """Return T^K of modes and counts K >= 0 that broadcast, by repeated squaring."""
    b, s, zero = modes.momentum, modes.step, np.zeros(np.broadcast_shapes(modes.step.shape, rounds.shape))
    large = s >= _LARGE
    reach, cross = np.where(modes.nesterov, 1 + b, 1.0) * s, -b * s * np.where(modes.nesterov, b, 1.0)
    # T in (x, n / s), or at large steps the companion matrix of the p_k.
    rows = (
        (np.where(large, modes.trace, 1 - reach), np.where(large, -modes.determinant, cross)),
        (1.0, np.where(large, 0.0, b)),
    )
    base = np.array([[entry + zero for entry in row] for row in rows])
    block = base, zero.astype(np.int64), _while_slow(np.where(large, np.nan, reach) + zero)
    result = np.array([[zero + 1, zero], [zero, zero + 1]]), zero.astype(np.int64), zero
    rest = rounds + block[1]
    while rest.any():
        even, product = rest % 2 == 0, _product(result, block)
        result = tuple(np.where(even, old, new) for old, new in zip(result, product, strict=True))
        rest //= 2
        if rest.any():
            block = _product(block, block)
    ((x, _), (p, q)), exponent, lost = result
    back = np.where(large, b, 0.0)
    return Power(x - back * p, p, q + back * p, exponent, lost)


def _product(one: Any, other: Any) -> Any:
    """Multiply powers of one T: matrices of shape (2, 2, ...) times 2^exponent, and what is lost; rescaled."""
    (a, exponent_a, lost_a), (b, exponent_b, lost_b) = one, other
    matrix = a[:, :1] * b[0] + a[:, 1:] * b[1]
    lost = _while_slow(lost_a + lost_b - lost_a * lost_b - a[0, 1] * b[1, 0])
    shift = np.where(np.isnan(lost), np.frexp(np.abs(matrix).max(axis=(0, 1)))[1], 0)
    matrix[0, 0] = np.where(np.isnan(lost), matrix[0, 0], 1 - lost)
    return np.ldexp(matrix, -shift), exponent_a + exponent_b + shift, lost
