"""The report of a sweep: what its table says, as heatmaps with cells that lead to their runs, curves and verdicts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twophase.base.config import UsageError
from twophase.judge.verdict import WITHIN, Verdict, verdict
from twophase.judge.verdict_text import sections
from twophase.report.charts import Chart, Curve, figure
from twophase.report.heatmap import heatmaps
from twophase.report.labels import RUN_ID, Links, arm_name, perplexity_text, value_text
from twophase.report.page import (
    Html,
    clean,
    counted,
    details,
    join,
    link,
    minus,
    notes,
    page,
    section,
    table,
    tag,
)
from twophase.report.sweep_record import SweepRecord
from twophase.report.watch import SCRIPT, notice
from twophase.runs.record import read_record
from twophase.sweep.run import TABLE
from twophase.sweep.table import SEED, Setting, readable, settings
from twophase.sweep.work import RUNS

_MOST_CURVES, _MOST_CELLS = 6, 500


def sweep_report(
    record: SweepRecord,
    page_folder: Path,
    *,
    within: Sequence[float] = WITHIN,
    controls: Collection[str] = (),
    refresh: float | None = None,
) -> str:
    """Return the page of a sweep that has been read.

    Args:
        record: of `read_sweep`.
        page_folder: where the page will lie, for its links.
        within: distances from the best that robustness areas are given for.
        controls: further arms that the others are compared with.
        refresh: seconds after which the page shows its newest self; only while cells are missing.
    """
    judged = verdict(record.rows, within, controls)
    cells = settings(record.rows)
    links = Links(record.path, page_folder)
    watched = refresh if record.going else None
    counts = {state: sum(setting.state == state for setting in cells) for state in ("finished", "diverged", "missing")}
    words = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    first, *others = sections(judged)
    return page(
        record.path.resolve().name,
        f"A sweep of {counted(len(cells), 'setting')} ({words}) over {counted(len(judged.arms), 'arm')}, "
        f"{record.forms}.",
        notice("sweep", watched, record.problems),
        section("In short", *_in_short(first, cells, links), anchor="short"),
        section("Heatmaps", *heatmaps(record, judged, cells, links), anchor="heatmaps"),
        section("Curves", *_curves(record, judged), anchor="curves"),
        section("Verdict", *_verdict(others), anchor="verdict"),
        section("Every cell", *_cells(record, links), anchor="cells"),
        script=SCRIPT if watched else "",
    )


def _in_short(first: tuple[Any, ...], cells: Sequence[Setting], links: Links) -> Iterator[Html | None]:
    _, words, _, _, remarks = first
    yield tag("p", tag("strong", words)) if words else None
    yield notes(remarks)
    finished = [setting for setting in cells if setting.perplexity is not None]
    ranked = sorted(finished, key=lambda setting: setting.perplexity or 0.0)
    if not ranked:
        return
    chosen = [("best", setting) for setting in ranked[:5]] + [("worst", setting) for setting in ranked[5:][-3:]]
    varied = _varied(cells)
    header = ["", "arm", *varied, "perplexity", "spread", "seeds", "run"]
    rows = [
        [
            f"{word}\N{NO-BREAK SPACE}{number + 1}" if word == "best" else "worst",
            arm_name(setting.arm) or "(all)",
            *(value_text(setting.values.get(path)) for path in varied),
            perplexity_text(setting.perplexity),
            "" if setting.spread is None else minus(readable(setting.spread)),
            setting.finished,
            _run_links(setting, links),
        ]
        for number, (word, setting) in enumerate(chosen)
    ]
    count = len(varied)
    caption = "Best and worst settings. Perplexity a token on held-out text; spread: standard deviation over seeds."
    yield table(header, rows, caption=caption, numbers=(count + 2, count + 3, count + 4))


def _varied(cells: Sequence[Setting]) -> list[str]:
    paths = list(dict.fromkeys(path for setting in cells for path in setting.values))
    return [path for path in paths if len({str(setting.values.get(path)) for setting in cells}) > 1]


def _run_links(setting: Setting, links: Links) -> Html:
    """Return a link for each seed, or a single one."""
    texts = [f"seed {seed}" if seed is not None else "run" for seed in setting.seeds]
    # A line breaks between them, not in "seed 0".
    parts = [
        tag("span", link(text, links.of(run)), class_="once")
        for text, run in zip(texts, setting.canonical, strict=True)
    ]
    return join(itertools.chain.from_iterable((", ", part) if place else (part,) for place, part in enumerate(parts)))


def _curves(record: SweepRecord, judged: Verdict) -> Iterator[Html | None]:
    """Yield the training loss of each arm's best setting, its first seed."""
    arms = [arm for arm in judged.arms if arm.best is not None]
    curves = []
    for arm in arms[:_MOST_CURVES]:
        assert arm.best is not None
        run = arm.best.canonical[0]
        folder = record.path / RUNS / run
        if not RUN_ID.fullmatch(run) or not folder.is_dir():
            continue
        try:
            metrics = read_record(folder).metrics
        except UsageError:
            continue
        if "step" in metrics and "train_loss" in metrics:
            name = f"{clean(arm_name(arm.arm))[:80] or '(all)'}: {perplexity_text(arm.best.perplexity)}"
            curves.append(Curve(name, metrics["step"], metrics["train_loss"]))
    drawn = figure(
        Chart(
            "curves",
            "Training loss of the best setting of each arm",
            "inner steps of each replica",
            "loss (nats a token)",
            curves,
            note="Mean over a round; one seed; the number behind an arm is its validation perplexity over all seeds.",
        )
    )
    yield drawn or tag("p", "No run has recorded a loss yet, or the runs' folders are not here.")
    if len(arms) > _MOST_CURVES:
        yield tag("p", f"The first {_MOST_CURVES} of {len(arms)} arms.")


def _verdict(parts: Sequence[tuple[Any, ...]]) -> Iterator[Html | None]:
    """Yield the tables of `twophase report`, as they stand in verdict.md."""
    for heading, words, header, lines, remarks in parts:
        title = re.sub(r"(?<=gainst )never(?=,|$)", "no restart", heading)
        yield tag("h3", title)
        yield tag("p", words) if words else None
        if header:
            right = [i for i in range(1, len(header)) if all(_reads_as_number(line[i]) for line in lines)]
            cells = [[arm_name(str(line[0])), *map(_with_minus, line[1:])] for line in lines]
            yield table(header, cells, caption=title, numbers=right, hide_caption=True)
        yield notes(remarks)
    if not parts:
        yield tag("p", "There is nothing to compare yet.")


def _with_minus(cell: Any) -> Any:
    """Return a cell of a table, with a true minus sign if it is a number or an interval, and not a name."""
    if cell is None:
        return ""
    return minus(cell) if isinstance(cell, str) and (_reads_as_number(cell) or cell.startswith("[")) else cell


def _reads_as_number(cell: Any) -> bool:
    return cell is None or bool(re.fullmatch(r"[-+]?[\d.,]+(e[-+]?\d+)?%?( \(\d+/\d+\))?", str(cell)))


def _cells(record: SweepRecord, links: Links) -> Iterator[Html | None]:
    rows = record.rows[:_MOST_CELLS]
    paths = list(dict.fromkeys(path for row in rows for path in row.values))
    header = ["run", "arm", *(path for path in paths if path != SEED), SEED, "state", "perplexity", "time (s)"]
    lines = [
        [
            link(row.run, links.of(row.twin_of or row.run)),
            row.arm,
            *(value_text(row.values.get(path, "")) for path in paths if path != SEED),
            value_text(row.values.get(SEED, "")),
            row.state,
            perplexity_text(row.perplexity) if row.perplexity is not None and np.isfinite(row.perplexity) else "",
            "" if row.seconds is None else f"{row.seconds:.1f}",
        ]
        for row in rows
    ]
    shown = f"The first {len(rows)} of {len(record.rows):,} cells" if len(rows) < len(record.rows) else "All cells"
    count = len(header)
    caption = f"{shown}; {TABLE} has them all."
    yield details(f"{shown}, as a table", table(header, lines, caption=caption, numbers=(count - 2, count - 1)))
