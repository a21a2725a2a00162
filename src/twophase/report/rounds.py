"""The rounds on a run's page: norms, cosine and gain of each block, and the sync's phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from twophase.report.page import Html, table, tag
from twophase.report.plot import Chart, Curve, figure
from twophase.runs.record import Block, Column, RunRecord

MOST_BLOCKS = 7
"""Curves of a chart; more would not be told apart."""
_NORMS = {"pseudo_gradient_norm": "pseudo-gradient", "buffer_norm": "momentum buffer, before the round"}


def finite(values: Column) -> list[float]:
    """Return those of some numbers that are finite."""
    return values[np.isfinite(values)].tolist()


def block_name(block: str) -> str:
    """Return a block's name, with `fragment` before a bare number."""
    return f"fragment {block}" if block.isdecimal() else block


def rounds(record: RunRecord) -> Iterator[Html | None]:
    """Yield the charts and tables of the rounds."""
    number = record.rounds["round"]
    if not len(number):
        yield tag("p", "No round has been recorded yet.")
        return
    drawn = record.blocks[:MOST_BLOCKS]
    if len(record.blocks) > len(drawn):
        yield tag("p", f"The charts show the first {len(drawn)} of {len(record.blocks)} blocks.")
    marks = sorted({number for block in record.blocks for number in finite(block.number[block.restarted])})

    def chart(name: str, title: str, y_label: str, curves: Sequence[Curve], **options: Any) -> Html | None:
        return figure(Chart(name, title, "round", y_label, curves, restarts=marks, **options))

    def curves(name: str) -> list[Curve]:
        return [Curve(block_name(block.name), block.number, _measured(block, name)) for block in drawn]

    if len(drawn) < 2:
        both = [Curve(label, number, record.rounds[name]) for name, label in _NORMS.items()]
        yield chart("norms", "Norms", "Euclidean norm", both, log=True)
    else:  # a chart each, since a round may be of one fragment alone
        for name, label in _NORMS.items():
            yield chart(name.replace("_", "-"), f"Norm of the {label}", "Euclidean norm", curves(name), log=True)
    yield chart(
        "cosine",
        "Pseudo-gradient against buffer",
        "cosine",
        curves("cosine"),
        level=("0: at a right angle", 0.0),
        note="Below 0 the pseudo-gradient points against the buffer: the last updates went too far.",
    )
    yield chart(
        "gain",
        "Outer gain",
        "gain",
        curves("gain"),
        level=("1: plain averaging", 1.0),
        # No-break spaces, so that no line ends inside of a bracket.
        note="The update's part along the pseudo-gradient, over the pseudo-gradient: "
        "<update,\N{NO-BREAK SPACE}g>\N{NO-BREAK SPACE}/ <g,\N{NO-BREAK SPACE}g>.",
        bulk=True,
    )


def _measured(block: Block, name: str) -> Column:
    """Return what was measured of a block; no cosine in rounds without a buffer to measure it against."""
    values = getattr(block, name)
    return np.where(block.buffer_norm > 0, values, np.nan) if name == "cosine" else values


def phases(record: RunRecord) -> Html | None:
    """Return what each phase of the sync took in this process; None where no phase is recorded."""
    if not record.phases:
        return None
    seconds = {name: finite(values) for name, values in record.phases.items()}
    total = sum(map(sum, seconds.values())) or 1.0
    rows = [
        [
            name.replace("_", " "),
            _milliseconds(np.median(values)) if values else "",
            _milliseconds(sum(values)),
            f"{100 * sum(values) / total:.0f} %",
        ]
        for name, values in seconds.items()
    ]
    sent = finite(record.rounds["bytes_sent"])
    note = f" Sent by this process: {sum(sent):,.0f} bytes, {np.mean(sent):,.0f} a round." if sent else ""
    caption = f"Time of the sync by phase, in this process.{note}"
    return table(["phase", "median (ms)", "in all (ms)", "share"], rows, caption=caption)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if 0.1 <= seconds < 1e12 else f"{1e3 * seconds:.3g}"
