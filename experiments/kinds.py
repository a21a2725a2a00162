"""Do a tuned momentum, restarts, the filter and inner Muon pay on small tasks that are no language model?

`kinds-registration.md` says what is asked and how it is decided; it was written before the runs.

    python experiments/kinds.py --train laptop    a quarter of an hour on one core
"""

from __future__ import annotations

import argparse
from itertools import product
from statistics import geometric_mean

import pandas as pd
import torch
from matplotlib.figure import Figure

from common import DILOCO, Frame, dot_chart, script, show
from small_tasks import SIZES, Cell, Workload, train
from twophase.compare.compare import compare
from twophase.figures import style
from twophase.rule import FORMS, OuterRule

TASKS = ("rings", "spirals", "teacher", "linear", "modular", "clear rings")
WORKLOADS = list(product(TASKS, (8, 16)))
"""Tasks and communication periods."""
LEAST = {"linear": 8e-3, "modular": 4e-3, "spirals": 4e-3}
"""Least of the seven inner rates, each twice the one before, where it is not 2e-3."""
SCALES = {"quick": (16, range(1), range(100, 102)), "laptop": (480, range(2), range(100, 105))}
"""Inner steps, seeds that choose settings, and held-out seeds."""
PANELS = {"usual": "DiLoCo's usual", "usual, K = 3": "usual, K = 3", "sum": "tuned", "sum, K = 3": "tuned, K = 3"}
PANELS |= {"filter": "filter", "muon": "inner Muon"}


def methods(task: str) -> dict[str, list[Cell]]:
    """Return the settings of each method; the rates of inner Muon are twice the others."""
    rates = [LEAST.get(task, 2e-3) * 2**k for k in range(7)]
    outer = list(product((0.3, 0.7, 1.0), (0.3, 0.6, 0.9), (False, True)))
    rules = {"usual": [DILOCO]} | {form: [OuterRule(*numbers, form) for numbers in outer] for form in FORMS}
    found = {"averaging": [Cell(lr) for lr in rates]}
    for (period, word), name in product({0: "", 3: ", K = 3", 7: ", K = 7"}.items(), rules):
        found[name + word] = [Cell(lr, rule, period) for lr in rates for rule in rules[name]]
    if len(SIZES[task]) > 2:  # a single vector of weights has one singular value
        found["filter"] = [Cell(lr, kind="filter") for lr in rates]
        found["muon"] = [Cell(2 * lr, inner="muon") for lr in rates]
    return found


def study(task: str, inner_steps: int, steps: int, choosing: range, held_out: range) -> Frame:
    """Choose each method's setting on some seeds, and compare them on others; return a row for each comparison."""
    work, found, rows = Workload(task, inner_steps, steps), methods(task), []
    chosen = train(work, choosing, set().union(*found.values()))
    losses = {cell: geometric_mean(outcome.loss for outcome in by_seed.values()) for cell, by_seed in chosen.items()}
    best = {name: min(cells, key=losses.__getitem__) for name, cells in found.items()}
    judged = train(work, held_out, set(best.values()))
    results = {name: {seed: outcome.loss for seed, outcome in judged[cell].items()} for name, cell in best.items()}
    for name, cells in found.items():
        form = name.partition(",")[0]
        row = {"task": task, "S": inner_steps, "method": name, "inner_lr": best[name].lr}
        row |= {"outer": best[name].rule.describe(), "loss": geometric_mean(results[name].values())}
        if form in FORMS:
            rivals = [cell for other in found if other.startswith((form, "averaging")) for cell in found[other]]
            for where, rates in (("averagings_lr", {best["averaging"].lr}), ("own_lr", {cell.lr for cell in rivals})):
                good = 1.25 * min(losses[cell] for cell in rivals if cell.lr in rates)
                row[f"good_at_{where}"] = len({c.rule for c in cells if c.lr in rates and losses[c] <= good})
        for control in [other for other in ("averaging", form) if other != name and other in found] or [name]:
            said = compare(results[name], results[control], comparisons=len(WORKLOADS))
            answer = {"control": control, "word": said.word, "ratio": said.ratio, "low": said.low, "high": said.high}
            rows.append(row | answer)
    return pd.DataFrame(rows)


def summary(table: Frame) -> Frame:
    """Return words, least and largest ratio, and good settings of 180, over the ten workloads with noise."""
    noisy = table[table["task"] != "clear rings"]
    groups, pairs = noisy.groupby(["method", "control"]), [noisy["method"], noisy["control"]]
    good = groups[["good_at_averagings_lr", "good_at_own_lr"]].sum()
    return pd.crosstab(pairs, noisy["word"]).join(groups["ratio"].agg(["min", "max"])).join(good).reset_index()


def draw(table: Frame) -> dict[str, Figure]:
    """Draw how many times better than averaging the methods are, a panel each, a line each workload."""
    figure, grid = style.new_figure(3.4, 1, len(PANELS), sharex=True, sharey=True)
    for axes, (method, label) in zip(grid[0], PANELS.items(), strict=True):
        rows = table[(table["method"] == method) & (table["control"] == "averaging")]
        y = [WORKLOADS.index(place) for place in zip(rows["task"], rows["S"], strict=True)]
        axes.axvline(1, color=style.MUTED, linewidth=0.8)
        axes.hlines(y, rows["low"], rows["high"], color=style.INK, linewidth=0.8)
        axes.plot(rows["ratio"], y, "o", color=style.INK)
        for place, ratio in zip(y, rows["ratio"], strict=True):
            axes.text(45, place, f"{ratio:.2f}", va="center", fontsize=7, backgroundcolor=style.PAPER)
        names = [f"{task}, S = {inner_steps}" for task, inner_steps in WORKLOADS]
        dot_chart(axes, names, xscale="log", xlim=(0.01, 30), title=label)
        axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    reading = "averaging's held-out loss over the method's: right of the line is better than averaging"
    style.headline(figure, "With noise, restarts help only a momentum left untuned", reading)
    return {"": figure}


def train_all(options: argparse.Namespace) -> Frame:
    """Train and compare at every workload."""
    torch.set_num_threads(1)
    return pd.concat([study(task, inner_steps, *options.scale) for task, inner_steps in WORKLOADS])


if __name__ == "__main__":
    script(__doc__, "kinds", draw, train=train_all, scales=SCALES, report=lambda table: show(summary(table)))
