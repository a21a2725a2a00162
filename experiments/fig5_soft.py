"""Is a soft restart, which keeps a share of the buffer and adds to it, worth its two more hyperparameters?

Perplexity over the share of the buffer that is kept and the weight with which the pseudo-gradient is added. The rule is
Nesterov with learning rate 0.9 and momentum 0.7, at a short and a long communication period. Coefficients act on the
buffer of the rule's own form, so an equal weight is relatively weaker in the sum form.

Source: paper appendix, the soft restart sweeps; theory notes R26, R27, E14.
"""

from __future__ import annotations

import argparse

import pandas as pd
from matplotlib.figure import Figure

from common import Frame, script, show
from trainings import FORMS, SCALES, Scale, panel_of, ratio, references, trained
from twophase.config import update
from twophase.figures.heatmap import Panel, heatmaps, scale_of
from twophase.recipes.controls import grid_of
from twophase.rule import FORM_WORDS
from twophase.sweeps.grid import Axis, Cell

NAME = "fig5_soft"


def plan(scale: Scale) -> list[Cell]:
    """Return soft restarts over kept share and added weight, and their controls; K is 5 at the short S, else 3."""
    base = update(scale.base, {"outer.method": "nesterov", "outer.lr": 0.9, "outer.momentum": 0.7})
    cells = []
    for inner_steps, period in ((scale.short, 5), (scale.long, 3)):
        soft = [f"soft:{period}:{kept}:{added}" for kept in scale.retain for added in scale.inject if kept or added]
        axes = {
            "inner_steps": (inner_steps,),
            "outer.form": FORMS,
            "outer.restart": ("never", str(period), *soft),
            "seed": scale.seeds,
        }
        cells += grid_of(base, [Axis(*axis) for axis in axes.items()], controls=True)
    return cells


def coefficients(restart: Frame) -> Frame:
    """Return kept share and added weight of restarts; keeping and adding nothing is the hard restart."""
    parts = restart.str.extract(r"^soft:\d+:(?P<kept>[^:]+):(?P<added>.+)$").astype(float)
    return parts.fillna(0.0).where(restart.notna() & (restart != "never"))


def table(rows: Frame) -> Frame:
    """Return the best soft restart beside the others, by S and form; a ratio above 1 is for soft restarts."""
    lines = []
    for (inner_steps, form), here in rows.dropna(subset="form").groupby(["inner_steps", "form"], sort=False):
        matched, own = here[here["of_restart"].notna()], here[here["of_restart"].isna()]
        never, restarted = own[own["restart"] == "never"], own[own["restart"] != "never"]
        soft = restarted[restarted["restart"].str.startswith("soft")]
        best = soft.loc[soft["perplexity"].idxmin()]
        kept, added = coefficients(soft["restart"]).loc[best.name]
        lines.append(
            {"S": inner_steps, "form": form, "soft": best["perplexity"], "keeps": kept, "adds": added}
            | {"hard": restarted.drop(soft.index)["perplexity"].iloc[0], "never": never["perplexity"].iloc[0]}
            | {"gain-matched": matched.loc[matched["of_restart"] == best["restart"], "perplexity"].mean()}
            | {"gain-matched/soft": ratio(restarted, matched, ["of_restart"])}
            | references(rows, inner_steps)
        )
    return pd.DataFrame(lines)


def draw(rows: Frame) -> dict[str, Figure]:
    """Draw the short S: soft restarts, and their gain-matched controls; rows by form."""
    here = rows[rows["inner_steps"] == rows["inner_steps"].min()]
    columns = {"restart": "restart every 5 rounds", "of_restart": "no restart, same mean gain"}
    figure = heatmaps(
        [[panel(here[here["form"] == form], form, *column) for column in columns.items()] for form in FORMS],
        scale_of(here["perplexity"].dropna().tolist(), 0.0),
        title="Soft restarts are mostly another step size",
        reading="validation perplexity, lower is better and lighter; bottom left: the hard restart",
    )
    return {"": figure}


def panel(rows: Frame, form: str, restart: str, title: str) -> Panel:
    """Return a heatmap over kept share and added weight, which are those of a column of restarts."""
    at = coefficients(rows[restart]).dropna()
    labels = "weight of the pseudo-gradient that is added", f"{FORM_WORDS[form]}\nkept share"
    return panel_of(rows.loc[at.index], title, labels, at["added"], at["kept"], every_y=at["kept"])


def train(options: argparse.Namespace) -> Frame:
    """Train the settings."""
    return trained(NAME, plan(options.scale), options)


if __name__ == "__main__":
    script(__doc__, NAME, draw, train=train, scales=SCALES, report=lambda rows: show(table(rows)))
