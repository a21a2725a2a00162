"""The bench: an outer optimizer, or all of the protocol's, against plain averaging, each tuned with the same budget.

    python experiments/bench/run.py "averaging outer.filter=orthogonal" --size quick --out runs/bench
    python experiments/bench/run.py --reference --out runs/reference         40 hours of one thread

A METHOD is written as for `twophase tune`. A restart policy of your own is `averaging outer.restart=NAME`, if
`TWOPHASE_POLICIES` names its module. `results.csv` in --out has a row for each workload, method and held-out seed,
`comparisons.csv` each comparison with averaging. A repeated call resumes the bench.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # `policies`, of all experiments

import pandas as pd

from policies import share_with_workers  # pyright: ignore[reportAttributeAccessIssue] - tests have one, too
from twophase.compare.compare import compare
from twophase.errors import RunError, UsageError
from twophase.files import write_atomic
from twophase.sweeps.table import format_table
from twophase.tuning.methods import CONTROL
from twophase.tuning.tune import Tuning, run_tuning
from workloads import FEW, METHODS, PROTOCOL, SIZES, WORKLOADS

CSV: Any = {"index": False, "float_format": "%.12g", "lineterminator": "\n"}
TUNED = ("inner.lr", "outer.lr", "outer.momentum", "outer.restart")
"""Tuned values, in the order of their columns."""


def results_by_seed(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[int, float]]:
    """Return the results of each workload and method by held-out seed, infinite where a run diverged."""
    results: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        by_seed = results.setdefault((row["workload"], row["method"]), {})
        by_seed[int(row["seed"])] = float("inf") if row["result"] in ("", None) else float(row["result"])
    return results


def compared(
    results: Mapping[tuple[str, str], Mapping[int, float]], pairs: Sequence[tuple[str, str, str]]
) -> list[dict[str, Any]]:
    """Compare (workload, method, control) for each pair; all words together are wrong with probability 0.05."""
    lines = []
    for workload, method, control in pairs:
        found = compare(results[workload, method], results[workload, control], comparisons=len(pairs))
        names = {"workload": workload, "method": method, "control": control, "word": found.word}
        lines.append(names | {"ratio": found.ratio, "low": found.low, "high": found.high})
    return lines


def run_workload(name: str, methods: Sequence[str], size: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tune the methods and averaging at a workload; return a row for each method and held-out seed.

    A method that diverged at every setting counts as diverged on every seed.
    """
    budget = SIZES[size]
    workload = budget.workloads[name]
    points, fresh = budget.at(workload)
    tuning = Tuning(workload.base(), methods or (FEW if workload.few else METHODS), points, None, budget.seeds, fresh)
    rows = []
    for tuned in run_tuning(tuning, options.out / name, workers=options.workers, quiet=options.quiet).methods:
        about = {path: (tuned.numbers or {}).get(path) for path in TUNED}
        about |= {"settings": tuned.settings, "open": tuned.open, "tuned": tuned.tuned}
        for seed, result in zip(fresh, tuned.results or [None] * len(fresh), strict=True):
            row = {"protocol": PROTOCOL, "workload": name, "method": tuned.method, "seed": seed, "result": result}
            rows.append(row | about | {"seconds": round(tuned.seconds, 1)})
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", metavar="METHOD", help="METHOD [PATH=VALUE ...], in quotes")
    parser.add_argument("--reference", action="store_true", help="run the protocol's own methods")
    parser.add_argument("--size", choices=list(SIZES), help="budget (quick; of --reference full)")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), metavar="NAME", help="only some of them")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the results (%(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="worker processes (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    options = parser.parse_args(words)
    if (options.method is not None) == options.reference:
        parser.error("give a METHOD, or --reference")
    share_with_workers()  # parts of `auto`, its controls
    size, methods = ("full", []) if options.reference else ("quick", [options.method])
    size, rows = options.size or size, list[dict[str, Any]]()
    for name in options.workloads or SIZES[size].workloads:
        try:
            rows += run_workload(name, methods, size, options)
        except (UsageError, RunError) as error:  # such as a machine without that text
            print(f"{name}: not run here. {error}", file=sys.stderr)
            continue
        write_atomic(options.out / "results.csv", pd.DataFrame(rows).to_csv(**CSV))
    if not rows:
        return 2
    results = results_by_seed(rows)
    lines = compared(results, [(workload, method, CONTROL) for workload, method in results if method != CONTROL])
    write_atomic(options.out / "comparisons.csv", pd.DataFrame(lines).to_csv(**CSV))
    print(options.out / "comparisons.csv")
    head = ["workload", "method", "word", "ratio", "low", "high"]
    print(format_table(head, [[f"{x:.3f}" if isinstance(x := line[k], float) else x for k in head] for line in lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
