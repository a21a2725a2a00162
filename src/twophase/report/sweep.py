"""The page of a sweep: its best setting, maps, curves of the settings that are picked, comparisons, and every cell."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.compare.sweep import compare_sweep, headlines, select, tables
from twophase.errors import UsageError
from twophase.figures.heatmap import MOST_PANELS, panels_of, scale_of, text_of
from twophase.report.charts import Chart, Curve
from twophase.report.page import render, run_link
from twophase.runs.folder import METRICS, RUN_ID
from twophase.runs.record import read_steps
from twophase.sweeps.grid import RUNS
from twophase.sweeps.table import (
    SEED,
    TABLE,
    Row,
    Setting,
    cell_text,
    measure_of,
    method_name,
    place_words,
    read_rows,
    readable,
)

_MOST_CURVES, _MOST_CELLS = 400, 400


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """Content of a sweep's folder.

    Args:
        path: the folder.
        page_folder: folder of the page, for its links.
        rows: a row a cell.
        problems: what is missing, a sentence each.
    """

    path: Path
    page_folder: Path
    rows: list[Row]
    problems: list[str]

    @property
    def going(self) -> bool:
        """True if a cell has no result yet."""
        return any(row.state == "missing" for row in self.rows)

    def run_folder(self, run: str) -> Path | None:
        """Return the folder of a run; None without one, or for an unsafe name."""
        folder = self.path / RUNS / run
        return folder if RUN_ID.fullmatch(run) and folder.is_dir() and not folder.is_symlink() else None


def read_sweep(path: Path, where: Mapping[str, str] | None = None, page_folder: Path | None = None) -> SweepRecord:
    """Read a sweep's folder, in any state: only the cells with the values `where`.

    `page_folder` is the folder of the page; None means the sweep's folder.

    Raises:
        UsageError: no folder of a sweep, a table that cannot be read, or no such cell.
    """
    if not (path / TABLE).is_file():
        inside = " or ".join(sorted(str(table.parent) for table in path.glob(f"*/{TABLE}"))[:3])  # as of `tune`
        raise UsageError(f"{path}: must be the folder of a run or a sweep{f', such as {inside}' * bool(inside)}")
    rows = select(read_rows(path / TABLE), where or {})
    counts = {state: sum(row.state == state for row in rows) for state in ("missing", "failed")}
    words = {"missing": "have no result yet; the sweep's command continues it", "failed": "could not be run"}
    problems = [f"{count:,} of {len(rows):,} cells {words[state]}." for state, count in counts.items() if count]
    if where:
        problems.append(f"Only the cells with {', '.join(f'{name}={text}' for name, text in where.items())}.")
    return SweepRecord(path, page_folder or path, rows, problems)


def sweep_report(record: SweepRecord, *, controls: Collection[str] = (), refresh: float = 0) -> str:
    """Return the page of a sweep that has been read.

    Args:
        record: record of `read_sweep`.
        controls: names of further methods that serve as controls.
        refresh: seconds after which a browser loads the page again while cells are missing; 0 for never.
    """
    comparison = compare_sweep(record.rows, controls)
    names = {
        id(cell): ", ".join(filter(None, [method_name(method.name), place_words(cell.values, method.varied)]))
        for method in comparison.methods
        for cell in method.settings
    }
    cells = [cell for method in comparison.methods for cell in method.settings]
    results = [cell.result for cell in cells if cell.result is not None]
    bests = [method.best for method in comparison.methods if method.best is not None]
    # The page of a huge sweep has the curves of its best settings, and those of others as far as there is room.
    ordered = sorted(cells, key=lambda cell: (cell not in bests, cell.result is None, cell.result))
    curves = {id(cell): curve for cell in ordered[:_MOST_CURVES] if (curve := _curve(record, cell, names[id(cell)]))}
    numbers = {key: (number, curve.name) for number, (key, curve) in enumerate(curves.items())}
    panels = panels_of(cells)
    return render(
        "sweep.html",
        styles=["heat.css"],
        title=record.path.resolve().name,
        problems=record.problems,
        refresh=refresh if record.going else 0,
        headlines=headlines(comparison),
        card=_card(comparison.best, cells),
        maps=panels[:MOST_PANELS],
        scale=scale_of(results),
        curve_of=lambda cell: numbers.get(id(cell)),
        text_of=text_of,
        cell_text=cell_text,
        more_maps=len(panels) - MOST_PANELS,
        curves=Chart(
            "curves",
            "Training loss of the settings that are pressed",
            "inner steps of each replica",
            "loss",
            [*curves.values()],
            shown=[numbers[id(best)][0] for best in bests if id(best) in numbers][:8] or [0],
        ),
        tables=tables(comparison),
        notes=comparison.notes,
        cells=_every_cell(record),
    )


def _card(best: Setting | None, cells: list[Setting]) -> list[tuple[str, object]]:
    """Return what the sweep amounts to: names and values."""
    states = [cell.state for cell in cells]
    counts: list[tuple[str, object]] = [
        (f"settings {state}", states.count(state)) for state in ("finished", "diverged", "missing")
    ]
    if best is None:
        return counts
    measure, spread = measure_of(best.rows), f" \N{PLUS-MINUS SIGN} {readable(best.spread)}" if best.spread else ""
    place = {"method": method_name(best.arm)} | {path: cell_text(value) for path, value in best.values.items()}
    return [(f"best {measure}", f"{readable(best.result)}{spread}"), *place.items(), *counts]


def _curve(record: SweepRecord, cell: Setting, name: str) -> Curve | None:
    """Return the training loss of a setting's first run that has any, with its result behind the setting's name."""
    for run in cell.runs:
        folder = record.run_folder(run)
        lines = read_steps(folder / METRICS) if folder else []
        points = [(line["step"], line["train_loss"]) for line in lines if isinstance(line.get("train_loss"), float)]
        if points:
            return Curve(f"{name[:120]}: {readable(cell.result) or cell.state}", *zip(*points, strict=True))
    return None


def _every_cell(record: SweepRecord) -> dict[str, Any]:
    """Return the table of the rows, of very many the first: its caption, header and lines."""
    rows = record.rows[:_MOST_CELLS]
    paths = list(dict.fromkeys(path for row in rows for path in row.values if path != SEED))
    lines = [
        [
            run_link(row.run, record.run_folder(row.run), record.page_folder),
            method_name(row.arm),
            *(cell_text(row.values.get(path)) for path in [*paths, SEED]),
            row.state,
            row.validation_loss if row.perplexity is None else row.perplexity,
            row.seconds,
        ]
        for row in rows
    ]
    header = ["run", "method", *paths, SEED, "state", measure_of(rows), "seconds"]
    return {"caption": f"{len(rows):,} of {len(record.rows):,} cells of {TABLE}", "header": header, "rows": lines}
