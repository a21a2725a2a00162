"""The independent oracle: the paper's 2x2 matrices in mpmath, at the exact values of the doubles given."""

from __future__ import annotations

from typing import Any

import mpmath

from twophase.rule import OuterRule

DIGITS = 50


def step(rule: OuterRule, sigma: float) -> Any:
    """s: lr (1 - momentum) sigma (EMA form) or lr sigma (sum form)."""
    weight = 1 - mpmath.mpf(rule.momentum) if rule.form == "ema" else mpmath.mpf(1)
    return mpmath.mpf(rule.lr) * weight * mpmath.mpf(sigma)


def matrix(rule: OuterRule, sigma: float) -> Any:
    """T of one round, from the literal update of the rule's own form applied to (1, 0) and (0, 1)."""
    columns = []
    for x, m in ((1, 0), (0, 1)):
        x, m, b, lr = (mpmath.mpf(v) for v in (x, m, rule.momentum, rule.lr))
        g = mpmath.mpf(sigma) * x
        new = b * m + (1 - b) * g if rule.form == "ema" else b * m + g
        if not rule.nesterov:
            move = new
        elif rule.form == "ema":
            move = (1 + b) * new - b * m
        else:
            move = g + b * new
        columns.append((x - lr * move, new))
    return mpmath.matrix([[columns[0][0], columns[1][0]], [columns[0][1], columns[1][1]]])


def power(t: Any, period: int) -> Any:
    """T^K by squaring."""
    result, base = mpmath.eye(2), t
    while period:
        if period & 1:
            result = result * base
        base, period = base * base, period >> 1
    return result


def digits_for(rule: OuterRule, sigma: float) -> int:
    """Working digits so that 1 - chi keeps 50 of its own even where it is as small as the step."""
    small = step(rule, sigma)
    return 2 * DIGITS + 20 + (2 * int(-mpmath.log10(small)) if 0 < small < 1 else 0)


def factor(rule: OuterRule, sigma: float, period: int) -> Any:
    """chi_K, to at least 50 digits (of 1 - chi where chi is near 1)."""
    with mpmath.workdps(digits_for(rule, sigma)):
        return power(matrix(rule, sigma), period)[0, 0]


def log_factor(rule: OuterRule, sigma: float, period: int) -> tuple[int, Any]:
    """Sign and log|chi_K|."""
    with mpmath.workdps(digits_for(rule, sigma)):
        chi = factor(rule, sigma, period)
        return int(mpmath.sign(chi)), mpmath.log(abs(chi)) if chi else mpmath.mpf("-inf")


def factors(rule: OuterRule, sigma: float, periods: int) -> list[Any]:
    """chi_1 ... chi_periods, by multiplying matrices."""
    with mpmath.workdps(digits_for(rule, sigma)):
        t, now, out = matrix(rule, sigma), mpmath.eye(2), []
        for _ in range(periods):
            now = t * now
            out.append(now[0, 0])
        return out


def eigenvalues(rule: OuterRule, sigma: float) -> tuple[Any, Any]:
    """The eigenvalues of T, the larger first."""
    with mpmath.workdps(digits_for(rule, sigma)):
        t = matrix(rule, sigma)
        trace, determinant = t[0, 0] + t[1, 1], t[0, 0] * t[1, 1] - t[0, 1] * t[1, 0]
        root = mpmath.sqrt(trace * trace / 4 - determinant)
        pair = (trace / 2 + root, trace / 2 - root)
        return tuple(sorted(pair, key=abs, reverse=True))  # type: ignore[return-value]


def log_envelope(rule: OuterRule, sigma: float, period: int) -> Any:
    """log of sqrt(1+C^2) rho^K where the mode oscillates, of |l1|^K elsewhere: what an error near a zero is part of."""
    with mpmath.workdps(digits_for(rule, sigma)):
        first, _ = eigenvalues(rule, sigma)
        if first == 0:
            return mpmath.mpf(0)
        log = period * mpmath.log(abs(first))
        if mpmath.im(first) != 0:
            t = matrix(rule, sigma)
            c = (t[0, 0] - t[1, 1]) / (2 * abs(mpmath.im(first)))
            log += mpmath.log(1 + c * c) / 2
        return log
