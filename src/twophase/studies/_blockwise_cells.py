"""The cells of the study `blockwise`: which runs it needs, stage after stage, and what it measures between them.

Every run cuts the model into the same blocks, all combined at a round's end, and differs in the blocks' policies alone.
Whatever is chosen by looking at results (one period for all, the oracle) is chosen on the search seed, and judged on
others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scipy.special import logsumexp

from twophase.base.config import with_values
from twophase.recipes.paper import PAPER, QUICK, Scale
from twophase.runs.folder import standard
from twophase.runs.record import read_record
from twophase.sweep.grid import Cell, Sweep
from twophase.sweep.table import Row
from twophase.tasks.lm.config import TrainConfig
from twophase.theory.periods import log_final_loss

if TYPE_CHECKING:
    from twophase.spectrum import Forecast, Setting

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
    """What a scale makes of the study.

    Args:
        widths: of the model.
        inner_steps: communication periods.
        steps: inner steps of a run.
        policies: for a block, in the order of preference among equals.
        search_seed: on which periods are chosen by their results.
        seeds: on which everything is judged.
        draws: shuffled assignments of each control.
        batches: of text that the curvature is a mean over.
    """

    widths: tuple[int, ...]
    inner_steps: tuple[int, ...]
    steps: int
    policies: Periods
    search_seed: int
    seeds: tuple[int, ...]
    draws: int
    batches: int


@dataclass(frozen=True)
class Place:
    """A width and a communication period."""

    width: int
    inner_steps: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"width {self.width}, S={self.inner_steps}"


def design(scale: Scale) -> Design:
    """The design of a scale."""
    size, steps = scale.base.model.hidden_size, scale.base.steps
    if scale.name == QUICK.name:
        return Design((size,), (scale.short,), 24, (NEVER, "2"), 0, (1,), 1, 1)
    if scale.name == PAPER.name:
        policies = (NEVER, *map(str, scale.periods))
        return Design((size,), (scale.short, scale.long), steps, policies, 0, (1, 2, 3), 2, 1)
    widths, policies = (size // 2, size), (NEVER, "5", "2", "1")
    return Design(widths, (scale.short, scale.long), steps // 3, policies, 0, (1, 2, 3), 2, 4)


def places(scale: Scale) -> list[Place]:
    """Every width with every communication period."""
    made = design(scale)
    return [Place(width, inner_steps) for width in made.widths for inner_steps in made.inner_steps]


def config_of(scale: Scale, place: Place, seed: int, periods: Periods, *, momentum: float = MOMENTUM) -> TrainConfig:
    """One run; without momentum it is plain averaging."""
    base = scale.base
    model = replace(
        base.model,
        hidden_size=place.width,
        intermediate_size=base.model.intermediate_size * place.width // base.model.hidden_size,
    )
    values = {
        "steps": design(scale).steps,
        "inner_steps": place.inner_steps,
        "seed": seed,
        "outer.lr": LR if momentum else 1.0,
        "outer.momentum": momentum,
        "outer.nesterov": momentum > 0,
        "outer.form": FORM,
        "outer.restart": NEVER,
        "sync.fragments": tuple(f"{name}={pattern}" for name, pattern in BLOCKS.items()),
        "sync.restart": tuple(f"{name}={policy}" for name, policy in zip(BLOCKS, periods, strict=True)),
        "sync.stagger": False,
        "checkpoint_every": 1_000_000,  # the last one is enough
        "keep_checkpoints": 1,
    }
    return with_values(replace(base, model=model), values)


def pilot(scale: Scale, place: Place) -> str:
    """Id of the run without restarts on the search seed, in which everything is measured."""
    return _cell(scale, place, ONE, design(scale).search_seed, _alike(NEVER)).run_id


def _alike(policy: str) -> Periods:
    return (policy,) * len(BLOCKS)


@cache
def _cell(scale: Scale, place: Place, arm: str, seed: int, periods: Periods) -> Cell:
    config = config_of(scale, place, seed, periods, momentum=0.0 if arm == FREE else MOMENTUM)
    values = {
        "model.hidden_size": place.width,
        "inner_steps": place.inner_steps,
        "sync.restart": config.sync.restart,
        "outer.momentum": config.outer.momentum,
        "seed": seed,
    }
    return Cell(arm, values, config)


def sweep(scale: Scale, rows: Sequence[Row], measured: Mapping[str, Any]) -> Sweep:
    """The cells that can be known; see `Staged`."""
    scores = {row.run: _score(row) for row in rows if row.state in ("finished", "diverged")}
    cells = [cell for place in places(scale) for cell in _cells(scale, place, scores, measured)]
    return Sweep(f"blockwise-{scale.name}", scale.base, cells)


def _score(row: Row) -> float:
    return row.perplexity if row.perplexity is not None else math.inf


def _cells(scale: Scale, place: Place, scores: Mapping[str, float], measured: Mapping[str, Any]) -> Iterator[Cell]:
    made = design(scale)
    for policy in made.policies:
        for seed in (made.search_seed, *made.seeds):
            yield _cell(scale, place, ONE, seed, _alike(policy))
    yield from _judged(scale, place, FREE, _alike(NEVER))
    found = measured.get(pilot(scale, place))
    if found is not None:
        for arm in (MEAN, ALL, ROUNDS):
            yield from _judged(scale, place, arm, tuple(found["periods"][arm]))
            yield from _shuffled(scale, place, arm, tuple(found["periods"][arm]))
    tried, oracle = searched(scale, place, scores)
    yield from (_cell(scale, place, SEARCH, made.search_seed, periods) for periods in tried)
    if oracle is not None:
        yield from _judged(scale, place, ORACLE, oracle)
        yield from _shuffled(scale, place, ORACLE, oracle)


def _judged(scale: Scale, place: Place, arm: str, periods: Periods) -> Iterator[Cell]:
    for seed in design(scale).seeds:
        yield _cell(scale, place, arm, seed, periods)


def _shuffled(scale: Scale, place: Place, arm: str, periods: Periods) -> Iterator[Cell]:
    """The same periods on other blocks, drawn at random; none where all are equal."""
    others = sorted(set(permutations(periods)) - {periods})
    drawn = random.Random(f"{place.name} {arm}").sample(others, min(design(scale).draws, len(others)))
    for one in drawn:
        yield from _judged(scale, place, SHUFFLED[arm], one)


def best_alike(scale: Scale, place: Place, scores: Mapping[str, float]) -> str | None:
    """The policy for all blocks that is best on the search seed; None as long as one of them is not known."""
    made = design(scale)
    found = {
        policy: scores.get(_cell(scale, place, ONE, made.search_seed, _alike(policy)).run_id)
        for policy in made.policies
    }
    known = {policy: score for policy, score in found.items() if score is not None}
    return min(known, key=lambda policy: known[policy]) if len(known) == len(found) else None


def searched(scale: Scale, place: Place, scores: Mapping[str, float]) -> tuple[list[Periods], Periods | None]:
    """The oracle by search: from the best policy for all, one block after the other takes the policy that is best.

    Returns:
        What was or is to be tried, and what was found; None as long as something that was tried is not known.
    """
    made = design(scale)
    start = best_alike(scale, place, scores)
    if start is None:
        return [], None
    tried: list[Periods] = []
    present = _alike(start)
    for number in range(len(BLOCKS)):
        options = [(*present[:number], policy, *present[number + 1 :]) for policy in made.policies]
        tried += [one for one in options if one not in tried]
        found = {one: scores.get(_cell(scale, place, SEARCH, made.search_seed, one).run_id) for one in options}
        known = {one: score for one, score in found.items() if score is not None}
        if len(known) < len(found):
            return tried, None
        present = min(known, key=lambda one: known[one])
    return tried, present


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(scale: Scale, rows: Sequence[Row], runs: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Curvature and rounds of the pilot of each place, and the periods that follow; see `Staged`."""
    ended = {row.run for row in rows if row.state == "finished"}
    found = dict(known)
    for place in places(scale):
        run = pilot(scale, place)
        if run in ended and run not in found:
            found[run] = _measured(scale, runs / run)
    return found


def _measured(scale: Scale, run: Path) -> dict[str, Any]:
    # torch, which drawing and planning do without
    from twophase import spectrum  # noqa: PLC0415
    from twophase.tasks.lm.restored import restore  # noqa: PLC0415

    restored = restore(run)
    setting = spectrum.setting_of(restored.config)
    blocks = spectrum.measure(restored, BLOCKS, restored.batches(design(scale).batches), top=1)
    forecasts = [spectrum.forecast(block, setting) for block in blocks]
    shown = spectrum.seen(read_record(run), setting)
    rounds = [shown[name].whole for name in BLOCKS]
    policies = {
        MEAN: [one.at_mean for one in forecasts],
        ALL: [one.chosen.period for one in forecasts],
        # The estimate itself, whether or not it may be shown: the study asks what it is worth.
        ROUNDS: [spectrum.first_cancellation(setting, one.sigma) for one in rounds],
    }
    facts = {
        "periods": {arm: [NEVER if one is None else str(one) for one in found] for arm, found in policies.items()},
        "sigma": [one.progress["mid"].mean for one in forecasts],
        "low": [one.spread(0.05) for one in forecasts],
        "high": [one.spread(0.95) for one in forecasts],
        "unstable": [max(place.unstable for place in one.progress.values()) for one in forecasts],
        "rounds_sigma": [one.sigma for one in rounds],
        "rounds_error": [one.standard_error for one in rounds],
        "rounds_shown": [shown[name].interval is not None for name in BLOCKS],
        "log_loss": _predicted(forecasts, setting, design(scale).policies),
    }
    return standard(facts)


def _predicted(forecasts: Sequence[Forecast], setting: Setting, policies: Sequence[str]) -> dict[str, float]:
    """Logarithm of the loss at the end over that at the start, of all blocks together, for each policy for all."""
    shares = [one.curvature.parameters * float(one.curvature.nodes @ one.curvature.weights) for one in forecasts]
    total = math.fsum(shares)
    found = {}
    for policy in policies:
        period = setting.rounds if policy == NEVER else int(policy)
        logs = [
            math.log(share / total)
            + float(
                log_final_loss(setting.rule, one.sigma, setting.rounds, period, one.curvature.loss_weights)
                - math.log(0.5)
            )
            for share, one in zip(shares, forecasts, strict=True)
            if share > 0
        ]
        found[policy] = float(logsumexp(logs))
    return found
