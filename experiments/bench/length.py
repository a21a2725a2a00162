"""Does the filter's lead over averaging last? The workload `short` in more rounds, on five seeds.

    python experiments/bench/length.py                      draws the stored results
    python experiments/bench/length.py --train laptop       an hour on one core; a repeated call resumes

Both methods run at three inner learning rates around the best of the bench. Each takes the rate that is best in the
mean of the seeds 0 and 1, and is compared on the seeds 100 to 104.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

import twophase
from twophase.compare.compare import compare
from twophase.config import update
from workloads import WORKLOADS

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from common import arguments, read, show, store

RATES = {"none": (5.66e-3, 8e-3, 11.3e-3), "orthogonal": (11.3e-3, 16e-3, 22.6e-3)}
"""Of averaging, without and with the filter."""
LENGTHS = {"quick": (2, 3), "laptop": (30, 60, 120, 240)}
"""Rounds of the runs, by scale."""
TUNING, FRESH = [0, 1], [100, 101, 102, 103, 104]


def trained(out: Path, rounds: tuple[int, ...], workers: int) -> pd.DataFrame:
    """Train all runs; return a row for each length."""
    base, rows = WORKLOADS["short"].base(), []
    for count in rounds:
        best, lrs = {}, {}
        for name, rates in RATES.items():
            values = {"steps": count * base.inner_steps, "outer.filter": name}
            folder, run = out / "length" / f"{name}-{count}", update(base, values)
            tuned = twophase.sweep("lm", {"inner.lr": rates, "seed": TUNING}, run, folder / "tuning", workers=workers)
            logs = np.log(tuned.frame().set_index(["inner.lr", "seed"])["perplexity"]).groupby(level=0).mean()
            lrs[name] = float(logs.idxmin())
            axes = {"inner.lr": [lrs[name]], "seed": FRESH}
            fresh = twophase.sweep("lm", axes, run, folder / f"fresh-{lrs[name]:g}", workers=workers).frame()
            best[name] = dict(fresh.set_index("seed")["perplexity"])
        found = compare(best["orthogonal"], best["none"], comparisons=len(rounds))
        means = {f"perplexity_{name}": np.exp(np.mean(np.log([*each.values()]))) for name, each in best.items()}
        rows.append(
            {"rounds": count, **{f"inner_lr_{name}": lr for name, lr in lrs.items()}, **means}
            | {"word": found.word, "ratio": found.ratio, "low": found.low, "high": found.high}
        )
    return pd.DataFrame(rows)


def main() -> None:
    """Show the stored results, or train them anew."""
    options = arguments(__doc__, scales=LENGTHS)
    if options.train is None:
        table = read("length")
    else:
        table = trained(options.out / options.train, LENGTHS[options.train], options.workers)
    show(table, digits=4)
    store("length", table, lambda _: {}, options.out)


if __name__ == "__main__":
    main()
