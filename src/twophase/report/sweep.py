"""The report of a sweep: its finding in words, the same maps as its figures, curves to compare, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from twophase.judge.verdict import WITHIN, Verdict, verdict
from twophase.judge.verdict_text import sections
from twophase.report.maps import View, is_map, maps, perplexity_text, place_text, points, value_text
from twophase.report.page import Html, clean, counted, details, link, notes, page, section, table, tag
from twophase.report.plot import MOST_POINTS, Chart, Curve, figure, script
from twophase.report.sweep_record import SweepRecord
from twophase.runs.folder import METRICS
from twophase.runs.record import read_steps
from twophase.sweeps.table import PERPLEXITY, SEED, TABLE, Setting, arm_name, measure_of, readable, result, settings

_MOST_CURVES, _SHOWN_CURVES, _MOST_CELLS = 400, 8, 400
_ALL_POINTS = 24_000
"""Points of all curves of a page together, which keep it below 600 kB."""


def sweep_report(
    record: SweepRecord, *, within: Sequence[float] = WITHIN, controls: Collection[str] = (), refresh: float = 0
) -> str:
    """Return the page of a sweep that has been read.

    Args:
        record: record of `read_sweep`.
        within: distances from the best that robustness areas are given for.
        controls: names of further arms that serve as controls.
        refresh: seconds after which the page shows its newest self, while cells are missing; 0 without a watch.
    """
    judged = verdict(record.rows, within, controls)
    cells = settings(record.rows)
    counts = {state: sum(setting.state == state for setting in cells) for state in ("finished", "diverged", "missing")}
    counted_states = ", ".join(f"{count:,} {state}" for state, count in counts.items() if count)
    (_, words_of_all, _, _, remarks), *others = sections(judged)  # in the words that the terminal has
    chart, numbers = _curves(record, judged, cells)
    view = View(record, judged, cells, numbers)
    return page(
        record.path.resolve().name,
        f"{record.part} A sweep of {counted(len(cells), 'setting')} ({counted_states}) over "
        f"{counted(len(judged.arms), 'arm')}, {record.forms}.".lstrip(),
        section("In short", tag("div", tag("p", words_of_all), class_="verdict"), notes(remarks), anchor="short"),
        section(
            "Map and curves" if is_map(judged) else "Settings and curves",
            tag(
                "div",
                tag("div", *(maps(view) if is_map(judged) else [figure(points(view)), _list(view)])),
                tag("div", chart or tag("p", "No run has recorded a loss that is here."), class_="beside"),
                class_="pair",
            ),
            anchor="map",
        ),
        section("Verdict", *_verdict(others), anchor="verdict"),
        section("Every cell", _cells(record), anchor="cells"),
        kind="sweep",
        problems=record.problems,
        refresh=refresh if record.going else 0,
        scripts=[script()],
    )


def _list(view: View) -> Html:
    """Return the settings as a table, with the number of each as a button."""
    paths = dict.fromkeys(path for setting in view.cells for path in setting.values)
    varied = [path for path in paths if len({str(setting.values.get(path)) for setting in view.cells}) > 1]
    rows = [
        [
            arm_name(setting.arm),
            view.number(setting, place_text(setting, varied)),
            readable(setting.spread),
            setting.finished,
            view.runs(setting),
            *(value_text(setting.values.get(path)) for path in varied),
        ]
        for setting in view.cells
    ]
    header = ["arm", measure_of(view.cells), "spread", "finished", "run", *varied]
    caption = "Settings. Press a number to show or hide its curve; spread: over the seeds."
    return table(header, rows, caption=caption)


def _curves(
    record: SweepRecord, judged: Verdict, cells: Sequence[Setting]
) -> tuple[Html | None, dict[tuple[str, tuple[str, ...]], int]]:
    """Return the training loss of every setting's first run as a chart of the reader's choice, and their numbers."""
    bests = [arm.best for arm in judged.arms if arm.best is not None]
    ordered = sorted(cells, key=lambda setting: setting not in bests)[:_MOST_CURVES]
    curves: list[Curve] = []
    numbers: dict[tuple[str, tuple[str, ...]], int] = {}
    for setting in ordered:
        points = _losses(record, setting)
        if points is not None:
            varied = next(arm.varied for arm in judged.arms if arm.arm == setting.arm)
            numbers[setting.arm, setting.runs] = len(curves)
            result = perplexity_text(setting.result) or setting.state
            curves.append(Curve(f"{clean(place_text(setting, varied))[:120]}: {result}", *points))
    first = [numbers[key] for best in bests if (key := (best.arm, best.runs)) in numbers]
    drawn = figure(
        Chart(
            "curves",
            "Training loss of the settings that are pressed",
            "inner steps of each replica",
            "loss (nats a token)" if measure_of(cells) == PERPLEXITY else "loss",
            curves,
            note="At first the best setting of each arm. Mean over a round, one seed; behind a name: the result "
            "over all seeds. Press a name to take its curve out.",
            shown=first[:_SHOWN_CURVES] or [0],
            points=max(40, min(MOST_POINTS, _ALL_POINTS // max(len(curves), 1))),
        )
    )
    return drawn, numbers


def _losses(record: SweepRecord, setting: Setting) -> tuple[list[float], list[float]] | None:
    """Return steps and training losses of a setting's first run that is here and has any."""
    for run in setting.runs:
        folder = record.run_folder(run)
        lines = read_steps(folder / METRICS) if folder else []
        pairs = [(line.get("step"), line.get("train_loss")) for line in lines]
        points = [(x, y) for x, y in pairs if isinstance(x, int) and isinstance(y, float) and math.isfinite(y)]
        if points:
            steps, losses = zip(*points, strict=True)
            return list(steps), list(losses)
    return None


def _verdict(parts: Sequence[tuple[Any, ...]]) -> Iterator[Html | None]:
    """Yield the tables of `twophase report`, as they stand in verdict.md."""
    for heading, text, header, lines, remarks in parts:
        yield tag("h3", heading)
        yield tag("p", text) if text else None
        yield table(header, lines, caption=heading, hide_caption=True)
        yield notes(remarks)


def _cells(record: SweepRecord) -> Html:
    rows = record.rows[:_MOST_CELLS]
    paths = [path for path in dict.fromkeys(path for row in rows for path in row.values) if path != SEED]
    header = ["run", "arm", *paths, SEED, "state", measure_of(rows), "time (s)"]
    lines = [
        [
            link(row.run, record.page_of(row.run)),
            arm_name(row.arm),
            *(value_text(row.values.get(path)) for path in [*paths, SEED]),
            row.state,
            perplexity_text(result(row)),
            "" if row.seconds is None else f"{row.seconds:.1f}",
        ]
        for row in rows
    ]
    title = f"The first {len(rows)} of {len(record.rows):,} cells" if len(rows) < len(record.rows) else "All cells"
    return details(f"{title}, as a table", table(header, lines, caption=f"{title}; {TABLE} has them all."))
