"""Does a tuned restart period transfer over communication periods better than a tuned outer momentum? Paper figure 4.

Learning rate and momentum are tuned once, at the short communication period: without restarts, and with K = 3. Then, at
every period, the momentum varies without restarts, and K varies at the setting tuned without them (K*) and with them
(K**). Each restarted setting has a control without restarts at its mean outer gain. A K that is no shorter than the run
restarts nothing, and is in no number.

Source: paper section 4, figure 4, and the curves of the appendix; theory notes E12, R31.
"""

from __future__ import annotations

import argparse
from itertools import product as product_of
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common import Frame, script, show
from trainings import FORMS, METHODS, PERIOD, SCALES, Scale, ratio, references, trained
from twophase.figures.style import MUTED, headline, look, new_figure, share_legend
from twophase.recipes.controls import gain_matched, momentum_free
from twophase.rule import FORM_WORDS
from twophase.sweeps.grid import Axis, Cell, product

NAME = "fig4_retuning"
BARS = {
    "momentum": "over the momentum",
    "K*": "over K",
    "gain of K*": "no restart, mean gains of K",
}


def tuning(scale: Scale) -> list[Cell]:
    """Return the grid of learning rate and momentum at the short S, without restarts and with K = 3."""
    axes = [Axis("seed", scale.seeds), Axis("outer.momentum", scale.momenta), Axis("outer.lr", scale.lrs)]
    cells = []
    for form, method, restart in product_of(FORMS, METHODS, ("never", str(PERIOD))):
        fixed = {"inner_steps": scale.short, "outer.form": form, "outer.method": method, "outer.restart": restart}
        part = "never" if restart == "never" else f"K={PERIOD}"
        cells += product(scale.base, axes, f"{form}, {METHODS[method]}, {part}", fixed)
    return cells


def tuned(rows: Frame, form: str, method: str, part: str) -> dict[str, float]:
    """Return learning rate and momentum of the lowest perplexity; ties go to the smaller momentum, then rate."""
    here = rows[(rows["form"] == form) & (rows["method"] == method) & (rows["part"] == part)].dropna(
        subset="perplexity"
    )
    best = here.sort_values(["perplexity", "momentum", "lr"]).iloc[0]
    return {"outer.lr": float(best["lr"]), "outer.momentum": float(best["momentum"])}


def retuning(scale: Scale, rows: Frame) -> list[Cell]:
    """Return the sweeps over momentum and K at every S, from the results of `tuning`."""
    seeds, cells = Axis("seed", scale.seeds), list[Cell]()
    for inner_steps in scale.inner_steps:
        for form, method in product_of(FORMS, METHODS):
            fixed: dict[str, Any] = {"inner_steps": inner_steps, "outer.form": form, "outer.method": method}
            name = f"{form}, {METHODS[method]}"
            never, restarted = (tuned(rows, form, method, part) for part in ("never", f"K={PERIOD}"))
            plain = fixed | {"outer.lr": never["outer.lr"], "outer.restart": "never"}
            cells += product(scale.base, [seeds, Axis("outer.momentum", scale.momenta)], f"{name}, momentum", plain)
            for part, setting in {"K*": never, "K**": restarted}.items():
                axes = [seeds, Axis("outer.restart", tuple(map(str, scale.periods)))]
                sweep = product(scale.base, axes, f"{name}, {part}", fixed | setting)
                cells += sweep + gain_matched(sweep, f"{name}, gain of {part}")
        cells += momentum_free(scale.base, [seeds], scale.lrs, {"inner_steps": inner_steps, "outer.form": "sum"})
    return cells


def train(options: argparse.Namespace) -> Frame:
    """Train the tuning, then the sweeps that follow from it, in a folder of their own: a sweep's cells are fixed."""
    scale = options.scale
    first = tuning(scale)
    return trained(NAME, [*first, *retuning(scale, trained(f"{NAME}-tuning", first, options))], options)


def acting(rows: Frame) -> Frame:
    """Leave out restarts that never act, because the run has no more rounds than K."""
    period = pd.to_numeric(rows["restart"].where(rows["restart"] != "never"))
    return rows[~(period >= rows["rounds"])]


def table(rows: Frame) -> Frame:
    """Return both sweeps of each form, rule and S: best, where, worst over best, and the cost of not retuning.

    `kept` is the perplexity with the value that was best at the short S over the best of the sweep, in %.
    """
    rows, lines = acting(rows), []
    short = rows.loc[rows["part"] == "never", "inner_steps"].iloc[0]
    for (form, method), rule in rows.groupby(["form", "method"], sort=False):
        for inner_steps, here in rule.groupby("inner_steps"):
            line = {"form": form, "rule": METHODS[method], "S": inner_steps, "rounds": here["rounds"].iloc[0]}
            for part, column, name in (("momentum", "momentum", "beta"), ("K*", "restart", "K*")):
                sweep = here[here["part"] == part].set_index(column)["perplexity"]
                first = rule[(rule["part"] == part) & (rule["inner_steps"] == short)].set_index(column)["perplexity"]
                kept = 100 * (sweep.get(first.idxmin(), np.nan) / sweep.min() - 1)
                line |= {f"best {name}": sweep.min(), f"{name} at": sweep.idxmin()}
                line |= {f"{name} spread": sweep.max() / sweep.min(), f"{name} kept": kept}
            k, matched = here[here["part"] == "K*"], here[here["part"] == "gain of K*"]
            line |= {"best K**": here.loc[here["part"] == "K**", "perplexity"].min()} | references(rows, inner_steps)
            lines.append(line | {"gain-matched/K*": ratio(k, matched, ["of_restart"])})
    return pd.DataFrame(lines)


def draw(rows: Frame) -> dict[str, Figure]:
    """Draw the range of each sweep over plain averaging at the same S; a panel a form and rule."""
    rows = acting(rows)
    figure, grid = new_figure(4.6, len(FORMS), len(METHODS), sharex=True, sharey=True)
    steps = sorted(rows["inner_steps"].unique())
    for panels, form in zip(grid, FORMS, strict=True):
        for axes, (method, name) in zip(panels, METHODS.items(), strict=True):
            here = rows[(rows["form"] == form) & (rows["method"] == method)]
            for number, (part, label) in enumerate(BARS.items()):
                for place, inner_steps in enumerate(steps):
                    sweep = here.loc[(here["part"] == part) & (here["inner_steps"] == inner_steps), "perplexity"]
                    sweep = sweep / references(rows, inner_steps)["averaging"]
                    x = [place + 0.22 * (number - 1)] * len(sweep)
                    style = {"color": look(number + 1)["color"], "label": None if place else label}
                    axes.plot(x, sweep, "-", marker=look(number + 1, every=1)["marker"], linewidth=0.8, **style)
            axes.axhline(1, color=MUTED, linewidth=0.8, label="plain averaging")
            axes.set(title=f"{FORM_WORDS[form]}, {name}", yscale="log")
            axes.set_yticks([1, 1.25, 1.5, 2, 2.5], ["1", "1.25", "1.5", "2", "2.5"])
            axes.minorticks_off()
            axes.set_xticks(range(len(steps)), [str(step) for step in steps])
    for axes in grid[-1]:
        axes.set_xlabel("communication period S, inner steps")
    for axes in grid[:, 0]:
        axes.set_ylabel("perplexity over averaging's")
    headline(
        figure,
        "Flat over K, and as flat without restarts",
        "each setting of a sweep, lower is better; learning rate and momentum tuned once, without restarts",
    )
    share_legend(figure, list(grid.flat), columns=4)
    return {"": figure}


if __name__ == "__main__":
    script(__doc__, NAME, draw, train=train, scales=SCALES, report=lambda rows: show(table(rows)))
