"""The cells of `blockwise`: which runs it needs, stage after stage, and what it measures between them.

Every run cuts the model into the same blocks, all combined at a round's end, and differs in the blocks' policies alone.
Whatever is chosen by looking at results (one period for all, the oracle) is chosen on the search seed, and judged on
others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import logsumexp

import blocks as spectrum
from blocks import Facts, Setting, loss_weights
from paper import PAPER, QUICK, Scale
from restored import restore
from twophase.api import train_run
from twophase.config import load_yaml, update
from twophase.files import finite
from twophase.runs.folder import CONFIG
from twophase.runs.record import read_record
from twophase.sweeps.grid import Cell, Sweep
from twophase.sweeps.table import Row
from twophase.tasks.registry import config_of
from twophase.theory.periods import log_final_loss

BLOCKS = {
    "embedding": "^embedding$",
    "attention": "query_key_value|output|attention_norm",
    "mlp": "gate_up|down|mlp_norm",
    "head": ".",
}
"""What the model is cut into; the last norm goes with the head."""
LR, MOMENTUM, FORM = 0.7, 0.9, "sum"
"""DiLoCo's usual rule, with Nesterov's look-ahead: the one that needs restarts in the demo."""
NEVER = "never"
ONE, FREE, MEAN, ALL, ROUNDS, ORACLE, SEARCH = (
    "one K for all", "averaging", "K_b, curvature, mean sigma", "K_b, curvature, all modes", "K_b, rounds",
    "K_b, oracle", "search",
)  # fmt: skip
SHUFFLED = {
    MEAN: "shuffled mean sigma", ALL: "shuffled all modes", ROUNDS: "shuffled rounds", ORACLE: "shuffled oracle",
}  # fmt: skip
"""The controls: the same periods on other blocks."""
Periods = tuple[str, ...]
"""A policy for each block, as text."""


@dataclass(frozen=True)
class Design:
    """What a scale makes of the experiment."""

    widths: tuple[int, ...]
    inner_steps: tuple[int, ...]
    steps: int
    policies: Periods
    """For a block, in the order of preference among equals."""
    search_seed: int
    """On which periods are chosen by their results; everything is judged on `seeds`."""
    seeds: tuple[int, ...]
    draws: int
    """Shuffled assignments of each control."""
    batches: int
    """Of text, that the curvature is a mean over."""


@dataclass(frozen=True)
class Place:
    """A width and a communication period of a scale."""

    scale: Scale
    width: int
    inner_steps: int

    @property
    def name(self) -> str:
        """Text for tables."""
        return f"width {self.width}, S={self.inner_steps}"

    @property
    def design(self) -> Design:
        """The design of the scale."""
        return design(self.scale)


def design(scale: Scale) -> Design:
    """Return the design of a scale."""
    size, steps = scale.base.model.hidden_size, scale.base.steps
    if scale.name == QUICK.name:
        return Design((size,), (scale.short,), 24, (NEVER, "2"), 0, (1,), 1, 1)
    if scale.name == PAPER.name:
        policies = (NEVER, *map(str, scale.periods))
        return Design((size,), (scale.short, scale.long), steps, policies, 0, (1, 2, 3), 2, 1)
    widths, policies = (size // 2, size), (NEVER, "5", "2", "1")
    return Design(widths, (scale.short, scale.long), steps // 3, policies, 0, (1, 2, 3), 2, 4)


def places(scale: Scale) -> list[Place]:
    """Combine every width with every communication period."""
    made = design(scale)
    return [Place(scale, width, inner_steps) for width in made.widths for inner_steps in made.inner_steps]


@cache
def _cell(place: Place, arm: str, seed: int, periods: Periods) -> Cell:
    """Return one run; without momentum it is plain averaging."""
    base, momentum = place.scale.base, 0.0 if arm == FREE else MOMENTUM
    values = {
        "model.hidden_size": place.width,
        "inner_steps": place.inner_steps,
        "sync.restart": tuple(f"{name}={policy}" for name, policy in zip(BLOCKS, periods, strict=True)),
        "outer.momentum": momentum or None,
        "seed": seed,
    }
    fixed = {
        "model.intermediate_size": base.model.intermediate_size * place.width // base.model.hidden_size,
        "steps": place.design.steps,
        "outer.lr": LR if momentum else 1.0,
        "outer.method": "nesterov" if momentum else "averaging",
        "outer.form": FORM,
        "outer.restart": NEVER,
        "sync.fragments": tuple(f"{name}={pattern}" for name, pattern in BLOCKS.items()),
        "sync.stagger": False,
        "checkpoint_every": 1_000_000,  # the last one is enough
        "keep_checkpoints": 1,
    }
    return Cell(arm, values, update(base, values | fixed))


def _alike(policy: str) -> Periods:
    return (policy,) * len(BLOCKS)


def pilot(place: Place) -> str:
    """Return the id of the run without restarts on the search seed, in which everything is measured."""
    return _cell(place, ONE, place.design.search_seed, _alike(NEVER)).run_id


def sweep(scale: Scale, rows: Sequence[Row], measured: Mapping[str, Any]) -> Sweep:
    """Return the cells that follow from the results and measurements so far."""
    scores = scores_of(rows)
    cells = [cell for place in places(scale) for cell in _cells(place, scores, measured.get(pilot(place)))]
    return Sweep(f"blockwise-{scale.name}", scale.base, cells)


def scores_of(rows: Sequence[Row]) -> dict[str, float]:
    """Return the perplexities of the runs that have ended; infinite for one that has diverged."""
    ended = [row for row in rows if row.state in ("finished", "diverged")]
    return {row.run: math.inf if row.perplexity is None else row.perplexity for row in ended}


def _cells(place: Place, scores: Mapping[str, float], facts: Mapping[str, Any] | None) -> Iterator[Cell]:
    made = place.design
    for policy in made.policies:
        for seed in (made.search_seed, *made.seeds):
            yield _cell(place, ONE, seed, _alike(policy))
    yield from _judged(place, FREE, _alike(NEVER))
    for arm, periods in facts["periods"].items() if facts else ():
        yield from _with_shuffled(place, arm, tuple(periods))
    tried, oracle = searched(place, scores)
    yield from (_cell(place, SEARCH, made.search_seed, periods) for periods in tried)
    if oracle is not None:
        yield from _with_shuffled(place, ORACLE, oracle)


def _judged(place: Place, arm: str, periods: Periods) -> Iterator[Cell]:
    return (_cell(place, arm, seed, periods) for seed in place.design.seeds)


def _with_shuffled(place: Place, arm: str, periods: Periods) -> Iterator[Cell]:
    """Yield an arm, and the same periods on other blocks, drawn at random; none where all are equal."""
    yield from _judged(place, arm, periods)
    others = sorted(set(permutations(periods)) - {periods})
    for drawn in random.Random(f"{place.name} {arm}").sample(others, min(place.design.draws, len(others))):
        yield from _judged(place, SHUFFLED[arm], drawn)


def best_alike(place: Place, scores: Mapping[str, float]) -> str | None:
    """Find the policy for all blocks that is best on the search seed; None as long as a score is missing."""
    best = _best(place, ONE, list(map(_alike, place.design.policies)), scores)
    return None if best is None else best[0]


def searched(place: Place, scores: Mapping[str, float]) -> tuple[list[Periods], Periods | None]:
    """Search the oracle: from the best policy for all, one block after the other takes the policy that is best.

    Returns:
        What was or is to be tried, and the best; None as long as a score of what was tried is missing.
    """
    start, tried = best_alike(place, scores), list[Periods]()
    best = None if start is None else _alike(start)
    for number in range(len(BLOCKS)):
        if best is None:
            break
        options = [(*best[:number], policy, *best[number + 1 :]) for policy in place.design.policies]
        tried += [option for option in options if option not in tried]
        best = _best(place, SEARCH, options, scores)
    return tried, best


def _best(place: Place, arm: str, options: Sequence[Periods], scores: Mapping[str, float]) -> Periods | None:
    """Find the first of the options with the least score on the search seed; None as long as a score is missing."""
    runs = {option: _cell(place, arm, place.design.search_seed, option).run_id for option in options}
    return min(options, key=lambda option: scores[runs[option]]) if scores.keys() >= set(runs.values()) else None


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(scale: Scale, rows: Sequence[Row], runs: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    """Measure curvature and rounds of the pilot of each place, and the periods that follow."""
    ended = {row.run for row in rows if row.state == "finished"}
    new = [run for run in map(pilot, places(scale)) if run in ended and run not in before]
    return {**before, **{run: _measured(design(scale), runs / run) for run in new}}


def _measured(made: Design, run: Path) -> dict[str, Any]:
    whole = run.parents[1] / "pilots" / run.name  # with its checkpoint, which the runs of a sweep do not keep
    train_run(config_of(load_yaml(run / CONFIG)), whole, quiet=True)
    restored = restore(whole)
    setting = spectrum.setting_of(restored.config)
    blocks = spectrum.measure(restored, BLOCKS, restored.batches(made.batches))
    shown = spectrum.seen(read_record(run), setting)
    rounds = [shown[name] for name in BLOCKS]
    policies = {
        MEAN: [block["period_at_mean"] for block in blocks],
        ALL: [block["period"] for block in blocks],
        # The estimate itself, whether or not it may be shown: the study asks what it is worth.
        ROUNDS: [spectrum.first_cancellation(setting, block["sigma"]) for block in rounds],
    }
    facts = {
        "periods": {arm: [NEVER if k is None else str(k) for k in periods] for arm, periods in policies.items()},
        "sigma": [block["progress"]["mid"]["mean"] for block in blocks],
        "low": [block["spread_mid"]["0.05"] for block in blocks],
        "high": [block["spread_mid"]["0.95"] for block in blocks],
        "unstable": [max(place["unstable"] for place in block["progress"].values()) for block in blocks],
        "rounds_sigma": [block["sigma"] for block in rounds],
        "rounds_error": [block["standard_error"] for block in rounds],
        "rounds_shown": [block["shown"] for block in rounds],
        "log_loss": {policy: _predicted(blocks, setting, policy) for policy in made.policies},
    }
    return finite(facts)


def _predicted(blocks: Sequence[Facts], setting: Setting, policy: str) -> float:
    """Return log (loss at the end / loss at the start) of all blocks together, with one policy for all."""
    shares = [block["parameters"] * block["mean_preconditioned"] for block in blocks]
    period, total = setting.rounds if policy == NEVER else int(policy), math.fsum(shares)
    logs = []
    for share, density in zip(shares, (block["density"] for block in blocks), strict=True):
        if share > 0:
            weights = loss_weights(density)
            loss = log_final_loss(setting.rule, density["sigma_mid"], setting.rounds, period, weights)
            logs.append(math.log(share / total) + float(loss - math.log(0.5)))
    return float(np.asarray(logsumexp(logs)))  # its stubs speak of a tuple
