"""Which outer optimizer is better than averaging, each tuned? Registration 1, on the stored rows of protocol 1.

    python experiments/bench/tables.py          10 s; writes results/bench.csv, prints the tables

No run is made here. Families of comparisons are those of `registration-1.md`; some methods of protocol 1 cannot be
written any more, so that theirs are labels.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from run import compared, results_by_seed
from twophase.compare.compare import compare
from twophase.sweeps.table import format_table
from twophase.tuning.methods import CONTROL
from workloads import WORKLOADS

from common import script  # isort: skip - `run` names its folder

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

WORDS = ("better", "equal", "undecided", "worse")


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


def stored() -> dict[tuple[str, str], dict[int, float]]:
    """Return the stored results of each workload and method, by seed."""
    with (Path(__file__).parent / "reference.csv").open(encoding="utf-8", newline="") as file:
        return results_by_seed(csv.DictReader(file))


def table() -> list[dict[str, Any]]:
    """Return a row a comparison, with its family."""
    results = stored()
    return [{"family": title} | line for title, pairs in families().items() for line in compared(results, pairs)]


def short(method: str) -> str:
    """Return a method's text for a table: without where searches begin, and its parts in words.

    >>> short("nesterov:momentum=~0.6+filter=orthogonal"), short("memoryless+schedule=linear:final=2")
    ('nesterov+orthogonal', 'memoryless+rising rate')
    """
    for part, words in SHORT.items():
        method = method.replace(part, words)
    return method


def inner_muon() -> list[list[Any]]:
    """Return a line a method with AdamW at short against averaging with inner Muon, on the seeds that both have.

    It was not registered: the two workloads differ in the inner optimizer alone.
    """
    results, lines = stored(), []
    for method in (CONTROL, NESTEROV, *CANDIDATES, f"{NESTEROV}+filter=orthogonal"):
        found = compare(results["inner-muon", CONTROL], results["short", method])
        lines.append([short(method), *(f"{x:.3f}" for x in (found.ratio, found.low, found.high)), found.seeds])
    return lines


def summary(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return a line a method against averaging at the first eight workloads: words, geometric mean and least ratio."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [r for r in rows if (r["method"], r["control"]) == (method, CONTROL) and r["workload"] in MAIN]
        words, ratios = [row["word"] for row in mine], [row["ratio"] for row in mine]
        numbers = (f"{statistics.geometric_mean(ratios):.3f}", f"{min(ratios):.3f}")
        lines.append([short(method), *map(words.count, WORDS), *numbers])
    return sorted(lines, key=lambda line: (-line[1], -float(line[-2])))


def report(found: Any) -> None:
    """Print the tables of docs/bench.md."""
    rows = found.to_dict("records")
    print(format_table(["method", *WORDS, "mean ratio", "least ratio"], summary(rows)))
    counts = []
    for title in families():
        words = [row["word"] for row in rows if row["family"] == title]
        counts.append([title, len(words), *map(words.count, WORDS)])
    print(format_table(["family", "comparisons", *WORDS], counts))
    print(format_table(["with AdamW, over averaging with Muon", "ratio", "low", "high", "seeds"], inner_muon()))


def main() -> None:
    """Write the rows, and print their tables."""
    script(__doc__, "bench", lambda _: {}, lambda: pd.DataFrame(table()), report=report)


if __name__ == "__main__":
    main()
