"""The bench's figure: every arm at every place against averaging, and how often each is near the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from twophase.figures.matplotlib_types import Axes, Figure
from twophase.figures.profiles import draw_profiles
from twophase.figures.style import INK, PAPER, headline, new_page, share_legend
from twophase.recipes.arms import CONTROL
from twophase.recipes.bench import CANDIDATES, NESTEROV, short
from twophase.studies._bench_expected import MAIN
from twophase.studies.study import Result

SIGNS = {"better": "+", "worse": "\N{MINUS SIGN}", "equivalent": "=", "undecided": ""}
"""What a word looks like in the map."""


def draw(result: Result) -> Figure:
    """Draw each arm's ratio to averaging at each place, with the words, and how often each is near the best."""
    figure = new_page(7.2)
    upper, lower = figure.subplots(2, 1, height_ratios=(2.3, 1))
    _map(upper, result)
    _profile(lower, result)
    share_legend(figure, [lower], columns=4)
    arms, count = result.numbers["arms"], len(MAIN)
    most = max(facts["better"] for facts in arms.values())
    first = [short(arm) for arm, facts in arms.items() if facts["better"] == most]
    finding = f"{', '.join(first)}: better than averaging at {most} of {count}" if most else "no arm is better anywhere"
    headline(figure, finding, f"{count} of {count} places; every arm tuned with the same budget, held-out seeds")
    return figure


def ranked(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Order arms by the number of places at which they are better, then by their mean ratio."""
    return sorted(arms, key=lambda arm: (-arms[arm]["better"], -(arms[arm]["mean_ratio"] or 0)))


def _map(axes: Axes, result: Result) -> None:
    from matplotlib import colormaps  # noqa: PLC0415 - an extra

    lines = {(line["arm"], line["place"]): line for line in result.rows if line["control"] == CONTROL}
    arms, places = ranked(result.numbers["arms"]), result.numbers["places"]
    values = np.full((len(arms), len(places)), math.nan)
    for i, arm in enumerate(arms):
        for j, place in enumerate(places):
            line = lines.get((arm, place))
            if line and line["ratio"]:
                values[i, j] = 100 * (line["ratio"] - 1)
    largest = max(5.0, float(np.nanmax(np.abs(values), initial=0.0)))
    colours = colormaps["PuOr"].resampled(21)  # few, because the PNG's palette is small
    axes.imshow(values, cmap=colours, vmin=-largest, vmax=largest, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        if not math.isnan(value):
            text = f"{value:+.1f} {SIGNS.get(lines[arms[i], places[j]]['word'], '')}".replace("-", "\N{MINUS SIGN}")
            colour = PAPER if abs(value) > 0.6 * largest else INK
            axes.text(j, i, text, ha="center", va="center", fontsize=6, color=colour)
    axes.set_yticks(range(len(arms)), list(map(short, arms)), fontsize=6.5)
    axes.set_xticks(range(len(places)), places, fontsize=6.5, rotation=20)
    axes.set_title("ratio to averaging less 1, %: + better, \N{MINUS SIGN} worse, = equivalent", fontsize=7.5)


def _profile(axes: Axes, result: Result) -> None:
    distances = result.numbers["behind"]
    shown = (CONTROL, *CANDIDATES, "ramp:~0.5", NESTEROV, f"{NESTEROV}+filter=orthogonal")
    last = [*(arm for arm in distances if arm not in shown), *shown]
    draw_profiles(axes, {arm: distances[arm] for arm in last}, {arm: short(arm) for arm in shown})
