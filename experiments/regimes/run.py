"""Where do outer momentum and restarts pay? Tuned methods against averaging at 62 small workloads (`registration.md`).

python experiments/regimes/run.py --part rings --out runs/regimes    half an hour of one core; a repeat resumes
(replicas and periods are the parts of `registration-3.md`)
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
import torch

from common import AVERAGING, DILOCO, RESULTS, Frame, read, read_text, write
from small_tasks import Cell, Outcome, Workload, train
from twophase import theory
from twophase.compare.compare import compare
from twophase.rule import OuterRule

CHOOSING, JUDGING = ("rings", "spirals", "teacher", "linear"), ("modular", "digits", "conv", "deep")
"""Tasks on which thresholds are chosen, and those on which they are judged."""
ROUNDS = {4: 80, 16: 40, 64: 20}  # by inner steps a round
START = {"sgd": 0.1, "momentum": 0.01, "adamw": 0.008, "muon": 0.016}
LONGEST = 40  # rates of a ladder that goes on because its best is at an end
HEAVY_BALL = [OuterRule(*numbers) for numbers in product((0.3, 0.7, 1.0), (0.3, 0.6, 0.9))]
NESTEROV = [OuterRule(rule.lr, rule.momentum, nesterov=True) for rule in HEAVY_BALL]
PLACE = ["inner", *Workload._fields]  # what tells workloads apart
PAYS = 1.1  # the gain above which momentum pays
Found = dict[Cell, dict[int, Outcome]]


class Plan(NamedTuple):
    """What is tried at a workload; the defaults are those of the 62 small ones, other programs have fewer."""

    train: Callable[[Workload, Sequence[int], set[Cell]], Found] = train
    watch: Callable[..., dict[int, Outcome]] | None = None  # trains one cell and notes its path, where `train` does not
    seeds: Sequence[int] = range(3)  # those that choose
    held_out: Sequence[int] = range(100, 115)  # those that judge
    start: Mapping[str, float] = START  # averaging's inner rate in the middle of its first ladder
    fine: Sequence[float] = tuple(2 ** (k / 2) for k in range(-8, 9))  # its rates, over this
    factors: Sequence[float] = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)  # rates of the other methods, over averaging's best
    groups: Mapping[str, Sequence[OuterRule]] = {"usual": [DILOCO], "heavy ball": HEAVY_BALL, "nesterov": NESTEROV}
    periods: Sequence[int] = (0, 3, 7)  # tried at all settings; 0 is no restart
    tuned: Sequence[int] = (3, 7)  # K tuned is the best of these
    more: Sequence[int] = (2, 4, 5, 10, 15)  # and of these at the best settings of each of `periods`
    kinds: Sequence[str] = ("rising", "auto", "filter")


def workloads(task: str) -> Iterator[tuple[str, Workload]]:
    """Return the workloads of a task: each inner optimizer with two batches; S, replicas and schedule take turns."""
    shift = (*CHOOSING, *JUDGING).index(task)
    for i, (inner, batch) in enumerate(product(START, (16, 64))):
        inner_steps, rounds = tuple(ROUNDS.items())[(i + shift) % 3]
        replicas, schedule = (2, 8)[(i // 2 + i + shift) % 2], ("cosine", "wsd")[(i // 4 + i + shift // 2) % 2]
        if (task, inner) != ("linear", "muon"):  # which has no matrix for Muon
            yield inner, Workload(task, inner_steps, inner_steps * rounds, batch, replicas, schedule)


def score(outcomes: dict[int, Outcome]) -> float:
    """Return the geometric mean of the excess over the seeds, by which settings are chosen."""
    return geometric_mean(outcome.excess for outcome in outcomes.values())


def times(worse: dict[int, Outcome], better: dict[int, Outcome]) -> float:
    """Return the median over the seeds of the ratio of two excesses; where both diverged it is 1."""
    pairs = zip(worse.values(), better.values(), strict=True)
    return median(1.0 if a.excess == b.excess else a.excess / b.excess for a, b in pairs)


def best_of(work: Workload, cells: Sequence[Cell], found: Found, plan: Plan) -> Cell:
    """Return the cell with the least score; those that are not there yet are trained on the seeds that choose."""
    if missing := set(cells) - found.keys():
        found |= plan.train(work, plan.seeds, missing)
    return min(cells, key=lambda cell: score(found[cell]))


def tune(work: Workload, rates: Sequence[float], shapes: Sequence[Cell], found: Found, plan: Plan) -> tuple[Cell, bool]:
    """Return the best of some settings at several inner rates, and whether it is interior; rates are added until so."""
    while True:
        best = best_of(work, [shape._replace(lr=lr) for shape in shapes for lr in rates], found, plan)
        interior = math.isfinite(score(found[best])) and rates[0] < best.lr < rates[-1]
        if interior or len(rates) > LONGEST:
            return best, interior
        step = rates[1] / rates[0]
        rates = [rates[0] / step, *rates] if best.lr == rates[0] else [*rates, rates[-1] * step]
        shapes = [best]  # only the best setting goes beyond the ends: as good a bound, at a tenth of the time


def signals(outcomes: dict[int, Outcome]) -> dict[str, float]:
    """Return what averaging's own run shows, the median over the seeds; early and late are the thirds of its rounds."""
    square, last, second, agreement = np.array([outcome.path for outcome in outcomes.values()]).transpose(2, 0, 1)
    third = square.shape[1] // 3
    early, late, cosine = np.s_[:, 1:third], np.s_[:, -third:], last[:, 1:] / np.sqrt(square[:, 1:] * square[:, :-1])
    by_seed = {
        "agreement": agreement[early].mean(1),
        "late_agreement": agreement[late].mean(1),
        "cosine": cosine[:, : third - 1].mean(1),
        "late_cosine": cosine[late].mean(1),
        "shrunk": 1 - np.sqrt(square[late].mean(1) / square.max(1)),
        # g_t = (1 - sigma) g_t-1 + noise; both inner products are with g_t-2, in which its noise has no part
        "sigma": 1 - second[:, 2:third].sum(1) / last[:, 1 : third - 1].sum(1),
    }
    return {str(name): float(value) for name, value in pd.DataFrame(by_seed).median().items()}


def study(inner: str, work: Workload, plan: Plan) -> Frame:
    """Tune all methods on some seeds and compare them with averaging on others; return a row for each method."""
    found: Found = {}
    base, decided = tune(work, [plan.start[inner] * each for each in plan.fine], [Cell(0, inner=inner)], found, plan)
    doubled, rates = base._replace(lr=2 * base.lr), [base.lr * factor for factor in plan.factors]
    measured = signals(plan.watch(work, plan.seeds, base) if plan.watch else found[base])
    sigma, chosen = min(max(1e-3, measured["sigma"]), 1.0), {"averaging": base}

    def tuned(periods: Mapping[OuterRule, int], kind: str = "plain") -> Cell:
        shapes = [Cell(0, rule, period, kind, inner) for rule, period in periods.items()]
        return tune(work, rates, shapes, found, plan)[0]

    for name, group in plan.groups.items():
        best = {period: tuned(dict.fromkeys(group, period)) for period in plan.periods}
        chosen |= {f"{name}, K = {period}" if period else name: cell for period, cell in best.items()}
        near = [cell._replace(period=period) for cell in best.values() for period in plan.more]
        if plan.tuned:
            chosen[f"{name}, K tuned"] = best_of(work, [*(best[period] for period in plan.tuned), *near], found, plan)
        chosen[f"{name}, K of the theory"] = tuned({rule: int(theory.rounded_period(rule, sigma)) for rule in group})
    for kind in plan.kinds:
        if kind != "filter" or work.task != "linear":  # a vector of weights has one singular value
            chosen[kind] = tuned({AVERAGING: 0}, kind)
    held_out = plan.train(work, plan.held_out, {*chosen.values(), doubled})
    excess = {cell: {seed: each.excess for seed, each in by_seed.items()} for cell, by_seed in held_out.items()}
    about = work._asdict() | {"inner": inner, "settings": len(found)} | measured
    about |= {"decided": decided, "doubled": times(held_out[doubled], held_out[base])}
    rows = list[dict[str, Any]]()
    for name, cell in chosen.items():
        said = compare(excess[cell], excess[base], comparisons=len(chosen) - 1)
        row = {"method": name, "inner_lr": cell.lr, "outer": cell.rule.describe(), "K": cell.period}
        row |= {"tuned": score(found[cell]), "excess": median(excess[cell].values())}
        row |= {"gain": times(held_out[base], held_out[cell])}
        rows.append(about | row | {"word": said.word, "low": said.low, "high": said.high, "diverged": said.diverged})
    return pd.DataFrame(rows)


def gathered(name: str) -> Frame:
    """Return the tables of all parts of a study, which lie in one folder of `results`."""
    parts = sorted((RESULTS / name).glob("*.csv"))
    return pd.concat([read_text(path.read_text(encoding="utf-8")) for path in parts])


def main(doc: str | None, tables: Mapping[str, list[tuple[str, Workload]]], plan_of: Callable[..., Plan]) -> None:
    """Study the workloads of parts by plans of (out, part, inner, work); `regimes-PART` gets the rows of each."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--part", choices=list(tables), action="append", help="a part; several times for several")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--trial", action="store_true", help="a workload of each part in nine steps, on other seeds")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.part or tables:
        name = f"{'trial' if options.trial else 'regimes'}-{part}"
        parts = [read(name, options.out)] if (options.out / f"{name}.csv").exists() else []
        done = {place for rows in parts for place in rows[PLACE].itertuples(index=False, name=None)}
        for inner, work in tables[part][-1 if options.trial else 0 :]:
            plan = plan_of(options.out, part, inner, work)
            if options.trial:
                work = work._replace(inner_steps=1, steps=9)  # noqa: PLW2901 - the same in short
                plan = plan._replace(seeds=[900], held_out=[901, 902], fine=(2.0, 4.0), groups={"usual": [DILOCO]})
            if (inner, *work) not in done:
                parts.append(study(inner, work, plan))
                write(name, pd.concat(parts), options.out)


def further() -> tuple[dict[str, list[tuple[str, Workload]]], Callable[..., Plan]]:
    """Return the parts of `registration-3.md`, and the plan of any part."""
    stored = gathered("regimes")
    tuned = stored[stored["method"].isin(["heavy ball", "nesterov"])].sort_values("tuned").groupby(PLACE).first()
    paying, rates = set(tuned.index[tuned["gain"] > PAYS]), stored.groupby(PLACE)["inner_lr"].first()  # averaging's
    tasks, sizes = (*CHOOSING, "modular", "digits"), ((16, 2), (64, 2), (16, 8))  # batch of a replica, replicas
    replicas = [("adamw", Workload(task, 64, 1280, *size)) for task in tasks for size in sizes]
    by_part = {"replicas": Plan(seeds=range(10, 13), held_out=range(200, 215), groups={"nesterov": NESTEROV}, kinds=())}
    groups = {"heavy ball": HEAVY_BALL, "nesterov": NESTEROV}
    about = Plan(fine=(0.5**0.5, 1.0, 2**0.5), groups=groups, periods=(), tuned=(), kinds=())
    periods = [pair for task in (*CHOOSING, *JUDGING) for pair in workloads(task) if (pair[0], *pair[1]) in paying]

    def plan_of(_: Path, part: str, inner: str, work: Workload) -> Plan:
        if part == "periods":
            return about._replace(start={inner: rates[(inner, *work)]})
        return by_part.get(part, Plan())

    return {"replicas": replicas, "periods": periods}, plan_of


if __name__ == "__main__":
    torch.set_num_threads(1)
    more, plan_of = further()
    main(__doc__, {task: list(workloads(task)) for task in (*CHOOSING, *JUDGING)} | more, plan_of)
