"""The linear model with gradient noise and several replicas, exactly: what should an outer schedule do?

In a mode of curvature lambda each of R replicas takes the inner steps `x <- (1 - eta lambda) x - eta xi`, with
independent white noise xi. A round from the anchor x then makes the pseudo-gradient `g = sigma_t x + n_t`. Here sigma_t
is the effective progress, and the noise n_t, a mean over replicas, has the variance v_t. Both change with the inner
learning rates. The outer rule is linear, hence second moments of (x, m) follow exactly.

Source: theory note R1 for sigma; results R32 (moments) and R33 (best rates) of docs/theory-results.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class InnerPhases:
    """The effect of each round's inner phase on the modes, shape (rounds, ..., modes).

    Args:
        progress: effective progress sigma_t; above 1 or below 0 where an inner step goes beyond the minimum.
        variance: v_t of the noise in the mean pseudo-gradient.
    """

    progress: Floats
    variance: Floats


def inner_phases(eigenvalue: ArrayLike, inner_lrs: ArrayLike, noise: ArrayLike = 0.0, replicas: int = 1) -> InnerPhases:
    """Return progress and noise of every round, for SGD as the inner optimizer.

    `sigma_t = 1 - prod_s (1 - eta_s lambda)`, `v_t = 1/R sum_s eta_s^2 noise^2 prod_{s' > s} (1 - eta_s' lambda)^2`.

    Args:
        eigenvalue: lambda >= 0, shape (modes,).
        inner_lrs: eta >= 0 of each inner step, shape (..., rounds, S); leading axes for several runs.
        noise: standard deviation >= 0 of the noise in a replica's gradient, a number or one for each mode.
        replicas: R >= 1.
    """
    values, deviation = np.asarray(eigenvalue, dtype=np.float64), np.asarray(noise, dtype=np.float64)
    rates = np.moveaxis(np.asarray(inner_lrs, dtype=np.float64), -2, 0)[..., None]  # (rounds, ..., S, 1)
    remaining, variance = np.ones((*rates.shape[:-2], values.size)), np.zeros(1)
    for step in range(rates.shape[-2]):
        rate = rates[..., step, :]
        factor = 1 - rate * values
        remaining, variance = remaining * factor, variance * factor**2 + (rate * deviation) ** 2 / replicas
    return InnerPhases(1 - remaining, variance)


@dataclass(frozen=True, slots=True)
class OuterSchedule:
    """Outer SGD in sum form over the rounds of a run.

    Args:
        nesterov: whether it looks ahead.
        period: rounds from restart to restart; 0 for none.
        final: last over first learning rate, on a straight line that ends one round after the last.
        ramp: whether the momentum rises in a straight line from 0.
    """

    nesterov: bool = False
    period: int = 0
    final: float = 1.0
    ramp: bool = False


def second_moments(phases: InnerPhases, lr: ArrayLike, momentum: ArrayLike, how: OuterSchedule) -> Floats:
    """Return `E x^2` after the last round from x = 1 and m = 0, shape (..., modes).

    With `(x, m) <- A_t (x, m) + b_t n_t` the moments are `M <- A_t M A_t' + v_t b_t b_t'`.

    Args:
        phases: result of `inner_phases`.
        lr: learning rates; they broadcast with the phases' axes between rounds and modes.
        momentum: momenta, likewise.
        how: what the rounds do with them.
    """
    rounds = len(phases.progress)
    nu, beta = np.asarray(lr, dtype=np.float64)[..., None], np.asarray(momentum, dtype=np.float64)[..., None]
    xx, xm, mm = np.float64(1), np.float64(0), np.float64(0)
    with np.errstate(all="ignore"):
        for t, (progress, variance) in enumerate(zip(phases.progress, phases.variance, strict=True)):
            rate = nu * (how.final + (1 - how.final) * (1 - t / rounds))
            b = beta * t / rounds if how.ramp else beta
            # images of the unit vectors of x, m and the noise n under the round: m' = b m + g, x' = x - rate update
            to_m = (progress, b, 1.0)
            if how.nesterov:
                to_x = (1 - rate * (b * to_m[0] + progress), -rate * b * b, -rate * (1 + b))
            else:
                to_x = (1 - rate * progress, -rate * b, -rate)
            if how.period and (t + 1) % how.period == 0:
                to_m = (0.0, 0.0, 0.0)

            now = (xx, xm, mm, variance)
            xx, xm, mm = _product(to_x, to_x, now), _product(to_x, to_m, now), _product(to_m, to_m, now)
    return np.asarray(xx)


def _product(a: Sequence[Any], b: Sequence[Any], now: Sequence[Any]) -> Any:
    xx, xm, mm, variance = now
    return a[0] * b[0] * xx + (a[0] * b[1] + a[1] * b[0]) * xm + a[1] * b[1] * mm + a[2] * b[2] * variance


def best_rates(phases: InnerPhases, eigenvalue: ArrayLike) -> tuple[Floats, float]:
    """Return the momentum-free outer learning rates, one a round, that leave the least expected loss, and that loss.

    With `p_t = (1 - nu_t sigma_t)^2 p_{t-1} + nu_t^2 v_t` and the adjoint `q_{t-1} = (1 - nu_t sigma_t)^2 q_t`, q_T =
    lambda / 2, the loss is a parabola in each nu_t, least at

        nu_t = sum_j q_t sigma_t p_{t-1} / sum_j q_t (sigma_t^2 p_{t-1} + v_t).

    Sweeps of a backward pass for q and a forward pass for nu and p minimise exactly over nu_t after nu_t, until no
    sweep gains. With one mode the first sweep is dynamic programming, and `nu_t = (sigma_t / v_t) p_t` with `1 / p_t =
    1 / p_0 + sum_{s <= t} sigma_s^2 / v_s`. With more it is a local minimum, reached from plain averaging.

    Args:
        phases: result of `inner_phases`, shape (rounds, modes).
        eigenvalue: lambda >= 0, shape (modes,).
    """
    values, sigma = np.asarray(eigenvalue, dtype=np.float64), phases.progress
    rates, losses = np.ones(len(sigma)), [np.inf]
    for _ in range(20_000):  # dozens are usual
        later = np.cumprod((1 - rates[:, None] * sigma)[:0:-1] ** 2, axis=0)[::-1]
        q = values / 2 * np.concatenate([later, np.ones((1, len(values)))])
        p = np.ones(len(values))
        for t, (progress, variance) in enumerate(zip(sigma, phases.variance, strict=True)):
            pull, bend = q[t] @ (progress * p), q[t] @ (progress**2 * p + variance)
            rates[t] = pull / bend if bend > 0 else rates[t]
            p = (1 - rates[t] * progress) ** 2 * p + rates[t] ** 2 * variance
        losses.append(float(values @ p) / 2)
        if losses[-2] - losses[-1] <= 1e-15 * losses[-1]:  # nothing but rounding is left
            break
    return rates, losses[-1]
