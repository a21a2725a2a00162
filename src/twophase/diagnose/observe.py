"""Estimate effective progress from what every run records: norms of pseudo-gradient and buffer, and their angle.

Let `m_t` be the buffer after round t and `dx_t` its step. Both are linear in g_t and m_{t-1}, and so known from the
three recorded numbers. The mode model `g = sigma x + noise` gives a line over the rounds,

    y_t = <g_t, m_t> - <g_{t+1}, m_t> = sigma d_t + w N + (mean zero),      d_t = -<dx_t, m_t>,

where w is the weight of g in the buffer and N the expected squared norm of the noise: sigma is the slope, N the
intercept. d_t holds the round's noise too, which would bias a regression; the instrument is therefore
`b^2 |m_{t-1}|^2`, which precedes that noise.

Limits: sigma is a mean over the modes, weighted by their share of `|m|^2`; N must be constant (up to the inner learning
rate's square), and the noise white between rounds. Source: theory note R29, there with vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twophase.rule import OuterRule
from twophase.runs.record import Column

LEAST = 6
"""Least number of pairs of rounds for an estimate."""
LEAST_CYCLES = 10
"""Least number of restart cycles, or of pairs of rounds without restarts, for showing an interval."""
MOST_NOISE = 0.8
"""Share of |g|^2 that may be noise (two standard errors above the estimate) where an interval is shown."""
WIDEST = 2.0
"""Largest ratio of an interval's ends where it is shown: of wider ones that chance lets pass, most miss the truth."""
RECORD = ("pseudo_gradient_norm", "buffer_norm", "cosine", "restarted")
"""Columns of a block that `observe` takes, in their order."""
_STEADY = 0.8, 1.25  # ratio of successive inner rates within which two pseudo-gradients may be compared
_SAME = 0.02  # relative difference up to which the recorded buffer is the one that the rule makes


@dataclass(frozen=True, slots=True)
class Observed:
    """Effective progress along the buffer, estimated from a run's record; nan where there is no estimate.

    Args:
        pairs: pairs of successive rounds that it rests on.
        cycles: restart cycles that these lie in; the pairs themselves where no restart lies between them.
        sigma: the estimate, corrected for noise, not clipped.
        standard_error: its standard error, clustered by restart cycle.
        noise_share: estimated share of `|g|^2` that is noise, 0 to 1.
        noise_error: its standard error.
    """

    pairs: int = 0
    cycles: int = 0
    sigma: float = np.nan
    standard_error: float = np.nan
    noise_share: float = np.nan
    noise_error: float = np.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of sigma by Student's t, `cycles - 1` degrees of freedom, unclipped; or nan, nan."""
        from scipy.special import stdtrit  # noqa: PLC0415 - a third of a second, for which --help must not wait

        half = float(stdtrit(self.cycles - 1, 0.975)) * self.standard_error if self.cycles > 1 else np.nan
        return self.sigma - half, self.sigma + half

    @property
    def shown_interval(self) -> tuple[float, float] | None:
        """`interval` where the data are enough to show it, else None; the same bar for every command."""
        low, high = self.interval
        is_quiet = self.noise_share + 2 * self.noise_error < MOST_NOISE
        is_shown = self.cycles >= LEAST_CYCLES and is_quiet and 0 < low <= 1 and high <= WIDEST * low
        return (low, high) if is_shown else None


def observe(
    rule: OuterRule,
    pseudo_gradient_norm: ArrayLike,
    buffer_norm: ArrayLike,
    cosine: ArrayLike,
    restarted: ArrayLike,
    *,
    inner_lr: ArrayLike | None = None,
) -> Observed:
    """Return the effective progress along the buffer, from a block's record of its rounds; all arrays are (rounds,).

    Args:
        rule: the outer rule that made the record.
        pseudo_gradient_norm: |g_t|.
        buffer_norm: |m_{t-1}|, before g_t was mixed in.
        cosine: cosine of the angle between the two.
        restarted: True where the momentum restarted in the round.
        inner_lr: inner learning rate of each round, to which progress and noise are taken to be proportional; None
            means constant.

    Returns:
        Observed. Numbers that are not finite, and rounds whose buffer the rule would not have made, are left out.

    >>> from twophase.theory import rollout
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
        return Observed()
    b, w = rule.momentum, rule.injection
    with np.errstate(all="ignore"):
        # Units of the largest number, so that squares neither overflow nor vanish.
        unit = max(np.max(np.abs(values), where=np.isfinite(values), initial=0.0) for values in (g, m)) or 1.0
        g, m = g / unit, m / unit
        along = b * g * m * cos + w * g * g  # <g_t, m_t>
        square = b * b * m * m + 2 * b * w * g * m * cos + w * w * g * g  # |m_t|^2
        ratio = lr[1:] / lr[:-1]
        d = rule.lr * (w * along + b * square if rule.nesterov else square)[:-1]
        y = ratio * along[:-1] - (g * m * cos)[1:]  # less <g_{t+1}, m_t>
        usable = ~dropped[:-1] & np.isfinite(y) & np.isfinite(d) & (m[1:] > 0) & (g[:-1] > 0)
        usable &= (ratio >= _STEADY[0]) & (ratio <= _STEADY[1])
        usable &= np.abs(m[1:] ** 2 / square[:-1] - 1) <= _SAME
        # Weights from before the round, or they would depend on its noise.
        before = np.maximum(np.arange(len(g) - 1) - 1, 0)
        weight = 1 / (w * w * g[before] ** 2 + b * b * m[:-1] ** 2)
        rounds = np.flatnonzero(usable & np.isfinite(weight))
        if len(rounds) < LEAST:
            return Observed(len(rounds))
        level = lr[rounds] / np.mean(lr[rounds])
        grows = level * ratio[rounds]  # the progress of the next round, which y holds, over that at the mean rate
        noise = w * ratio[rounds] * level**2  # what a unit of N adds to y
        scale = weight[rounds, None]
        regressors = np.stack([d[rounds] * grows, noise], axis=1) * scale
        instruments = np.stack([(b * m[rounds]) ** 2 * grows, noise], axis=1) * scale
        cycle = np.cumsum(np.append(False, dropped[:-1]))[rounds]
        if cycle[0] == cycle[-1]:
            cycle = rounds
        energy = np.mean(g[rounds] ** 2 * weight[rounds]) * w / np.mean(noise * weight[rounds])
        fit, error = _two_stage(y[rounds] * weight[rounds], regressors, instruments, cycle)
        share, share_error = fit[1] / energy, error[1] / energy
    cycles = len(np.unique(cycle))
    return Observed(len(rounds), cycles, fit[0], error[0], float(np.clip(share, 0, 1)), float(share_error))


def _two_stage(
    y: Column, regressors: Column, instruments: Column, cluster: NDArray[Any]
) -> tuple[list[float], list[float]]:
    """Return slope and intercept by instrumental variables, and their standard errors, clustered."""
    try:
        inverse = np.linalg.inv(instruments.T @ regressors)
    except np.linalg.LinAlgError:
        return [np.nan] * 2, [np.nan] * 2
    fit = inverse @ (instruments.T @ y)
    scores = instruments * (y - regressors @ fit)[:, None]
    starts = np.unique(cluster, return_index=True)[1]
    totals = np.add.reduceat(scores, starts, axis=0)
    variance = np.diag(inverse @ (totals.T @ totals) @ inverse.T) * len(starts) / (len(starts) - 1)
    return fit.tolist(), np.sqrt(variance).tolist()
