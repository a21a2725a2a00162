"""Do restart periods by block, as the theory gives them, beat one period for all in a trained language model?

    python experiments/blockwise/blockwise.py                       draws the stored results
    python experiments/blockwise/blockwise.py --train laptop        20 minutes on one core

For each width and communication period, under DiLoCo's usual rule, whose momentum needs restarts here:

* one K for all blocks, no restart at all, and plain averaging, the control without momentum;
* K_b from the curvature of a run without restarts (`spectrum.py`): by the first cancellation at its mean progress (the
  paper's form), or by the exact loss of all modes;
* K_b as an oracle: searched block by block;
* the controls: the same periods on other blocks, drawn at random.

Whatever is chosen by looking at results (the one K, the oracle) is chosen on seed 0 and compared on seeds 1, 2, 3. The
stored results also have K_b from the rounds of the run, by an estimate of sigma that is gone.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import logsumexp
from scipy.stats import rankdata

import twophase
from spectrum import LLAMA, Block, measure, restart_of, restore
from twophase.compare.compare import compare
from twophase.config import update
from twophase.figures.style import headline
from twophase.rule import OuterRule
from twophase.tasks.lm.config import TrainConfig

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from common import Frame, script, seed_chart, show
from trainings import PAPER, QUICK, SCALES, Scale

RULE = OuterRule(0.7, 0.9, nesterov=True)
SHOWN = ["workload", "method", "periods", "perplexity", "word", "ratio", "low", "high"]
"""Columns that are printed."""
Periods = tuple[str, ...]
"""A restart policy for each block, as text."""
ONE, AVERAGING, MEAN, ALL, ORACLE = "one K", "averaging", "K_b, mean sigma", "K_b, all modes", "K_b, oracle"
LABELS = {f"{ONE}: never": "no restarts", AVERAGING: AVERAGING} | {
    f"{kind} {name}": f"{words}{end}"
    for name, words in {
        "mean sigma": "periods of mean σ",
        "all modes": "periods of all modes",
        "rounds": "periods of the rounds' σ",
        "oracle": "periods searched",
    }.items()
    for kind, end in {"K_b,": "", "shuffled": ", shuffled"}.items()
}
"""Lines of the figure, by method."""


class Workload:
    """The runs at a width and a communication period, trained when they are asked for and kept below `folder`."""

    def __init__(self, scale: Scale, width: int, inner_steps: int, out: Path, workers: int) -> None:
        model, self.workers = scale.base.model, workers
        self.name, self.folder = f"width {width}, S={inner_steps}", out / f"{width}-{inner_steps}"
        values = {
            "model.hidden_size": width,
            "model.intermediate_size": model.intermediate_size * width // model.hidden_size,
            "inner_steps": inner_steps,
            "steps": 24 if scale is QUICK else scale.base.steps if scale is PAPER else scale.base.steps // 3,
            "outer.method": "nesterov",
            "sync.fragments": [f"{name}={pattern}" for name, pattern in LLAMA.items()],
            "sync.stagger": False,
        }
        self.base: TrainConfig = update(scale.base, values)
        self.averaging = update(self.base, {"outer.method": "averaging"})

    def perplexities(
        self, name: str, periods: Sequence[Periods], seeds: Sequence[int]
    ) -> dict[Periods, dict[int, float]]:
        """Train a sweep of policies and return perplexities by policy and seed, infinite where a run diverged."""
        texts = [tuple(f"{block}={policy}" for block, policy in zip(LLAMA, each, strict=True)) for each in periods]
        axes = {"sync.restart": texts, "seed": seeds} if periods else {"seed": seeds}
        base = self.base if periods else self.averaging
        sweep = twophase.sweep("lm", axes, base, self.folder / name, workers=self.workers, quiet=True)
        found = iter(sweep.frame()["perplexity"].fillna(np.inf))
        return {each: {seed: next(found) for seed in seeds} for each in periods or [("averaging",)]}

    def measured(self, batches: int) -> list[Block]:
        """Return the blocks of the run without restarts on seed 0, trained with its checkpoint."""
        config = replace(self.base, checkpoint_every=self.base.steps, keep_checkpoints=1)
        twophase.train("lm", config, self.folder / "pilot", quiet=True)
        return measure(restore(self.folder / "pilot"), LLAMA, batches)


def rows_of(
    work: Workload, policies: Sequence[str], seeds: Sequence[int], draws: int, batches: int
) -> list[dict[str, Any]]:
    """Train a workload stage by stage; return a row for each method and choice of periods."""
    rounds, methods = work.base.rounds, dict[str, list[Periods]]()
    alike = {policy: (policy,) * len(LLAMA) for policy in policies}
    searched = work.perplexities("search-0", list(alike.values()), [0])
    best = min(searched, key=lambda periods: searched[periods][0])
    chosen = best
    for number in range(len(LLAMA)):  # block by block, each takes the policy that is best with the others as they are
        options = [(*best[:number], policy, *best[number + 1 :]) for policy in policies]
        if new := [option for option in options if option not in searched]:
            searched |= work.perplexities(f"search-{number + 1}", new, [0])
        best = min(options, key=lambda option: searched[option][0])
    blocks = work.measured(batches)
    methods |= {f"{ONE}: {policy}": [periods] for policy, periods in alike.items()}
    methods[MEAN] = [tuple(restart_of(block.period_at_mean(RULE, rounds), rounds) for block in blocks)]
    methods[ALL] = [tuple(restart_of(block.period(RULE, rounds), rounds) for block in blocks)]
    methods[ORACLE] = [best]
    for method in (MEAN, ALL, ORACLE):
        others = sorted(set(permutations(methods[method][0])) - {*methods[method]})
        drawn = random.Random(f"{work.name} {method}").sample(others, min(draws, len(others)))
        methods |= {method.replace("K_b,", "shuffled"): drawn} if drawn else {}
    every = list(dict.fromkeys(periods for group in methods.values() for periods in group))
    results = work.perplexities("compared", every, seeds)
    results |= work.perplexities(AVERAGING, [], seeds)
    methods[AVERAGING] = [(AVERAGING,)]
    shares = np.array([block.trace for block in blocks])
    periods = [rounds if policy == "never" else int(policy) for policy in policies]
    logs = [[block.log_loss(RULE, rounds, period) for block in blocks] for period in periods]
    reached = [np.mean([*results[alike[policy]].values()]) for policy in policies]
    order = np.nan
    if len(policies) > 2:
        order = float(np.corrcoef(rankdata(logsumexp(logs, axis=1, b=shares)), rankdata(reached))[0, 1])
    control, rows = results[chosen], []
    for method, group in methods.items():
        # Of several draws the geometric mean, seed by seed.
        mine = {seed: float(np.exp(np.mean([np.log(results[each][seed]) for each in group]))) for seed in seeds}
        found = compare(mine, control, comparisons=len(methods) - 1)
        rows.append(
            {"workload": work.name, "method": method, "periods": " / ".join(map(",".join, group))}
            | {"perplexity": float(np.exp(np.mean(np.log([*mine.values()])))), "is_chosen": group == [chosen]}
            | {"word": found.word, "ratio": found.ratio, "low": found.low, "high": found.high}
            | {f"ratio_{seed}": control[seed] / mine[seed] for seed in seeds}
            | {"rank_correlation": order}
        )
    return rows


def train(options: argparse.Namespace) -> Frame:
    """Train all workloads of a scale."""
    scale, out = options.scale, options.out / options.train / "blockwise"
    size, seeds, rows = scale.base.model.hidden_size, [1, 2, 3], []
    widths, lengths = [size // 2, size], [scale.short, scale.long]
    policies, draws, batches = ["never", "5", "2", "1"], 2, 4
    if scale is QUICK:
        widths, lengths, policies, seeds, draws, batches = [size], [scale.short], ["never", "2"], [1], 1, 1
    if scale is PAPER:
        widths, policies, batches = [size], ["never", *map(str, scale.periods)], 1
    for width in widths:
        for inner_steps in lengths:
            work = Workload(scale, width, inner_steps, out, options.workers)
            rows += rows_of(work, policies, seeds, draws, batches)
    return pd.DataFrame(rows)


def draw(table: Frame) -> dict[str, Any]:
    """Draw a line a method and a dot a workload: what the chosen K for all reaches over what the method reaches."""
    others = table[~table["is_chosen"]]
    shown = pd.concat([others[others["method"] == method] for method in LABELS]).replace(LABELS)
    figure, axes = seed_chart(shown, "method", "workload", lambda ratio: ratio - 1)
    axes.set(xlim=(-45, 20), xlabel="lead over the best K for all, % of its perplexity (right of 0 is better)")
    title = "Periods by block do not beat one period for all"
    headline(figure, title, "dots: geometric means; strokes: three held-out seeds")
    return {"": figure}


if __name__ == "__main__":
    script(__doc__, "blockwise", draw, train=train, scales=SCALES, report=lambda table: show(table[SHOWN], digits=3))
