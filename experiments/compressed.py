"""Does it matter how the pseudo-gradients travel: in float32, bfloat16 or int8?

    python experiments/compressed.py                       draws the stored results
    python experiments/compressed.py --train laptop        20 minutes on one core

Every run is done once for each compression, all else equal: both rules at a small and at DiLoCo's usual momentum, with
and without restarts, at the short communication period, which sends most. Each is compared with the float32 run of its
own seed; the control is the effect of the seed alone. A compressed run is another trajectory, not float32's plus an
error: the effect of rounding grows over a run to the size of any other small change.

The stored results are of an engine that had error feedback in the second stage, too, and of a third compression, top-k,
of which `topk.py` is a study.

Source: `twophase.diloco.compression`; the paper sends float32.
"""

from __future__ import annotations

import argparse
import math
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

import twophase
from common import Frame, script, seed_chart, show
from trainings import SCALES
from twophase.compare.compare import compare
from twophase.config import update
from twophase.diloco.compression import COMPRESSIONS
from twophase.figures.style import headline

LR = 0.7
AXES = {"outer.method": ("heavy-ball", "nesterov"), "outer.momentum": (0.5, 0.9), "outer.restart": ("never", "3")}
"""Settings: at the smaller momentum the demo works, at the larger it needs restarts."""
ALL = "all settings"
"""Geometric mean over the settings, seed by seed."""


def train(options: argparse.Namespace) -> Frame:
    """Train all runs; return a row for each compression and setting, compared with float32 seed by seed."""
    axes = AXES | {"sync.compression": COMPRESSIONS, "seed": options.scale.seeds}
    base = update(options.scale.base, {"outer.method": "nesterov", "outer.lr": LR})
    folder = options.out / options.train / "compressed"
    frame = twophase.sweep("lm", axes, base, folder, workers=options.workers).frame()
    logs = np.log(frame.set_index([*axes])["perplexity"].fillna(math.inf)).sort_index()
    exact, rows = logs.xs(COMPRESSIONS[0], level="sync.compression"), []
    settings, lossy = list(product(*AXES.values())), len(COMPRESSIONS) - 1
    for name in COMPRESSIONS[1:]:
        mine = logs.xs(name, level="sync.compression")
        for method, momentum, restart in settings:
            sides = [side.loc[method, momentum, restart] for side in (mine, exact)]
            words = f"{method} {momentum:g}, {'no restart' if restart == 'never' else f'K = {restart}'}"
            rows.append(row_of(words, name, *sides, comparisons=lossy * len(settings)))
        means = [side.groupby(level="seed").mean() for side in (mine, exact)]
        rows.append(row_of(ALL, name, *means, comparisons=lossy))
    return pd.DataFrame(rows)


def row_of(setting: str, name: str, mine: pd.Series, exact: pd.Series, *, comparisons: int) -> dict[str, Any]:
    """Compare log perplexities by seed with those in float32; `seed_sd` is what another seed changes there."""
    found = compare(dict(np.exp(mine)), dict(np.exp(exact)), comparisons=comparisons)
    return {
        "setting": setting, "compression": name, "float32": float(np.exp(exact).mean()), "seed_sd": exact.std(),
        "word": found.word, "ratio": found.ratio, "low": found.low, "high": found.high,
        **{f"ratio_{seed}": float(np.exp(gap)) for seed, gap in (exact - mine).items()},
    }  # fmt: skip


def draw(table: pd.DataFrame) -> dict[str, Any]:
    """Draw a line a setting, on the spread of the seeds in float32: a stroke a seed and a dot a compression."""
    figure, axes = seed_chart(table, "setting", "compression", lambda ratio: 1 / ratio - 1, apart=0.22)
    spread = 100 * table.drop_duplicates("setting")["seed_sd"]
    axes.barh(range(len(spread)), 2 * spread, left=-spread, color="#eeeeee", zorder=-1)
    axes.set_xlabel("perplexity against float32 of the same seed, % (left of 0 is better); grey: another seed")
    headline(figure, "bfloat16 and int8 change less than the seed does", "strokes: seeds; dots: geometric means")
    return {"": figure}


if __name__ == "__main__":
    script(__doc__, "compressed", draw, train=train, scales=SCALES, report=lambda table: show(table, digits=3))
