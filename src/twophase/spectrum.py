"""Curvature of a trained language model by block, what a round's inner steps remove of it, and the periods that follow.

    G = (1/N) sum_i J_i^T (diag p_i - p_i p_i^T) J_i,      J_i = d logits_i / d parameters,   p_i = softmax(logits_i)

is the generalised Gauss-Newton matrix of the mean cross-entropy over N tokens: the Hessian of the loss without the
curvature of the logits. It is never formed: a product with it is a product with J, with a small matrix for each token,
and with J^T. Restricted to a block, all other parameters stand still.

An inner optimizer that divides the gradient by D (AdamW: `D = sqrt(v) + eps`) takes the step `-lr D^-1 gradient`. In
the coordinates `y = D^1/2 x` that is gradient descent on a loss of curvature `D^-1/2 G D^-1/2`, the preconditioned
matrix. Its modes shrink independently. The loss of a displacement y is `1/2 sum_j lambda_j y_j^2`. The displacement is
unknown, so each direction counts alike, and a mode weighs its eigenvalue's share of the trace.

Assumed, and seldom true of a trained model: blocks do not act on one another, curvature and second moments stand still,
replicas see the same data, and AdamW's first moment is the present gradient.

Source: Schraudolph, "Fast curvature matrix-vector products" (2002).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from twophase.advice.evidence import Range, observed_in, within
from twophase.base.config import UsageError
from twophase.diloco.fragment import partition
from twophase.rule import OuterRule
from twophase.runs.record import RunRecord
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.restored import Restored
from twophase.theory.eigenvalues import density, largest_eigenpairs
from twophase.theory.inputs import Floats
from twophase.theory.modes import scheduled_progress
from twophase.theory.observed import Observed
from twophase.theory.periods import best_period, log_final_loss, rounded_period
from twophase.training.inner import inner_lr

BLOCKS = {
    "embeddings": "^embedding$",
    "attention": "query_key_value|output",
    "mlp": "gate_up|down",
    "norms": "norm",
    "head": "^head$",
}
"""The default blocks of a model: a pattern of parameter names for each."""
PLACES = ("early", "mid", "late")
"""The middle rounds of a run's thirds."""
STEPS, PROBES = 32, 2  # Lanczos steps and random vectors of a density
_APART = 10  # the largest eigenvalues that a density counts by themselves, or more where more are asked for
_LONGEST_PERIOD = 1000
_CACHED_LOGITS = 1 << 24  # up to so many logits their graphs stay in memory, which makes a product four times as quick
_PIECE_TOKENS = 1 << 13  # small batches are joined up to so many tokens: at a laptop's sizes calls cost most


# ----------------------------------------------------------------------------------------------------------- products


class GaussNewton:
    """The Gauss-Newton matrix of a block as a linear operator.

    Args:
        model: from tokens to logits; its parameters must be finite. Gradients of it are neither read nor written.
        batches: tokens, (sequences, length) int64 each; the mean is over all their tokens. The matrix needs no targets.
        names: of the block's parameters, in the order of the operator's coordinates.
        scale: factor of each coordinate on both sides, by parameter name: `D^-1/2` for the preconditioned matrix. None
            is all ones.

    Attributes:
        size: number of coordinates.
        products: how many vectors it has been applied to.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        names: Sequence[str],
        scale: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._model = model
        self._fixed = {name: weight.detach() for name, weight in model.named_parameters()}
        self._block = {name: self._fixed.pop(name) for name in names}
        self._pieces = _joined(batches)
        self._tokens = sum(piece.numel() for piece in self._pieces)
        self._scale = None if scale is None else _flat([scale[name].to(self._block[name]) for name in names])
        self._cached: list[_Graph] | None = None
        self.size = sum(weight.numel() for weight in self._block.values())
        self.products = 0

    def __call__(self, vector: Floats) -> Floats:
        """Return the product with a vector, (size,) float64; computed in the model's own type."""
        v = torch.from_numpy(np.ascontiguousarray(vector, dtype=np.float64)).to(next(iter(self._block.values())))
        if self._scale is not None:
            v = v * self._scale
        parts = iter(v.split([weight.numel() for weight in self._block.values()]))
        tangent = {name: next(parts).view(weight.shape) for name, weight in self._block.items()}
        total = torch.zeros_like(v)
        with sdpa_kernel(SDPBackend.MATH):  # the others cannot be differentiated twice
            for graph in self._graphs():
                share = graph.product(tangent, self._tokens)
                total += _flat([share[name] for name in self._block])
        if self._scale is not None:
            total = total * self._scale
        self.products += 1
        return total.cpu().double().numpy()

    def _graphs(self) -> Iterable[_Graph]:
        if self._cached is not None:
            return self._cached
        graphs = (_Graph(self._model, self._block, self._fixed, tokens) for tokens in self._pieces)
        with torch.no_grad():
            logits = self._tokens * self._model(self._pieces[0][:1]).shape[-1]  # it also fills the rotation tables
        if logits <= _CACHED_LOGITS:
            self._cached = list(graphs)
            return self._cached
        return graphs


class _Graph:
    """The graph of some sequences: from a change of the block to that of the logits, and back."""

    def __init__(
        self, model: nn.Module, block: Mapping[str, Tensor], fixed: Mapping[str, Tensor], tokens: Tensor
    ) -> None:
        def logits(parameters: Mapping[str, Tensor]) -> Tensor:
            return functional_call(model, {**fixed, **parameters}, (tokens,))

        value, self._back = vjp(logits, dict(block))[:2]
        # J v is the transpose of u -> J^T u, which is linear: its product from behind. So both graphs stay, and
        # forward-mode derivatives, which would run the model anew for each product, are not needed.
        self._forward = vjp(lambda u: self._back(u)[0], torch.zeros_like(value))[1]
        self._probabilities = value.detach().softmax(-1)

    def product(self, tangent: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
        """Return these sequences' share of the product."""
        (change,) = self._forward(dict(tangent))
        weighted = self._probabilities * change
        slope = weighted - self._probabilities * weighted.sum(-1, keepdim=True)
        return self._back(slope / tokens)[0]


def _joined(batches: Sequence[Tensor]) -> list[Tensor]:
    """Join neighbouring batches of the same length as far as that saves calls."""
    pieces: list[Tensor] = []
    for tokens in batches:
        last = pieces[-1] if pieces else None
        if last is None or last.shape[1] != tokens.shape[1] or last.numel() + tokens.numel() > _PIECE_TOKENS:
            pieces.append(tokens)
        else:
            pieces[-1] = torch.cat([last, tokens])
    return pieces


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


# --------------------------------------------------------------------------------------------------- blocks of a run


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
        parameters: number of its parameters.
        raw: largest eigenvalues of its Gauss-Newton matrix, descending.
        top: the same of the preconditioned matrix.
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
        """Return the smallest eigenvalue at or below which at least this share of the directions lies."""
        reached = np.cumsum(self.weights)
        return float(self.nodes[min(int(np.searchsorted(reached, share * reached[-1])), len(self.nodes) - 1)])


def setting_of(config: TrainConfig) -> Setting:
    """Return the outer rule, the rounds and the inner learning rates of a run."""
    lrs = {}
    for number, place in enumerate(PLACES):
        first = (2 * number + 1) * config.rounds // 6 * config.inner_steps
        steps = range(first, min(first + config.inner_steps, config.steps))
        lrs[place] = tuple(inner_lr(config, step) for step in steps)
    return Setting(config.outer.rule(), config.rounds, lrs, config.inner.weight_decay)


def patterns_of(restored: Restored, asked: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the blocks' patterns: those asked for, else the run's fragments if they have names, else `BLOCKS`."""
    if asked is not None:
        return dict(asked)
    fragments = restored.config.sync.parts()
    if not isinstance(fragments, int):
        return dict(fragments)
    return {name: pattern for name, pattern in BLOCKS.items() if name != "head" or restored.model.head is not None}


def measure(
    restored: Restored,
    patterns: Mapping[str, str],
    tokens: Sequence[Tensor],
    *,
    top: int = 5,
    show: Callable[[int, str], None] = lambda _done, _text: None,
) -> list[Curvature]:
    """Measure the blocks of a run.

    Args:
        restored: the run.
        patterns: a regular expression by block name; a parameter is in the first block with a pattern in its name.
        tokens: batches of the run's training text.
        top: eigenvalues of each block, besides the density.
        show: called with the number of blocks that are done and a few words.
    """
    try:
        members = partition({name: weight.numel() for name, weight in restored.model.named_parameters()}, patterns)
    except ValueError as error:
        reason = str(error).removeprefix("partition: ").replace("fragment", "block")
        raise UsageError(f"--blocks: {reason}") from None
    blocks: list[Curvature] = []
    for name, names in members.items():
        raw = GaussNewton(restored.model, tokens, names)
        scaled = GaussNewton(restored.model, tokens, names, restored.scale)

        def product(vector: Floats, matrix: GaussNewton, name: str = name) -> Floats:
            show(len(blocks), f"{name}, {matrix.products} products")
            return matrix(vector)

        largest, _ = largest_eigenpairs(partial(product, matrix=raw), raw.size, top)
        pairs = largest_eigenpairs(partial(product, matrix=scaled), scaled.size, max(top, _APART))
        nodes, weights = density(
            partial(product, matrix=scaled), scaled.size, steps=STEPS, probes=PROBES, largest=pairs
        )
        blocks.append(Curvature(name, raw.size, largest, pairs[0][:top], nodes, weights))
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
        periods: the first cancellations of single modes at the low end of sigma, the estimate, and the high end, None
            for no restart; empty where nothing may be shown.
    """

    whole: Observed
    thirds: Mapping[str, Observed]
    periods: tuple[int | None, ...]

    @property
    def interval(self) -> Range | None:
        """Low, estimate and high of sigma (95 %) within (0, 1]; None where the record does not determine it."""
        return within(self.whole)


def seen(record: RunRecord, setting: Setting) -> dict[str, Seen]:
    """Return what the rounds of a run show, by the names of its fragments (or the whole model's)."""
    shown = {}
    for block in record.blocks:
        edges = [round(len(block.index) * part / 3) for part in range(4)]
        parts = zip(PLACES, edges, edges[1:], strict=False)
        lr = record.inner_lr(block.index)
        whole = observed_in(block, setting.rule, lr)
        thirds = {place: observed_in(block, setting.rule, lr, slice(low, high)) for place, low, high in parts}
        periods = tuple(first_cancellation(setting, value) for value in within(whole) or ())
        shown[block.name] = Seen(whole, thirds, periods)
    return shown
