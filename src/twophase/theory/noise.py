"""Weigh outer momentum against a larger inner learning rate, where gradients have noise and the rate has a cap.

`curvature` h >= 0 of the modes has the shape (M,); `noise`, standard deviation of the gradient's white noise in a mode,
for each replica and inner step, and `initial`, the residuals at first, broadcast with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twophase.theory.checks import count, numbers
from twophase.theory.modes import Modes, stable_limit
from twophase.theory.rules import AnyRule, Rules


def stationary_variance(rule: AnyRule, sigma: ArrayLike) -> Any:
    """Return the variance of a residual in the long run, in units of that of its pseudo-gradient's white noise.

    With nu = lr (sum form) and s = nu sigma, heavy ball `nu^2 (1+b) / ((1-b) s (2(1+b)-s))`, Nesterov
    `nu^2 (1+b+b(1+2b)s) / ((1-b(1-s)) s (2(1+b)-(1+2b)s))`. Infinite at sigma 0 and where a mode is unstable.

    Let c = nu/(1-b). Heavy ball with nu <= 1+b has from half of to just c times averaging's variance at the same inner
    rate; where c >= 1 that is at most averaging's at c times the inner rate. Nesterov with nu <= 1 has at most 1.28 c
    times averaging's, and where s is far above 1-b much less.

    Source: this package (R32).
    """
    rules, modes = Rules.of(rule), Modes.of(rule, sigma)
    b, s, ahead = modes.momentum, modes.step, modes.nesterov
    above = 1 + b + np.where(ahead, b * (1 + 2 * b) * s, 0)
    below = (1 - b * np.where(ahead, 1 - s, 1)) * s * (2 * (1 + b) - np.where(ahead, 1 + 2 * b, 1) * s)
    stable = (s > 0) & (np.asarray(sigma) < stable_limit(rule))
    return np.where(stable, (rules.lr * rules.injection) ** 2 * above / np.where(stable, below, 1), np.inf)[()]


def expected_loss(
    rule: AnyRule,
    curvature: ArrayLike,
    inner_lr: ArrayLike,
    *,
    inner_steps: int,
    rounds: int,
    noise: ArrayLike,
    replicas: int = 1,
    initial: ArrayLike = 1.0,
    schedule: ArrayLike = 1.0,
) -> Any:
    """Return the exact mean of the loss `1/2 sum_j h_j x_j^2` after inner SGD, in rounds with an outer rule each.

    Rules and `inner_lr` eta >= 0 broadcast to the shape of the result; eta h may exceed 1. The loss is infinite beyond
    all doubles. `schedule`, shape (rounds * inner_steps,), has the factor of `inner_lr` at each step.

    Source: this package; second moments of x and m, from round to round.
    """
    shape = count("rounds", rounds), count("inner_steps", inner_steps)
    h, rates = np.atleast_1d(numbers("curvature", curvature, 0)), numbers("inner_lr", inner_lr, 0)[..., None]
    variance, factors = numbers("noise", noise, 0) ** 2 / count("replicas", replicas), numbers("schedule", schedule, 0)
    if factors.shape not in ((), (shape[0] * shape[1],)):
        raise ValueError(f"schedule must be one factor or one for each inner step, got shape {factors.shape}")
    rules = Rules.of(rule)[..., None]
    w, b, ahead = rules.injection, rules.momentum, rules.nesterov
    push, carry = -rules.lr * w * np.where(ahead, 1 + b, 1), -rules.lr * b * np.where(ahead, b, 1)
    xx, xm, mm = numbers("initial", initial) ** 2, 0.0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for shares in np.broadcast_to(factors, shape[0] * shape[1]).reshape(shape):
            keep, heard = np.ones_like(rates * h), np.zeros_like(rates * h)
            for eta in (share * rates for share in shares):
                keep, heard = keep * (1 - eta * h), heard * (1 - eta * h) ** 2 + eta**2 * variance
            of_x, x_to_m = 1 + push * (1 - keep), w * (1 - keep)
            xx, xm, mm = (
                of_x**2 * xx + 2 * of_x * carry * xm + carry**2 * mm + push**2 * heard,
                of_x * x_to_m * xx + (of_x * b + carry * x_to_m) * xm + carry * b * mm + push * w * heard,
                x_to_m**2 * xx + 2 * x_to_m * b * xm + b**2 * mm + w**2 * heard,
            )
        loss = (h * xx).sum(-1) / 2
    return np.where(np.isfinite(loss), loss, np.inf)[()]


def momentum_gain(
    curvature: ArrayLike, cap: float, steps: int, *, noise: ArrayLike, replicas: int = 1, initial: ArrayLike = 1.0
) -> tuple[float, float]:
    """Return bounds on how many times lower outer momentum ends than averaging, where the inner rate is at most `cap`.

    To first order averaging ends N = `steps` inner steps of a constant rate eta at `E(eta) = 1/2 sum_j h_j x_j^2
    exp(-2 eta h_j N) + eta n`, `n = sum_j noise_j^2 / (4 replicas)`. Outer momentum acts on modes that do not oscillate
    as an inner rate from c eta to (1 + sqrt b) c eta would (R33), with from half of to just the noise of c eta (R32),
    and c eta may exceed the cap. So the gain is at least `min_(eta <= cap) E / min E`, at most that over min E with a
    quarter of the noise: at most four times as much, and twice where slow modes have the noise. It is sure to exceed 1
    exactly if `N sum_j h_j^2 x_j^2 exp(-2 cap h_j N) > n`. With one mode that matters, u = 2 h N cap, and U the same of
    the best rate, the first is `(exp(U-u) + u) / (1+U)` for u < U, else 1.

    For heavy ball, modes whose noise has come to rest (2 eta h N above 1), rounds far above (best rate) / cap (in fewer
    the gain is smaller), and averaging's best rate far below 1/h or at the cap. Slow modes that oscillate, and
    Nesterov, may gain more. Under an inner rate that falls to 0 noise weighs less, and `expected_loss` has the numbers.

    Source: this package (R34).

    >>> [round(gain, 2) for gain in momentum_gain([1.0, 0.01], 1.0, 200, noise=0.01)]
    [1.62, 5.41]
    """
    from scipy.optimize import minimize_scalar  # noqa: PLC0415 - a third of a second that few callers need

    rates, limit, total = numbers("curvature", curvature, 0), float(numbers("cap", cap, 0)), count("steps", steps)
    signal, speed, variance = np.broadcast_arrays(
        rates * numbers("initial", initial) ** 2 / 2, 2 * total * rates, numbers("noise", noise, 0) ** 2
    )
    n, moved = float(variance[rates > 0].sum()) / (4 * count("replicas", replicas)), signal * speed > 0
    if not n or not moved.any():
        raise ValueError(f"noise and curvature must not be 0, got {noise!r:.100} and {curvature!r:.100}")

    def loss(eta: float, n: float) -> float:
        return float((signal * np.exp(-eta * speed))[moved].sum()) + n * eta

    def least(n: float, cap: float) -> float:
        """Return the least E, which is convex, of rates up to a cap."""
        far = np.log(max(float((signal * speed).sum() / n), 1)) / speed[moved].min()  # noise surely outweighs there
        end = min(cap, far)
        found = minimize_scalar(lambda z: loss(end * np.exp(z), n), bounds=(-60, 0), options={"xatol": 1e-9})
        return min(float(found.fun), loss(end, n))

    return max(1.0, (reached := least(n, limit)) / least(n, np.inf)), reached / least(n / 4, np.inf)
