"""What the experiments with the language model share: training, settings as lines, comparisons seed by seed.

A setting is the runs of one arm that differ in the seed only. Its perplexity is the mean over its seeds and exists only
when all of them have finished. Comparisons pair equal seeds (`judge.cells`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common import Figures, Result, load, options_of, save, select, train
from paper import LAPTOP, PAPER, QUICK, RULES, Scale
from twophase.judge.cells import ARM, BOTH, CONTROL, MISSING, Paired, comparable, outcomes
from twophase.recipes.controls import AVERAGING_LR
from twophase.restart import Restart, RestartPolicy, RoundSignal, State, age_after, ask, parse
from twophase.sweeps.grid import MOMENTUM_FREE, Sweep
from twophase.sweeps.table import TABLE, Row, Setting, read_rows, readable, settings

WITHIN = 0.25
"""A setting works when its perplexity is at most this much above the best, relatively."""
MARGIN = 0.05
"""One setting is clearly better or worse than another when their perplexities differ by more than this, relatively."""
SHORT_KINDS = {"heavy ball": "HB", "Nesterov": "NAG"}

Line = dict[str, Any]
"""One setting: its place, its state, its perplexity over the seeds, and itself under `setting`."""


def lines_of(rows: Sequence[Row], scale: Scale) -> list[Line]:
    """Return the settings of a sweep, in its order, each with everything that a figure or an answer needs of it.

    A control has the learning rate and the restart of what it controls under `of_lr` and `of_restart`. `restarts`
    counts those that a run feels: 0 for a period that the run is too short for. `public` leaves `setting` out; the
    sweep's own `cells.csv` has every seed.
    """
    by_run = {row.run: row for row in rows}
    placed = []
    for row in rows:
        # Two controls of one arm may share a learning rate; what they control tells them apart.
        of = by_run[row.control_of].values if row.control_of in by_run else {}
        place = {"of_lr": of.get("outer.lr"), "of_restart": of.get("outer.restart")}
        placed.append(replace(row, values={**row.values, **place}))
    return [_line(cell, scale, [by_run[run].state for run in cell.runs]) for cell in settings(placed)]


def _line(setting: Setting, scale: Scale, states: Sequence[str]) -> Line:
    values, free = setting.values, setting.arm == MOMENTUM_FREE
    rounds = scale.rounds(values["inner_steps"])
    ended = [perplexity for perplexity in setting.results if perplexity is not None]
    return {
        "arm": setting.arm,
        "form": "" if free else values["outer.form"],
        "rule": "" if free else next(kind for kind, method in RULES.items() if method == values["outer.method"]),
        "inner_steps": values["inner_steps"],
        "rounds": rounds,
        "momentum": values["outer.momentum"],
        "lr": values["outer.lr"],
        "restart": values["outer.restart"],
        "restarts": restarts_that_count(parse(values["outer.restart"]), rounds),
        "of_lr": values["of_lr"],
        "of_restart": values["of_restart"],
        "state": setting.state,
        "perplexity": setting.result,
        "sd": setting.spread,
        "min": min(ended, default=None),
        "max": max(ended, default=None),
        "seeds": len(states),
        **{state: states.count(state) for state in ("finished", "diverged", "missing", "failed")},
        "setting": setting,
    }


def public(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return the lines as rows of a study's table."""
    return [{name: value for name, value in line.items() if name != "setting"} for line in lines]


def first(lines: Iterable[Mapping[str, Any]], **values: Any) -> Any:
    """Return the first line that has these values, or None."""
    return next(iter(select(lines, **values)), None)


def best(lines: Iterable[Line]) -> Line | None:
    """Return the line of the lowest perplexity, of equal ones that of the smaller momentum, then of the smaller lr."""
    ended = [line for line in lines if line["perplexity"] is not None]
    return min(ended, key=lambda line: (line["perplexity"], line["momentum"], line["lr"]), default=None)


def free_and_averaging(lines: Sequence[Line], inner_steps: int) -> tuple[Line | None, Line | None]:
    """Return the best momentum-free line at a communication period, and plain averaging there."""
    free = select(lines, arm=MOMENTUM_FREE, inner_steps=inner_steps)
    return best(free), first(free, lr=AVERAGING_LR)


def control_of(lines: Iterable[Line], arm: str, line: Line) -> Line | None:
    """Return the gain-matched control of a line in an arm of controls, or None."""
    place = {name: line[name] for name in ("inner_steps", "momentum")}
    return first(lines, arm=arm, of_lr=line["lr"], of_restart=line["restart"], **place)


def with_controls(lines: Iterable[Line], controls: Sequence[Line], arm: str) -> list[tuple[Line, Line]]:
    """Pair lines with their gain-matched controls; those without one are left out."""
    pairs = ((line, control_of(controls, arm, line)) for line in lines)
    return [(line, control) for line, control in pairs if control is not None]


def shown(line: Line | None) -> dict[str, Any] | None:
    """Return a line as a number with its place."""
    names = ("perplexity", "min", "max", "state", "lr", "momentum", "restart", "restarts")
    return None if line is None else {name: line[name] for name in names}


def summary(lines: Sequence[Line], bound: float | None) -> dict[str, Any]:
    """Summarize an arm; diverged and missing settings are counted, are in no mean, and lie outside the bound."""
    ended = [line["perplexity"] for line in lines if line["perplexity"] is not None]
    states = [line["state"] for line in lines]
    return {
        "settings": len(lines),
        "within": sum(value <= bound for value in ended) if bound is not None else 0,
        "diverged": states.count("diverged"),
        "missing": states.count("missing"),
        "best": shown(best(lines)),
        "worst": max(ended, default=None),
        "geometric_mean": statistics.geometric_mean(ended) if ended else None,
    }


def difference(mine: Line | None, other: Line | None) -> dict[str, Any] | None:
    """Subtract another setting's perplexity, paired by seed; None when no seed can tell.

    Seeds for which one side alone has diverged are in no mean; `diverged` (this side) and `diverged_other` count them.
    """
    if mine is None or other is None:
        return None
    pairs = Paired.of(*(outcomes([side["setting"]]).loc[0] for side in (other, mine)))
    alone = {"diverged": pairs.by_seed.count(math.inf), "diverged_other": pairs.by_seed.count(-math.inf)}
    alone = {side: count for side, count in alone.items() if count}
    return pairs.spread | {"seeds": len(pairs.finite)} | alone if pairs.finite or alone else None


def contrast(pairs: Sequence[tuple[Line, Line | None]]) -> dict[str, Any]:
    """Compare restarted settings with others, one pair each: the ratio other / restarted, above 1 where restarts win.

    Returns:
        `ratio` is the geometric mean over the pairs for each seed, then the mean over the seeds, with the seeds'
        smallest and largest. It covers pairs that have finished for all seeds on both sides (`compared`). A pair is
        `better` if the restarted run is better by more than the margin, or the other alone has diverged
        (`diverged_without`). It is `worse` the other way round; `diverged_both` and `missing` pairs are neither.
    """
    both = [(mine["setting"], other["setting"]) for mine, other in pairs if other]
    remarks, restarted, others = comparable(*(outcomes(pair[side] for pair in both) for side in (0, 1)))
    gaps = np.log(others / restarted)
    each, ratios = gaps.mean(axis=1).tolist(), Paired(tuple(Paired.over(gaps).ratios))
    return {
        "pairs": len(pairs),
        "seeds": len(ratios.by_seed),
        "ratio": ratios.spread if ratios.by_seed else None,
        "compared": len(gaps),
        "better": sum(gap > math.log(1 + MARGIN) for gap in each) + remarks.count(CONTROL),
        "worse": sum(gap < -math.log(1 + MARGIN) for gap in each) + remarks.count(ARM),
        "diverged_without": remarks.count(CONTROL),
        "diverged_with": remarks.count(ARM),
        "diverged_both": remarks.count(BOTH),
        "missing": remarks.count(MISSING) + len(pairs) - len(both),
    }


# --------------------------------------------------------------------------------------------------------------- words


def place_name(form: str, kind: str, inner_steps: int | None = None) -> str:
    """Return `sum HB S=5`, for tables and lists."""
    return f"{form} {SHORT_KINDS[kind]}" + ("" if inner_steps is None else f" S={inner_steps}")


def perplexity_words(facts: Mapping[str, Any] | None) -> str:
    """Return a setting's perplexity, or why it is missing."""
    if facts is None:
        return "none"
    return readable(facts["perplexity"]) or ("div." if facts["state"] == "diverged" else str(facts["state"]))


def ratio_words(facts: Mapping[str, Any]) -> str:
    """Return `1.08 [1.05, 1.11], 2 div. without`: the mean over the seeds, their range, and what is in no ratio."""
    ratio, words = facts["ratio"], []
    if ratio is not None:
        ends = f" [{ratio['min']:.2f}, {ratio['max']:.2f}]" if facts["seeds"] > 1 else ""
        words.append(f"{ratio['mean']:.2f}{ends}")
    for which in ("without", "with", "both"):
        words += [f"{facts[f'diverged_{which}']} div. {which}"] if facts[f"diverged_{which}"] else []
    words += [f"{facts['missing']} missing"] if facts["missing"] else []
    return ", ".join(words) or "no pair"


def change_words(facts: Mapping[str, Any]) -> str:
    """Return `+0.3% ± 0.2%`: a geometric mean ratio as a change, with its standard error."""
    if facts["ratio"] is None:
        return ""
    error = "" if facts["error"] is None else f" \N{PLUS-MINUS SIGN} {facts['error']:.1%}"
    return f"{facts['ratio'] - 1:+.1%}{error}"


# ------------------------------------------------------------------------------------------------------------ training


def experiment(
    name: str,
    plan: Callable[[Scale, Sequence[Row]], Sweep],
    table: Callable[[Sequence[Row], Scale], Result],
    *,
    figures: Figures,
    tables: Callable[[Result], str],
) -> None:
    """Train what an experiment lacks, write its files and print its tables; the options are the command line's.

    Args:
        name: name of the experiment.
        plan: returns the sweep of a scale, given the rows so far.
        table: returns the result of the rows of the sweep's table.
        figures: draws a result.
        tables: writes a result.
    """
    options = options_of(sys.modules["__main__"].__doc__, trains=True).parse_args()
    if options.redraw:  # of the numbers, those in the figures are stored
        print(*save(name, options.out, load(name), figures), sep="\n")
    else:
        scale, folder = place_of(name, options)
        rows = train_in_stages(partial(plan, scale), folder, workers=options.workers, runs=options.out / "runs")
        result = table(rows, scale)
        print(tables(result), *save(name, options.out, result, figures), sep="\n")


def place_of(name: str, options: argparse.Namespace) -> tuple[Scale, Path]:
    """Return the scale that is asked for, and the folder of its sweep."""
    scale = QUICK if options.quick else PAPER if options.paper else LAPTOP
    return scale, options.out / (name if scale is LAPTOP else f"{name}-{scale.name}")


def train_in_stages(plan: Callable[[Sequence[Row]], Sweep], folder: Path, *, workers: int, runs: Path) -> list[Row]:
    """Train what a plan lacks, and go on as long as the results add cells; return the rows of the table."""
    # a folder that has reached a later stage belongs to the larger sweep
    rows = read_rows(folder / TABLE) if (folder / TABLE).is_file() else []
    cells = 0
    while len((sweep := plan(rows)).cells) > cells:
        cells = len(sweep.cells)
        rows = train(sweep, folder, workers=workers, runs=runs)
    return rows


def restarts_that_count(policy: RestartPolicy, rounds: int) -> int:
    """Count the restarts of a policy that affect a run; one after the last round changes nothing.

    Args:
        policy: one that decides from the round alone.
        rounds: length of the run, >= 1.

    Raises:
        ValueError: an adaptive policy, which decides from what a run measures.

    >>> from twophase.restart import Periodic
    >>> [restarts_that_count(Periodic(k), 6) for k in (2, 3, 5, 6, 7)]
    [2, 1, 1, 0, 0]
    """
    if policy.needs:
        raise ValueError(f"restarts_that_count: {policy} decides from measured signals; it cannot be known in advance")
    state: State = {}
    age = count = 0
    for number in range(1, rounds):
        state, decision, _ = ask(policy, state, RoundSignal(number, age + 1))
        age, count = age_after(decision, age + 1), count + isinstance(decision, Restart)
    return count
