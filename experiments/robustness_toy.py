"""Do restarts enlarge the region of good outer hyperparameters? The paper's figure 2, with its missing settings.

The paper gives neither the spectrum, horizon, grid and clipping of its heatmaps, nor a momentum-free control. Here:
both forms of the rule, two spectra, and outer SGD at the same learning rate and at the mean gain of the restarted rule.

Source: paper figure 2; theory notes E15, E16, R18, R20, R31, anchor A5.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from common import Result, compute, select
from model import KINDS, SIX, WIDE, dot_chart, log10_loss, signed
from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.style import DIVERGED, HATCH, INK, headline, look, new_figure, share_legend
from twophase.restart import Periodic, mean_outer_gain
from twophase.rule import FORM_WORDS, FORMS, Form, OuterRule
from twophase.sweeps.table import format_table
from twophase.theory.inputs import rule_grid

ROUNDS, MAX_PERIOD, PERIOD = 60, 20, 3
PERIODS = (*range(1, MAX_PERIOD + 1), ROUNDS)
"""Those of a cell's best period; the last is no restart."""
LARGEST_MOMENTUM = 0.99
LRS = {"ema": (0.1, 4.0), "sum": (0.05, 2.0)}
SPECTRA = {"six modes": (SIX, -6.0), "wide": (WIDE, -2.0)}
"""Modes, and the log10 loss at or below which a cell counts as good."""
MARGIN = 0.1
"""A difference beyond this many dex counts."""
INITIAL = float(np.log10(0.5))
"""Cells whose final loss is above the initial one count as diverged."""
DEEPEST = -20.0
"""Colours end here."""
COLUMNS = {
    "none": "no restart",
    "best": f"best K ≤ {MAX_PERIOD} per cell",
    "every_3": f"K={PERIOD}",
    "sgd_gain_3": f"SGD, gain of K={PERIOD}",
    "sgd_gain_best": "SGD, gain of best K",
    "sgd": "SGD, same learning rate",
}
_SHORT = dict(zip(COLUMNS, ("none", "best K", "K=3", "SGD gain K=3", "SGD gain best K", "SGD same lr"), strict=True))
_NAMES = {"HB": "Heavy ball", "NAG": "Nesterov"}
_SHOWN = ("none", "best", "every_3")
_MARKS = dict(zip(COLUMNS, (0, 2, 1, 6, 4, 7), strict=True))


def table(quick: bool = False) -> Result:
    """Compute final losses by cell, form, rule and spectrum, without and with restarts, and of the controls."""
    momenta = np.linspace(0, LARGEST_MOMENTUM, 12 if quick else 34)
    lrs = {form: np.linspace(*ends, 10 if quick else 27) for form, ends in LRS.items()}
    rows: list[dict[str, Any]] = []
    numbers: dict[str, Any] = {}
    gains = {(form, nesterov): _gains(form, nesterov, momenta) for form, nesterov in product(FORMS, KINDS.values())}
    for (spectrum, (sigma, good)), form, (kind, nesterov) in product(SPECTRA.items(), FORMS, KINDS.items()):
        cells = _cells(sigma, form, nesterov, lrs[form], momenta, gains=gains[form, nesterov])
        numbers[f"{spectrum}, {form}, {kind}"] = _facts(cells, good)
        where = {"spectrum": spectrum, "form": form, "rule": kind}
        rows += [
            where
            | {"momentum": momentum, "lr": lr, "best_period": int(cells["best_period"][i, j])}
            | {name: round(float(cells[name][i, j]), 6) for name in COLUMNS}
            for i, momentum in enumerate(momenta.tolist())
            for j, lr in enumerate(lrs[form].tolist())
        ]
    settings = {
        "rounds": ROUNDS,
        "max_period": MAX_PERIOD,
        "best": "over K = 1 to max_period and no restart",
        "momenta": momenta,
        "lrs": lrs,
        "spectra": {name: {"sigma": sigma, "good": f"log10 loss <= {good}"} for name, (sigma, good) in SPECTRA.items()},
        "diverged": "final loss above the initial 1/2",
        "loss": "log10 of 1/2 sum w x^2, equal weights of sum 1, x = 1 and m = 0 at first",
    }
    return Result(rows, numbers, settings)


def _gains(form: Form, nesterov: bool, momenta: np.ndarray) -> np.ndarray:
    """Compute mean outer gains at learning rate 1, of shape (momenta, periods)."""
    units = [OuterRule(1.0, momentum, nesterov, form) for momentum in momenta]
    return np.array([[mean_outer_gain(unit, Periodic(k), ROUNDS) for k in PERIODS] for unit in units])


def _cells(
    sigma: Any, form: Form, nesterov: bool, lrs: np.ndarray, momenta: np.ndarray, *, gains: np.ndarray
) -> dict[str, np.ndarray]:
    """Compute log10 losses by column, and the best periods; arrays of shape (momenta, learning rates)."""
    losses = log10_loss(rule_grid(lrs, momenta[:, None], nesterov, form), sigma, ROUNDS, PERIODS)
    best = np.argmin(losses, axis=0)

    def sgd(steps: np.ndarray) -> np.ndarray:
        return log10_loss(rule_grid(steps, 0.0, nesterov, form), sigma, ROUNDS)

    return {
        "none": losses[-1],
        "best": losses.min(axis=0),
        "best_period": np.array(PERIODS)[best],
        "best_restart": losses[:-1].min(axis=0),
        "every_3": losses[PERIOD - 1],
        "sgd_gain_3": sgd(lrs * gains[:, [PERIOD - 1]]),
        "sgd_gain_best": sgd(lrs * np.take_along_axis(gains, best, axis=1)),
        "sgd": np.broadcast_to(sgd(lrs), losses[0].shape),
    }


def _facts(cells: dict[str, np.ndarray], good: float) -> dict[str, Any]:
    """Compute shares of cells, and the minimum over the grid."""

    def share(condition: np.ndarray) -> float:
        return float(condition.mean())

    gain = cells["none"] - cells["every_3"]
    over_sgd = cells["sgd_gain_3"] - cells["every_3"]
    return {
        "good": {name: share(cells[name] <= good) for name in COLUMNS},
        "diverged": {name: share(cells[name] > INITIAL + 1e-9) for name in COLUMNS},
        "minimum": {name: float(cells[name].min()) for name in COLUMNS},
        "every_3_helps": share(gain > MARGIN),
        "every_3_hurts": share(gain < -MARGIN),
        "best_restart_hurts": share(cells["best_restart"] - cells["none"] > MARGIN),
        "every_3_better_than_sgd_of_its_gain": share(over_sgd > MARGIN),
        "every_3_worse_than_sgd_of_its_gain": share(over_sgd < -MARGIN),
        "best_worse_than_sgd": share(cells["best"] - cells["sgd"] > MARGIN),
    }


# -------------------------------------------------------------------------------------------------- tables and figures


def tables(result: Result) -> str:
    """Write the share of good cells by spectrum, form and rule, and where K = 3 helps and hurts."""
    keys = ("every_3_helps", "every_3_hurts", "best_restart_hurts", "best_worse_than_sgd")
    rows = [
        [name, *(f"{facts['good'][key]:.2f}" for key in _SHORT), *(f"{facts[key]:.2f}" for key in keys)]
        for name, facts in result.numbers.items()
    ]
    return f"Share of good cells after {ROUNDS} rounds:\n" + format_table(["", *_SHORT.values(), *keys], rows)


def figures(result: Result) -> dict[str, Figure]:
    """Draw heatmaps of both rules for six modes, and the shares of good cells for both spectra, with the controls."""
    figure, grid = new_figure(3.9)
    _draw_shares(grid[0][0], result)
    headline(
        figure,
        "Which cells are good, with restarts and without",
        f"share of cells of the grid with a good final loss after {ROUNDS} rounds, further right is better",
    )
    share_legend(figure, grid[0])
    return {"": _heatmaps(result, "HB"), "-nesterov": _heatmaps(result, "NAG"), "-shares": figure}


def _heatmaps(result: Result, kind: str) -> Figure:
    """Draw rows by form; columns: no restart, the best K of each cell, and K = 3; six modes."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415 - an extra, see figure.py
    from matplotlib.colors import Normalize  # noqa: PLC0415

    figure, grid = new_figure(4.9, len(FORMS), len(_SHOWN), sharey=True)
    colours = ScalarMappable(Normalize(DEEPEST, INITIAL), "viridis_r")  # light is good, as in all our heatmaps
    for row, form in zip(grid, FORMS, strict=True):
        for panel, column in zip(row, _SHOWN, strict=True):
            _draw_heatmap(panel, select(result.rows, spectrum="six modes", form=form, rule=kind), column, colours)
        row[0].set_ylabel(f"{FORM_WORDS[form]}\nmomentum")
    for panel, column in zip(grid[0], _SHOWN, strict=True):
        panel.set_title(COLUMNS[column])
    figure.supxlabel("learning rate", fontsize=8)
    bar = figure.colorbar(colours, ax=list(grid.flat), aspect=32, pad=0.01, extend="min")
    bar.set_label(f"log₁₀ loss, lower is better\n(colours end at {signed(DEEPEST, 0)})")
    bar.set_ticks([-20, -16, -12, -8, -4], labels=[signed(tick, 0) for tick in (-20, -16, -12, -8, -4)])
    bar.ax.axhline(SPECTRA["six modes"][1], color=INK, linewidth=1.2)
    headline(
        figure,
        f"{_NAMES[kind]}: with the best K per cell the good region grows; K = {PERIOD} for all moves it",
        f"log₁₀ loss after {ROUNDS} rounds of six modes, lower is better and lighter\n"
        f"outlined: good, at most {signed(SPECTRA['six modes'][1], 0)}; hatched: above the initial ½",
    )
    return figure


def _draw_heatmap(axes: Axes, rows: list[Any], column: str, colours: Any) -> None:
    lrs, momenta = (sorted({row[name] for row in rows}) for name in ("lr", "momentum"))
    values = np.array([row[column] for row in rows]).reshape(len(momenta), len(lrs))
    # What has diverged shows the hatched ground below it.
    axes.patch.set(facecolor=DIVERGED, edgecolor=HATCH, hatch="//////", linewidth=0)
    step_x, step_y = lrs[1] - lrs[0], momenta[1] - momenta[0]
    axes.imshow(
        np.ma.masked_greater(values, INITIAL + 1e-9),
        extent=(lrs[0] - step_x / 2, lrs[-1] + step_x / 2, momenta[0] - step_y / 2, momenta[-1] + step_y / 2),
        cmap=colours.cmap,
        norm=colours.norm,
        origin="lower",
        aspect="auto",
        interpolation="none",
    )
    axes.contour(lrs, momenta, np.minimum(values, 0), [SPECTRA["six modes"][1]], colors=INK, linestyles="solid")


def _draw_shares(axes: Axes, result: Result) -> None:
    for place, facts in enumerate(result.numbers.values()):
        for key, text in COLUMNS.items():
            style = look(_MARKS[key], every=1) | {"linestyle": "none", "clip_on": False, "zorder": 3}
            axes.plot([facts["good"][key]], [place], label=None if place else text, **style)
    labels = []
    for name in result.numbers:
        spectrum, form, kind = name.split(", ")
        labels.append(f"{spectrum} (≤ 10$^{{{SPECTRA[spectrum][1]:.0f}}}$), {kind}, {FORM_WORDS[form]}")
    axes.grid(axis="y", linewidth=0.4, color=HATCH)
    dot_chart(axes, labels, xlabel="share of the cells at or below the threshold", xlim=(0, 1))


def main() -> None:
    """Run the experiment."""
    compute("robustness_toy", __doc__, table, figures, tables)


if __name__ == "__main__":
    main()
