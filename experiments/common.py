"""What the experiments share: their options, tables with their origin, figures, and the paper's modes and rules.

A script computes a table, or reads the stored one of trainings that took hours, draws from this table alone, and writes
`results/NAME.csv` and `docs/NAME.png`, `docs/NAME-DETAIL.png`; all into one folder with `--out`.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from twophase import theory
from twophase.figures import style
from twophase.figures.style import rendered, styled, write_files
from twophase.files import csv_text, write_atomic
from twophase.restart import Periodic, mean_outer_gain
from twophase.rule import OuterRule
from twophase.sweeps.grid import RUNS, Sweep
from twophase.sweeps.runner import run_sweep
from twophase.sweeps.table import Row

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"

SIX = (0.95, 0.85, 0.75, 0.60, 0.45, 0.30)
"""Effective progress sigma of the paper's six modes (figure 1b)."""
BLOCKS = ((0.92, 1.00), (0.55, 0.65), (0.18, 0.26))
"""The paper's three blocks of modes (figure 1c); it does not say how many modes each has."""
HEAVY_BALL = OuterRule(1.0, 0.9, form="ema")
NESTEROV = OuterRule(1.0, 0.9, nesterov=True, form="ema")
"""The rule of the paper's figure 1, with and without look-ahead."""
DILOCO = OuterRule(0.7, 0.9, nesterov=True)
AVERAGING = OuterRule(1.0, 0.0)
KINDS = {"HB": False, "NAG": True}
"""Whether a rule looks ahead, by the short names of heavy ball and Nesterov."""


def log10_loss(rule: Any, sigma: ArrayLike, rounds: int, period: ArrayLike | None = None) -> Any:
    """Return the exact log10 of the final loss, which is 1/2 at first; without a period there is no restart."""
    return theory.log_final_loss(rule, sigma, rounds, rounds if period is None else period) / np.log(10)


def same_gain(rule: OuterRule, period: int, rounds: int) -> OuterRule:
    """Return momentum-free outer SGD at the mean outer gain that the rule has with restarts (theory note R31)."""
    return OuterRule(mean_outer_gain(rule, Periodic(period), rounds), 0.0, form="ema")


def arguments(description: str | None, *, trains: bool = False) -> argparse.Namespace:
    """Parse the command line; its first line of help is the description's.

    Args:
        description: the script's docstring.
        trains: add `--train`, without which the stored table is drawn.

    Returns:
        `out`: folder for all files, or None for `results/` and `docs/`. With `trains` also `train`, a scale or None,
        and `workers`; a training's `out` is never None.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of all files (docs/ and experiments/results/)")
    if trains:
        parser.add_argument(
            "--train",
            choices=("quick", "laptop", "paper"),
            help="train and draw that, below --out (runs/experiments), instead of the stored table; "
            "quick: a minute, does it work; laptop: what is stored; paper: the paper's scale, for GPUs",
        )
        parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="worker processes (%(default)s)")
    options = parser.parse_args()
    if trains and options.train and options.out is None:
        options.out = Path("runs/experiments")
    return options


def store(name: str, table: pd.DataFrame, draw: Callable[[Any], Mapping[str, Figure]], out: Path | None) -> None:
    """Write a table and the figures that are drawn from it.

    Args:
        name: name of the script; the files' names begin with it.
        table: what was found.
        draw: returns figures by what stands behind the name, "" for the first.
        out: folder of all files; None is `results/` and `docs/`.
    """
    for folder in {out or RESULTS, out or DOCS}:
        folder.mkdir(parents=True, exist_ok=True)
    write(name, table, out or RESULTS)
    with style.styled():
        for detail, figure in draw(table).items():
            style.save((out or DOCS) / f"{name}{detail}.png", figure)


def write(name: str, table: pd.DataFrame, folder: Path = RESULTS) -> None:
    """Write `NAME.csv` with six digits below a line of command, commit and date.

    A file whose numbers agree stays as it is: last digits differ between processors.
    """
    path, text = folder / f"{name}.csv", table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    if path.exists() and _agree(read(name, folder), read_text(text)):
        return
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    command = " ".join(["python", os.path.relpath(sys.argv[0], RESULTS.parents[1]), *sys.argv[1:]])
    origin = f"# {command}, commit {git.stdout.strip() or 'unknown'}, {datetime.now(UTC):%Y-%m-%d}\n"
    write_atomic(path, origin + text)


def read(name: str, folder: Path = RESULTS) -> pd.DataFrame:
    """Read `NAME.csv`; restart policies are text."""
    return read_text((folder / f"{name}.csv").read_text(encoding="utf-8"))


def read_text(text: str) -> pd.DataFrame:
    """Read the text of a table, its first line of origin left out."""
    return pd.read_csv(io.StringIO(text), comment="#", dtype={"restart": str, "of_restart": str})


def _agree(one: pd.DataFrame, other: pd.DataFrame) -> bool:
    try:
        pd.testing.assert_frame_equal(one, other, rtol=1e-5, atol=1e-9)
    except AssertionError:
        return False
    return True


def show(table: pd.DataFrame, digits: int = 2) -> None:
    """Print a table, numbers with so many decimals."""
    print(table.to_string(index=False, na_rep="", float_format=f"{{:.{digits}f}}".format), end="\n\n")


def signed(value: float, digits: int = 1) -> str:
    """Write a number with a true minus sign, for text in figures."""
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


def dot_chart(axes: Axes, labels: Sequence[str], **settings: Any) -> None:
    """Name the lines of a chart of points, one line a label, from the top down."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set(ylim=(len(labels) - 0.5, -0.5), **settings)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


# ------------------------------------------- what `wires`, `blockwise`, `topk` and `bench/tables` still use: as it was

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
