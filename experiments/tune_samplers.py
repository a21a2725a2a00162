"""Which search `twophase tune` should use: Optuna's Gaussian process, its TPE, or the bench's bracketing.

    python experiments/tune_samplers.py digits        python experiments/tune_samplers.py lm

Each tries 16 settings of a method, three times, with another seed of its own and of the runs. What it has found is
trained once more on two held-out seeds. `runs/tune_samplers-TASK.csv` has a row a search.
"""

from __future__ import annotations

import math
import statistics
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna

sys.path.insert(1, str(Path(__file__).parent / "bench"))

from bracket import bracket
from twophase.api import run_config
from twophase.diloco.group import SingleProcess
from twophase.files import csv_text, write_atomic
from twophase.sweeps.table import format_table
from twophase.tasks.registry import task_of
from twophase.training import loop
from twophase.training.trainer import Trainer
from twophase.tuning.methods import Method, read_method
from twophase.tuning.search import propose

POINTS, BATCH, SEEDS, FRESH = 16, 2, (0, 1, 2), (100, 101)
METHODS = {"digits": ("averaging", "nesterov"), "lm": ("nesterov",)}
TASKS = {"digits": {"steps": 60, "inner_steps": 6}, "lm": {"steps": 32, "inner_steps": 4}}
SEARCHES = {"bracketing": None, "gp": optuna.samplers.GPSampler, "tpe": optuna.samplers.TPESampler}


def log_result(task: Any, config: Any) -> float:
    """Train a run; return the logarithm of its perplexity, else of its loss; infinite where it diverged."""
    with TemporaryDirectory() as folder:
        summary = loop.run(Trainer(task, config.plain(), SingleProcess()), Path(folder), None, discard=True)
    return math.inf if summary["diverged"] else math.log(summary.get("perplexity") or summary["validation_loss"])


def searched(search: str, task: Any, method: Method, seed: int) -> dict[str, Any]:
    """Let a search try its settings; return what it has found."""
    results: dict[Any, float] = {}
    while (count := min(BATCH, POINTS - len(results))) > 0:
        if search == "bracketing":
            points = bracket(method.scales, results, count)
        else:
            points = propose(method.scales, results, count, sampler=SEARCHES[search], seed=1000 * seed)
        if not points:
            break
        results |= {point: log_result(task, method.config(point, seed)) for point in points}
    best = min(results, key=lambda point: results[point])
    fresh = statistics.fmean(log_result(task, method.config(best, other)) for other in FRESH)
    found = {"settings": len(results), "tuned": results[best], "fresh": fresh}
    return {"method": method.text, "search": search, "seed": seed} | found


def main(name: str) -> None:
    """Compare the searches on a task."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    base = run_config(name, TASKS[name])
    task, rows = task_of(base), []
    for seed in SEEDS:
        for text in METHODS[name]:
            rows += [searched(search, task, read_method(text, base), seed) for search in SEARCHES]
            write_atomic(Path(f"runs/tune_samplers-{name}.csv"), csv_text(rows))
    head, lines = ("settings", "tuned", "fresh"), []
    for method, search in product(METHODS[name], SEARCHES):
        mine = [row for row in rows if (row["method"], row["search"]) == (method, search)]
        lines.append([method, search, *(f"{statistics.fmean(row[key] for row in mine):.4g}" for key in head)])
    print(format_table(["method", "search", *head], lines))


if __name__ == "__main__":
    main(sys.argv[1])
