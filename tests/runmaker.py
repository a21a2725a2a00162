"""Folders of runs for tests: the theory's own trajectories, written as a trainer writes them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twophase.config import dump_yaml, fingerprint
from twophase.rule import OuterRule
from twophase.runs.config import OuterConfig, options_of
from twophase.sweeps.grid import Axis, Sweep, product
from twophase.sweeps.table import rows_of, write_rows
from twophase.tasks.lm.config import TrainConfig
from twophase.theory import rollout

EMA = OuterRule(1.0, 0.9, form="ema")
SUM = OuterRule(0.7, 0.9)
NESTEROV = OuterRule(0.7, 0.9, nesterov=True)
MEASURED = {"pseudo_gradient_norm": "g", "buffer_norm": "m", "cosine": "cosine", "gain": "gain"}


def config_of(rule: OuterRule, restart: str = "never", rounds: int = 60, **values: Any) -> TrainConfig:
    """A configuration with that rule, of one inner step a round."""
    outer = OuterConfig(**options_of(rule), restart=restart)
    return dataclasses.replace(TrainConfig(outer=outer, steps=rounds, inner_steps=1), **values)


def observed(
    rule: OuterRule, sigma: Sequence[float], rounds: int, restart: str = "never", **options: Any
) -> dict[str, Any]:
    """Norms, cosines, gains and restarts of a simulated run, as its rounds report them."""
    run = rollout(rule, list(sigma), rounds, restart, **options)
    g, m = run.pseudo_gradient, run.buffer[:-1]
    norms, lengths = np.linalg.norm(g, axis=-1), np.linalg.norm(m, axis=-1)
    scale = norms * lengths
    cosine = np.where(scale > 0, (g * m).sum(axis=-1) / np.where(scale > 0, scale, 1), 0.0)
    moved = run.residual[:-1] - run.residual[1:]
    gain = (moved * g).sum(axis=-1) / np.where(norms > 0, norms, 1) ** 2
    return {"g": norms, "m": lengths, "cosine": np.clip(cosine, -1, 1), "gain": gain, "restarted": run.restarts}


def round_lines(blocks: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of rounds.jsonl, one a round, with a fragment for each of some simulated blocks."""
    rounds = len(next(iter(blocks.values()))["g"])
    lines = []
    for t in range(rounds):
        groups = [
            {"restarted": bool(block["restarted"][t])} | {name: float(block[key][t]) for name, key in MEASURED.items()}
            for block in blocks.values()
        ]
        fragments = [
            {"name": name, "round": t + 1, "inner_steps": 1, "restarted": group["restarted"], "checksum": "0" * 16}
            for name, group in zip(blocks, groups, strict=True)
        ]
        lines.append(
            {"step": t + 1, "round": t + 1, "inner_steps": 1, "partial": False, "complete": True, "replicas": 2}
            | {"restarted": any(group["restarted"] for group in groups)}
            | {"fragments": fragments, "groups": groups, "bytes_sent": 0, "checksum": "0" * 16}
            | {"seconds": {"pseudo_gradient": 1e-3, "reduce": 1e-4, "outer": 2e-3, "restore": 1e-3, "checksum": 1e-3}}
            | {name: groups[0][name] for name in MEASURED}
        )
    return lines


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_run(
    folder: Path,
    rule: OuterRule,
    sigma: Sequence[float],
    rounds: int = 60,
    restart: str = "never",
    *,
    blocks: Mapping[str, Sequence[float]] | None = None,
    finished: bool = True,
    config: TrainConfig | None = None,
    **options: Any,
) -> Path:
    """The folder of a simulated run; `blocks` makes several fragments of it."""
    config = config or config_of(rule, restart, rounds)
    seen = {name: observed(rule, modes, rounds, restart, **options) for name, modes in (blocks or {"0": sigma}).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    write_lines(folder / "rounds.jsonl", round_lines(seen))
    losses = [2.0 + math.exp(-t / 20) for t in range(rounds)]
    metrics = [{"step": t + 1, "round": t + 1, "train_loss": loss, "inner_lr": 2e-3} for t, loss in enumerate(losses)]
    write_lines(folder / "metrics.jsonl", metrics)
    command = ["twophase", "train", "--steps", str(rounds)]
    environment = {"python": "3.11.0", "command": command, "loss_unit": "nats a token"}
    (folder / "env.json").write_text(json.dumps(environment), encoding="utf-8")
    if finished:
        write_summary(folder, config)
    return folder


def write_summary(folder: Path, config: TrainConfig, perplexity: float | None = 8.0, **values: Any) -> None:
    summary = {
        "validation_loss": None if perplexity is None else math.log(perplexity),
        "perplexity": perplexity,
        "perplexity_per_byte": perplexity,
        "tokens": 1000,
        "seconds": 1.5,
        "diverged": perplexity is None,
        "exit_reason": "diverged" if perplexity is None else "finished",
        "config": fingerprint(config),
    }
    (folder / "summary.json").write_text(json.dumps(summary | values), encoding="utf-8")


def make_sweep(folder: Path) -> Sweep:
    """Write a sweep whose runs are simulated: an arm, its control, a diverged and a missing cell."""
    base = config_of(SUM, rounds=12)
    axes = [Axis("outer.lr", (0.3, 0.7)), Axis("outer.restart", ("never", "3")), Axis("seed", (0, 1))]
    cells = product(base, axes, "heavy ball", {"outer.momentum": 0.9})
    cells += product(base, [axes[0], axes[2]], "momentum-free", {"outer.momentum": 0.0, "outer.restart": "never"})
    sweep = Sweep(base, cells)
    summaries: dict[str, Any] = {}
    for number, (run, config) in enumerate(sweep.runs.items()):
        if number == 1:
            continue
        write_run(folder / "runs" / run, config.outer.rule(), [0.3], 12, config=config, finished=False)
        write_summary(folder / "runs" / run, config, None if number == 5 else 8.0 + number)
        summaries[run] = json.loads((folder / "runs" / run / "summary.json").read_text())
    (folder / "sweep.json").write_text(json.dumps(sweep.spec()))
    write_rows(folder / "cells.csv", rows_of(sweep, summaries))
    return sweep
