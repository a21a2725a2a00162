"""Describe a mode under an outer rule: progress, 2x2 transition, regime, phase, envelope, rate, stability.

Letters, in all of `twophase.theory`: x residual of the mode, m momentum buffer, nu = lr, b = momentum, w = 1 - b.
Further, sigma effective progress, g = sigma x the pseudo-gradient, s the effective step (`effective_step`). The pair
(s, b) alone decides every rate and every restart factor.

Arguments, in all of it: `rule` is one `OuterRule` or an array of them (`rule_grid`); `sigma` lies in [0, 1]. `period`
and other counts are whole numbers below 2^53. They broadcast; results have the broadcast shape, or are NumPy scalars.
Anything else is a ValueError that names the function, the argument and the entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twophase.theory.inputs import (
    Floats,
    RuleArrays,
    Rules,
    check_counts,
    check_finite,
    check_sigma,
    check_steps,
    common_shape,
    refuse,
    rule_arrays,
)
from twophase.theory.kernel import Mode

REGIMES = ("oscillatory", "critical", "real_below", "real_above", "negative_determinant", "nilpotent")
"""Names that `regime` gives; see there."""


def effective_progress(eigenvalue: ArrayLike, inner_lr: ArrayLike, inner_steps: ArrayLike) -> Any:
    """Return the share of a mode that one inner phase of gradient descent removes.

    `sigma = 1 - (1 - inner_lr eigenvalue)^inner_steps`, so that the pseudo-gradient is `g = sigma x`. It holds for
    deterministic gradient descent on a quadratic, with one replica or equal data. Replicas with different data or
    AdamW inner steps are outside the model.

    Args:
        eigenvalue: lambda >= 0 of the mode's curvature, any shape.
        inner_lr: eta >= 0 of the inner gradient descent; `inner_lr * eigenvalue` must not exceed 1.
        inner_steps: S >= 1, inner steps a round.

    Returns:
        sigma in [0, 1], of the broadcast shape; accurate for tiny eigenvalues too.

    Source: paper section 2, equation for g_t and sigma; theory note R1.

    >>> float(effective_progress(0.5, 1.0, 3))
    0.875
    """
    where = "effective_progress"
    values, rates = check_finite(where, "eigenvalue", eigenvalue, 0), check_finite(where, "inner_lr", inner_lr, 0)
    counts = check_counts(where, "inner_steps", inner_steps)
    common_shape(where, eigenvalue=values.shape, inner_lr=rates.shape, inner_steps=counts.shape)
    with np.errstate(over="ignore"):
        product = values * rates
    if np.any(product > 1):
        mode = np.unravel_index(int(np.argmax(product)), product.shape)
        of_modes = f" of mode {', '.join(str(int(i)) for i in mode)}" if product.ndim else ""
        limit = 1 / values.max()
        limit = np.nextafter(limit, 0) if limit * values.max() > 1 else limit  # so that the remedy works
        raise ValueError(
            f"{where}: inner_lr * eigenvalue{of_modes} is {product.max():.17g}; it must be <= 1, where gradient "
            f"descent does not overshoot; lower inner_lr to {limit:.17g} or less"
        )
    with np.errstate(divide="ignore"):  # log1p(-1) = -inf is meant: the mode is removed at once
        return (-np.expm1(counts * np.log1p(-product)) + 0.0)[()]


def scheduled_progress(
    eigenvalue: ArrayLike, inner_lrs: ArrayLike, *, weight_decay: float = 0.0, clip: bool = False
) -> Any:
    """Return the share of a mode that an inner phase removes if its learning rate changes from step to step.

    `sigma = 1 - prod_t (1 - eta_t (lambda + decay))`. Of a preconditioned optimizer with the step `-eta P^-1 gradient`
    and P held fixed over the round, the eigenvalues are those of `P^-1/2 H P^-1/2`. An inner optimizer that averages
    gradients (AdamW's first moment, coefficient b) takes such steps only of modes with `eta lambda` well below `1 - b`.

    Args:
        eigenvalue: lambda >= 0 of the (preconditioned) curvature, any shape.
        inner_lrs: eta_t >= 0 of each inner step of the round, in order, shape (S,), S >= 1.
        weight_decay: decoupled weight decay, >= 0.
        clip: True to cut a step beyond the minimum, `eta_t (lambda + decay) > 1`, to one that reaches it: the mode
            counts as removed. False refuses such a mode.

    Returns:
        sigma in [0, 1], of the shape of `eigenvalue`.

    Source: paper section 2 (sigma for a constant learning rate); theory note R1.

    >>> float(scheduled_progress(0.5, [1.0, 0.5, 0.0]))
    0.625
    """
    where = "scheduled_progress"
    values, rates = check_finite(where, "eigenvalue", eigenvalue, 0), check_finite(where, "inner_lrs", inner_lrs, 0)
    decay = check_finite(where, "weight_decay", weight_decay, 0)
    if rates.ndim != 1 or rates.size == 0 or decay.ndim:
        raise ValueError(
            f"{where}: inner_lrs have shape {rates.shape} and weight_decay {decay.shape}; give one learning rate for "
            "each inner step of the round, shape (S,), and one number"
        )
    with np.errstate(over="ignore"):
        total = values + decay
        too_large = total * rates.max() > 1
    if not clip:
        remedy = f"times inner_lr {rates.max():g} it must be <= 1 (with the decay); lower that, or give clip=True"
        refuse(where, "eigenvalue", values, too_large, remedy)
    log_product = np.zeros(values.shape)  # log of the product, one step after the other: no array of modes x steps
    with np.errstate(divide="ignore", over="ignore"):
        for rate in rates:
            log_product = log_product + np.log1p(-np.minimum(rate * total, 1.0))
    return (-np.expm1(log_product) + 0.0)[()]


def effective_step(rule: Rules, sigma: ArrayLike) -> Any:
    """Return the step s of a mode: `lr sigma` (sum form), `lr (1-b) sigma` (EMA).

    Source: theory note R2 and R3 (the same number in both forms).

    >>> float(effective_step(OuterRule(2.0, 0.75, form="ema"), 0.5))
    0.25
    """
    return Mode.of("effective_step", rule, sigma).step.hi[()]


def transition(rule: Rules, sigma: ArrayLike) -> Floats:
    """Return the matrix T of one round, `(x, m) -> T (x, m)`, with m the buffer of the rule's own form.

    EMA form: heavy ball `[[1-s, -nu b], [w sigma, b]]`, Nesterov `[[1-(1+b)s, -nu b^2], [w sigma, b]]`; sum form: the
    same with `sigma` in place of `w sigma`.

    Returns:
        Array of shape (..., 2, 2).

    Source: paper section 2, T_HB and T_NAG; theory note R2 and R3.

    >>> transition(OuterRule(1.0, 0.5, form="ema"), 0.5).tolist()
    [[0.75, -0.5], [0.25, 0.5]]
    """
    where = "transition"
    rules, values = rule_arrays(where, rule), check_sigma(where, sigma)
    common_shape(where, rule=rules.shape, sigma=values.shape)
    with np.errstate(over="ignore"):
        check_steps(where, rules.lr * values)
    b, ahead = rules.momentum, rules.nesterov
    step = rules.lr * (rules.injection * values)
    entries = (
        1 - np.where(ahead, 1 + b, 1) * step,
        -rules.lr * b * np.where(ahead, b, 1),
        rules.injection * values,
        b,
    )
    rows = np.stack(np.broadcast_arrays(*entries), axis=-1)
    return rows.reshape(*rows.shape[:-1], 2, 2)


def regime(rule: Rules, sigma: ArrayLike) -> Any:
    """Return how a mode moves: the kind of T's eigenvalues.

    | name | eigenvalues | motion |
    |---|---|---|
    | `oscillatory` | complex pair, modulus sqrt(D) < 1 | rotates inside an envelope: restarts may help |
    | `critical` | one double root, not 0 | edge of the oscillatory interval |
    | `real_below` | real, trace > 0, D >= 0: below the interval | decays without oscillation |
    | `real_above` | real, trace < 0, D >= 0: above it | alternates in sign, may diverge |
    | `negative_determinant` | real, of both signs: Nesterov with s > 1 | may diverge |
    | `nilpotent` | both 0: Nesterov (or no momentum) with s = 1 | gone after two rounds |

    Returns:
        A name, or an array of names of the broadcast shape. Decided with twice a double's digits.

    Source: theory note R6 to R12; the paper treats the first row (its errors E5 and E8 are about the other rows).

    >>> regime(OuterRule(1.0, 0.9, form="ema"), [0.01, 0.5]).tolist()
    ['real_below', 'oscillatory']
    """
    return Mode.of("regime", rule, sigma).regime()[()]


def oscillatory_interval(rule: Rules) -> tuple[Any, Any]:
    """Return the open interval (low, high) of sigma in which a mode oscillates; it may reach beyond 1.

    Heavy ball `(1-sqrt b)^2 < s < (1+sqrt b)^2`; Nesterov `((1-b)/(1+b))^2 < s < 1`; divided by lr (sum form) or
    lr (1-b) (EMA form). Without momentum low = high (no oscillation), both infinite at lr 0.

    Source: paper section 3 and appendix A.6 (heavy ball); theory note R6 (Nesterov).

    >>> [round(float(end), 3) for end in oscillatory_interval(OuterRule(1.0, 0.9, form="ema"))]
    [0.026, 37.974]
    """
    rules = rule_arrays("oscillatory_interval", rule)
    w, root = 1 - rules.momentum, np.sqrt(rules.momentum)
    low = np.where(rules.nesterov, (w / (1 + rules.momentum)) ** 2, (w / (1 + root)) ** 2)
    high = np.where(rules.nesterov, 1.0, (1 + root) ** 2)
    high = np.where(rules.momentum == 0, low, high)
    return _in_sigma(rules, low), _in_sigma(rules, high)


def stable_limit(rule: Rules) -> Any:
    """Return the sigma below which a mode is stable without restarts; it may lie beyond 1.

    `0 < s < 2 (1+b)` for heavy ball, `0 < s < 2 (1+b) / (1+2b)` for Nesterov. No restart schedule makes a mode stable
    that is not: a restart can only make a stable one unstable (R19).

    Source: theory note R6 and R18 (Theorem 2).

    >>> round(float(stable_limit(OuterRule(1.0, 0.9))), 2)
    3.8
    """
    rules = rule_arrays("stable_limit", rule)
    bound = 2 * (1 + rules.momentum) / np.where(rules.nesterov, 1 + 2 * rules.momentum, 1.0)
    return _in_sigma(rules, bound)


def asymptotic_rate(rule: Rules, sigma: ArrayLike) -> Any:
    """Return the asymptotic contraction without restarts: `-log(spectral radius of T)`, in nats a round.

    Oscillatory: `-log(b)/2` for heavy ball, at every sigma; `-(log b + log(1-s))/2` for Nesterov. Negative: diverges.
    Infinite: nilpotent. Slow modes keep their digits.

    Source: paper section 2 (r_infinity); theory note R7 to R12 and F4.

    >>> round(float(asymptotic_rate(OuterRule(1.0, 0.9, form="ema"), 0.3)), 4)
    0.0527
    """
    return (-Mode.of("asymptotic_rate", rule, sigma).log_radius() + 0.0)[()]


def phase(rule: Rules, sigma: ArrayLike) -> Any:
    """Return the angle by which an oscillating mode turns in a round, in radians, 0 < phase < pi; nan if none turns.

    `cos(phase) = tr / (2 sqrt D)`, with tr the trace and D the determinant of T. Nesterov stays at or below pi/2.

    Source: paper section 3, proposition 1; theory note R7.

    >>> round(float(phase(OuterRule(1.0, 0.9, form="ema"), 0.95)), 4)
    0.3133
    """
    return Mode.of("phase", rule, sigma).oscillation().phase[()]


def phase_shift(rule: Rules, sigma: ArrayLike) -> Any:
    """Return theta of `chi_K = A rho^K cos(K phase - theta)`, in radians, |theta| < pi/2; nan if no oscillation.

    `theta = arctan C`, `C = (a - b) / (2 rho sin(phase))`, with a the first entry of T.

    Source: paper section 3, proposition 2; theory note R7.

    >>> float(phase_shift(OuterRule(1.0, 0.5, form="ema"), 1.0))  # lr sigma = 1: a pure cosine
    0.0
    """
    return Mode.of("phase_shift", rule, sigma).oscillation().shift[()]


def envelope(rule: Rules, sigma: ArrayLike, rounds: ArrayLike) -> Any:
    """Return the true envelope of an oscillating mode after t >= 0 rounds: `|x_t| <= sqrt(1+C^2) rho^t`.

    For x_0 = 1, m_0 = 0; `rounds` are any real numbers; nan where the mode does not oscillate. The paper draws `rho^t`,
    which is not a bound: at momentum 0.9 a mode of sigma 0.1 exceeds it by 14 %.

    Source: theory note R15; paper error E6.

    >>> round(float(envelope(OuterRule(1.0, 0.9, form="ema"), 0.1, 0)), 3)
    1.136
    """
    mode, times = Mode.of("envelope", rule, sigma), check_finite("envelope", "rounds", rounds, 0)
    common_shape("envelope", modes=mode.shape, rounds=times.shape)
    turn = mode.oscillation()
    return np.exp(turn.log_amplitude + times * turn.log_rho)[()]


def _in_sigma(rules: RuleArrays, step: Floats) -> Any:
    with np.errstate(divide="ignore", over="ignore"):
        return (step / rules.injection / rules.lr)[()]  # not by their product, which may be denormal
