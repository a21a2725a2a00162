"""The report of a sweep: what its table says, as heatmaps with cells that lead to their runs, curves and verdicts."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from twophase.base.config import UsageError
from twophase.judge.verdict import WITHIN, Verdict, verdict
from twophase.judge.verdict_text import sections
from twophase.report.charts import Chart, Curve, figure
from twophase.report.heatmap import arm_name, heatmaps, perplexity_text, value_text
from twophase.report.page import Html, clean, counted, details, join, link, notes, page, section, table, tag
from twophase.report.sweep_record import SweepRecord
from twophase.runs.record import read_record
from twophase.sweep.run import TABLE
from twophase.sweep.table import SEED, Setting, readable, settings

_MOST_CURVES, _MOST_CELLS = 6, 500


def sweep_report(
    record: SweepRecord, *, within: Sequence[float] = WITHIN, controls: Collection[str] = (), refresh: float = 0
) -> str:
    """Return the page of a sweep that has been read.

    Args:
        record: of `read_sweep`.
        within: distances from the best that robustness areas are given for.
        controls: further arms that the others are compared with.
        refresh: seconds after which the page shows its newest self, while cells are missing; 0 without a watch.
    """
    judged = verdict(record.rows, within, controls)
    cells = settings(record.rows)
    counts = {state: sum(setting.state == state for setting in cells) for state in ("finished", "diverged", "missing")}
    words = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    first, *others = sections(judged)
    return page(
        record.path.resolve().name,
        f"A sweep of {counted(len(cells), 'setting')} ({words}) over {counted(len(judged.arms), 'arm')}, "
        f"{record.forms}.",
        section("In short", *_in_short(first, cells, record), anchor="short"),
        section("Heatmaps", *heatmaps(record, judged, cells), anchor="heatmaps"),
        section("Curves", *_curves(record, judged), anchor="curves"),
        section("Verdict", *_verdict(others), anchor="verdict"),
        section("Every cell", _cells(record), anchor="cells"),
        what="sweep",
        problems=record.problems,
        refresh=refresh if record.going else 0,
    )


def _in_short(first: tuple[Any, ...], cells: Sequence[Setting], record: SweepRecord) -> Iterator[Html | None]:
    _, words, _, _, remarks = first
    yield tag("p", tag("strong", words)) if words else None
    yield notes(remarks)
    finished = [setting for setting in cells if setting.perplexity is not None]
    ranked = sorted(finished, key=lambda setting: setting.perplexity or 0.0)
    if not ranked:
        return
    best = [f"best\N{NO-BREAK SPACE}{place}" for place in range(1, 6)][: len(ranked)]
    worst = ranked[5:][-3:]
    paths = dict.fromkeys(path for setting in cells for path in setting.values)
    varied = [path for path in paths if len({str(setting.values.get(path)) for setting in cells}) > 1]
    rows = [
        [
            word,
            arm_name(setting.arm) or "(all)",
            *(value_text(setting.values.get(path)) for path in varied),
            perplexity_text(setting.perplexity),
            readable(setting.spread),
            setting.finished,
            _run_links(setting, record),
        ]
        for word, setting in zip([*best, *["worst"] * len(worst)], [*ranked[:5], *worst], strict=True)
    ]
    header = ["", "arm", *varied, "perplexity", "spread", "seeds", "run"]
    caption = "Best and worst settings. Perplexity a token on held-out text; spread: standard deviation over seeds."
    yield table(header, rows, caption=caption)


def _run_links(setting: Setting, record: SweepRecord) -> Html:
    """Return a link for each seed, or a single one; a line breaks between them, not in "seed 0"."""
    texts = [f"seed {seed}" if seed is not None else "run" for seed in setting.seeds]
    links = (link(text, record.page_of(run)) for text, run in zip(texts, setting.canonical, strict=True))
    return join((tag("span", target, class_="once") for target in links), ", ")


def _curves(record: SweepRecord, judged: Verdict) -> Iterator[Html | None]:
    """Yield the training loss of each arm's best setting, its first seed."""
    bests = [(arm.arm, arm.best) for arm in judged.arms if arm.best is not None]
    curves = []
    for arm, best in bests[:_MOST_CURVES]:
        folder = record.run_folder(best.canonical[0])
        if folder is None:
            continue
        try:
            metrics = read_record(folder).metrics
        except UsageError:  # its own page says what is damaged
            continue
        if "step" in metrics and "train_loss" in metrics:
            name = f"{clean(arm_name(arm))[:80] or '(all)'}: {perplexity_text(best.perplexity)}"
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
    if len(bests) > _MOST_CURVES:
        yield tag("p", f"The first {_MOST_CURVES} of {len(bests)} arms.")


def _verdict(parts: Sequence[tuple[Any, ...]]) -> Iterator[Html | None]:
    """Yield the tables of `twophase report`, as they stand in verdict.md."""
    for heading, words, header, lines, remarks in parts:
        title = re.sub(r"(?<=gainst )never(?=,|$)", "no restart", heading)
        yield tag("h3", title)
        yield tag("p", words) if words else None
        if header:
            cells = [[arm_name(str(line[0])), *line[1:]] for line in lines]
            yield table(header, cells, caption=title, hide_caption=True)
        yield notes(remarks)
    if not parts:
        yield tag("p", "There is nothing to compare yet.")


def _cells(record: SweepRecord) -> Html:
    rows = record.rows[:_MOST_CELLS]
    paths = [path for path in dict.fromkeys(path for row in rows for path in row.values) if path != SEED]
    header = ["run", "arm", *paths, SEED, "state", "perplexity", "time (s)"]
    lines = [
        [
            link(row.run, record.page_of(row.twin_of or row.run)),
            row.arm,
            *(value_text(row.values.get(path, "")) for path in [*paths, SEED]),
            row.state,
            perplexity_text(row.perplexity) if row.perplexity is not None and math.isfinite(row.perplexity) else "",
            "" if row.seconds is None else f"{row.seconds:.1f}",
        ]
        for row in rows
    ]
    shown = f"The first {len(rows)} of {len(record.rows):,} cells" if len(rows) < len(record.rows) else "All cells"
    return details(f"{shown}, as a table", table(header, lines, caption=f"{shown}; {TABLE} has them all."))
