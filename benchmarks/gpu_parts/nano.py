"""The part `nano`: a grid of short runs, with and without restarts, a row of nano.csv for each as it ends."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpu_parts.records import Figures, Record, Settings, Unfinished, write_csv
from twophase.runs.folder import RunFolder
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training.train import train

SEEDS = (0, 1)
MOMENTUM = 0.9
LRS = (0.7, 0.3, 1.1)
PERIODS = ("2", "5", "7")
"""Beside 3, at the first learning rate only."""


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    rule: str
    lr: float
    restart: str

    @property
    def name(self) -> str:
        """A name of its own."""
        return f"{self.rule}-{self.lr:g}-{self.restart}"

    def config(self, settings: Settings) -> TrainConfig:
        """Its configuration."""
        config = settings.config("nano")
        momentum = MOMENTUM if self.rule in RULES else 0.0
        outer = replace(config.outer, lr=self.lr, momentum=momentum, nesterov=self.rule == "nesterov")
        steps, inner_steps = (8, 2) if settings.tiny else (320, 16)
        return replace(
            config,
            outer=replace(outer, restart=self.restart),
            steps=steps,
            inner_steps=inner_steps,
            evaluate_every=0,
            checkpoint_every=steps,
            log_every=0,
        )


RULES = ("heavy_ball", "nesterov")
# By learning rate first: a seed that is cut off still compares rules and policies. `auto` takes nothing from a rule.
CELLS = [
    *(Cell(rule, LRS[0], restart) for rule in RULES for restart in ("never", "3")),
    Cell("averaging", 1.0, "never"),
    Cell("auto", 1.0, "auto"),
    *(Cell(rule, LRS[0], period) for rule in RULES for period in PERIODS),
    *(Cell(rule, lr, restart) for lr in LRS[1:] for rule in RULES for restart in ("never", "3")),
]


def grid(settings: Settings, record: Record, *, seed: int) -> None:
    """Run what is left of a seed's cells, one after the other in this process, which compiles once."""
    settings = replace(settings, seed=seed)
    longest = 0.0
    for cell in CELLS:
        if any(row["cell"] == cell.name and row["seed"] == seed for row in record.rows):
            continue
        if settings.remaining() < 1.5 * longest:
            raise Unfinished(f"{sum(row['seed'] == seed for row in record.rows)} of {len(CELLS)} cells are done")
        begin = time.perf_counter()
        config, path = cell.config(settings), settings.work / f"nano-{seed}-{cell.name}"
        shutil.rmtree(path, ignore_errors=True)  # of a call that was cut off
        with RunFolder.claim(path, config) as folder:
            summary = train(LanguageTask(config), config, folder)
        shutil.rmtree(path)
        seconds = time.perf_counter() - begin
        longest = max(longest, seconds)
        row: dict[str, Any] = {"seed": seed, "cell": cell.name, "rule": cell.rule, "lr": cell.lr}
        row |= {"restart": cell.restart} | {name: summary[name] for name in ("validation_loss", "perplexity")}
        row |= {name: summary[name] for name in ("diverged", "restarts", "tokens", "engine_share")}
        row = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
        record.rows.append(row | {"seconds": round(seconds, 2)})
        record.save()
        write_csv(settings.out / "nano.csv", record.rows)
        loss = "diverged" if row["diverged"] else f"perplexity {row['perplexity']:.3f}"
        print(f"seed {seed}, {cell.name}: {loss}, {seconds:.1f} s", flush=True)
    record.done(f"seed{seed}", {})


NEED_A_GPU: set[str] = set()
UNITS = {f"seed{seed}": partial(grid, seed=seed) for seed in SEEDS}


def figures(record: Record) -> Figures:
    """The best perplexity over learning rates of each rule and policy, a geometric mean over seeds.

    `best_k` takes the best of K = 2, 3, 5, 7 at the learning rate at which all of them ran; `never_at` and `k3_at` are
    its counterparts there.
    """
    rows = [row for row in record.rows if row["perplexity"] is not None and not row["diverged"]]

    def best(rule: str, restarts: Iterable[str], lrs: Iterable[float]) -> float | None:
        logs = [
            min(values)
            for seed in SEEDS
            if (
                values := [
                    math.log(row["perplexity"])
                    for row in rows
                    if (row["seed"], row["rule"]) == (seed, rule) and row["restart"] in restarts and row["lr"] in lrs
                ]
            )
        ]
        return round(math.exp(sum(logs) / len(logs)), 4) if logs else None

    summary = {"nano_averaging": best("averaging", ["never"], [1.0]), "nano_auto": best("auto", ["auto"], [1.0])}
    for rule in RULES:
        for name, restart in (("never", "never"), ("k3", "3")):
            summary[f"nano_{rule}_{name}"] = best(rule, [restart], LRS)
        summary[f"nano_{rule}_never_at"] = best(rule, ["never"], LRS[:1])
        summary[f"nano_{rule}_k3_at"] = best(rule, ["3"], LRS[:1])
        summary[f"nano_{rule}_best_k"] = best(rule, ["3", *PERIODS], LRS[:1])
    if not record.rows:
        return {}
    measured = {name: value for name, value in summary.items() if value is not None}
    return measured | {"nano_cells": len(record.rows), "nano_diverged": sum(row["diverged"] for row in record.rows)}
