"""Which outer optimizer is better than averaging, each tuned? Registration 1, on the stored rows of protocol 1.

    python experiments/bench/tables.py          10 s; writes results/bench.csv and docs/bench.png, prints the tables

No run is made here. Families of comparisons are those of `registration-1.md`; some methods of protocol 1 cannot be
written any more, so that theirs are labels.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from run import compared, results_by_seed
from twophase.figures.style import INK, headline, new_figure
from twophase.sweeps.table import format_table
from twophase.tuning.methods import CONTROL
from workloads import WORKLOADS

from common import arguments, store  # isort: skip - `run` names its folder

HEAVY_BALL, NESTEROV = "heavy-ball:momentum=~0.6", "nesterov:momentum=~0.6"
CANDIDATES = ("auto", "averaging+filter=orthogonal", "auto+filter=orthogonal")
"""Methods without an outer number to tune."""
RISING, RAMPED = "memoryless+schedule=linear:final=2", f"{HEAVY_BALL}+schedule=momentum:warmup=0"
SCHEDULES = (RISING, RAMPED, "ramp:~0.5", "along:~0.5", "gain:~1")
"""Controls of `auto`: what depends on the round alone, or is one part of it."""
MOMENTUM = tuple(f"{rule}{restart}" for rule in (HEAVY_BALL, NESTEROV) for restart in ("", "@3", "@K"))
OTHERS = ("adamw", "adamw@3", "muon", "muon@3", "slowmo", "slowmo@3", "averaging+readout=tail:rounds=3")
METHODS = ("memoryless", *CANDIDATES, *SCHEDULES, *MOMENTUM, f"{NESTEROV}+filter=orthogonal", *OTHERS)
ONE_REPLICA = ("gpa", "schedule-free")
"""Beside these for a single replica alone, for which Nesterov is SNOO and memoryless Lookahead."""
FEW = ("memoryless", *CANDIDATES, "ramp:~0.5", NESTEROV, f"{NESTEROV}@3")
"""At the workloads for a trend."""
MAIN = tuple(name for name, workload in WORKLOADS.items() if not workload.few)
TREND = tuple(name for name, workload in WORKLOADS.items() if workload.few)
SHORT = {
    ":momentum=~0.6": "", "~0.5": "C", "~1": "C", "filter=": "", "schedule=linear:final=2": "rising rate",
    "schedule=momentum:warmup=0": "momentum ramp", "readout=tail:rounds=3": "tail average",
}  # fmt: skip
"""Parts of a method's text, as tables show them."""
SIGNS = {"better": "+", "equal": "=", "undecided": "", "worse": "\N{MINUS SIGN}"}


def families() -> dict[str, list[tuple[str, str, str]]]:
    """Return the comparisons of registration 1: workload, method and control, by title of the family.

    Those of a family share a chance of 5 % for any wrong word among them.
    """

    def of_all(methods: Iterable[str], controls: Sequence[str]) -> list[tuple[str, str, str]]:
        triples = product(MAIN, methods, controls)
        return [each for each in triples if each[0] == "one-replica" or each[1] not in ONE_REPLICA]

    others = [method for method in (*METHODS, *ONE_REPLICA) if method not in CANDIDATES]
    restarted = [method for method in METHODS if "@" in method]
    return {
        "candidates against averaging": of_all(CANDIDATES, [CONTROL]),
        "candidates against schedule controls": of_all(CANDIDATES, ["memoryless", *SCHEDULES]),
        "other methods against averaging": of_all(others, [CONTROL]),
        "with a restart against without": [p for m in restarted for p in of_all([m], [m.partition("@")[0]])],
        "workloads for a trend, against averaging": [*product(TREND, FEW, [CONTROL])],
    }


def table() -> list[dict[str, Any]]:
    """Return a row a comparison, with its family."""
    with (Path(__file__).parent / "reference.csv").open(encoding="utf-8", newline="") as file:
        results = results_by_seed(csv.DictReader(file))
    return [{"family": title} | line for title, pairs in families().items() for line in compared(results, pairs)]


def short(method: str) -> str:
    """Return a method's text for a table: without where searches begin, and its parts in words.

    >>> short("nesterov:momentum=~0.6+filter=orthogonal"), short("memoryless+schedule=linear:final=2")
    ('nesterov+orthogonal', 'memoryless+rising rate')
    """
    for part, words in SHORT.items():
        method = method.replace(part, words)
    return method


def summary(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return a line a method against averaging at the first eight workloads: words, geometric mean and least ratio."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [r for r in rows if (r["method"], r["control"]) == (method, CONTROL) and r["workload"] in MAIN]
        words, ratios = [row["word"] for row in mine], [row["ratio"] for row in mine]
        numbers = (f"{statistics.geometric_mean(ratios):.3f}", f"{min(ratios):.3f}")
        lines.append([short(method), *map(words.count, SIGNS), *numbers])
    return sorted(lines, key=lambda line: (-line[1], -float(line[-2])))


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Draw each method's ratio to averaging at each workload, with its word as a sign."""
    lines = {(short(row["method"]), row["workload"]): row for row in rows if row["control"] == CONTROL}
    methods = [line[0] for line in summary(rows)]
    figure, [[axes]] = new_figure(5.2)
    gains = [[100 * (lines[m, w]["ratio"] - 1) if (m, w) in lines else np.nan for w in WORKLOADS] for m in methods]
    axes.imshow(gains, cmap="PuOr", vmin=-30, vmax=30, aspect="auto")
    for (i, j), gain in np.ndenumerate(gains):
        if np.isfinite(gain):
            text = f"{gain:+.1f} {SIGNS[lines[methods[i], [*WORKLOADS][j]]['word']]}".replace("-", "\N{MINUS SIGN}")
            axes.text(j, i, text, ha="center", va="center", fontsize=6, color="white" if abs(gain) > 20 else INK)
    axes.set_yticks(range(len(methods)), methods, fontsize=6.5)
    axes.set_xticks(range(len(WORKLOADS)), list(WORKLOADS), fontsize=6.5, rotation=20)
    reading = "lead over averaging in %, same budget each, held-out seeds; + better, \N{MINUS SIGN} worse, = equal"
    headline(figure, "Only orthogonalizing the pseudo-gradient clearly beats averaging", reading)
    return figure


def main() -> None:
    """Write rows and figure, and print the tables of docs/bench.md."""
    options, rows = arguments(__doc__), table()
    store("bench", pd.DataFrame(rows), lambda _: {"": draw(rows)}, options.out)
    print(format_table(["method", *SIGNS, "mean ratio", "least ratio"], summary(rows)))
    counts = []
    for title in families():
        words = [row["word"] for row in rows if row["family"] == title]
        counts.append([title, len(words), *map(words.count, SIGNS)])
    print(format_table(["family", "comparisons", *SIGNS], counts))


if __name__ == "__main__":
    sys.exit(main())
