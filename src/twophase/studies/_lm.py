"""What the language-model studies share: settings as lines, comparisons seed by seed, and words for them.

A setting is the runs of one arm that differ in the seed only. Its perplexity is the mean over its seeds and exists only
when all of them have finished. Comparisons pair equal seeds (`judge.cells`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from twophase.judge.cells import ARM, BOTH, CONTROL, MISSING, Paired, comparable, outcomes
from twophase.policies.text import parse
from twophase.recipes.controls import AVERAGING_LR, MOMENTUM_FREE, restarts_that_count
from twophase.recipes.paper import RULES, Scale
from twophase.studies.study import select
from twophase.sweeps.table import PERPLEXITY, Row, Setting, geometric_mean, readable, settings, with_unit
from twophase.tasks.named import task_label

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
        "rule": "" if free else next(kind for kind, ahead in RULES.items() if ahead == values["outer.nesterov"]),
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
        "geometric_mean": geometric_mean(ended),
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


def measure(settings: Mapping[str, Any]) -> str:
    """Return what a study's settings are judged by, of a task without perplexity its `loss`."""
    return settings.get("measure", PERPLEXITY).removeprefix("validation ")


def judged(settings: Mapping[str, Any], *, unit: bool = False) -> str:
    """Return the measure with the task that it is of, if that is not the built-in model: `loss of digits`."""
    words = with_unit(measure(settings)) if unit else measure(settings)
    return f"{words} of {task_label(settings['task'])}" if "task" in settings else words


def gap_form(settings: Mapping[str, Any]) -> str:
    """Return the format of differences; a loss may be any number of digits below 1."""
    return "+.2f" if measure(settings) == PERPLEXITY else "+.3g"


def perplexity_words(facts: Mapping[str, Any] | None) -> str:
    """Return a setting's perplexity, or why it is missing."""
    if facts is None:
        return "none"
    return readable(facts["perplexity"]) or ("div." if facts["state"] == "diverged" else str(facts["state"]))


_ALONE = {"diverged": "div.", "diverged_other": "div. of the other"}


def difference_words(facts: Mapping[str, Any] | None, form: str) -> str:
    """Return `-0.12 [-0.20, -0.03], 1 div.`: the mean over the seeds, their range, and what is in neither."""
    if facts is None:
        return "not known"
    ends = f" [{facts['min']:{form}}, {facts['max']:{form}}]" if facts["seeds"] > 1 else ""
    words = [f"{facts['mean']:{form}}{ends}"] if facts["seeds"] else []
    words += [f"{facts[side]} {short}" for side, short in _ALONE.items() if side in facts]
    return ", ".join(words)


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


def ratio_above(facts: Mapping[str, Any]) -> bool | None:
    """Return whether restarts are better by more than the margin; one that diverges alone refutes."""
    if facts["diverged_with"]:
        return False
    if facts["ratio"] is None:
        return True if facts["diverged_without"] else None
    return facts["ratio"]["mean"] > 1 + MARGIN


def lower(facts: Mapping[str, Any] | None) -> bool | None:
    """Return whether a difference is negative for every seed, None when not known; divergence is worse than all."""
    if facts is None:
        return None
    return "diverged" not in facts and (facts["seeds"] == 0 or facts["max"] < 0)


def tally(claim: str, holds: Mapping[str, bool | None], detail: Mapping[str, str]) -> str:
    """Say in which places a claim holds, with the numbers: `Holds in 2 of 3: 'claim' (sum HB yes -0.12; ...)`."""
    answers = [answer for answer in holds.values() if answer is not None]
    mixed = any(answers) and not all(answers)
    words = {True: "yes", False: "no", None: "not known"}
    parts = [
        " ".join(part for part in (place, words[answer] if mixed else "", detail[place]) if part)
        for place, answer in holds.items()
    ]
    return f"{_head(list(holds.values()))}: '{claim}' ({'; '.join(parts)})."


def tally_lower(claim: str, differences: Mapping[str, Mapping[str, Any] | None], form: str) -> str:
    """Say where differences of perplexity are negative for every seed."""
    details = {name: difference_words(facts, form) for name, facts in differences.items()}
    return tally(claim, {name: lower(facts) for name, facts in differences.items()}, details)


def tally_above(claim: str, contrasts: Mapping[str, Mapping[str, Any]]) -> str:
    """Say where restarts are better by more than the margin."""
    details = {name: ratio_words(facts) for name, facts in contrasts.items()}
    return tally(claim, {name: ratio_above(facts) for name, facts in contrasts.items()}, details)


def tally_by_group(claim: str, groups: Mapping[str, Sequence[tuple[bool | None, float | None]]], form: str) -> str:
    """Say in how many places of each group, and by what numbers: `... (sum HB 2 of 5, -0.20 to +0.10; ...)`."""
    parts = []
    for group, places in groups.items():
        answers = [answer for answer, _ in places if answer is not None]
        numbers = [number for _, number in places if number is not None]
        ends = f", {min(numbers):{form}} to {max(numbers):{form}}" if numbers else ""
        parts.append(f"{group} {sum(answers)} of {len(answers)}{ends}")
    head = _head([answer for places in groups.values() for answer, _ in places])
    return f"{head}: '{claim}' ({'; '.join(parts)})."


def _head(every: Sequence[bool | None]) -> str:
    answers = [answer for answer in every if answer is not None]
    if not answers:
        return "Not known"
    unknown = f" ({len(every) - len(answers)} not known)" if len(answers) < len(every) else ""
    if not any(answers):
        return f"Does not hold{unknown}"
    if not all(answers):
        return f"Holds in {sum(answers)} of {len(answers)}{unknown}"
    return f"Holds{' in the one place that is known' if len(answers) == 1 < len(every) else ''}{unknown}"


def seeds_words(scale: Scale) -> str:
    """Say how many seeds there are and how they are shown."""
    if len(scale.seeds) == 1:
        return f"seed {scale.seeds[0]} alone, so there is no spread to judge differences by"
    return f"{len(scale.seeds)} seeds: means, and in brackets the smallest and largest of the seeds"
