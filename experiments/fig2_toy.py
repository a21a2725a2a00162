"""Do restarts enlarge the region of good outer learning rates and momenta? The paper's figure 2, on linear modes.

The paper states neither spectrum, horizon, grid and clipping of its heatmaps, nor a momentum-free control. Here are
both forms of the rule, six modes and a wide spectrum, and outer SGD at the same learning rate and the same mean gain.

Source: paper figure 2; theory notes E15, E16, R18, R20, R31, anchor A5.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from common import KINDS, SIX, Frame, log10_loss, script, show, signed
from twophase import theory
from twophase.figures.style import DIVERGED, HATCH, INK, headline, new_figure
from twophase.restart import Periodic, mean_outer_gain
from twophase.rule import FORM_WORDS, FORMS, Form, OuterRule

ROUNDS, PERIODS = 60, (*range(1, 21), 60)
"""Periods of which each cell's best is chosen; the last is no restart."""
MOMENTA = np.linspace(0, 0.99, 34)
LRS = {"ema": np.linspace(0.1, 4, 27), "sum": np.linspace(0.05, 2, 27)}
SPECTRA = {"six": (SIX, -6.0), "wide": (np.geomspace(0.01, 1, 12), -2.0)}
"""Modes, and the log10 loss at or below which a cell is good."""
INITIAL, MARGIN, DEEPEST = np.log10(0.5), 0.1, -20.0
"""A loss above the initial one has diverged; a difference of this many dex counts; colours end."""


def cells(sigma: Any, form: Form, nesterov: bool) -> dict[str, np.ndarray]:
    """Return log10 of the final loss by method, each of shape (momenta, learning rates)."""
    losses = log10_loss(theory.rule_grid(LRS[form], MOMENTA[:, None], nesterov, form), sigma, ROUNDS, PERIODS)
    units = [OuterRule(1.0, momentum, nesterov, form) for momentum in MOMENTA]
    gains = np.array([[mean_outer_gain(unit, Periodic(period), ROUNDS) for period in PERIODS] for unit in units])
    best_gain = np.take_along_axis(gains, losses.argmin(axis=0), axis=1)

    def sgd(lrs: np.ndarray) -> np.ndarray:
        return log10_loss(theory.rule_grid(lrs, 0.0, nesterov, form), sigma, ROUNDS)

    return {
        "none": losses[-1],
        "best_K": losses.min(axis=0),
        "K3": losses[2],
        "sgd_gain_of_K3": sgd(LRS[form] * gains[:, [2]]),
        "sgd_gain_of_best_K": sgd(LRS[form] * best_gain),
        "sgd_same_lr": np.broadcast_to(sgd(LRS[form]), losses[0].shape),
        "best_restart": losses[:-1].min(axis=0),
    }


def table() -> Frame:
    """Return shares of cells by spectrum, form and rule: good, diverged, and where K = 3 helps and hurts."""
    rows = []
    for (name, (sigma, good)), form, (kind, nesterov) in product(SPECTRA.items(), FORMS, KINDS.items()):
        loss = cells(sigma, form, nesterov)
        gain, over_sgd = loss["none"] - loss["K3"], loss["sgd_gain_of_K3"] - loss["K3"]
        shares = {method: np.mean(values <= good) for method, values in loss.items() if method != "best_restart"}
        shares |= {f"{method}_diverged": np.mean(loss[method] > INITIAL + 1e-9) for method in ("none", "best_K", "K3")}
        shares |= {
            "K3_helps": np.mean(gain > MARGIN),
            "K3_hurts": np.mean(gain < -MARGIN),
            "best_restart_hurts": np.mean(loss["best_restart"] - loss["none"] > MARGIN),
            "K3_better_than_sgd_of_its_gain": np.mean(over_sgd > MARGIN),
            "K3_worse_than_sgd_of_its_gain": np.mean(over_sgd < -MARGIN),
            "best_K_worse_than_sgd_same_lr": np.mean(loss["best_K"] - loss["sgd_same_lr"] > MARGIN),
        }
        least = {f"least_{method}": loss[method].min() for method in ("none", "best_K", "sgd_same_lr")}
        rows.append({"spectrum": name, "form": form, "rule": kind} | shares | least)
    return pd.DataFrame(rows)


def draw(_: Frame) -> dict[str, Figure]:
    """Draw heatmaps of heavy ball on six modes; rows by form."""
    sigma, good = SPECTRA["six"]
    titles = {"none": "no restart", "best_K": "best K ≤ 20 of each cell", "K3": "K = 3"}
    colours = ScalarMappable(Normalize(DEEPEST, INITIAL), "viridis_r")  # light is good, as in all heatmaps here
    figure, grid = new_figure(4.9, len(FORMS), len(titles), sharey=True)
    for row, form in zip(grid, FORMS, strict=True):
        lrs, loss = LRS[form], cells(sigma, form, False)
        x, y = (lrs[1] - lrs[0]) / 2, MOMENTA[1] / 2
        for axes, (method, title) in zip(row, titles.items(), strict=True):
            axes.patch.set(facecolor=DIVERGED, edgecolor=HATCH, hatch="//////", linewidth=0)  # shows where masked
            axes.imshow(
                np.ma.masked_greater(loss[method], INITIAL + 1e-9),
                extent=(lrs[0] - x, lrs[-1] + x, -y, MOMENTA[-1] + y),
                cmap=colours.cmap,
                norm=colours.norm,
                origin="lower",
                aspect="auto",
            )
            axes.contour(lrs, MOMENTA, np.minimum(loss[method], 0), [good], colors=INK, linestyles="solid")
            if form == FORMS[0]:
                axes.set_title(title)
        row[0].set_ylabel(f"{FORM_WORDS[form]}\nmomentum")
    figure.supxlabel("learning rate", fontsize=8)
    bar = figure.colorbar(colours, ax=list(grid.flat), aspect=32, pad=0.01, extend="min")
    bar.set_ticks([-20, -16, -12, -8, -4], labels=[signed(tick, 0) for tick in (-20, -16, -12, -8, -4)])
    bar.set_label(f"log₁₀ loss after {ROUNDS} rounds, lower is better")
    headline(
        figure,
        "The best K per cell enlarges the good region",
        f"heavy ball on six modes; outlined: at most {signed(good, 0)}; hatched: above the initial loss",
    )
    return {"": figure}


if __name__ == "__main__":
    script(__doc__, "fig2_toy", draw, table, report=lambda found: show(found.iloc[:, :9]))
