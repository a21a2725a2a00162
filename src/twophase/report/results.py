"""`twophase.load`: the results of a run or sweep as data, for notebooks and scripts. No torch."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from twophase.compare.sweep import Against, SweepComparison, compare_sweep
from twophase.diagnose import Diagnosis, diagnose
from twophase.errors import UsageError, python_words
from twophase.figures.heatmap import sweep_figure
from twophase.figures.style import check_names, headline, look, new_figure, relabelled, styled
from twophase.report.run import result_words
from twophase.report.sweep import read_sweep
from twophase.runs.record import Column, RunRecord, is_run, read_record
from twophase.sweeps.grid import RUNS
from twophase.sweeps.table import AFTER, TABLE, Row, Setting, measure_of, method_name, text_paths

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DataFrame: TypeAlias = Any
_PANELS = (
    ("loss", "metrics", ("train_loss", "validation_loss")),
    ("gain and cosine", "rounds", ("gain", "cosine")),
    ("norms", "rounds", ("pseudo_gradient_norm", "buffer_norm")),
)


@python_words()
def load(path: str | Path) -> Run | Sweep:
    """Return what the folder of a run or sweep holds, finished or not.

    Args:
        path: the folder: `--out` of `train` or `sweep`, or that of `twophase.record`.

    Raises:
        UsageError: a folder of something else.
    """
    path = Path(path)
    return Run(read_record(path)) if is_run(path) else Sweep(path, read_sweep(path).rows)


class Table(dict[str, Column]):
    """Columns of numbers by name, all of one length; nan where a line has no number."""

    def frame(self) -> DataFrame:
        """Return the columns as a pandas table."""
        import pandas as pd  # noqa: PLC0415 - an extra

        return pd.DataFrame(dict(self))


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
        facts = {
            "result": result_words(self.record),
            "outer optimizer": self.record.outer_words or "unknown",
            "restart": self.record.restart,
            "rounds": f"{self.record.recorded:,}",
            "diagnosis": self.diagnosis().state,
        }
        return _card(self.path.name, facts)

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.record.path

    @property
    def config(self) -> dict[str, Any]:
        """Values of `config.yaml`, by dotted path."""
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
        """Return the state of the outer loop, with its numbers and the one change to try."""
        return diagnose(self.record)

    def compare(self, other: Run) -> DataFrame:
        """Return the results of two runs and the values in which they differ, as a pandas table with a column each."""
        import pandas as pd  # noqa: PLC0415 - an extra

        if not isinstance(other, Run):
            raise UsageError(f"Run.compare: must be given another run, got {other!r:.80}")
        prints = ("config", "summary_sha256", "weights_sha256")
        mine, others = (
            {name: value for name, value in (run.summary or {}).items() if not isinstance(value, dict)} | run.config
            for run in (self, other)
        )
        names = [name for name in {**mine, **others} if name not in prints and mine.get(name) != others.get(name)]
        values = [[mine.get(name), others.get(name)] for name in names]
        return pd.DataFrame(values, names, [str(self.path), str(other.path)])

    def plot(
        self,
        *,
        title: str | None = None,
        labels: Mapping[str, str] | None = None,
        limits: Mapping[str, tuple[float, float]] | None = None,
    ) -> Figure:
        """Draw losses, gain and cosine, and norms over the inner steps; restarts are dotted lines.

        Args:
            title: in the place of the run's result; an empty one is none.
            labels: other words for labels and names of curves, by those that the figure has.
            limits: lowest and highest value of some axes, by their label.
        """
        rounds = self.rounds
        with styled():
            drawn, grid = new_figure(5.5, 3, sharex=True)
            for axes, (label, source, names) in zip(grid[:, 0], _PANELS, strict=True):
                columns = rounds if source == "rounds" else self.metrics
                for number, name in enumerate(name for name in names if {name, "step"} <= columns.keys()):
                    valid = np.isfinite(columns[name])
                    x, y, word = columns["step"][valid], columns[name][valid], name.replace("_", " ")
                    axes.plot(x, y, label=word, **look(number), markevery=0.2)
                for step in rounds["step"][rounds["restarted"] == 1]:
                    axes.axvline(step, color="#bbbbbb", linewidth=0.5, linestyle=":")
                axes.set_ylabel(label)
                if axes.get_legend_handles_labels()[0]:  # not of restarts alone
                    axes.legend()
            grid[-1, 0].set_xlabel("inner steps of each replica")
            outer = self.record.outer_words or "outer optimizer unknown"
            words = f"{self.path.name}: {result_words(self.record)}", f"{outer}, restart {self.record.restart}"
            headline(drawn, *(words if title is None else (title,)))
            setters = {axes.get_ylabel(): axes.set_ylim for axes in grid[:, 0]}
            setters[grid[-1, 0].get_xlabel()] = grid[-1, 0].set_xlim
            check_names("limits", limits or {}, [*setters])
            for label, ends in (limits or {}).items():
                setters[label](ends)
            return relabelled(drawn, labels or {})


@dataclass(frozen=True)
class Sweep:
    """A sweep's results, finished or not.

    Args:
        path: the sweep's folder.
        rows: the rows of its `cells.csv`.
    """

    path: Path
    rows: list[Row]

    def __repr__(self) -> str:
        return f"Sweep({str(self.path)!r}, {len(self.rows)} cells)"

    def _repr_html_(self) -> str:
        best = self.best()
        words = (
            f"{method_name(best.arm)}, {measure_of(best.rows)} {best.result:.4g}" if best else "nothing has finished"
        )
        return _card(self.path.name, {"cells": f"{len(self.rows):,}", "best": words})

    @property
    def runs(self) -> list[Run]:
        """The runs that have begun, by name."""
        folders = sorted((self.path / RUNS).glob("*"))
        return [Run(read_record(folder)) for folder in folders if not folder.is_symlink() and is_run(folder)]

    def frame(self) -> DataFrame:
        """Return `cells.csv`, a row a cell and seed, as a pandas table."""
        import pandas as pd  # noqa: PLC0415 - an extra

        texts: Any = dict.fromkeys(("arm", "run", "control_of", *text_paths(self.path / TABLE)), str)
        # By itself pandas takes the arm without a name, and words such as None, for missing: groupby would drop them.
        missing = {name: [""] for name in AFTER}
        return pd.read_csv(self.path / TABLE, dtype=texts, keep_default_na=False, na_values=missing)

    def best(self) -> Setting | None:
        """Return the setting of the lowest mean perplexity in which every seed has finished; None where none has."""
        return self.comparison().best

    def comparison(self) -> SweepComparison:
        """Return each method's settings, and every method against every control."""
        return compare_sweep(self.rows)

    def compare(self, method: str, control: str) -> Against:
        """Compare two methods seed by seed: each at its best setting, and over the cells that both have.

        Args:
            method: its name in `cells.csv`, or as tables write it.
            control: the other one's.

        Raises:
            ValueError: no such method, twice the same, or a method that is a control itself.
        """
        names = {name: row.arm for row in self.rows for name in (row.arm, method_name(row.arm))}
        if method in [*names] and control in [*names]:
            for each in compare_sweep(self.rows, [names[control]]).against:
                if (each.method, each.control) == (names[method], names[control]):
                    return each
        known = ", ".join(map(repr, names))
        raise ValueError(f"Sweep.compare: must be a method and a control, among {known}, got {method!r}, {control!r}")

    def plot(
        self,
        *,
        title: str | None = None,
        labels: Mapping[str, str] | None = None,
        limits: tuple[float, float] | None = None,
    ) -> Figure:
        """Draw the heatmaps that `figures/sweep.png` holds; `limits` are the colours' ends, others as of a run."""
        with styled():
            return relabelled(sweep_figure(self.rows, title=title, limits=limits), labels or {})


def _card(name: str, facts: dict[str, str]) -> str:
    """Return facts as a small table of HTML, which a notebook shows."""
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in facts.items())
    return f"<table><caption>{html.escape(name)}</caption>{rows}</table>"
