"""What the experiments share: their options, tables with their origin, figures, and the paper's modes and rules.

A script computes a table, or reads the stored one of trainings that took hours, draws from this table alone, and writes
`results/NAME.csv` and `docs/NAME.png`, `docs/NAME-DETAIL.png`; all into one folder with `--out`.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from twophase import theory
from twophase.figures import style
from twophase.files import write_atomic
from twophase.rule import OuterRule

Frame: TypeAlias = Any
"""A pandas table, or a column of it: its own types take a column for whatever an index may give."""
Draw: TypeAlias = Callable[[Any], Mapping[str, Figure]]
"""Draws figures from a table, by what stands behind the script's name in their files' names, "" for the first."""
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


def whole(periods: ArrayLike, rounds: int) -> NDArray[np.int64]:
    """Round periods to whole numbers from 1 to `rounds`."""
    return np.floor(np.asarray(periods) + 0.5).clip(1, rounds).astype(np.int64)


def script(
    doc: str | None,
    name: str,
    draw: Draw,
    compute: Callable[[], Frame] | None = None,
    *,
    train: Callable[[argparse.Namespace], Frame] | None = None,
    scales: Mapping[str, Any] | None = None,
    report: Callable[[Frame], None] | None = None,
) -> None:
    """Run a script: compute its table, or with `--train` train it, else read the stored one; print, write and draw it.

    Args:
        doc: the script's docstring; its first line is that of the help.
        name: its files' names begin with it.
        draw: draws its figures.
        compute: returns the table of a script that trains nothing.
        train: returns the table of training, from options: `scale`, `train`, its name, `workers`, and the folder `out`.
        scales: at which it trains, by name.
        report: prints what the table says; by default all of it.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of all files (docs/ and experiments/results/)")
    if scales:
        parser.add_argument(
            "--train",
            choices=list(scales),
            help="train below --out (runs/experiments) instead of drawing the stored table; quick: a minute, does it "
            "work; laptop: what is stored; paper: the paper's scale, for GPUs",
        )
        parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="worker processes (%(default)s)")
    options = parser.parse_args()
    if train and scales and options.train:
        options.scale, options.out = scales[options.train], options.out or Path("runs/experiments")
        found = train(options)
    else:
        found = compute() if compute else read(name)
    (report or show)(found)
    tables, figures = options.out or RESULTS, options.out or DOCS
    tables.mkdir(parents=True, exist_ok=True)
    write(name, found, tables)
    with style.styled():
        for detail, figure in draw(found).items():
            style.save(figures / f"{name}{detail}.png", figure)


def write(name: str, table: Frame, folder: Path = RESULTS) -> None:
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


def read(name: str, folder: Path = RESULTS) -> Frame:
    """Read `NAME.csv`; restart policies are text."""
    return read_text((folder / f"{name}.csv").read_text(encoding="utf-8"))


def read_text(text: str) -> Frame:
    """Read the text of a table, its first line of origin left out."""
    return pd.read_csv(io.StringIO(text), comment="#", dtype={"restart": str, "of_restart": str})


def _agree(one: Frame, other: Frame) -> bool:
    try:
        pd.testing.assert_frame_equal(one, other, rtol=1e-5, atol=1e-9)
    except AssertionError:
        return False
    return True


def show(table: Frame, digits: int = 2) -> None:
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


def seed_chart(
    table: Frame, line: str, series: str, share: Callable[[Frame], Frame], *, apart: float = 0.14
) -> tuple[Figure, Axes]:
    """Draw ratios in percent, a line for each value of a column: geometric means as dots, and a stroke for each seed.

    Args:
        table: with the columns `ratio` and, of each seed, `ratio_SEED`.
        line: the column of the lines.
        series: the column of the dots of a line.
        share: returns what is drawn of ratios, before it is a percentage.
        apart: distance of two dots of a line, where two lines have a distance of 1.
    """
    lines, names = (list(dict.fromkeys(table[column])) for column in (line, series))
    figure, [[axes]] = style.new_figure(1.3 + 1.7 * apart * len(lines))
    for number, name in enumerate(names):
        mine = table[table[series] == name]
        y = np.array([lines.index(each) for each in mine[line]]) + apart * (number - (len(names) - 1) / 2)
        look = style.look(number, every=1) | {"linestyle": "none", "markersize": 4}
        axes.plot(100 * share(mine["ratio"]), y, label=name, **look)
        for seed in mine.filter(like="ratio_"):
            axes.plot(100 * share(mine[seed]), y, "|", color=look["color"], markersize=4)
    axes.axvline(0, color=style.MUTED, linewidth=0.7, zorder=0)
    dot_chart(axes, lines)
    style.share_legend(figure, [axes], columns=4)
    return figure, axes
