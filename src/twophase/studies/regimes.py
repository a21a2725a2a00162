"""Does what averaging's own run measures say what a change of the outer optimizer would give?

No run is made here: the rows are those of `twophase bench --regimes`. At eight places and four inner learning rates
each a treatment is held against averaging, or a restart against none. A rule is a threshold on one measured quantity
(`twophase.judge.regimes`). It is chosen on half of the places and judged on the held-out half, against the majority
sign of the first half. The page docs/bench/registration-1.md says which half, and when a rule may be used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from twophase.figures.matplotlib_types import Figure
from twophase.figures.style import MUTED, headline, look, new_page, signed
from twophase.judge.bench import results_of
from twophase.judge.cells import DataFrame, means
from twophase.judge.decision import MARGIN
from twophase.judge.regimes import Rule, fit, right
from twophase.recipes.bench import FITTED, TREATMENTS, stored
from twophase.studies.study import Result
from twophase.sweeps.table import format_table

QUESTION = "Does averaging's own run say what a momentum, a restart or a rising outer rate would give?"
AVERAGING = "averaging"
QUANTITIES = ("cosine", "early_cosine", "shrunk", "agreement")
_TICKS = (-90, -50, -20, -10, -5, 0, 5, 10, 20, 50, 100, 200, 500)
"""Per cent."""
GOAL = 0.8
"""Share of the signs that a rule must have right, and more than the majority sign has."""


def table(*, quick: bool = False) -> Result:
    """Choose a rule for each treatment on the fitted places, judge it on held-out ones; hold each arm at its best."""
    del quick  # of no meaning here
    rows = stored("regimes.csv")
    cells = cells_of(rows)
    lines: list[dict[str, Any]] = []
    rules: dict[str, Any] = {}
    for treatment in TREATMENTS:
        there = [cell for cell in cells if cell.get(treatment) is not None]
        half, other = ([cell for cell in there if (cell["place"] in FITTED) == fitted] for fitted in (True, False))
        rules[treatment] = _judged(treatment, half, other)
        lines += [
            {
                "treatment": treatment,
                **{name: cell.get(name) for name in ("place", "inner.lr", *QUANTITIES)},
                "fitted": cell["place"] in FITTED,
                "ratio": math.exp(cell[treatment]),
            }
            for cell in there
        ]
    places = list(dict.fromkeys(cell["place"] for cell in cells))
    numbers = {"places": places, "rules": rules, "at_best": at_best(rows)}
    return Result(lines, numbers, {"fitted": FITTED, "goal": GOAL, "margin": MARGIN})


def at_best(rows: Sequence[Mapping[str, str]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Hold averaging's result over each arm's, each at its own best inner learning rate, by place and treatment.

    `ratio` is above 1 where the arm is better, and `inner.lr` is the arm's best rate. `at_edge` says whether that or
    averaging's is the largest in the grid. An arm is left out where it, or averaging, diverged at every rate.
    """
    best: dict[tuple[str, str], tuple[float, float]] = {}
    largest: dict[str, float] = {}
    for (place, lr, arm), mean in means(_table(rows).map(math.log)).items():
        if math.isfinite(mean):
            best[place, arm] = min(best.get((place, arm), (math.inf, lr)), (mean, lr))
        largest[place] = max(largest.get(place, lr), lr)
    by_place: dict[str, dict[str, dict[str, Any]]] = {}
    for place, edge in largest.items():
        control = best.get((place, "observe"))
        facts = {name: best.get((place, arm)) for name, (arm, _) in {**TREATMENTS, AVERAGING: ("observe", "")}.items()}
        by_place[place] = {
            name: {
                "ratio": math.exp(control[0] - fact[0]),
                "inner.lr": fact[1],
                "at_edge": edge in (fact[1], control[1]),
            }
            for name, fact in facts.items()
            if fact and control
        }
    return by_place


def cells_of(rows: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return for each place and inner learning rate what was measured, and the gain of each treatment.

    Both are means over the seeds; a gain is a natural logarithm, infinite where one side alone diverged, and missing
    where both did.
    """
    logs, cells = means(_table(rows).map(math.log)), []
    measured = {name: means(_table(rows, name)) for name in QUANTITIES}
    for place, lr, _ in (key for key in logs if key[-1] == "observe"):
        quantities = {name: by_key[place, lr, "observe"] for name, by_key in measured.items()}
        cell: dict[str, Any] = {"place": place, "inner.lr": lr}
        cell |= {name: mean for name, mean in quantities.items() if mean < math.inf}
        for treatment, (arm, control) in TREATMENTS.items():
            mine, other = logs[place, lr, arm], logs[place, lr, control]
            if math.isfinite(mine) or math.isfinite(other):
                cell[treatment] = other - mine
        cells.append(cell)
    return cells


def _table(rows: Sequence[Mapping[str, str]], column: str = "result") -> DataFrame:
    """Arrange a column by place, inner learning rate and arm (lines) and seed, infinite where a run has no number."""
    with_rates = ({**row, "inner.lr": float(row["inner.lr"])} for row in rows)
    return results_of(with_rates, ("place", "inner.lr"), column)


def _judged(treatment: str, half: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a treatment's rule, and how many signs it has right where it was not chosen."""
    gains, others = ([cell[treatment] for cell in cells] for cells in (half, other))
    majority = Rule("", 0.0, sum(gain > 0 for gain in gains) * 2 > len(gains))
    rule = fit(half, gains, [name for name in QUANTITIES if all(name in cell for cell in (*half, *other))])
    share, by_majority = (right(each, other, others) / len(other) for each in (rule, majority))
    clear = [(cell, gain) for cell, gain in zip(other, others, strict=True) if abs(gain) > MARGIN]
    return {
        "rule": str(rule),
        "fitted": right(rule, half, gains) / len(half),
        "cells": len(other),
        "helps": sum(gain > 0 for gain in others),
        "share": share,
        "majority": by_majority,
        "clear": len(clear),
        "clear_share": right(rule, *map(list, zip(*clear, strict=True))) / len(clear) if clear else None,
        "usable": share >= GOAL and share > by_majority,
    }


def answer(result: Result) -> str:
    """Say which signs can be predicted."""
    rules = result.numbers["rules"]
    usable = [name for name, facts in rules.items() if facts["usable"]]
    head = ["change", "it helps where", "right", "majority sign", "of clear ones", "helps in"]
    body = [
        [
            name, facts["rule"], f"{facts['share']:.0%}", f"{facts['majority']:.0%}",
            "" if facts["clear_share"] is None else f"{facts['clear_share']:.0%} of {facts['clear']}",
            f"{facts['helps']} of {facts['cells']}",
        ]
        for name, facts in rules.items()
    ]  # fmt: skip
    return "\n".join(
        [
            f"Signs that can be predicted ({GOAL:.0%} right on held-out places, and more than the majority sign): "
            f"{', '.join(usable) or 'none'}.",
            f"Chosen on {', '.join(p for p in result.numbers['places'] if p in FITTED)}; judged on "
            f"{', '.join(p for p in result.numbers['places'] if p not in FITTED)}:",
            format_table(head, body),
            "Averaging's result over the arm's, each at the best of four inner learning rates, with fixed outer "
            "numbers. Mean of two seeds; above 1 the arm is better. *: it, or averaging, is best at the largest rate.",
            format_table(
                ["place", *TREATMENTS],
                [
                    [place, *(_cell(facts.get(name)) for name in TREATMENTS)]
                    for place, facts in result.numbers["at_best"].items()
                ],
            ),
        ]
    )


def _cell(facts: Mapping[str, Any] | None) -> str:
    return f"{facts['ratio']:.3f}{'*' * facts['at_edge']}" if facts else ""


def draw(result: Result) -> Figure:
    """Draw what each treatment gave over the cosine of successive pseudo-gradients."""
    figure = new_page(4.6)
    panels = figure.subplots(2, 3, sharex=True).ravel()
    for axes, treatment in zip(panels, TREATMENTS, strict=False):
        lines = [line for line in result.rows if line["treatment"] == treatment and math.isfinite(line["ratio"])]
        for fitted in (True, False):
            some = [line for line in lines if line["fitted"] == fitted and line["cosine"] is not None]
            style = look(0 if fitted else 1)
            axes.plot(
                [line["cosine"] for line in some], [100 * (line["ratio"] - 1) for line in some], linestyle="",
                marker="o" if fitted else "s", markersize=3, color=style["color"],
                label="chosen here" if fitted else "judged here",
            )  # fmt: skip
        axes.axhline(0, color=MUTED, linewidth=0.6)
        axes.set_title(treatment, fontsize=8)
        axes.set_yscale("symlog", linthresh=5)
        low, high = axes.get_ylim()
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [signed(tick, 0) for tick in ticks], minor=False)
        axes.set_yticks([], minor=True)
    for axes in panels[len(TREATMENTS) :]:
        axes.axis("off")
    panels[2].tick_params(labelbottom=True)  # nothing is below it
    panels[0].legend(fontsize=6.5)
    figure.supxlabel("cosine of successive pseudo-gradients, second half of the run", fontsize=8)
    figure.supylabel("gain, %", fontsize=8)
    usable = [name for name, facts in result.numbers["rules"].items() if facts["usable"]]
    headline(
        figure,
        f"predicted from averaging's own run: {', '.join(usable) or 'no sign'}",
        "each point a place and an inner learning rate, mean of two seeds; above 0 the change helps",
    )
    return figure
