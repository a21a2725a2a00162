"""The rounds on a run's page: norms, cosine and gain of each block, the sync's phases, attendance, and a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from twophase.report.charts import Chart, Curve, figure
from twophase.report.page import Html, counted, details, join, minus, table, tag
from twophase.runs.record import Block, Column, RunRecord

MOST_BLOCKS = 7
"""Curves of a chart; more would not be told apart."""
_MOST_ROWS = 60


def finite(values: Column) -> list[float]:
    """Return those of some numbers that are finite."""
    return values[np.isfinite(values)].tolist()


def rounds(record: RunRecord) -> Iterator[Html | None]:
    """Yield the charts and tables of the rounds."""
    if not len(record.rounds["round"]):
        yield tag("p", "No round has been recorded yet.")
        return
    shown = record.blocks[:MOST_BLOCKS]
    if len(record.blocks) > len(shown):
        yield tag("p", f"The charts show the first {len(shown)} of {len(record.blocks)} blocks; the csv files as well.")
    marks = finite(record.rounds["round"][record.rounds["restarted"] == 1])
    yield from _norms(record, shown, marks)
    yield figure(
        Chart(
            "cosine",
            "Pseudo-gradient against buffer",
            "round",
            "cosine",
            _by_block(record, shown, "cosine"),
            restarts=marks,
            levels={"0: at a right angle": 0.0},
            note="Below 0 the pseudo-gradient points against the buffer: the last updates went too far.",
        )
    )
    yield figure(
        Chart(
            "gain",
            "Outer gain",
            "round",
            "gain",
            _by_block(record, shown, "gain"),
            restarts=marks,
            levels={"1: plain averaging": 1.0},
            # No-break spaces, so that no line ends inside of a bracket.
            note="The update's part along the pseudo-gradient, over the pseudo-gradient: "
            "<update,\N{NO-BREAK SPACE}g>\N{NO-BREAK SPACE}/ <g,\N{NO-BREAK SPACE}g>.",
            bulk=True,
        )
    )
    yield _phases(record)
    yield _attendance(record)
    yield details("The rounds as a table", *_round_table(record))


def _norms(record: RunRecord, shown: Sequence[Block], marks: Sequence[float]) -> Iterator[Html | None]:
    """Draw both norms in one chart; with several blocks a chart each, since a round may be of one fragment alone."""
    names = {"pseudo_gradient_norm": "pseudo-gradient", "buffer_norm": "momentum buffer, before the round"}
    if len(shown) < 2:
        curves = [Curve(words, record.rounds["round"], record.rounds[name]) for name, words in names.items()]
        yield figure(Chart("norms", "Norms", "round", "Euclidean norm", curves, log=True, restarts=marks))
        return
    for name, words in names.items():
        curves = _by_block(record, shown, name)
        title = f"Norm of the {words}"
        yield figure(Chart(name.replace("_", "-"), title, "round", "Euclidean norm", curves, log=True, restarts=marks))


def block_name(block: str) -> str:
    """Return a block's name, with `fragment` before a bare number."""
    return f"fragment {block}" if block.isdecimal() else block


def _by_block(record: RunRecord, shown: Sequence[Block], name: str) -> list[Curve]:
    """Return a curve a block, without the rounds in which there was no buffer to measure."""
    curves = []
    for block in shown:
        values = getattr(block, name).copy()
        if name == "cosine":
            values[~(block.buffer_norm > 0)] = np.nan
        curves.append(Curve(block_name(block.name), record.rounds["round"][block.index], values))
    return curves


def _phases(record: RunRecord) -> Html | None:
    if not record.phases:
        return None
    total = sum(float(np.nansum(values)) for values in record.phases.values())
    rows = [
        [
            name.replace("_", " "),
            _milliseconds(float(np.nanmedian(values))) if np.isfinite(values).any() else "",
            _milliseconds(float(np.nansum(values))),
            f"{100 * float(np.nansum(values)) / total:.0f} %" if total > 0 else "",
        ]
        for name, values in record.phases.items()
    ]
    sent = record.rounds["bytes_sent"]
    measured = sent[np.isfinite(sent)]
    caption = "Time of the sync by phase, in this process."
    if len(measured):
        caption += f" Sent by this process: {measured.sum():,.0f} bytes, {measured.mean():,.0f} a round."
    return table(["phase", "median (ms)", "in all (ms)", "share"], rows, caption=caption, numbers=(1, 2, 3))


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if 100 <= value < 1e15 else minus(f"{value:.3g}")


def _attendance(record: RunRecord) -> Html | None:
    """Return, where replicas come and go, how many took part, came late, and how often a sync was tried."""
    replicas, late, tries = (record.rounds[name] for name in ("replicas", "newcomers", "attempts"))
    if not ((late > 0).any() or (tries > 1).any() or len(set(finite(replicas))) > 1):
        return None
    rows = [
        ["replicas in the mean", f"{np.nanmin(replicas):.0f}", f"{np.nanmax(replicas):.0f}", ""],
        [
            "newcomers, without weight",
            "",
            f"{np.nanmax(late):.0f}",
            f"with any: {counted(int((late > 0).sum()), 'round')}",
        ],
        [
            "attempts at a sync",
            "",
            f"{np.nanmax(tries):.0f}",
            f"with more than one: {counted(int((tries > 1).sum()), 'round')}",
        ],
    ]
    header = ["in a round", "fewest", "most", "how often"]
    curve = Curve("replicas in the mean", record.rounds["round"], replicas)
    drawn = figure(Chart("replicas", "Replicas that took part", "round", "replicas", [curve], counts=True))
    return join([table(header, rows, caption="Replicas that come and go.", numbers=(1, 2)), drawn])


def _round_table(record: RunRecord) -> Iterator[Html]:
    count = len(record.rounds["round"])
    places = np.unique(np.linspace(0, count - 1, min(count, _MOST_ROWS)).round().astype(int))
    names = ("round", "step", "inner_steps", "pseudo_gradient_norm", "buffer_norm", "cosine", "gain", "bytes_sent")
    header = ["round", "inner step", "inner steps", "norm of g", "norm of m", "cosine", "gain", "bytes sent", "restart"]
    rows = [
        [*(_cell(float(record.rounds[name][i])) for name in names), "yes" if record.rounds["restarted"][i] == 1 else ""]
        for i in places.tolist()
    ]
    words = (
        f"{len(places)} of {count:,} rounds, evenly spread."
        if len(places) < count
        else f"All of {counted(count, 'round')}."
    )
    yield table(header, rows, caption=f"{words} g: pseudo-gradient; m: buffer before the round.", numbers=range(8))


def _cell(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return minus(f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}")
