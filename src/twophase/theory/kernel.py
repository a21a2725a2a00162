"""Describe a round of modes by numbers that lose no digits; every other module of the theory computes with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.theory import doubled
from twophase.theory.doubled import Arrays, Doubled, choose, two_sum
from twophase.theory.inputs import Floats, Rules, check_sigma, check_steps, common_shape, rule_arrays


@dataclass(frozen=True, slots=True)
class Oscillation:
    """Hold the numbers of `chi_K = A rho^K sin(delay - K phase)`, A = exp(log_amplitude); nan without oscillation.

    `shift` is theta and `delay = theta + pi/2` in (0, pi): the cancellations are at `(delay + l pi) / phase`.
    """

    phase: Floats
    shift: Floats
    delay: Floats
    log_rho: Floats
    log_amplitude: Floats


@dataclass(frozen=True, slots=True)
class Round(Arrays):
    """Hold what powers of T are made of: 1 - a with a = T_11, a itself, T_12 T_21, and a - b with b = T_22."""

    reach: Doubled
    corner: Doubled
    cross: Doubled
    lead: Doubled


@dataclass(frozen=True, slots=True)
class Mode(Arrays):
    """Hold one round of modes in the coordinates (x, n), n = lr times the buffer, which are the same in both forms.

    `n <- b n + s x`, then `x <- x - n` (heavy ball) or `x <- x - (b n + s x)` (Nesterov, with the new n). All arrays
    have one shape.
    """

    momentum: Floats
    decay: Doubled
    """w = 1 - momentum, exactly."""
    step: Doubled
    """s."""
    nesterov: NDArray[np.bool_]

    @classmethod
    def of(cls, where: str, rule: Rules, sigma: ArrayLike) -> Mode:
        """Build the mode of the checked public arguments."""
        rules, values = rule_arrays(where, rule), check_sigma(where, sigma)
        common_shape(where, rule=rules.shape, sigma=values.shape)
        lr, momentum, ema, nesterov, values = np.broadcast_arrays(
            rules.lr, rules.momentum, rules.ema, rules.nesterov, values
        )
        with np.errstate(over="ignore"):
            check_steps(where, lr * values)
        decay = Doubled(*two_sum(1.0, -momentum))
        # Mantissas, so that a product of small numbers does not underflow on its way.
        (lr_m, lr_e), (sigma_m, sigma_e) = np.frexp(lr), np.frexp(values)
        step = choose(ema, lambda: decay * lr_m, lambda: Doubled(lr_m, np.zeros_like(lr_m))) * sigma_m
        return cls(momentum, decay, step.scaled(np.maximum(lr_e + sigma_e, -3000)), nesterov)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of all arrays."""
        return self.momentum.shape

    @property
    def size(self) -> int:
        """Return how many modes these are."""
        return self.momentum.size

    # Free of cancellation: for b < 1/2 in terms of b and f = 1 - s, which next to nilpotent modes are small; else of w.

    def disc(self) -> Doubled:
        """Return trace^2 - 4 determinant: `(w + s)^2 - 4 s` (heavy ball) or `f (w^2 - (1 + b)^2 s)` (Nesterov)."""
        b, w, s, small = self.momentum, self.decay, self.step, self.momentum < 0.5
        wide, f = 2 - w, 1 - s  # wide = 1 + b
        return choose(
            self.nesterov,
            lambda: f * choose(small, lambda: wide * wide * f - 4 * b, lambda: w * w - wide * wide * s),
            lambda: choose(small, lambda: f * f - ((s + 1) * 2 - b) * b, lambda: (w + s) * (w + s) - 4 * s),
        )

    def trace(self) -> Doubled:
        """Return `f + b` (heavy ball) or `(1 + b) f`."""
        f = 1 - self.step
        return choose(self.nesterov, lambda: (2 - self.decay) * f, lambda: f + self.momentum)

    def lead(self) -> Doubled:
        """Return a - b with a = T_11 and b = T_22: `w - s` (heavy ball) or `w - (1 + b) s`."""
        b, w, s, small = self.momentum, self.decay, self.step, self.momentum < 0.5
        return choose(
            self.nesterov,
            lambda: choose(small, lambda: (2 - w) * (1 - s) - 2 * b, lambda: w - (2 - w) * s),
            lambda: choose(small, lambda: (1 - s) - b, lambda: w - s),
        )

    def round(self) -> Round:
        """Return the matrix of one round: 1 - a is s (heavy ball) or (1 + b) s, T_12 T_21 is -b s or -b^2 s."""
        b, s = self.momentum, self.step
        cross = s * -b
        return Round(
            choose(self.nesterov, lambda: (2 - self.decay) * s, lambda: s),
            choose(self.nesterov, lambda: self.trace() - b, lambda: 1 - s),
            choose(self.nesterov, lambda: cross * b, lambda: cross),
            self.lead(),
        )

    def regime(self) -> NDArray[np.str_]:
        """Return the names of `REGIMES`."""
        disc, trace = self.disc(), self.trace()
        # The sign of D = b (1 - s); the product may underflow.
        sign = np.sign(self.momentum) * np.where(self.nesterov, np.sign((1 - self.step).hi), 1)
        names = np.where(trace.hi > 0, "real_below", "real_above").astype("U20")
        names[sign < 0] = "negative_determinant"
        names[disc.hi < 0] = "oscillatory"
        names[disc.hi == 0] = "critical"
        names[(trace.hi == 0) & (sign == 0)] = "nilpotent"
        return names

    def oscillation(self) -> Oscillation:
        """Return phase, delay, log rho and log amplitude (theory note R7)."""
        disc, trace, lead = self.disc(), self.trace(), self.lead()
        turning = disc.hi < 0
        with np.errstate(divide="ignore", invalid="ignore"):
            half = np.sqrt(np.where(turning, -disc.hi, np.nan)) / 2  # rho sin(phase)
            angle = np.arctan2(half, trace.hi / 2)
            shift = np.arctan2(lead.hi / 2, half)
            delay = np.arctan2(half, -lead.hi / 2)  # not shift + pi/2, which would lose the digits of a small one
            amplitude = np.log(np.hypot(half, lead.hi / 2) / half)
        return Oscillation(angle, shift, delay, np.where(turning, self._log_rho(), np.nan), amplitude)

    def _log_rho(self) -> Floats:
        """Return log sqrt(D), D > 0."""
        b, w, s = self.momentum, self.decay.hi, self.step.hi
        with np.errstate(divide="ignore", invalid="ignore"):
            log_b = np.where(b > 0.5, np.log1p(-w), np.log(b))
            free = (1 - self.step).hi  # by its own digits: next to s = 1 those of s are not enough
            log_free = np.where(s < 0.5, np.log1p(-s), np.log(free))
            return (log_b + np.where(self.nesterov, log_free, 0.0)) / 2

    def log_radius(self) -> Floats:
        """Return the log of the spectral radius of T."""
        disc, trace = self.disc(), self.trace()
        w, s, positive = self.decay.hi, self.step.hi, trace.hi > 0
        determinant = doubled.where(self.nesterov, 1 - self.step, Doubled(np.ones_like(w))) * self.momentum
        size = doubled.where(positive, trace, -trace)
        with np.errstate(divide="ignore", invalid="ignore"):
            half = np.sqrt(np.maximum(disc.hi, 0)) / 2
            radius = size.hi / 2 + half  # |l1|, the larger root: no cancellation
            # Near 1 by |l1| - 1 = half - u with u = 1 - |tr|/2, where (half - u)(half + u) = -(1 - |tr| + D).
            u = np.where(positive, np.where(self.nesterov, w + (2 - w) * s, w + s) / 2, (1 - size * 0.5).hi)
            product = np.where(positive, s, ((1 - size) + determinant).hi)
            excess = np.where(u > 0, -product / (u + half), half - u)
            real = np.where(radius > 0.5, np.log1p(excess), np.log(radius))
            return np.where(disc.hi < 0, self._log_rho(), real)
