"""The pages of a run and of several over each other.

One run: what it reached and what its outer loop did, its curves, its record, and how to repeat it. Several: what each
reached, the settings that differ, and their curves together.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twophase.config import flatten
from twophase.diagnose import diagnose
from twophase.report.charts import Chart, Curve
from twophase.report.page import relative, render, run_link
from twophase.runs.folder import CONFIG, ENV, RECORDED
from twophase.runs.record import MEASURED, Column, RunRecord

STEPS = "inner steps of each replica"
_MOST_BLOCKS, _MOST_ROUNDS = 7, 20
_NORM = "Euclidean norm"
_CHARTS: tuple[tuple[str, str, str, tuple[str, float] | None, str], ...] = (
    ("pseudo_gradient_norm", "Norm of the pseudo-gradient", _NORM, None, ""),
    ("buffer_norm", "Norm of the momentum buffer, before the round", _NORM, None, ""),
    (
        "cosine",
        "Pseudo-gradient against buffer",
        "cosine",
        ("0: at a right angle", 0.0),
        "Below 0 the pseudo-gradient points against the buffer: the last updates went too far.",
    ),
    (
        "gain",
        "Outer gain",
        "gain",
        ("1: plain averaging", 1.0),
        # no-break spaces, so that no line ends inside of a bracket
        "The update's part along the pseudo-gradient: <update,\N{NO-BREAK SPACE}g> / <g,\N{NO-BREAK SPACE}g>.",
    ),
)
"""Columns of rounds with the title and axis of their chart, the level to compare with, and a note."""


def run_page(record: RunRecord, *, refresh: float = 0, back: str | None = None) -> str:
    """Return the page of a run in any state.

    Args:
        record: record of `read_record`.
        refresh: seconds after which the page of an unfinished run loads again; 0 for never.
        back: address of the page of the sweep that the run belongs to.
    """
    running, blocks = record.state == "running", record.blocks[:_MOST_BLOCKS]
    training = "training loss" if record.config.get(RECORDED) else "training loss, mean over a round"
    curves = [Curve(training, *record.curve("train_loss")), Curve("validation loss", *record.curve("validation_loss"))]
    if {"step", "train_loss"} <= record.steps.keys():
        curves.insert(0, Curve("training loss inside rounds", record.steps["step"], record.steps["train_loss"]))
    at = record.rounds["step"][record.rounds["restarted"] == 1].tolist()
    loss_label = f"loss ({record.unit.strip() or 'of the task'})"
    restarts = sorted({t for block in record.blocks for t in block.number[block.restarted].tolist()})
    columns = {
        f"fragment {block.name}" if block.name.isdecimal() else block.name: {"round": block.number}
        | {name: getattr(block, name) for name in MEASURED}
        for block in blocks
    }
    count = len(record.rounds["round"])
    few = np.linspace(0, count - 1, min(count, _MOST_ROUNDS)).round().astype(int)
    table = [record.rounds[name][few].tolist() for name in ("round", "step", *MEASURED, "bytes_sent")]
    sums = {name.replace("_", " "): np.nansum(seconds) for name, seconds in record.phases.items()}
    medians = [np.nanmedian(seconds) for seconds in record.phases.values()]
    total = sum(sums.values()) or 1.0
    commands = []
    if record.config and record.config.get(RECORDED) is not True:
        # of an odd folder name the shell must see one word; a line break would end the command
        config = shlex.quote(str(record.path / CONFIG).replace("\n", "?"))
        commands.append(
            ("The same run from the beginning, in a new folder:", f"twophase train --config {config} --out NEW")
        )
    words = record.environment.get("command")
    if isinstance(words, list) and words:
        first, *rest = map(str, words)
        program = ["twophase"] if Path(first).name == "__main__.py" else ["python"] * first.endswith(".py") + [first]
        commands.append(("As it was started; from the same place, it resumes:", shlex.join([*program, *rest])))
    environment = flatten({name: value for name, value in record.environment.items() if name != "command"})
    return render(
        "run.html",
        title=record.path.resolve().name,
        problems=["The run has not finished."] if running else [],
        refresh=refresh if running else 0,
        back=back,
        record=record,
        result=result_words(record),
        diagnosis=diagnose(record),
        loss=Chart("loss", "Loss over the run", STEPS, loss_label, curves, restarts=at),
        charts=round_charts(columns, restarts),
        left_out=len(record.blocks) - len(blocks),
        restarts=sum(int(block.restarted.sum()) for block in record.blocks),
        rounds=list(
            zip(*table, ["yes" if again == 1 else "" for again in record.rounds["restarted"][few]], strict=True)
        ),
        phases=[
            (name, 1e3 * median, 1e3 * in_all, 100 * in_all / total)
            for (name, in_all), median in zip(sums.items(), medians, strict=True)
        ],
        commands=commands,
        values={
            file: [(path, option_text(value)) for path, value in values.items()]
            for file, values in ((CONFIG, record.config), (ENV, environment))
        },
    )


def common_folder(paths: Sequence[Path]) -> Path:
    """Return the folder that holds all of some folders."""
    return Path(os.path.commonpath([path.resolve().parent for path in paths]))


def overlay_page(records: Sequence[RunRecord], page_folder: Path, *, refresh: float = 0) -> str:
    """Return the page of several runs.

    Args:
        records: records of `read_record`, in any state; of more than eight the strokes repeat.
        page_folder: folder of the page, for its links.
        refresh: seconds after which the page loads again while a run is unfinished; 0 for never.
    """
    base = common_folder([record.path for record in records])
    runs = {relative(record.path, base): record for record in records}
    going = [name for name, record in runs.items() if record.state == "running"]
    results = []
    for name, record in runs.items():
        link = run_link(name, record.path, page_folder)
        words = [result_words(record), diagnose(record).state, record.outer_words or "unknown", record.restart]
        results.append([link, *words])
    settings = dict.fromkeys(path for record in runs.values() for path in record.config)
    lines = [
        [path, *(option_text(record.config[path]) if path in record.config else "–" for record in runs.values())]
        for path in settings
    ]
    units = {record.unit.strip() for record in records}
    label = f"loss ({units.pop()})" if len(units) == 1 and "" not in units else "loss"
    return render(
        "overlay.html",
        title=" · ".join(runs) if len(runs) <= 3 else f"{len(runs)} runs",
        problems=[f"{name}: The run has not finished." for name in going],
        refresh=refresh if going else 0,
        names=list(runs),
        results=results,
        settings=len(settings),
        differences=[line for line in lines if len(set(line[1:])) > 1],
        charts=[
            *(
                Chart(name, title, STEPS, label, [Curve(run, *record.curve(name)) for run, record in runs.items()])
                for name, title in (("train_loss", "Training loss"), ("validation_loss", "Validation loss"))
            ),
            *round_charts({name: record.rounds for name, record in runs.items()}),
        ],
    )


def result_words(record: RunRecord) -> str:
    """Return the state of a run, and its validation loss and perplexity at the end or its losses measured last."""
    names = ("validation_loss", "perplexity")
    ends = {name: record.results[name] for name in names if name in record.results}
    lasts = {name: record.curve(name)[1][-1:] for name in (*names, "train_loss")}
    found = ends or {f"last {name}": float(value[0]) for name, value in lasts.items() if len(value)}
    words = (
        f"{name.replace('_', ' ')} {value:.4g}{record.unit if name.endswith('loss') else ''}"
        for name, value in found.items()
    )
    return f"{record.state}: {', '.join(words) or 'no loss recorded'}"


def option_text(value: Any) -> str:
    """Return a value of a configuration as its option takes it."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(option_text, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def round_charts(runs: Mapping[str, Mapping[str, Column]], restarts: Sequence[float] = ()) -> list[Chart]:
    """Return the charts over the rounds, with a curve for each of some runs or fragments.

    Args:
        runs: by name the columns of its rounds: round, norms, cosine and gain.
        restarts: rounds of restarts.
    """
    last = max((columns["round"].max() for columns in runs.values() if len(columns["round"])), default=1.0)
    charts = []
    for name, title, label, level, note in _CHARTS:
        curves = []
        for run, columns in runs.items():
            # without a buffer there is nothing that a cosine is measured against
            hidden = (columns["buffer_norm"] == 0) & (name == "cosine")
            curves.append(Curve(run, columns["round"], np.where(hidden, np.nan, columns[name])))
        if level and any(np.isfinite(curve.y).any() for curve in curves):
            curves.append(Curve(level[0], [1, last], [level[1]] * 2))
        options = {"log": label == _NORM, "bulk": name == "gain", "note": note, "restarts": restarts}
        charts.append(Chart(name, title, "round", label, curves, **options))
    return charts
