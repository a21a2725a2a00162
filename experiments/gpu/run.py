"""Throughput and memory of paper_150m: its step beside transformers', then a shortened run with its loss curve.

    python experiments/gpu/run.py --out runs/gpu           seven minutes on one GPU

* `run-step.json`: the step against the matrix product and transformers' Llama (benchmarks/lm_throughput.py);
* `run.csv`, `run.png`, `run.json`: 300 steps of two replicas, S = 25, a restart every 3 rounds. The documentation of
  the running Python is soon known by heart: the curve shows that training works, not how well it would do on C4.
"""

from __future__ import annotations

import csv
import importlib.util
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from machine import arguments, paper_150m, save_figures, save_rows
from twophase.experiments import train
from twophase.runs.folder import METRICS, STEPS, read_lines, read_summary

import lm_throughput  # isort: skip - machine names its folder

STORED = Path(__file__).parents[1] / "results" / "gpu"
COLUMNS = ("train_loss", "tokens_per_second", "flops_per_second", "peak_memory_bytes", "validation_loss")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return what a run has logged, by inner step."""
    rows: dict[int, dict[str, Any]] = {}
    for name in (STEPS, METRICS):
        for line in read_lines(path / name):
            row = rows.setdefault(line["step"], {"step": line["step"]} | dict.fromkeys(COLUMNS))
            # A line of metrics has the mean loss of a whole round, which belongs to no point of the curve.
            wanted = COLUMNS if name == STEPS else ("validation_loss",)
            row |= {column: line[column] for column in wanted if column in line}
    return [rows[step] for step in sorted(rows)]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the losses."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, style, label in (("train_loss", "-", "training"), ("validation_loss", "o", "validation (anchor)")):
        points = [(row["step"], row[name]) for row in rows if row[name] not in (None, "")]
        axes.plot([float(x) for x, _ in points], [float(y) for _, y in points], style, label=label)
    axes.set(xlabel="inner step", ylabel="loss, nats a token")
    axes.legend()
    figure.savefig(path, dpi=120)
    print(path)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and write the files."""
    options = arguments(__doc__ or "", words, redraws=True)
    if options.redraw:
        with (STORED / "run.csv").open(encoding="utf-8", newline="") as file:
            draw(list(csv.DictReader(file)), options.out / "run.png")
        return 0
    config = paper_150m(options)
    kinds = list(lm_throughput.KINDS) if importlib.util.find_spec("transformers") else ["product", "ours"]
    seconds, length = (0.0, 0.02) if options.tiny else (30.0, 1.0)
    outcomes = lm_throughput.contest(config, kinds, seconds, length)
    facts = {name: outcome.error or outcome.facts for name, outcome in outcomes.items()}
    save_figures(options, "run-step", lm_throughput.figures_of(config, outcomes) | {"facts": facts})
    steps, inner_steps = (12, 2) if options.tiny else (300, 25)
    config = replace(config, steps=steps, inner_steps=inner_steps, outer=replace(config.outer, restart="3"))
    config = replace(config, evaluate_every=2, checkpoint_every=4, keep_checkpoints=1, log_every=5)
    train("lm", config, options.out / "run")
    rows = rows_of(options.out / "run")
    save_rows(options, "run", rows)
    draw(rows, options.out / "run.png")
    summary = read_summary(options.out / "run") or {}
    figures = {name: summary[name] for name in ("validation_loss", "engine_share", "restarts", "checksum")}
    rates = [row["tokens_per_second"] for row in rows if row["tokens_per_second"]]
    figures |= {"tokens_per_second": statistics.median(rates)}
    figures |= {"peak_memory_gb": max(row["peak_memory_bytes"] or 0 for row in rows) / 1e9}
    save_figures(options, "run", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
