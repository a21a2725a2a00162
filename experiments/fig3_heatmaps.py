"""Do restarts enlarge the good region of outer learning rates and momenta of a small language model? Paper figure 3.

Validation perplexity without restarts, with one every 3 rounds, and without restarts at the latter's mean outer gain.
The last is the control that separates a better use of momentum from a smaller step.

Source: paper section 4, figure 3, and the last figure of the appendix; theory notes R31, E11.
"""

from __future__ import annotations

import argparse

import pandas as pd
from matplotlib.figure import Figure

from common import Frame, script, show
from trainings import FORMS, METHODS, PERIOD, SCALES, Scale, panel_of, ratio, references, trained
from twophase.figures.heatmap import Panel, heatmaps, scale_of
from twophase.recipes.controls import grid_of
from twophase.rule import FORM_WORDS
from twophase.sweeps.grid import Axis, Cell

NAME = "fig3_heatmaps"
WITHIN = 0.25
"""A setting is good when its perplexity is at most this much above the best of all of its S, relatively."""
COLUMNS = {
    "never": "no restart",
    f"K={PERIOD}": f"K = {PERIOD}",
    f"gain of K={PERIOD}": f"no restart, gain of K = {PERIOD}",
}
"""Methods by what they are called in the table."""


def plan(scale: Scale) -> list[Cell]:
    """Return the grid of learning rate and momentum for both S, forms and rules, with its controls."""
    axes = {
        "inner_steps": (scale.short, scale.long),
        "outer.form": FORMS,
        "outer.method": tuple(METHODS),
        "outer.restart": ("never", str(PERIOD)),
        "outer.momentum": scale.momenta,
        "outer.lr": scale.lrs,
        "seed": scale.seeds,
    }
    return grid_of(scale.base, [Axis(*axis) for axis in axes.items()], controls=True)


def table(rows: Frame) -> Frame:
    """Return good settings, best, worst and ratios (above 1: K = 3 is better) by S, form and rule."""
    lines = []
    for (inner_steps, form, method), here in rows.dropna(subset="form").groupby(
        ["inner_steps", "form", "method"], sort=False
    ):
        never, restarted, matched = (here[here["part"] == part] for part in COLUMNS)
        bound = rows.loc[rows["inner_steps"] == inner_steps, "perplexity"].min() * (1 + WITHIN)
        largest = restarted[restarted["momentum"] == restarted["momentum"].max()]
        lines.append(
            {"S": inner_steps, "form": form, "rule": METHODS[method], "settings": len(never)}
            | {"none": (never["perplexity"] <= bound).sum(), "K=3": (restarted["perplexity"] <= bound).sum()}
            | {"best none": never["perplexity"].min(), "best K=3": restarted["perplexity"].min()}
            | {"worst none": never["perplexity"].max(), "worst K=3": restarted["perplexity"].max()}
            | {"none/K=3": ratio(restarted, never, ["momentum", "lr"])}
            | {"at momentum 0.9": ratio(largest, never, ["momentum", "lr"])}
            | {"gain-matched/K=3": ratio(restarted, matched, ["momentum", "of_lr"])}
            | references(rows, inner_steps)
        )
    return pd.DataFrame(lines)


def draw(rows: Frame) -> dict[str, Figure]:
    """Draw heavy ball at the short S, rows by form; Nesterov's map is alike."""
    here = rows[rows["inner_steps"] == rows["inner_steps"].min()]
    figure = heatmaps(
        [[panel(here, form, "heavy-ball", part) for part in COLUMNS] for form in FORMS],
        scale_of(here["perplexity"].dropna().tolist(), WITHIN),
        title="Restarts help in sum form, and hurt in EMA form",
        reading="heavy ball's validation perplexity, lighter is better; outlined: within 25 % of the best of all",
    )
    return {"": figure}


def panel(rows: Frame, form: str, method: str, part: str) -> Panel:
    """Return a heatmap over learning rate and momentum; a control stands where what it controls does."""
    here = rows[(rows["form"] == form) & (rows["method"] == method) & (rows["part"] == part)]
    labels, momenta = ("learning rate", f"{FORM_WORDS[form]}\nmomentum"), rows.loc[rows["part"] == "never", "momentum"]
    return panel_of(here, COLUMNS[part], labels, here["of_lr"].fillna(here["lr"]), here["momentum"], every_y=momenta)


def train(options: argparse.Namespace) -> Frame:
    """Train the settings."""
    return trained(NAME, plan(options.scale), options)


if __name__ == "__main__":
    script(__doc__, NAME, draw, train=train, scales=SCALES, report=lambda rows: show(table(rows)))
