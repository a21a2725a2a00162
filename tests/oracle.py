"""The independent oracle: the paper's 2x2 matrices in mpmath, at the exact values of the doubles given."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest

from twophase.rule import FORMS, OuterRule

DIGITS = 50


def step(rule: OuterRule, sigma: float) -> Any:
    """s: lr (1 - momentum) sigma (EMA form) or lr sigma (sum form)."""
    weight = 1 - mpmath.mpf(rule.momentum) if rule.form == "ema" else mpmath.mpf(1)
    return mpmath.mpf(rule.lr) * weight * mpmath.mpf(sigma)


def one_round(rule: Any, sigma: float, x: Any, m: Any, *, noise: Any = 0, number: Any = mpmath.mpf) -> tuple[Any, ...]:
    """New x and m by the literal update of the rule's own form, and the pseudo-gradient; in numbers of any kind."""
    b, lr, g = number(rule.momentum), number(rule.lr), number(sigma) * x + noise
    new = b * m + (1 - b) * g if rule.form == "ema" else b * m + g
    if not rule.nesterov:
        move = new
    elif rule.form == "ema":
        move = (1 + b) * new - b * m
    else:
        move = g + b * new
    return x - lr * move, new, g


def simulated(
    rule: OuterRule, sigma: float, rounds: int, restart: Any = None, start: tuple[Any, Any] = (1, 0)
) -> list[tuple[Any, Any]]:
    """The states (x, m) from `start` on; `restart(t)` gives the retain and inject after round t, or None."""
    x, m = (mpmath.mpf(value) for value in start)
    states = [(x, m)]
    for t in range(1, rounds + 1):
        x, m, g = one_round(rule, sigma, x, m)
        if restart and (event := restart(t)):
            m = event[0] * m + event[1] * g
        states.append((x, m))
    return states


def matrix(rule: OuterRule, sigma: float) -> Any:
    """T of one round, from the literal update applied to (1, 0) and (0, 1)."""
    (a, lower, _), (upper, corner, _) = (one_round(rule, sigma, x, m) for x, m in ((1, 0), (0, 1)))
    return mpmath.matrix([[a, upper], [lower, corner]])


def power(t: Any, period: int) -> Any:
    result, base = mpmath.eye(2), t
    while period:
        if period & 1:
            result = result * base
        base, period = base * base, period >> 1
    return result


def digits_for(rule: OuterRule, sigma: float) -> int:
    """Working digits so that 1 - chi keeps 50 of its own even where it is as small as the step, or as the momentum."""
    small = step(rule, sigma)
    digits = 2 * DIGITS + 20 + (2 * int(-mpmath.log10(small)) if 0 < small < 1 else 0)
    return digits + (2 * int(-math.log10(rule.momentum)) if rule.momentum > 0 else 0)


def factor(rule: OuterRule, sigma: float, period: int) -> Any:
    """chi_K, to at least 50 digits (of 1 - chi where chi is near 1)."""
    with mpmath.workdps(digits_for(rule, sigma)):
        return power(matrix(rule, sigma), period)[0, 0]


def log_factor(rule: OuterRule, sigma: float, period: int) -> tuple[int, Any]:
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
    """Log of sqrt(1+C^2) rho^K where the mode oscillates, of |l1|^K elsewhere: what an error near a zero is part of."""
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


def exact(rule: OuterRule, sigma: float) -> tuple[Fraction, Fraction, Fraction]:
    """Trace, determinant and discriminant tr^2 - 4 D of T, without any rounding."""
    (a, lower, _), (upper, corner, _) = (one_round(rule, sigma, x, m, number=Fraction) for x, m in ((1, 0), (0, 1)))
    trace, determinant = a + corner, a * corner - upper * lower
    return trace, determinant, trace * trace - 4 * determinant


def regime(rule: OuterRule, sigma: float) -> str:
    """The regime, from the exact signs (theory note R6 to R12)."""
    trace, determinant, disc = exact(rule, sigma)
    if trace == 0 and determinant == 0:
        return "nilpotent"
    if disc == 0:
        return "critical"
    if disc < 0:
        return "oscillatory"
    if determinant < 0:
        return "negative_determinant"
    return "real_below" if trace > 0 else "real_above"


def rate(rule: OuterRule, sigma: float) -> Any:
    with mpmath.workdps(digits_for(rule, sigma)):
        first, _ = eigenvalues(rule, sigma)
        return -mpmath.log(abs(first)) if first else mpmath.inf


def oscillation(rule: OuterRule, sigma: float) -> tuple[Any, Any, Any, Any]:
    """Phase, theta, sqrt(1+C^2) and log rho of an oscillating mode (theory note R7)."""
    with mpmath.workdps(digits_for(rule, sigma)):
        first, _ = eigenvalues(rule, sigma)
        t, half = matrix(rule, sigma), abs(mpmath.im(first))
        c = (t[0, 0] - t[1, 1]) / (2 * half)
        angle = mpmath.atan2(half, mpmath.re(first))
        return angle, mpmath.atan(c), mpmath.sqrt(1 + c * c), mpmath.log(abs(first))


# --- modes ----------------------------------------------------------------------------------------------------------

HB, NAG = OuterRule(1.0, 0.9, False, "ema"), OuterRule(1.0, 0.9, True, "ema")
KINDS = pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "Nesterov"])
SIX = [0.95, 0.85, 0.75, 0.60, 0.45, 0.30]
"""The six modes of A2."""
BLOCKS = [np.linspace(low, high, 9) for low, high in [(0.92, 1), (0.55, 0.65), (0.18, 0.26)]]
"""The three blocks of A3."""
NILPOTENT = [
    OuterRule(2.0, 0.5, True, "ema"),
    OuterRule(4.0, 0.75, True, "ema"),
    OuterRule(1.0, 0.9, True),
    OuterRule(1.0, 1e-300, True),
]
"""Rules with s = 1 exactly at sigma 1 (R9)."""

Point = tuple[OuterRule, float]
"""A rule and a sigma: one mode."""


def at(step: Any, momentum: float, nesterov: bool, form: str, sigma: float) -> Point:
    """The rule whose mode at sigma has an effective step next to `step` (to the rounding of lr)."""
    with mpmath.workdps(DIGITS):
        weight = 1 - mpmath.mpf(momentum) if form == "ema" else mpmath.mpf(1)
        return OuterRule(float(step / sigma / weight), momentum, nesterov, form), sigma  # type: ignore[arg-type]


def columns(cases: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The arrays of rules and of sigmas (and of periods)."""
    rule = np.empty(len(cases), object)
    rule[:] = [case[0] for case in cases]
    return rule, *(np.array(column) for column in list(zip(*cases, strict=True))[1:])


def random_rule(rng: random.Random, largest: float = 1.5, momenta: tuple[float, float] = (0.0, 0.98)) -> OuterRule:
    """A rule of any kind and form, whose steps at sigma 1 go up to `largest`."""
    momentum, form = rng.uniform(*momenta), rng.choice(FORMS)
    step = rng.uniform(0.02, largest)
    return OuterRule(step / (1 - momentum if form == "ema" else 1), momentum, rng.random() < 0.5, form)


def edge(name: str, momentum: float, nesterov: bool) -> Any:
    """The step at an edge of theory note R6: `lower`, `upper` (of the oscillatory interval) or `stable`."""
    with mpmath.workdps(DIGITS):
        b = mpmath.mpf(momentum)
        if name == "lower":
            return ((1 - b) / (1 + b)) ** 2 if nesterov else (1 - mpmath.sqrt(b)) ** 2
        if name == "upper":
            return mpmath.mpf(1) if nesterov else (1 + mpmath.sqrt(b)) ** 2
        return 2 * (1 + b) / (1 + 2 * b if nesterov else 1)


def points(name: str, count: int) -> list[Point]:
    """Random modes of one kind, always the same ones: the names are the keys of `DRAWS`.

    Their step is exactly s: sum form and sigma 1. What s becomes of lr, form and sigma is `effective_step`'s business.
    """
    rng, found = random.Random(name), []
    for _ in range(count):
        nesterov = rng.random() < 0.5
        step, momentum = DRAWS[name](rng, nesterov)
        found.append((OuterRule(float(step), momentum, nesterov), 1.0))
    return found


def _near(name: str, closest: float = 15) -> Callable[[random.Random, bool], tuple[Any, float]]:
    def draw(rng: random.Random, nesterov: bool) -> tuple[Any, float]:
        momentum = rng.choice([rng.uniform(0.01, 0.999), 1 - 10 ** -rng.uniform(2, 6)])
        distance = rng.choice([-1, 1]) * 10 ** -rng.uniform(2, closest)
        return edge(name, momentum, nesterov) * (1 + distance), momentum

    return draw


def _critical(rng: random.Random, nesterov: bool) -> tuple[Any, float]:
    """R8's double eigenvalue, exactly, at either end of heavy ball's oscillatory interval; of Nesterov next to it."""
    q = rng.randint(1, 2**10 - 1) / 2**10
    return edge("lower", q * q, True) if nesterov else (1 + rng.choice([-q, q])) ** 2, q * q


DRAWS: dict[str, Callable[[random.Random, bool], tuple[Any, float]]] = {
    "generic": lambda rng, _: (rng.uniform(0.01, 1.3), rng.uniform(0, 0.999)),
    "lower edge": _near("lower"),
    "upper edge, nilpotent": _near("upper"),
    "stability edge": _near("stable"),
    "critical edge": _critical,
    "momentum to 1": lambda rng, _: (10 ** rng.uniform(-2, 0), 1 - 2.0 ** -rng.uniform(6, 53)),
    "slow": lambda rng, _: (10 ** rng.uniform(-300, 0), rng.random()),
    "slow, momentum to 1": lambda rng, _: (10 ** rng.uniform(-20, 0), 1 - 2.0 ** -rng.uniform(6, 53)),
    "unstable": lambda rng, _: (10 ** rng.uniform(0.5, 90), rng.random()),
    "unstable under restarts": lambda rng, _: (rng.uniform(0.2, 3), rng.uniform(0.9, 0.999)),
    "tiny momentum": lambda rng, _: (10 ** rng.uniform(-3, 1), rng.choice([0.0, 1e-300, 10 ** rng.uniform(-20, -2)])),
}
"""Step s and momentum of modes, for a rule that looks ahead or not."""
