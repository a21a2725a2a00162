"""Gather a block's evidence from a stretch of rounds: cosines, gains, growth, effective progress.

Everything is measured with its own uncertainty, so that `verdict` can separate evidence from chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twophase.rule import OuterRule
from twophase.runs.record import Block, Column, RunRecord
from twophase.theory.observed import Observed, observe

Range = tuple[float, float, float]
"""Low end, estimate and high end of sigma."""
SELDOM = 0.15
"""Share of rounds against the buffer below which they count as exceptions."""
_LEAST_COSINES = 6
_LEAST_FOR_SWING = 12
_SWING_CHANCE = 0.01
_QUIET = 0.1
"""Upper end of the noise's share of |g|^2 below which signs are taken as they are."""
_LEAST_FOR_RISE = 8
_RISE_ERRORS = 4.0
"""Standard errors by which a norm must rise over a stretch; half of that over its second half, of fewer rounds."""
_GROWN = 3.0
"""Factor by which a norm must have risen. A diverging norm grows without end. A smaller rise may come from a drifting
scale of the loss or the inner optimizer, or from lasting noise."""
_MOST_CORRELATED = 0.95


@dataclass(frozen=True, slots=True)
class Evidence:
    """Hold what one stretch of a block's rounds shows; nan where nothing can be said."""

    name: str  # of the stretch
    first: int  # round numbers
    last: int
    rounds: int
    restarts: int  # rounds in which the momentum restarted
    every: float  # rounds from one restart to the next, in the mean; nan without a restart
    oldest: int  # rounds that the oldest measured buffer had gathered since the last restart
    rates_known: bool  # True if the inner learning rate of the rounds is known
    cosines: int  # rounds with an informative cosine: with a buffer that had not just been dropped
    cosine: float  # mean cosine between pseudo-gradient and buffer
    cosine_error: float  # its standard error, correlation between rounds included
    against: float  # share of those rounds in which it is negative
    swing: float  # rounds in which the cosine swings to and fro, if significant
    turns: bool | None  # True if the pseudo-gradient turns against the buffer; None where chance would do the same
    gain: float  # median of <update, g> / <g, g>
    growth: float  # change of log |g| a round, the inner learning rate's divided out where it is known
    growth_error: float  # its standard error
    risen: float  # log of the factor by which |g| has risen, if that shows a divergence (`grown`), else 0
    risen_rounds: int  # the last rounds of the stretch, in which it has risen
    lost: int  # rounds at the end of the stretch since when, to the run's end, no norm and no cosine is finite
    observed: Observed  # effective progress along the buffer


def stretches(record: RunRecord, block: Block, rule: OuterRule) -> tuple[Evidence, list[Evidence]]:
    """Return the evidence of the latest rounds, which the verdict is about, and of the run's thirds.

    The latest rounds are the last third, but at least 30 rounds if there are so many.
    """
    count = len(block.index)
    lr = record.inner_lr(block.index)
    edges = [round(count * part / 3) for part in range(4)]
    parts = zip(("first third", "middle third", "last third"), edges, edges[1:], strict=False)
    thirds = [_evidence(name, block, rule, lr, slice(low, high)) for name, low, high in parts if high - low >= 3]
    latest = slice(max(0, count - max(30, math.ceil(count / 3))), count)
    return _evidence("latest rounds", block, rule, lr, latest), thirds


def within(observed: Observed) -> Range | None:
    """Return an estimate's interval with its middle, cut to (0, 1]; None where it must not be shown."""
    if observed.shown_interval is None:
        return None
    low, high = observed.shown_interval
    return low, min(max(observed.sigma, low), 1.0), min(high, 1.0)


def _evidence(name: str, block: Block, rule: OuterRule, lr: Column | None, part: slice) -> Evidence:
    g, m, cosine = block.pseudo_gradient_norm[part], block.buffer_norm[part], block.cosine[part]
    restarted, number, gain = block.restarted[part], block.number[part], block.gain[part]
    rates = None if lr is None else lr[part]
    informative = (m > 0) & np.isfinite(cosine) & ~np.concatenate([[True], restarted[:-1]])
    cosines = cosine[informative]
    mean, error = _mean(cosines)
    swing = _swing(cosines) if not restarted[:-1].any() else math.nan
    growth, growth_error = _trend(_height(g, rates), independent=True)
    risen, risen_rounds = grown(g, rates)
    observed = observed_in(block, rule, lr, part)
    # Where the inner learning rate is unknown, its change may hide the noise.
    quiet = rates is not None and observed.noise_share + 2 * observed.noise_error < _QUIET
    gains = gain[np.isfinite(gain)]
    # Whole cycles: what a stretch holds of its first and last one would make them look shorter or longer.
    cycles = np.diff(np.flatnonzero([True, *block.restarted[: part.stop]]))[-max(int(restarted.sum()), 1) :]
    first, last = (int(end) if math.isfinite(end) else 0 for end in number[[0, -1]]) if len(number) else (0, 0)
    with np.errstate(over="ignore"):
        median_gain = float(np.median(gains)) if len(gains) else math.nan
    return Evidence(
        name=name,
        first=first,
        last=last,
        rounds=len(g),
        restarts=int(restarted.sum()),
        every=float(cycles.mean()) if restarted.any() else math.nan,
        oldest=int(_ages(restarted)[informative].max(initial=0)),
        rates_known=rates is not None,
        cosines=len(cosines),
        cosine=mean,
        cosine_error=error,
        against=float(np.mean(cosines < 0)) if len(cosines) else math.nan,
        swing=swing,
        turns=_turns(cosine, informative, restarted, swing, quiet=quiet),
        gain=median_gain,
        growth=growth,
        growth_error=growth_error,
        risen=risen,
        risen_rounds=risen_rounds,
        lost=max(part.stop - max(part.start, _first_lost(block)), 0),
        observed=observed,
    )


def observed_in(block: Block, rule: OuterRule, lr: Column | None, part: slice = slice(None)) -> Observed:
    """Return the effective progress along a block's buffer in some of its rounds; `lr` is of all its rounds."""
    number = block.number[part]
    return observe(
        rule,
        block.pseudo_gradient_norm[part],
        block.buffer_norm[part],
        block.cosine[part],
        block.restarted[part],
        inner_lr=None if lr is None else lr[part],
        follows=np.concatenate([[True], np.diff(number) == 1])[: len(number)],
        gain=block.gain[part],
    )


def outside(record: RunRecord) -> tuple[str, ...]:
    """Say, in sentences, which properties of a run's syncs `observe` takes for progress."""
    if record.number("sync.mixing") > 0:
        return ("Replicas kept a share of their own parameters (--sync.mixing), which the estimate ignores.",)
    return ()


def _turns(
    cosine: Column, informative: NDArray[np.bool_], restarted: NDArray[np.bool_], swing: float, *, quiet: bool
) -> bool | None:
    """Return True if the pseudo-gradient turns against the buffer, False if never, None if chance would do the same.

    Where there is hardly any noise (`quiet`), nothing is chance.
    """
    cosines = cosine[informative]
    if len(cosines) < _LEAST_COSINES:
        return None
    mean, error = _mean(cosines)
    against = float(np.mean(cosines < 0))
    if mean - 2 * error > 0 and against < SELDOM and not mean < 1e-3:
        return False
    if mean + 2 * error < 0 or ((quiet or not math.isnan(swing)) and against >= SELDOM):
        return True
    # Between restarts the buffer grows old, and turns at a certain age if at all.
    ages = _ages(restarted)
    for age in np.unique(ages[informative]) if restarted.any() else ():
        of_age = cosine[informative & (ages == age)]
        low, spread = _mean(of_age)
        if len(of_age) >= 4 and low + 2.5 * spread < 0:  # several ages are tried, so a little more is asked for
            return True
    return None


def _ages(restarted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return rounds since the last restart, of each round, from 0 right after it."""
    rounds = np.arange(len(restarted))
    last = np.maximum.accumulate(np.where(restarted, rounds, -1))
    return rounds - np.concatenate([[-1], last[:-1]]) - 1


def _mean(values: Column) -> tuple[float, float]:
    """Return the mean and its standard error for correlated values (Newey and West)."""
    count = len(values)
    if count < 2:
        return (float(values[0]) if count else math.nan), math.nan
    deviations = values - values.mean()
    total = independent = float(deviations @ deviations)
    lags = min(count - 1, int(count ** (1 / 3)) + 1)
    for lag in range(1, lags + 1):
        total += 2 * (1 - lag / (lags + 1)) * float(deviations[lag:] @ deviations[:-lag])
    # The correlation of an oscillation may reduce the error below what a few rounds can support: not below
    # independence.
    return float(values.mean()), math.sqrt(max(total, independent) / count / (count - 1))


def _swing(values: Column) -> float:
    """Return the period in rounds of the strongest oscillation that is significant against white noise (Fisher)."""
    count = len(values)
    deviations = values - values.mean() if count else values
    if count < _LEAST_FOR_SWING or float(np.abs(deviations).max()) < 1e-3:
        return math.nan
    power = np.abs(np.fft.rfft(deviations))[1:] ** 2
    share = float(power.max() / power.sum())
    chance = len(power) * (1 - share) ** (len(power) - 1)
    cycles = int(power.argmax()) + 1
    # One swing over the whole stretch is a trend.
    return count / cycles if chance < _SWING_CHANCE and cycles >= 2 else math.nan


def _height(g: Column, rates: Column | None) -> Column:
    """Return log |g|, the inner learning rate's divided out where it is known."""
    with np.errstate(all="ignore"):
        return np.log(g) - (0.0 if rates is None else np.log(rates))


def _trend(height: Column, *, independent: bool = False) -> tuple[float, float]:
    """Return the slope over the rounds by least squares, and its standard error.

    Unless the rounds are `independent`, residuals count as an autoregression of order 1. Then n rounds are worth n (1 -
    r) / (1 + r) independent ones. The fit's bias of r, about (2 + 4 r) / n, is corrected.
    """
    rounds = np.flatnonzero(np.isfinite(height))
    count = len(rounds)
    if count < 4:
        return math.nan, math.nan
    x, y = rounds - rounds.mean(), height[rounds]
    spread = float(x @ x)
    slope = float(x @ (y - y.mean())) / spread
    residuals = y - y.mean() - slope * x
    energy = float(residuals @ residuals)
    error = math.sqrt(energy / (count - 2) / spread)
    if independent or not energy > 0:
        return slope, error
    r = float(residuals[1:] @ residuals[:-1]) / energy
    r = min(max(r + (2 + 4 * r) / count, 0.0), _MOST_CORRELATED)
    return slope, error * math.sqrt((1 + r) / (1 - r))


def grown(g: Column, rates: Column | None) -> tuple[float, int]:
    """Return the log of the rise of |g|, and the last rounds in which it rose; 0 where that is no divergence.

    Require a rise beyond chance, by a real factor, over the whole stretch. Both |g| and |g| over the inner rate must
    rise (`rates`; None if unknown): the rate may warm up, or decay to 0. Test all rounds, and their second half for a
    late beginning.
    """
    has_rates = rates is not None and np.isfinite(rates).sum() >= _LEAST_FOR_RISE
    heights = [_height(g, None), *([_height(g, rates)] if has_rates else [])]
    for start in (0, len(g) // 2):
        rises = [_rise(height[start:]) for height in heights]
        if min(rises) > math.log(_GROWN):
            return rises[0], len(g) - start
    return 0.0, 0


def _rise(height: Column) -> float:
    """Return by how much some heights rise, by more than chance and in their second half as well; else 0."""
    count = len(height)
    slope, error = _trend(height)
    late_slope, late_error = _trend(height[count // 2 :])
    rises = slope > _RISE_ERRORS * error and late_slope > _RISE_ERRORS / 2 * late_error
    return slope * (count - 1) if count >= _LEAST_FOR_RISE and rises else 0.0


def _first_lost(block: Block) -> int:
    """Return the first of the block's last rounds in which nothing finite was measured; else their count.

    A single round, or a run that has no number at all, counts as damaged, not diverged.
    """
    count = len(block.index)
    measured = np.isfinite(block.pseudo_gradient_norm) | np.isfinite(block.buffer_norm) | np.isfinite(block.cosine)
    rounds = np.flatnonzero(measured)
    return int(rounds[-1]) + 1 if len(rounds) and rounds[-1] < count - 2 else count
