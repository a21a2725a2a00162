"""Compute the linear model with gradient noise and several replicas exactly: what should an outer schedule do?

In a mode of curvature lambda each of R replicas takes the inner steps `x <- (1 - eta lambda) x - eta xi`, with
independent white noise xi. A round from the anchor x then makes the pseudo-gradient `g = sigma_t x + n_t`. Here sigma_t
is the effective progress, and the noise n_t, a mean over replicas, has the variance v_t. Both change with the inner
learning rates. The outer rule is linear, hence means and second moments of (x, m) follow exactly.

Agarwala (arXiv 2603.26954, of which the abstract was read) analyses DiLoCo in linear regression: a lead, no source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twophase.policies.base import Never, RestartPolicy, RoundSignal, ask
from twophase.policies.text import parse
from twophase.shelf.base import Schedule
from twophase.shelf.text import parse as parse_shelf
from twophase.theory.inputs import Floats, Rules, check_count, check_finite, common_shape, refuse, rule_arrays
from twophase.theory.rollout import Round, apply_answer, momentum_sgd, restarted


@dataclass(frozen=True, slots=True, eq=False)
class InnerPhases:
    """Hold the effect of each round's inner phase on the modes, shape (rounds, ..., modes).

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

    Raises:
        ValueError: shapes that do not fit, or values out of range.

    Source: theory note R1 for sigma, result R32 for the variance of a sum of independent terms.

    >>> phases = inner_phases([1.0], [[0.5, 0.5]], noise=1.0, replicas=2)
    >>> float(phases.progress[0, 0]), float(phases.variance[0, 0])
    (0.75, 0.15625)
    """
    where = "inner_phases"
    values, rates = check_finite(where, "eigenvalue", eigenvalue, 0), check_finite(where, "inner_lrs", inner_lrs, 0)
    deviation, replicas = check_finite(where, "noise", noise, 0), check_count(where, "replicas", replicas)
    if values.ndim != 1 or rates.ndim < 2 or not values.size or not rates.size:
        remedy = "give (modes,) and (..., rounds, S), none of them empty"
        raise ValueError(f"{where}: eigenvalue has shape {values.shape} and inner_lrs {rates.shape}; {remedy}")
    common_shape(where, eigenvalue=values.shape, noise=deviation.shape)
    rates = np.moveaxis(rates, -2, 0)[..., None]  # (rounds, ..., S, 1)
    remaining, variance = np.ones((*rates.shape[:-2], values.size)), np.zeros(1)
    for step in range(rates.shape[-2]):
        rate = rates[..., step, :]
        factor = 1 - rate * values
        remaining, variance = remaining * factor, variance * factor**2 + (rate * deviation) ** 2 / replicas
    return InnerPhases(1 - remaining, variance)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Hold moments of anchor x and buffer m before the first round and after each, shape (rounds + 1, ..., modes).

    Args:
        mean_x, mean_m: the means.
        xx, xm, mm: the second moments `E x^2`, `E x m` and `E m^2`, about 0.
    """

    mean_x: Floats
    mean_m: Floats
    xx: Floats
    xm: Floats
    mm: Floats

    def loss(self, eigenvalue: ArrayLike) -> Floats:
        """Return `1/2 sum_j lambda_j E x_j^2` at these times, shape (rounds + 1, ...)."""
        return 0.5 * (np.asarray(eigenvalue) * self.xx).sum(axis=-1)


def moments(
    rule: Rules,
    phases: InnerPhases,
    restart: RestartPolicy | str | int = Never(),  # noqa: B008 - a frozen value
    *,
    schedule: Schedule | str = "constant",
    initial: ArrayLike = 1.0,
    spread: ArrayLike = 0.0,
) -> Moments:
    """Compute means and second moments of (x, m) over the rounds, exactly.

    `(x, m) <- A_t (x, m) + b_t n_t`, so `M <- A_t M A_t' + v_t b_t b_t'`; A_t and b_t are the images of the unit
    vectors of x, m and n under the arithmetic of `rollout`.

    Args:
        rule: an outer rule, or an array of rules whose shape broadcasts with the phases' axes between rounds and modes.
        phases: result of `inner_phases`.
        restart: a policy that needs nothing but the number of the round, its text form, or a period.
        schedule: schedule of the outer learning rate and momentum, a value of the shelf or its text.
        initial: mean of x before the first round.
        spread: standard deviation of x before the first round.

    Raises:
        ValueError: a policy that measures, for its updates are not linear; one that treats several rules differently.

    Source: result R32; theory note R2 for the map.

    >>> phases = inner_phases([1.0], [[0.5, 0.5]] * 2, noise=1.0, replicas=2)
    >>> moments(OuterRule(1.0, 0.0), phases).loss([1.0]).round(4).tolist()
    [0.5, 0.1094, 0.085]
    """
    where = "moments"
    policy = restart if isinstance(restart, RestartPolicy) else parse(restart)
    if policy.needs:
        remedy = "use never, a period, cycle, at or soft, or simulate it by rollout"
        raise ValueError(f"{where}: restart policy {policy} measures, so that its rounds are not linear; {remedy}")
    over = parse_shelf("schedule", schedule).over(len(phases.progress))
    numbers, rules = rule_arrays(where, rule), np.asarray(rule, dtype=object)
    distinct = tuple(dict.fromkeys(rules.flat))
    start, deviation = check_finite(where, "initial", initial), check_finite(where, "spread", spread, 0)
    axes = common_shape(
        where,
        rule=(*numbers.shape, 1),
        phases=phases.progress.shape[1:],
        initial=start.shape,
        spread=deviation.shape,
    )
    nesterov, state, age = numbers.nesterov[..., None], policy.initial_state(), 0
    scheduled = numbers
    x, m, n = np.eye(3).reshape(3, 3, *(1 for _ in axes))
    now = [np.broadcast_to(value, axes) for value in (start, 0.0, start**2 + deviation**2, 0.0, 0.0)]
    history = [now]
    for t in range(len(phases.progress)):
        age += 1
        answer, *others = (
            ask(policy, state, RoundSignal(t + 1, age, extra={"inner_lr": 1.0}, rule=r)) for r in distinct
        )
        if any(other != answer for other in others):
            raise ValueError(f"{where}: restart policy {policy} treats the rules unlike; call {where} for each rule")
        if over.name != "constant":
            now_rules = np.frompyfunc(lambda r: over.at(r, t + 1, age), 1, 1)(rules)  # noqa: B023
            scheduled = rule_arrays(where, now_rules)
        lr, b, w = (part[..., None] for part in (scheduled.lr, scheduled.momentum, scheduled.injection))
        with np.errstate(all="ignore"):
            seen = Round(lr, b, w, phases.progress[t] * x + n, m)
            if answer.restart is not None and answer.restart.before:
                seen = replace(seen, m=restarted(answer.restart, np.broadcast_to(m, seen.g.shape), seen.g))
            to_m, update = momentum_sgd(seen, nesterov)
            apply_answer(answer, slice(None), seen, to_m, update)
            now = _advanced(now, x - update, to_m, phases.variance[t])
        state, age = answer.state, answer.age(age)
        history.append(now)
    return Moments(*(np.stack(parts) for parts in zip(*history, strict=True)))


def _advanced(now: list[Any], to_x: Floats, to_m: Floats, variance: Floats) -> list[Any]:
    """Return means and second moments after a round."""
    mean_x, mean_m, xx, xm, mm = now

    def product(a: Floats, b: Floats) -> Floats:
        return a[0] * b[0] * xx + (a[0] * b[1] + a[1] * b[0]) * xm + a[1] * b[1] * mm + a[2] * b[2] * variance

    means = (to[0] * mean_x + to[1] * mean_m for to in (to_x, to_m))
    return [*means, product(to_x, to_x), product(to_x, to_m), product(to_m, to_m)]


@dataclass(frozen=True, slots=True, eq=False)
class OuterRates:
    """Hold an outer learning rate for each round, and what it leaves.

    Args:
        rates: nu_1 to nu_T, shape (rounds,).
        loss: expected final loss.
        gradient: its derivatives by the rates, shape (rounds,).
    """

    rates: Floats
    loss: float
    gradient: Floats


def best_rates(phases: InnerPhases, eigenvalue: ArrayLike, *, initial: ArrayLike = 1.0) -> OuterRates:
    """Return the momentum-free outer learning rates, one a round, that leave the least expected loss.

    With `p_t = (1 - nu_t sigma_t)^2 p_{t-1} + nu_t^2 v_t` and the adjoint `q_{t-1} = (1 - nu_t sigma_t)^2 q_t`, q_T =
    lambda / 2, the loss is a parabola in each nu_t, least at

        nu_t = sum_j q_t sigma_t p_{t-1} / sum_j q_t (sigma_t^2 p_{t-1} + v_t).

    Sweeps of a backward pass for q and a forward pass for nu and p minimise exactly over nu_t after nu_t, until no
    sweep gains. With one mode q cancels, and the first sweep is dynamic programming (`single_mode_rates`).
    With more it is a local minimum, reached from plain averaging: without noise the rates are Chebyshev's in any order.

    Args:
        phases: result of `inner_phases`, shape (rounds, modes).
        eigenvalue: lambda >= 0, shape (modes,).
        initial: `E x^2` before the first round, >= 0.

    Source: result R33.

    >>> phases = inner_phases([1.0], [[0.1]] * 3, noise=1.0)
    >>> bool(np.allclose(best_rates(phases, [1.0]).rates, single_mode_rates(phases)[:, 0]))
    True
    """
    where = "best_rates"
    values, first = check_finite(where, "eigenvalue", eigenvalue, 0), check_finite(where, "initial", initial, 0)
    sigma = phases.progress
    if sigma.ndim != 2 or values.shape != sigma.shape[1:]:
        raise ValueError(f"{where}: phases have shape {sigma.shape} and eigenvalue {values.shape}; give one run's")
    if common_shape(where, eigenvalue=values.shape, initial=first.shape) != values.shape:
        raise ValueError(f"{where}: initial has shape {first.shape}; give one number, or one a mode")
    rates, slopes, losses = np.ones(len(sigma)), np.zeros(len(sigma)), [np.inf]
    for _ in range(20_000):  # dozens are usual
        later = np.cumprod((1 - rates[:, None] * sigma)[:0:-1] ** 2, axis=0)[::-1]
        q = values / 2 * np.concatenate([later, np.ones((1, len(values)))])
        p = np.broadcast_to(first, values.shape)
        for t, (progress, variance) in enumerate(zip(sigma, phases.variance, strict=True)):
            pull, bend = q[t] @ (progress * p), q[t] @ (progress**2 * p + variance)
            slopes[t] = 2 * (rates[t] * bend - pull)
            rates[t] = pull / bend if bend > 0 else rates[t]
            p = (1 - rates[t] * progress) ** 2 * p + rates[t] ** 2 * variance
        losses.append(float(values @ p) / 2)
        if losses[-2] - losses[-1] <= 1e-15 * losses[-1]:  # nothing but rounding is left
            break
    return OuterRates(rates, losses[-1], slopes)


def single_mode_rates(phases: InnerPhases, *, initial: ArrayLike = 1.0) -> Floats:
    """Return the best outer learning rates of each mode by itself, in closed form, shape (rounds, ..., modes).

    `nu_t = (sigma_t / v_t) p_t` with `1 / p_t = 1 / p_0 + sum_{s <= t} sigma_s^2 / v_s`: the gain of a Kalman filter.
    Early, p is large and `nu_t = 1 / sigma_t`; late, noise rules. For small eta lambda, `sigma_t = S eta_t lambda` and
    `v_t = S eta_t^2 noise^2 / R`, so that eta cancels in p and

        nu_t = 1 / (eta_t S lambda (t + t_0)),   t_0 = noise^2 / (R S lambda^2 p_0).

    It rises where the inner rate falls faster than 1 / (t + t_0), and falls where that is constant.

    Args:
        phases: result of `inner_phases`, with noise in every mode.
        initial: `E x^2 > 0` before the first round.

    Source: result R33.
    """
    where = "single_mode_rates"
    refuse(where, "variance", phases.variance, ~(phases.variance > 0), "give noise > 0, and no round of rate 0")
    first = check_finite(where, "initial", initial, 0)
    refuse(where, "initial", first, ~(first > 0), "it must be positive")
    common_shape(where, phases=phases.progress.shape[1:], initial=first.shape)
    precision = 1 / first + np.cumsum(phases.progress**2 / phases.variance, axis=0)
    return phases.progress / phases.variance / precision
