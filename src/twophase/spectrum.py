"""Curvature of a trained model by block, what a round's inner steps remove of it, and the periods that follow.

The curvature is the Gauss-Newton matrix G of a task's cross-entropy, else the Hessian (`twophase.training.curvature`).
Restricted to a block, all other parameters stand still.

An inner optimizer that divides the gradient by D (AdamW: `D = sqrt(v) + eps`) takes the step `-lr D^-1 gradient`. In
the coordinates `y = D^1/2 x` that is gradient descent on a loss of curvature `D^-1/2 G D^-1/2`, the preconditioned
matrix. Its modes shrink independently. The loss of a displacement y is `1/2 sum_j lambda_j y_j^2`. The displacement is
unknown, so each direction counts alike, and a mode weighs its eigenvalue's share of the trace. SGD has D = 1, and its
momentum makes each step 1 / (1 - momentum) times as long.

Assumptions, seldom true of a trained model: blocks do not interact, and curvature and second moments are constant.
Replicas see the same data, and AdamW's first moment is the present gradient. A direction of negative curvature has no
minimum: it counts as flat.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from twophase.advice.evidence import Range, observed_in, within
from twophase.base.config import UsageError
from twophase.diloco.fragment import partition
from twophase.rule import OuterRule
from twophase.runs.record import RunRecord
from twophase.tasks.restored import Restored
from twophase.theory.eigenvalues import density, largest_eigenpairs
from twophase.theory.inputs import Floats
from twophase.theory.modes import scheduled_progress
from twophase.theory.observed import Observed
from twophase.theory.periods import best_period, log_final_loss, rounded_period
from twophase.training.config import RunConfig, inner_lr
from twophase.training.curvature import Matrix

PLACES = ("early", "mid", "late")
"""The middle rounds of a run's thirds."""
STEPS, PROBES = 32, 2  # Lanczos steps and random vectors of a density
_APART = 10  # the largest eigenvalues that a density counts by themselves, or more where more are asked for
_LONGEST_PERIOD = 1000


# --------------------------------------------------------------------------------------------------- blocks of a run


@dataclass(frozen=True)
class Setting:
    """What a run does with a block's curvature.

    Args:
        rule: the outer rule.
        rounds: of the whole run.
        inner_lrs: by place of `PLACES`, the learning rate of each inner step of the round there, over 1 - momentum.
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
        parameters: number of its parameters.
        raw: largest eigenvalues of its Gauss-Newton matrix or Hessian, descending, negative ones as 0.
        top: the same of the preconditioned matrix.
        nodes: density of the preconditioned matrix: eigenvalues, ascending, negative ones as 0.
        weights: the share of directions that each of them stands for.
        negative: the negative eigenvalues' share of the sum of all absolute ones, of the preconditioned matrix.
    """

    name: str
    parameters: int
    raw: Floats
    top: Floats
    nodes: Floats
    weights: Floats
    negative: float = 0.0

    @property
    def loss_weights(self) -> Floats:
        """The share of each node in the trace; zeros where there is no curvature at all."""
        shares = self.nodes * self.weights
        total = shares.sum()
        return shares / total if total > 0 else shares

    def quantile(self, share: float) -> float:
        """Return the smallest eigenvalue at or below which at least this share of the directions lies."""
        reached = np.cumsum(self.weights)
        return float(self.nodes[min(int(np.searchsorted(reached, share * reached[-1])), len(self.nodes) - 1)])


def setting_of(config: RunConfig) -> Setting:
    """Return the outer rule, the rounds and the inner learning rates of a run.

    The steps of a replica during a reduction are discarded when the anchor comes back. So a round with a delay keeps
    `S - delay` of them. (With mixing it keeps a share of each, which the linear model does not have.)
    """
    lrs, damping = {}, 1 - config.inner.momentum if config.inner.method == "sgd" else 1
    for number, place in enumerate(PLACES):
        first = (2 * number + 1) * config.rounds // 6 * config.inner_steps
        steps = range(first, min(first + config.inner_steps, config.steps))
        steps = steps[0 if config.sync.mixing else config.sync.delay :] or steps[-1:]
        lrs[place] = tuple(inner_lr(config, step) / damping for step in steps)
    return Setting(config.outer.rule(), config.rounds, lrs, config.inner.weight_decay)


def patterns_of(restored: Restored, asked: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the blocks' patterns: those asked for, else the run's fragments if they have names, else the model's own.

    The model's own are its `block_patterns()`, else the first parts of the parameters' names that differ.
    """
    if asked is not None:
        return dict(asked)
    fragments = restored.config.sync.parts()
    if not isinstance(fragments, int):
        return dict(fragments)
    if patterns := getattr(restored.model, "block_patterns", None):
        return patterns()
    paths = [name.split(".") for name in restored.names]
    depth = 1 + next((place for place, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), 0)
    heads = {".".join(path[:depth]): len(path) > depth for path in paths}
    return {head: f"^{re.escape(head)}{r'[.]' if is_module else '$'}" for head, is_module in heads.items()}


def measure(
    restored: Restored,
    patterns: Mapping[str, str],
    batches: Sequence[Any],
    *,
    top: int = 5,
    show: Callable[[int, str], None] = lambda _done, _text: None,
) -> list[Curvature]:
    """Measure the blocks of a run.

    Args:
        restored: the run.
        patterns: a regular expression by block name; a parameter is in the first block with a pattern in its name.
        batches: some of the run's training batches.
        top: eigenvalues of each block, besides the density.
        show: called with the number of blocks that are done and a few words.
    """
    try:
        members = partition({name: restored.model.get_parameter(name).numel() for name in restored.names}, patterns)
    except ValueError as error:
        reason = str(error).removeprefix("partition: ").replace("fragment", "block")
        raise UsageError(f"--blocks: {reason}") from None
    kind, function = restored.matrix
    blocks: list[Curvature] = []
    for name, names in members.items():
        raw, scaled = (kind(restored.model, batches, names, scale, function) for scale in (None, restored.scale))

        def product(vector: Floats, matrix: Matrix, name: str = name) -> Floats:
            show(len(blocks), f"{name}, {matrix.products} products")
            return matrix(vector)

        largest, _ = largest_eigenpairs(partial(product, matrix=raw), raw.size, top)
        pairs = largest_eigenpairs(partial(product, matrix=scaled), scaled.size, max(top, _APART), floor=kind.floor)
        nodes, weights = density(
            partial(product, matrix=scaled), scaled.size, steps=STEPS, probes=PROBES, largest=pairs, floor=kind.floor
        )
        steepest, curved = np.maximum(pairs[0][:top], 0), np.maximum(nodes, 0)
        whole = float(np.abs(nodes) @ weights)
        negative = float((curved - nodes) @ weights) / whole if whole else 0.0
        blocks.append(Curvature(name, raw.size, largest, steepest, curved, weights, negative))
    show(len(blocks), "done")
    return blocks


# ---------------------------------------------------------------------------------------------- progress and periods


@dataclass(frozen=True)
class Progress:
    """What a round removes of a block.

    Args:
        mean: effective progress, mean over the modes by loss.
        largest: of the largest eigenvalue.
        step: largest inner learning rate of the round times that eigenvalue; above 1 the inner step passes the minimum,
            above 2 gradient descent would diverge there.
        passing: share of the loss in modes with an inner step past the minimum; they count as removed.
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
        at_mean: as if all modes were at the mean progress, as in the paper's closed form; None for no restart.
        sigma: progress of each node in the middle of the run.
    """

    curvature: Curvature
    progress: Mapping[str, Progress]
    chosen: Period
    at_mean: int | None
    sigma: Floats

    def spread(self, share: float) -> float:
        """Return the progress at or below which this share of the loss lies."""
        weights = self.curvature.loss_weights
        if not weights.any():
            return 0.0
        return float(self.sigma[min(int(np.searchsorted(np.cumsum(weights), share)), len(weights) - 1)])


def forecast(curvature: Curvature, setting: Setting) -> Forecast:
    """Return progress and periods of a block by its curvature."""
    weights, decay = curvature.loss_weights, setting.weight_decay
    steepest = float(curvature.top[0]) if len(curvature.top) else 0.0
    sigma, progress = {}, {}
    for place, lrs in setting.inner_lrs.items():
        rates = np.asarray(lrs, dtype=np.float64)
        removed = scheduled_progress(curvature.nodes, rates, weight_decay=decay, clip=True)
        sigma[place] = np.where(curvature.nodes > 0, removed, 0.0)  # decay alone makes no progress
        steps = rates.max() * (curvature.nodes + decay)
        progress[place] = Progress(
            mean=float(weights @ sigma[place]),
            largest=float(scheduled_progress(steepest, rates, weight_decay=decay, clip=True)),
            step=float(rates.max() * (steepest + decay)),
            passing=float(weights[steps > 1].sum()),
            unstable=float(weights[steps > 2].sum()),
        )
    chosen = choose(setting, sigma["mid"], weights)
    return Forecast(curvature, progress, chosen, first_cancellation(setting, progress["mid"].mean), sigma["mid"])


def choose(setting: Setting, sigma: Floats, weights: Floats) -> Period:
    """Return the period with the lowest loss at the end (theory R20), given progress and share of each mode."""
    if not np.any(weights * sigma > 0) or setting.rule.momentum == 0 or setting.rule.lr == 0 or setting.rounds < 2:
        return Period(None, 0.0)
    longest = min(setting.rounds, _LONGEST_PERIOD)
    best = best_period(setting.rule, sigma, weights=weights, max_period=longest, rounds=setting.rounds)
    if best >= setting.rounds:
        return Period(None, 0.0)
    restarted, without = log_final_loss(setting.rule, sigma, setting.rounds, [best, setting.rounds], weights)
    return Period(best, float(restarted - without) if math.isfinite(restarted) else -math.inf)


def first_cancellation(setting: Setting, sigma: float) -> int | None:
    """Return the first cancellation of a mode in whole rounds (sigma at most 1); None if it does not oscillate."""
    if not sigma > 0 or setting.rule.momentum == 0 or setting.rule.lr == 0:
        return None
    period = int(rounded_period(setting.rule, min(sigma, 1.0)))
    return period if 1 <= period < setting.rounds else None


def loss_curve(setting: Setting, block: Forecast, periods: Sequence[int]) -> Floats:
    """Return the natural logarithm of the loss at the end with each of some periods over that without restarts."""
    weights = block.curvature.loss_weights
    logs = log_final_loss(setting.rule, block.sigma, setting.rounds, [*periods, setting.rounds], weights)
    return logs[:-1] - logs[-1]


# ------------------------------------------------------------------------------------------------- from a run's rounds


@dataclass(frozen=True)
class Seen:
    """What a run's rounds show of a block.

    Args:
        whole: over all rounds.
        thirds: over the run's thirds, by place.
        periods: first cancellations of single modes at the low end of sigma, the estimate, and the high end. None is no
            restart; empty where nothing may be shown.
        rates_known: whether the record has the inner learning rates. Without them, pseudo-gradients that shrink with
            the rate look like progress.
    """

    whole: Observed
    thirds: Mapping[str, Observed]
    periods: tuple[int | None, ...]
    rates_known: bool = True

    @property
    def interval(self) -> Range | None:
        """Low, estimate and high of sigma (95 %) within (0, 1]; None where the record does not determine it."""
        return within(self.whole) if self.rates_known else None

    @property
    def why_not(self) -> str:
        """Why there is no interval, as the end of a sentence."""
        return self.whole.why_not if self.rates_known else "the inner learning rates of the rounds are unknown"


def seen(record: RunRecord, setting: Setting) -> dict[str, Seen]:
    """Return what the rounds of a run show, by the names of its fragments (or the whole model's)."""
    shown = {}
    for block in record.blocks:
        edges = [round(len(block.index) * part / 3) for part in range(4)]
        parts = zip(PLACES, edges, edges[1:], strict=False)
        lr = record.inner_lr(block.index)
        whole = observed_in(block, setting.rule, lr)
        thirds = {p: observed_in(block, setting.rule, lr, slice(low, high)) for p, low, high in parts if lr is not None}
        of_block = Seen(whole, thirds, (), rates_known=lr is not None)
        periods = tuple(first_cancellation(setting, value) for value in of_block.interval or ())
        shown[block.name] = replace(of_block, periods=periods)
    return shown
