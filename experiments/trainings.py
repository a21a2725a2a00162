"""How the paper's figures are trained: three scales, and the settings of a sweep with their seeds taken together.

The paper writes its rules in EMA form, and its pictures look like the sum form. At one learning rate and momentum these
are two rules, so every figure has both. The controls, which the paper lacks, are those of `twophase.recipes.controls`:
momentum-free outer SGD, plain averaging, and runs without restarts at the mean outer gain of the restarted ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

import twophase
from common import Frame
from twophase.figures.heatmap import Panel, Tile
from twophase.recipes.pretraining import paper_150m
from twophase.runs.config import InnerConfig
from twophase.sweeps.grid import MOMENTUM_FREE, RUNS, Cell, Sweep
from twophase.sweeps.runner import run_sweep
from twophase.tasks.lm.config import DataConfig, ModelConfig, TrainConfig

FORMS = ("sum", "ema")
METHODS = {"heavy-ball": "heavy ball", "nesterov": "Nesterov"}
"""The paper's two outer rules, and their names for people."""
PERIOD = 3
"""The restart period of the paper's heatmaps."""


@dataclass(frozen=True)
class Scale:
    """Size of the experiments.

    Args:
        base: values that all runs share.
        lrs: outer learning rates.
        momenta: outer momenta.
        periods: restart periods K, in rounds.
        inner_steps: communication periods S of figure 4; it tunes at `short`.
        short: the paper's S = 128.
        long: the paper's S = 512.
        retain: shares of the buffer that a soft restart keeps (the paper's alpha).
        inject: weights with which it adds the pseudo-gradient (the paper's beta of the soft restart).
        seeds: every run is repeated for each.
    """

    base: TrainConfig
    lrs: tuple[float, ...]
    momenta: tuple[float, ...]
    periods: tuple[int, ...]
    inner_steps: tuple[int, ...]
    short: int
    long: int
    retain: tuple[float, ...]
    inject: tuple[float, ...]
    seeds: tuple[int, ...]


# Table 1 of the paper, which names neither its seeds nor its grid of soft restarts. Only a run's end is judged.
PAPER = Scale(
    base=replace(paper_150m(inner_steps=128), evaluate_every=0, log_every=0),
    lrs=(0.1, 0.3, 0.5, 0.7, 0.9, 1.1),
    momenta=(0.1, 0.3, 0.5, 0.7, 0.9),
    periods=(2, 3, 5, 7, 9, 11),
    inner_steps=(64, 128, 512, 1024, 2048),
    short=128,
    long=512,
    retain=(0.0, 0.2, 0.4, 0.6, 0.8),
    inject=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    seeds=(0,),
)
# The demo's model and text. 96, 48, 24, 12 and 6 rounds, where the paper's communication periods make 196 to 7.
LAPTOP = replace(
    PAPER,
    base=TrainConfig(inner=InnerConfig(lr=4e-3, schedule="cosine"), steps=480, inner_steps=5),
    lrs=(0.3, 0.7, 1.1),
    inner_steps=(5, 10, 20, 40, 80),
    short=5,
    long=20,
    retain=(0.0, 0.25, 0.5, 0.75),
    inject=(0.0, 0.25, 0.5, 1.0),
    seeds=(0, 1, 2),
)
# Does it run? Too small to show anything.
QUICK = Scale(
    base=TrainConfig(
        model=ModelConfig(layers=1, hidden_size=16, intermediate_size=44, heads=2),
        data=DataConfig(sequence_length=32, batch_size=4, validation_windows=64),
        inner=InnerConfig(lr=4e-3, schedule="cosine"),
        steps=24,
        inner_steps=4,
    ),
    lrs=(0.3, 1.1),
    momenta=(0.9,),
    periods=(2, 3),
    inner_steps=(4, 8),
    short=4,
    long=8,
    retain=(0.0, 0.5),
    inject=(0.0,),
    seeds=(0,),
)
SCALES = {"quick": QUICK, "laptop": LAPTOP, "paper": PAPER}


def trained(name: str, cells: Sequence[Cell], options: argparse.Namespace) -> Frame:
    """Train what is missing of some cells, below `options.out`, and return `settings` of their table.

    The figures share their runs. `twophase report` of the sweep's folder compares its methods seed by seed.
    """
    base, folder = options.scale.base, options.out / f"{name}-{options.train}"
    shared = (options.out / RUNS).absolute()
    for path in (shared, folder):
        path.mkdir(parents=True, exist_ok=True)
    if not (folder / RUNS).exists():
        (folder / RUNS).symlink_to(shared)
    run_sweep(Sweep(base, cells), folder, workers=options.workers).check(folder)
    return settings(twophase.load(folder).frame(), base.steps)  # type: ignore[union-attr]


def settings(cells: Frame, steps: int) -> Frame:
    """Take the seeds of each setting together; a diverged seed leaves the mean perplexity empty.

    `part` is the last word of a cell's arm. A gain-matched control has learning rate and restart of what it controls
    under `of_lr` and `of_restart`.
    """
    cells = cells.rename(columns=lambda name: name.removeprefix("outer."))
    by_run = cells.drop_duplicates("run").set_index("run")
    controlled = by_run[["lr", "restart"]].reindex(cells["control_of"])
    cells = cells.assign(
        part=cells["arm"].str.split(", ").str[-1],
        of_lr=controlled["lr"].to_numpy(),
        of_restart=controlled["restart"].to_numpy(),
        rounds=-(-steps // cells["inner_steps"]),
    )
    cells.loc[cells["arm"] == MOMENTUM_FREE, ["form", "method"]] = None  # without momentum all of them are one rule
    place = ["part", "form", "method", "inner_steps", "rounds", "momentum", "lr", "restart", "of_lr", "of_restart"]
    results = cells.groupby(place, sort=False, dropna=False)["perplexity"]
    mean = results.agg(lambda values: values.mean(skipna=False))
    table = pd.DataFrame({"perplexity": mean, "low": results.min(), "high": results.max(), "seeds": results.size()})
    return table.reset_index()


def ratio(rows: Frame, others: Frame, on: Sequence[str]) -> float:
    """Return the geometric mean of other / own perplexity over the settings that both have, above 1 if own is better.

    The others are found by their columns `of_lr` and `of_restart` where `on` names these.
    """
    own = [name.removeprefix("of_") for name in on]
    pairs = rows.merge(others, left_on=own, right_on=list(on), suffixes=("", "_other"))
    return float(np.exp(np.log(pairs["perplexity_other"] / pairs["perplexity"]).mean()))


def panel_of(rows: Frame, title: str, labels: tuple[str, str], x: Frame, y: Frame, *, every_y: Frame) -> Panel:
    """Return a heatmap of the perplexities of some rows, at their values on both axes; NaN is one that diverged.

    The y axis also has the values for which there is no row.
    """
    values = dict(zip(zip(x, y, strict=True), rows["perplexity"], strict=True))

    def tile(place: tuple[float, float]) -> Tile | None:
        if place not in values:
            return None
        return Tile("diverged", None) if np.isnan(values[place]) else Tile("finished", float(values[place]))

    across, up = sorted(x.unique()), sorted(every_y.unique())
    return Panel(title, *labels, across, up, [[tile((i, j)) for i in across] for j in up])


def references(rows: Frame, inner_steps: int) -> dict[str, float]:
    """Return the perplexity of momentum-free outer SGD at its best learning rate and of plain averaging."""
    free = rows[(rows["part"] == MOMENTUM_FREE) & (rows["inner_steps"] == inner_steps)]
    return {"momentum-free": free["perplexity"].min(), "averaging": free.loc[free["lr"] == 1, "perplexity"].iloc[0]}
