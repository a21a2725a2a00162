"""The bench in one picture: perplexity over plain averaging's, of six methods at up to eight workloads.

    python experiments/bench/takeaway.py        3 s; writes results/takeaway.csv and docs/takeaway.png, prints the table

Tuned methods are those of registration 1 (`reference.csv`, held-out seeds). Nesterov at momentum 0.9 and learning rate
0.7 is of `regimes.csv`: each side at the best of four inner learning rates, two seeds. Inner Muon ran at `short` alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from tables import MAIN, NESTEROV, stored
from twophase.figures.style import MUTED, headline, look, new_figure

from common import Frame, dot_chart, script, show  # isort: skip - `tables` names its folder

DILOCO = "nesterov:lr=0.7:momentum=0.9"
LINES = {
    "averaging, inner Muon": "",
    "averaging, orthogonal filter": "averaging+filter=orthogonal",
    "Nesterov, tuned": NESTEROV,
    "Nesterov, tuned, restart every 3": f"{NESTEROV}@3",
    "Nesterov 0.9, restart every 3": f"{DILOCO}@3",
    "Nesterov 0.9, as DiLoCo": DILOCO,
}
LEVEL = 0.05
"""A median this near to 1 is drawn in grey."""


def table() -> Frame:
    """Return the ratio of each method's result to averaging's, by workload: geometric means over shared seeds."""
    tuned = stored()
    fixed: Frame = pd.read_csv(Path(__file__).parent / "regimes.csv")
    fixed["log"] = np.log(fixed["result"])
    best = fixed.groupby(["workload", "method", "inner.lr"])["log"].mean().groupby(level=["workload", "method"]).min()
    rows = []
    for words, method in LINES.items():
        for workload in MAIN if method else ("short",):
            if DILOCO in method:
                log = best[workload, method] - best[workload, "observe"]
            else:
                mine = tuned[workload, method] if method else tuned["inner-muon", "averaging"]
                averaging = tuned[workload, "averaging"]
                log = np.mean([np.log(mine[seed] / averaging[seed]) for seed in mine.keys() & averaging.keys()])
            rows.append({"method": words, "workload": workload, "ratio": float(np.exp(log))})
    return pd.DataFrame(rows)


def draw(rows: Frame) -> dict[str, Figure]:
    """Draw a line a method and a point a workload; those beyond the axis are written at its end."""
    figure, [[axes]] = new_figure(2.5)
    dot_chart(
        axes,
        [*LINES],
        xscale="log",
        xlim=(0.7, 1.7),
        xlabel="perplexity over plain averaging's (digits: loss; log scale)",
    )
    axes.axvline(1, color=MUTED, linewidth=0.8)
    for line, method in enumerate(LINES):
        ratios = rows[rows["method"] == method].set_index("workload")["ratio"]
        middle = ratios.median()
        color = MUTED if abs(middle - 1) < LEVEL else look(1 if middle < 1 else 2)["color"]
        axes.plot(ratios, [line] * len(ratios), "o", color=color, alpha=0.7)
        for workload, ratio in ratios[ratios > 1.7].items():
            axes.annotate(f"{workload} {ratio:.1f} →", (1.69, line - 0.12), ha="right", va="bottom", fontsize=7)
    ticks = (0.75, 0.8, 0.9, 1, 1.1, 1.25, 1.5)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    headline(figure, "Plain averaging is hard to beat", "a point for each workload; left of 1 is better than averaging")
    return {"": figure}


def main() -> None:
    """Write rows and figure, and print the table."""

    def report(rows: Frame) -> None:
        by_workload = rows.pivot(index="method", columns="workload", values="ratio")
        show(by_workload.reindex([*LINES])[[*MAIN]].reset_index(), 3)

    script(__doc__, "takeaway", draw, table, report=report)


if __name__ == "__main__":
    main()
