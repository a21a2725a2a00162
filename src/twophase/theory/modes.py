"""Describe a mode under an outer rule: progress, 2x2 transition, regime, phase, envelope, rate, stability.

Letters, in all of `twophase.theory`: x residual of the mode, m momentum buffer, nu = lr, b = momentum, w = 1 - b.
Further, sigma effective progress, g = sigma x the pseudo-gradient, s the effective step (`effective_step`). The pair
(s, b) alone decides every rate and every restart factor.

Arguments, in all of it: `rule` is one `OuterRule`, what `rule_grid` returns, or an array of rules; `sigma` lies in
[0, 1]; `lr * sigma` is at most 1e100. `period` and other counts are whole numbers below 2^53. They broadcast; results
have the broadcast shape, or are NumPy scalars. A value out of its range is a ValueError that names the argument.
Numbers are doubles: within rounding of an edge of the oscillatory interval the regime is that of the rounded s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.theory.checks import Floats, counts, numbers
from twophase.theory.rules import AnyRule, Rules

REGIMES = ("oscillatory", "critical", "real_below", "real_above", "negative_determinant", "nilpotent")
"""Names that `regime` gives; see there."""

_ROUNDING = 1e-12  # an inner_lr of 1 / eigenvalue may make a product beyond 1 by that much
_LARGEST_STEP = 1e100  # no learning rate is meant that large, and squares of a step stay far from overflow


@dataclass(frozen=True, slots=True, eq=False)
class Modes:
    """Hold what decides how modes move, as arrays of one shape, in the formulas that do not cancel (theory note R6)."""

    momentum: Floats
    step: Floats
    nesterov: NDArray[np.bool_]

    @classmethod
    def of(cls, rule: AnyRule, sigma: ArrayLike) -> Modes:
        """Return the modes of the public arguments."""
        rules, values = Rules.of(rule), numbers("sigma", sigma, 0, 1)
        with np.errstate(over="ignore"):
            if np.any(rules.lr * values > _LARGEST_STEP):
                raise ValueError(f"lr * sigma must be at most 1e100, got lr {rules.lr.max():g}")
        return cls(*np.broadcast_arrays(rules.momentum, rules.lr * (rules.injection * values), rules.nesterov))

    def __getitem__(self, index: Any) -> Modes:
        return Modes(self.momentum[index], self.step[index], self.nesterov[index])

    @property
    def trace(self) -> Floats:
        """Return the trace of T: `(1 - s) + b` (heavy ball), `(1 + b)(1 - s)` (Nesterov)."""
        return np.where(self.nesterov, (1 + self.momentum) * (1 - self.step), (1 - self.step) + self.momentum)

    @property
    def determinant(self) -> Floats:
        """Return the determinant D of T: `b` (heavy ball), `b (1 - s)` (Nesterov)."""
        return self.momentum * np.where(self.nesterov, 1 - self.step, 1.0)

    @property
    def lead(self) -> Floats:
        """Return a - b with a = T_11 and b = T_22."""
        return (1 - self.momentum) - self.step * np.where(self.nesterov, 1 + self.momentum, 1.0)

    @property
    def disc(self) -> Floats:
        """Return tr^2 - 4 D by its factors, the distances of s from the edges of the oscillatory interval."""
        low, high = edges(self.momentum, self.nesterov)
        return np.where(self.nesterov, (1 + self.momentum) ** 2, 1.0) * (self.step - low) * (self.step - high)

    @property
    def half(self) -> Floats:
        """Return rho sin(phase), half the distance of the complex eigenvalues; nan where they are real."""
        disc = self.disc
        return np.sqrt(np.where(disc < 0, -disc, np.nan)) / 2

    @property
    def log_rho(self) -> Floats:
        """Return log sqrt(D)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return (np.log(self.momentum) + np.where(self.nesterov, np.log1p(-self.step), 0.0)) / 2


def edges(momentum: Floats, nesterov: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the steps s between which a mode oscillates."""
    w, root = 1 - momentum, np.sqrt(momentum)
    low = np.where(nesterov, w / (1 + momentum), w / (1 + root)) ** 2
    high = np.where(nesterov, 1.0, (1 + root) ** 2)
    return low, np.where(momentum == 0, low, high)


def effective_progress(eigenvalue: ArrayLike, inner_lr: ArrayLike, inner_steps: ArrayLike) -> Any:
    """Return the share of a mode that one inner phase of gradient descent removes.

    `sigma = 1 - (1 - inner_lr eigenvalue)^inner_steps`, so that the pseudo-gradient is `g = sigma x`. It holds for
    deterministic gradient descent on a quadratic, with one replica or equal data. Replicas with different data or
    AdamW inner steps are outside the model.

    Args:
        eigenvalue: lambda >= 0 of the mode's curvature, any shape; tiny ones lose no digits.
        inner_lr: eta >= 0 of the inner gradient descent; `inner_lr * eigenvalue` must not exceed 1.
        inner_steps: S >= 1, inner steps a round.

    Source: paper section 2, equation for g_t and sigma; theory note R1.

    >>> float(effective_progress(0.5, 1.0, 3))
    0.875
    """
    values, rates = numbers("eigenvalue", eigenvalue, 0), numbers("inner_lr", inner_lr, 0)
    steps = counts("inner_steps", inner_steps)
    with np.errstate(over="ignore", divide="ignore"):  # log1p(-1) = -inf is meant: the mode is removed at once
        product = _step("inner_lr * eigenvalue", values * rates)
        # A product below all doubles of full precision is taken with the steps first, which is all that counts there.
        tiny = np.maximum(values, rates) * steps * np.minimum(values, rates)
        return np.where(product < 1e-290, np.minimum(tiny, 1.0), -np.expm1(steps * np.log1p(-product)))[()] + 0.0


def scheduled_progress(
    eigenvalue: ArrayLike, inner_lrs: ArrayLike, *, weight_decay: float = 0.0, clip: bool = False
) -> Any:
    """Return the share of a mode that an inner phase removes if its learning rate changes from step to step.

    `sigma = 1 - prod_t (1 - eta_t (lambda + decay))`, eta_t of each inner step in order, shape (S,). Of a
    preconditioned optimizer with the step `-eta P^-1 gradient`, P held fixed over the round, the eigenvalues are those
    of `P^-1/2 H P^-1/2`. A step beyond the minimum, `eta_t (lambda + decay) > 1`, is refused, or with `clip` cut to one
    that reaches it: the mode counts as removed.

    Source: paper section 2 (sigma for a constant learning rate); theory note R1.

    >>> float(scheduled_progress(0.5, [1.0, 0.5, 0.0]))
    0.625
    """
    values, rates = numbers("eigenvalue", eigenvalue, 0), numbers("inner_lrs", inner_lrs, 0)
    if rates.ndim != 1 or not rates.size:
        raise ValueError(f"inner_lrs must be one for each inner step, shape (S,), got shape {rates.shape}")
    total = values + numbers("weight_decay", weight_decay, 0)
    log_product = np.zeros_like(total)  # one step after the other: no array of modes x steps
    with np.errstate(divide="ignore", over="ignore"):
        for rate in rates:
            step = rate * total
            step = np.minimum(step, 1.0) if clip else _step("inner_lr * (eigenvalue + weight_decay)", step)
            log_product = log_product + np.log1p(-step)
    return -np.expm1(log_product)[()] + 0.0


def _step(name: str, product: Floats) -> Floats:
    """Return a product that does not exceed 1, where gradient descent would overshoot."""
    if np.any(product > 1 + _ROUNDING):
        raise ValueError(f"{name} must be at most 1, got {np.max(product):g}; lower inner_lr")
    return np.minimum(product, 1.0)


def effective_step(rule: AnyRule, sigma: ArrayLike) -> Any:
    """Return the step s of a mode: `lr sigma` (sum form), `lr (1-b) sigma` (EMA).

    Source: theory note R2 and R3 (the same number in both forms).
    """
    return Modes.of(rule, sigma).step[()]


def transition(rule: AnyRule, sigma: ArrayLike) -> Floats:
    """Return the matrix T of one round, `(x, m) -> T (x, m)`, with m the buffer of the rule's own form.

    EMA form: heavy ball `[[1-s, -nu b], [w sigma, b]]`, Nesterov `[[1-(1+b)s, -nu b^2], [w sigma, b]]`; sum form: the
    same with `sigma` in place of `w sigma`. Shape (..., 2, 2).

    Source: paper section 2, T_HB and T_NAG; theory note R2 and R3.

    >>> transition(OuterRule(1.0, 0.5, form="ema"), 0.5).tolist()
    [[0.75, -0.5], [0.25, 0.5]]
    """
    rules, modes, values = Rules.of(rule), Modes.of(rule, sigma), np.asarray(sigma, dtype=np.float64)
    b, ahead = modes.momentum, modes.nesterov
    corner, upper = 1 - np.where(ahead, 1 + b, 1) * modes.step, -rules.lr * b * np.where(ahead, b, 1)
    entries = np.stack(np.broadcast_arrays(corner, upper, rules.injection * values, b), axis=-1)
    return entries.reshape(*entries.shape[:-1], 2, 2)


def regime(rule: AnyRule, sigma: ArrayLike) -> Any:
    """Return how a mode moves: the kind of T's eigenvalues.

    | name | eigenvalues | motion |
    |---|---|---|
    | `oscillatory` | complex pair, modulus sqrt(D) < 1 | rotates inside an envelope: restarts may help |
    | `critical` | one double root, not 0 | edge of the oscillatory interval |
    | `real_below` | real, trace > 0, D >= 0: below the interval | decays without oscillation |
    | `real_above` | real, trace < 0, D >= 0: above it | alternates in sign, may diverge |
    | `negative_determinant` | real, of both signs: Nesterov with s > 1 | may diverge |
    | `nilpotent` | both 0: Nesterov (or no momentum) with s = 1 | gone after two rounds |

    Source: theory note R6 to R12; the paper treats the first row (its errors E5 and E8 are about the other rows).

    >>> regime(OuterRule(1.0, 0.9, form="ema"), [0.01, 0.5]).tolist()
    ['real_below', 'oscillatory']
    """
    modes = Modes.of(rule, sigma)
    disc, trace = modes.disc, modes.trace
    # The sign of D = b (1 - s); the product may underflow.
    sign = np.sign(modes.momentum) * np.where(modes.nesterov, np.sign(1 - modes.step), 1)
    names = np.select(
        [(trace == 0) & (sign == 0), disc == 0, disc < 0, sign < 0, trace > 0],
        ["nilpotent", "critical", "oscillatory", "negative_determinant", "real_below"],
        "real_above",
    )
    return names[()]


def oscillatory_interval(rule: AnyRule) -> tuple[Any, Any]:
    """Return the open interval (low, high) of sigma in which a mode oscillates; it may reach beyond 1.

    Heavy ball `(1-sqrt b)^2 < s < (1+sqrt b)^2`; Nesterov `((1-b)/(1+b))^2 < s < 1`; divided by lr (sum form) or
    lr (1-b) (EMA form). Without momentum low = high (no oscillation), both infinite at lr 0.

    Source: paper section 3 and appendix A.6 (heavy ball); theory note R6 (Nesterov).
    """
    rules = Rules.of(rule)
    low, high = edges(rules.momentum, rules.nesterov)
    return _in_sigma(rules, low), _in_sigma(rules, high)


def stable_limit(rule: AnyRule) -> Any:
    """Return the sigma below which a mode is stable without restarts; it may lie beyond 1.

    `0 < s < 2 (1+b)` for heavy ball, `0 < s < 2 (1+b) / (1+2b)` for Nesterov. No restart schedule makes a mode stable
    that is not: a restart can only make a stable one unstable (R19).

    Source: theory note R6 and R18 (Theorem 2).
    """
    rules = Rules.of(rule)
    return _in_sigma(rules, 2 * (1 + rules.momentum) / np.where(rules.nesterov, 1 + 2 * rules.momentum, 1.0))


def asymptotic_rate(rule: AnyRule, sigma: ArrayLike) -> Any:
    """Return the asymptotic contraction without restarts: `-log(spectral radius of T)`, in nats a round.

    Oscillatory: `-log(b)/2` for heavy ball, at every sigma; `-(log b + log(1-s))/2` for Nesterov. Negative: diverges.
    Infinite: nilpotent. Slow modes keep their digits.

    Source: paper section 2 (r_infinity); theory note R7 to R12 and F4.
    """
    modes = Modes.of(rule, sigma)
    disc, trace, s = modes.disc, modes.trace, modes.step
    half = np.sqrt(np.maximum(disc, 0)) / 2
    # Next to 1 by (1 - l1)(1 - l2) = s: the distance of the smaller root from 1 is a sum of positive numbers.
    distance = ((1 - modes.momentum) + s * np.where(modes.nesterov, 1 + modes.momentum, 1.0)) / 2 + half
    radius = np.abs(trace) / 2 + half
    with np.errstate(divide="ignore", invalid="ignore"):
        real = np.where((trace > 0) & (radius > 0.5), np.log1p(-s / distance), np.log(radius))
    return -np.where(disc < 0, modes.log_rho, real)[()] + 0.0


def phase(rule: AnyRule, sigma: ArrayLike) -> Any:
    """Return the angle by which an oscillating mode turns in a round, in radians, 0 < phase < pi; nan if none turns.

    `cos(phase) = tr / (2 sqrt D)`, with tr the trace and D the determinant of T. Nesterov stays at or below pi/2.

    Source: paper section 3, proposition 1; theory note R7.
    """
    modes = Modes.of(rule, sigma)
    return np.arctan2(modes.half, modes.trace / 2)[()]


def phase_shift(rule: AnyRule, sigma: ArrayLike) -> Any:
    """Return theta of `chi_K = A rho^K cos(K phase - theta)`, in radians, |theta| < pi/2; nan if no oscillation.

    `theta = arctan C`, `C = (a - b) / (2 rho sin(phase))`, with a the first entry of T.

    Source: paper section 3, proposition 2; theory note R7.
    """
    modes = Modes.of(rule, sigma)
    return np.arctan2(modes.lead / 2, modes.half)[()]


def envelope(rule: AnyRule, sigma: ArrayLike, rounds: ArrayLike) -> Any:
    """Return the true envelope of an oscillating mode after t >= 0 rounds: `|x_t| <= sqrt(1+C^2) rho^t`.

    For x_0 = 1, m_0 = 0; `rounds` are any real numbers; nan where the mode does not oscillate. The paper draws `rho^t`,
    which is not a bound: at momentum 0.9 a mode of sigma 0.1 exceeds it by 14 %.

    Source: theory note R15; paper error E6.
    """
    modes, times = Modes.of(rule, sigma), numbers("rounds", rounds, 0)
    half = modes.half
    with np.errstate(invalid="ignore"):
        return (np.hypot(half, modes.lead / 2) / half * np.exp(times * modes.log_rho))[()]


def _in_sigma(rules: Rules, step: Floats) -> Any:
    with np.errstate(divide="ignore", over="ignore"):
        return (step / rules.injection / rules.lr)[()]  # not by their product, which may be denormal
