"""One mode under an outer rule: effective progress, its 2x2 transition, regime, phase, envelope, rate, stability.

Letters, in all of `twophase.theory`: x residual of the mode, m momentum buffer, nu = lr, b = momentum, w = 1 - b,
sigma effective progress, g = sigma x the pseudo-gradient, s the effective step (`effective_step`). The pair (s, b)
alone decides every rate and every restart factor.

Everything here is right to the last digits in every regime: differences that cancel are formed with twice the digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.theory import doubled
from twophase.theory.doubled import Doubled
from twophase.theory.inputs import Floats, RuleArrays, Rules, check_counts, check_sigma, check_steps, rule_arrays

REGIMES = ("oscillatory", "critical", "real_below", "real_above", "negative_determinant", "nilpotent")
"""Names that `regime` gives; see there."""


def effective_progress(eigenvalue: ArrayLike, inner_lr: ArrayLike, inner_steps: ArrayLike) -> Any:
    """Share of a mode that one inner phase of gradient descent removes.

    `sigma = 1 - (1 - inner_lr eigenvalue)^inner_steps`, so that the pseudo-gradient is `g = sigma x`. Holds for
    deterministic gradient descent on a quadratic, with one replica or equal data; replicas with different data or
    AdamW inner steps are outside the model.

    Args:
        eigenvalue: lambda >= 0 of the mode's curvature, any shape.
        inner_lr: eta >= 0 of the inner gradient descent; `inner_lr * eigenvalue` must not exceed 1.
        inner_steps: S >= 1, inner steps a round.

    Returns:
        sigma in [0, 1], of the broadcast shape; accurate for tiny eigenvalues too.

    Raises:
        ValueError: a value out of range; the message names the mode.

    Source: paper section 2, equation for g_t and sigma; theory note R1.

    >>> float(effective_progress(0.5, 1.0, 3))
    0.875
    """
    where = "effective_progress"
    values = np.asarray(eigenvalue, dtype=float)
    rates = np.asarray(inner_lr, dtype=float)
    counts = check_counts(where, "inner_steps", inner_steps)
    for name, array in (("eigenvalue", values), ("inner_lr", rates)):
        wrong = ~(np.isfinite(array) & (array >= 0))
        if np.any(wrong):
            raise ValueError(f"{where}: {name} is {array[wrong].flat[0]!r}; it must be a finite number >= 0")
    product = values * rates
    if np.any(product > 1):
        mode = np.unravel_index(int(np.argmax(np.atleast_1d(product))), np.atleast_1d(product).shape)
        place = f" of mode {', '.join(str(int(i)) for i in mode)}" if product.ndim else ""
        raise ValueError(
            f"{where}: inner_lr * eigenvalue{place} is {product.max():g}; it must be <= 1, where gradient descent "
            f"does not overshoot; lower inner_lr to {rates.max() / product.max():.3g} or less"
        )
    with np.errstate(divide="ignore"):  # log1p(-1) = -inf is meant: the mode is removed at once
        return _plain(-np.expm1(counts * np.log1p(-product)) + 0.0)


def effective_step(rule: Rules, sigma: ArrayLike) -> Any:
    """The step s of a mode, which with the momentum decides everything: `lr sigma` (sum form), `lr (1-b) sigma` (EMA).

    Args:
        rule: one rule or an array of rules.
        sigma: effective progress in [0, 1]; broadcasts against the rules.

    Returns:
        s >= 0, of the broadcast shape.

    Raises:
        ValueError: sigma outside [0, 1].

    Source: theory note R2 and R3 (the same number in both forms).

    >>> from twophase.rule import OuterRule
    >>> float(effective_step(OuterRule(2.0, 0.75, form="ema"), 0.5))
    0.25
    """
    return _plain(Mode.of("effective_step", rule, sigma).step.hi)


def transition(rule: Rules, sigma: ArrayLike) -> Floats:
    """The matrix T of one round, `(x, m) -> T (x, m)`, with m the buffer of the rule's own form.

    EMA form: heavy ball `[[1-s, -nu b], [w sigma, b]]`, Nesterov `[[1-(1+b)s, -nu b^2], [w sigma, b]]`; sum form: the
    same with `sigma` in place of `w sigma`.

    Returns:
        Array of shape (..., 2, 2).

    Raises:
        ValueError: sigma outside [0, 1].

    Source: paper section 2, T_HB and T_NAG; theory note R2 and R3.

    >>> from twophase.rule import OuterRule
    >>> transition(OuterRule(1.0, 0.5, form="ema"), 0.5).tolist()
    [[0.75, -0.5], [0.25, 0.5]]
    """
    rules, values = rule_arrays("transition", rule), check_sigma("transition", sigma)
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
    """How a mode moves: the kind of T's eigenvalues.

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

    Raises:
        ValueError: sigma outside [0, 1].

    Source: theory note R6 to R12; the paper treats the first row (its errors E5 and E8 are about the others).

    >>> from twophase.rule import OuterRule
    >>> regime(OuterRule(1.0, 0.9, form="ema"), [0.01, 0.5]).tolist()
    ['real_below', 'oscillatory']
    """
    return _plain(Mode.of("regime", rule, sigma).regime())


def oscillatory_interval(rule: Rules) -> tuple[Any, Any]:
    """The open interval of sigma in which a mode oscillates; it may reach beyond 1.

    Heavy ball `(1-sqrt b)^2 < s < (1+sqrt b)^2`; Nesterov `((1-b)/(1+b))^2 < s < 1`; divided by lr (sum form) or
    lr (1-b) (EMA form).

    Returns:
        (low, high), floats or arrays of the rules' shape; low = high (no oscillation) without momentum, both infinite
        at lr 0.

    Source: paper section 3 and appendix A.6 (heavy ball); theory note R6 (Nesterov).

    >>> from twophase.rule import OuterRule
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
    """The sigma below which a mode is stable without restarts; it may lie beyond 1.

    `0 < s < 2 (1+b)` for heavy ball, `0 < s < 2 (1+b) / (1+2b)` for Nesterov. No restart schedule makes a mode stable
    that is not (`contraction.destabilising_step` says where a restart makes a stable one unstable).

    Source: theory note R6 and R18 (Theorem 2).

    >>> from twophase.rule import OuterRule
    >>> round(float(stable_limit(OuterRule(1.0, 0.9))), 2)
    3.8
    """
    rules = rule_arrays("stable_limit", rule)
    bound = 2 * (1 + rules.momentum) / np.where(rules.nesterov, 1 + 2 * rules.momentum, 1.0)
    return _in_sigma(rules, bound)


def asymptotic_rate(rule: Rules, sigma: ArrayLike) -> Any:
    """Contraction a round without restarts as the rounds go on: `-log(spectral radius of T)`, in nats a round.

    Oscillatory: `-log(b)/2` for heavy ball, whatever sigma; `-(log b + log(1-s))/2` for Nesterov. Negative: diverges.
    Infinite: nilpotent. Slow modes keep their digits.

    Raises:
        ValueError: sigma outside [0, 1].

    Source: paper section 2 (r_infinity); theory note R7 to R12 and F4.

    >>> from twophase.rule import OuterRule
    >>> round(float(asymptotic_rate(OuterRule(1.0, 0.9, form="ema"), 0.3)), 4)
    0.0527
    """
    return _plain(-Mode.of("asymptotic_rate", rule, sigma).log_radius() + 0.0)


def phase(rule: Rules, sigma: ArrayLike) -> Any:
    """The angle by which an oscillating mode turns in a round, in radians, 0 < phase < pi.

    `cos(phase) = tr / (2 sqrt D)`, with tr the trace and D the determinant of T. Nesterov stays at or below pi/2.

    Returns:
        The angle; nan where the mode does not oscillate.

    Raises:
        ValueError: sigma outside [0, 1].

    Source: paper section 3, proposition 1; theory note R7.

    >>> from twophase.rule import OuterRule
    >>> round(float(phase(OuterRule(1.0, 0.9, form="ema"), 0.95)), 4)
    0.3133
    """
    return _plain(Mode.of("phase", rule, sigma).oscillation().phase)


def phase_shift(rule: Rules, sigma: ArrayLike) -> Any:
    """The angle theta of `chi_K = A rho^K cos(K phase - theta)`, in radians, |theta| < pi/2; nan if no oscillation.

    `theta = arctan C`, `C = (a - b) / (2 rho sin(phase))`, with a the first entry of T.

    Source: paper section 3, proposition 2; theory note R7.

    >>> from twophase.rule import OuterRule
    >>> float(phase_shift(OuterRule(1.0, 0.5, form="ema"), 1.0))  # lr sigma = 1: a pure cosine
    0.0
    """
    return _plain(Mode.of("phase_shift", rule, sigma).oscillation().shift)


def envelope(rule: Rules, sigma: ArrayLike, rounds: ArrayLike) -> Any:
    """The true envelope of an oscillating mode after some rounds: `|x_t| <= sqrt(1+C^2) rho^t`.

    The paper draws `rho^t`, which is not a bound: at momentum 0.9 a mode of sigma 0.1 exceeds it by 14 %.

    Args:
        rule: one rule or an array of rules.
        sigma: effective progress in [0, 1].
        rounds: t >= 0, any real numbers; all three broadcast.

    Returns:
        The bound for x_0 = 1, m_0 = 0; nan where the mode does not oscillate.

    Raises:
        ValueError: sigma outside [0, 1].

    Source: theory note R15; paper error E6.

    >>> from twophase.rule import OuterRule
    >>> round(float(envelope(OuterRule(1.0, 0.9, form="ema"), 0.1, 0)), 3)
    1.136
    """
    turn = Mode.of("envelope", rule, sigma).oscillation()
    return _plain(np.exp(turn.log_amplitude + np.asarray(rounds, dtype=float) * turn.log_rho))


def _in_sigma(rules: RuleArrays, step: Floats) -> Any:
    with np.errstate(divide="ignore"):
        return _plain(step / (rules.lr * rules.injection))


def _plain(values: Any) -> Any:
    """A NumPy scalar instead of an array without axes."""
    return values[()] if isinstance(values, np.ndarray) else values


# ------------------------------------------------------------------------------------- what the other modules build on


@dataclass(frozen=True, slots=True)
class Oscillation:
    """Numbers of the oscillatory regime; nan elsewhere. `chi_K = A rho^K sin(delay - K phase)`, A = exp(log_amplitude).

    `shift` is theta and `delay = theta + pi/2` in (0, pi): the cancellations are at `(delay + l pi) / phase`.
    """

    phase: Floats
    shift: Floats
    delay: Floats
    log_rho: Floats
    log_amplitude: Floats


@dataclass(frozen=True, slots=True)
class Mode:
    """One round of modes in the coordinates (x, n), n = lr times the buffer, which are the same in both forms.

    `n <- b n + s x`, then `x <- x - n` (heavy ball) or `x <- x - (b n + s x)` (Nesterov, with the new n). All arrays
    have one shape.
    """

    momentum: Floats
    decay: Doubled
    """w = 1 - momentum, exactly."""
    step: Doubled
    """s, as mantissas: the step is `step * 2^exponent`."""
    exponent: NDArray[np.int64]
    """0, except for steps so small that their squares are nothing even to 32 digits."""
    nesterov: NDArray[np.bool_]

    @classmethod
    def of(cls, where: str, rule: Rules, sigma: ArrayLike) -> Mode:
        """From the public arguments, checked."""
        rules, values = rule_arrays(where, rule), check_sigma(where, sigma)
        lr, momentum, ema, nesterov, values = np.broadcast_arrays(
            rules.lr, rules.momentum, rules.ema, rules.nesterov, values
        )
        check_steps(where, lr * values)
        decay = Doubled(*doubled.two_sum(np.ones_like(momentum), -momentum))
        one = Doubled(np.ones_like(momentum), np.zeros_like(momentum))
        # Mantissas, so that a product of small numbers does not underflow on its way.
        (lr_m, lr_e), (sigma_m, sigma_e) = np.frexp(lr), np.frexp(values)
        step = doubled.where(ema, decay, one) * lr_m * sigma_m
        exponent = (lr_e + sigma_e).astype(np.int64)
        tiny = exponent < -400  # 1 - momentum is at least 2^-53, so that s below 2^-350 is meant
        step = doubled.where(tiny, step, step.scaled(np.where(tiny, 0, exponent)))
        return cls(momentum, decay, step, np.where(tiny, exponent, 0), nesterov)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all arrays."""
        return self.momentum.shape

    @property
    def size(self) -> int:
        """How many modes these are."""
        return self.momentum.size

    @property
    def linear(self) -> NDArray[np.bool_]:
        """Where the step is so small that only its first power counts."""
        return self.exponent < 0

    def flat(self) -> Mode:
        """The same modes along one axis."""

        def line(values: Any) -> Any:
            return np.broadcast_to(values, self.shape).reshape(self.size)

        decay, step = (Doubled(line(d.hi), line(d.lo)) for d in (self.decay, self.step))
        return Mode(line(self.momentum), decay, step, line(self.exponent), line(self.nesterov))

    def __getitem__(self, index: Any) -> Mode:
        """Some of the modes."""
        return Mode(
            self.momentum[index], self.decay[index], self.step[index], self.exponent[index], self.nesterov[index]
        )

    def pieces(self) -> tuple[Doubled, Doubled, Doubled, Doubled]:
        """Disc = tr^2 - 4 D, tr, D and a - b, free of cancellation; steps that count only once are 0 here."""
        b, w = self.momentum, self.decay
        zero = np.zeros(self.shape)
        s = doubled.where(self.linear, Doubled(zero, zero), self.step)
        wide = 2 - w  # 1 + b
        ahead = self.nesterov
        reach = doubled.where(ahead, wide * s, s)
        free = doubled.where(ahead, 1 - s, Doubled(zero + 1, zero))
        # heavy ball: (w + s)^2 - 4 s;  Nesterov: (1 - s) (w^2 - (1 + b)^2 s)
        disc = doubled.where(ahead, free * (w * w - wide * wide * s), (w + s) * (w + s) - 4 * s)
        return disc, wide - reach, free * b, w - reach

    def regime(self) -> NDArray[np.str_]:
        """The names of `REGIMES`."""
        disc, trace, determinant, _ = self.pieces()
        names = np.where(trace.hi > 0, "real_below", "real_above").astype("U20")
        names[determinant.hi < 0] = "negative_determinant"
        names[disc.hi < 0] = "oscillatory"
        names[disc.hi == 0] = "critical"
        names[(trace.hi == 0) & (determinant.hi == 0)] = "nilpotent"
        return names

    def oscillating(self) -> NDArray[np.bool_]:
        """Where the eigenvalues are complex."""
        return self.pieces()[0].hi < 0

    def oscillation(self) -> Oscillation:
        """Phase, delay, log rho and log amplitude (theory note R7)."""
        disc, trace, _, lead = self.pieces()
        turning = disc.hi < 0
        with np.errstate(divide="ignore", invalid="ignore"):
            half = np.sqrt(np.where(turning, -disc.hi, np.nan)) / 2  # rho sin(phase)
            angle = np.arctan2(half, trace.hi / 2)
            shift = np.arctan2(lead.hi / 2, half)
            delay = np.arctan2(half, -lead.hi / 2)  # not shift + pi/2, which would lose the digits of a small one
            log_rho = self._log_rho()
            amplitude = np.log(np.hypot(half, lead.hi / 2) / half)
        return Oscillation(angle, shift, delay, np.where(turning, log_rho, np.nan), amplitude)

    def _log_rho(self) -> Floats:
        """Log sqrt(D), D > 0."""
        b, w = self.momentum, self.decay
        with np.errstate(divide="ignore", invalid="ignore"):
            log_b = np.where(b > 0.5, np.log1p(-w.hi), np.log(b))
            rest = np.where(self.nesterov & ~self.linear, np.log1p(-self.step.hi), 0.0)
        return (log_b + rest) / 2

    def log_radius(self) -> Floats:
        """Log of the spectral radius of T."""
        disc, trace, determinant, _ = self.pieces()
        b, w = self.momentum, self.decay
        s = np.where(self.linear, 0.0, self.step.hi)
        with np.errstate(divide="ignore", invalid="ignore"):
            half = np.sqrt(np.maximum(disc.hi, 0)) / 2
            size = np.abs(trace.hi) / 2 + half  # |l1|, the larger root: no cancellation
            smaller = np.where(size > 0, determinant.hi / size, 0.0)  # |l1| l2 sign(tr)
            # Near 1 the logarithm is that of 1 minus a small number: (1-l1)(1-l2) = s, (1+l1)(1+l2) = 1 + tr + D.
            gap = np.where(self.nesterov, w.hi + (1 + b) * s, w.hi + s) / 2 + half  # 1 - l2, trace > 0
            below = np.log1p(-s / gap)
            rest = 1 + (trace + determinant)
            above = np.log1p(-rest.hi / (1 - smaller))  # 1 + l2 = 1 - |l2|, trace < 0
            real = np.where(size > 0.5, np.where(trace.hi > 0, below, above), np.log(size))
            small = np.where(self.linear, -np.ldexp(self.step.hi / w.hi, self._clipped()), real)
            return np.where(disc.hi < 0, self._log_rho(), small)

    def _clipped(self) -> NDArray[np.int64]:
        return np.maximum(self.exponent, -3000)  # ldexp takes C ints

    def real_size(self, values: Floats) -> Floats:
        """A quantity proportional to the step, which was computed with the mantissas, in its true size."""
        return np.ldexp(values, self._clipped())
