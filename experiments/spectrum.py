"""The curvature of a trained run by block, what a round removes of it, and the restart periods that follow.

    python experiments/spectrum.py RUN --blocks 'ends=embedding|head' rest=.

A run is a folder of `twophase train`, of any task, with AdamW or SGD as the inner optimizer. Its blocks are its named
fragments, else parts of the model; a parameter is in the first block whose pattern matches its name. The table says
for each block:

* largest, precond.: largest eigenvalue of the curvature, and of the preconditioned one, with its quantiles;
* early, mid, late: effective progress of a round, mean by loss, in the middle of the run's thirds;
* K: the period of least final loss, of all modes of the block together, with what it leaves of the loss;
* K at mean: the first cancellation of a single mode at the mean progress, the paper's closed form;
* sigma of the rounds: the run's own progress along the momentum buffer, where it may be shown, and its K.

What the model leaves out: blocks that act on one another, replicas with different data, curvature and second moments
that change, the delay by the inner momentum, gradient clipping. Directions are weighted by their curvature, as if the
displacement were alike in all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blocks import PROBES, STEPS, Facts, matrix_of, measure, patterns_of, seen, setting_of
from restored import Restored, restore
from spectrum_figure import draw
from twophase.figures.style import rendered, styled, write_files
from twophase.files import csv_text, finite
from twophase.runs.config import named_values
from twophase.runs.record import WHOLE, read_record
from twophase.sweeps.table import format_table
from twophase.theory.observed import Observed


def main() -> None:
    """Measure the blocks of a run, print the table, and write spectrum.png, .csv and .json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--blocks", nargs="+", default=(), metavar="NAME=PATTERN", help="cut the model in this way")
    parser.add_argument("--batches", type=int, default=4, help="batches of the run's training data (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the files (the run's own)")
    options = parser.parse_args()
    record, restored = read_record(options.run), restore(options.run)
    asked = named_values("blocks", options.blocks)
    patterns, setting = asked or patterns_of(restored), setting_of(restored.config)
    blocks = measure(
        restored,
        patterns,
        restored.batches(options.batches),
        show=lambda done, text: print(f"{done}: {text}", end="\r"),
    )
    rounds = paired(seen(record, setting), restored, patterns)
    title = (
        f"{setting.rule.describe()}, S = {restored.config.inner_steps}, {setting.rounds} rounds; "
        f"curvature after {restored.step:,} inner steps"
    )
    with styled():
        figure, rows = draw(title, setting, blocks, rounds)
        pictures = rendered(figure, (".png",))
    kind, _ = matrix_of(restored.task)
    facts = {
        "run": str(record.path), "matrix": kind.title, "state": record.state, "step": restored.step,
        "rule": asdict(setting.rule), "inner_steps": restored.config.inner_steps, "rounds": setting.rounds,
        "inner_lrs": setting.inner_lrs, "weight_decay": setting.weight_decay, "batches": options.batches,
        "replicas": restored.replicas, "lanczos": {"steps": STEPS, "probes": PROBES}, "blocks": blocks,
        "from_rounds": rounds,
    }  # fmt: skip
    text = json.dumps(finite(facts), indent=2, allow_nan=False, default=_plain) + "\n"
    out = options.out or options.run
    out.mkdir(parents=True, exist_ok=True)
    paths = write_files(out / "spectrum", pictures | {".csv": csv_text(rows), ".json": text})
    print(table(blocks, rounds), *map(str, paths), sep="\n")


def _show(done: int, text: str) -> None:
    print(f"\r{done} blocks, {text}   ", end="", file=sys.stderr)


def paired(rounds: dict[str, Facts], restored: Restored, patterns: dict[str, str]) -> dict[str, Facts]:
    """Name what the rounds show by a block only where that block is a fragment of the run."""
    fragments = restored.config.sync.parts
    if isinstance(fragments, dict) and list(fragments.items()) == list(patterns.items()):
        return rounds
    return {name if name == WHOLE else f"fragment {name}": shown for name, shown in rounds.items()}


def table(blocks: list[Facts], rounds: dict[str, Facts]) -> str:
    """Return a row for each block; `rounds` is by fragment."""
    rows = [_row(block, rounds.get(block["name"])) for block in blocks]
    return format_table(list(rows[0]), [list(row.values()) for row in rows])


def _row(block: Facts, shown: Facts | None) -> dict[str, str]:
    top, period = block["largest_preconditioned"], _period(block["period"])
    if block["period"] is not None:  # with the share of the loss that it is predicted to leave: `12 (0.31x)`
        period += f" ({math.exp(block['log_gain']):.2g}x)"
    sigma, periods = "none recorded" if shown is None else "not shown", list[str]()
    if shown is not None and shown["shown"]:
        sigma = f"{shown['interval'][0]:.2g} to {shown['interval'][2]:.2g}"
        periods = list(map(_period, shown["periods"]))
    return {
        "block": block["name"],
        "parameters": f"{block['parameters']:,}",
        "largest": f"{block['largest'][0]:.3g}" if len(block["largest"]) else "not found",
        "precond.": f"{top[0]:.3g}" if len(top) else "not found",
        "median": f"{block['quantiles']['0.5']:.2g}",
        "99 %": f"{block['quantiles']['0.99']:.2g}",
        **{place: f"{facts['mean']:.2g}" for place, facts in block["progress"].items()},
        "unstable": f"{max(facts['unstable'] for facts in block['progress'].values()):.0%}",
        "K": period,
        "K at mean": _period(block["period_at_mean"]),
        "sigma of the rounds": sigma,
        "its K": ", ".join(dict.fromkeys(periods)),
    }


def _period(period: int | None) -> str:
    return "never" if period is None else str(period)


def _plain(value: Any) -> Any:
    """Return arrays and estimates as JSON has them."""
    if isinstance(value, Observed):
        return finite({name: getattr(value, name) for name in ("sigma", "standard_error", "why_not")})
    return value.tolist()


if __name__ == "__main__":
    main()
