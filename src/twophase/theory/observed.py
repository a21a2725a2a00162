"""Estimate effective progress from what every run records: norms of pseudo-gradient and buffer, and their angle.

A finished run has recorded three numbers a round. They are enough along one direction, that of the buffer. Let `m_t` be
the buffer after round t and `dx_t` its step: both are linear in g_t and m_{t-1}. The mode model `g = sigma x + noise`
gives

    y_t = <g_t, m_t> - <g_{t+1}, m_t> = sigma d_t + w N + (mean zero),      d_t = -<dx_t, m_t>,

where w is the weight of g in the buffer and N the expected squared norm of the noise. The buffer holds the noise of its
round. Both sides follow from the record: `<g_t, m_t> = b <g_t, m_{t-1}> + w |g_t|^2`, `|m_t|` alike. The next round
measures `<g_{t+1}, m_t>`, unless the buffer was dropped in between.

Of this line over the rounds, sigma is the slope and N the intercept. d_t holds the round's noise too, which would bias
a regression. The instrument is therefore `b^2 |m_{t-1}|^2`, which precedes that noise. Where the buffer keeps its
length, slope and intercept cannot be separated, and the standard error says so.

Limits. Sigma is the mean over the modes, weighted by their share of `|m|^2`. N must be constant (up to the inner
learning rate's square, if that is given), and the noise white between rounds. What a restart cycle begins with stays in
all of its rounds, so the standard error is clustered by cycle. With frequent restarts and noisy data, most estimates
that look significant are large by chance; so `shown_interval` asks for more.

Source: theory note R29, there with vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.restart import update_weights
from twophase.rule import OuterRule
from twophase.theory.inputs import Floats

LEAST = 6
"""Least number of pairs of rounds for an estimate."""
LEAST_CYCLES = 10
"""Least number of restart cycles, or of pairs of rounds without restarts, for showing an interval."""
MOST_NOISE = 0.8
"""Upper end of the noise's share of |g|^2 (two standard errors) from which on no interval is shown."""
WIDEST = 2.0
"""Ratio of an interval's ends beyond which none is shown: of wider ones that chance lets pass, most miss the truth."""
_EXACT = 1e-6
"""Relative standard error up to which the rounds count as free of noise; each pair then gives sigma by itself."""
_STEADY = (0.8, 1.25)
"""Ratio of successive inner learning rates within which the pseudo-gradient may be compared with the next one."""
_SAME = 0.02
"""Relative difference up to which the recorded buffer is the one that the rule makes."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Hold the effective progress along the buffer, estimated from a run's record.

    Args:
        pairs: pairs of successive rounds that it rests on.
        sigma: the estimate, corrected for noise, not clipped; nan without one.
        standard_error: its standard error (clustered by restart cycle where the momentum restarts, heteroscedastic,
            small-sample corrected); nan without an estimate.
        ceiling: the estimate that takes all noise for progress: too large by `w N / mean d` in expectation.
        noise_share: estimated share of `|g|^2` that is noise, 0 to 1; nan without an estimate.
        noise_error: its standard error.
        foreign: pairs left out because the recorded buffer, or the gain, is not what the rule makes.
        cycles: restart cycles that the pairs lie in; the pairs themselves where all lie in the same cycle.
    """

    pairs: int
    sigma: float
    standard_error: float
    ceiling: float
    noise_share: float
    noise_error: float
    foreign: int
    cycles: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of sigma by Student's t, `cycles - 1` degrees of freedom, unclipped; or nan, nan."""
        from scipy.special import stdtrit  # noqa: PLC0415 - a third of a second, for which --help must not wait

        if self.cycles < 2:
            return np.nan, np.nan
        half = float(stdtrit(self.cycles - 1, 0.975)) * self.standard_error
        return self.sigma - half, self.sigma + half

    @property
    def why_not(self) -> str:
        """Return why the interval must not be shown, as the end of a sentence; an empty text where it may be."""
        low, high = self.interval
        most = self.noise_share + 2 * self.noise_error
        if not (np.isfinite(low) and np.isfinite(high)):
            end = f"; {LEAST} are needed at least" if self.pairs < LEAST else ", but do not determine it"
            return f"{self.pairs} pairs of rounds without a restart between them are usable{end}"
        if self.standard_error <= _EXACT * self.sigma and low <= 1:
            return ""
        if self.cycles < LEAST_CYCLES:
            return f"{self.cycles} restart cycles or pairs of rounds are usable, and at least {LEAST_CYCLES} are needed"
        if low <= 0:
            return f"it lies between {low:.2g} and {high:.2g} (95 %), which may be nothing"
        if low > 1:
            return f"the record asks for more than 1 ({low:.2g} to {high:.2g}), which is outside the model"
        if high / low > WIDEST:
            return f"it lies anywhere between {low:.2g} and {high:.2g} (95 %)"
        if most < MOST_NOISE:
            return ""
        share = 100 * min(most, 1.0) if np.isfinite(most) else 100
        return f"up to {share:.0f} % of the pseudo-gradient's square may be noise, which looks like progress"

    @property
    def shown_interval(self) -> tuple[float, float] | None:
        """Return `interval` where it may be shown, not clipped; else None: the same bar for every command."""
        return None if self.why_not else self.interval


def shrunk(norms: ArrayLike) -> float:
    """Return the decline of |g|: 1 less its mean over the last quarter of the rounds by its largest value.

    Args:
        norms: norms of the pseudo-gradients, (rounds,), finite, at least one; all 0 count as not shrunk.
    """
    values = np.asarray(norms, dtype=float)
    largest = values.max()
    return float(1 - values[-max(len(values) // 4, 1) :].mean() / largest) if largest > 0 else 0.0


class _Pairs(NamedTuple):
    """Hold one entry for each usable pair of rounds."""

    y: Floats
    d: Floats
    past: Floats  # the instrument: b^2 |m_{t-1}|^2
    noise: Floats  # what a unit of noise energy adds to y
    square: Floats  # |g_t|^2
    weight: Floats
    cycle: NDArray[np.int64]  # number of the restart cycle


def observe(
    rule: OuterRule,
    pseudo_gradient_norm: ArrayLike,
    buffer_norm: ArrayLike,
    cosine: ArrayLike,
    restarted: ArrayLike,
    *,
    inner_lr: ArrayLike | None = None,
    follows: ArrayLike | None = None,
    gain: ArrayLike | None = None,
) -> Observed:
    """Return the effective progress along the buffer, from a block's record of its rounds.

    Args:
        rule: the outer rule that made the record.
        pseudo_gradient_norm: |g_t|, shape (rounds,).
        buffer_norm: |m_{t-1}|, before g_t was mixed in, the same shape.
        cosine: cosine of the angle between the two, the same shape.
        restarted: True where the momentum restarted in the round, the same shape.
        inner_lr: inner learning rate of each round, the same shape; None means constant. Progress and noise are taken
            to be proportional to it.
        follows: True where a round is the next one after the entry before it, the same shape; None means all are.
        gain: `<update, g> / <g, g>` of each round, the same shape. A round with another gain than the rule's, from a
            step of a restart policy, is left out as foreign. None, and nan, mean the rule's.

    Returns:
        Observed; without an estimate where fewer than `LEAST` pairs are usable or they do not determine one. Numbers
        that are not finite are left out.

    >>> from twophase.theory.rollout import rollout
    >>> rule = OuterRule(0.7, 0.9)
    >>> run = rollout(rule, [0.3], 20)
    >>> g, m = run.pseudo_gradient[:, 0], run.buffer[:-1, 0]
    >>> round(observe(rule, abs(g), abs(m), np.sign(g * m), run.restarts).sigma, 6)
    0.3
    """
    g, m, cos = (np.asarray(values, dtype=np.float64) for values in (pseudo_gradient_norm, buffer_norm, cosine))
    dropped = np.asarray(restarted, dtype=bool)
    lr = np.ones(len(g)) if inner_lr is None else np.asarray(inner_lr, dtype=np.float64)
    if len(g) < 2 or rule.momentum == 0 or rule.lr == 0:
        return Observed(0, *[np.nan] * 5, foreign=0)
    usable = ~dropped[:-1] if follows is None else ~dropped[:-1] & np.asarray(follows, dtype=bool)[1:]
    cycle = np.concatenate([[0], np.cumsum(dropped[:-1])])
    with np.errstate(all="ignore"):
        takes_step = np.ones(len(g), dtype=bool) if gain is None else _takes_own_step(rule, g, m, cos, gain)
        pairs, foreign = _pairs(rule, g, m, cos, lr, usable=usable, cycle=cycle, takes_step=takes_step[:-1])
        count = len(pairs.y)
        ceiling = float(np.sum(pairs.y * pairs.weight) / np.sum(pairs.d * pairs.weight)) if count else np.nan
        if count < LEAST:
            return Observed(count, np.nan, np.nan, ceiling, np.nan, np.nan, foreign)
        sigma, error, noise, noise_error = _instrumented(pairs)
        energy = float(np.mean(pairs.square * pairs.weight))
        scale = float(np.mean(pairs.noise * pairs.weight)) / (rule.injection * energy) if energy > 0 else np.nan
    cycles = len(np.unique(pairs.cycle))
    cycles = count if cycles == 1 else cycles  # also of a run that restarts in its very last rounds
    share = float(np.clip(noise * scale, 0, 1))
    return Observed(count, sigma, error, ceiling, share, noise_error * scale, foreign, cycles)


def _takes_own_step(rule: OuterRule, g: Floats, m: Floats, cosine: Floats, gain: ArrayLike) -> NDArray[np.bool_]:
    """Return True for rounds whose gain is that of the rule's update."""
    along_g, along_m = update_weights(rule.lr, rule.momentum, rule.injection, rule.nesterov)
    along_buffer = np.where(m > 0, along_m * cosine * m / g, 0.0)
    scale = along_g + np.abs(along_buffer)  # the two may cancel
    return ~(np.abs(np.asarray(gain, dtype=np.float64) - (along_g + along_buffer)) > _SAME * scale)


def _pairs(
    rule: OuterRule,
    g: Floats,
    m: Floats,
    cosine: Floats,
    lr: Floats,
    *,
    usable: NDArray[np.bool_],
    cycle: NDArray[np.int64],
    takes_step: NDArray[np.bool_],
) -> tuple[_Pairs, int]:
    """Return the pairs of rounds t, t + 1 from which sigma can be read, and how many are foreign to the rule."""
    b, w = rule.momentum, rule.injection
    # Units of the largest number, so that squares neither overflow nor vanish.
    unit = max(float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0)) for values in (g, m)) or 1.0
    g, m = g / unit, m / unit
    along = b * g * m * cosine + w * g * g  # <g_t, m_t>
    square = b * b * m * m + 2 * b * w * g * m * cosine + w * w * g * g  # |m_t|^2
    ratio = lr[1:] / lr[:-1]
    d = rule.lr * (w * along + b * square if rule.nesterov else square)[:-1]
    y = ratio * along[:-1] - g[1:] * m[1:] * cosine[1:]  # less <g_{t+1}, m_t>
    usable = usable & np.isfinite(y) & np.isfinite(d) & (m[1:] > 0) & (g[:-1] > 0)
    usable &= (ratio >= _STEADY[0]) & (ratio <= _STEADY[1])
    same = takes_step & (np.abs(m[1:] ** 2 / square[:-1] - 1) <= _SAME)
    rounds = np.flatnonzero(usable & same)
    # Weights from before the round, or they would depend on its noise.
    weight = 1 / (w * w * g[np.maximum(rounds - 1, 0)] ** 2 + b * b * m[rounds] ** 2)
    rounds, weight = rounds[np.isfinite(weight)], weight[np.isfinite(weight)]
    level = lr[rounds] / np.mean(lr[rounds]) if len(rounds) else lr[rounds]
    grows = level * ratio[rounds]  # the progress of the next round, which y holds, over that at the mean rate
    past, noise = b * b * m[rounds] ** 2 * grows, w * ratio[rounds] * level**2
    pairs = _Pairs(y[rounds], d[rounds] * grows, past, noise, g[rounds] ** 2, weight, cycle[rounds])
    return pairs, int(np.sum(usable & ~same))


def _instrumented(pairs: _Pairs) -> tuple[float, float, float, float]:
    """Return the slope and intercept by instrumental variables, each with its standard error; N >= 0."""
    count = len(pairs.y)
    regressors = np.stack([pairs.d, pairs.noise], axis=1) * pairs.weight[:, None]
    instruments = np.stack([pairs.past, pairs.noise], axis=1) * pairs.weight[:, None]
    y = pairs.y * pairs.weight
    cross = instruments.T @ regressors
    try:
        inverse = np.linalg.inv(cross)
    except np.linalg.LinAlgError:
        return np.nan, np.nan, np.nan, np.nan
    fit = inverse @ (instruments.T @ y)
    scores = instruments * (y - regressors @ fit)[:, None]

    def variance(spread: Floats) -> Floats:
        return np.diag(inverse @ spread @ inverse.T)

    # Pairs in a row share a pseudo-gradient, so their errors are correlated: one lag is counted (Newey and West).
    spread, lagged = scores.T @ scores, scores[1:].T @ scores[:-1]
    largest = np.maximum(variance(spread + 0.5 * (lagged + lagged.T)), variance(spread)) * count / (count - 2)
    ends = np.unique(pairs.cycle, return_index=True)[1]
    if (cycles := len(ends)) > 1:
        totals = np.add.reduceat(scores, ends, axis=0)
        clustered = variance(totals.T @ totals) * cycles / (cycles - 1) * (count - 1) / (count - 2)
        largest = np.maximum(largest, clustered)
    error = np.sqrt(largest)
    if not np.all(np.isfinite(fit)) or not np.all(np.isfinite(error)):
        return np.nan, np.nan, np.nan, np.nan
    return float(fit[0]), float(error[0]), float(fit[1]), float(error[1])
