"""From the curvature of a block to its effective progress and its restart period, and the same from a run's rounds.

The loss of a block that is displaced by y is `1/2 sum_j lambda_j y_j^2`. Nothing is known of the displacement itself,
so each direction counts alike and a mode weighs what its curvature makes of that: the share of its eigenvalue in the
trace. Directions without curvature weigh nothing; they cost no loss, and no restart moves them.

What is assumed, and seldom holds in a trained model: blocks do not act on one another, the curvature and AdamW's second
moments stand still, replicas see the same data, and the first moment of AdamW is that of the present gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twophase.rule import OuterRule
from twophase.runs.record import Block, RunRecord
from twophase.theory.inputs import Floats
from twophase.theory.modes import scheduled_progress
from twophase.theory.observed import Observed, observe
from twophase.theory.periods import best_period, log_final_loss, rounded_period

PLACES = ("early", "mid", "late")
"""The middle rounds of a run's thirds."""
_MOST_PERIODS = 1000


@dataclass(frozen=True)
class Setting:
    """What a run does with a block's curvature.

    Args:
        rule: the outer rule.
        rounds: of the whole run.
        inner_lrs: by place of `PLACES`, the learning rate of each inner step of the round there.
        weight_decay: decoupled weight decay of the inner optimizer.
    """

    rule: OuterRule
    rounds: int
    inner_lrs: Mapping[str, Sequence[float]]
    weight_decay: float


@dataclass(frozen=True, eq=False)
class Curvature:
    """The curvature of a block.

    Args:
        name: of the block.
        parameters: how many it has.
        raw: largest eigenvalues of its Gauss-Newton matrix, descending.
        top: the same of the preconditioned matrix, whose modes the inner steps shrink.
        nodes: density of the preconditioned matrix: eigenvalues, ascending.
        weights: the share of directions that each of them stands for.
    """

    name: str
    parameters: int
    raw: Floats
    top: Floats
    nodes: Floats
    weights: Floats

    @property
    def loss_weights(self) -> Floats:
        """The share of each node in the trace; zeros where there is no curvature at all."""
        shares = self.nodes * self.weights
        total = shares.sum()
        return shares / total if total > 0 else shares

    def quantile(self, share: float) -> float:
        """The smallest eigenvalue at or below which at least this share of the directions lies."""
        reached = np.cumsum(self.weights)
        return float(self.nodes[min(int(np.searchsorted(reached, share * reached[-1])), len(self.nodes) - 1)])


@dataclass(frozen=True)
class Progress:
    """What a round removes of a block.

    Args:
        mean: effective progress, mean over the modes by loss.
        largest: of the largest eigenvalue.
        step: largest inner learning rate of the round times that eigenvalue; above 1 the inner step passes the minimum,
            above 2 gradient descent would diverge there.
        passing: share of the loss in modes whose inner step passes the minimum; they count as removed.
        unstable: share of the loss in modes beyond 2, where the linear model has no answer.
    """

    mean: float
    largest: float
    step: float
    passing: float
    unstable: float


@dataclass(frozen=True)
class Period:
    """What the theory says about restarts of a block.

    Args:
        period: the best; None for no restart.
        log_gain: natural logarithm of the loss at the end with that period over that without restarts, <= 0.
    """

    period: int | None
    log_gain: float


@dataclass(frozen=True, eq=False)
class Forecast:
    """A block, its progress at each place of the run, and its periods by the progress in the middle of the run.

    Args:
        curvature: of the block.
        progress: by place.
        chosen: with all modes, the exact loss at the end (theory R20).
        at_mean: as if all modes were one at the mean progress, as the paper's closed form has it; None for no restart.
        sigma: progress of each node in the middle of the run.
    """

    curvature: Curvature
    progress: Mapping[str, Progress]
    chosen: Period
    at_mean: int | None
    sigma: Floats

    def spread(self, share: float) -> float:
        """The progress at or below which this share of the loss lies."""
        weights = self.curvature.loss_weights
        if not weights.any():
            return 0.0
        return float(self.sigma[min(int(np.searchsorted(np.cumsum(weights), share)), len(weights) - 1)])


def forecast(curvature: Curvature, setting: Setting) -> Forecast:
    """Progress and period of a block by its curvature."""
    progress = {place: _progress(curvature, lrs, setting.weight_decay) for place, lrs in setting.inner_lrs.items()}
    sigma = _sigma(curvature, setting.inner_lrs["mid"], setting.weight_decay)
    chosen = choose(setting, sigma, curvature.loss_weights)
    return Forecast(curvature, progress, chosen, first_cancellation(setting, progress["mid"].mean), sigma)


def _sigma(curvature: Curvature, lrs: Sequence[float], decay: float) -> Floats:
    """Progress of each node; one without curvature makes none, whatever the decay does."""
    found = scheduled_progress(curvature.nodes, np.asarray(lrs, dtype=np.float64), weight_decay=decay, clip=True)
    return np.where(curvature.nodes > 0, found, 0.0)


def _progress(curvature: Curvature, lrs: Sequence[float], decay: float) -> Progress:
    weights = curvature.loss_weights
    largest = float(curvature.top[0]) if len(curvature.top) else 0.0
    rates = np.asarray(lrs, dtype=np.float64)
    steps = rates.max() * (curvature.nodes + decay)
    return Progress(
        mean=float(weights @ _sigma(curvature, lrs, decay)),
        largest=float(scheduled_progress(largest, rates, weight_decay=decay, clip=True)),
        step=float(rates.max() * (largest + decay)),
        passing=float(weights[steps > 1].sum()),
        unstable=float(weights[steps > 2].sum()),
    )


def choose(setting: Setting, sigma: Floats, weights: Floats) -> Period:
    """The period with the lowest loss at the end of the run (theory R20), no restart among the candidates.

    Args:
        setting: rule and rounds.
        sigma: effective progress of the modes.
        weights: shares of the loss; all zero means that there is nothing to choose by.
    """
    if not np.any(weights * sigma > 0) or setting.rule.momentum == 0 or setting.rule.lr == 0 or setting.rounds < 2:
        return Period(None, 0.0)
    longest = min(setting.rounds, _MOST_PERIODS)
    best = best_period(setting.rule, sigma, weights=weights, max_period=longest, rounds=setting.rounds)
    if best >= setting.rounds:
        return Period(None, 0.0)
    with_it, without = log_final_loss(setting.rule, sigma, setting.rounds, [best, setting.rounds], weights)
    return Period(best, float(with_it - without) if math.isfinite(with_it) else -math.inf)


def first_cancellation(setting: Setting, sigma: float) -> int | None:
    """The first cancellation of one mode as a whole number of rounds; None where it does not oscillate in the run.

    Args:
        setting: rule and rounds.
        sigma: effective progress; above 1 it counts as 1.
    """
    if not sigma > 0 or setting.rule.momentum == 0 or setting.rule.lr == 0:
        return None
    period = int(rounded_period(setting.rule, min(sigma, 1.0)))
    return period if 1 <= period < setting.rounds else None


def loss_curve(setting: Setting, found: Forecast, periods: Sequence[int]) -> Floats:
    """Natural logarithm of the loss at the end with each of some periods over that without restarts."""
    weights = found.curvature.loss_weights
    logs = log_final_loss(setting.rule, found.sigma, setting.rounds, [*periods, setting.rounds], weights)
    return logs[:-1] - logs[-1]


# ------------------------------------------------------------------------------------------------- from a run's rounds


@dataclass(frozen=True)
class Seen:
    """What a run's rounds show of a block.

    Args:
        whole: over all rounds.
        thirds: over the run's thirds, by place.
        periods: the first cancellations of single modes at the low end of sigma, the estimate, and the high end, None
            for no restart; empty where nothing may be shown.
    """

    whole: Observed
    thirds: Mapping[str, Observed]
    periods: tuple[int | None, ...]

    @property
    def interval(self) -> tuple[float, float, float] | None:
        """Low, estimate and high of sigma (95 %) within (0, 1]; None where the record does not determine it."""
        return within(self.whole)


def within(observed: Observed) -> tuple[float, float, float] | None:
    """An estimate's interval with its middle, cut to what the model knows; None where it must not be shown."""
    shown = observed.shown_interval
    if shown is None:
        return None
    low, high = shown
    return low, min(max(observed.sigma, low), 1.0), min(high, 1.0)


def seen(record: RunRecord, setting: Setting) -> dict[str, Seen]:
    """What the rounds of a run show, by the names of its fragments (or the whole model's)."""
    return {block.name: _seen(record, block, setting) for block in record.blocks}


def _seen(record: RunRecord, block: Block, setting: Setting) -> Seen:
    edges = [round(len(block.index) * part / 3) for part in range(4)]
    whole = _observe(record, block, setting.rule, slice(None))
    parts = zip(PLACES, edges, edges[1:], strict=False)
    thirds = {place: _observe(record, block, setting.rule, slice(low, high)) for place, low, high in parts}
    shown = within(whole)
    periods = () if shown is None else tuple(first_cancellation(setting, value) for value in shown)
    return Seen(whole, thirds, periods)


def _observe(record: RunRecord, block: Block, rule: OuterRule, part: slice) -> Observed:
    rates = record.inner_lr(block.index)
    number = block.number[part]
    return observe(
        rule,
        block.pseudo_gradient_norm[part],
        block.buffer_norm[part],
        block.cosine[part],
        block.restarted[part],
        inner_lr=None if rates is None else rates[part],
        follows=np.concatenate([[True], np.diff(number) == 1])[: len(number)],
        gain=block.gain[part],
    )


def plain(value: Any) -> Any:
    """A value as JSON has it; numbers that are not finite are null."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
