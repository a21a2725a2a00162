"""The demo's page: what a replica is, why momentum overshoots, what a restart does, the reader's own map, the limits.

It begins as an empty map and is written again while runs end. Every number comes from the demo's own folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from twophase.figures.heatmap import text_of
from twophase.report import demo
from twophase.report.charts import Chart, Curve
from twophase.report.page import render
from twophase.runs.record import RunRecord, read_record, read_summary
from twophase.sweeps.grid import RUNS, Sweep
from twophase.sweeps.table import Row, cell_text, readable

_MEANINGS = {
    "no momentum": "nothing is carried over; the best learning rate of those tried",
    "plain averaging": "the anchor goes exactly where the replicas ask: no momentum, learning rate 1",
    "auto": "sets each step from what it measures: no learning rate, momentum or period to tune",
}
_QUANTITIES = {"asked": "asked", "length": "carried over", "angle": "angle", "loss": "loss"}


def story(rows: Sequence[Row], sweep: Sweep, folder: Path, *, refresh: int = 0) -> str:
    """Return the page.

    Args:
        rows: rows of the sweep so far.
        sweep: the demo; its first two runs, one without restarts and its twin with them, are shown round by round.
        folder: folder of the sweep.
        refresh: seconds after which a browser loads the page again; 0 when all runs have ended.
    """
    paths = [folder / RUNS / cell.run_id for cell in sweep.cells[:2]]
    pair = [read_record(path) for path in paths if read_summary(path, path.name) is not None]
    results = {row.run: row.outcome for row in rows}
    beside = [
        (name, cell.result if cell.result is not None else cell.state, _MEANINGS[name])
        for name, cell in demo.beside(rows).items()
    ]
    return render(
        "story.html",
        scripts=["story.js"],
        styles=["heat.css", "story.css"],
        title="What a restart of the momentum did here",
        refresh=refresh,
        replicas=sweep.base.replicas,
        rounds=sweep.base.rounds,
        inner_steps=sweep.base.inner_steps,
        tables=demo.comparisons(rows),
        maps=[panel for row in demo.main_maps(rows) for panel in row],
        scale=demo.scale(rows),
        text_of=text_of,
        cell_text=cell_text,
        beside=beside,
        rule=pair[0].outer_words if pair else "",
        ends=[(name_of(run), readable(results.get(run.path.name)) or "diverged") for run in pair],
        arrows=[{"name": name_of(run), "rounds": [*arrows(run)]} for run in pair],
        every_round=every_round(pair),
        losses=Chart(
            "rounds", "Training loss of these runs", "round", "loss (nats a character)", [*map(_losses, pair)]
        ),
        folder=str(folder),
    )


def name_of(run: RunRecord) -> str:
    """Name a run of the pair by its restarts."""
    return "no restart" if run.restart == "never" else f"restart every {run.restart} rounds"


def _losses(run: RunRecord) -> Curve:
    return Curve(name_of(run), run.metrics["round"], run.metrics["train_loss"])


def arrows(run: RunRecord) -> Iterator[dict[str, float | None]]:
    """Yield each round's arrows: lengths, the angle between them, the outer step's two coordinates, and the loss.

    The plane is that of the pseudo-gradient (to the right) and of the buffer. The angle, in degrees, is None where
    nothing is carried over.
    """
    rule, block, loss = run.rule, run.blocks[0], run.metrics["train_loss"]
    assert rule is not None
    weight = 1.0 if rule.form == "sum" else 1 - rule.momentum
    columns = (block.pseudo_gradient_norm, block.buffer_norm, block.cosine, loss)
    for g, m, cosine, nats in zip(*(column.tolist() for column in columns), strict=False):
        if not all(map(math.isfinite, (g, m, cosine, nats))):
            return  # diverged: there is nothing to draw any more
        angle = math.acos(max(-1.0, min(1.0, cosine))) if m > 0 else 0.0
        carried = rule.momentum * m * (rule.momentum if rule.nesterov else 1.0)
        asked = g * weight * (1 + rule.momentum if rule.nesterov else 1.0)
        x, y = asked + carried * math.cos(angle), carried * math.sin(angle)
        numbers = {"asked": asked, "length": carried, "x": rule.lr * x, "y": rule.lr * y, "loss": nats}
        shown: dict[str, float | None] = {name: float(f"{value:.4g}") for name, value in numbers.items()}
        yield shown | {"angle": float(f"{math.degrees(angle):.4g}") if m > 0 else None}


def every_round(pair: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the arrows as a table: its header, and a line a round."""
    header = ["round", *(f"{words}, {name_of(run)}" for run in pair for words in _QUANTITIES.values())]
    none: Mapping[str, float | None] = {}
    lines = zip_longest(*map(arrows, pair), fillvalue=none)
    rows = [
        [number, *(math.nan if (value := part.get(name)) is None else value for part in line for name in _QUANTITIES)]
        for number, line in enumerate(lines, start=1)
    ]
    return {"header": header, "rows": rows}
