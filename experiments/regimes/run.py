"""Where do outer momentum and restarts pay? Tuned methods against averaging at 62 small workloads.

`registration.md` says what is asked and how it is decided; it was written before the runs.

    python experiments/regimes/run.py --part rings --out runs/regimes    half an hour of one core; a repeat resumes
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
import torch

from common import DILOCO, Frame, read, write
from small_tasks import Cell, Outcome, Workload, train
from twophase import theory
from twophase.compare.compare import compare
from twophase.rule import OuterRule

CHOOSING, JUDGING = ("rings", "spirals", "teacher", "linear"), ("modular", "digits", "conv", "deep")
"""Tasks on which thresholds are chosen, and those on which they are judged."""
ROUNDS = {4: 80, 16: 40, 64: 20}
"""Rounds by inner steps a round."""
START = {"sgd": 0.1, "momentum": 0.01, "adamw": 0.008, "muon": 0.016}
"""Inner rate in the middle of the first ladder."""
PERIODS = (0, 3, 7)
_RULES = [OuterRule(*numbers) for numbers in product((0.3, 0.7, 1.0), (0.3, 0.6, 0.9), (False, True))]
LONGEST = 40
"""Rates of a ladder that goes on because its best is at an end."""
Found = dict[Cell, dict[int, Outcome]]


class Plan(NamedTuple):
    """What is tried at a workload; the defaults are those of the 62 small ones, `llama.py` has fewer.

    Args:
        train: trains cells on seeds.
        watch: trains a cell on the seeds that choose, for its signals; None where `train` has them.
        seeds, held_out: the seeds that choose and those that judge.
        fine: inner rates of averaging's ladder over its middle.
        factors: inner rates of all other methods over averaging's best.
        groups: outer rules by method.
        tuned, more: periods of which the tuned one is the best, at all settings and at the best ones of `PERIODS`.
    """

    train: Callable[[Workload, Sequence[int], set[Cell]], Found] = train
    watch: Callable[[Workload, Cell], dict[int, Outcome]] | None = None
    seeds: Sequence[int] = range(3)
    held_out: Sequence[int] = range(100, 115)
    fine: Sequence[float] = tuple(2 ** (k / 2) for k in range(-8, 9))
    factors: Sequence[float] = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
    groups: Mapping[str, Sequence[OuterRule]] = {
        "usual": [DILOCO],
        "heavy ball": [rule for rule in _RULES if not rule.nesterov],
        "nesterov": [rule for rule in _RULES if rule.nesterov],
    }
    tuned: Sequence[int] = (3, 7)
    more: Sequence[int] = (2, 4, 5, 10, 15)


def workloads(task: str) -> list[tuple[str, Workload]]:
    """Return the workloads of a task: each inner optimizer with two batches; S, replicas and schedule take turns."""
    shift, found = (*CHOOSING, *JUDGING).index(task), []
    for i, (inner, batch) in enumerate(product(START, (16, 64))):
        inner_steps = tuple(ROUNDS)[(i + shift) % 3]
        replicas, schedule = (2, 8)[(i // 2 + i + shift) % 2], ("cosine", "wsd")[(i // 4 + i + shift // 2) % 2]
        steps = inner_steps * ROUNDS[inner_steps]
        if (task, inner) != ("linear", "muon"):  # which has no matrix for Muon
            found.append((inner, Workload(task, inner_steps, steps, batch, replicas, schedule)))
    return found


def excesses(outcomes: dict[int, Outcome]) -> dict[int, float]:
    """Return the excess by seed, at least what float32 tells from 0; infinite where a run diverged."""
    return {seed: max(outcome.excess, 1e-12) for seed, outcome in outcomes.items()}


def score(outcomes: dict[int, Outcome]) -> float:
    """Return the geometric mean of the excess over the seeds, by which settings are chosen."""
    return geometric_mean(excesses(outcomes).values())


def times(worse: dict[int, Outcome], better: dict[int, Outcome]) -> float:
    """Return the median over the seeds of the ratio of two excesses; where both diverged it is 1."""
    pairs = zip(excesses(worse).values(), excesses(better).values(), strict=True)
    return median(1.0 if a == b else a / b for a, b in pairs)


def best_of(found: Found, cells: Iterable[Cell]) -> Cell:
    """Return the cell with the least score."""
    return min(cells, key=lambda cell: score(found[cell]))


def train_new(work: Workload, cells: Iterable[Cell], found: Found, plan: Plan) -> None:
    """Train the cells that are not there yet, on the seeds that choose."""
    if missing := set(cells) - found.keys():
        found |= plan.train(work, plan.seeds, missing)


def tune(work: Workload, settings: Sequence[Cell], found: Found, plan: Plan) -> tuple[Cell, bool]:
    """Return the best of some settings at several inner rates, and whether it is interior; rates are added until so."""
    rates = sorted({cell.lr for cell in settings})
    shapes = {cell._replace(lr=0.0) for cell in settings}
    while True:
        train_new(work, (shape._replace(lr=lr) for shape in shapes for lr in rates), found, plan)
        best = best_of(found, [shape._replace(lr=lr) for shape in shapes for lr in rates])
        step = rates[1] / rates[0]
        interior = math.isfinite(score(found[best])) and rates[0] < best.lr < rates[-1]
        if interior or len(rates) > LONGEST:
            return best, interior
        rates = [rates[0] / step, *rates] if best.lr == rates[0] else [*rates, rates[-1] * step]
        # of all settings only the best goes beyond the ends: as good a bound, at a tenth of the time
        shapes = {best._replace(lr=0.0)}


def signals(outcomes: dict[int, Outcome]) -> dict[str, float]:
    """Return what averaging's own run shows, the median over the seeds; early and late are the thirds of its rounds."""
    rows = []
    for outcome in outcomes.values():
        square, last, second, agreement = np.array(outcome.path).T
        third = len(square) // 3
        early, late = slice(1, third), slice(-third, None)
        cosine = last[1:] / np.sqrt(square[1:] * square[:-1])
        rows.append(
            {
                "agreement": agreement[early].mean(),
                "late_agreement": agreement[late].mean(),
                "cosine": cosine[: third - 1].mean(),
                "late_cosine": cosine[-third:].mean(),
                "shrunk": 1 - math.sqrt(square[late].mean() / square.max()),
                # g_t+1 = (1 - sigma) g_t + noise, and noise has no part in products of different rounds
                "sigma": 1 - second[2:third].sum() / last[2:third].sum(),
            }
        )
    return {str(name): float(value) for name, value in pd.DataFrame(rows).median().items()}


def study(inner: str, work: Workload, middle: float, plan: Plan) -> Frame:
    """Tune all methods on some seeds and compare them with averaging on others; return a row for each method."""
    found: Found = {}
    base, decided = tune(work, [Cell(middle * factor, inner=inner) for factor in plan.fine], found, plan)
    doubled = base._replace(lr=2 * base.lr)
    measured = signals(plan.watch(work, base) if plan.watch else found[base])
    rates = [base.lr * factor for factor in plan.factors]
    chosen = {"averaging": base}
    for name, group in plan.groups.items():
        of_periods: dict[int, Cell] = {}
        for period in PERIODS:
            cells = [Cell(lr, rule, period, inner=inner) for lr in rates for rule in group]
            of_periods[period], _ = tune(work, cells, found, plan)
            chosen[f"{name}, K = {period}" if period else name] = of_periods[period]
        near = [cell._replace(period=period) for cell in of_periods.values() for period in plan.more]
        train_new(work, near, found, plan)
        chosen[f"{name}, K tuned"] = best_of(found, [*map(of_periods.__getitem__, plan.tuned), *near])
        sigma = min(max(measured["sigma"], 1e-3), 1.0)
        exact = {rule: int(theory.rounded_period(rule, sigma)) for rule in group}
        cells = [Cell(lr, rule, period, inner=inner) for lr in rates for rule, period in exact.items()]
        chosen[f"{name}, K of the theory"], _ = tune(work, cells, found, plan)
    for kind in ("rising", "auto", "filter"):
        if kind != "filter" or work.task != "linear":  # a vector of weights has one singular value
            chosen[kind], _ = tune(work, [Cell(lr, kind=kind, inner=inner) for lr in rates], found, plan)
    held_out = plan.train(work, plan.held_out, {*chosen.values(), doubled})
    about = {**work._asdict(), "inner": inner, "settings": len(found)} | measured
    about |= {"decided": decided, "doubled": times(held_out[doubled], held_out[base])}
    rows: list[dict[str, Any]] = []
    for name, cell in chosen.items():
        said = compare(excesses(held_out[cell]), excesses(held_out[base]), comparisons=len(chosen) - 1)
        row = {
            "method": name,
            "inner_lr": cell.lr,
            "outer": cell.rule.describe(),
            "K": cell.period,
            "tuned": score(found[cell]),
        }
        row |= {"excess": median(excesses(held_out[cell]).values()), "gain": times(held_out[base], held_out[cell])}
        rows.append(about | row | {"word": said.word, "low": said.low, "high": said.high, "diverged": said.diverged})
    return pd.DataFrame(rows)


def studies(
    name: str, works: Iterable[tuple[str, Workload]], out: Path, middle: Mapping[str, float], plan: Plan
) -> None:
    """Study some workloads; the table `name` gets the rows of each as it ends, and those that it has are left out."""
    parts = [read(name, out)] if (out / f"{name}.csv").exists() else []
    done = set(zip(parts[0]["inner"], parts[0]["batch"], strict=True)) if parts else set()
    for inner, work in works:
        if (inner, work.batch) not in done:
            parts.append(study(inner, work, middle[inner], plan))
            write(name, pd.concat(parts), out)


def main() -> None:
    """Run the parts; each has a table of its own, to which every workload adds its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--part", choices=[*CHOOSING, *JUDGING], action="append", help="a task; several times for several"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for task in options.part or [*CHOOSING, *JUDGING]:
        studies(f"regimes-{task}", workloads(task), options.out, START, Plan())


if __name__ == "__main__":
    main()
