"""What the experiments share: their options, trained runs, and a figure's files.

An experiment computes a `Result`, the rows behind its figures, draws from these rows alone, and writes `NAME.png`,
`NAME-DETAIL.png`, `NAME.csv` (the rows) and `NAME.json` (numbers and settings). The files of the runs of the paper's
models, which take hours to train, are in `results/`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twophase.figures.matplotlib_types import Figure
from twophase.figures.style import rendered, styled, write_files
from twophase.files import csv_text
from twophase.sweeps.grid import RUNS, Sweep
from twophase.sweeps.runner import run_sweep
from twophase.sweeps.table import Row

RESULTS = Path(__file__).parent / "results"
"""Tables of runs that took hours, as they were measured."""
Figures = Callable[["Result"], dict[str, Figure]]
"""Draws a result: figures by what stands behind the experiment's name in the names of their files."""


@dataclass(frozen=True, slots=True)
class Result:
    """What an experiment has found.

    Args:
        rows: the lines of the CSV, from column name to value.
        numbers: what the rows amount to, by name; may be nested.
        settings: inputs of the computation.
    """

    rows: list[dict[str, Any]]
    numbers: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def select(rows: Iterable[Mapping[str, Any]], **values: Any) -> list[Any]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


def options_of(description: str | None, *, trains: bool = False) -> argparse.ArgumentParser:
    """Return a parser of the options that all experiments take, with their first line as its description."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"), help="folder of the files (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small and coarse: does it work?")
    if trains:
        parser.add_argument("--paper", action="store_true", help="at the paper's scale, for GPUs")
        parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="worker processes (%(default)s)")
        parser.add_argument("--redraw", action="store_true", help=f"draw the numbers in {RESULTS.name}/, train nothing")
    return parser


def compute(
    name: str,
    description: str | None,
    table: Callable[[bool], Result],
    figures: Figures,
    tables: Callable[[Result], str],
) -> None:
    """Compute an experiment without a sweep, whose `table` is given `--quick`; write its files and print its tables."""
    options = options_of(description).parse_args()
    result = table(options.quick)
    print(tables(result), *save(name, options.out, result, figures), sep="\n")


def train(sweep: Sweep, folder: Path, *, workers: int, runs: Path) -> list[Row]:
    """Train the runs of a sweep that have not ended yet and return the rows of its table.

    Args:
        sweep: the sweep.
        folder: the sweep's folder.
        workers: worker processes.
        runs: folder of the runs, which several sweeps may share.

    Raises:
        RunError: some runs could not be trained; the same call tries them again.
    """
    runs.mkdir(parents=True, exist_ok=True)
    if runs.absolute() != (folder / RUNS).absolute() and not (folder / RUNS).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUNS).symlink_to(runs.absolute())
    outcome = run_sweep(sweep, folder, workers=workers)
    outcome.check(folder)
    return outcome.rows


# -------------------------------------------------------------------------------------------------------------- files


def save(name: str, out: Path, result: Result, figures: Figures) -> list[Path]:
    """Draw a result and write its files into a folder, which is made if needed; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    facts = plain({"settings": result.settings, "numbers": result.numbers})
    text = json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    files = draw(result, figures) | {".csv": csv_text(result.rows), ".json": text}
    return write_files(out / name, files)


def draw(result: Result, figures: Figures) -> dict[str, bytes]:
    """Return the pictures of a result by what stands behind the experiment's name."""
    with styled():
        drawn = figures(result).items()
        return {f"{part}.png": rendered(figure, (".png",), palette=True)[".png"] for part, figure in drawn}


def load(name: str, folder: Path = RESULTS) -> Result:
    """Read the CSV and the JSON of an experiment back."""
    facts = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = [{key: value(key, word) for key, word in line.items()} for line in csv.DictReader(file)]
    return Result(rows, facts["numbers"], facts["settings"])


def value(column: str, word: str) -> Any:
    """Read a cell of a table: a number where it is one, None where it is empty; a policy is text."""
    if column.endswith("restart"):
        return word or None
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            pass
    return {"": None, "true": True, "false": False}.get(word, word)


def plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy's types become plain, NaN and infinities null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars
        return plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.12g}") if math.isfinite(value) else None
    return value
