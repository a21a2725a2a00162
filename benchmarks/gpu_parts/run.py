"""The part `run`: `paper_150m`, shortened, with its loss curve."""

from __future__ import annotations

import importlib.util
import math
import shutil
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_parts.records import Figures, Record, Settings, Unfinished, write_csv
from twophase.base.config import fingerprint
from twophase.runs.folder import METRICS, STEPS, RunFolder, read_lines
from twophase.tasks.lm.config import TrainConfig
from twophase.tasks.lm.task import LanguageTask
from twophase.training.train import train

RESERVE = 0.1
"""Share of the time that is left for the checkpoint of a run that stops by itself."""


def shortened(settings: Settings) -> TrainConfig:
    """The run's configuration."""
    config = settings.config("paper_150m")
    steps, inner_steps = (12, 2) if settings.tiny else (300, 25)
    return replace(
        config,
        steps=steps,
        inner_steps=inner_steps,
        outer=replace(config.outer, restart="3"),
        evaluate_every=2,
        checkpoint_every=4,
        keep_checkpoints=1,
        log_every=5,
    )


def curve(settings: Settings, record: Record) -> None:
    """Train, write the curve while it grows, and stop near the deadline with a checkpoint in the working folder."""
    config = shortened(settings)
    path = settings.work / f"run-{fingerprint(config)}"
    target = settings.out / "run.csv"
    stop_at = settings.deadline - RESERVE * settings.remaining()

    def on_step(line: Mapping[str, Any]) -> None:
        write_csv(target, rows_of(path))
        rate = f"{line['tokens_per_second']:,.0f} tok/s"
        print(f"step {line['step']} of {config.steps}: loss {line['train_loss']:.4f}, {rate}", flush=True)

    def should_stop() -> bool:
        return replace(settings, deadline=stop_at).remaining() < 0

    with RunFolder.claim(path, config) as folder:
        summary = train(LanguageTask(config), config, folder, on_step=on_step, should_stop=should_stop)
    rows = rows_of(path)
    write_csv(target, rows)
    draw(rows, settings.out / "run.png")
    if summary["exit_reason"] == "stopped":
        raise Unfinished(f"step {summary['steps']} of {config.steps}; the next call goes on, from {path}")
    figures = {
        "run_tokens_per_second": statistics.median(
            row["tokens_per_second"] for row in rows if row["tokens_per_second"]
        ),
        "run_validation_loss": summary["validation_loss"],
        "run_peak_memory_gb": max(row["peak_memory_bytes"] or 0 for row in rows) / 1e9,
        "run_engine_share": summary["engine_share"],
        "run_diverged": float(summary["diverged"]),
    }
    facts = {name: summary[name] for name in ("steps", "restarts", "checksum", "execution")}
    finite = {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}
    record.done("curve", finite, **facts)
    shutil.rmtree(path, ignore_errors=True)  # gigabytes


def rows_of(path: Path) -> list[dict[str, Any]]:
    """What has been logged, by inner step."""
    rows: dict[int, dict[str, Any]] = {}
    columns = ("train_loss", "tokens_per_second", "flops_per_second", "peak_memory_bytes", "validation_loss")
    for name in (STEPS, METRICS):
        for line in read_lines(path / name):
            row = rows.setdefault(line["step"], {"step": line["step"]} | dict.fromkeys(columns))
            # A line of metrics has the mean loss of a whole round, which belongs to no point of the curve.
            wanted = columns if name == STEPS else ("validation_loss",)
            row |= {column: line[column] for column in wanted if column in line}
    return [rows[step] for step in sorted(rows)]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no drawing: matplotlib is not installed (--wheels); the curve is in run.csv", flush=True)
        return
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, style, label in (("train_loss", "-", "training"), ("validation_loss", "o", "validation (anchor)")):
        points = [(row["step"], row[name]) for row in rows if row[name] is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
    axes.set(xlabel="inner step", ylabel="loss, nats a token")
    axes.legend()
    figure.savefig(path, dpi=120)


NEED_A_GPU: set[str] = set()
UNITS = {"curve": curve}


def figures(record: Record) -> Figures:
    """Those of the last line."""
    return record.figures
