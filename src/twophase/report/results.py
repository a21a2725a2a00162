"""`twophase.load`: the results of a run or sweep as data, for notebooks and scripts. No torch."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from twophase.advice.text import HEADLINES
from twophase.advice.verdict import Diagnosis, diagnose
from twophase.errors import UsageError
from twophase.figures.heatmap import sweep_figure
from twophase.figures.style import headline, look, new_figure, styled
from twophase.judge.comparison import Comparison
from twophase.judge.verdict import Verdict, verdict
from twophase.judge.verdict_text import finding
from twophase.report.run import result_words
from twophase.report.sweep_record import SweepRecord, is_sweep, read_sweep
from twophase.runs.record import Column, RunRecord, is_run, read_record
from twophase.sweeps.grid import RUNS
from twophase.sweeps.table import AFTER, TABLE, Setting, arm_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DataFrame: TypeAlias = Any
_PANELS = (
    ("loss", "metrics", ("train_loss", "validation_loss")),
    ("gain and cosine", "rounds", ("gain", "cosine")),
    ("norms", "rounds", ("pseudo_gradient_norm", "buffer_norm")),
)


def load(path: str | Path) -> Run | Sweep:
    """Return what the folder of a run or sweep holds, finished or not.

    Args:
        path: the folder: `--out` of `train` or `sweep`, or that of `twophase.record`.

    Raises:
        UsageError: a folder of something else, or a damaged file.
    """
    path = Path(path)
    return Sweep(read_sweep(path)) if is_sweep(path) else Run(read_record(path))


class Table(dict[str, Column]):
    """Columns of numbers by name, all of one length; nan where a line has no number."""

    def frame(self) -> DataFrame:
        """Return the columns as a pandas table."""
        return _pandas().DataFrame(dict(self))


@dataclass(frozen=True)
class Run:
    """A run's results, finished or not.

    Args:
        record: everything that its folder holds, blocks and phases included.
    """

    record: RunRecord

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {result_words(self.record)})"

    def _repr_html_(self) -> str:
        diagnosed = self.diagnosis()
        verdicts = dict.fromkeys(HEADLINES[finding.verdict] for finding in diagnosed.findings)
        facts = {
            "result": result_words(self.record),
            "outer optimizer": self.record.outer_words or "unknown",
            "restart": self.record.restart,
            "rounds": f"{self.record.recorded:,}",
            "verdict": " ".join(verdicts),
        }
        return _html(self.path.name, facts)

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.record.path

    @property
    def config(self) -> dict[str, Any]:
        """Values of `config.yaml`, by dotted path; docs/getting-started.md lists the defaults that it leaves out."""
        return self.record.config

    @property
    def summary(self) -> dict[str, Any] | None:
        """Values of `summary.json`; None while the run is unfinished."""
        return self.record.summary

    @property
    def rounds(self) -> Table:
        """A row a sync: step, round, norms, cosine, gain, restarted and more."""
        return Table(self.record.rounds)

    @property
    def metrics(self) -> Table:
        """A row a line of `metrics.jsonl`: step, losses, inner learning rate and more."""
        return Table(self.record.metrics)

    def diagnosis(self) -> Diagnosis:
        """Return whether the outer loop oscillates, overshoots or lags, block by block, with the evidence."""
        return diagnose(self.record)

    def compare(self, other: Run) -> DataFrame:
        """Return the results of two runs and the values in which they differ, as a pandas table with a column each."""
        if not isinstance(other, Run):
            raise ValueError(f"Run.compare: other is a {type(other).__name__}; give another run, as load() returns it")
        first, second = (_plain(run.summary or {}) | run.record.config for run in (self, other))
        names = [name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]
        values = [[first.get(name), second.get(name)] for name in names]
        return _pandas().DataFrame(values, names, [str(self.path), str(other.path)])

    def plot(self) -> Figure:
        """Draw losses, gain and cosine, and norms over the inner steps; restarts are dotted lines."""
        with styled():
            drawn, grid = new_figure(5.5, 3, sharex=True)
            restarts = self.rounds["step"][self.rounds["restarted"] == 1]
            for axes, (label, source, names) in zip(grid[:, 0], _PANELS, strict=True):
                columns: Table = getattr(self, source)
                for number, name in enumerate(name for name in names if {name, "step"} <= columns.keys()):
                    valid = np.isfinite(columns[name])
                    title = name.replace("_", " ")
                    axes.plot(columns["step"][valid], columns[name][valid], label=title, **look(number), markevery=0.2)
                for step in restarts:
                    axes.axvline(step, color="#bbbbbb", linewidth=0.5, linestyle=":")
                axes.set_ylabel(label)
                if axes.get_legend_handles_labels()[0]:  # not of restarts alone
                    axes.legend()
            grid[-1, 0].set_xlabel("inner steps of each replica")
            headline(
                drawn,
                f"{self.path.name}: {result_words(self.record)}",
                f"{self.record.outer_words or 'outer optimizer unknown'}, restart {self.record.restart}",
            )
            return drawn


@dataclass(frozen=True)
class Sweep:
    """A sweep's results, finished or not.

    Args:
        record: its table, and what is missing.
    """

    record: SweepRecord

    def __repr__(self) -> str:
        return f"Sweep({str(self.path)!r}, {len(self.record.rows)} cells)"

    def _repr_html_(self) -> str:
        best = self.best()
        facts = {
            "cells": f"{len(self.record.rows):,}",
            "best": "nothing has finished"
            if best is None
            else f"{arm_name(best.arm)}, {best.measure} {best.result:.4g}",
            "finding": " ".join(finding(self.verdict())),
        }
        return _html(self.path.name, facts)

    @property
    def path(self) -> Path:
        """The sweep's folder."""
        return self.record.path

    @property
    def runs(self) -> list[Run]:
        """The runs that have begun, by name."""
        folders = sorted((self.path / RUNS).iterdir()) if (self.path / RUNS).is_dir() else []
        return [Run(read_record(folder)) for folder in folders if not folder.is_symlink() and is_run(folder)]

    def frame(self) -> DataFrame:
        """Return `cells.csv`, a row a cell and seed, as a pandas table."""
        texts = dict.fromkeys(("arm", "run", "control_of"), str)
        # By itself pandas takes the arm without a name, and words such as None, for missing: groupby would drop them.
        missing = {name: [""] for name in AFTER}
        return _pandas().read_csv(self.path / TABLE, dtype=texts, keep_default_na=False, na_values=missing)

    def best(self) -> Setting | None:
        """Return the setting of the lowest mean perplexity in which every seed has finished; None where none has."""
        return self.verdict().best

    def verdict(self) -> Verdict:
        """Return each arm's best, robustness and comparisons with the controls."""
        return verdict(self.record.rows)

    def compare(self, arm: str, control: str) -> Comparison:
        """Compare two arms seed by seed, tuned, held out and cell by cell.

        Args:
            arm: its name in `cells.csv`, or as tables write it.
            control: the other one's.

        Raises:
            ValueError: no such arm, or twice the same.
        """
        arms = {name: name for name in dict.fromkeys(row.arm for row in self.record.rows)}
        written = arms | {arm_name(name): name for name in arms}
        if arm == control:
            raise ValueError(f"Sweep.compare: {arm!r} is on both sides; give two arms of {', '.join(map(repr, arms))}")
        for name in (arm, control):
            if name not in written:
                raise ValueError(f"Sweep.compare: there is no arm {name!r}; the arms are {', '.join(map(repr, arms))}")
        pair = written[arm], written[control]
        judged = verdict(self.record.rows, controls=[pair[1]])  # areas are near the best of all arms
        for comparison in judged.comparisons:
            if (comparison.arm, comparison.control) == pair:
                return comparison
        raise ValueError(f"Sweep.compare: {arm!r} is a control itself; compare another arm with it")

    def plot(self) -> Figure:
        """Draw the heatmaps that `figures/sweep.png` holds."""
        with styled():
            return sweep_figure(self.record.rows)


def _plain(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the single values of a summary but for its fingerprints."""
    hidden = ("config", "summary_sha256", "weights_sha256")
    return {name: value for name, value in summary.items() if not isinstance(value, dict) and name not in hidden}


def _html(name: str, facts: dict[str, str]) -> str:
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in facts.items())
    return f"<table><caption>{html.escape(name)}</caption>{rows}</table>"


def _pandas() -> Any:
    try:
        import pandas as pd  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError:
        raise UsageError("a table needs pandas, which is not installed; pip install 'twophase[sweep]'") from None
    return pd
