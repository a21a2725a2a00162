"""The page that lays runs over each other: what each reached, the settings that differ, and their curves together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from twophase.diagnose import diagnose
from twophase.report.charts import Chart, Curve
from twophase.report.page import Link, href, relative, render
from twophase.report.run import STEPS, option_text, result_words, round_charts
from twophase.runs.folder import REPORT
from twophase.runs.record import RunRecord

_MOST_NAMED = 3


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
        report = record.path / REPORT
        link = Link(name, href(report if report.is_file() else record.path, page_folder))
        words = [result_words(record), diagnose(record).state, record.outer_words or "unknown", record.restart]
        results.append([link, *words])
    settings = dict.fromkeys(path for record in runs.values() for path in record.config)
    lines = [
        [path, *(option_text(record.config[path]) if path in record.config else "–" for record in runs.values())]
        for path in settings
    ]
    return render(
        "overlay.html",
        title=" · ".join(runs) if len(runs) <= _MOST_NAMED else f"{len(runs)} runs",
        problems=[f"{name}: The run has not finished." for name in going],
        refresh=refresh if going else 0,
        names=list(runs),
        results=results,
        settings=len(settings),
        differences=[line for line in lines if len(set(line[1:])) > 1],
        charts=[
            *(_loss_chart(name, runs) for name in ("train_loss", "validation_loss")),
            *round_charts({name: record.rounds for name, record in runs.items()}),
        ],
    )


def _loss_chart(name: str, runs: dict[str, RunRecord]) -> Chart:
    title = {"train_loss": "Training loss", "validation_loss": "Validation loss"}[name]
    units = {record.unit.strip() for record in runs.values()}
    label = f"loss ({units.pop()})" if len(units) == 1 and "" not in units else "loss"
    return Chart(name, title, STEPS, label, [Curve(run, *record.curve(name)) for run, record in runs.items()])
