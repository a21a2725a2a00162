"""The page that lays runs over each other: which settings differ, what each reached, and their curves together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from twophase.advice.text import HEADLINES, outer_words
from twophase.advice.verdict import diagnose
from twophase.report.page import Html, counted, link, page, relative, section, table, tag
from twophase.report.plot import Chart, Curve, figure, script
from twophase.report.run import plain, result_words
from twophase.runs.folder import REPORT
from twophase.runs.record import Column, RunRecord

_LOSS = "loss"
_CHARTS = (
    ("train_loss", "Training loss", _LOSS, False),
    ("validation_loss", "Validation loss", _LOSS, False),
    ("pseudo_gradient_norm", "Norm of the pseudo-gradient", "Euclidean norm", True),
    ("cosine", "Pseudo-gradient against buffer", "cosine", False),
    ("gain", "Outer gain", "gain", False),
)


def common_folder(paths: Sequence[Path]) -> Path:
    """Return the folder that holds all of some folders."""
    return Path(os.path.commonpath([path.resolve().parent for path in paths]))


def overlay(records: Sequence[RunRecord], page_folder: Path, *, refresh: float = 0) -> str:
    """Return the page of several runs.

    Args:
        records: records of `read_record`, in any state; of more than eight the strokes repeat.
        page_folder: folder of the page, for its links.
        refresh: seconds after which the page shows its newest self, while a run is unfinished; 0 without a watch.
    """
    base = common_folder([record.path for record in records])
    names = [relative(record.path, base) for record in records]
    going = [name for name, record in zip(names, records, strict=True) if record.state == "running"]
    return page(
        " · ".join(names) if len(names) < 4 else counted(len(names), "run"),
        f"{counted(len(names), 'run')} over each other.",
        section("In short", _results(names, records, page_folder), _differences(names, records), anchor="short"),
        section("Curves", *_curves(names, records), anchor="curves"),
        kind="runs",
        problems=[f"{name}: The run has not finished." for name in going],
        refresh=refresh if going else 0,
        scripts=[script()],
    )


def _results(names: Sequence[str], records: Sequence[RunRecord], page_folder: Path) -> Html:
    rows = []
    for name, record in zip(names, records, strict=True):
        diagnosis = diagnose(record)
        report = record.path / REPORT
        target = report if report.is_file() else record.path
        verdicts = dict.fromkeys(HEADLINES[finding.verdict] for finding in diagnosis.findings)
        run = link(name, relative(target, page_folder))
        rows.append(
            [run, result_words(record), " ".join(verdicts), outer_words(diagnosis) or "unknown", record.restart]
        )
    header = ["run", "result", "verdict", "outer optimizer", "restart"]
    return table(header, rows, caption="What each run reached, and what its outer loop does.")


def _differences(names: Sequence[str], records: Sequence[RunRecord]) -> Html:
    """Return the settings in which the runs differ, a column a run."""
    configs = [record.config for record in records]
    paths = dict.fromkeys(path for config in configs for path in config)
    lines = [[path, *(plain(config[path]) if path in config else "–" for config in configs)] for path in paths]
    lines = [line for line in lines if len(set(line[1:])) > 1]
    if not lines:
        return tag("p", "Their configurations are the same.")
    return table(["setting", *names], lines, caption=f"Settings that differ: {len(lines)} of {len(paths)}.")


def _curves(names: Sequence[str], records: Sequence[RunRecord]) -> Iterator[Html | None]:
    units = {record.unit.strip() for record in records}
    for column, title, label, log in _CHARTS:
        y_label = f"{label} ({min(units)})" if label == _LOSS and len(units) == 1 and min(units) else label
        of_rounds = column not in ("train_loss", "validation_loss")
        curves = [Curve(name, *_points(record, column, of_rounds)) for name, record in zip(names, records, strict=True)]
        x_label = "round" if of_rounds else "inner steps of each replica"
        yield figure(Chart(column, title, x_label, y_label, curves, log=log, bulk=column == "gain"))


def _points(record: RunRecord, column: str, of_rounds: bool) -> tuple[Column, Column]:
    """Return places and values of a column; none where the run does not have it."""
    if not of_rounds:  # a task may name a metric like a round's number
        return record.curve(column)
    rounds = record.rounds
    # Without a buffer there is nothing that a cosine is measured against.
    measured = np.where(rounds["buffer_norm"] > 0, rounds[column], np.nan) if column == "cosine" else rounds[column]
    return rounds["round"], measured
