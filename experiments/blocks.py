"""The blocks of a trained run: their curvature, what a round's inner steps remove of it, and the periods that follow.

The curvature is the Gauss-Newton matrix G of a task's cross-entropy, else the Hessian (`curvature`).
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
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from curvature import Function, GaussNewton, Hessian, Matrix
from eigenvalues import density, largest_eigenpairs
from restored import Restored
from twophase.advice.evidence import observed_in, within
from twophase.diloco.fragment import partition
from twophase.errors import UsageError
from twophase.rule import OuterRule
from twophase.runs.config import RunConfig, inner_lr
from twophase.runs.record import RunRecord
from twophase.tasks.lm.model import Llama
from twophase.theory.inputs import Floats
from twophase.theory.modes import scheduled_progress
from twophase.theory.periods import best_period, log_final_loss, rounded_period
from twophase.training.task import Task

Facts = dict[str, Any]
"""What is known of a block, as in `spectrum.json`; `measure`, `forecast` and `seen` list the keys."""
PLACES = ("early", "mid", "late")
"""The middle rounds of a run's thirds."""
STEPS, PROBES = 32, 2  # Lanczos steps and random vectors of a density
_LARGEST, _APART = 5, 10  # largest eigenvalues that are reported, and those that a density counts by themselves
_LONGEST_PERIOD = 1000
_LLAMA = {
    "embeddings": "^embedding$",
    "attention": "query_key_value|output",
    "mlp": "gate_up|down",
    "norms": "norm",
    "head": "^head$",
}


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
    rule = config.outer.rule()
    assert rule is not None, f"{config.outer.method} is no rule"
    return Setting(rule, config.rounds, lrs, config.inner.weight_decay)


def patterns_of(restored: Restored) -> dict[str, str]:
    """Return the patterns of a run's blocks: its fragments if they have names, else the model's own blocks.

    The model's own are parts of the built-in one, else the first parts of the parameters' names that differ.
    """
    fragments = restored.config.sync.parts
    if not isinstance(fragments, int):
        return fragments
    if isinstance(restored.model, Llama):
        return {name: pattern for name, pattern in _LLAMA.items() if name != "head" or restored.model.head is not None}
    paths = [name.split(".") for name in restored.names]
    depth = 1 + next((place for place, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), 0)
    heads = {".".join(path[:depth]): len(path) > depth for path in paths}
    return {head: f"^{re.escape(head)}{r'[.]' if is_module else '$'}" for head, is_module in heads.items()}


def matrix_of(task: Task) -> tuple[type[Matrix], Function]:
    """Return the kind of a task's curvature, and of what it is: of the task's logits, else of its loss."""
    logits = getattr(task, "logits", None)
    return (Hessian, task.loss) if logits is None else (GaussNewton, logits)


def measure(
    restored: Restored,
    patterns: Mapping[str, str],
    batches: Sequence[Any],
    *,
    show: Callable[[int, str], None] = lambda _done, _text: None,
) -> list[Facts]:
    """Return the blocks of a run: `name`, `pattern`, `parameters`, and `largest` eigenvalues beside their `forecast`.

    Args:
        restored: the run.
        patterns: a regular expression by block name; a parameter is in the first block with a pattern in its name.
        batches: some of the run's training batches.
        show: called with the number of blocks that are done and a few words.
    """
    sizes = {name: restored.model.get_parameter(name).numel() for name in restored.names}
    try:
        members = partition(sizes, patterns)
    except ValueError as error:
        reason = str(error).removeprefix("partition: ").replace("fragment", "block")
        raise UsageError(f"--blocks: {reason}") from None
    kind, function = matrix_of(restored.task)
    setting, blocks = setting_of(restored.config), list[Facts]()
    for name, names in members.items():

        def product(matrix: Matrix, vector: Floats, name: str = name) -> Floats:
            show(len(blocks), f"{name}, {matrix.products} products")
            return matrix(vector)

        raw, scaled = (
            partial(product, kind(restored.model, batches, names, scale, function)) for scale in (None, restored.scale)
        )
        size = sum(sizes[weight] for weight in names)
        largest, _ = largest_eigenpairs(raw, size, _LARGEST)
        pairs = largest_eigenpairs(scaled, size, _APART, floor=kind.floor)
        nodes = density(scaled, size, steps=STEPS, probes=PROBES, largest=pairs, floor=kind.floor)
        block = {"name": name, "pattern": patterns[name], "parameters": size, "largest": largest}
        blocks.append(block | forecast(setting, pairs[0][:_LARGEST], *nodes))
    show(len(blocks), "done")
    return blocks


# ---------------------------------------------------------------------------------------------- progress and periods


def forecast(setting: Setting, largest: Floats, eigenvalue: Floats, share: Floats) -> Facts:
    """Return progress and periods of a block by its preconditioned matrix.

    Args:
        setting: what the run does.
        largest: largest eigenvalues, descending; negative ones count as 0, as in the density.
        eigenvalue: density: eigenvalues, ascending.
        share: the share of directions that each of them stands for.

    Returns:
        `largest_preconditioned`, `mean_preconditioned` and, by share of the directions, `quantiles` of the eigenvalues;
        `density`, with the progress of each eigenvalue in the middle of the run, `sigma_mid`.

        `progress` by place: effective progress of a round, its `mean` over the modes by loss and of the `largest`
        eigenvalue; that eigenvalue times the round's largest inner learning rate, `step`; shares of the loss in modes
        with a step beyond 1, `passing` the minimum, which count as removed, and beyond 2, where the linear model has no
        answer, `unstable`. `spread_mid`: by share of the loss, the progress at or below which it lies.

        `period`, the best by the exact loss at the end (theory R20), None for no restart; `log_gain`, natural logarithm
        of the loss at the end with it over that without restarts; `period_at_mean`, as if all modes were at the mean
        progress, the paper's closed form. `negative`: the negative eigenvalues' share of all absolute ones.
    """
    top, curved, decay = np.maximum(largest, 0), np.maximum(eigenvalue, 0), setting.weight_decay
    nodes = {"eigenvalue": curved, "share": share}
    weights, whole, steepest = loss_weights(nodes), float(np.abs(eigenvalue) @ share), top[:1].sum()
    sigma, progress = {}, {}
    for place, lrs in setting.inner_lrs.items():
        rates = np.asarray(lrs, dtype=np.float64)
        removed = scheduled_progress(curved, rates, weight_decay=decay, clip=True)
        sigma[place] = np.where(curved > 0, removed, 0.0)  # decay alone makes no progress
        steps = rates.max() * (curved + decay)
        progress[place] = {
            "mean": float(weights @ sigma[place]),
            "largest": float(scheduled_progress(steepest, rates, weight_decay=decay, clip=True)),
            "step": float(rates.max() * (steepest + decay)),
            "passing": float(weights[steps > 1].sum()),
            "unstable": float(weights[steps > 2].sum()),
        }
    period, log_gain = choose(setting, sigma["mid"], weights)
    return {
        "largest_preconditioned": top,
        "mean_preconditioned": float(curved @ share),
        "quantiles": _quantiles(curved, share, (0.1, 0.5, 0.9, 0.99, 0.999)),
        "density": nodes | {"sigma_mid": sigma["mid"]},
        "progress": progress,
        "spread_mid": _quantiles(sigma["mid"], weights, (0.05, 0.25, 0.5, 0.75, 0.95)),
        "period": period,
        "log_gain": log_gain,
        "period_at_mean": first_cancellation(setting, progress["mid"]["mean"]),
        "negative": float((curved - eigenvalue) @ share) / whole if whole else 0.0,
    }


def loss_weights(density: Mapping[str, Floats]) -> Floats:
    """Return the share of each eigenvalue of a density in the trace; zeros where there is no curvature at all."""
    weights = density["eigenvalue"] * density["share"]
    total = weights.sum()
    return weights / total if total > 0 else weights


def _quantiles(values: Floats, weights: Floats, shares: Sequence[float]) -> dict[str, float]:
    """Return, by share, the smallest value at or below which this share of the weights lies; 0 without weights."""
    at = (
        np.quantile(values, shares, weights=weights, method="inverted_cdf") if weights.any() else 0.0 * np.array(shares)
    )
    return {f"{share:g}": float(value) for share, value in zip(shares, at, strict=True)}


def choose(setting: Setting, sigma: Floats, weights: Floats) -> tuple[int | None, float]:
    """Return the period with the lowest loss at the end, given progress and share of each mode, and its log gain."""
    if not np.any(weights * sigma > 0) or setting.rule.momentum == 0 or setting.rule.lr == 0 or setting.rounds < 2:
        return None, 0.0
    longest = min(setting.rounds, _LONGEST_PERIOD)
    best = best_period(setting.rule, sigma, weights=weights, max_period=longest, rounds=setting.rounds)
    if best >= setting.rounds:
        return None, 0.0
    restarted, without = log_final_loss(setting.rule, sigma, setting.rounds, [best, setting.rounds], weights)
    return best, float(restarted - without) if math.isfinite(restarted) else -math.inf


def first_cancellation(setting: Setting, sigma: float) -> int | None:
    """Return the first cancellation of a mode in whole rounds (sigma at most 1); None if it does not oscillate."""
    if not sigma > 0 or setting.rule.momentum == 0 or setting.rule.lr == 0:
        return None
    period = int(rounded_period(setting.rule, min(sigma, 1.0)))
    return period if 1 <= period < setting.rounds else None


def loss_curve(setting: Setting, block: Facts, periods: Sequence[int]) -> Floats:
    """Return the natural logarithm of the loss at the end with each of some periods over that without restarts."""
    sigma, weights = block["density"]["sigma_mid"], loss_weights(block["density"])
    logs = log_final_loss(setting.rule, sigma, setting.rounds, [*periods, setting.rounds], weights)
    return logs[:-1] - logs[-1]


# ------------------------------------------------------------------------------------------------- from a run's rounds


def seen(record: RunRecord, setting: Setting) -> dict[str, Facts]:
    """Return what the rounds of a run show of sigma, by the names of its fragments (or the whole model's).

    Returns:
        `sigma`, `standard_error` and `noise_share` over all rounds; `shown` or `why_not`, the end of a sentence;
        `interval`, low, estimate and high (95 %) within (0, 1], and `periods`, first cancellations of single modes
        there, None for no restart. `thirds`: `twophase.theory.observed.Observed` of the run's thirds, by place. Without
        the inner learning rates nothing is shown: pseudo-gradients that shrink with the rate look like progress.
    """
    facts = {}
    for block in record.blocks:
        lr = record.inner_lr(block.index)
        observed = partial(observed_in, block, setting.rule, lr)
        edges = [round(len(block.index) * part / 3) for part in range(4)]
        whole, interval, why_not, thirds = observed(), None, "the inner learning rates of the rounds are unknown", {}
        if lr is not None:
            interval, why_not = within(whole), whole.why_not
            thirds = {place: observed(part) for place, part in zip(PLACES, map(slice, edges, edges[1:]), strict=True)}
        facts[block.name] = {
            "sigma": whole.sigma,
            "standard_error": whole.standard_error,
            "noise_share": whole.noise_share,
            "why_not": why_not,
            "shown": interval is not None,
            "interval": interval,
            "periods": [first_cancellation(setting, value) for value in interval or ()],
            "thirds": thirds,
        }
    return facts
